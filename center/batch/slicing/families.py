"""Families of windows, and the edges at which windows cut a stream into slices.

Time windows and sessions are measured in ms of event time. Count windows are measured in ranks. The rank of a record is
the number of records before it, in the order of (event time, arrival).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgewater.model.errors import InvalidQuery
from edgewater.model.windows import MAX_COUNT, CountWindow, SessionWindow, SlidingWindow, Window
from edgewater.synopses import IntArray

MAX_TIME_MS = 1 << 60
"""The largest absolute value of event times and watermarks, so that sums of a few of them do not overflow."""


@dataclass(frozen=True, slots=True)
class SlidingCount(Window):
    """Windows of the records with ranks ``[k·every, k·every + count)``, k = 0, 1, …"""

    count: int
    every: int

    def __post_init__(self) -> None:
        for name, value in (("count", self.count), ("every", self.every)):
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_COUNT:
                raise InvalidQuery(f"window.{name}", value, f"a whole number of records from 1 to {MAX_COUNT}")
        if self.every > self.count:
            reason = "records between windows would belong to no window"
            raise InvalidQuery("window.every", self.every, f"at most the window's size, {self.count}", reason)

    def to_mapping(self) -> dict[str, str | int]:
        return {"count": self.count, "every": self.every}


WindowFamily = SlidingWindow | SessionWindow | CountWindow | SlidingCount
"""The families that a slicer accepts. `TumblingWindow` is a `SlidingWindow`."""


@dataclass(frozen=True, slots=True)
class WindowGrid:
    """Windows ``[offset + k·every, offset + k·every + size)`` in event time or in ranks. Gaps between windows are
    allowed.
    """

    size: int
    every: int
    offset: int = 0

    def last_start(self, at: int) -> int:
        """Returns the start of the last window that begins at or before `at`."""
        return (at - self.offset) // self.every * self.every + self.offset

    def starts_over(self, at: int) -> range:
        """Returns the starts of the windows that contain `at`, ascending. The range is empty in a gap."""
        last = self.last_start(at)
        count = (last + self.size - at - 1) // self.every + 1
        return range(last - (count - 1) * self.every, last + 1, self.every)

    def last_ends(self, at: IntArray) -> IntArray:
        """Returns, for each element of `at`, the end of the last window that begins at or before the element."""
        return (at - self.offset) // self.every * self.every + self.offset + self.size

    def buckets(self) -> list[WindowGrid]:
        """Returns several grids that have the same windows together. The windows of one grid do not overlap."""
        apart = -(-self.size // self.every)
        return [WindowGrid(self.size, apart * self.every, self.offset + k * self.every) for k in range(apart)]


def grid_of(family: SlidingWindow | CountWindow | SlidingCount) -> WindowGrid:
    """Returns the grid of a family of windows, in ms of event time or in ranks."""
    if isinstance(family, CountWindow):
        return WindowGrid(family.count, family.count)
    if isinstance(family, SlidingCount):
        return WindowGrid(family.count, family.every)
    return WindowGrid(family.size_ms, family.every_ms, family.offset_ms)


class SliceEdges:
    """The cells between all starts and ends of several grids. No window begins or ends inside a cell.

    Args:
        gaps: gaps of session families. Their multiples are edges, too. So no session begins or ends between two records
            of a cell.
    """

    def __init__(self, grids: Sequence[WindowGrid], gaps: Sequence[int] = ()) -> None:
        self.grids = tuple(grids)
        sequences = {(g.every, at % g.every) for g in grids for at in (g.offset, g.offset + g.size)}
        sequences |= {(gap, 0) for gap in gaps}
        self._every = np.array([s[0] for s in sorted(sequences)], np.int64)
        self._offset = np.array([s[1] for s in sorted(sequences)], np.int64)

    def cell(self, at: int) -> tuple[int, int]:
        """Returns [start, end) of the cell that contains `at`."""
        if len(self._every) == 1:
            every, offset = int(self._every[0]), int(self._offset[0])
            start = (at - offset) // every * every + offset
            return start, start + every
        starts = (at - self._offset) // self._every * self._every + self._offset
        return int(starts.max()), int((starts + self._every).min())

    def needed_until(self, at: int) -> int | None:
        """Returns the end of the last window that contains the cell around `at`, or None if no window contains it."""
        ends = [g.last_start(at) + g.size for g in self.grids]
        return max((end for end in ends if end > at), default=None)
