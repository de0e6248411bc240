"""How many events of a window are still out, per source, and how well that is known.

What arrived, divided by the chance of having arrived (Horvitz and Thompson), never a size from history:
history's N̂ covers 12–63 % of windows whose rate drifts (corrections.md, Aion 5). Slots too young to say
anything by themselves take the rate of the slots just before them, to the degree that the past showed
neighbouring slots to be alike (credibility; Bornhuetter and Ferguson's estimator is the limit).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from center.early_trigger.triangle import LONG, SHORT, ArrivalTriangle
from edgewater.synopses import BoolArray, FloatArray, IntArray
from edgewater.synopses.encoding.named_arrays import Arrays, restore

INFORMATIVE_SLOTS = 15.0
"""The rate is read off as many slots as hold the arrivals of this many complete ones."""

DISPERSION_SUBSTREAMS = 50.0
USUAL_SUBSTREAMS = 20.0
_NEIGHBOURS = 15
BALLAST_SLOTS = 0.25
"""How many complete slots' worth of arrivals the usual rate counts: next to nothing, unless there is nothing else."""

UNREST_MOST = 9.0
"""A sub-stream counts as at most four times the usual. What is usual comes near zero before a source's first event and
in a long pause; the ratio to it, squared, would drown every other doubt by ten orders of magnitude and not fade within
minutes, while no window could be answered early."""

LEAST_EVENTS = 30
_LEAST_SHARE = 1e-3
_STATE = {"dispersion": "dispersion", "unrest": "unrest", "usual": "usual", "weight": "_weight"}


@dataclass(frozen=True, slots=True)
class Stragglers:
    """Events still out, per source; float64 arrays of shape (sources,) unless said otherwise.

    Attributes:
        arrived: events of the window so far.
        expected: of those to come.
        deviation: standard error of `expected` by the model; `calibration.py` says what it is worth.
        by_lag: `expected` by the lag at which they will come, (sources, lags).
        rate: events per slot at the window's end.
        known: enough has come of every source to speak of a rate. Nothing arrived yet is not "nothing is coming".
        drift: standard errors by which the two memories disagree, over all sources.
        alarm: how many standard errors delays or rates are away from what they were, the worst source's.
    """

    arrived: FloatArray
    expected: FloatArray
    deviation: FloatArray
    by_lag: FloatArray
    rate: FloatArray
    known: bool
    drift: float
    alarm: float


@dataclass(frozen=True, slots=True)
class StragglersByMark:
    """`Stragglers` of several watermarks; arrays as there, of all their sources, one watermark's after the other's.

    Attributes:
        known, drift, alarm: per watermark.
    """

    arrived: FloatArray
    expected: FloatArray
    deviation: FloatArray
    by_lag: FloatArray
    rate: FloatArray
    known: BoolArray
    drift: FloatArray
    alarm: FloatArray

    def of(self, mark: int) -> Stragglers:
        sources = len(self.expected) // len(self.known)
        mine = slice(mark * sources, (mark + 1) * sources)
        return Stragglers(
            self.arrived[mine], self.expected[mine], self.deviation[mine], self.by_lag[mine], self.rate[mine],
            bool(self.known[mark]), float(self.drift[mark]), float(self.alarm[mark]),
        )  # fmt: skip


