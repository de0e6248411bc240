"""Estimates how many events of a window have not arrived yet, per source, and the error of this estimate.

The estimate is the number of arrived events divided by the probability of arrival (Horvitz and Thompson). The Aion
paper predicts the size of a window from history instead. Then only 12–63 % of the intervals contain the true size if
the event rate drifts. Slots too young to be estimated by themselves take the rate of the slots just before them, as far
as neighbouring slots have been alike in the past (credibility; the Bornhuetter–Ferguson estimator is the limit).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from center.early.calibration import DEFAULT_FACTOR
from center.early.named_arrays import Arrays, ArrayState
from center.early.triangle import LONG, SHORT, ArrivalTriangle
from edgewater.synopses import BoolArray, FloatArray, IntArray

INFORMATIVE_SLOTS = 15.0
"""The rate is estimated from as many slots as contain the arrivals of this many complete ones."""

DISPERSION_SUBSTREAMS = 50.0
USUAL_SUBSTREAMS = 20.0
_NEIGHBOURS = 15
PRIOR_SLOTS = 0.25
"""Weight of the usual rate in complete slots: negligible, unless nothing else is known."""

MAX_RATE_CHANGE = 9.0
"""Bound of a squared relative change of rate: a sub-stream counts as at most four times the usual. The usual rate is
almost zero before a source's first event and in a long pause; the squared ratio to it would exceed all other variances
by ten orders of magnitude for minutes, during which no window could be answered early."""

MIN_EVENTS = 30
SILENT_SUBSTREAMS = 5
"""Sub-streams from which the variation of a silent source's rate is known; with fewer, the source is unknown. With four
differences, Student's quantile at 98 % (3.7) is below `calibration.DEFAULT_FACTOR`."""
LATE_SHARE = 0.8
"""Arrivals with a lag above this quantile of the delays are late. The clumps of late records do not show among all."""

BLOCKS = 5
"""Parts of a sub-stream whose late arrivals are compared. A reader that polls more often makes no clumps of them."""

CLUMP_DECAY = math.exp(-1 / 50)
"""Per sub-stream."""

LIKELY_CLUMPS = 0.04
"""Expected clumps from which an interval of `calibration.DEFAULT_FACTOR` standard errors has to contain two. One is
contained from a quarter of that on, 0.01: of such windows 1 % have one."""

LIKELY_PAUSE = 7.0
"""Events that would have come in a pause at a source's mean rate. If a Poisson process expects more events than this,
the probability that none comes is less than 0.001."""

_MIN_SHARE = 1e-3


@dataclass(frozen=True, slots=True)
class Stragglers:
    """Events of a window that have not arrived yet; float64 (sources,) unless stated otherwise.

    Attributes:
        arrived: events of the window so far.
        expected: events still to arrive.
        deviation: standard error of `expected` according to the model, before `calibration.py` scales it.
        untested: the standard error with the clumps in which late records arrive. It is used while past errors do not
            show the clumps yet.
        by_lag: `expected` by the lag at which they will arrive, (sources, lags).
        rate: events per slot at the window's end.
        known: every source has been observed for longer than the longest lag that can occur, and, if it is silent,
            for long enough to know how its rate varies. A source cannot have shown a lag longer than its age, whatever
            the number of its events. (No arrivals yet is not "no events", and silence is not either.)
        drift: standard errors by which the two memories disagree, over all sources.
        alarm: standard errors by which delays or rates have changed, the maximum over sources.
    """

    arrived: FloatArray
    expected: FloatArray
    deviation: FloatArray
    untested: FloatArray
    by_lag: FloatArray
    rate: FloatArray
    known: bool
    drift: float
    alarm: float


