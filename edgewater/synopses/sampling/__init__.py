"""Samples of records per group: reservoir, Bernoulli, FIFO, biased reservoir, and rows for functions of samples.

The query functions `reservoir`, `bernoulli`, `fifo`, `biased`, `kmeans` and `exact_quantile` build them. A hash of a
record's identity decides whether the record is sampled, never a random generator. So samples merge exactly and replays
repeat them.
"""