class StragglerModel:
    """Reads a triangle. Its own state is how unevenly each source's events come.

    Args:
        marks: watermarks whose sources the triangle has, each as many.
    """

    def __init__(self, triangle: ArrivalTriangle, marks: int = 1) -> None:
        self.triangle, self.marks = triangle, marks
        self.dispersion: FloatArray = np.ones(triangle.sources)
        """Variance of a slot's events around its neighbours' mean, in units of that mean; 1: Poisson."""
        self.unrest: FloatArray = np.zeros(triangle.sources)
        """Mean squared relative distance of a sub-stream's events from the usual."""
        self.usual: FloatArray = np.zeros(triangle.sources)
        """Events per slot, over the last `USUAL_SUBSTREAMS` or so: what a silent source is taken to go on with."""
        self._weight: FloatArray = np.zeros(triangle.sources)

    @classmethod
    def over(cls, triangle: ArrivalTriangle, models: Sequence[StragglerModel]) -> StragglerModel:
        """One model of all, over the triangle of theirs (`ArrivalTriangle.over`). It shares its memory with them."""
        result = cls(triangle, len(models))
        sources = triangle.sources // len(models)
        for name in _STATE.values():
            whole = np.concatenate([getattr(m, name) for m in models])
            setattr(result, name, whole)
            for i, model in enumerate(models):
                setattr(model, name, whole[i * sources : (i + 1) * sources])
        return result

    def on_substream(self) -> None:
        """To be called at the end of each sub-stream: learns how even arrivals are."""
        triangle, slots = self.triangle, self.triangle.grid.substream_slots
        if triangle.grid.lags < 2 * slots + 2 * _NEIGHBOURS + 2:
            return  # Grid.of makes no such grid
        share = triangle.distributions()[LONG]
        mature = np.minimum((share < 0.9).sum(axis=1), triangle.grid.lags - 2 * slots - 2 * _NEIGHBOURS - 2)
        learn = (triangle.age > mature + 2 * slots + 2 * _NEIGHBOURS) & (triangle.behind == 0) & (mature >= 0)
        if not learn.any():
            return
        at = np.maximum(mature, 0)[:, None] + np.arange(2 * slots + 2 * _NEIGHBOURS)
        count = np.take_along_axis(triangle.seen, at, axis=1)
        count = count / np.maximum(np.take_along_axis(share, at, axis=1), 0.5)
        # A straggler is predicted from slots some way before its own, so those are what it is compared with.
        sums = np.concatenate([np.zeros((len(count), 1)), np.cumsum(count, axis=1)], axis=1)
        half = _NEIGHBOURS // 2
        before = (sums[:, half + _NEIGHBOURS : half + _NEIGHBOURS + slots] - sums[:, half : half + slots]) / _NEIGHBOURS
        gap = (count[:, :slots] - before) ** 2
        expected = np.maximum(before, 1.0) * (1 + 1 / _NEIGHBOURS)
        pace = 1 / np.minimum(self._weight + 1, DISPERSION_SUBSTREAMS)
        uneven = gap.sum(axis=1) / expected.sum(axis=1)
        self.dispersion[:] = np.where(learn, self.dispersion + pace * (uneven - self.dispersion), self.dispersion)
        rate = sums[:, slots] / slots
        change = np.where(self._weight > 0, (rate / np.maximum(self.usual, 1e-9) - 1) ** 2, 0.0)
        change = np.minimum(change, UNREST_MOST)
        self.unrest[:] = np.where(learn, self.unrest + pace * (change - self.unrest), self.unrest)
        pace = 1 / np.minimum(self._weight + 1, USUAL_SUBSTREAMS)
        self.usual[:] = np.where(learn, self.usual + pace * (rate - self.usual), self.usual)
        self._weight += learn

    def to_state(self) -> Arrays:
        """Its own, without the triangle's."""
        return {name: getattr(self, attribute).copy() for name, attribute in _STATE.items()}

    def restore(self, arrays: Arrays) -> None:
        """Raises CorruptSynopsis."""
        restore(self, arrays, _STATE)

    def predict(self, first_lag: int, slots: int, *, lags_wanted: bool = True) -> Stragglers:
        """The stragglers of a window of `slots` slots whose last slot is now `first_lag` slots old.

        `first_lag` counts from 0: at the window's end, its last slot is 0 old. `by_lag` only if `lags_wanted`.
        """
        return self.predict_each(first_lag, slots, lags_wanted=lags_wanted).of(0)

    def predict_each(self, first_lag: int, slots: int, *, lags_wanted: bool = True) -> StragglersByMark:
        """`predict`, of each of the watermarks whose sources the triangle has."""
        triangle = self.triangle
        first_lag = min(first_lag, triangle.grid.lags - 1)
        behind = triangle.behind
        shares = triangle.distributions()
        noise = triangle.imprecision()
        if not behind.any():
            return self._predict(first_lag, slots, triangle.seen, shares, noise, triangle.age, lags_wanted)
        # A source that stands still is, to the others, `behind` slots younger: nothing has come of the slots since.
        lags = triangle.grid.lags
        at = np.arange(lags) - behind[:, None]
        clipped, unknown = np.maximum(at, 0), at < 0
        seen = np.where(unknown, 0.0, np.take_along_axis(triangle.seen, clipped, axis=1))
        shifted = np.where(unknown, 0.0, np.take_along_axis(shares, np.broadcast_to(clipped, shares.shape), axis=2))
        shaken = np.where(unknown, 0.0, np.take_along_axis(noise, np.broadcast_to(clipped, noise.shape), axis=2))
        return self._predict(first_lag, slots, seen, shifted, shaken, triangle.age + behind, lags_wanted)

    def _predict(
        self,
        first_lag: int,
        slots: int,
        seen: FloatArray,
        shares: FloatArray,
        noise: FloatArray,
        age: IntArray,
        lags_wanted: bool,
    ) -> StragglersByMark:
        lags = self.triangle.grid.lags
        last = min(first_lag + slots, lags)
        born = np.arange(first_lag, lags) < age[:, None]
        pace = _pace(seen[:, first_lag:], shares[:, :, first_lag:], born)
        learnt = self._weight > 0
        silent = self.triangle.behind > 0
        ballast = np.where(learnt, BALLAST_SLOTS, 0.0)
        rate = (pace.events + ballast * self.usual) / np.maximum(pace.worth + ballast, _LEAST_SHARE)
        rate = np.where(silent & learnt, self.usual, rate)
        # What is usual has been counted over many sub-streams; of a silent source's young slots nothing has.
        usual_events = self.usual * USUAL_SUBSTREAMS * self.triangle.grid.substream_slots
        counted = np.where(silent & learnt, usual_events, pace.events[LONG])
        leaning = np.where(silent, 1.0, ballast / np.maximum(pace.worth[LONG] + ballast, _LEAST_SHARE))
        known = learnt | ((pace.events[LONG] >= LEAST_EVENTS) & (pace.worth[LONG] >= 1)) | (age >= lags)
        window = slice(first_lag, last)
        share, arrived = shares[:, :, window], seen[:, window]
        alive = born[:, : last - first_lag]
        credence = rate / np.maximum(self.dispersion - 1, 1e-9)  # slots' worth of Poisson noise: k = λ/(φ - 1)
        scale = (credence + 1e-12)[..., None]
        per_slot = (credence[..., None] + arrived) * (rate[..., None] / scale)
        worth = share * (rate[..., None] / scale)
        worth += 1
        per_slot /= worth
        per_slot *= alive
        expected = (per_slot * (1 - share)).sum(axis=2)
        wobble = np.sqrt(noise[:, :, window])
        wobble *= share
        wobble *= per_slot
        inexact = wobble.sum(axis=2) ** 2
        gap = np.abs(expected[SHORT] - expected[LONG])
        trust = gap**2 / (gap**2 + inexact[SHORT] + 1e-9)  # in the short memory
        mixed = trust * expected[SHORT] + (1 - trust) * expected[LONG]
        variance = (
            mixed * np.clip(self.dispersion, 0.3, None)
            + mixed**2 * (1 / np.maximum(counted, 1.0) + leaning**2 * self.unrest)
            + trust * inexact[SHORT]
            + (1 - trust) * inexact[LONG]
            + trust * (1 - trust) * gap**2
        )
        apart, doubt = self._per_mark(expected[SHORT] - expected[LONG]), self._per_mark(inexact[LONG] + inexact[SHORT])
        drift = np.abs(apart) / np.sqrt(doubt + 1.0)
        jump = np.abs(self._per_mark(pace.jump)) / np.sqrt(self._per_mark(pace.noise) + 1e-9)
        by_lag = _by_lag(per_slot, shares, first_lag, trust) if lags_wanted else np.zeros((len(seen), 0))
        return StragglersByMark(
            arrived=arrived.sum(axis=1),
            expected=mixed,
            deviation=np.sqrt(variance),
            by_lag=by_lag,
            rate=trust * rate[SHORT] + (1 - trust) * rate[LONG],
            known=np.asarray(known.reshape(self.marks, -1).all(axis=1)),
            drift=np.asarray(drift),
            alarm=np.maximum(drift, jump),
        )

    def _per_mark(self, by_source: FloatArray) -> FloatArray:
        return np.asarray(by_source.reshape(self.marks, -1).sum(axis=1))


