"""Histograms per group: equi-width bins over a fixed range, and equi-depth buckets as a view of a DDSketch.

The query functions `equi_width` (also `histogram`) and `equi_depth` build them.
"""
