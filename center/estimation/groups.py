"""The groups of a query with an accuracy, as they come and go; without `group_by`, the one of all records. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa

from center.early_trigger.trigger import Watermark
from center.estimation.arrival_counts import sampled_by, truths
from center.estimation.group import Stratum
from center.estimation.group_batch import BLOCK, Block, Look
from center.estimation.prediction import Outlook
from center.estimation.source_remap import Seats
from edgewater.accuracy import MAX_GROUPS, Accuracy, group_key
from edgewater.arrivals import GroupedSubstream, ReportSchedule, SubstreamStatistics
from edgewater.synopses import BoolArray, IntArray

ALL = ""
"""The key of the one stratum of a query without groups."""
IDLE_LAGS, CROWDED_LAGS = 4, 2
"""Longest lags after which a group that is not heard of is let go, and for which too many groups are not looked at."""
NO_ROWS = np.zeros((0, 4), np.int64)


class Groups:
    """A stratum per group, at most `MAX_GROUPS`. With more, all are let go for a while.

    Args:
        fresh: makes the query's watermark of so many sources.

    Attributes:
        crowded_until: the slot up to which there are too many groups; None: there are not.
        lost_sample: when they became too many, edges were sampling, so what has come is not all of it.
    """

    def __init__(self, fresh: Callable[[int], Watermark], accuracy: Accuracy, schedule: ReportSchedule) -> None:
        self._fresh, self._accuracy, self._schedule = fresh, accuracy, schedule
        self._strata: dict[str, Stratum] = {}
        self._side_by_side: list[Block] | None = None
        self._texts: dict[tuple[object, ...], str] = {}
        self._numbers = 0
        self.crowded_until: int | None = None
        self.lost_sample = False

    def __len__(self) -> int:
        return len(self._strata)

    def __iter__(self) -> Iterator[Stratum]:
        return iter(self._strata.values())

    # Changes

    def begin(self, slot: int, sources: int) -> None:
        """Nothing is known of when what was born before `slot` came. What was told of it stays: it was counted."""
        told = {key: s.tallies for key, s in self._strata.items() if not s.tallies.is_empty}
        self.clear()
        for key in told if self._accuracy.scope is not None else [ALL]:
            stratum = self._admit(key, slot, np.ones(sources, bool))
            stratum.tallies = told.get(key, stratum.tallies)

    def clear(self) -> None:
        self._strata, self._side_by_side, self.crowded_until, self.lost_sample = {}, None, None, False

    def _admit(self, key: str, slot: int, reporting: BoolArray) -> Stratum:
        """A group that is not known yet. From the last border of sub-streams on, nothing had come of it."""
        slots, lags = self._schedule.grid.substream_slots, self._schedule.grid.lags
        base, sources = slot // slots * slots, len(reporting)
        stratum = Stratum(key, self._numbers, base, sources, self._fresh, self._accuracy, self._schedule)
        self._numbers += 1
        for _ in range(slot - base):
            stratum.mark.on_slot(np.zeros((sources, lags)), reporting)
        self._strata[key], self._side_by_side = stratum, None
        return stratum

    def _blocks(self) -> list[Block]:
        """All strata, in the order in which they were admitted."""
        if self._side_by_side is None:
            strata = list(self._strata.values())
            parts = [strata[i : i + BLOCK] for i in range(0, len(strata), BLOCK)]
            self._side_by_side = [Block(part, self._accuracy) for part in parts]
        return self._side_by_side

    def tell(
        self, edge: str, statistics: SubstreamStatistics | GroupedSubstream, slot: int, reporting: BoolArray
    ) -> IntArray:
        """Adds up what an edge has told of a sub-stream; returns its arrivals as (slot, lag, count, stratum).

        Args:
            slot: where the center stands, and `reporting` the sources that can be heard there.
        """
        if isinstance(statistics, SubstreamStatistics):
            self._strata[ALL].tallies.add(edge, statistics)
            return np.insert(np.stack(statistics.arrivals(), axis=1), 3, self._strata[ALL].number, axis=1)
        rows = statistics.arrivals()
        told = np.unique(rows[:, 3])
        if statistics.unattributed or len(told) > MAX_GROUPS:
            self._crowd(slot)
        if self.crowded_until is not None:
            return NO_ROWS
        keys = self._keys(statistics)
        sums, numbers = statistics.arrival_counts(), np.zeros(len(keys), np.int64)
        for i in told.tolist():
            stratum = self._strata.get(keys[i]) or self._admit(keys[i], slot, reporting)
            stratum.tallies.add_sums(edge, statistics.index, sums[i])
            numbers[i] = stratum.number
        if len(self._strata) > MAX_GROUPS:
            self._crowd(slot)
            return NO_ROWS
        rows[:, 3] = numbers[rows[:, 3]]
        return rows

    def _keys(self, statistics: GroupedSubstream) -> list[str]:
        """Of the groups in the table. Reports name the same ones again and again, and texts cost more than the rest."""
        rows = list(zip(*(k.to_pylist() for k in statistics.keys), strict=True))
        if any(pa.types.is_floating(k.type) for k in statistics.keys):  # 0.0 and -0.0 are equal, and two groups
            return [group_key(row) for row in rows]
        if len(self._texts) > 4 * MAX_GROUPS:
            self._texts = {}
        found = [self._texts.get(row) for row in rows]
        for i in [i for i, text in enumerate(found) if text is None]:
            found[i] = self._texts[rows[i]] = group_key(rows[i])
        return [text for text in found if text is not None]

    @property
    def lacks_values(self) -> bool:
        """Whether some record that is counted was not processed."""
        return any(stratum.tallies.lacks_values for stratum in self)

    def _crowd(self, slot: int) -> None:
        self.lost_sample |= self.lacks_values
        self._strata, self._side_by_side = {}, None
        self.crowded_until = slot + CROWDED_LAGS * self._schedule.grid.lags + self._schedule.window_slots

    def advance(self, slot: int, target: int, rows: IntArray, reporting: BoolArray) -> None:
        """Time goes on from `slot` to `target`.

        Args:
            rows: arrivals in [slot, target), as (slot, source, lag, count, stratum).
            reporting: the sources that have told of `target`.
        """
        strata = list(self._strata.values())
        if not strata:
            return
        which, known = self._places(rows[:, 4])
        rows, which = rows[known], which[known]
        for i in np.flatnonzero(np.bincount(which, minlength=len(strata))).tolist():
            strata[i].heard = target
        block, rows[:, 4] = np.divmod(which, BLOCK)
        rows = rows[np.argsort(block * (target - slot) + rows[:, 0] - slot, kind="stable")]
        ends = np.cumsum(np.bincount(block, minlength=len(self._blocks()))).tolist()
        for each, begin, end in zip(self._blocks(), [0, *ends], ends, strict=False):
            each.advance(slot, target, rows[begin:end], reporting)

    def reseat(self, rows: Sequence[int | None]) -> None:
        """Other sources (`Seats`)."""
        if not self._strata:
            return
        seats = Seats(next(iter(self)).mark.triangle.sources, rows, self._fresh)
        for stratum in self._strata.values():
            stratum.reseat(seats)
        self._side_by_side = None

    def come_back(self, source: int, rows: IntArray, slot: int) -> None:
        """A source that stood still tells what it had: rows of (slot, lag, count, stratum)."""
        strata = list(self._strata.values())
        which, known = self._places(rows[:, 3])
        rows, which = rows[known], which[known]
        for i in np.flatnonzero(np.bincount(which, minlength=len(strata))).tolist():
            strata[i].heard = slot
        block, rows[:, 3] = np.divmod(which, BLOCK)
        for i, each in enumerate(self._blocks()):
            each.come_back(source, rows[block == i])

    def _places(self, numbers: IntArray) -> tuple[IntArray, BoolArray]:
        """Where strata stand in the order of all, by number, and whether there is one."""
        if not self._strata:
            return np.zeros(len(numbers), np.int64), np.zeros(len(numbers), bool)
        all_numbers = np.array([s.number for s in self])  # ascending, as groups were admitted
        which = np.minimum(np.searchsorted(all_numbers, numbers), len(all_numbers) - 1)
        return which, np.asarray(all_numbers[which] == numbers)

    def learn(self, start_ms: int, edges: Sequence[str], outlooks: Sequence[Outlook]) -> None:
        """The window has been answered so."""
        by_key = {o.key: o for o in outlooks}
        for block in self._blocks():
            block.learn(start_ms, edges, by_key)

    def forget_before(self, start_ms: int) -> None:
        for stratum in self._strata.values():
            stratum.tallies.forget_before(start_ms)

    def idle(self, slot: int) -> list[str]:
        """Groups of which nothing has been heard for long, and no window that can still change has any records."""
        if self._accuracy.scope is None:
            return []
        before = slot - IDLE_LAGS * self._schedule.grid.lags
        return [key for key, s in self._strata.items() if s.heard < before and s.tallies.is_empty]

    def let_go(self, keys: Sequence[str]) -> None:
        for key in keys:
            del self._strata[key]
        self._side_by_side = None

    # What they say

    @contextmanager
    def told_ahead(
        self, reports: Iterable[tuple[str, SubstreamStatistics | GroupedSubstream]], slot: int, sources: int
    ) -> Iterator[None]:
        """Meanwhile, tallies have what so many edges have told of times that are still to come here, behind `slot`,
        those of groups that are not known yet among them."""
        reports = list(reports)
        if not reports:
            yield
            return
        saved, numbers = [(stratum.tallies, stratum.tallies.saved()) for stratum in self], self._numbers
        known = set(self._strata)
        try:
            for edge, told in reports:
                self.add_up(edge, told, None if self.crowded_until is not None else (slot, sources))
            yield
        finally:
            for tallies, sums in saved:
                tallies.put_back(sums)
            self._numbers = numbers
            if new := [key for key in self._strata if key not in known]:
                self.let_go(new)

    def add_up(
        self, edge: str, told: SubstreamStatistics | GroupedSubstream, new: tuple[int, int] | None = None
    ) -> None:
        """What an edge has told, without the times; of groups that are known, or also of others, which begin with
        `new`: the slot, and how many sources there are."""
        if isinstance(told, SubstreamStatistics):
            if ALL in self._strata:
                self._strata[ALL].tallies.add(edge, told)
            return
        sums = told.arrival_counts()
        for i, key in enumerate(self._keys(told)):
            stratum = self._strata.get(key)
            if stratum is None and new is not None and sums[i][0] > 0:
                stratum = self._admit(key, new[0], np.ones(new[1], bool))
            if stratum is not None:
                stratum.tallies.add_sums(edge, told.index, sums[i])

    def looks(
        self, start_ms: int, edges: Sequence[str], *, complete: bool = False, widening: float = 1.0
    ) -> list[Look]:
        """At the window that starts there, of all groups; see `Block.look`."""
        looks = [b.look(start_ms, edges, complete=complete, widening=widening) for b in self._blocks()]
        promised = sum(int(look.promised.sum()) for look in looks)
        if self._accuracy.scope == "all" and promised:
            for i, block in enumerate(self._blocks()):
                others = [s.promise_among(promised) for s in block.strata]
                if any(others):
                    looks[i] = block.look(start_ms, edges, complete=complete, widening=widening)
        return looks

    def judge(
        self, start_ms: int, edges: Sequence[str], widening: float = 1.0
    ) -> tuple[list[Look], dict[str, str], int | None]:
        """Whether the window can be answered.

        Returns:
            Looks at all groups; by group with a promise, why the answer is given though it is not met, or nothing if it
            is; and the slot until which the answer waits. Then the rest is of no account: no look is taken that would
            not change it.
        """
        reasons: dict[str, str] = {}
        looks: list[Look] = []
        for look in self._one_by_one(start_ms, edges, widening):
            found, until = look.verdicts()
            if until is not None:
                return looks, reasons, until
            looks.append(look)
            reasons |= found
        return looks, reasons, None

    def _one_by_one(self, start_ms: int, edges: Sequence[str], widening: float) -> Iterator[Look]:
        if self._accuracy.scope == "all":  # how much each has to keep depends on how many there are
            yield from self.looks(start_ms, edges, widening=widening)
        else:
            yield from (b.look(start_ms, edges, widening=widening) for b in self._blocks())

    def truths(self, start_ms: int, edges: Sequence[str]) -> dict[str, float | None]:
        """By group, `tallies.truths`."""
        return dict(zip(self._strata, truths([s.tallies for s in self], start_ms, edges), strict=True))

    def lacking(self, start_ms: int, edges: Sequence[str]) -> BoolArray:
        """By edge, whether some of the window's records were counted and not processed."""
        if not self._strata:
            return np.zeros(len(edges), bool)
        sampled = sampled_by([s.tallies for s in self], start_ms, edges)
        return np.asarray((sampled.count < sampled.arrived).any(axis=1))

    def others(self, start_ms: int, edges: Sequence[str]) -> tuple[bool, bool]:
        """Whether besides these edges any has told of records of the window, and whether it did not process all."""
        told = {edge for stratum in self for edge in stratum.tallies.edges(start_ms)}.difference(edges)
        if not told:
            return False, False
        sampled = sampled_by([s.tallies for s in self], start_ms, sorted(told))
        return bool(sampled.arrived.any()), bool((sampled.count < sampled.arrived).any())

    def rates(self, promised: set[str]) -> list[float] | None:
        """By source, the part of its records that has to be processed: the largest that any group needs, for an edge
        draws one sample of all. None: all, as long as there is a group that nothing can be promised of.

        Args:
            promised: the groups of the last answer that had an interval.
        """
        if self._accuracy.scope is not None and promised != self._strata.keys():
            return None
        if self._accuracy.scope == "all":
            for stratum in self:
                stratum.promise_among(len(self))
        rates = np.max([b.together.rates().max(axis=1) for b in self._blocks()], axis=0)
        return [float(r) for r in rates]

    # Snapshots

    def to_state(self) -> dict[str, Any]:
        """JSON."""
        strata = [s.to_state() for s in self._strata.values()]
        return {"strata": strata, "numbers": self._numbers, "crowded_until": self.crowded_until,
                "lost_sample": self.lost_sample}  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises what damaged JSON or bytes raise."""
        strata = [Stratum.from_state(s, self._fresh, self._accuracy, self._schedule) for s in state["strata"]]
        self._strata, self._side_by_side = {s.key: s for s in strata}, None
        self._numbers, self.crowded_until = state["numbers"], state["crowded_until"]
        self.lost_sample = state.get("lost_sample", False)
