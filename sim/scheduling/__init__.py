"""The production scheduler under a virtual clock: benchmarks' queries, arrivals and true costs are simulated.

`edgewater simulate scheduling` and `bench.scheduling` run experiments (`engine.run`).
"""
