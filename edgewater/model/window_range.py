"""The windows of one version of a query (`WindowRange`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from types import MappingProxyType

from edgewater.base.streams import MAX_TIME_MS, MIN_TIME_MS
from edgewater.model.windows import CalendarWindow, SessionWindow, SlicedWindow
from edgewater.wire import QueryRef

MAX_UNITS = 1_000
"""The number of calendar windows that `next_border` tries. One of them must start at a time at which a session can be
cut.
"""


@dataclass(frozen=True, slots=True)
class WindowRange:
    """The windows that start in [from_ms, until_ms), event time in ms.

    A session is cut at the borders. A version counts the records in the range, and no other records.
    """

    from_ms: int = MIN_TIME_MS
    until_ms: int = MAX_TIME_MS

    def __contains__(self, start_ms: int) -> bool:
        return self.from_ms <= start_ms < self.until_ms

    @property
    def is_empty(self) -> bool:
        return self.from_ms >= self.until_ms

    def slices(self, window: SlicedWindow) -> tuple[int, int]:
        """Returns the event time [begin, end) of the slices of these windows."""
        begin = self.from_ms if self.from_ms == MIN_TIME_MS else window.next_start(self.from_ms)
        end = self.until_ms if self.until_ms == MAX_TIME_MS else window.end_of_windows_before(self.until_ms)
        return begin, end


ALL_WINDOWS = WindowRange()
NO_BORDERS: Mapping[QueryRef, WindowRange] = MappingProxyType({})
"""The ranges of no query. In such a mapping, a query without an entry has all windows."""


def next_border(time_ms: int, before: SlicedWindow, after: SlicedWindow) -> int | None:
    """Returns the first time, at or after `time_ms`, at which windows `after` can follow windows `before`; None if
    there is none.

    The time is a start of a window of `after`, so each record belongs to a version. A session can be cut only between
    slices.
    """
    start, step = after.next_start(time_ms), after.step_ms
    if not isinstance(before, SessionWindow):
        return start
    if isinstance(after, CalendarWindow):
        starts = after.starts(start, start + MAX_UNITS * step, MAX_UNITS)
        return next((each for each in starts if each % before.gap_ms == 0), None)
    gap, common = before.gap_ms, gcd(step, before.gap_ms)
    if start % common:
        return None
    steps = -(start // common) * pow(step // common, -1, gap // common) % (gap // common)
    return start + steps * step
