"""Decides when a window is answered early, as a deterministic state machine.

The decision about a window is `AnswerNow`, or `Wait` until a slot. A timer must ask again at that slot, because no
event may arrive before it. Algorithms 1 and 2 of the Aion paper do not handle this case. A window is decided as a
whole. The paper closes each sub-stream at the sub-stream's own deadline. This drops a third of the events before the
window is answered.

The target is met when sampling and stragglers together are small enough: width² = sampling² + stragglers² ≤
(error·|estimate|)². The sampling rate is set before the window begins. Edges enlarge a sample once, when the window
ends (`edge/arrivals/top_up.py`). So waiting reduces only the stragglers' part of the width. If the sample alone is too
small, the window is answered at once.

Many triggers are evaluated together (`TriggerBatch`). The arrays of one trigger are small, so most of the time would be
spent on calling NumPy for each trigger. The result for each trigger is the same as if it were evaluated alone.

Backtests predict the stragglers as if a window ended at each end of a sub-stream. Later these predictions are compared
with the true number. The straggler model is evaluated by arrays over the sources of all triggers. One number per
trigger goes into the trigger's `Calibration`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

from center.early.calibration import ALARM_THRESHOLD, OFFSETS, Calibration
from edgewater.arrivals import SlotGrid
from edgewater.arrivals.stragglers import DEFAULT_FACTOR, SILENT_SUBSTREAMS, StragglerModel, Stragglers
from edgewater.arrivals.targets import COUNTS, NOT_PREDICTED, AccuracyTarget, MeasureKind, check_measure
from edgewater.arrivals.triangle import LONG, ArrivalTriangle
from edgewater.arrivals.values import LateValues, ValueHistory
from edgewater.arrivals.window_model import LateRatio, WindowModel, WindowSample, model_window
from edgewater.base.errors import CorruptSynopsis, InvalidInput
from edgewater.synopses import BoolArray, FloatArray, normal_quantile
from edgewater.synopses.encoding.state import State

NEGLIGIBLE_FAILURES = 0.45
"""If the number of expected records is below this share of the allowed failures, the trigger expects no more
records."""

SAMPLE_TOO_SMALL = "the sample of the window is too small for the error, however long the answer waits"
OUT_OF_TIME = "the staleness budget has expired"
NOTHING_EXPECTED = "no more records are expected from the reporting edges"
SILENCE_TOO_WIDE = "silent edges may hold more than the allowed error"

DRIFT, DRIFT_SUBSTREAMS = 8.0, 4
"""The long memory of the delays is reset to the short memory if the two memories differ much for long: by more than
`DRIFT` standard errors, for `DRIFT_SUBSTREAMS` consecutive sub-streams."""
SETTLED_SHARE = 0.9995
"""Share of a slot's events that must have arrived before predictions for the slot are compared with the slot's
events."""


SAMPLING_FAILURES = 0.99
"""The share of 1 - confidence that sampling errors may use. The rest is for errors that no model covers."""
STRAGGLER_CONFIDENCE = 0.98
"""Confidence of the stragglers' part of the interval."""
BACKOFF = 0.1
"""Minimum wait until the next evaluation, relative to the time waited so far. These trade-offs were measured in
`docs/decisions/0007-early-answers.md`."""


@dataclass(frozen=True, slots=True)
class AnswerNow:
    """The decision to answer a window now.

    Attributes:
        reason: why the window is answered although its interval does not meet the target; empty if it does.
    """

    reason: str = ""

    @property
    def met(self) -> bool:
        return not self.reason


@dataclass(frozen=True, slots=True)
class Wait:
    """The decision that the window waits. The caller must decide again at the slot `until`."""

    until: int


Decision = AnswerNow | Wait


