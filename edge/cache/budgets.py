"""Partitioning: which entries are in the primary cache, and so may be sent.

Error-bound (TR 16-003, section 5.2): an entry is promoted when error(F, F ⊕ V) exceeds this edge's
share of the budget, so nothing is ever sent that need not be. Exact is the same with a share of 0,
but decided by what is pending, because a value may change by 0 and still have to be counted.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edge.cache.entries import SliceEntries
from edgewater.synopses.base import BoolArray


def primary(entries: SliceEntries, shares: Mapping[str, float]) -> BoolArray:
    """Mask over the groups: which may be sent.

    Args:
        shares: this edge's share of the error budget per bounded measure, for this slice; a share
            of 0 on any measure makes the slice exact. Empty: exact.
    """
    pending = entries.has_pending
    if not shares or min(shares.values()) <= 0.0:
        return pending
    over = np.zeros(len(pending), bool)
    for measure, share in shares.items():
        over |= np.abs(entries.accumulated_error(measure)) > share
    return over & pending
