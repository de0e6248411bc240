"""The scheduler of the thesis (Klink) on simulated workers under a virtual clock, and its benchmarks.

Arrivals and the true costs of queries are simulated; `engine.run` runs an experiment.
"""
