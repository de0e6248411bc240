"""Partitioning: which entries are in the primary cache, from which entries are sent.

Error-bound (TR 16-003, section 5.2): an entry is promoted when error(F, F ⊕ V) exceeds the error that this edge may
withhold, so nothing is sent unnecessarily. An exact query has the limit 0, but its entries are promoted when anything
is pending, because a record may change a value by 0 and still has to be counted.

A relative limit ε allows |F ⊕ V − F| ≤ ε·|F ⊕ V|. If all values of a group have one sign, the limit then also holds for
the sum over edges and slices. So a relative limit is not divided among edges and slices. If an edge has groups of both
signs in a slice, it withholds nothing of the measure, because values of one group may cancel. Nothing is withheld of a
group whose true value is 0, infinite or NaN. (At the center, relative error is |V̂ − V| / max(|V|, 1): below one unit
of the measure the error counts as absolute.)
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edge.cache.entries import SliceEntries
from edgewater.synopses import BoolArray, FloatArray, IntArray
from edgewater.wire import Signs


class ErrorLimits:
    """The largest error of each measure that a slice may withhold, per group.

    Args:
        absolute: this edge's share of the error budget of this slice, per measure.
        relative: per measure, a fraction of the group's own value.
    """

    def __init__(self, absolute: Mapping[str, float], relative: Mapping[str, float] | None = None) -> None:
        self.absolute = dict(absolute)
        self.relative = dict(relative or {})

    @property
    def measures(self) -> list[str]:
        return [*self.absolute, *self.relative]

    @property
    def is_exact(self) -> bool:
        """Whether nothing may be withheld: there is no limit, or the limit of some measure is 0."""
        return not self.measures or min([*self.absolute.values(), *self.relative.values()]) <= 0.0

    def for_values(self, measure: str, values: FloatArray) -> FloatArray:
        """Returns the largest |error| per group, for the groups' values; 0 for a value that is not finite."""
        if measure in self.absolute:
            return np.full(len(values), self.absolute[measure])
        return np.where(np.isfinite(values), self.relative[measure] * np.abs(values), 0.0)


def primary_mask(
    entries: SliceEntries, limits: ErrorLimits, margin: float = 1.0, groups: IntArray | None = None
) -> BoolArray:
    """Returns a mask over the groups (None: all): which are in the primary cache.

    Args:
        margin: the fraction of its limit that a group must have used up; 0.5: half of the limit.
    """
    pending = entries.has_pending if groups is None else entries.has_pending[groups]
    if limits.is_exact:
        return pending
    over = np.zeros(len(pending), bool)
    for measure in limits.measures:
        # An absolute limit is the same for all groups. It does not need the groups' values.
        limit = limits.absolute.get(measure)
        if limit is not None:
            over |= entries.exceeds(measure, margin * limit, groups)
        elif entries.signs(measure) is Signs.BOTH:
            # values of both signs may cancel, so nothing of the measure is withheld
            over |= entries.exceeds(measure, 0.0, groups)
        else:
            error = np.abs(entries.accumulated_error(measure, groups))
            over |= error > margin * limits.for_values(measure, entries.total(measure, groups))
    return over & pending
