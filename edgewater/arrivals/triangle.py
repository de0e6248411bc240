"""Run-off triangle: arrivals by event slot and lag, reduced to the sums that the delay distribution needs.

An event of age τ has been observed only if its delay is at most τ: delays are *right-truncated*. A plain histogram of
observed delays is biased towards short delays, most of all just after delays have grown. The product-limit estimator
for truncated data (Lynden-Bell 1971; Woodroofe 1985) is unbiased. For each lag l it estimates r(l): the probability
that an event with a lag of at most l has a lag of exactly l. F(l) is the product of the complements:

    r(l) = #{lag = l} / #{lag ≤ l ≤ age},      F(l) = Π_{s > l} (1 - r(s)).

F replaces the mean delay in Eq. 7 of the Aion paper. Eq. 7 ignores the shape of the distribution, and becomes negative
when the mean delay exceeds the sub-stream. In slots of time, the estimator equals the chain ladder of actuaries with
development factors 1/(1 - r).

The full table (event slot × lag) is never stored. Stored per source and lag l are the arrived events of the slot that
is now l slots old (`seen`), and two exponentially decayed sums: the arrivals at lag l, and the events at risk at lag l.
The ratio of the two sums is r(l). The sums exist in two memories: a long memory for precision, and a short memory that
follows drift. If the two memories differ, delays have changed. `stragglers.py` then widens the interval by the
difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from edgewater.arrivals import SlotGrid
from edgewater.arrivals.named_arrays import NamedArrays
from edgewater.base.errors import InvalidInput
from edgewater.synopses import BoolArray, FloatArray, IntArray

LONG, SHORT = 0, 1  # format: positions in an array
LONG_SUBSTREAMS = 50
SHORT_SUBSTREAMS = 2
"""Sub-streams after which the weight of an arrival has decayed by a factor of e: `LONG_SUBSTREAMS` in the long memory,
`SHORT_SUBSTREAMS` in the short memory."""
_QUADRATURE = (np.arange(32) + 0.5) / 32


class ArrivalTriangle(NamedArrays):
    """Arrival counts of `sources` sources. `advance` advances all reporting sources by one slot.

    The state of a source that does not report stays the same. `silent_slots` is the age of this state.

    Attributes:
        seen: arrived events of the slot that is now l slots old, float64 [source, lag l].
        sums: decayed sums of arrivals and of events at risk, float32 [arrivals or at risk, memory, source, lag]. Single
            precision halves the state. Its rounding error is 1,000 times smaller than the noise of r.
        age: slots since each source's first report, int64 [source]. No event arrived before the first report.
        before: slots before each source's first report in which another query observed the same records, int64
            [source].
        silent_slots: slots since each source's last report, int64 [source].
        expired: number of events, since the beginning, of slots older than the longest lag, float64 [source].
        pause: slots since each source's last arrival, float64 [source].
        pauses: decayed sum of `pause` over slots, in the long memory, float64 [source].
        short_pauses: the same in the short memory, where a pause counts as one sub-stream at most.
        horizon: number of lags that can occur: all lags of the grid, or fewer if delays are declared.
    """

    LAYOUT = {
        "seen": (("source", "lag"), np.float64, 0),
        "sums": (("kind", "memory", "source", "lag"), np.float32, 0),
        **dict.fromkeys(("age", "before", "silent_slots"), (("source",), np.int64, 0)),
        **dict.fromkeys(("expired", "pause", "pauses", "short_pauses"), (("source",), np.float64, 0)),
    }
    seen: FloatArray
    sums: NDArray[np.float32]
    age: IntArray
    before: IntArray
    silent_slots: IntArray
    expired: FloatArray
    pause: FloatArray
    pauses: FloatArray
    short_pauses: FloatArray

    def __init__(self, sources: int, grid: SlotGrid) -> None:
        if sources < 1:
            raise InvalidInput("sources", sources, "at least one source")
        super().__init__(kind=2, memory=2, source=sources, lag=grid.lags)
        self.grid, self.horizon = grid, grid.lags
        memory = grid.substream_slots * np.array([LONG_SUBSTREAMS, SHORT_SUBSTREAMS], float)
        self._decay = np.exp(-1 / memory).astype(np.float32)[:, None, None]
        self._cached: tuple[FloatArray, FloatArray] | None = None
        self._members: list[ArrivalTriangle] = []
        self._joined: ArrivalTriangle | None = None

    @classmethod
    def joined(cls, triangles: Sequence[ArrivalTriangle]) -> ArrivalTriangle:
        """Returns one triangle with the sources of all triangles, in order. The result shares its memory with the
        triangles.

        One `advance` of the result advances all triangles, and takes little more time than an `advance` of one
        triangle. A change of a single triangle is visible in the result. The result is valid until one of the triangles
        is joined into another triangle.
        """
        result = cls(sum(t.sources for t in triangles), triangles[0].grid)
        result.horizon = triangles[0].horizon
        result.join(triangles, "source", shared=True)
        result._members = list(triangles)
        for triangle in triangles:
            triangle._joined = result
        return result

    def take(self, axis: str, rows: Sequence[int | None]) -> None:
        super().take(axis, rows)
        self._cached, self._joined = None, None

    @property
    def sources(self) -> int:
        return len(self.seen)

    @property
    def observed(self) -> IntArray:
        """Slots for which each source has been observed, int64 [source]. Longer lags cannot have been seen."""
        return self.age + self.before

    def is_young(self, slots: int) -> BoolArray:
        """Returns whether each source has been observed for less than the longest lag plus `slots` slots, [source]."""
        return np.asarray(self.observed < self.horizon + slots)

    def inherit(self, source: int, sums: NDArray[np.float32], slots: int) -> None:
        """Sets the delays of a source from another query that has observed the same records for `slots` slots.

        Args:
            sums: the source's part of the other query's `sums`, [arrivals or at risk, memory, lag].
        """
        self.sums[:, :, source], self.before[source] = sums, slots
        self._invalidate()

    def advance(self, arrived: FloatArray, reporting: BoolArray | None = None) -> None:
        """Advances the reporting sources by one slot.

        Args:
            arrived: events that arrived in the slot, [source, lag].
            reporting: mask of the sources that have reported; None if all have reported.
        """
        if reporting is not None and not reporting.all():
            with self._only(reporting):
                self.advance(arrived)
            self.silent_slots[~reporting] += 1
            return
        seen, oldest = self.seen, self.seen[:, -1].copy()
        seen[:, 1:] = seen[:, :-1]
        seen[:, 0] = 0
        # The last lag represents all longer lags. Slots of longer lags are added up, and are never at risk again.
        self.expired += oldest + arrived[:, -1]
        seen += arrived
        self.sums *= self._decay
        self.sums[0] += arrived.astype(np.float32)
        self.sums[1] += seen.astype(np.float32)
        seen[:, -1] -= arrived[:, -1]
        self.age += 1
        self.pause += 1
        self.pause[arrived.any(axis=1)] = 0
        self.pauses *= self._decay[LONG, 0, 0]
        self.pauses += self.pause
        self.short_pauses *= self._decay[SHORT, 0, 0]
        self.short_pauses += np.minimum(self.pause, self.grid.substream_slots)
        self._invalidate()

    def catch_up(self, sources: IntArray, arrived: Iterable[FloatArray]) -> None:
        """Adds the arrivals of sources during a silence. All these sources were silent for the same number of slots.

        Args:
            sources: indices, ascending.
            arrived: for each slot of the silence, the events that arrived in the slot, [source, lag].
        """
        selected, whole = np.zeros(self.sources, bool), np.zeros(self.seen.shape)
        selected[sources] = True
        with self._only(selected):
            for rows in arrived:
                whole[sources] = rows
                self.advance(whole)
        self.silent_slots[sources] = 0

    def reset_long_memory(self) -> None:
        """Sets the long memory to the short memory. Called after a lasting change of delays."""
        self.sums[:, LONG] = self.sums[:, SHORT]
        self._invalidate()

    def hazards(self) -> FloatArray:
        """Returns r by [memory, source, lag]; 0 where no event was ever at risk."""
        arrivals, at_risk = self.sums
        return np.asarray(arrivals / np.maximum(at_risk, np.float32(1e-12)), np.float64)

    def beyond_longest(self, failures: float) -> FloatArray:
        """Returns the share of events per source with the last lag or a longer lag, and bounds of the unknown part of
        this share.

        The last lag represents all longer lags, so it is not known when events with a longer lag arrive. A source of
        age A has shown only lags of up to A. Without an assumption, a right-truncated sample does not show the mass
        beyond the truncation (Lagakos, Barraj and De Gruttola 1988).

        The assumption is that the tail is not heavier than the tail of a distribution with a mean: x·P(lag > x) does
        not increase beyond half the longest lag H. Then a slot of age a has shown at least 1 - H/a of its events beyond
        H, and at least 1 - H/2a of its events beyond H/2. The share beyond H is at most half of the share beyond H/2.

        The two lags H and H/2 give two bounds. While the source is hardly older than H, few records are at risk at H
        and many at H/2. The smaller bound is taken, and each bound uses half of `failures`. The sums contain the
        arrivals of all ages up to A with the weights of the long memory.

        Declared delays exclude longer lags. Then truncation hides nothing, and events are at risk at the first excluded
        lag.

        Args:
            failures: probability that the number of late events exceeds the number that `unseen` allows. The number of
                late events has a Poisson distribution.

        Returns:
            Three rows by source. First row: the share that has been seen, the larger one of both memories. Second row
            (`hidden`): the share that truncation also hides, according to the assumption. Third row (`unseen`): a bound
            of the share that has not been seen; infinite if no event was ever at risk.
        """
        if self.horizon < self.grid.lags:
            at_risk, none = np.asarray(self.sums[1, LONG, :, self.horizon], np.float64), np.zeros(self.sources)
            with np.errstate(divide="ignore"):
                return np.stack([none, none, -math.log(failures) / at_risk])
        longest = self.grid.lags - 1
        half = longest // 2
        arrivals, at_risk, shown = self._shown_beyond(longest)
        late, at_risk_before, shown_before = self._shown_beyond(half)
        with np.errstate(divide="ignore", invalid="ignore"):
            hidden = np.where(at_risk > 0, arrivals * (1 / shown - 1) / at_risk, 0.0)
            unseen = (_poisson_bound(arrivals, failures / 2) / shown - arrivals) / at_risk
            before = half / longest * _poisson_bound(late, failures / 2) / shown_before / at_risk_before
        unseen = np.where(at_risk > 0, np.minimum(unseen, before), np.inf)
        return np.stack([self.hazards()[:, :, -1].max(axis=0), np.minimum(hidden, 1.0), unseen])

    def unseen_beyond(self, lag: int, steady_slots: int, failures: float) -> FloatArray:
        """Returns a bound, per source, of the share of events with longer lags than were seen (the rule of three).

        Events that are older than `lag` count, since the last change of delays. The events of the short memory count
        always. If no delay is as short as `lag`, no event is at risk there. So events of the long memory count at the
        lag, from `lag` on, at which most of them are at risk.

        Args:
            steady_slots: slots since the last change of delays.
            failures: as in `beyond_longest`.
        """
        first = min(lag, self.grid.lags - 1)
        long, short = np.asarray(self.sums[1, LONG, :, first:], np.float64), self.sums[1, SHORT, :, first]
        memory, lags = self.grid.substream_slots * LONG_SUBSTREAMS, np.arange(first, self.grid.lags)
        steady, observed = (1 - np.exp(-np.maximum(n - lags, 0) / memory) for n in (steady_slots, self.age[:, None]))
        settled = (long * np.minimum(steady / np.maximum(observed, 1e-9), 1.0)).max(axis=1)
        with np.errstate(divide="ignore"):
            return np.asarray(np.minimum(-math.log(failures) / np.maximum(short, settled), 1.0))

    def _shown_beyond(self, lag: int) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Returns three arrays by source, for the lag and all longer lags.

        Returns:
            The number of arrivals with such lags; the number of events at risk at the lag; the least share of such
            arrivals that truncation does not hide.
        """
        memory = self.grid.substream_slots * LONG_SUBSTREAMS
        oldest = np.exp(-np.maximum(self.observed - lag, 1e-6) / memory)[:, None]
        ages = self.observed[:, None] + memory * np.log(oldest + (1 - oldest) * _QUADRATURE)
        shown = np.maximum(1 - (lag / np.maximum(ages, max(lag, 1))).mean(axis=1), 1e-9)
        arrivals = self.sums[0, LONG, :, lag:].sum(axis=1, dtype=np.float64)
        return arrivals, np.asarray(self.sums[1, LONG, :, lag], np.float64), shown

    def mean_pause(self, memory: int = LONG) -> FloatArray:
        """Returns the mean number of slots since the last arrival, per source."""
        decay, pauses = float(self._decay[memory, 0, 0]), self.pauses if memory == LONG else self.short_pauses
        return np.asarray(pauses * (1 - decay) / np.maximum(1 - decay**self.age, 1e-9))

    def distributions(self) -> FloatArray:
        """Returns F by [memory, source, lag]: the probability that an event arrives by the end of the lag. Do not
        change it.
        """
        return self._estimates()[0]

    def log_variances(self) -> FloatArray:
        """Returns Var(log F) by [memory, source, lag], by Greenwood's formula for reverse hazards. Do not change it."""
        return self._estimates()[1]

    def total(self, first_lag: int) -> FloatArray:
        """Returns the number of events per source, since the beginning, of slots that are at least `first_lag` slots
        old.
        """
        return np.asarray(self.expired + self.seen[:, first_lag:].sum(axis=1))

    @contextmanager
    def _only(self, selected: BoolArray) -> Iterator[None]:
        """Restores the state of all other sources at the end of a `with` block."""
        by_source = {
            name: np.moveaxis(getattr(self, name), axes.index("source"), 0) for name, (axes, *_) in self.LAYOUT.items()
        }
        before = {name: array[~selected] for name, array in by_source.items()}
        yield
        for name, array in by_source.items():
            array[~selected] = before[name]
        self._invalidate()

    def _invalidate(self) -> None:
        self._cached = None
        for member in self._members:
            member._cached = None
        if self._joined is not None:
            self._joined._cached = None

    def _estimates(self) -> tuple[FloatArray, FloatArray]:
        """Returns F and Var(log F). They are computed once per slot."""
        if self._cached is None:
            hazards = self.hazards()
            bounded = np.minimum(hazards, 0.999)
            term = bounded / ((1 - bounded) * np.maximum(self.sums[1], np.float32(1.0)))
            variance = np.zeros_like(term)
            np.cumsum(term[..., :0:-1], axis=-1, out=variance[..., -2::-1])
            self._cached = _distribution(hazards), variance
        return self._cached


def _distribution(hazards: FloatArray) -> FloatArray:
    """Returns F_l = Π_{s > l} (1 - r_s) along the last axis. The last value is 1."""
    keep = np.ones_like(hazards)
    keep[..., :-1] = 1 - np.minimum(hazards[..., 1:], 1.0)
    return np.asarray(np.cumprod(keep[..., ::-1], axis=-1)[..., ::-1])


def _poisson_bound(count: FloatArray, failures: float) -> FloatArray:
    """Returns an upper bound of the greatest mean m with P(Poisson(m) ≤ count) ≥ failures.

    The bound solves Chernoff's m - k - k·ln(m/k) = -ln(failures) for k = count. For a count of 0 it is exact (the rule
    of three, at 95 %).
    """
    log, least = -math.log(failures), np.maximum(count, 1e-300)
    bound = count + log + np.sqrt(log**2 + 2 * log * count)  # (m - k)²/2m = log is weaker
    for _ in range(4):  # the map is concave and starts above its fixed point, so each iterate is a bound
        bound = count + log + count * np.log(bound / least)
    return bound
