"""Quantiles and ranks per group: DDSketch (relative error of the value) and KLL (error of the rank).

The query functions `quantiles` and `kll` build them. `histograms.equi_depth` is a view of a DDSketch.
"""

from edgewater.synopses.quantiles.ddsketch import DDSketch, DDSketchStack
from edgewater.synopses.quantiles.kll import Kll, KllStack

__all__ = ["DDSketch", "DDSketchStack", "Kll", "KllStack"]
