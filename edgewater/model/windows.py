"""Window types of queries, and the slices that windows consist of.

Edges aggregate and ship records by slices. Slices are intervals of event time that do not overlap, and a window is a
merge of slices. Slices have the length gcd(size, every), so every window starts and ends on a slice border. A record is
aggregated once, however many windows overlap. A calendar window, such as a day in a time zone, is one slice.

The borders of session windows depend on the records. Still, sessions are also merges of slices on a fixed grid. A slice
is as long as the gap, so two records of one slice are less than a gap apart and belong to one session. A session is a
run of adjacent slices: the first record of each slice is less than a gap after the last record of the previous slice.
Edges report the first and the last record of each slice. The center (`center/ledger/sessionize.py`) computes the
sessions.

    Window
    ├── SlicedWindow            supported by queries
    │   ├── TimeWindow          its borders are known before any record
    │   │   ├── SlidingWindow   TumblingWindow is a subclass
    │   │   └── CalendarWindow
    │   └── SessionWindow
    └── CountWindow             needs a total order of the records: `center.batch` only
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from edgewater.base.errors import InvalidQuery, did_you_mean
from edgewater.base.quantities import MAX_DURATION_MS, duration_ms, format_duration
from edgewater.model.calendar_units import CALENDAR_UNITS, UTC

if TYPE_CHECKING:  # configurations import this module, and importing NumPy starts a thread
    import numpy as np
    import numpy.typing as npt

    IntArray = npt.NDArray[np.int64]

T = TypeVar("T")

Span = int | str
"""A length of event time: integer ms, or a duration such as ``"30s"``."""

ACCEPTED_IN_QUERIES = (
    "{tumbling: 60s}, {tumbling: 1 day, zone: Europe/Berlin}, {sliding: 5m, every: 30s}, each with an optional offset, "
    "or {session: 30s} with an optional max"
)
ACCEPTED = f"{ACCEPTED_IN_QUERIES}, or {{count: 1000}}"
MAX_SLICES_PER_WINDOW = 10_000  # limit: CPU and memory of a window
MAX_WINDOWS_PER_SLICE = 500
"""The largest number of windows to which a record of a new query may belong. On one core, the center takes 1 to 2 ms
per window (measured). So all answers that a late record changes take at most a second.
"""
DEFAULT_SESSION_MAX_MS = 86_400_000
"""Default of a session's maximum length. It is shorter if a session would have more than `MAX_SLICES_PER_WINDOW`
slices.
"""
MAX_COUNT = 1 << 40  # limit: counts of records


CALENDAR_ACCEPTED = f"a calendar unit: {', '.join(f'1 {name}' for name in CALENDAR_UNITS)}"
_CALENDAR = re.compile(rf"1 ?(?P<unit>{'|'.join(CALENDAR_UNITS)})s?|1(?P<letter>[dw])")
_LETTERS = {"d": "day", "w": "week"}


class Window(ABC):
    """An assignment of records to windows. It is immutable. Two objects are equal if they produce the same windows."""

    __slots__ = ()

    @classmethod
    def from_mapping(cls, mapping: object, accepted: str = ACCEPTED) -> Window:
        """Reads a mapping in one of the forms of `ACCEPTED`.

        Args:
            accepted: the forms that an error message offers.

        Raises:
            InvalidQuery: names the field, its value and what is accepted.
        """
        if not isinstance(mapping, dict) or not mapping:
            raise InvalidQuery("window", mapping, accepted)
        kinds = [kind for kind in _KEYS if kind in mapping]
        if len(kinds) != 1:
            near = next((meant for key in mapping if (meant := did_you_mean(key, _KEYS))), "")
            reason = "exactly one kind of window is needed" if kinds else f"{', '.join(map(str, mapping))} is no window"
            raise InvalidQuery("window", mapping, accepted, reason + near)
        (kind,) = kinds
        for key in mapping:
            if key not in _KEYS[kind]:
                reason = f"unknown key of a {kind} window{did_you_mean(key, _KEYS[kind])}"
                raise InvalidQuery(f"window.{key}", mapping[key], accepted, reason)
        if kind == "count":
            return CountWindow(mapping["count"])
        unit = _CALENDAR.fullmatch(str(mapping[kind]).strip().lower()) if kind == "tumbling" else None
        if unit is not None and (unit["unit"] or "zone" in mapping):
            offset_ms = _read(mapping.get("offset", "0s"), "offset")
            return CalendarWindow(unit["unit"] or _LETTERS[unit["letter"]], mapping.get("zone", UTC), offset_ms)
        if "zone" in mapping:
            raise InvalidQuery("window.tumbling", mapping[kind], CALENDAR_ACCEPTED, "only calendar windows have a zone")
        spans = {key: _read(value, key) for key, value in mapping.items()}
        if kind == "session":
            return SessionWindow(spans["session"], spans.get("max"))
        if kind == "tumbling":
            return TumblingWindow(spans["tumbling"], spans.get("offset", 0))
        if "every" not in mapping:
            raise InvalidQuery("window.every", None, "a duration such as 30s", "missing key of a sliding window")
        return SlidingWindow(spans["sliding"], spans["every"], spans.get("offset", 0))

    @abstractmethod
    def to_mapping(self) -> dict[str, str | int]:
        """Returns the canonical mapping, which `from_mapping` accepts."""


class SlicedWindow(Window):
    """Windows that are merges of slices ``[origin + k·slice, origin + (k + 1)·slice)`` for all integers k."""

    __slots__ = ()

    @property
    @abstractmethod
    def slice_ms(self) -> int: ...

    @property
    @abstractmethod
    def origin_ms(self) -> int:
        """Event time of one slice border."""

    @property
    @abstractmethod
    def longest_ms(self) -> int:
        """The greatest length of a window."""

    @property
    @abstractmethod
    def slices_per_window(self) -> int:
        """The greatest number of slices in a window."""

    @property
    @abstractmethod
    def grid_ms(self) -> tuple[int, int]:
        """Length and distance of the windows. If they vary, or follow from records: those of slices."""

    @property
    def most_windows(self) -> int:
        """To how many windows a record belongs at most."""
        length_ms, distance_ms = self.grid_ms
        return -(-length_ms // distance_ms)

    @property
    def slicing(self) -> tuple[object, ...]:
        """A value that is equal for windows with the same slices."""
        return self.slice_ms, self.origin_ms % self.slice_ms

    @abstractmethod
    def last_window_end(self, slice_start_ms: int) -> int:
        """Returns the latest end of a window that contains the slice. After it, only late records need the slice."""

    @property
    @abstractmethod
    def step_ms(self) -> int:
        """Event time between the starts of two windows. For sessions, the time between two borders at which they may be
        cut.
        """

    def next_start(self, time_ms: int) -> int:
        """Returns the first start of a window at or after `time_ms`. For sessions, the first slice border."""
        return self.origin_ms - (self.origin_ms - time_ms) // self.step_ms * self.step_ms

    @abstractmethod
    def end_of_windows_before(self, time_ms: int) -> int:
        """Returns the end of the last window that starts before `time_ms`. For sessions, the time at which they are
        cut.
        """

    def require_affordable(self) -> None:
        """Raises InvalidQuery if a record belongs to more windows than a new query may have.

        Queries that are already registered are not checked.
        """

    def slice_starts(self, times_ms: IntArray) -> IntArray:
        """Returns the start of the slice of each event time, in the shape of `times_ms` (int64)."""
        width, origin = self.slice_ms, self.origin_ms
        return (times_ms - origin) // width * width + origin

    def slice_start(self, time_ms: int) -> int:
        width, origin = self.slice_ms, self.origin_ms
        return (time_ms - origin) // width * width + origin

    def slice_end(self, slice_start_ms: int) -> int:
        return slice_start_ms + self.slice_ms

    def next_slice(self, time_ms: int) -> int:
        """Returns the start of the first slice that starts after an event time."""
        return self.slice_end(self.slice_start(time_ms))


class TimeWindow(SlicedWindow):
    """Windows whose borders do not depend on records."""

    __slots__ = ()

    @property
    @abstractmethod
    def is_tumbling(self) -> bool:
        """Whether the windows do not overlap. If so, each window is one slice."""

    @abstractmethod
    def end(self, window_start_ms: int) -> int: ...

    @abstractmethod
    def following(self, window_start_ms: int) -> int:
        """Returns the start of the window after the window that starts at `window_start_ms`."""

    @abstractmethod
    def windows_over(self, slice_start_ms: int) -> range:
        """Returns the starts of all windows that contain the slice."""

    def windows_of_slice(self, slice_start_ms: int) -> list[int]:
        """Returns the starts of all windows that contain the slice, ascending."""
        return list(self.windows_over(slice_start_ms))

    def windows_of_slices(self, slice_starts_ms: Iterable[int]) -> Iterator[int]:
        """Yields the starts of all windows that contain one of these slices, ascending, each start once.

        Args:
            slice_starts_ms: the starts of the slices, ascending.
        """
        after = None
        for start in slice_starts_ms:
            windows = self.windows_over(start)
            yield from windows if after is None else range(max(windows.start, after), windows.stop, windows.step)
            after = windows.stop

    @abstractmethod
    def slices_of_window(self, window_start_ms: int) -> range:
        """Returns the starts of a window's slices, ascending."""

    @abstractmethod
    def first_ending_after(self, time_ms: int) -> int:
        """Returns the start of the first window that ends after an event time."""

    def starts(self, from_ms: int, to_ms: int, most: int) -> Iterator[int]:
        """Yields the starts of windows in ``[from_ms, to_ms)``. If there are more than `most`, yields about the last
        `most`.

        Args:
            from_ms: the start of a window.
        """
        start = max(from_ms, self.first_ending_after(to_ms - most * self.longest_ms)) if self.is_tumbling else from_ms
        while start < to_ms:
            yield start
            start = self.following(start)

    def last_window_end(self, slice_start_ms: int) -> int:
        return self.end(self.windows_over(slice_start_ms)[-1])


