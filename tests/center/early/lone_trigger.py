"""A trigger that is evaluated alone, as a batch of one."""

from __future__ import annotations

import numpy as np

from center.early.trigger import Decision, EarlyTrigger, TriggerBatch, window_models
from edgewater.arrivals.window_model import WindowModel, WindowSample
from edgewater.synopses import FloatArray


def decide(trigger: EarlyTrigger, end_slot: int, sample: WindowSample) -> tuple[Decision, WindowModel]:
    """Returns the decision about a window that ended at a slot, and the model of the window."""
    stragglers, model = window_models([trigger], trigger.model, max(trigger.slot - end_slot, 0), sample)
    return trigger.decide(end_slot, sample, (stragglers.of(0), model)), model


def learn(
    trigger: EarlyTrigger, sample: WindowSample, sums: tuple[FloatArray, FloatArray, FloatArray], share: float
) -> None:
    """Learns from an answered window; `share` is the half-width of the stragglers relative to the estimate."""
    TriggerBatch([trigger]).on_answered([0], sample, sums, np.array([share]))
