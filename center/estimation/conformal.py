"""How wide early answers' intervals have to be, by how far past ones were off. Pure.

The model takes records for independent. They are not where a reader takes in many at a time, or where records that come
together are alike (logs have runs of one client). No model knows them all; but what an early answer was off by is
known when its window is final. So intervals are widened by the quantile of past errors, in units of the model's own
half-width (split conformal prediction, Vovk et al. 2005), and never narrowed: a quiet past promises nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from edgewater.accuracy import GroupScope

RECORD = 400
"""Windows that are remembered."""
LEAST = 20
"""Windows before anything is made of them."""
WIDEST = 4.0


class IntervalRecord:
    """Of one query.

    Args:
        confidence: that intervals are to hold with, each or all of a window at once.
    """

    def __init__(self, confidence: float, scope: GroupScope | None) -> None:
        self._confidence, self._of_all = confidence, scope == "all"
        self._windows: deque[list[float]] = deque(maxlen=RECORD)
        self._widening: float | None = 1.0  # None: not known since a window came

    @property
    def widening(self) -> float:
        """How many times as wide as the model says, from 1."""
        if self._widening is None:
            self._widening = self._learnt()
        return self._widening

    def note(self, ratios: Sequence[float]) -> None:
        """A window's intervals: by group, how far off the estimate was, in half-widths of the model."""
        if ratios:
            self._windows.append(list(ratios))
            self._widening = None

    def _learnt(self) -> float:
        if len(self._windows) < LEAST:
            return 1.0
        errors = sorted(map(max, self._windows) if self._of_all else (r for each in self._windows for r in each))
        rank = min(math.ceil((len(errors) + 1) * self._confidence), len(errors))
        return min(max(errors[rank - 1], 1.0), WIDEST)

    def to_state(self) -> list[list[float]]:
        """JSON."""
        return [list(each) for each in self._windows]

    def restore(self, state: Sequence[Sequence[float]]) -> None:
        for each in state:
            self.note(each)