@dataclass(frozen=True, slots=True)
class _Pace:
    """Arrivals of the youngest slots, [memory, source], and how many complete slots they are worth.

    `jump`: of the rate, per source, from the slots before to those; `noise`: its variance if arrivals are even.
    """

    events: FloatArray
    worth: FloatArray
    jump: FloatArray
    noise: FloatArray


def _pace(seen: FloatArray, share: FloatArray, born: BoolArray) -> _Pace:
    further = 2 * int(INFORMATIVE_SLOTS)
    for width in (4 * further, seen.shape[1]):  # most of the time a few slots are enough
        informed = np.cumsum(share[..., :width] * born[:, :width], axis=2)
        last = informed.shape[2] - 1
        stop = (informed < INFORMATIVE_SLOTS).sum(axis=2)
        if (stop + further <= last).all():
            break
    stop = np.minimum(stop, last)
    count = np.cumsum(seen[:, :width], axis=1)
    memory, source = np.arange(stop.shape[0])[:, None], np.arange(stop.shape[1])
    beyond = np.minimum(stop + further, last)
    events, worth = count[source, stop], informed[memory, source, stop]
    before = count[source, beyond] - events
    worth_before = np.maximum(informed[memory, source, beyond] - worth, _LEAST_SHARE)
    safe = np.maximum(worth, _LEAST_SHARE)
    rate, old = (events / safe)[LONG], (before / worth_before)[LONG]
    noise = rate / safe[LONG] + old / worth_before[LONG]
    return _Pace(events, worth, rate - old, noise)


def _by_lag(per_slot: FloatArray, shares: FloatArray, first_lag: int, trust: FloatArray) -> FloatArray:
    """Stragglers by lag: those of lag l come from the slots younger than l, which are `per_slot`'s."""
    weighted, lags = np.zeros_like(shares), shares.shape[2]
    begin, end = first_lag + 1, min(first_lag + 1 + per_slot.shape[2], lags)
    np.cumsum(per_slot[:, :, : end - begin], axis=2, out=weighted[:, :, begin:end])
    if end > begin:
        weighted[:, :, end:] = weighted[:, :, end - 1 : end]
    weighted[:, :, 1:] *= shares[:, :, 1:] - shares[:, :, :-1]
    return np.asarray(trust[:, None] * weighted[SHORT] + (1 - trust)[:, None] * weighted[LONG])
