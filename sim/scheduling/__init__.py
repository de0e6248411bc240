"""The production scheduler under a virtual clock: benchmarks' queries, arrivals and true costs are simulated.

`bench.scheduling` runs experiments (`engine.run`).
"""
