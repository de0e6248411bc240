"""Error and staleness budgets under a virtual clock: production edges, offline optima and baselines on one trace.

`sim.plan` and `bench.budgets` run experiments (`experiment.run`). The package reads no clock, and no files except
traces.
"""