class EarlyTrigger:
    """Decides when windows are answered, for one query without groups or for one group, over `sources` strata (edges).

    Args:
        window_slots: length of the query's windows in slots.
        target: the accuracy of one group.
        max_wait_slots: slots after a window's end at which the window is answered at the latest; None if there is no
            limit.
        horizon: number of lags that can occur; None if all lags of the grid can occur.
    """

    def __init__(
        self,
        sources: int,
        grid: SlotGrid,
        window_slots: int,
        target: AccuracyTarget,
        measure: MeasureKind,
        *,
        max_wait_slots: int | None = None,
        horizon: int | None = None,
    ) -> None:
        if window_slots < 1:
            raise InvalidInput("window", window_slots, "at least one slot")
        if measure not in COUNTS:
            check_measure(measure)
        if target.groups != 1:
            raise InvalidInput("groups", target.groups, "one group: each group has a trigger of its own")
        if max_wait_slots is not None and max_wait_slots < 0:
            raise InvalidInput("max_wait", max_wait_slots, "0 slots or more after the window's end")
        self.grid, self.window_slots, self.target, self.measure = grid, window_slots, target, measure
        self.straggler_confidence = STRAGGLER_CONFIDENCE
        self.max_wait_slots = max_wait_slots
        self.triangle = ArrivalTriangle(sources, grid)
        self.triangle.horizon = min(grid.lags, horizon or grid.lags)
        self.model = StragglerModel(self.triangle)
        self.late = LateValues(sources, grid.lags)
        self.history = ValueHistory(sources)
        self.calibration = Calibration(tuple(o for o in OFFSETS if o < grid.lags // 2))
        self.slot = 0
        self.quantile = normal_quantile(1 - (1 - target.confidence) * SAMPLING_FAILURES)
        self.drifting_substreams = 0
        self.steady_slots = 0  # slots since the two memories of delays last differed, or since the beginning
        self._straggler_share = 0.02  # the stragglers' half-width, relative to the estimate, at recent answers

    def on_slot(self, arrived: FloatArray, reporting: BoolArray | None = None) -> None:
        """Advances time by one slot.

        Args:
            arrived: events that arrived in the slot, [source, lag].
            reporting: mask of the sources that have reported; None if all have reported.
        """
        self.triangle.advance(arrived, reporting)
        advance_slot([self], self.model, arrived)

    def rates(self, stragglers: Stragglers) -> FloatArray:
        """Returns the sampling rates that the window that begins now needs, and the records that it expects by its
        end, float64 [2, source, 1].

        The rates follow from Eq. 8 of the Aion paper with two changes. n is n·N_e/N: the paper divides the n of the
        window by the N of a sub-stream, so its rate is too large by a factor of the number of sub-streams. The delay
        distribution replaces the mean delay. Without history, the rates are 1.

        Args:
            stragglers: the model's prediction for a window that ends now.
        """
        shape = self.history.mean.shape
        if self.measure in COUNTS:
            return np.zeros((2, *shape))
        if not self.history.windows.any() or not self.triangle.age.any():
            return np.stack([np.ones(shape), np.zeros(shape)])
        events = (stragglers.rate * self.window_slots)[:, None] * self.history.share
        punctual = self.triangle.distributions()[LONG][:, : self.window_slots].mean(axis=1)[:, None]
        means = self.history.mean
        spread = np.sqrt(self.history.inflated_variation()) * np.abs(means)
        # Where the range of values is unknown, no sample gives an interval. The sample is then sized for the estimate.
        ends = np.stack(self.history.range)
        reach = np.maximum(np.where(np.isfinite(ends), ends - means, 0.0) * [[[-1]], [[1]]], 0.0)[:, None]
        reach = np.concatenate([reach, reach], axis=1)
        model = WindowModel(self.measure, events * punctual, means, spread, events, events, np.zeros(shape[1]), reach)
        allowed, straggler_width = (f * np.abs(model.estimate) for f in (self.target.error, self._straggler_share))
        sampling_width = np.sqrt(np.maximum(allowed**2 - straggler_width**2, 0.0))
        sizes = model.sizes(sampling_width, self.quantile)
        rates = np.where(model.arrived > 0, sizes / np.maximum(model.arrived, 1e-9), 1.0)
        return np.stack([np.clip(rates, 0.0, 1.0), model.arrived])

    def decide(
        self, end_slot: int, sample: WindowSample, modelled: tuple[Stragglers, WindowModel], *, earned: bool = True
    ) -> Decision:
        """Decides about the window that ended at `end_slot`.

        Args:
            modelled: the result of `window_models` for the window.
            earned: whether the observations suffice for an interval. If not, the window does not meet the target.
        """
        offset = self.slot - end_slot
        if offset < 0:
            return Wait(end_slot)
        stragglers, model = modelled
        allowed = self.target.error * np.abs(model.estimate)
        sampling = model.sampling_width(sample.count, self.quantile)
        if earned and stragglers.known and model.is_within(self.target.error, sampling).all():
            return AnswerNow()
        if stragglers.known and self._is_too_small(sample, model, allowed):
            return AnswerNow(SAMPLE_TOO_SMALL)
        if self.max_wait_slots is not None and offset >= self.max_wait_slots:
            return AnswerNow(OUT_OF_TIME)
        if self._expects_nothing(offset, stragglers, earned):
            return AnswerNow(NOTHING_EXPECTED)
        if self._is_silence_too_wide(stragglers, model):
            return AnswerNow(SILENCE_TOO_WIDE)
        until = self.slot + max(1, int(offset * BACKOFF))
        if self.triangle.is_young(self.grid.lags).any():  # knowledge grows with a source's age, not with the wait
            until = min(until, (self.slot // self.grid.substream_slots + 1) * self.grid.substream_slots)
        if self.max_wait_slots is not None:
            until = min(until, end_slot + self.max_wait_slots)
        return Wait(until)

    def learn_straggler_share(self, share: float) -> None:
        """Learns the stragglers' half-width at an answer, relative to the estimate. Infinity or NaN means that it is
        not known.
        """
        share = min(share if math.isfinite(share) else 1.0, self.target.error / 2)
        self._straggler_share += 0.2 * (share - self._straggler_share)

    def take(self, sources: Sequence[int | None]) -> None:
        """Replaces the sources by the sources `sources`; None adds a source without history. State that belongs to no
        source, such as backtests, does not change.
        """
        for part in (self.triangle, self.model, self.late, self.history):
            part.take("source", sources)

    def to_state(self) -> State:
        """Returns the whole state: about 17 bytes per source and lag, and at most 20 KB for the calibration record."""
        numbers = [
            self.triangle.sources, astuple(self.grid), self.window_slots, astuple(self.target), self.measure,
            self.max_wait_slots, self.straggler_confidence, self.slot, self.drifting_substreams, self.steady_slots,
            self._straggler_share, self.triangle.horizon,
        ]  # fmt: skip
        parts = ("triangle", "model", "late", "history", "calibration")
        return State(numbers, {}, {name: getattr(self, name).to_state() for name in parts})

    @classmethod
    def from_state(cls, state: State) -> EarlyTrigger:
        """Returns a trigger with the same state as the trigger whose `to_state` returned `state`.

        Raises:
            CorruptSynopsis: the state cannot be read.
        """
        try:
            sources, grid, window_slots, target, measure, max_wait, confidence, slot, *drift, share, horizon = (
                state.numbers
            )
            result = cls(
                sources, SlotGrid(*grid), window_slots, AccuracyTarget(*target), measure, max_wait_slots=max_wait,
                horizon=horizon,
            )  # fmt: skip
            result.straggler_confidence = confidence
            result.slot, result._straggler_share = slot, share
            result.drifting_substreams, result.steady_slots = drift
            for name in ("triangle", "model", "late", "history"):
                getattr(result, name).restore(state.components[name])
            result.calibration = Calibration.from_state(state.components["calibration"])
        except (KeyError, TypeError, ValueError, InvalidInput) as exc:
            raise CorruptSynopsis(f"the state of a trigger cannot be read: {type(exc).__name__}: {exc}") from exc
        return result

    def is_unprecedented(self, offset: int, alarm: float) -> bool:
        """Returns `Calibration.is_unprecedented`; False if a source is silent.

        A silence raises the alarm. Backtests cover reporting sources only, so their alarms are not comparable.
        """
        return not self.triangle.silent_slots.any() and self.calibration.is_unprecedented(offset, alarm)

    def _is_too_small(self, sample: WindowSample, model: WindowModel, allowed: FloatArray) -> bool:
        """Returns whether the sample will be too small when all stragglers have arrived and were sampled at the same
        rate.
        """
        if self.measure in COUNTS:
            return False
        arrived = sample.arrived.sum(axis=0)
        rate = sample.count.sum(axis=0) / np.maximum(arrived, 1.0)
        if not (rate < 1).any():
            return False
        expected = np.maximum(model.events - sample.arrived, 0.0)
        width = model.sampling_width(sample.count + rate * expected, self.quantile)
        return bool(((rate < 1) & (arrived > 0) & (width > allowed)).any())

    def _expects_nothing(self, offset: int, stragglers: Stragglers, earned: bool) -> bool:
        """Returns whether no more events are expected.

        This is so if the probability of one more event is within the allowed failures, or if the window is older than
        the longest lag. A window without an interval may get an interval while its sources are young. It then waits
        although no more events are expected.
        """
        if offset + 1 >= self.grid.lags:
            return True
        if not stragglers.known or (not earned and self.triangle.is_young(self.grid.lags).any()):
            return False
        if not earned and self.is_unprecedented(offset, float(stragglers.alarm[0])):
            return False
        expected = float(stragglers.expected[self.triangle.silent_slots == 0].sum())
        return expected < NEGLIGIBLE_FAILURES * (1 - self.target.confidence)

    def _is_silence_too_wide(self, stragglers: Stragglers, model: WindowModel) -> bool:
        """Returns whether the interval of the silent sources alone is wider than the target. Waiting does not help
        then.
        """
        silent = self.triangle.silent_slots > 0
        if not silent.any():
            return False
        if (self.model.weight[silent] < SILENT_SUBSTREAMS).any():
            return True
        width = max(DEFAULT_FACTOR, self.quantile) * float(np.sqrt((stragglers.deviation[silent] ** 2).sum()))
        if self.measure in NOT_PREDICTED:
            width += float(stragglers.expected[silent].sum())
        return width > 0.95 * self.target.error * float(model.size.sum())


class TriggerBatch:
    """Triggers of one query over the same sources. All these triggers began at ends of sub-streams.

    The batch shares its memory with the triggers. Each trigger may still be used alone, but only the batch advances
    time. The batch is valid until a trigger becomes a member of another batch.
    """

    def __init__(self, triggers: Sequence[EarlyTrigger]) -> None:
        self.triggers = list(triggers)
        self.triangle = ArrivalTriangle.joined([t.triangle for t in triggers])
        self.model = StragglerModel.joined(self.triangle, [t.model for t in triggers])

    def advance(self, arrived: FloatArray, reporting: BoolArray) -> None:
        """Advances all triggers by one slot, like `EarlyTrigger.on_slot`.

        The arguments are over the sources of all triggers, in the order of the triggers.
        """
        self.triangle.advance(arrived, reporting)
        advance_slot(self.triggers, self.model, arrived)

    def rates(self) -> FloatArray:
        """Returns `EarlyTrigger.rates` of all triggers, for the window that begins now, [2, source, trigger]."""
        stragglers = self.model.predict(0, self.triggers[0].window_slots, lags_wanted=False)
        return np.concatenate([t.rates(stragglers.of(i)) for i, t in enumerate(self.triggers)], axis=2)

    def on_answered(
        self,
        selected: Sequence[int],
        sample: WindowSample,
        sums: tuple[FloatArray, FloatArray, FloatArray],
        straggler_shares: FloatArray,
    ) -> None:
        """Updates the selected triggers from an answered window.

        Args:
            selected: indices of the triggers.
            sample: the sample of the selected triggers.
            sums: count, Σv and Σv² of the sample, each [source of the selected triggers, lag group].
            straggler_shares: half-widths of the stragglers relative to the estimates, per selected trigger.
        """
        triggers, (count, total, squares) = [self.triggers[i] for i in selected], sums
        history = ValueHistory.joined([t.history for t in triggers])
        history.learn(sample)
        history.copy_to([t.history for t in triggers])
        for i, (trigger, share) in enumerate(zip(triggers, straggler_shares.tolist(), strict=True)):
            rows = slice(i * trigger.triangle.sources, (i + 1) * trigger.triangle.sources)
            substreams = trigger.window_slots / trigger.grid.substream_slots
            trigger.late.learn(count[rows], total[rows], squares[rows], substreams)
            trigger.learn_straggler_share(share)


def window_models(
    triggers: Sequence[EarlyTrigger], model: StragglerModel, offset: int, sample: WindowSample
) -> tuple[Stragglers, WindowModel]:
    """Returns the expected stragglers of a window `offset` slots after the window's end, and the model of the estimate.

    Args:
        model: the straggler model over the sources of all triggers, in the order of the triggers.
    """
    first, count = triggers[0], len(triggers)
    stragglers = model.predict(offset, first.window_slots, lags_wanted=first.measure not in COUNTS)
    if first.measure in COUNTS:
        ratio = LateRatio(np.ones(model.triangle.sources), np.zeros(model.triangle.sources))
    else:
        late = first.late if count == 1 else LateValues.joined([t.late for t in triggers])
        ratio = late.ratio(stragglers.by_lag, sample.by_lag)
    history = first.history if count == 1 else ValueHistory.joined([t.history for t in triggers])
    spread = history.spread(sample, sample.means(history.mean))
    alarms = list(zip(triggers, stragglers.alarm.tolist(), strict=True))
    factor = [t.calibration.factor(offset, alarm, t.straggler_confidence) for t, alarm in alarms]
    quantile = np.array([t.quantile for t in triggers])
    # Backtests cover reporting sources only. It is not known how well silent sources are predicted.
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


def advance_slot(triggers: Sequence[EarlyTrigger], model: StragglerModel, arrived: FloatArray) -> None:
    """Updates the triggers after the triangle of `model` has advanced by one slot with `arrived`.

    All triggers began at ends of sub-streams, so their sub-streams end at the same time.
    """
    model.on_slot(arrived, triggers[0].slot)
    for trigger in triggers:
        trigger.slot += 1
        trigger.steady_slots += 1
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
    """Adds a prediction to the calibration of the selected triggers, as if a window had ended `offset` slots ago."""
    if not selected:
        return
    triangle, window_slots = model.triangle, triggers[0].window_slots
    predicted = model.predict(offset, min(window_slots, triangle.grid.lags - offset), lags_wanted=False)
    if offset == 0:
        for i in selected:
            _track_drift(triggers[i], float(predicted.drift[i]))

    def summed(by_source: FloatArray) -> list[float]:
        return [float(x) for x in by_source.reshape(len(triggers), -1).sum(axis=1)]

    # Errors in pauses, in which nothing was expected and nothing arrived, do not show how good later predictions are.
    # Errors of sources younger than the longest lag do not show it either, because their delays are not known yet. The
    # next window has less history than all later windows. Its errors count until later errors are known.
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
    """Returns whether all sources of each trigger have been observed for `slots` slots, [trigger].

    The time before a source's first event does not count.
    """
    border = min(slots, triangle.grid.lags - 1)
    older = triangle.seen[:, border:].sum(axis=1) + triangle.expired
    younger = triangle.seen[:, :border].sum(axis=1)
    by_source = (triangle.age >= slots) & ((older > 0) | (younger == 0))
    return np.asarray(by_source.reshape(len(triggers), -1).all(axis=1))


def _track_drift(trigger: EarlyTrigger, drift: float) -> None:
    if drift > ALARM_THRESHOLD:
        trigger.steady_slots = 0
    trigger.drifting_substreams = trigger.drifting_substreams + 1 if drift > DRIFT else 0
    if trigger.drifting_substreams >= DRIFT_SUBSTREAMS:
        trigger.triangle.reset_long_memory()
        trigger.drifting_substreams = 0


def _resolve(triggers: Sequence[EarlyTrigger], triangle: ArrivalTriangle) -> None:
    """Compares the predictions of each trigger with the true numbers of events that are known by now."""
    settled = (triangle.distributions()[LONG] >= SETTLED_SHARE).reshape(len(triggers), -1, triangle.grid.lags)
    horizons = np.argmax(settled.all(axis=1), axis=1).tolist()
    for trigger, horizon in zip(triggers, horizons, strict=True):
        for boundary in trigger.calibration.due(trigger.slot, horizon + 1):
            trigger.calibration.resolve(boundary, float(trigger.triangle.total(trigger.slot - boundary).sum()))
