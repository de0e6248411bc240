"""What passes with time in a watermark besides its counts: the record of predictions. For several at once.

At every sub-stream's end the model predicts as if a window ended there, and seconds later the truth is known
(`calibration.py`). The arithmetic is that of arrays over all sources of all watermarks; what is left to each is a
number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from center.early_trigger.stragglers import StragglerModel
from center.early_trigger.triangle import LONG, ArrivalTriangle
from edgewater.synopses import BoolArray, FloatArray

if TYPE_CHECKING:
    from center.early_trigger.trigger import Watermark

DRIFT, DRIFT_SUBSTREAMS = 8.0, 4
"""Standard errors, and for how many sub-streams on end, that the memories of delays must disagree to start anew."""

SETTLED_SHARE = 0.9995
"""Of a slot's events; from then on its count is taken for the truth that predictions are held against."""


def pass_slot(marks: Sequence[Watermark], model: StragglerModel) -> None:
    """A slot has passed in the triangle of all. They began at borders of sub-streams, so their slots are in phase."""
    for mark in marks:
        mark.slot += 1
    slot, substream = marks[0].slot, marks[0].grid.substream_slots
    if slot % substream == 0:
        model.on_substream()
        _settle(marks, model.triangle)
    for offset in marks[0].calibration.offsets:
        if (slot - offset) % substream == 0:
            silent = (model.triangle.behind > 0).reshape(len(marks), -1).any(axis=1)
            heard = np.flatnonzero(~silent).tolist()
            _rehearse([i for i in heard if marks[i].slot > offset], marks, model, offset)


def _rehearse(chosen: Sequence[int], marks: Sequence[Watermark], model: StragglerModel, offset: int) -> None:
    """Predicts as if a window had ended `offset` slots ago, for the record."""
    if not chosen:
        return
    triangle, window_slots = model.triangle, marks[0].window_slots
    ahead = model.predict_each(offset, min(window_slots, triangle.grid.lags - offset), lags_wanted=False)
    if offset == 0:
        for i in chosen:
            _notice(marks[i], float(ahead.drift[i]))

    def summed(by_source: FloatArray) -> list[float]:
        return [float(x) for x in by_source.reshape(len(marks), -1).sum(axis=1)]

    # The first windows know less than any later one, and say nothing of how good those will be. Nor does it
    # say anything that in a pause nothing was expected, and nothing came.
    telling = _are_experienced(marks, triangle) & ahead.arrived.reshape(len(marks), -1).any(axis=1)
    expected, total, alarm = summed(ahead.expected), summed(triangle.total(offset)), ahead.alarm.tolist()
    deviation = np.sqrt((ahead.deviation**2).reshape(len(marks), -1).sum(axis=1)).tolist()
    for i in chosen:
        if telling[i]:
            mark = marks[i]
            mark.calibration.predicted(mark.slot - offset, offset, expected[i], deviation[i], alarm[i], total[i])


def _are_experienced(marks: Sequence[Watermark], triangle: ArrivalTriangle) -> BoolArray:
    """Whether sources have been observed for two windows, with events if they have ever had any: of a stream that
    stood idle before its first event nothing was learnt meanwhile."""
    windows = 2 * marks[0].window_slots
    long_ago = min(windows, triangle.grid.lags - 1)
    older = triangle.seen[:, long_ago:].sum(axis=1) + triangle.retired
    younger = triangle.seen[:, :long_ago].sum(axis=1)
    each = (triangle.age >= windows) & ((older > 0) | (younger == 0))
    return np.asarray(each.reshape(len(marks), -1).all(axis=1))


def _notice(mark: Watermark, drift: float) -> None:
    mark.drifting = mark.drifting + 1 if drift > DRIFT else 0
    if mark.drifting >= DRIFT_SUBSTREAMS:
        mark.triangle.forget_long()
        mark.drifting = 0


def _settle(marks: Sequence[Watermark], triangle: ArrivalTriangle) -> None:
    """Holds predictions against the truth, where it is known by now."""
    arrived = (triangle.distributions()[LONG] >= SETTLED_SHARE).reshape(len(marks), -1, triangle.grid.lags)
    horizons = np.argmax(arrived.all(axis=1), axis=1).tolist()
    for mark, horizon in zip(marks, horizons, strict=True):
        for boundary in mark.calibration.due(mark.slot, horizon + 1):
            mark.calibration.settle(boundary, float(mark.triangle.total(mark.slot - boundary).sum()))
