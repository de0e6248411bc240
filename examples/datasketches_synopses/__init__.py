"""Apache DataSketches' HLL and KLL as synopses of Edgewater: an example of a third-party package.

    [project.entry-points."edgewater.synopses"]
    datasketches = "examples.datasketches_synopses:SYNOPSES"

With this entry point a query may use ``ds_hll(client)`` and ``ds_kll(latency)``. `docs/how-to/your-own-synopsis.md`
explains the steps with a smaller synopsis. The package imports the facade of `edgewater.synopses` and its codec.
"""

from __future__ import annotations

from .hll import DS_HLL, DataSketchesHll, HllStack
from .kll import DS_KLL, DataSketchesKll, KllStack

SYNOPSES = (DS_HLL, DataSketchesHll, DS_KLL, DataSketchesKll)

__all__ = ["DS_HLL", "DS_KLL", "SYNOPSES", "DataSketchesHll", "DataSketchesKll", "HllStack", "KllStack"]
