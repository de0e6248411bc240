"""The groups of a query with an accuracy, as they come and go; without `group_by`, the one of all records. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from center.strata import Stratum, View
from edgewater.accuracy import MAX_GROUPS, Accuracy, Clockwork, group_key
from edgewater.synopses.base import BoolArray, IntArray
from edgewater.watermarks.grouped import GroupedSubstream
from edgewater.watermarks.monitor import SubstreamStatistics
from edgewater.watermarks.triangle import ArrivalTriangle
from edgewater.watermarks.watermark import Watermark

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

    def __init__(self, fresh: Callable[[int], Watermark], accuracy: Accuracy, clockwork: Clockwork) -> None:
        self._fresh, self._accuracy, self._clockwork = fresh, accuracy, clockwork
        self._strata: dict[str, Stratum] = {}
        self._numbers = 0
        self.crowded_until: int | None = None
        self.lost_sample = False

    def __len__(self) -> int:
        return len(self._strata)

    def __iter__(self) -> Iterator[Stratum]:
        return iter(self._strata.values())

    def get(self, key: str) -> Stratum | None:
        return self._strata.get(key)

    # Changes

    def begin(self, slot: int, sources: int) -> None:
        """Nothing is known of any time before `slot`."""
        self.clear()
        if self._accuracy.scope is None:
            self._admit(ALL, slot, np.ones(sources, bool))

    def clear(self) -> None:
        self._strata, self.crowded_until, self.lost_sample = {}, None, False

    def _admit(self, key: str, slot: int, reporting: BoolArray) -> Stratum:
        """A group that is not known yet. From the last border of sub-streams on, nothing had come of it."""
        slots, lags = self._clockwork.grid.substream_slots, self._clockwork.grid.lags
        base, sources = slot // slots * slots, len(reporting)
        stratum = Stratum(key, self._numbers, base, sources, self._fresh, self._accuracy, self._clockwork)
        self._numbers += 1
        for _ in range(slot - base):
            stratum.mark.on_slot(np.zeros((sources, lags)), reporting)
        self._strata[key] = stratum
        return stratum

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
        if statistics.others or len(told) > MAX_GROUPS:
            self._crowd(slot)
        if self.crowded_until is not None:
            return NO_ROWS
        keys = [group_key(values) for values in zip(*(k.to_pylist() for k in statistics.keys), strict=True)]
        sums, numbers = statistics.tallies(), np.zeros(len(keys), np.int64)
        for i in told.tolist():
            stratum = self._strata.get(keys[i]) or self._admit(keys[i], slot, reporting)
            stratum.tallies.add_sums(edge, statistics.index, sums[i])
            numbers[i] = stratum.number
        if len(self._strata) > MAX_GROUPS:
            self._crowd(slot)
            return NO_ROWS
        rows[:, 3] = numbers[rows[:, 3]]
        return rows

    def _crowd(self, slot: int) -> None:
        self.lost_sample |= any(stratum.tallies.lacks_values for stratum in self)
        self._strata = {}
        self.crowded_until = slot + CROWDED_LAGS * self._clockwork.grid.lags + self._clockwork.window_slots

    def advance(self, slot: int, target: int, rows: IntArray, reporting: BoolArray) -> None:
        """Time goes on from `slot` to `target`.

        Args:
            rows: arrivals in [slot, target), as (slot, source, lag, count, stratum).
            reporting: the sources that have told of `target`.
        """
        strata = list(self._strata.values())
        if not strata:
            return
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        numbers = np.array([s.number for s in strata])  # ascending, as groups were admitted
        which = np.minimum(np.searchsorted(numbers, rows[:, 4]), len(strata) - 1)
        known = numbers[which] == rows[:, 4]
        rows, which = rows[known], which[known]
        for i in np.unique(which).tolist():
            strata[i].heard = target
        cuts = np.searchsorted(rows[:, 0], np.arange(slot, target + 1))
        triangle = ArrivalTriangle.over([s.mark.triangle for s in strata])
        arrived, telling = np.zeros(triangle.seen.shape), np.tile(reporting, len(strata))
        source = which * len(reporting) + rows[:, 1]
        for i in range(target - slot):
            mine = slice(cuts[i], cuts[i + 1])
            arrived[:] = 0
            np.add.at(arrived, (source[mine], rows[mine, 2]), rows[mine, 3])
            triangle.advance(arrived, telling)
            for stratum in strata:
                stratum.mark.on_advanced()

    def reseat(self, rows: Sequence[int | None]) -> None:
        for stratum in self._strata.values():
            stratum.reseat(rows)

    def come_back(self, source: int, rows: IntArray, slot: int) -> None:
        """A source that stood still tells what it had: rows of (slot, lag, count, stratum)."""
        for stratum in self._strata.values():
            mine = rows[rows[:, 3] == stratum.number]
            stratum.come_back(source, mine)
            if len(mine):
                stratum.heard = slot

    def forget_before(self, start_ms: int) -> None:
        for stratum in self._strata.values():
            stratum.tallies.forget_before(start_ms)

    def idle(self, slot: int) -> list[str]:
        """Groups of which nothing has been heard for long, and no window that can still change has any records."""
        if self._accuracy.scope is None:
            return []
        before = slot - IDLE_LAGS * self._clockwork.grid.lags
        return [key for key, s in self._strata.items() if s.heard < before and s.tallies.is_empty]

    def let_go(self, keys: Sequence[str]) -> None:
        for key in keys:
            del self._strata[key]

    # What they say

    def views(self, start_ms: int, edges: Sequence[str]) -> list[View]:
        """Of the groups that have records in the window, or are expected to."""
        views = [s.view(start_ms, edges) for s in self._strata.values()]
        if self._accuracy.scope is None:
            return views
        promised = sum(v.promised for v in views)
        if self._accuracy.scope == "all" and promised:
            views = [v.stratum.view(start_ms, edges) if v.stratum.promise_among(promised) else v for v in views]
        return [v for v in views if v.sampled.arrived.sum() > 0 or v.model.size[0] > 0.5]

    def rates(self, promised: set[str]) -> list[float] | None:
        """By source, the part of its records that has to be processed: the largest that any group needs, for an edge
        draws one sample of all. None: all, as long as there is a group that nothing can be promised of.

        Args:
            promised: the groups of the last answer that had an interval.
        """
        strata = list(self._strata.values())
        if self._accuracy.scope is not None and promised != self._strata.keys():
            return None
        if self._accuracy.scope == "all":
            for stratum in strata:
                stratum.promise_among(len(strata))
        rates = np.max([s.mark.plan().rates[:, 0] for s in strata], axis=0)
        return [float(r) for r in rates]

    # Snapshots

    def to_state(self) -> dict[str, Any]:
        """JSON."""
        strata = [s.to_state() for s in self._strata.values()]
        return {"strata": strata, "numbers": self._numbers, "crowded_until": self.crowded_until,
                "lost_sample": self.lost_sample}  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises what damaged JSON or bytes raise."""
        strata = [Stratum.from_state(s, self._fresh, self._accuracy, self._clockwork) for s in state["strata"]]
        self._strata = {s.key: s for s in strata}
        self._numbers, self.crowded_until = state["numbers"], state["crowded_until"]
        self.lost_sample = state.get("lost_sample", False)
