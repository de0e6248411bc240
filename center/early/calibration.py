"""Computes the width of intervals from past errors. `Calibration` uses the errors of the straggler model.
`ConformalRecord` uses the errors of answers.

The straggler model does not describe ramps, steps, bursts or delays that depend on values. The errors of past
predictions show them. At every end of a sub-stream, the model predicts the stragglers as if a window ended there. Some
seconds later the true number is known. The quantile of past |error|/deviation then replaces the normal quantile. So the
interval is valid for every cause of errors (split conformal prediction; Vovk et al. 2005). Only recent errors count, so
that the quantile follows drift (Gibbs and Candès 2021).

The interval of an answer also assumes independent records. Records are dependent if a reader reads many records at a
time, or if adjacent records are similar (logs have runs of one client). No model covers all such cases. But the error
of an early answer is known when its window is complete. So the intervals of later answers are widened by the quantile
of these errors, in units of the model's half-width. Intervals are never narrowed, because a period of small errors
guarantees nothing.

Errors often come in runs, such as after a change. Past errors are then no sample of the next error. So the level of the
quantile is adapted (adaptive conformal inference, Gibbs and Candès 2021). Each interval that misses the true value
raises the level. Each interval that contains the true value lowers the level. Assume that an interval with
`MAX_WIDENING` would contain every true value. Then, over any number of windows, the number of misses exceeds the number
that the confidence allows by at most (1 - confidence)/γ + 1.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import numpy as np

from edgewater.arrivals.schedule import REPORT_SLOTS_AFTER_END
from edgewater.arrivals.stragglers import DEFAULT_FACTOR
from edgewater.arrivals.targets import GroupScope
from edgewater.base.errors import CorruptSynopsis
from edgewater.synopses import normal_quantile
from edgewater.synopses.encoding.state import State

MIN_RECORD = 20
MIN_EXTRAPOLATION = 1.2
MAX_RECORD = 150
"""The most predictions whose errors are recorded: 30 windows of 5 sub-streams."""

OFFSETS = (0, *REPORT_SLOTS_AFTER_END, 30, 100, 200)
"""Slots after an end of a sub-stream at which backtests are made.

They are the slots at which edges report. Where records arrive in batches, errors depend on the time since the last
batch, so the errors of another slot say little."""
ALARM_THRESHOLD = 3.0
MAX_ALARMED_SHARE = 0.3
"""The largest share of predictions that count as alarmed.

