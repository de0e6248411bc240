"""The drift rates of a query's measures at this edge, by which the center divides an error budget. Pure.

If all drift of all groups were sent in updates of one share each, bytes would be b·r/E, with r the total drift rate and
E the share. But a group that changes by less than E in a window is never sent. A group that changes by far more is sent
once, whatever the share. Only the groups between these two determine how many bytes a larger share saves. So r is
defined such that the law b·r/E holds for them: with N(e) updates of more than e, N(E/2) − N(2E) = 1.5·r/E. Measured in
`bench/shares.py`: with the total drift as r, small budgets cost 2–5 % more than an equal split.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from edgewater.base.streams import MAX_TIME_MS
from edgewater.synopses import FloatArray

MAX_DRIFT = 1e200
"""The drift of a slice counts as at most this, so that sums over slices stay finite."""
MEMORY_WINDOWS = 5
"""Time constant of the rates, in windows. It smooths the noise of the load, and follows its daily cycle."""


def estimate_drift(errors: FloatArray, share: float) -> float:
    """Returns the drift r of a slice.

    Args:
        errors: float64, the error of each group when it was sent, or was withheld at the slice's close.
        share: the share at that time. With 0 there is no estimate, and the total drift is returned.
    """
    sizes = np.abs(errors[np.isfinite(errors)])
    if share <= 0.0:
        with np.errstate(over="ignore"):
            return float(min(sizes.sum(), MAX_DRIFT))
    return float(share * np.count_nonzero((sizes > share / 2) & (sizes <= 2 * share)) / 1.5)


class DriftRates:
    """Drift rates, computed from running totals against the event time up to which slices are closed.

    Args:
        window_ms: length of the query's window. Shorter spans are too short for a rate, and are not used.

    Attributes:
        per_s: per measure, in its unit per second of event time; empty: unknown.
    """

    def __init__(self, window_ms: int) -> None:
        self._window_ms = window_ms
        self._at_ms: int | None = None
        self._totals: dict[str, float] = {}
        self.per_s: dict[str, float] = {}

    def update(self, totals: Mapping[str, float], through_ms: int) -> None:
        """Updates the rates. Called when all slices up to `through_ms` are closed.

        Args:
            totals: running totals of the drift, per measure.
        """
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
