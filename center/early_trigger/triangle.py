"""Arrivals by event slot and lag, folded into the few sums that the delay distribution needs.

The full table (event slot × lag) is never stored. Per source there are, by lag l: how many events of the
slot that is now l slots old have arrived (`seen`), and the forgetting sums of arrivals at lag l and of
events at risk there (`hits`, `at_risk`), from which r(l) of `delays.py` is hits/at_risk.

Two memories run side by side, a long one for precision and a short one that follows drift. Where they
disagree the delays have changed, and `stragglers.py` widens the interval by the disagreement instead of
betting on either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from center.early_trigger.delays import distribution
from edgewater.arrivals import SlotGrid
from edgewater.errors import CorruptSynopsis, InvalidInput
from edgewater.synopses import BoolArray, FloatArray, IntArray
from edgewater.synopses.encoding.named_arrays import Arrays, restore

LONG, SHORT = 0, 1
LONG_SUBSTREAMS = 50
SHORT_SUBSTREAMS = 2
"""Sub-streams after which an arrival counts e times less, per memory."""

_STATE = {
    "seen": "seen", "sums": "_sums", "age": "age", "behind": "behind", "retired": "retired",
}  # fmt: skip


class ArrivalTriangle:
    """Counts of `sources` sources. Time passes by `advance`, one slot at a time and for all sources that report.

    A source that does not report stands still, however long: what it knows is as old as `behind` says.
    """

    def __init__(self, sources: int, grid: SlotGrid) -> None:
        if sources < 1:
            raise InvalidInput("sources", sources, "at least one source")
        self.grid = grid
        shape = (sources, grid.lags)
        self.seen: FloatArray = np.zeros(shape)
        # [hits or at risk, memory, source, lag]. Single precision: a state of half the size, and rounding 1,000 times
        # below the noise of a hazard.
        self._sums = np.zeros((2, 2, *shape), np.float32)
        memory = grid.substream_slots * np.array([LONG_SUBSTREAMS, SHORT_SUBSTREAMS], float)
        self._decay = np.exp(-1 / memory).astype(np.float32)[:, None, None]
        self._known: tuple[FloatArray, FloatArray] | None = None
        self.age: IntArray = np.zeros(sources, np.int64)
        """Slots since each source's first report; there was nothing before them."""
        self.behind: IntArray = np.zeros(sources, np.int64)
        """Slots since each source's last report."""
        self.retired: FloatArray = np.zeros(sources)
        """Events of slots older than the largest lag, per source, since ever."""
        self._parts: list[ArrivalTriangle] = []
        self._whole: ArrivalTriangle | None = None

    @classmethod
    def over(cls, triangles: Sequence[ArrivalTriangle]) -> ArrivalTriangle:
        """One triangle of all their sources, in their order, that shares its memory with them.

        Time passes for all by one `advance` of it, which costs little more than one of theirs. What changes in one of
        them by itself is seen in it. It is good until one of them becomes a part of another.
        """
        grid = triangles[0].grid
        result = cls(sum(t.sources for t in triangles), grid)
        at = 0
        for name in _STATE.values():
            axis = 2 if name == "_sums" else 0
            setattr(result, name, np.concatenate([getattr(t, name) for t in triangles], axis=axis))
        for triangle in triangles:
            mine = slice(at, at + triangle.sources)
            at = mine.stop
            for name in _STATE.values():
                whole = getattr(result, name)
                setattr(triangle, name, whole[:, :, mine] if name == "_sums" else whole[mine])
            triangle._whole = result
        result._parts = list(triangles)
        return result

    @property
    def sources(self) -> int:
        return len(self.seen)

    def advance(self, arrived: FloatArray, reporting: BoolArray | None = None) -> None:
        """One slot has passed.

        Args:
            arrived: events that arrived in it, [source, lag].
            reporting: which sources have told; the others stand still. Default all.
        """
        if reporting is not None and not reporting.all():
            self._advance_some(arrived, reporting)
            self._forget_derived()
            return
        seen, oldest = self.seen, self.seen[:, -1].copy()
        seen[:, 1:] = seen[:, :-1]
        seen[:, 0] = 0
        # The last lag stands for all longer ones: those slots are one pile, which is never at risk again.
        self.retired += oldest + arrived[:, -1]
        seen += arrived
        self._sums *= self._decay
        self._sums[0] += arrived.astype(np.float32)
        self._sums[1] += seen.astype(np.float32)
        seen[:, -1] -= arrived[:, -1]
        self.age += 1
        self._forget_derived()

    def _forget_derived(self) -> None:
        self._known = None
        for part in self._parts:
            part._known = None
        if self._whole is not None:
            self._whole._known = None

    def _advance_some(self, arrived: FloatArray, reporting: BoolArray) -> None:
        part = self._part(reporting)
        part.advance(arrived[reporting])
        self._take_back(part, reporting)
        self.behind[~reporting] += 1

    def catch_up(self, source: int, arrived: FloatArray) -> None:
        """A source that stood still tells what arrived at it in each slot since, [slot, lag].

        Raises:
            InvalidInput: for more or fewer slots than it stood still.
        """
        if len(arrived) != self.behind[source]:
            raise InvalidInput("arrived", len(arrived), f"one row for each of {self.behind[source]} slots")
        self.catch_up_all(np.array([source]), arrived[:, None])

    def catch_up_all(self, sources: IntArray, arrived: Iterable[FloatArray]) -> None:
        """Sources that stood still equally long tell what arrived at them in each slot since, [source, lag] a slot."""
        chosen = np.zeros(self.sources, bool)
        chosen[sources] = True
        part = self._part(chosen)
        for each in arrived:
            part.advance(each)
        self._take_back(part, chosen)
        self.behind[sources] = 0

    def _part(self, chosen: BoolArray) -> ArrivalTriangle:
        part = ArrivalTriangle.__new__(ArrivalTriangle)
        part.grid, part._decay = self.grid, self._decay
        part.seen, part.age, part.retired = self.seen[chosen], self.age[chosen], self.retired[chosen]
        part._sums, part._known, part._parts, part._whole = self._sums[:, :, chosen], None, [], None
        return part

    def _take_back(self, part: ArrivalTriangle, chosen: BoolArray) -> None:
        self.seen[chosen], self.age[chosen], self.retired[chosen] = part.seen, part.age, part.retired
        self._sums[:, :, chosen] = part._sums
        self._forget_derived()

    def forget_long(self) -> None:
        """Delays have changed for good: the long memory starts anew from the short one."""
        self._sums[:, LONG] = self._sums[:, SHORT]
        self._forget_derived()

    def hazards(self) -> FloatArray:
        """r by [memory, source, lag]; 0 where nothing was ever at risk."""
        hits, at_risk = self._sums
        return np.asarray(hits / np.maximum(at_risk, np.float32(1e-12)), np.float64)

    def remembered(self) -> FloatArray:
        """Events per source that the long memory goes by: what it has not seen among them may still come."""
        return np.asarray(self._sums[0, LONG].sum(axis=1), np.float64)

    def distributions(self) -> FloatArray:
        """F by [memory, source, lag]: the chance that an event has arrived by the end of that lag. Read-only."""
        return self._derived()[0]

    def imprecision(self) -> FloatArray:
        """Var(log F) by [memory, source, lag], Greenwood's formula for reverse hazards. Read-only."""
        return self._derived()[1]

    def _derived(self) -> tuple[FloatArray, FloatArray]:
        """Both, worked out once per slot."""
        if self._known is None:
            hazard = self.hazards()
            bounded = np.minimum(hazard, 0.999)
            term = bounded / ((1 - bounded) * np.maximum(self._sums[1], np.float32(1.0)))
            noise = np.zeros_like(term)
            np.cumsum(term[..., :0:-1], axis=-1, out=noise[..., -2::-1])
            self._known = distribution(hazard), noise
        return self._known

    def total(self, first_lag: int) -> FloatArray:
        """Events per source, ever, of slots that are now at least `first_lag` old."""
        return np.asarray(self.retired + self.seen[:, first_lag:].sum(axis=1))

    def to_state(self) -> Arrays:
        """Everything but the grid, as arrays."""
        return {name: getattr(self, attribute).copy() for name, attribute in _STATE.items()}

    @classmethod
    def from_state(cls, arrays: Arrays, grid: SlotGrid) -> ArrivalTriangle:
        """Raises CorruptSynopsis."""
        seen = arrays.get("seen")
        if seen is None or seen.ndim != 2 or not len(seen):
            raise CorruptSynopsis("watermark state: no arrivals by source and lag")
        result = cls(len(seen), grid)
        restore(result, arrays, _STATE)
        return result
