"""Exact aggregates per group: count, sum, minimum, maximum, mean, variance.

The query functions `count`, `sum`, `min`, `max`, `mean` and `var` build them. Their states are a few numbers per group.
Under an error budget, an edge may withhold states that have an error function (`BoundedError`).
"""
