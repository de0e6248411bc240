"""Partitioning: which entries are in the primary cache, and so may be sent.

Error-bound (TR 16-003, section 5.2): an entry is promoted when error(F, F ⊕ V) exceeds what this edge may
keep back, so nothing is sent that need not be. Exact is the same with nothing to keep back, but decided by
what is pending, because a value may change by 0 and still have to be counted.

A relative limit ε allows |F ⊕ V − F| ≤ ε·|F ⊕ V|. Where all values of a group have one sign, that holds
for the sum over edges and slices too, so a relative limit is not divided among them. Where an edge has groups of
either sign in a slice it keeps back nothing of the measure: parts of one group may cancel. At a true value of
0 nothing is kept back. (At the center, relative error is |V̂ − V| / max(|V|, 1): below one unit of the
measure the error counts as absolute.)
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edge.cache.entries import SliceEntries
from edgewater.synopses import BoolArray, FloatArray, IntArray


class Limits:
    """What of each measure a slice may keep back, per group.

    Args:
        absolute: this edge's share of the error budget per bounded measure, for this slice.
        relative: per measure, a fraction of the group's own value.
    """

    def __init__(self, absolute: Mapping[str, float], relative: Mapping[str, float] | None = None) -> None:
        self.absolute = dict(absolute)
        self.relative = dict(relative or {})

    @property
    def measures(self) -> list[str]:
        return [*self.absolute, *self.relative]

    @property
    def exact(self) -> bool:
        """Is nothing to be kept back? So if any measure's limit is 0, or there is none."""
        return not self.measures or min([*self.absolute.values(), *self.relative.values()]) <= 0.0

    def of(self, measure: str, values: FloatArray) -> FloatArray:
        """The largest |error| per group, given the groups' values."""
        if measure in self.absolute:
            return np.full(len(values), self.absolute[measure])
        return np.asarray(self.relative[measure] * np.abs(values), np.float64)


def primary(entries: SliceEntries, limits: Limits, margin: float = 1.0, groups: IntArray | None = None) -> BoolArray:
    """Mask over the groups (None: all): which may be sent because they must be.

    Args:
        margin: 0.5 also counts those that have used up half of their limit.
    """
    pending = entries.has_pending if groups is None else entries.has_pending[groups]
    if limits.exact:
        return pending
    over = np.zeros(len(pending), bool)
    for measure in limits.measures:
        error = np.abs(entries.accumulated_error(measure, groups))
        # An absolute limit is the same for all groups, so their values need not be known.
        limit = limits.absolute.get(measure)
        if limit is not None:
            over |= error > margin * limit
        elif entries.has_both_signs(measure):
            over |= error > 0.0  # a sum of parts that cancel is smaller than what is allowed of them
        else:
            over |= error > margin * limits.of(measure, entries.total(measure, groups))
    return over & pending