@dataclass(frozen=True, slots=True)
class StragglersByTrigger:
    """`Stragglers` of several triggers: arrays over the sources of all triggers, in order.

    Attributes:
        known, drift, alarm: per trigger.
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
        sources = len(self.expected) // len(self.known)
        rows = slice(trigger * sources, (trigger + 1) * sources)
        return Stragglers(
            self.arrived[rows], self.expected[rows], self.deviation[rows], self.untested[rows], self.by_lag[rows],
            self.rate[rows], bool(self.known[trigger]), float(self.drift[trigger]), float(self.alarm[trigger]),
        )  # fmt: skip


_LATE = ("late", "uneven", "block", "last_block", "late_from")


class StragglerModel(ArrayState):
    """Predicts stragglers from a triangle. Its own state is how evenly the events of each source arrive.

    Args:
        triggers: number of triggers whose sources the triangle has, each with the same number of sources.

    Attributes:
        dispersion: variance of a slot's events around the mean of its neighbours, in units of that mean; 1: Poisson.
        rate_variance: mean squared relative difference of a sub-stream's events from the usual number.
        usual_rate: events per slot over about the last `USUAL_SUBSTREAMS`. A silent source is expected to go on at this
            rate.
        weight: number of sub-streams from which the model has learned.
        late, uneven: decayed sums per trigger over blocks, the `BLOCKS` of a sub-stream: late arrivals, and half of
            the squared difference of their number from the number of the block before. It is 1 if they arrive one
            by one (Poisson), and the size of a clump if they arrive in clumps.
        block, last_block: late arrivals of the current block, and of the block before, per trigger.
        late_from: the least lag of late arrivals, per source.
    """

    STATE = ("dispersion", "rate_variance", "usual_rate", "weight", *_LATE)

    def __init__(self, triangle: ArrivalTriangle, triggers: int = 1) -> None:
        self.triangle, self.triggers = triangle, triggers
        self.dispersion: FloatArray = np.ones(triangle.sources)
        self.rate_variance: FloatArray = np.zeros(triangle.sources)
        self.usual_rate: FloatArray = np.zeros(triangle.sources)
        self.weight: FloatArray = np.zeros(triangle.sources)
        self.late: FloatArray = np.zeros(triggers)
        self.uneven: FloatArray = np.zeros(triggers)
        self.block: FloatArray = np.zeros(triggers)
        self.last_block: FloatArray = np.zeros(triggers)
        self.late_from: IntArray = np.full(triangle.sources, triangle.grid.lags, np.int64)
        self._is_late: FloatArray | None = None

    @classmethod
    def join(cls, triangle: ArrivalTriangle, models: Sequence[StragglerModel]) -> StragglerModel:
        """Joins models to one over the joined `triangle` (`ArrivalTriangle.join`).

        The arrays of `models` become views of the result's arrays.
        """
        result = cls(triangle, len(models))
        for name in cls.STATE:
            whole = np.concatenate([getattr(m, name) for m in models])
            setattr(result, name, whole)
            length = len(whole) // len(models)
            for i, model in enumerate(models):
                setattr(model, name, whole[i * length : (i + 1) * length])
        for model in models:
            model._is_late = None  # the result changes `late_from`
        return result

    def inherit(self, late: float, uneven: float) -> None:
        """Takes the sums of late arrivals of another query of the same records; for one trigger, unless it has more."""
        if late > self.late[0]:
            self.late[0], self.uneven[0] = late, uneven

    def restore(self, arrays: Arrays) -> None:
        """Restores the result of `to_state`. It also accepts the older form, without late arrivals."""
        super().restore({name: getattr(self, name) for name in _LATE} | arrays)
        self._is_late = None

    def on_slot(self, arrived: FloatArray, slot: int) -> None:
        """Learns the clumps in which late events arrive. Called after each slot, before `on_substream`.

        Events that have arrived from a source while it was silent are left out.

        Args:
            arrived: events that arrived in the slot, [source, lag].
            slot: number of slots before it, in phase with the sub-streams.
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
        """Learns how evenly events arrive; called at the end of each sub-stream."""
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
        # A straggler is predicted from slots some distance before its own slot, so a slot is compared with these slots.
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
        """Returns the stragglers of a window of `slots` slots whose last slot is now `first_lag` slots old.

        At the window's end `first_lag` is 0. Without `lags_wanted`, `by_lag` is empty.
        """
        return self.predict_each(first_lag, slots, lags_wanted=lags_wanted).of(0)

    def predict_each(self, first_lag: int, slots: int, *, lags_wanted: bool = True) -> StragglersByTrigger:
        """Returns `predict` for each trigger."""
        triangle = self.triangle
        first_lag = min(first_lag, triangle.grid.lags - 1)
        silent_slots = triangle.silent_slots
        shares, log_variances = triangle.distributions(), triangle.log_variances()
        if not silent_slots.any():
            return self._predict(first_lag, slots, triangle.seen, shares, log_variances, triangle.age, lags_wanted)
        # The state of a silent source is `silent_slots` old: none of the later slots' events have arrived.
        at = np.arange(triangle.grid.lags) - silent_slots[:, None]
        known, at = at >= 0, np.maximum(at, 0)

        def shifted(values: FloatArray) -> FloatArray:
            taken = np.take_along_axis(values, np.broadcast_to(at, values.shape), axis=-1)
            return np.where(known, taken, 0.0)

        seen, age = shifted(triangle.seen), triangle.age + silent_slots
        return self._predict(first_lag, slots, seen, shifted(shares), shifted(log_variances), age, lags_wanted)

    def _predict(
        self,
        first_lag: int,
        slots: int,
        seen: FloatArray,
        shares: FloatArray,
        log_variances: FloatArray,
        age: IntArray,
        lags_wanted: bool,
    ) -> StragglersByTrigger:
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
        variance = (
            mixed * np.clip(self.dispersion, 0.3, None)
            + mixed**2 * self._rate_noise(recent)
            + trust * imprecision[SHORT]
            + (1 - trust) * imprecision[LONG]
            + trust * (1 - trust) * gap**2
            + (batched * np.clip(self.triangle.pause - first_lag, 0, slots)) ** 2
        )
        difference = self._per_trigger(expected[SHORT] - expected[LONG])
        drift = np.abs(difference) / np.sqrt(self._per_trigger(imprecision[LONG] + imprecision[SHORT]) + 1.0)
        jump = np.abs(self._per_trigger(recent.change)) / np.sqrt(self._per_trigger(recent.change_variance) + 1e-9)
        clumped = self._clump_variance(mixed) + self._pause_variance(batched, shares[LONG], window)
        return StragglersByTrigger(
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
        """Returns the events per slot by [memory, source]. A silent source is expected to go on at its usual rate."""
        learned, prior = self.weight > 0, self._prior_slots()
        rate = (recent.events + prior * self.usual_rate) / np.maximum(recent.complete_slots + prior, _MIN_SHARE)
        return np.asarray(np.where((self.triangle.silent_slots > 0) & learned, self.usual_rate, rate))

    def _prior_slots(self) -> FloatArray:
        """Returns the weight of each source's usual rate, in complete slots."""
        return np.where(self.weight > 0, PRIOR_SLOTS, 0.0)

    def _rate_noise(self, recent: _Recent) -> FloatArray:
        """Returns the relative variance of the rate of each source.

        The usual rate was counted over many sub-streams; the young slots of a silent source were not counted at all.
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
        """Returns whether the arrivals of each source show its rate, [source].

        A new query that inherits delays is old enough for an interval at its first window's end. Between the first two
        batches of a source the youngest slots seem to have no events then, and before the first one none has.
        """
        triangle, learnt = self.triangle, self.weight > 0
        if learnt.all():
            return learnt
        arrived = triangle.total(0)
        paused = arrived / np.maximum(triangle.age - triangle.pause, 1.0) * triangle.pause
        return np.asarray(learnt | (arrived > 0) & (paused <= LIKELY_PAUSE))

    def _clump_variance(self, expected: FloatArray) -> FloatArray:
        """Returns the variance of the number of stragglers because they arrive in clumps, [source].

        The end of an outage releases all late records, of all sources, at once. The standard deviation of a rare clump
        does not contain it, so the variance is (size/2)² while one is likely.
        """
        sources = len(expected) // self.triggers
        size = np.where(self.late > MIN_EVENTS, self.uneven / np.maximum(self.late, 1.0), 0.0)
        likely = np.minimum(self._per_trigger(expected), LIKELY_CLUMPS * size) / LIKELY_CLUMPS
        return np.asarray(np.repeat(likely * size / (4 * sources), sources))

    def _batched_rate(self, rate: FloatArray) -> FloatArray:
        """Returns the events per slot that arrive in batches, because a reader polls, [source].

        Between two batches all events are missing, whatever their age: as many as are born in the pause. The pause of a
        Poisson process says nothing. The excess of the mean pause over the pause of such a process tells them apart.
        """
        triangle = self.triangle
        if not self.weight.all():  # between the first batches, the youngest slots seem to have no events
            rate = np.maximum(rate, triangle.total(0) / np.maximum(triangle.age, 1))
        rate = np.where(self.weight > 0, self.usual_rate, rate)
        arrivals = -np.expm1(-np.maximum(rate, 1e-3))
        batched = np.clip(1 - (1 - arrivals) / arrivals / np.maximum(triangle.mean_pause(), 1e-9), 0.0, 1.0)
        return np.asarray(np.where(triangle.silent_slots > 0, 0.0, rate * batched))

    def _pause_variance(self, rate: FloatArray, share: FloatArray, window: slice) -> FloatArray:
        """Returns the variance of the number of stragglers because a batch is due, [source].

        The delays of batches are known on average over their phases. So in a pause, of the events that were born before
        it, those are missing too that usually arrive in as long a time. `calibration.DEFAULT_FACTOR` standard errors
        contain them, of all sources together.

        Args:
            rate: of the events that come in batches.
            share: by [source, lag].
            window: its lags.
        """
        sources = len(rate) // self.triggers
        if not (rate * self.triangle.pause).any():
            return np.zeros(len(rate))
        at = np.arange(window.start, window.stop) - self.triangle.pause.astype(np.int64)[:, None]
        before = np.where(at >= 0, np.take_along_axis(share, np.maximum(at, 0), axis=1), 0.0)
        missing = self._per_trigger(rate * (share[:, window] - before).sum(axis=1))
        return np.asarray(np.repeat((missing / DEFAULT_FACTOR) ** 2 / sources, sources))

    def _per_trigger(self, by_source: FloatArray) -> FloatArray:
        return np.asarray(by_source.reshape(self.triggers, -1).sum(axis=1))


@dataclass(frozen=True, slots=True)
class _Recent:
    """Arrivals of the youngest slots, [memory, source].

    Attributes:
        complete_slots: the number of complete slots that `events` are equivalent to.
        change: difference of the rate from the slots before, [source]; `change_variance`: its variance under Poisson.
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
    """Returns the stragglers by lag. Stragglers with lag l come from the slots of `per_slot` that are younger than
    l."""
    weighted, lags = np.zeros_like(shares), shares.shape[2]
    begin, end = first_lag + 1, min(first_lag + 1 + per_slot.shape[2], lags)
    np.cumsum(per_slot[:, :, : end - begin], axis=2, out=weighted[:, :, begin:end])
    if end > begin:
        weighted[:, :, end:] = weighted[:, :, end - 1 : end]
    weighted[:, :, 1:] *= shares[:, :, 1:] - shares[:, :, :-1]
    return np.asarray(trust[:, None] * weighted[SHORT] + (1 - trust)[:, None] * weighted[LONG])
