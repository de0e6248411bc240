"""Exact aggregates per group: count, sum, minimum, maximum, mean, variance.

The query functions `count`, `sum`, `min`, `max`, `mean` and `var` build them. Their states are a few numbers per
group; those with an error function (`BoundedError`) are what an edge may withhold under an error budget.
"""

from edgewater.synopses.exact.aggregates import (
    CountStack,
    ExtremumStack,
    FloatSumStack,
    IntegerSumStack,
    MaxStack,
    MeanStack,
    MinStack,
    SumStack,
    VarianceStack,
)

__all__ = [
    "CountStack",
    "ExtremumStack",
    "FloatSumStack",
    "IntegerSumStack",
    "MaxStack",
    "MeanStack",
    "MinStack",
    "SumStack",
    "VarianceStack",
]
