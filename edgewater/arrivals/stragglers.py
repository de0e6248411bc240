"""Estimates per source how many events of a window have not arrived yet, and the error of this estimate.

The estimate is the number of arrived events divided by the probability of arrival (Horvitz and Thompson). The Aion
paper predicts the size of a window from history instead. Then only 12–63 % of the intervals contain the true size if
the event rate drifts. Some slots are too young for an estimate from their own events. They get the rate of the slots
just before them, to the degree to which adjacent slots were similar in the past (credibility; the Bornhuetter–Ferguson
estimator is the limit).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgewater.arrivals.named_arrays import NamedArrays
from edgewater.arrivals.schedule import MAX_LAGS
from edgewater.arrivals.triangle import LONG, SHORT, ArrivalTriangle
from edgewater.synopses import BoolArray, FloatArray, IntArray
from edgewater.synopses.encoding.state import State

DEFAULT_FACTOR = 4.0
"""Standard errors per half-width while no past error is recorded. The confidence is 94 % by Chebyshev's inequality, and
99.99 % for a normal distribution."""
INFORMATIVE_SLOTS = 15.0
"""The rate is estimated from the youngest slots: as many slots as have the arrivals of this number of complete
slots."""

DISPERSION_SUBSTREAMS = 50.0
USUAL_SUBSTREAMS = 20.0
_NEIGHBOURS = 15
PRIOR_SLOTS = 0.25
"""Weight of the usual rate, in complete slots. The weight is negligible if other slots are known."""

MAX_RATE_CHANGE = 9.0
"""Largest squared relative change of the rate. So a sub-stream counts as at most four times the usual rate.

The usual rate is almost zero before a source's first event and in a long pause. Without this bound, the squared ratio
to the usual rate would exceed all other variances by ten orders of magnitude for minutes. During these minutes, no
window could be answered early."""

MIN_EVENTS = 30
SILENT_SUBSTREAMS = 5
"""The fewest sub-streams after which the variation of a silent source's rate is known. With fewer sub-streams, the
source is unknown. With four differences, Student's quantile at 98 % (3.7) is below `DEFAULT_FACTOR`."""
LATE_SHARE = 0.8
"""Arrivals whose lag is above this quantile of the delays are late. The clumps of late records would not be visible
among all arrivals."""

BLOCKS = 5
"""Blocks of a sub-stream whose late arrivals are compared. A reader that polls more often than once per block makes no
clumps of late arrivals."""

CLUMP_DECAY = math.exp(-1 / 50)
"""Decay of the sums of late arrivals per sub-stream."""

LIKELY_CLUMPS = 0.04
"""Expected number of clumps from which an interval of `DEFAULT_FACTOR` standard errors must contain two
clumps. From a quarter of this number on (0.01), the interval contains one clump; 1 % of such windows have a clump."""

LIKELY_PAUSE = 7.0
"""The number of events that a source's mean rate expects during a pause. If a Poisson process expects more events than
this, the probability that no event comes is less than 0.001."""

_MIN_SHARE = 1e-3


@dataclass(frozen=True, slots=True)
class Stragglers:
    """The events of a window that have not arrived yet.

    Arrays are float64 over the sources of all triggers, in the order of the triggers, unless stated otherwise.

    Attributes:
        arrived: number of events of the window that have arrived.
        expected: number of events that will still arrive.
        deviation: standard error of `expected` according to the model, before `calibration.py` scales it.
        untested: standard error of `expected` including the clumps in which late records arrive. It is used until past
            errors show the clumps.
        by_lag: `expected` by the lag at which the events will arrive, (sources, lags).
        rate: events per slot at the window's end.
        known: per trigger, whether every source has been observed for longer than the longest lag that can occur. A
            silent source must also have been observed for long enough to know how its rate varies. However many events
            a source has, it cannot have shown a lag longer than its age. (Neither missing arrivals nor silence mean
            that there are no events.)
        drift: per trigger, standard errors by which the two memories differ, over all sources.
        alarm: per trigger, standard errors by which delays or rates have changed, the maximum over sources.
    """

    arrived: FloatArray
    expected: FloatArray
    deviation: FloatArray
    untested: FloatArray
    by_lag: FloatArray
    rate: FloatArray
    known: BoolArray
    drift: FloatArray
    alarm: FloatArray

    def of(self, trigger: int) -> Stragglers:
        """Returns the stragglers of one trigger."""
        sources = len(self.expected) // len(self.known)
        rows, one = slice(trigger * sources, (trigger + 1) * sources), slice(trigger, trigger + 1)
        return Stragglers(
            self.arrived[rows], self.expected[rows], self.deviation[rows], self.untested[rows], self.by_lag[rows],
            self.rate[rows], self.known[one], self.drift[one], self.alarm[one],
        )  # fmt: skip


