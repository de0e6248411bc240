"""Quantiles and ranks per group: DDSketch (relative error of the value) and KLL (error of the rank).

The query functions `quantiles` and `kll` build them. `histograms.equi_depth` is a view of a DDSketch.
"""
