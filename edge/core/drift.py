"""How fast a query's measures move at this edge: what the center divides an error budget by. Pure.

Were every group's drift spent in updates of one share each, bytes would be b·r/E, with r the whole drift. But a
group that moves by less than the share in a window is never sent, and one that moves by far more is sent once
whatever the share. What a little more share would save is told by the groups in between. So r is
taken as what makes the law b·r/E fit there: with N(e) updates of more than e, N(E/2) − N(2E) = 1.5·r/E.
Measured in `bench/shares.py`: with the whole drift as r, small budgets cost 2–5 % more than an equal split.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from edgewater.streams import MAX_TIME_MS
from edgewater.synopses import FloatArray

MEMORY_WINDOWS = 5
"""Rates follow the load with a time constant of so many windows: slower than its noise, faster than its day."""


def drift_near(errors: FloatArray, share: float) -> float:
    """The drift r of a slice by its groups' errors when they left, or were kept back at its close.

    Args:
        share: under which that was; 0 gives the whole drift, for want of a better guess.
    """
    sizes = np.abs(errors[np.isfinite(errors)])
    if share <= 0.0:
        return float(sizes.sum())
    return float(share * np.count_nonzero((sizes > share / 2) & (sizes <= 2 * share)) / 1.5)


class DriftMeter:
    """Rates from totals that only rise, against the event time they have been closed up to.

    Args:
        window_ms: the query's; less than one says little of a rate, and is not used.
    """

    def __init__(self, window_ms: int) -> None:
        self._window_ms = window_ms
        self._at_ms: int | None = None
        self._totals: dict[str, float] = {}
        self.per_s: dict[str, float] = {}
        """Per measure, in its unit per second of event time; empty: not known yet."""

    def note(self, totals: Mapping[str, float], through_ms: int) -> None:
        """The totals as they stand with everything up to `through_ms` closed."""
        if not -MAX_TIME_MS < through_ms < MAX_TIME_MS:
            return
        if self._at_ms is not None:
            span_ms = through_ms - self._at_ms
            if span_ms < self._window_ms:
                return
            weight = 1.0 - math.exp(-span_ms / (MEMORY_WINDOWS * self._window_ms)) if self.per_s else 1.0
            for measure, total in totals.items():
                rate = (total - self._totals.get(measure, 0.0)) * 1000.0 / span_ms
                before = self.per_s.get(measure, rate)
                self.per_s[measure] = before + weight * (rate - before)
        self._at_ms, self._totals = through_ms, dict(totals)