@dataclass(frozen=True, slots=True, init=False)
class SlidingWindow(TimeWindow):
    """All windows ``[offset + k·every, offset + k·every + size)`` for all integers k.

    A tumbling window has `every == size`. All fields are ms of event time.
    """

    size_ms: int
    every_ms: int
    offset_ms: int

    def __init__(self, size: Span, every: Span, offset: Span = 0) -> None:
        for name, value in (("size", size), ("every", every), ("offset", offset)):
            object.__setattr__(self, f"{name}_ms", _span(value, name))
        if self.size_ms <= 0 or self.every_ms <= 0:
            raise InvalidQuery("window", self, "a size and a step above 0", "size and step must be positive")
        if self.every_ms > self.size_ms:
            accepted = f"at most the window's size, {format_duration(self.size_ms)}"
            reason = "records between two windows would belong to no window"
            raise InvalidQuery("window.every", format_duration(self.every_ms), accepted, reason)
        if self.slices_per_window > MAX_SLICES_PER_WINDOW:
            accepted = f"a step that divides the window into at most {MAX_SLICES_PER_WINDOW} slices"
            reason = f"this step gives {self.slices_per_window} slices"
            raise InvalidQuery("window.every", format_duration(self.every_ms), accepted, reason)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SlidingWindow):
            return NotImplemented
        return self._all() == other._all()

    def __hash__(self) -> int:
        return hash(self._all())

    def _all(self) -> tuple[int, int, int]:
        return self.size_ms, self.every_ms, self.offset_ms

    @property
    def is_tumbling(self) -> bool:
        return self.size_ms == self.every_ms

    @property
    def origin_ms(self) -> int:
        return self.offset_ms

    @property
    def slice_ms(self) -> int:
        return math.gcd(self.size_ms, self.every_ms)

    @property
    def step_ms(self) -> int:
        return self.every_ms

    @property
    def grid_ms(self) -> tuple[int, int]:
        return self.size_ms, self.every_ms

    def end_of_windows_before(self, time_ms: int) -> int:
        return self.next_start(time_ms) - self.every_ms + self.size_ms

    @property
    def longest_ms(self) -> int:
        return self.size_ms

    @property
    def slices_per_window(self) -> int:
        return self.size_ms // self.slice_ms

    def require_affordable(self) -> None:
        windows = -(-self.size_ms // self.every_ms)
        if windows > MAX_WINDOWS_PER_SLICE:
            least_ms = -(-self.size_ms // MAX_WINDOWS_PER_SLICE)
            accepted = f"at least {format_duration(least_ms)} for windows of {format_duration(self.size_ms)}"
            reason = f"each record would belong to {windows} windows, more than {MAX_WINDOWS_PER_SLICE}"
            raise InvalidQuery("window.every", format_duration(self.every_ms), accepted, reason)

    def windows_over(self, slice_start_ms: int) -> range:
        last = (slice_start_ms - self.offset_ms) // self.every_ms * self.every_ms + self.offset_ms
        count = (last + self.size_ms - slice_start_ms - 1) // self.every_ms + 1
        return range(last - (count - 1) * self.every_ms, last + self.every_ms, self.every_ms)

    def slices_of_window(self, window_start_ms: int) -> range:
        return range(window_start_ms, window_start_ms + self.size_ms, self.slice_ms)

    def end(self, window_start_ms: int) -> int:
        return window_start_ms + self.size_ms

    def following(self, window_start_ms: int) -> int:
        return window_start_ms + self.every_ms

    def first_ending_after(self, time_ms: int) -> int:
        steps = (time_ms - self.size_ms - self.offset_ms) // self.every_ms + 1
        return self.offset_ms + steps * self.every_ms

    def starts(self, from_ms: int, to_ms: int, most: int) -> Iterator[int]:
        begin = from_ms + max(0, (to_ms - 1 - from_ms) // self.every_ms + 1 - most) * self.every_ms
        yield from range(begin, to_ms, self.every_ms)

    def to_mapping(self) -> dict[str, str | int]:
        result: dict[str, str | int]
        if self.is_tumbling:
            result = {"tumbling": format_duration(self.size_ms)}
        else:
            result = {"sliding": format_duration(self.size_ms), "every": format_duration(self.every_ms)}
        if self.offset_ms:
            result["offset"] = format_duration(self.offset_ms)
        return result


class TumblingWindow(SlidingWindow):
    """Windows ``[offset + k·size, offset + (k + 1)·size)``. Each record belongs to one window."""

    __slots__ = ()

    def __init__(self, size: Span, offset: Span = 0) -> None:
        SlidingWindow.__init__(self, size, size, offset)


@dataclass(frozen=True, slots=True)
class CalendarWindow(TimeWindow):
    """Windows of one calendar unit in a time zone, each of one slice. A week begins on Monday.

    A window is the time from one border to the next border. So a day with a clock change has 23 or 25 hours. If a clock
    change repeats the time of a border, the border is at the first of both times.

    Attributes:
        zone: name in the IANA database.
        offset_ms: how much later than the unit a window starts, by the clocks of the zone.

    Raises:
        InvalidQuery: names the field, its value and what is accepted.
    """

    unit: str
    zone: str = UTC
    offset_ms: int = 0

    def __post_init__(self) -> None:
        from edgewater.model.calendars import is_zone

        if self.unit not in CALENDAR_UNITS:
            raise InvalidQuery("window.tumbling", self.unit, CALENDAR_ACCEPTED)
        if not isinstance(self.zone, str) or not is_zone(self.zone):
            raise InvalidQuery("window.zone", self.zone, "a time zone of the IANA database, such as Europe/Berlin")
        if abs(self.offset_ms) >= self.slice_ms:
            accepted = f"less than {format_duration(self.slice_ms)}"
            raise InvalidQuery("window.offset", format_duration(self.offset_ms), accepted)

    @property
    def is_tumbling(self) -> bool:
        return True

    @property
    def slice_ms(self) -> int:
        """The usual length of a window. Only estimates use it. `slice_end` returns the exact border."""
        return CALENDAR_UNITS[self.unit].usual_ms

    @property
    def grid_ms(self) -> tuple[int, int]:
        return self.slice_ms, self.slice_ms

    @property
    def origin_ms(self) -> int:
        return self.slice_start(0)

    @property
    def slicing(self) -> tuple[object, ...]:
        return self.unit, self.zone, self.offset_ms

    @property
    def longest_ms(self) -> int:
        return CALENDAR_UNITS[self.unit].longest_ms

    @property
    def slices_per_window(self) -> int:
        return 1

    def slice_starts(self, times_ms: IntArray) -> IntArray:
        from edgewater.model.calendars import unit_starts

        return unit_starts(times_ms, CALENDAR_UNITS[self.unit], self.zone, self.offset_ms)

    def slice_start(self, time_ms: int) -> int:
        return _unit_start(self.unit, self.zone, self.offset_ms, time_ms)

    def slice_end(self, slice_start_ms: int) -> int:
        return self.slice_start(slice_start_ms + CALENDAR_UNITS[self.unit].into_next_ms)

    def windows_over(self, slice_start_ms: int) -> range:
        end = self.slice_end(slice_start_ms)
        return range(slice_start_ms, end, end - slice_start_ms)

    def slices_of_window(self, window_start_ms: int) -> range:
        return self.windows_over(window_start_ms)

    def end(self, window_start_ms: int) -> int:
        return self.slice_end(window_start_ms)

    def following(self, window_start_ms: int) -> int:
        return self.slice_end(window_start_ms)

    @property
    def step_ms(self) -> int:
        return self.slice_ms

    def next_start(self, time_ms: int) -> int:
        return self.next_slice(time_ms - 1)

    def end_of_windows_before(self, time_ms: int) -> int:
        return self.next_start(time_ms)

    def first_ending_after(self, time_ms: int) -> int:
        return self.slice_start(time_ms)

    def to_mapping(self) -> dict[str, str | int]:
        result: dict[str, str | int] = {"tumbling": f"1 {self.unit}", "zone": self.zone}
        if self.offset_ms:
            result["offset"] = format_duration(self.offset_ms)
        return result


@dataclass(frozen=True, slots=True, init=False)
class SessionWindow(SlicedWindow):
    """Runs of records in which each record is less than `gap_ms` after the previous record.

    A session is ``[first record, last record + gap)``. A record that is exactly a gap after the last record starts
    another session. A session spans at most the slices that fit into `max_ms`. A longer session is cut at the border of
    its last slice, and the following records start another session.
    """

    gap_ms: int
    max_ms: int

    def __init__(self, gap: Span, longest: Span | None = None) -> None:
        gap_ms = _span(gap, "session")
        if gap_ms <= 0:
            raise InvalidQuery("window.session", gap, "a positive duration", "it is the gap that separates sessions")
        default = min(DEFAULT_SESSION_MAX_MS, MAX_SLICES_PER_WINDOW * gap_ms)
        max_ms = max(default, gap_ms) if longest is None else _span(longest, "max")
        if not gap_ms <= max_ms <= MAX_SLICES_PER_WINDOW * gap_ms:
            accepted = f"from the gap, {format_duration(gap_ms)}, to {MAX_SLICES_PER_WINDOW} gaps"
            reason = "it limits the length of a session"
            raise InvalidQuery("window.max", longest, accepted, reason)
        object.__setattr__(self, "gap_ms", gap_ms)
        object.__setattr__(self, "max_ms", max_ms)

    @property
    def origin_ms(self) -> int:
        return 0

    @property
    def slice_ms(self) -> int:
        return self.gap_ms

    @property
    def step_ms(self) -> int:
        return self.gap_ms

    @property
    def grid_ms(self) -> tuple[int, int]:
        return self.gap_ms, self.gap_ms

    def end_of_windows_before(self, time_ms: int) -> int:
        return self.next_start(time_ms)

    @property
    def longest_ms(self) -> int:
        return self.max_ms + self.gap_ms

    @property
    def slices_per_window(self) -> int:
        return self.max_ms // self.gap_ms

    def closes_at(self, end_ms: int) -> int:
        """Returns the end of the last slice whose records can extend a session that ends at `end_ms`.

        An edge has reported all records of the session when it has closed that slice.
        """
        return -(-end_ms // self.gap_ms) * self.gap_ms

    def cut_ms(self, first_ms: int) -> int:
        """Returns the time at which a session with a first record at `first_ms` is cut if it reaches its maximum
        length.
        """
        return self.slice_start(first_ms) + self.slices_per_window * self.gap_ms

    def last_window_end(self, slice_start_ms: int) -> int:
        return slice_start_ms + (self.slices_per_window + 1) * self.gap_ms

    def to_mapping(self) -> dict[str, str | int]:
        return {"session": format_duration(self.gap_ms), "max": format_duration(self.max_ms)}


@dataclass(frozen=True, slots=True)
class CountWindow(Window):
    """Windows of `count` records each, in the order of event time."""

    count: int

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or not 1 <= self.count <= MAX_COUNT:
            raise InvalidQuery("window.count", self.count, f"a whole number of records from 1 to {MAX_COUNT}")

    def to_mapping(self) -> dict[str, str | int]:
        return {"count": self.count}


_KEYS = {
    "tumbling": ("tumbling", "offset", "zone"),
    "sliding": ("sliding", "every", "offset"),
    "session": ("session", "max"),
    "count": ("count",),
}


@lru_cache(maxsize=4096)
def _unit_start(unit: str, zone: str, offset_ms: int, time_ms: int) -> int:
    import numpy as np

    from edgewater.model.calendars import unit_starts

    return int(unit_starts(np.array([time_ms]), CALENDAR_UNITS[unit], zone, offset_ms)[0])


def window_ends(window: Window) -> tuple[int, int] | None:
    """Returns the distance and the offset of the ends of windows, in ms; None if they are not known.

    For session windows, returns the distance and the offset of the ends of slices.
    """
    if isinstance(window, CalendarWindow) or not isinstance(window, SlicedWindow):
        return None
    length_ms, distance_ms = window.grid_ms
    return distance_ms, (window.origin_ms + length_ms) % distance_ms


def _read(value: object, key: str) -> int:
    return duration_ms(value, f"window.{key}", InvalidQuery, minimum_ms=-MAX_DURATION_MS if key == "offset" else 1)


def _span(value: Span, name: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return duration_ms(value, f"window.{name}", InvalidQuery)


Extent = tuple[int, int]
"""The event times, in ms, of the first and the last record of a slice."""


def sessions_of(
    slices: Iterable[T], window: SessionWindow, extent: Callable[[T], Extent]
) -> Iterator[tuple[list[T], bool]]:
    """Groups slices into sessions.

    Args:
        slices: slices with records, ascending. Each of them lies within one slice of the window's grid.
        extent: returns the extent of a slice.

    Yields:
        The slices of each session, ascending, and whether the session was cut at its maximum length. If it was cut, the
            next session continues it.
    """
    session: list[T] = []
    cut_ms = last_ms = 0
    for item in slices:
        first_ms, item_last_ms = extent(item)
        continues = bool(session) and first_ms - last_ms < window.gap_ms
        if session and not (continues and first_ms < cut_ms):
            yield session, continues
            session = []
        if not session:
            cut_ms = window.cut_ms(first_ms)
        session.append(item)
        last_ms = item_last_ms
    if session:
        yield session, False
