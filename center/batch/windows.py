"""Kinds of windows, and the grids of their slices."""

from __future__ import annotations

from enum import StrEnum

from center.batch.slicing import SlidingCount
from edgewater.model.errors import InvalidRequest
from edgewater.model.windows import CountWindow, SessionWindow, SlicedWindow, SlidingWindow, TumblingWindow

ACCEPTED = (
    'None, TumblingWindow("60s"), SlidingWindow("20s", "5s"), SessionWindow("30s"), CountWindow(1000) or '
    "SlidingCount(1000, 100)"
)


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
