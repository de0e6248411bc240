"""Kinds of windows, and the grids of their slices."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from edgewater.base.errors import InvalidQuery, InvalidRequest
from edgewater.model.windows import (
    MAX_COUNT,
    CountWindow,
    SessionWindow,
    SlicedWindow,
    SlidingWindow,
    TumblingWindow,
    Window,
)

ACCEPTED = (
    'None, TumblingWindow("60s"), SlidingWindow("20s", "5s"), SessionWindow("30s"), CountWindow(1000) or '
    "SlidingCount(1000, 100)"
)


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


class Family(StrEnum):
    """Kinds of windows. The kind says what determines the borders of a window."""

    GLOBAL = "global"
    TUMBLING = "tumbling"
    SLIDING = "sliding"
    SESSION = "session"
    COUNT = "count"


def family_of(window: object) -> Family:
    """Returns the kind of a window.

    Raises:
        InvalidRequest: the object is not a window.
    """
    match window:
        case None:
            return Family.GLOBAL
        case SlidingWindow():
            return Family.TUMBLING if window.is_tumbling else Family.SLIDING
        case SessionWindow():
            return Family.SESSION
        case CountWindow() | SlidingCount():
            return Family.COUNT
    raise InvalidRequest("window", window, ACCEPTED)


def grid_of(window: object) -> SlicedWindow | None:
    """Returns the grid of a window's slices, in event time. For count windows, the grid is in numbers of records."""
    if isinstance(window, CountWindow):
        return TumblingWindow(window.count)
    if isinstance(window, SlidingCount):
        return SlidingWindow(window.count, window.every)
    return window if isinstance(window, SlicedWindow) else None
