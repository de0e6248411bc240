"""How much wider than the model says the intervals of early answers must be, from the errors of past answers.

The model assumes independent records. They are dependent where a reader takes in many records at a time, or where
adjacent records are similar (logs have runs of one client). No model covers all such cases; but the error of an early
answer is known when its window is final. So intervals are widened by the quantile of past errors, in units of the
model's own half-width (split conformal prediction, Vovk et al. 2005). They are never narrowed: a period of small errors
guarantees nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from edgewater.accuracy import GroupScope

MAX_WINDOWS = 400
"""Windows that are kept."""
MIN_WINDOWS = 20
"""Windows before intervals are widened."""
MAX_WIDENING = 4.0


class ConformalRecord:
    """The errors of one query's early answers.

    Args:
        confidence: of each interval, or with scope "all" of all intervals of a window simultaneously.
    """

    def __init__(self, confidence: float, scope: GroupScope | None) -> None:
        self._confidence, self._is_simultaneous = confidence, scope == "all"
        self._windows: deque[list[float]] = deque(maxlen=MAX_WINDOWS)
        self._widening: float | None = 1.0  # None: out of date

    @property
    def widening(self) -> float:
        """The factor, from 1, by which the model's half-widths are multiplied."""
        if self._widening is None:
            self._widening = self._quantile()
        return self._widening

    def add(self, ratios: Sequence[float]) -> None:
        """Adds a window: by group, the error of the estimate in half-widths of the model."""
        if ratios:
            self._windows.append(list(ratios))
            self._widening = None

    def _quantile(self) -> float:
        if len(self._windows) < MIN_WINDOWS:
            return 1.0
        simultaneous = map(max, self._windows)
        errors = sorted(simultaneous if self._is_simultaneous else (r for each in self._windows for r in each))
        rank = min(math.ceil((len(errors) + 1) * self._confidence), len(errors))
        return min(max(errors[rank - 1], 1.0), MAX_WIDENING)

    def to_state(self) -> list[list[float]]:
        """JSON."""
        return [list(each) for each in self._windows]

    def restore(self, state: Sequence[Sequence[float]]) -> None:
        for ratios in state:
            self.add(ratios)
