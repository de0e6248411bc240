"""How much wider than the model says the intervals of early answers must be, from the errors of past answers.

The model assumes independent records. They are dependent where a reader takes in many records at a time, or where
adjacent records are similar (logs have runs of one client). No model covers all such cases; but the error of an early
answer is known when its window is complete. So intervals are widened by the quantile of past errors, in units of the
model's own half-width (split conformal prediction, Vovk et al. 2005). They are never narrowed: a period of small errors
guarantees nothing.

Errors that come in runs, as after a change, are no sample of the next one. So the quantile's level follows the misses:
each miss raises it, and each interval that held lowers it (adaptive conformal inference, Gibbs and Candès 2021).
Whatever the cause of the errors, as long as `MAX_WIDENING` would contain them, there are at most
(1 - confidence)/γ + 1 misses more than the confidence allows, over any number of windows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from edgewater.model.accuracy import GroupScope

MAX_WINDOWS = 400
"""Windows that are kept."""
MAX_WIDENING = 4.0
STEP = 0.02
"""γ of adaptive conformal inference."""


class ConformalRecord:
    """The errors of one query's early answers.

    Args:
        confidence: of each interval, or with scope "all" of all intervals of a window simultaneously.
    """

    def __init__(self, confidence: float, scope: GroupScope | None) -> None:
        self._failures, self._is_simultaneous = 1 - confidence, scope == "all"
        self._windows: dict[int, list[float]] = {}
        self._level = self._failures  # the share of misses to allow from now on
        self._widening: float | None = 1.0  # None: out of date

    @property
    def widening(self) -> float:
        """The factor, from 1, by which the model's half-widths are multiplied."""
        if self._widening is None:
            self._widening = self._quantile()
        return self._widening

    def add(self, start_ms: int, ratios: Sequence[float], widening: float) -> None:
        """Adds a window, or replaces its errors by later ones.

        Args:
            ratios: by group, the error of the estimate in half-widths of the model.
            widening: that its intervals had.
        """
        if not ratios:
            return
        if start_ms not in self._windows:
            misses = [ratio > widening for ratio in self._errors(ratios)]
            # Credit for intervals that held is limited to the miss of one window.
            level = self._level + STEP * (self._failures - sum(misses) / len(misses))
            self._level = min(max(level, -STEP), self._failures + STEP)
        self._windows[start_ms] = list(ratios)
        if len(self._windows) > MAX_WINDOWS:
            del self._windows[next(iter(self._windows))]
        self._widening = None

    def _errors(self, ratios: Sequence[float]) -> Sequence[float]:
        return [max(ratios)] if self._is_simultaneous else ratios

    def _quantile(self) -> float:
        if self._level < 0:
            return MAX_WIDENING
        errors = sorted(error for ratios in self._windows.values() for error in self._errors(ratios))
        rank = min(math.ceil((len(errors) + 1) * (1 - min(self._level, self._failures))), len(errors))
        return min(max(errors[rank - 1], 1.0), MAX_WIDENING)

    def to_state(self) -> dict[str, Any]:
        """JSON."""
        return {"level": self._level, "windows": [[start, *ratios] for start, ratios in self._windows.items()]}

    def restore(self, state: Mapping[str, Any] | Sequence[Sequence[float]]) -> None:
        """Restores `to_state`, or what it was before errors had the start of their window: lists of ratios."""
        if not isinstance(state, Mapping):
            state = {"level": self._level, "windows": [[-n, *ratios] for n, ratios in enumerate(state, 1)]}
        self._level = float(state["level"])
        self._windows = {int(start): ratios for start, *ratios in state["windows"]}
        self._widening = None if self._windows else 1.0
