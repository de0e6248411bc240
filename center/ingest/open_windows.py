"""Limits how many windows of a query one edge keeps open at the center, from the content of its frames. Pure.

The ledger keeps each window in memory until it is final: until all expected edges have closed it and its lateness has
passed. If an edge sends its slices in order and closes them, only the windows of the lateness are open. Two kinds of
slices have no natural limit: slices that an edge sends and does not close, and slices for which it sends records after
it has closed them. A correct edge has few of both: its memory limits its open slices, and the lateness limits late
records.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from edgewater.base.streams import MIN_TIME_MS
from edgewater.model.query import QuerySpec
from edgewater.model.windows import SlicedWindow

MAX_STEPS = 1_024
"""Maximum number of closed slices whose closing frame is remembered, to judge frames that are sent again."""


@dataclass(slots=True)
class SliceSet:
    """Slices, and the number of windows over them.

    Args:
        size_ms: size of a window.
        every_ms: time between the starts of two windows.
    """

    size_ms: int
    every_ms: int
    starts: list[int] = field(default_factory=list)
    covered_ms: int = 0

    @property
    def windows(self) -> int:
        return -(-self.covered_ms // self.every_ms)

    def __contains__(self, start: int) -> bool:
        at = bisect_left(self.starts, start)
        return at < len(self.starts) and self.starts[at] == start

    def added_ms(self, start: int) -> int:
        """Returns how much a slice that is not in the set would add to `covered_ms`. It is less if a slice in the set
        has some of the same windows."""
        at = bisect_left(self.starts, start)
        before = start - self.starts[at - 1] if at else self.size_ms
        after = self.starts[at] - start if at < len(self.starts) else self.size_ms
        between = min(before + after, self.size_ms) if 0 < at < len(self.starts) else self.size_ms
        return min(before, self.size_ms) + min(after, self.size_ms) - between

    def add(self, start: int) -> None:
        self.covered_ms += self.added_ms(start)
        insort(self.starts, start)

    def drop_before(self, start: int) -> None:
        """Removes the slices before `start`."""
        count = bisect_left(self.starts, start)
        for one, following in zip(self.starts[:count], self.starts[1 : count + 1], strict=False):
            self.covered_ms -= min(following - one, self.size_ms)
        del self.starts[:count]
        if not self.starts:
            self.covered_ms = 0


class OpenWindows:
    """The windows of a query that one edge keeps open.

    Args:
        most: the largest number of windows that an edge may keep open, without the windows within the query's lateness.
    """

    def __init__(self, spec: QuerySpec, most: int) -> None:
        window = spec.window
        assert isinstance(window, SlicedWindow)
        size_ms, every_ms = window.grid_ms
        self._window = window
        self.most = most + -(-(spec.lateness_ms + size_ms) // every_ms)
        self._open, self._late = SliceSet(size_ms, every_ms), SliceSet(size_ms, every_ms)
        self._incarnation: str | None = None
        self._final_after_ms = spec.lateness_ms + (window.slices_per_window + 1) * window.slice_ms
        # Ascending by seq: the event time up to which slices are closed after the frame of this seq. So a frame that is
        # sent again is judged as it was the first time.
        self._seqs, self._through_ms = [-1], [MIN_TIME_MS]

    @property
    def count(self) -> int:
        return self._open.windows + self._late.windows

    def refuse(self, incarnation: str, seq: int, through_ms: int, starts: list[int]) -> set[int]:
        """Counts the slices of a frame. Returns the slices that would open too many windows.

        Args:
            through_ms: event time up to which the frame closes slices.
        """
        if incarnation != self._incarnation:  # a new incarnation may read all of its input again, in order
            self._incarnation = incarnation
            self._seqs, self._through_ms = [-1], [MIN_TIME_MS]
        closed_ms = self._through_ms[max(bisect_left(self._seqs, seq) - 1, 0)]
        through_ms = max(self._window.slice_start(through_ms), closed_ms)
        self._advance(seq, through_ms)
        refused = set()
        for start in sorted(starts):
            end = self._window.slice_end(start)
            if closed_ms < end <= through_ms or start in self._open or start in self._late:
                continue
            slices = self._late if end <= closed_ms else self._open
            if self.count + -(-slices.added_ms(start) // slices.every_ms) > self.most:
                refused.add(start)
            else:
                slices.add(start)
        return refused

    def _advance(self, seq: int, through_ms: int) -> None:
        if through_ms <= self._through_ms[-1]:
            return
        if seq > self._seqs[-1]:
            self._seqs.append(seq)
            self._through_ms.append(through_ms)
        self._through_ms[-1] = through_ms
        if len(self._seqs) > MAX_STEPS:
            # Frames before these that are sent again count as late until their lateness has passed.
            del self._seqs[: MAX_STEPS // 2], self._through_ms[: MAX_STEPS // 2]
        self._open.drop_before(through_ms)
        self._late.drop_before(through_ms - self._final_after_ms)
