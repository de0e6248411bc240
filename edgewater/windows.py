"""Windows, and the slices they are made of.

A slice is the smallest non-overlapping piece of event time that is aggregated and shipped; a
window is a merge of slices. With slices of gcd(size, every, offset differences) every window of a
query begins and ends on a slice's border, so a record is aggregated once whatever the overlap.

Sessions have no borders that are known beforehand, and still are merges of slices on a fixed grid: with
slices as wide as the gap, two records of one slice are less than a gap apart and so in one session, and
a session is a run of neighbouring slices in which each begins less than a gap after the last record of
the one before. Edges slice on the grid and say where records of a slice begin and end; who knows all
of them (`center/ledger/sessionize.py`) tells the sessions.

    Window
    ├── SlicedWindow        what a query may ask
    │   ├── Sliding         Tumbling is one
    │   └── Session
    └── CountWindow         needs one order of all records: batch only
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from edgewater.errors import InvalidQuery
from edgewater.quantities import duration_ms, format_duration

T = TypeVar("T")

IntArray = npt.NDArray[np.int64]
Span = int | str
"""Event time: whole ms, or a duration such as ``"30s"``."""

ACCEPTED = (
    "{tumbling: 60s}, {sliding: 5m, every: 30s}, each with an optional offset, {session: 30s} with an optional max,"
    " or {count: 1000}"
)
MAX_SLICES_PER_WINDOW = 10_000
DEFAULT_SESSION_MAX_MS = 86_400_000
"""Longest session unless the window says so; less where that would be more than `MAX_SLICES_PER_WINDOW`."""
MAX_COUNT = 1 << 40


class Window:
    """A way to cut a stream into windows. Immutable; equal if it cuts alike."""

    __slots__ = ()

    @classmethod
    def from_mapping(cls, given: object) -> Window:
        """Raises InvalidQuery unless `given` is as `ACCEPTED` says."""
        if not isinstance(given, dict) or not given:
            raise InvalidQuery("window", given, ACCEPTED)
        kinds = [kind for kind in _KEYS if kind in given]
        if len(kinds) != 1:
            raise InvalidQuery("window", given, ACCEPTED, "exactly one kind of window")
        (kind,) = kinds
        for key in given:
            if key not in _KEYS[kind]:
                raise InvalidQuery(f"window.{key}", given[key], ACCEPTED, f"unknown key of a {kind} window")
        if kind == "count":
            return CountWindow(given["count"])
        spans = {key: _read(value, key) for key, value in given.items()}
        if kind == "session":
            return Session(spans["session"], spans.get("max"))
        if kind == "tumbling":
            return Tumbling(spans["tumbling"], spans.get("offset", 0))
        if "every" not in given:
            raise InvalidQuery("window.every", None, "a duration such as 30s", "a sliding window needs its step")
        return Sliding(spans["sliding"], spans["every"], spans.get("offset", 0))

    def to_mapping(self) -> dict[str, str | int]:
        """The canonical form that `from_mapping` reads back."""
        raise NotImplementedError


class SlicedWindow(Window):
    """Windows that are merges of slices ``[origin + k·slice, origin + (k + 1)·slice)``, k any integer."""

    __slots__ = ()

    @property
    def slice_ms(self) -> int:
        raise NotImplementedError

    @property
    def origin_ms(self) -> int:
        """A border of the slices' grid."""
        raise NotImplementedError

    @property
    def longest_ms(self) -> int:
        """No window is longer."""
        raise NotImplementedError

    @property
    def slices_per_window(self) -> int:
        """The most slices that one window is made of."""
        raise NotImplementedError

    def last_window_end(self, slice_start_ms: int) -> int:
        """The latest time at which a window that contains the slice may be closed: from then on the
        slice is of no more use but for late records."""
        raise NotImplementedError

    def slice_starts(self, times_ms: IntArray) -> IntArray:
        """The start of the slice of each event time. Shape and dtype as `times_ms` (int64)."""
        width, origin = self.slice_ms, self.origin_ms
        return (times_ms - origin) // width * width + origin

    def slice_start(self, time_ms: int) -> int:
        width, origin = self.slice_ms, self.origin_ms
        return (time_ms - origin) // width * width + origin


