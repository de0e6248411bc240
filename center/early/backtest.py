"""Backtests of the straggler model: predictions as if a window ended at each sub-stream, compared with the truth later.

`advance_slot` does for several triggers what happens in a slot besides counting arrivals. The model is evaluated by
arrays over the sources of all triggers; a single number per trigger goes into its `Calibration`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from center.early.stragglers import StragglerModel
from center.early.triangle import LONG, ArrivalTriangle
from edgewater.synopses import BoolArray, FloatArray

if TYPE_CHECKING:
    from center.early.trigger import EarlyTrigger

DRIFT, DRIFT_SUBSTREAMS = 8.0, 4
"""Standard errors by which the two delay memories must disagree, and for how many consecutive sub-streams, for the long
memory to be restarted."""

SETTLED_SHARE = 0.9995
"""Share of a slot's events that must have arrived for its count to be the truth that predictions are compared with."""


def advance_slot(triggers: Sequence[EarlyTrigger], model: StragglerModel, arrived: FloatArray) -> None:
    """Completes a slot by which the model's triangle has advanced with `arrived`.

    All triggers began at ends of sub-streams, so their slots are in phase.
    """
    model.on_slot(arrived, triggers[0].slot)
    for trigger in triggers:
        trigger.slot += 1
    slot, substream = triggers[0].slot, triggers[0].grid.substream_slots
    if slot % substream == 0:
        model.on_substream()
        _resolve(triggers, model.triangle)
    for offset in triggers[0].calibration.offsets:
        if (slot - offset) % substream == 0:
            silent = (model.triangle.silent_slots > 0).reshape(len(triggers), -1).any(axis=1)
            reporting = np.flatnonzero(~silent).tolist()
            _predict([i for i in reporting if triggers[i].slot > offset], triggers, model, offset)


def _predict(selected: Sequence[int], triggers: Sequence[EarlyTrigger], model: StragglerModel, offset: int) -> None:
    """Records a prediction as if a window had ended `offset` slots ago."""
    if not selected:
        return
    triangle, window_slots = model.triangle, triggers[0].window_slots
    predicted = model.predict_each(offset, min(window_slots, triangle.grid.lags - offset), lags_wanted=False)
    if offset == 0:
        for i in selected:
            _track_drift(triggers[i], float(predicted.drift[i]))

    def summed(by_source: FloatArray) -> list[float]:
        return [float(x) for x in by_source.reshape(len(triggers), -1).sum(axis=1)]

    # Errors of pauses, in which nothing was expected and nothing arrived, do not show how good later predictions are.
    # Nor do those of sources younger than the longest lag, whose delays are not known yet; those of the next window,
    # which had less history than any later one, do until later ones are known.
    has_arrivals, longest = predicted.arrived.reshape(len(triggers), -1).any(axis=1), triangle.horizon
    tested = _have_history(triggers, triangle, longest) & has_arrivals
    initial = ~_have_history(triggers, triangle, longest + window_slots)
    expected, total, alarm = summed(predicted.expected), summed(triangle.total(offset)), predicted.alarm.tolist()
    deviation = np.sqrt((predicted.deviation**2).reshape(len(triggers), -1).sum(axis=1)).tolist()
    for i in selected:
        if tested[i]:
            boundary, calibration, is_initial = triggers[i].slot - offset, triggers[i].calibration, bool(initial[i])
            calibration.add_prediction(
                boundary, offset, expected[i], deviation[i], alarm[i], total[i], initial=is_initial
            )  # fmt: skip


def _have_history(triggers: Sequence[EarlyTrigger], triangle: ArrivalTriangle, slots: int) -> BoolArray:
    """Whether all sources have been observed for so many slots, not counting the time before their first event."""
    border = min(slots, triangle.grid.lags - 1)
    older = triangle.seen[:, border:].sum(axis=1) + triangle.expired
    younger = triangle.seen[:, :border].sum(axis=1)
    by_source = (triangle.age >= slots) & ((older > 0) | (younger == 0))
    return np.asarray(by_source.reshape(len(triggers), -1).all(axis=1))


def _track_drift(trigger: EarlyTrigger, drift: float) -> None:
    trigger.drifting_substreams = trigger.drifting_substreams + 1 if drift > DRIFT else 0
    if trigger.drifting_substreams >= DRIFT_SUBSTREAMS:
        trigger.triangle.reset_long_memory()
        trigger.drifting_substreams = 0


def _resolve(triggers: Sequence[EarlyTrigger], triangle: ArrivalTriangle) -> None:
    """Compares predictions with the truth where it is known by now."""
    settled = (triangle.distributions()[LONG] >= SETTLED_SHARE).reshape(len(triggers), -1, triangle.grid.lags)
    horizons = np.argmax(settled.all(axis=1), axis=1).tolist()
    for trigger, horizon in zip(triggers, horizons, strict=True):
        for boundary in trigger.calibration.due(trigger.slot, horizon + 1):
            trigger.calibration.resolve(boundary, float(trigger.triangle.total(trigger.slot - boundary).sum()))