class StragglerModel(NamedArrays):
    """Predicts stragglers from a triangle. The model's state describes how evenly the events of each source arrive.

    Args:
        triggers: number of triggers whose sources the triangle has. Each trigger has the same number of sources.

    Attributes:
        dispersion: variance of a slot's events around the mean of adjacent slots, in units of this mean; 1 for a
            Poisson process.
        rate_variance: mean squared relative difference of a sub-stream's events from the usual number.
        usual_rate: events per slot over about the last `USUAL_SUBSTREAMS`. A silent source is expected to send at this
            rate.
        weight: number of sub-streams from which the model has learned.
        late: number of late arrivals, as a decayed sum over blocks, per trigger. A sub-stream has `BLOCKS` blocks.
        uneven: half of the squared difference between the late arrivals of two consecutive blocks, as a decayed sum,
            per trigger. The ratio uneven/late is 1 if late events arrive one by one (Poisson). If they arrive in
            clumps, the ratio is the size of a clump.
        block, last_block: late arrivals of the current block and of the block before it, per trigger.
        late_from: the least lag of late arrivals, per source.
    """

    LAYOUT = {
        "dispersion": (("source",), np.float64, 1),
        **dict.fromkeys(("rate_variance", "usual_rate", "weight"), (("source",), np.float64, 0)),
        **dict.fromkeys(("late", "uneven", "block", "last_block"), (("trigger",), np.float64, 0)),
        "late_from": (("source",), np.int64, MAX_LAGS),
    }
    dispersion: FloatArray
    rate_variance: FloatArray
    usual_rate: FloatArray
    weight: FloatArray
    late: FloatArray
    uneven: FloatArray
    block: FloatArray
    last_block: FloatArray
    late_from: IntArray

    def __init__(self, triangle: ArrivalTriangle, triggers: int = 1) -> None:
        super().__init__(source=triangle.sources, trigger=triggers)
        self.triangle, self.triggers = triangle, triggers
        self._is_late: FloatArray | None = None

    @classmethod
    def joined(cls, triangle: ArrivalTriangle, models: Sequence[StragglerModel]) -> StragglerModel:
        """Joins models into one model over the joined `triangle` (`ArrivalTriangle.joined`).

        The arrays of `models` become views of the result's arrays.
        """
        result = cls(triangle, len(models))
        result.join(models, "source", "trigger", shared=True)
        for model in models:
            model._is_late = None  # the result changes `late_from`
        return result

    def take(self, axis: str, rows: Sequence[int | None]) -> None:
        super().take(axis, rows)
        self._is_late = None

    def restore(self, state: State) -> None:
        super().restore(state)
        self._is_late = None

    def on_slot(self, arrived: FloatArray, slot: int) -> None:
        """Learns the clumps in which late events arrive. Called after each slot, before `on_substream`.

        Events that arrived while their source was silent are ignored.

        Args:
            arrived: events that arrived in the slot, [source, lag].
            slot: number of slots before this slot, counted from an end of a sub-stream.
        """
        if self._is_late is None:
            self._is_late = (np.arange(self.triangle.grid.lags) >= self.late_from[:, None]).astype(np.float64)
        late = np.vecdot(arrived, self._is_late)
        late[self.triangle.silent_slots > 0] = 0.0
        self.block += self._per_trigger(late)
        slots = self.triangle.grid.substream_slots
        if slot * BLOCKS // slots != (slot + 1) * BLOCKS // slots:
            self.late += self.block
            self.uneven += (self.block - self.last_block) ** 2 / 2
            self.last_block[:] = self.block
            self.block[:] = 0.0

    def on_substream(self) -> None:
        """Learns how evenly events arrive. Called at the end of each sub-stream."""
        triangle, slots = self.triangle, self.triangle.grid.substream_slots
        self.late *= CLUMP_DECAY
        self.uneven *= CLUMP_DECAY
        self.late_from[:] = (triangle.distributions()[LONG] < LATE_SHARE).sum(axis=1)
        self._is_late = None
        if triangle.grid.lags < 2 * slots + 2 * _NEIGHBOURS + 2:
            return  # SlotGrid.of makes no such grid
        share = triangle.distributions()[LONG]
        mature = np.minimum((share < 0.9).sum(axis=1), triangle.grid.lags - 2 * slots - 2 * _NEIGHBOURS - 2)
        learn = (triangle.age > mature + 2 * slots + 2 * _NEIGHBOURS) & (triangle.silent_slots == 0) & (mature >= 0)
        if not learn.any():
            return
        at = np.maximum(mature, 0)[:, None] + np.arange(2 * slots + 2 * _NEIGHBOURS)
        count = np.take_along_axis(triangle.seen, at, axis=1)
        count = count / np.maximum(np.take_along_axis(share, at, axis=1), 0.5)
        # Stragglers of a slot are predicted from slots some distance before it. So a slot is compared with such slots.
        sums = np.concatenate([np.zeros((len(count), 1)), np.cumsum(count, axis=1)], axis=1)
        half = _NEIGHBOURS // 2
        before = (sums[:, half + _NEIGHBOURS : half + _NEIGHBOURS + slots] - sums[:, half : half + slots]) / _NEIGHBOURS
        gap = (count[:, :slots] - before) ** 2
        expected = np.maximum(before, 1.0) * (1 + 1 / _NEIGHBOURS)
        pace = 1 / np.minimum(self.weight + 1, DISPERSION_SUBSTREAMS)
        uneven = gap.sum(axis=1) / expected.sum(axis=1)
        self.dispersion += np.where(learn, pace * (uneven - self.dispersion), 0.0)
        rate = sums[:, slots] / slots
        change = np.where(self.weight > 0, (rate / np.maximum(self.usual_rate, 1e-9) - 1) ** 2, 0.0)
        change = np.minimum(change, MAX_RATE_CHANGE)
        self.rate_variance += np.where(learn, pace * (change - self.rate_variance), 0.0)
        pace = 1 / np.minimum(self.weight + 1, USUAL_SUBSTREAMS)
        self.usual_rate += np.where(learn, pace * (rate - self.usual_rate), 0.0)
        self.weight += learn

    def predict(self, first_lag: int, slots: int, *, lags_wanted: bool = True) -> Stragglers:
        """Returns the stragglers of a window.

        Args:
            first_lag: age in slots of the window's last slot; 0 at the window's end.
            slots: number of slots of the window.
            lags_wanted: whether to compute `by_lag`. If false, `by_lag` is empty.
        """
        triangle = self.triangle
        first_lag = min(first_lag, triangle.grid.lags - 1)
        silent_slots, lags = triangle.silent_slots, triangle.grid.lags
        shares, log_variances = triangle.distributions(), triangle.log_variances()
        batch_shift = self._batch_shift()
        shift = np.where(silent_slots > 0, silent_slots, batch_shift)
        seen, age = triangle.seen, triangle.age
        if not shift.any():
            return self._predict(first_lag, slots, seen, shares, log_variances, age, batch_shift, lags_wanted)

        def shifted(values: FloatArray, by: IntArray) -> FloatArray:
            at = np.arange(lags) - by[:, None]
            taken = np.take_along_axis(values, np.broadcast_to(np.clip(at, 0, lags - 1), values.shape), axis=-1)
            return np.where(at >= 0, taken, 0.0)

        # The state of a silent source is `silent_slots` old, so no events of later slots have arrived.
        seen, age = shifted(seen, silent_slots), age + silent_slots
        shares, log_variances = shifted(shares, shift), shifted(log_variances, shift)
        return self._predict(first_lag, slots, seen, shares, log_variances, age, batch_shift, lags_wanted)

    def _batch_shift(self) -> IntArray:
        """Returns the slots by which the delays of events that arrive in batches are now longer than usual, [source].

        The delays are averages over the time between two batches. Just before a batch, every event has been missing for
        longer than on average. Just after a batch, it has been missing for less long.
        """
        triangle = self.triangle
        mean = triangle.mean_pause(SHORT)
        # A long pause is no batch. Its mean stays in the long memory after the source has begun to send again.
        is_periodic = (triangle.age > 0) & (triangle.mean_pause() < triangle.grid.substream_slots / 2)
        rate = np.where(self.weight > 0, self.usual_rate, triangle.total(0) / np.maximum(triangle.age, 1))
        shift = np.round(self._batched_share(rate, mean) * (triangle.pause - mean))
        return np.where(is_periodic, shift, 0.0).astype(np.int64)

    def _predict(
        self,
        first_lag: int,
        slots: int,
        seen: FloatArray,
        shares: FloatArray,
        log_variances: FloatArray,
        age: IntArray,
        batch_shift: IntArray,
        lags_wanted: bool,
    ) -> Stragglers:
        lags = self.triangle.grid.lags
        last = min(first_lag + slots, lags)
        born = np.arange(first_lag, lags) < age[:, None]
        recent = _recent(seen[:, first_lag:], shares[:, :, first_lag:], born)
        rate = self._rates(recent)
        window = slice(first_lag, last)
        share, arrived = shares[:, :, window], seen[:, window]
        credibility = rate / np.maximum(self.dispersion - 1, 1e-9)  # in slots of Poisson noise: k = λ/(φ - 1)
        scale = (credibility + 1e-12)[..., None]
        per_slot = (credibility[..., None] + arrived) * (rate[..., None] / scale)
        shrinkage = share * (rate[..., None] / scale)
        shrinkage += 1
        per_slot /= shrinkage
        per_slot *= born[:, : last - first_lag]
        expected = (per_slot * (1 - share)).sum(axis=2)
        deviation = np.sqrt(log_variances[:, :, window])
        deviation *= share
        deviation *= per_slot
        imprecision = deviation.sum(axis=2) ** 2
        gap = np.abs(expected[SHORT] - expected[LONG])
        trust = gap**2 / (gap**2 + imprecision[SHORT] + 1e-9)  # weight of the short memory
        mixed = trust * expected[SHORT] + (1 - trust) * expected[LONG]
        batched = self._batched_rate(rate[LONG])
        # Without any delay, a shift by -s leaves s²/2T slots of events too many, for a time T between two batches.
        excess = np.minimum(batch_shift, 0) ** 2 / (4 * self.triangle.mean_pause(SHORT) + 2)
        variance = (
            mixed * np.clip(self.dispersion, 0.3, None)
            + mixed**2 * self._rate_noise(recent)
            + trust * imprecision[SHORT]
            + (1 - trust) * imprecision[LONG]
            + trust * (1 - trust) * gap**2
            + (batched * np.clip(self.triangle.pause - first_lag, 0, slots)) ** 2
            + (batched * excess) ** 2
        )
        difference = self._per_trigger(expected[SHORT] - expected[LONG])
        drift = np.abs(difference) / np.sqrt(self._per_trigger(imprecision[LONG] + imprecision[SHORT]) + 1.0)
        jump = np.abs(self._per_trigger(recent.change)) / np.sqrt(self._per_trigger(recent.change_variance) + 1e-9)
        clumped = self._clump_variance(mixed) + self._pause_variance(batched, shares[LONG], window, batch_shift)
        return Stragglers(
            arrived=arrived.sum(axis=1),
            expected=mixed,
            deviation=np.sqrt(variance),
            untested=np.sqrt(variance + clumped),
            by_lag=_by_lag(per_slot, shares, first_lag, trust) if lags_wanted else np.zeros((len(seen), 0)),
            rate=trust * rate[SHORT] + (1 - trust) * rate[LONG],
            known=self._is_known(first_lag, slots),
            drift=np.asarray(drift),
            alarm=np.maximum(drift, jump),
        )

    def _rates(self, recent: _Recent) -> FloatArray:
        """Returns the events per slot, [memory, source]. A silent source is expected to send at its usual rate."""
        learned, prior = self.weight > 0, self._prior_slots()
        rate = (recent.events + prior * self.usual_rate) / np.maximum(recent.complete_slots + prior, _MIN_SHARE)
        return np.asarray(np.where((self.triangle.silent_slots > 0) & learned, self.usual_rate, rate))

    def _prior_slots(self) -> FloatArray:
        """Returns the weight of each source's usual rate, in complete slots."""
        return np.where(self.weight > 0, PRIOR_SLOTS, 0.0)

    def _rate_noise(self, recent: _Recent) -> FloatArray:
        """Returns the relative variance of the rate of each source.

        The usual rate was counted over many sub-streams. The young slots of a silent source were not counted at all.
        """
        silent, prior = self.triangle.silent_slots > 0, self._prior_slots()
        usual_events = self.usual_rate * USUAL_SUBSTREAMS * self.triangle.grid.substream_slots
        counted = np.where(silent & (self.weight > 0), usual_events, recent.events[LONG])
        prior_weight = np.where(silent, 1.0, prior / np.maximum(recent.complete_slots[LONG] + prior, _MIN_SHARE))
        return np.asarray(1 / np.maximum(counted, 1.0) + prior_weight**2 * self.rate_variance)

    def _is_known(self, first_lag: int, slots: int) -> BoolArray:
        """Returns `Stragglers.known` per trigger."""
        triangle, horizon = self.triangle, self.triangle.horizon
        known = (triangle.observed > horizon) & (triangle.age >= min(first_lag, horizon) + slots)
        known &= ((triangle.silent_slots == 0) | (self.weight >= SILENT_SUBSTREAMS)) & self._shows_rate()
        return np.asarray(known.reshape(self.triggers, -1).all(axis=1))

    def _shows_rate(self) -> BoolArray:
        """Returns whether the arrivals of each source show the source's rate, [source].

        A new query that inherits delays is old enough for an interval when its first window ends. But the youngest
        slots have no arrivals yet between the first two batches of a source. No slot has arrivals before the first
        batch.
        """
        triangle, learnt = self.triangle, self.weight > 0
        if learnt.all():
            return learnt
        arrived = triangle.total(0)
        paused = arrived / np.maximum(triangle.age - triangle.pause, 1.0) * triangle.pause
        return np.asarray(learnt | (arrived > 0) & (paused <= LIKELY_PAUSE))

    def _clump_variance(self, expected: FloatArray) -> FloatArray:
        """Returns the variance of the number of stragglers that is caused by clumps, [source].

        The end of an outage releases all late records of all sources at once. The standard deviation of a rare clump is
        smaller than the clump. So the variance is (size/2)² while a clump is likely.
        """
        sources = len(expected) // self.triggers
        size = np.where(self.late > MIN_EVENTS, self.uneven / np.maximum(self.late, 1.0), 0.0)
        likely = np.minimum(self._per_trigger(expected), LIKELY_CLUMPS * size) / LIKELY_CLUMPS
        return np.asarray(np.repeat(likely * size / (4 * sources), sources))

    def _batched_rate(self, rate: FloatArray) -> FloatArray:
        """Returns the events per slot that arrive in batches because a reader polls, [source].

        Between two batches, all events that are born in the pause are missing, whatever their age. Batches are detected
        by how much the mean pause exceeds the mean pause of a Poisson process. The pause of a Poisson process gives no
        information about missing events.
        """
        triangle = self.triangle
        if not self.weight.all():  # between the first batches, the youngest slots have no arrivals yet
            rate = np.maximum(rate, triangle.total(0) / np.maximum(triangle.age, 1))
        rate = np.where(self.weight > 0, self.usual_rate, rate)
        return np.asarray(rate * self._batched_share(rate, triangle.mean_pause()))

    def _batched_share(self, rate: FloatArray, mean_pause: FloatArray) -> FloatArray:
        """Returns the share of the events that arrive in batches, [source]."""
        arrivals = -np.expm1(-np.maximum(rate, 1e-3))
        share = np.clip(1 - (1 - arrivals) / arrivals / np.maximum(mean_pause, 1e-9), 0.0, 1.0)
        return np.where(self.triangle.silent_slots > 0, 0.0, share)

    def _pause_variance(self, rate: FloatArray, share: FloatArray, window: slice, batch_shift: IntArray) -> FloatArray:
        """Returns the variance of the number of stragglers because delays follow batches, [source].

        The delays are known only as averages over the time between two batches. Shifted by the time since the last
        batch, they are exact if they hardly change within the time between two batches. Events may be missing although
        the shifted delays expect them to have arrived. These events usually arrive within the part of the pause that
        the shift does not contain. `DEFAULT_FACTOR` standard errors contain these events of all sources together.

        Args:
            rate: events per slot that come in batches, [source].
            share: probability of arrival, shifted, [source, lag].
            window: the window's lags.
            batch_shift: slots by which delays were shifted, [source].
        """
        sources = len(rate) // self.triggers
        rest = self.triangle.pause.astype(np.int64) - batch_shift
        if not (rate * rest).any():
            return np.zeros(len(rate))
        at = np.arange(window.start, window.stop) - rest[:, None]
        before = np.where(at >= 0, np.take_along_axis(share, np.maximum(at, 0), axis=1), 0.0)
        missing = self._per_trigger(rate * (share[:, window] - before).sum(axis=1))
        return np.asarray(np.repeat((missing / DEFAULT_FACTOR) ** 2 / sources, sources))

    def _per_trigger(self, by_source: FloatArray) -> FloatArray:
        return np.asarray(by_source.reshape(self.triggers, -1).sum(axis=1))


