"""What the straggler model's standard errors have been worth, from its own record.

The model knows nothing of ramps, steps, bursts or delays that hang together with values. Its past predictions
do: at every sub-stream's end it predicts the stragglers as if a window ended there, and some seconds later the
truth is known. The quantile of past |error|/deviation, in place of the normal one, makes the interval hold
for whatever has been going on (split conformal prediction; Vovk et al. 2005), and the recent past counts
only, so that it follows drift (Gibbs and Candès 2021).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import astuple, dataclass, fields

import numpy as np

from edgewater.errors import CorruptSynopsis
from edgewater.synopses import normal_quantile
from edgewater.synopses.encoding.named_arrays import Arrays

UNTRIED = 4.0
"""Deviations that half the interval has before there is a record: Chebyshev's at 94 %, the normal's at 99.99 %."""

LEAST_RECORD = 20
LEAST_BEYOND = 1.2
RECORD = 150
"""Predictions that are remembered: 30 windows of 5 sub-streams."""


OFFSETS = (0, 3, 10, 30, 100, 200)
ALARM = 3.0
ALARMED_SHARE = 0.3
"""Predictions with an alarm above `ALARM` standard errors, and of those no more than the greatest 30 %, are judged by
their own kind (conformal prediction by categories; Vovk's Mondrian), so that a drift makes its own windows wait and
not all of them."""


@dataclass(frozen=True, slots=True)
class _Prediction:
    boundary: int
    offset: int
    expected: float
    deviation: float
    total_then: float
    alarmed: bool


class Calibration:
    """Keeps the record, per offset (slots after the boundary at which the prediction was made) and alarm.

    Args:
        offsets: ascending; a question about another one is answered by the next smaller.
    """

    def __init__(self, offsets: tuple[int, ...] = OFFSETS, record: int = RECORD) -> None:
        self.offsets, self._limit = offsets, record
        self._open: deque[_Prediction] = deque()
        self._record = {(o, alarmed): deque[float](maxlen=record) for o in offsets for alarmed in (False, True)}
        self._alarms = {offset: deque[float](maxlen=record) for offset in offsets}

    def predicted(
        self, boundary: int, offset: int, expected: float, deviation: float, alarm: float, total: float
    ) -> None:
        """A prediction was made; `total` events of before the boundary had arrived then."""
        alarmed = self._is_alarm(offset, alarm)
        self._alarms[offset].append(alarm)
        self._open.append(_Prediction(boundary, offset, expected, deviation, total, alarmed))

    def due(self, slot: int, horizon: int) -> list[int]:
        """Boundaries whose truth is known at `slot`, `horizon` slots being enough for all to arrive."""
        return sorted({p.boundary for p in self._open if slot - p.boundary >= horizon})

    def settle(self, boundary: int, total: float) -> None:
        """By now `total` events of before the boundary have arrived, and no more are expected."""
        rest: deque[_Prediction] = deque()
        for p in self._open:
            if p.boundary == boundary:
                error = abs(total - p.total_then - p.expected)
                self._record[p.offset, p.alarmed].append(error / max(p.deviation, 1e-9))
            else:
                rest.append(p)
        self._open = rest

    def factor(self, offset: int, alarm: float, confidence: float) -> float:
        """Deviations to either side within which the stragglers are with `confidence`."""
        known = max(o for o in self.offsets if o <= offset)
        past = self._record[known, self._is_alarm(known, alarm)]
        count = len(past)
        if count < LEAST_RECORD:
            return max(UNTRIED, *past) if past else UNTRIED
        rank = math.ceil((count + 1) * confidence)
        ordered = np.sort(np.array(past))
        if rank <= count:
            return float(ordered[rank - 1])
        # Beyond the record's largest, the next error is only known to exceed it; by how much, a normal tail says.
        beyond = normal_quantile(confidence) / normal_quantile(count / (count + 1))
        return float(ordered[-1]) * max(LEAST_BEYOND, beyond)

    def to_state(self) -> Arrays:
        """Ragged queues as one array and the lengths, in the order of `offsets`."""
        queues = self._queues()
        return {
            "offsets": np.array(self.offsets, np.int64),
            "limit": np.int64(self._limit),
            "open": np.array([astuple(p) for p in self._open], np.float64).reshape(-1, len(fields(_Prediction))),
            "lengths": np.array([len(q) for q in queues], np.int64),
            "queues": np.array([x for q in queues for x in q], np.float64),
        }

    @classmethod
    def from_state(cls, arrays: Arrays) -> Calibration:
        """Raises CorruptSynopsis."""
        try:
            result = cls(tuple(arrays["offsets"].tolist()), int(arrays["limit"]))
            queues, at = result._queues(), 0
            for queue, length in zip(queues, arrays["lengths"].tolist(), strict=True):
                queue.extend(arrays["queues"][at : at + length].tolist())
                at += length
            if at != len(arrays["queues"]) or [len(q) for q in queues] != arrays["lengths"].tolist():
                raise ValueError("lengths")
            for boundary, offset, expected, deviation, total, alarmed in arrays["open"].tolist():
                prediction = _Prediction(int(boundary), int(offset), expected, deviation, total, bool(alarmed))
                if prediction.offset not in result.offsets:
                    raise ValueError("offset")
                result._open.append(prediction)
        except (KeyError, ValueError, TypeError) as exc:
            raise CorruptSynopsis(f"watermark state: the record of predictions cannot be read: {exc}") from exc
        return result

    def _queues(self) -> list[deque[float]]:
        return [
            queue for o in self.offsets for queue in (self._record[o, False], self._record[o, True], self._alarms[o])
        ]

    def _is_alarm(self, offset: int, alarm: float) -> bool:
        past = self._alarms[offset]
        if alarm <= ALARM or len(past) < LEAST_RECORD:
            return alarm > ALARM
        return alarm > float(np.quantile(np.array(past), 1 - ALARMED_SHARE))
