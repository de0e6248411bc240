"""Many triggers evaluated together: the same arithmetic as one by one, by arrays over all of them.

A trigger's arrays are small (a few sources times some hundred lags), so one by one most of the time would go into
calling NumPy. The triggers share nothing but the calls: each has the numbers that it would have alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from center.early.backtest import advance_slot
from center.early.calibration import DEFAULT_FACTOR
from center.early.estimate import WindowModel, WindowSample, model_window
from center.early.late_values import LateRatio, LateValues
from center.early.stragglers import StragglerModel, StragglersByTrigger
from center.early.triangle import ArrivalTriangle
from center.early.value_history import ValueHistory
from edgewater.synopses import BoolArray, FloatArray

if TYPE_CHECKING:
    from center.early.trigger import EarlyTrigger


class TriggerBatch:
    """Triggers of one query over the same sources that began at ends of sub-streams.

    The batch shares its memory with the triggers. They may be used one by one meanwhile, except that only the batch
    advances time. It is valid until one of them becomes a member of another batch.
    """

    def __init__(self, triggers: Sequence[EarlyTrigger]) -> None:
        self.triggers = list(triggers)
        self.triangle = ArrivalTriangle.join([t.triangle for t in triggers])
        self.model = StragglerModel.join(self.triangle, [t.model for t in triggers])

    def advance(self, arrived: FloatArray, reporting: BoolArray) -> None:
        """Does `EarlyTrigger.on_slot` for all; arguments are over the sources of all triggers, in order."""
        self.triangle.advance(arrived, reporting)
        advance_slot(self.triggers, self.model, arrived)

    def window_models(self, offset: int, sample: WindowSample) -> tuple[StragglersByTrigger, WindowModel]:
        """Returns `EarlyTrigger.window_model` for all; a column of `sample` and of the result is one trigger."""
        return window_models(self.triggers, self.model, offset, sample)

    def rates(self) -> FloatArray:
        """Returns `EarlyTrigger.rates` for all, for the window that begins now, [source, trigger]."""
        stragglers = self.model.predict_each(0, self.triggers[0].window_slots, lags_wanted=False)
        return np.concatenate([t.rates(stragglers.of(i)) for i, t in enumerate(self.triggers)], axis=1)

    def on_answered(
        self,
        selected: Sequence[int],
        sample: WindowSample,
        sums: tuple[FloatArray, FloatArray, FloatArray],
        straggler_shares: FloatArray,
    ) -> None:
        """Does `EarlyTrigger.on_answered` for the selected triggers, by index.

        Args:
            sample, sums: of the selected triggers only.
            straggler_shares: half-widths of the stragglers relative to the estimates.
        """
        triggers, (count, total, squares) = [self.triggers[i] for i in selected], sums
        history = ValueHistory.join([t.history for t in triggers])
        history.learn(sample)
        history.copy_to([t.history for t in triggers])
        for i, (trigger, share) in enumerate(zip(triggers, straggler_shares.tolist(), strict=True)):
            rows = slice(i * trigger.triangle.sources, (i + 1) * trigger.triangle.sources)
            substreams = trigger.window_slots / trigger.grid.substream_slots
            trigger.late.learn(count[rows], total[rows], squares[rows], substreams)
            trigger.learn_straggler_share(share)


def window_models(
    triggers: Sequence[EarlyTrigger], model: StragglerModel, offset: int, sample: WindowSample
) -> tuple[StragglersByTrigger, WindowModel]:
    """Returns the expected stragglers of a window `offset` slots after its end, and the model of its estimate.

    Args:
        model: over the sources of all triggers, in order.
    """
    first, count = triggers[0], len(triggers)
    stragglers = model.predict_each(offset, first.window_slots, lags_wanted=first.measure != "count")
    if first.measure == "count":
        ratio = LateRatio(np.ones(model.triangle.sources), np.zeros(model.triangle.sources))
    else:
        late = first.late if count == 1 else LateValues.join([t.late for t in triggers])
        ratio = late.ratio(stragglers.by_lag, sample.by_lag)
    history = first.history if count == 1 else ValueHistory.join([t.history for t in triggers])
    spread = history.spread(sample, sample.means(history.mean))
    alarms = list(zip(triggers, stragglers.alarm.tolist(), strict=True))
    factor = [t.calibration.factor(offset, alarm, t.policy.straggler_confidence) for t, alarm in alarms]
    quantile = np.array([t.quantile for t in triggers])
    # Backtests cover reporting sources only: how well silent ones are predicted is not known.
    silent = model.triangle.silent_slots.reshape(count, -1).T > 0
    factors = np.where(silent, np.maximum(DEFAULT_FACTOR, quantile), np.array(factor))
    expected, half_width = (x.reshape(count, -1).T for x in (stragglers.expected, stragglers.deviation))
    half_width = factors * half_width
    tested = [t.calibration.is_tested(offset, alarm) for t, alarm in alarms]
    if not all(tested):
        untested = DEFAULT_FACTOR * stragglers.untested.reshape(count, -1).T
        half_width = np.where(tested, half_width, np.maximum(half_width, untested))
    return stragglers, model_window(
        first.measure, sample, expected, half_width, ratio, spread, history.mean,
        first.quantile if count == 1 else quantile, history.range, history.effective_windows,
    )  # fmt: skip