@dataclass(frozen=True, slots=True)
class _Recent:
    """Arrivals of the youngest slots, [memory, source].

    Attributes:
        events: number of arrivals.
        complete_slots: the number of complete slots that would have as many arrivals as `events`.
        change: difference between this rate and the rate of the slots before, [source].
        change_variance: variance of `change` for a Poisson process, [source].
    """

    events: FloatArray
    complete_slots: FloatArray
    change: FloatArray
    change_variance: FloatArray


def _recent(seen: FloatArray, share: FloatArray, born: BoolArray) -> _Recent:
    further = 2 * int(INFORMATIVE_SLOTS)
    for width in (4 * further, seen.shape[1]):  # usually a few slots are enough
        informed = np.cumsum(share[..., :width] * born[:, :width], axis=2)
        last = informed.shape[2] - 1
        stop = (informed < INFORMATIVE_SLOTS).sum(axis=2)
        if (stop + further <= last).all():
            break
    stop = np.minimum(stop, last)
    count = np.cumsum(seen[:, :width], axis=1)
    memory, source = np.arange(stop.shape[0])[:, None], np.arange(stop.shape[1])
    beyond = np.minimum(stop + further, last)
    events, slots = count[source, stop], informed[memory, source, stop]
    before = count[source, beyond] - events
    slots_before = np.maximum(informed[memory, source, beyond] - slots, _MIN_SHARE)
    divisor = np.maximum(slots, _MIN_SHARE)
    rate, old = (events / divisor)[LONG], (before / slots_before)[LONG]
    return _Recent(events, slots, rate - old, rate / divisor[LONG] + old / slots_before[LONG])


def _by_lag(per_slot: FloatArray, shares: FloatArray, first_lag: int, trust: FloatArray) -> FloatArray:
    """Returns the stragglers by lag. The stragglers with lag l come from the slots that are younger than l."""
    weighted, lags = np.zeros_like(shares), shares.shape[2]
    begin, end = first_lag + 1, min(first_lag + 1 + per_slot.shape[2], lags)
    np.cumsum(per_slot[:, :, : end - begin], axis=2, out=weighted[:, :, begin:end])
    if end > begin:
        weighted[:, :, end:] = weighted[:, :, end - 1 : end]
    weighted[:, :, 1:] *= shares[:, :, 1:] - shares[:, :, :-1]
    return np.asarray(trust[:, None] * weighted[SHORT] + (1 - trust)[:, None] * weighted[LONG])