@dataclass(frozen=True, slots=True, init=False)
class Sliding(SlicedWindow):
    """All windows ``[offset + k·every, offset + k·every + size)``, k any integer.

    Tumbling is `every == size`. All fields are ms of event time.
    """

    size_ms: int
    every_ms: int
    offset_ms: int

    def __init__(self, size: Span, every: Span, offset: Span = 0) -> None:
        for name, value in (("size", size), ("every", every), ("offset", offset)):
            object.__setattr__(self, f"{name}_ms", _span(value, name))
        if self.size_ms <= 0 or self.every_ms <= 0:
            raise InvalidQuery("window", self, ACCEPTED, "size and step must be positive")
        if self.every_ms > self.size_ms:
            raise InvalidQuery(
                "window.every",
                format_duration(self.every_ms),
                f"at most the window's size, {format_duration(self.size_ms)}",
                "records between windows would belong to none",
            )
        if self.slices_per_window > MAX_SLICES_PER_WINDOW:
            raise InvalidQuery(
                "window.every",
                format_duration(self.every_ms),
                f"a step that cuts the window into at most {MAX_SLICES_PER_WINDOW} slices",
                f"this one makes {self.slices_per_window}",
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sliding):
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
    def longest_ms(self) -> int:
        return self.size_ms

    @property
    def slices_per_window(self) -> int:
        return self.size_ms // self.slice_ms

    def windows_of_slice(self, slice_start_ms: int) -> list[int]:
        """The starts, ascending, of all windows that contain the slice."""
        last = (slice_start_ms - self.offset_ms) // self.every_ms * self.every_ms + self.offset_ms
        count = (last + self.size_ms - slice_start_ms - 1) // self.every_ms + 1
        return [last - k * self.every_ms for k in range(count - 1, -1, -1)]

    def slices_of_window(self, window_start_ms: int) -> range:
        """The starts of a window's slices, ascending."""
        return range(window_start_ms, window_start_ms + self.size_ms, self.slice_ms)

    def end(self, window_start_ms: int) -> int:
        return window_start_ms + self.size_ms

    def last_window_end(self, slice_start_ms: int) -> int:
        return self.end(self.windows_of_slice(slice_start_ms)[-1])

    def to_mapping(self) -> dict[str, str | int]:
        result: dict[str, str | int]
        if self.is_tumbling:
            result = {"tumbling": format_duration(self.size_ms)}
        else:
            result = {"sliding": format_duration(self.size_ms), "every": format_duration(self.every_ms)}
        if self.offset_ms:
            result["offset"] = format_duration(self.offset_ms)
        return result


class Tumbling(Sliding):
    """Windows ``[offset + k·size, offset + (k + 1)·size)``: each record is in one."""

    __slots__ = ()

    def __init__(self, size: Span, offset: Span = 0) -> None:
        Sliding.__init__(self, size, size, offset)


@dataclass(frozen=True, slots=True, init=False)
class Session(SlicedWindow):
    """Runs of records in which each follows less than `gap_ms` after the one before.

    A session is ``[first record, last record + gap)``: a record exactly a gap after the last begins
    another. It never spans more slices than fit into `max_ms`: one that would go on is cut there, on
    a slice's border, and what follows is a session of its own.
    """

    gap_ms: int
    max_ms: int

    def __init__(self, gap: Span, longest: Span | None = None) -> None:
        gap_ms = _span(gap, "session")
        if gap_ms <= 0:
            raise InvalidQuery("window.session", gap, "a positive duration", "it is the gap between sessions")
        default = min(DEFAULT_SESSION_MAX_MS, MAX_SLICES_PER_WINDOW * gap_ms)
        max_ms = max(default, gap_ms) if longest is None else _span(longest, "max")
        if not gap_ms <= max_ms <= MAX_SLICES_PER_WINDOW * gap_ms:
            raise InvalidQuery(
                "window.max",
                longest,
                f"from the gap, {format_duration(gap_ms)}, to {MAX_SLICES_PER_WINDOW} gaps",
                "it bounds a session's length",
            )
        object.__setattr__(self, "gap_ms", gap_ms)
        object.__setattr__(self, "max_ms", max_ms)

    @property
    def origin_ms(self) -> int:
        return 0

    @property
    def slice_ms(self) -> int:
        return self.gap_ms

    @property
    def longest_ms(self) -> int:
        return self.max_ms + self.gap_ms

    @property
    def slices_per_window(self) -> int:
        return self.max_ms // self.gap_ms

    def closes_at(self, end_ms: int) -> int:
        """The end of the last slice of which a record may still lengthen a session that ends at `end_ms`:
        an edge has told all that belongs to the session when it has closed that slice."""
        return -(-end_ms // self.gap_ms) * self.gap_ms

    def cut_ms(self, first_ms: int) -> int:
        """Where a session whose first record is at `first_ms` is cut if it reaches its maximum length."""
        return self.slice_start(first_ms) + self.slices_per_window * self.gap_ms

    def last_window_end(self, slice_start_ms: int) -> int:
        return slice_start_ms + (self.slices_per_window + 1) * self.gap_ms

    def to_mapping(self) -> dict[str, str | int]:
        return {"session": format_duration(self.gap_ms), "max": format_duration(self.max_ms)}


@dataclass(frozen=True, slots=True)
class CountWindow(Window):
    """Every `count` records in the order of event time are a window."""

    count: int

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or not 1 <= self.count <= MAX_COUNT:
            raise InvalidQuery("window.count", self.count, f"a whole number of records from 1 to {MAX_COUNT}")

    def to_mapping(self) -> dict[str, str | int]:
        return {"count": self.count}


_KEYS = {
    "tumbling": ("tumbling", "offset"),
    "sliding": ("sliding", "every", "offset"),
    "session": ("session", "max"),
    "count": ("count",),
}


def _read(value: object, key: str) -> int:
    return duration_ms(value, f"window.{key}", InvalidQuery, minimum_ms=0 if key == "offset" else 1)


def _span(value: Span, name: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return duration_ms(value, f"window.{name}", InvalidQuery)


Extent = tuple[int, int]
"""Event times, ms, of the first and the last record of a slice."""


def sessions_of(slices: Iterable[T], window: Session, extent: Callable[[T], Extent]) -> Iterator[tuple[list[T], bool]]:
    """Groups slices into sessions.

    Args:
        slices: slices with records, ascending; each lies within one slice of the window's grid.
        extent: the extent of a slice.

    Yields:
        The slices of each session, ascending, and whether the session was cut at its maximum length, so that the
        next one continues it.
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