A prediction is alarmed if its alarm exceeds `ALARM_THRESHOLD` standard errors and belongs to the greatest 30 % of the
alarms. Alarmed predictions have a record of their own (Mondrian conformal prediction, Vovk et al.). So a drift delays
only the windows during the drift."""

MAX_WINDOWS = 400
"""The most windows whose errors are recorded."""
MAX_WIDENING = 4.0
STEP = 0.02
"""γ of adaptive conformal inference: the step size of the level."""


@dataclass(frozen=True, slots=True)
class _Prediction:
    boundary: int
    offset: int
    expected: float
    deviation: float
    total_then: float
    alarmed: bool
    initial: bool


class Calibration:
    """Stores the errors of predictions, in standard errors, per offset and separately for alarmed predictions.

    Args:
        offsets: slots after a boundary at which predictions are made, ascending. For a number of slots between two
            offsets, `factor` uses the smaller offset.
        record: the most errors per offset and kind of prediction.
    """

    def __init__(self, offsets: tuple[int, ...] = OFFSETS, record: int = MAX_RECORD) -> None:
        self.offsets, self._limit = offsets, record
        self._open: deque[_Prediction] = deque()
        self._record = {(o, alarmed): deque[float](maxlen=record) for o in offsets for alarmed in (False, True)}
        self._alarms = {offset: deque[float](maxlen=record) for offset in offsets}
        self._initial = {offset: deque[float](maxlen=record) for offset in offsets}

    def add_prediction(
        self,
        boundary: int,
        offset: int,
        expected: float,
        deviation: float,
        alarm: float,
        total: float,
        *,
        initial: bool = False,
    ) -> None:
        """Adds a prediction of the number of stragglers.

        Args:
            boundary: slot at which the predicted window would end.
            offset: slots between the boundary and the prediction.
            expected, deviation: the predicted number of stragglers and its standard error.
            alarm: `Stragglers.alarm` of the prediction.
            total: number of events born before the boundary that had arrived when the prediction was made.
            initial: whether the source had less history than at later predictions. The error of such a prediction
                counts only until there are errors of later predictions.
        """
        alarmed = self._is_alarm(offset, alarm)
        if not initial:
            self._alarms[offset].append(alarm)
        self._open.append(_Prediction(boundary, offset, expected, deviation, total, alarmed, initial))

    def due(self, slot: int, horizon: int) -> list[int]:
        """Returns the boundaries that are at least `horizon` slots old and whose predictions are not compared yet."""
        return sorted({p.boundary for p in self._open if slot - p.boundary >= horizon})

    def resolve(self, boundary: int, total: float) -> None:
        """Compares the predictions for a boundary with `total`, the final number of events born before the boundary."""
        still_open: deque[_Prediction] = deque()
        for p in self._open:
            if p.boundary == boundary:
                error = abs(total - p.total_then - p.expected)
                record = self._initial[p.offset] if p.initial else self._record[p.offset, p.alarmed]
                record.append(error / max(p.deviation, 1e-9))
            else:
                still_open.append(p)
        self._open = still_open

    def factor(self, offset: int, alarm: float, confidence: float) -> float:
        """Returns the half-width, in standard errors, that contains the number of stragglers with this confidence.

        If fewer than `MIN_RECORD` errors are recorded, the result is the largest of these errors, `DEFAULT_FACTOR` and
        the errors of initial predictions. The initial errors matter where records arrive in batches: there the model's
        standard errors are ten times too small from the first window on.
        """
        tested = max(o for o in self.offsets if o <= offset)
        past = self._record[tested, self._is_alarm(tested, alarm)]
        count = len(past)
        if count < MIN_RECORD:
            return max([DEFAULT_FACTOR, *past, *self._initial[tested]])
        rank = math.ceil((count + 1) * confidence)
        ordered = np.sort(np.array(past))
        if rank <= count:
            return float(ordered[rank - 1])
        # The quantile is above the largest recorded error. It is extrapolated by the tail of a normal distribution.
        beyond = normal_quantile(confidence) / normal_quantile(count / (count + 1))
        return float(ordered[-1]) * max(MIN_EXTRAPOLATION, beyond)

    def is_tested(self, offset: int, alarm: float) -> bool:
        """Returns whether at least `MIN_RECORD` past errors are known, so that `factor` follows from them."""
        known = max(o for o in self.offsets if o <= offset)
        return len(self._record[known, self._is_alarm(known, alarm)]) >= MIN_RECORD

    def is_unprecedented(self, offset: int, alarm: float) -> bool:
        """Returns whether no past error shows how good a prediction with this alarm is.

        This is so if the alarm is above `ALARM_THRESHOLD`, and above each alarm whose prediction has been compared.
        While fewer than `MIN_RECORD` predictions have been compared, each alarm above the threshold is unprecedented.
        """
        tested = max(o for o in self.offsets if o <= offset)
        still_open = sum(p.offset == tested and not p.initial for p in self._open)
        compared = list(self._alarms[tested])[: len(self._alarms[tested]) - still_open]
        return alarm > ALARM_THRESHOLD and (len(compared) < MIN_RECORD or alarm > max(compared))

    def to_state(self) -> State:
        """Returns the state. All queues are in one array, in the order of `offsets`; a second array has the length of
        each queue.
        """
        queues = self._queues()
        arrays = {
            "open": np.array([astuple(p) for p in self._open], np.float64).reshape(-1, len(fields(_Prediction))),
            "lengths": np.array([len(q) for q in queues], np.int64),
            "queues": np.array([x for q in queues for x in q], np.float64),
        }
        return State([self.offsets, self._limit], arrays)

    @classmethod
    def from_state(cls, state: State) -> Calibration:
        """Returns the calibration whose `to_state` returned `state`.

        Raises:
            CorruptSynopsis: the state cannot be read.
        """
        try:
            offsets, limit = state.numbers
            result, arrays = cls(tuple(offsets), int(limit)), state.arrays
            queues, at = result._queues(), 0
            for queue, length in zip(queues, arrays["lengths"].tolist(), strict=True):
                queue.extend(arrays["queues"][at : at + length].tolist())
                at += length
            if at != len(arrays["queues"]) or [len(q) for q in queues] != arrays["lengths"].tolist():
                raise ValueError("lengths")
            for boundary, offset, expected, deviation, total, *kinds in arrays["open"].tolist():
                alarmed, initial = map(bool, kinds)
                prediction = _Prediction(int(boundary), int(offset), expected, deviation, total, alarmed, initial)
                if prediction.offset not in result.offsets:
                    raise ValueError("offset")
                result._open.append(prediction)
        except (KeyError, ValueError, TypeError) as exc:
            raise CorruptSynopsis(f"Calibration state cannot be read: {exc}") from exc
        return result

    def _queues(self) -> list[deque[float]]:
        return [
            queue
            for o in self.offsets
            for queue in (self._record[o, False], self._record[o, True], self._alarms[o], self._initial[o])
        ]

    def _is_alarm(self, offset: int, alarm: float) -> bool:
        past = self._alarms[offset]
        if alarm <= ALARM_THRESHOLD or len(past) < MIN_RECORD:
            return alarm > ALARM_THRESHOLD
        return alarm > float(np.quantile(np.array(past), 1 - MAX_ALARMED_SHARE))


class ConformalRecord:
    """Stores the errors of one query's early answers.

    Args:
        confidence: confidence of each interval. With scope "all", the confidence that all intervals of a window contain
            their true values.
        of_extremes: whether answers state an extreme. It is right or wrong, so no factor helps. The widening is then 1
            if the arrived records had the extreme often enough, and `MAX_WIDENING` otherwise and at the beginning.
    """

    def __init__(self, confidence: float, scope: GroupScope | None, *, of_extremes: bool = False) -> None:
        self._failures, self._is_simultaneous, self._of_extremes = 1 - confidence, scope == "all", of_extremes
        self._windows: dict[int, list[float]] = {}
        self._level = -STEP if of_extremes else self._failures  # the share of misses to allow from now on
        self._widening: float | None = None  # None if it must be computed

    @property
    def widening(self) -> float:
        """The factor, at least 1, by which the model's half-widths are multiplied."""
        if self._widening is None:
            self._widening = self._quantile()
        return self._widening

    def add(self, start_ms: int, ratios: Sequence[float], widening: float) -> None:
        """Adds the errors of a window. If the window has errors already, the new errors replace them.

        Args:
            ratios: per group, the error of the estimate in half-widths of the model.
            widening: the factor by which the window's intervals were widened.
        """
        if not ratios:
            return
        if start_ms not in self._windows:
            misses = [ratio > widening for ratio in self._errors(ratios)]
            # Credit for intervals that contained the true value is limited to the miss of one window.
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
        if self._of_extremes or not self._windows:
            return 1.0
        errors = sorted(error for ratios in self._windows.values() for error in self._errors(ratios))
        rank = min(math.ceil((len(errors) + 1) * (1 - min(self._level, self._failures))), len(errors))
        return min(max(errors[rank - 1], 1.0), MAX_WIDENING)

    def to_state(self) -> dict[str, Any]:
        """Returns JSON of the whole state."""
        return {"level": self._level, "windows": [[start, *ratios] for start, ratios in self._windows.items()]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Sets the state from the result of `to_state`."""
        self._level = float(state["level"])
        self._windows = {int(start): ratios for start, *ratios in state["windows"]}
        self._widening = None
