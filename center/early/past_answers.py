"""`PastAnswers` stores the answers to windows that are not final, and the errors of past answers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from center.early.calibration import ConformalRecord
from center.early.window_prediction import GroupPrediction, Prediction
from edgewater.arrivals.targets import EXTREMES
from edgewater.model.accuracy import Accuracy

COVERAGE_WINDOWS = 400  # limit: memory of past answers
"""The most windows over which the coverage is measured."""
MAX_ERROR_RATIO = 10.0
"""The largest recorded error, in half-widths. Larger errors are recorded as this value."""


@dataclass(frozen=True, slots=True)
class _Answered:
    """The first and the last answer to a window.

    Attributes:
        early: whether the first answer was given before the window was complete.
        settled: whether the window is complete and the error of its first answer is recorded.
    """

    first: Prediction
    last: Prediction
    early: bool
    settled: bool = False


class PastAnswers:
    """Stores the answers to one query, the windows that wait for an answer, and the errors and the coverage of
    answers.
    """

    def __init__(self, accuracy: Accuracy) -> None:
        self._accuracy = accuracy
        self._intervals = ConformalRecord(accuracy.confidence, accuracy.scope, of_extremes=accuracy.kind in EXTREMES)
        self._waits: dict[int, int] = {}  # by start of a window, the slot until which the window waits
        self._answers: dict[int, _Answered] = {}
        self._covered: deque[float] = deque(maxlen=COVERAGE_WINDOWS)

    @property
    def widening(self) -> float:
        """The factor by which the half-widths of the next intervals are multiplied."""
        return self._intervals.widening

    @property
    def coverage(self) -> float | None:
        """The share of intervals that contained the true value, or None without intervals.

        With scope "all", the share of windows whose intervals all contained their true values.
        """
        return sum(self._covered) / len(self._covered) if self._covered else None

    def waits(self, start_ms: int, slot: int) -> bool:
        """Returns whether a window waits until a slot after `slot`."""
        return self._waits.get(start_ms, 0) > slot

    def last(self, start_ms: int) -> Prediction | None:
        """Returns the newest answer to a window that is not final."""
        answered = self._answers.get(start_ms)
        return answered.last if answered else None

    def newest(self) -> Prediction | None:
        """Returns the newest answer to the last window that is answered and not final; None if there is no
        such window.
        """
        return self._answers[max(self._answers)].last if self._answers else None

    def first_early(self, start_ms: int) -> Prediction | None:
        """Returns the first answer to a window, or None if the window was complete when it was answered."""
        answered = self._answers.get(start_ms)
        return answered.first if answered is not None and answered.early else None

    def is_settled(self, start_ms: int) -> bool:
        """Returns whether the errors of a window's first answer are recorded."""
        answered = self._answers.get(start_ms)
        return answered is not None and answered.settled

    def knows(self, start_ms: int) -> bool:
        """Returns whether a window has an answer or waits for one."""
        return start_ms in self._answers or start_ms in self._waits

    def compare(self, first: Prediction, truths: Mapping[str, float | None]) -> tuple[list[bool], list[float]]:
        """Compares an answer with the true values.

        Args:
            truths: true value by group key; None if the value is not known.

        Returns:
            Two lists over the groups with an interval: whether the interval contains the true value, and the error in
            half-widths of the model. Both lists are empty if a true value is not known. The errors are empty if the
            answer's interval was not bounded, and without the groups whose half-width is infinite.
        """
        predicted = [p for p in first.by_group if p.eligible]
        known = [(p, truth) for p in predicted if (truth := truths.get(p.key)) is not None]
        if len(known) < len(predicted):
            return [], []
        finite = [] if not first.bounded else [(p, truth) for p, truth in known if math.isfinite(p.half_width)]
        ratios = [_error_ratio(p, truth, first.widening) for p, truth in finite]
        return [_contains(p, truth) for p, truth in known], ratios

    def covered_share(self, contained: Sequence[bool]) -> float | None:
        """Returns a window's contribution to the coverage, or None if it is not known.

        Args:
            contained: the first result of `compare`.
        """
        if not contained:
            return None
        return float(all(contained)) if self._accuracy.scope == "all" else sum(contained) / len(contained)

    # Changes

    def wait(self, start_ms: int, until: int) -> None:
        """Records that a window waits until a slot."""
        self._waits[start_ms] = until

    def add(self, start_ms: int, prediction: Prediction, early: bool) -> bool:
        """Adds an answer to a window, and returns whether it is the window's first answer."""
        self._waits.pop(start_ms, None)
        answered = self._answers.get(start_ms)
        if answered is not None:
            self._answers[start_ms] = replace(answered, last=prediction)
            return False
        self._answers[start_ms] = _Answered(prediction, prediction, early)
        return True

    def settle(self, start_ms: int, ratios: Sequence[float], widening: float) -> None:
        """Records the errors of the first answer to a window that is complete."""
        self._intervals.add(start_ms, ratios, widening)
        self._answers[start_ms] = replace(self._answers[start_ms], settled=True)

    def finalize(self, start_ms: int, covered: float | None, ratios: Sequence[float], widening: float) -> None:
        """Records the errors and the coverage of a window that is final, and deletes its answers."""
        self._intervals.add(start_ms, ratios, widening)
        self._waits.pop(start_ms, None)
        if self._answers.pop(start_ms, None) is not None and covered is not None:
            self._covered.append(covered)

    def clear(self) -> None:
        """Deletes all answers and waits. The record of errors and of coverage stays."""
        self._answers, self._waits = {}, {}

    # Snapshots

    def to_state(self) -> dict[str, Any]:
        """Returns the state as JSON."""
        return {
            "intervals": self._intervals.to_state(),
            "waits": list(self._waits.items()),
            "covered": list(self._covered),
            "answers": [[s, a.first.to_list(), a.last.to_list(), a.early, a.settled] for s, a in self._answers.items()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Sets the state of a new object from the result of `to_state`. Damaged JSON may raise any exception."""
        self._intervals.restore(state["intervals"])
        self._waits = dict(map(tuple, state["waits"]))
        self._covered.extend(state["covered"])
        for start_ms, first, last, *facts in state["answers"]:
            self._answers[start_ms] = _Answered(Prediction.from_list(first), Prediction.from_list(last), *facts)


def _contains(prediction: GroupPrediction, truth: float) -> bool:
    tolerance = 1e-9 * abs(truth)
    return bool(prediction.lower - tolerance <= truth <= prediction.upper + tolerance)


def _error_ratio(prediction: GroupPrediction, truth: float, widening: float) -> float:
    """Returns the error of an estimate in half-widths of the model, without widening. It is rounded, because it is
    logged.
    """
    error, half_width = abs(prediction.estimate - truth), prediction.half_width / widening
    if error <= 1e-9 * abs(truth):
        return 0.0
    return round(min(error / half_width, MAX_ERROR_RATIO), 3) if half_width > 0 else MAX_ERROR_RATIO
