"""Windows, and the slices they are made of.

A slice is the smallest non-overlapping piece of event time that is aggregated and shipped; a
window is a merge of slices. With slices of gcd(size, every, offset differences) every window of a
query begins and ends on a slice's border, so a record is aggregated once whatever the overlap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgewater.errors import InvalidQuery
from edgewater.quantities import duration_ms, format_duration

IntArray = npt.NDArray[np.int64]

ACCEPTED = "{tumbling: 60s} or {sliding: 5m, every: 30s}, each with an optional offset"
MAX_SLICES_PER_WINDOW = 10_000


@dataclass(frozen=True, slots=True)
class Window:
    """A family of windows ``[offset + k·every, offset + k·every + size)``, k any integer.

    Tumbling is `every == size`. All fields are ms of event time.
    """

    size_ms: int
    every_ms: int
    offset_ms: int = 0

    def __post_init__(self) -> None:
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

    @classmethod
    def tumbling(cls, size_ms: int, offset_ms: int = 0) -> Window:
        return cls(size_ms, size_ms, offset_ms)

    @classmethod
    def sliding(cls, size_ms: int, every_ms: int, offset_ms: int = 0) -> Window:
        return cls(size_ms, every_ms, offset_ms)

    @property
    def is_tumbling(self) -> bool:
        return self.size_ms == self.every_ms

    @property
    def slice_ms(self) -> int:
        return math.gcd(self.size_ms, self.every_ms)

    @property
    def slices_per_window(self) -> int:
        return self.size_ms // self.slice_ms

    def slice_starts(self, times_ms: IntArray) -> IntArray:
        """The start of the slice of each event time. Shape and dtype as `times_ms` (int64)."""
        width = self.slice_ms
        return (times_ms - self.offset_ms) // width * width + self.offset_ms

    def slice_start(self, time_ms: int) -> int:
        width = self.slice_ms
        return (time_ms - self.offset_ms) // width * width + self.offset_ms

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
        """The end of the last window that contains the slice: from then on it is of no more use
        but for late records."""
        return self.end(self.windows_of_slice(slice_start_ms)[-1])

    @classmethod
    def from_mapping(cls, given: object) -> Window:
        """Raises InvalidQuery unless `given` is as `ACCEPTED` says."""
        if not isinstance(given, dict) or not given:
            raise InvalidQuery("window", given, ACCEPTED)
        kinds = [k for k in ("tumbling", "sliding", "session", "count") if k in given]
        if len(kinds) != 1:
            raise InvalidQuery("window", given, ACCEPTED, "exactly one kind of window")
        kind = kinds[0]
        if kind in ("session", "count"):
            raise InvalidQuery(f"window.{kind}", given[kind], ACCEPTED, "not available yet")
        allowed = {kind, "offset"} | ({"every"} if kind == "sliding" else set())
        for key in given:
            if key not in allowed:
                raise InvalidQuery(f"window.{key}", given[key], ACCEPTED, f"unknown key of a {kind} window")
        size = duration_ms(given[kind], f"window.{kind}", InvalidQuery, minimum_ms=1)
        offset = duration_ms(given["offset"], "window.offset", InvalidQuery) if "offset" in given else 0
        if kind == "tumbling":
            return cls.tumbling(size, offset)
        if "every" not in given:
            raise InvalidQuery("window.every", None, "a duration such as 30s", "a sliding window needs its step")
        every = duration_ms(given["every"], "window.every", InvalidQuery, minimum_ms=1)
        return cls.sliding(size, every, offset)

    def to_mapping(self) -> dict[str, str]:
        """The canonical form that `from_mapping` reads back."""
        if self.is_tumbling:
            result = {"tumbling": format_duration(self.size_ms)}
        else:
            result = {"sliding": format_duration(self.size_ms), "every": format_duration(self.every_ms)}
        if self.offset_ms:
            result["offset"] = format_duration(self.offset_ms)
        return result
