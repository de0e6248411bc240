"""The history of a query's groups over earlier slices: numbers of records, and values.

A group is identified by a 64-bit hash of its key and takes 44 bytes plus 8 per measure. Groups with equal hashes share
their forecast and nothing else. Values are exponentially weighted means over slices. The number of groups is bounded:
beyond the bound the groups with the fewest records are dropped, because their history is the least useful.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from edge.cache.arrival_profile import MAX_COUNT, PARTS, records_to_come, shapes
from edge.cache.entries import RecallCache, SliceEntries, largest_size
from edge.cache.error_target import NEWEST_WEIGHT, ErrorTarget
from edge.cache.timetable import CHECKPOINTS, Timetable, position_at
from edgewater.synopses import BoolArray, FloatArray, IntArray
from edgewater.synopses.encoding.state import State

MAX_HISTORY_GROUPS = 1 << 16  # limit: memory of the history
FORGOTTEN_BELOW = 0.02  # limit: memory of the history
"""Mean records per slice below which a group is dropped: after about ten slices without a record."""
CURVE_BINS = 64  # limit: memory of `GroupHistory.curve`


@dataclass(frozen=True, slots=True)
class GroupAverages:
    """Averages per slice of some groups: number of records, and per measure the total and the sum of squares."""

    arrivals: FloatArray
    totals: Mapping[str, FloatArray]
    squares: Mapping[str, FloatArray]


@dataclass(slots=True)
class GroupHistory:
    """The history of one query's groups, learned slice by slice.

    Attributes:
        slices: number of slices learned from.
        scale: per measure, the largest total of any group in the first slice with values: the unit in which the errors
            of different measures are compared.
        error_target: under a staleness budget, the error target (in units of `scale`).
        curve: under a staleness budget, float64 [64]. Element i is how many groups had not appeared after (i+1)/64 of
            the newest slice, among the groups with the largest initial prefix errors.
        max_sends: how often the most sent group of the newest slice was sent.
        groups: the number of groups of the newest slice.
        counts: float64 [part], the mean records per slice of all groups.
        timetable: when the records of the newest slices came.
        needed: under all budgets except a staleness budget alone, the number of groups that a slice has to send.
    """

    measures: tuple[str, ...] = ()
    slices: int = 0
    scale: dict[str, float] = field(default_factory=dict)
    error_target: ErrorTarget = field(default_factory=ErrorTarget)
    curve: FloatArray = field(default_factory=lambda: np.zeros(CURVE_BINS))
    max_sends: int = 1
    groups: int = 0
    _hashes: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    _values: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    counts: FloatArray = field(default_factory=lambda: np.zeros(PARTS))
    _counts: npt.NDArray[np.float16] = field(default_factory=lambda: np.zeros((0, PARTS), np.float16))
    needed: float = 0.0
    timetable: Timetable = field(default_factory=Timetable)

    def __post_init__(self) -> None:
        if not self._values.size:
            self._values = np.zeros((1 + 2 * len(self.measures), 0), np.float32)

    @property
    def nbytes(self) -> int:
        return int(self._hashes.nbytes + self._values.nbytes + self._counts.nbytes) + self.timetable.nbytes

    def averages_of(self, entries: SliceEntries, groups: IntArray) -> GroupAverages:
        """Returns the averages of these groups; zeros for new groups."""
        averages = self._looked_up(entries).values[:, groups].astype(np.float64)
        totals = {m: averages[1 + 2 * i] for i, m in enumerate(self.measures)}
        squares = {m: averages[2 + 2 * i] for i, m in enumerate(self.measures)}
        return GroupAverages(averages[0], totals, squares)

    def _looked_up(self, entries: SliceEntries) -> RecallCache:
        """Returns the averages of all groups of a slice. A slice looks each group up once, not at each pull."""
        cached = entries.recall_cache
        if cached.slices != self.slices:
            cached.slices, cached.groups = self.slices, 0
            cached.grow(1 + 2 * len(self.measures), 0)
        if cached.groups < len(entries):
            first = cached.groups
            cached.grow(1 + 2 * len(self.measures), len(entries))
            hashes = entries.hashes()[first:]
            at = np.searchsorted(self._hashes, hashes)
            inside = np.flatnonzero(at < len(self._hashes))
            hit = inside[self._hashes[at[inside]] == hashes[inside]]  # the groups with a history
            fresh, counts = cached.values[:, first:], np.zeros((len(hashes), PARTS), np.float32)
            fresh[...] = 0.0
            fresh[:, hit], counts[hit] = self._values[:, at[hit]], self._counts[at[hit]]
            cached.numbers[first:] = self.timetable.numbers_of(hashes)
            cached.remaining[:, first:] = shapes(self.counts, counts).T
        return cached

    def arrivals_left(self, entries: SliceEntries, elapsed: float, groups: IntArray | None = None) -> FloatArray:
        """Returns the expected number of records of these groups (None: all) after the fraction `elapsed` of their
        slice."""
        cached = self._looked_up(entries)
        arrivals = self._without_times(cached, entries.arrivals.astype(np.float64), elapsed, groups)
        if not self.timetable.is_used:
            return arrivals
        return self.timetable.expected(cached.numbers if groups is None else cached.numbers[groups], elapsed, arrivals)

    def _without_times(
        self, cached: RecallCache, arrivals: FloatArray, elapsed: float, groups: IntArray | None = None
    ) -> FloatArray:
        """Returns the profile's forecast of these groups (None: all), after `arrivals` records of each group."""
        part = min(int(elapsed * PARTS), PARTS - 1)
        after = elapsed * PARTS - part
        left = ((1.0 - after) * cached.remaining[part] + after * cached.remaining[part + 1]).astype(np.float64)
        past = cached.values[0].astype(np.float64)
        if groups is not None:
            arrivals, past, left = arrivals[groups], past[groups], left[groups]
        return records_to_come(arrivals, past, left)

    def learn(self, entries: SliceEntries) -> None:
        """Updates the history with a slice that has just closed."""
        fresh = np.array(
            [entries.arrivals, *(a for m in self.measures for a in (entries.size(m), entries.squares(m)))], np.float32
        ).reshape(len(self._values), len(entries))
        self._learn_times(entries)
        weight = NEWEST_WEIGHT if self.slices else 1.0
        hashes, inverse = np.unique(np.concatenate([self._hashes, entries.hashes()]), return_inverse=True)
        values = np.zeros((len(self._values), len(hashes)), np.float32)
        known = len(self._hashes)
        values[:, inverse[:known]] = (1.0 - weight) * self._values
        values[:, inverse[known:]] += np.float32(weight) * fresh
        self.counts = (1.0 - weight) * self.counts + weight * entries.arrivals_by_part.sum(axis=0)
        counts = np.zeros((len(hashes), PARTS), np.float32)
        counts[inverse[:known]] = (1.0 - weight) * self._counts
        counts[inverse[known:]] += np.float32(weight) * entries.arrivals_by_part
        keep = _history_mask(values[0])
        self._hashes, self._values = hashes[keep], values[:, keep]
        self._counts = np.minimum(counts[keep], MAX_COUNT).astype(np.float16)
        for measure in self.measures:
            if measure not in self.scale and (largest := largest_size(entries, measure)):
                self.scale[measure] = largest
        self.slices += 1
        self.groups = len(entries)
        self.max_sends = max(1, int(entries.sends.max(initial=1)))

    def _learn_times(self, entries: SliceEntries) -> None:
        taken = entries.take_times()
        if taken is None:
            self.timetable.learn(None)
            return
        codes, times = taken
        if self.slices:
            known = self._looked_up(entries)
            arrivals = entries.arrivals.astype(np.float64)
            later = np.array(
                [np.bincount(codes[times.positions > position_at(c)], minlength=len(entries)) for c in CHECKPOINTS],
                np.float64,
            )
            forecasts = [
                self._without_times(known, arrivals - after, elapsed)
                for elapsed, after in zip(CHECKPOINTS, later, strict=True)
            ]
            self.timetable.score(known.numbers, later, np.array(forecasts))
        self.timetable.learn(times)

    def learn_needed(self, groups: int) -> None:
        """Updates `needed` with a slice that had to send this many groups; it falls more slowly than it rises."""
        self.needed = max(float(groups), (1.0 - NEWEST_WEIGHT) * self.needed)

    def learn_curve(self, first_seen: npt.NDArray[np.float32]) -> None:
        """Learns when, within a slice, the groups with the largest initial prefix errors first appear."""
        bins = np.minimum((first_seen * CURVE_BINS).astype(np.int64), CURVE_BINS - 1)
        counts = np.bincount(bins, minlength=CURVE_BINS)
        self.curve = (counts.sum() - np.cumsum(counts)).astype(np.float64)

    def expected_new_groups(self, elapsed: float) -> float:
        """Returns `curve` after the fraction `elapsed` of the slice."""
        return float(self.curve[min(int(elapsed * CURVE_BINS), CURVE_BINS - 1)])

    def to_state(self) -> State:
        numbers = [self.measures, self.slices, self.scale, self.max_sends, self.groups, self.needed]
        arrays = {"hashes": self._hashes, "values": self._values, "curve": self.curve}
        arrays["counts"] = self._counts.view(np.uint16)
        # An edge of 0.3.0 that goes on from this state reads its choice of a forecast, and begins it anew.
        unused = {"scores": np.zeros(80), "value_scores": np.zeros(4)}
        profile = State([0, 0.5], {"counts": self.counts, **unused})
        components = {"error_target": self.error_target.to_state(), "profile": profile}
        return State(numbers, arrays, {**components, "timetable": self.timetable.to_state()})

    @classmethod
    def from_state(cls, state: State) -> GroupHistory:
        measures, slices, scale, max_sends, groups, needed = state.numbers
        error_target = ErrorTarget.from_state(state.components["error_target"])
        curve, hashes, values = (state.arrays[name] for name in ("curve", "hashes", "values"))
        result = cls(tuple(measures), slices, scale, error_target, curve, max_sends, groups, hashes, values)
        result.counts = state.components["profile"].arrays["counts"]
        result._counts = state.arrays["counts"].view(np.float16)
        if "timetable" in state.components:
            result.timetable = Timetable.from_state(state.components["timetable"])
        result.needed = needed
        return result


def _history_mask(records: npt.NDArray[np.float32]) -> BoolArray:
    keep = records >= FORGOTTEN_BELOW
    if np.count_nonzero(keep) > MAX_HISTORY_GROUPS:
        dropped = len(records) - MAX_HISTORY_GROUPS
        keep = records > np.partition(records, dropped)[dropped]  # ties go together: their order must not matter
    return np.asarray(keep, bool)
