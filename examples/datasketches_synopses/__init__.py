"""Apache DataSketches' HLL and KLL as synopses of Edgewater: an example of what a package of yours would bring.

    [project.entry-points."edgewater.synopses"]
    datasketches = "examples.datasketches_synopses:SYNOPSES"

Then a query may ask for ``ds_hll(client)`` and ``ds_kll(latency)``. `docs/how-to/your-own-synopsis.md` explains
how it is done, on a smaller synopsis.
"""

from __future__ import annotations

from .hll import DS_HLL, DataSketchesHll, HllStack
from .kll import DS_KLL, DataSketchesKll, KllStack

SYNOPSES = (DS_HLL, DataSketchesHll, DS_KLL, DataSketchesKll)

__all__ = ["DS_HLL", "DS_KLL", "SYNOPSES", "DataSketchesHll", "DataSketchesKll", "HllStack", "KllStack"]
