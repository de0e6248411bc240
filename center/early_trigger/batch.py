"""Watermarks of many strata, each by itself as before, with the arithmetic of all in one: arrays instead of a loop.

A stratum's arrays are tiny, a few sources times some hundred lags, so that one by one most of the time goes into
calling NumPy. Nothing is shared but the calls: each stratum's numbers are those it would have alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from center.early_trigger.calibration import UNTRIED
from center.early_trigger.estimate import Sampled, WindowModel, model_window
from center.early_trigger.late_values import LateRatio, LateValues
from center.early_trigger.rehearsal import pass_slot
from center.early_trigger.stragglers import StragglerModel, StragglersByMark
from center.early_trigger.triangle import ArrivalTriangle
from center.early_trigger.value_history import ValueHistory
from edgewater.synopses import BoolArray, FloatArray

if TYPE_CHECKING:
    from center.early_trigger.trigger import Watermark


class Together:
    """Watermarks of one query over the same sources, without groups of their own, begun at borders of sub-streams.

    They share their memory with it, and may be asked and told by themselves meanwhile, but for time to pass. It is
    good until one of them becomes a part of another.
    """

    def __init__(self, marks: Sequence[Watermark]) -> None:
        self.marks = list(marks)
        self.triangle = ArrivalTriangle.over([m.triangle for m in marks])
        self.model = StragglerModel.over(self.triangle, [m.model for m in marks])

    def advance(self, arrived: FloatArray, reporting: BoolArray) -> None:
        """`Watermark.on_slot` of all; of `arrived` and `reporting`, one watermark's sources after the other's."""
        self.triangle.advance(arrived, reporting)
        pass_slot(self.marks, self.model)

    def window_models(self, offset: int, sampled: Sampled) -> tuple[StragglersByMark, WindowModel]:
        """`Watermark.window_model` of each, `sampled` of all; each watermark is a group of what is returned."""
        return window_models(self.marks, self.model, offset, sampled)

    def rates(self) -> FloatArray:
        """`Watermark.rates` of each for the window that begins now, [source, watermark]."""
        ahead = self.model.predict_each(0, self.marks[0].window_slots, lags_wanted=False)
        return np.concatenate([m.rates(ahead.of(i)) for i, m in enumerate(self.marks)], axis=1)

    def on_answered(
        self,
        chosen: Sequence[int],
        sampled: Sampled,
        sums: tuple[FloatArray, FloatArray, FloatArray],
        shares: FloatArray,
    ) -> None:
        """`Watermark.on_answered` of some, by their number; of `sampled` and `sums` only theirs.

        Args:
            shares: stragglers' half-widths relative to the estimates.
        """
        marks, (count, total, squares) = [self.marks[i] for i in chosen], sums
        history = ValueHistory.over([m.history for m in marks])
        history.learn(sampled)
        history.hand_back([m.history for m in marks])
        for i, (mark, share) in enumerate(zip(marks, shares.tolist(), strict=True)):
            mine = slice(i * mark.triangle.sources, (i + 1) * mark.triangle.sources)
            substreams = mark.window_slots / mark.grid.substream_slots
            mark.late.learn(count[mine], total[mine], squares[mine], substreams)
            mark.learn_share(share)


def window_models(
    marks: Sequence[Watermark], model: StragglerModel, offset: int, sampled: Sampled
) -> tuple[StragglersByMark, WindowModel]:
    """What is expected of a window `offset` slots after its end: its stragglers, and what its values may be.

    Args:
        model: of all, in their order.
    """
    first, count = marks[0], len(marks)
    stragglers = model.predict_each(offset, first.window_slots, lags_wanted=first.measure != "count")
    if first.measure == "count":
        ratio = LateRatio(np.ones(model.triangle.sources), np.zeros(model.triangle.sources))
    else:
        late = first.late if count == 1 else LateValues.over([m.late for m in marks])
        ratio = late.ratio(stragglers.by_lag, sampled.by_lag)
    history = first.history if count == 1 else ValueHistory.over([m.history for m in marks])
    spread = history.spread(sampled, sampled.means(history.mean))
    alarms = zip(marks, stragglers.alarm.tolist(), strict=True)
    factor = [m.calibration.factor(offset, alarm, m.policy.straggler_confidence) for m, alarm in alarms]
    quantile = np.array([m.quantile for m in marks])
    # The record is of sources that can be heard: how well silence is foreseen it does not say.
    silent = model.triangle.behind.reshape(count, -1).T > 0
    factors = np.where(silent, np.maximum(UNTRIED, quantile), np.array(factor))
    expected, deviation = (x.reshape(count, -1).T for x in (stragglers.expected, stragglers.deviation))
    return stragglers, model_window(
        first.measure, sampled, expected, factors * deviation, ratio, spread, history.mean,
        first.quantile if count == 1 else quantile, history.backing,
    )  # fmt: skip
