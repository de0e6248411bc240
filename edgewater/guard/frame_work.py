"""The work that a frame makes at the center, in one measure for all that bound it.

Edges divide their frames by it, the gateway refuses what is more and delays an edge that sends too much of it, and the
job reads it in portions. A unit is at most 20 µs of the job's CPU (`bench/frame_work.py`): what one more window takes.
Measured with one core, reading, merging, deciding and storing: a close of a slice 45 µs, with its window, in session
windows 65; a partial of one measure 140, of 8 measures 250 to 600, of 32 sums 700; large partials 26 µs per KiB; a
further window over a slice 18.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from edgewater.model.windows import SlicedWindow, TimeWindow

if TYPE_CHECKING:  # a configuration names this module's constants, and a query loads all synopses
    from edgewater.model.query import QuerySpec

PER_CLOSE = 4
PER_PARTIAL, PER_MEASURE = 4, 4
BYTES_PER_UNIT = 512
"""Of the body before compression."""
STATEMENTS_PER_UNIT, FIELDS_PER_UNIT = 2, 64
"""How many statements (partials, closes, losses, counts of dropped records, sub-streams), and how many fields of any
kind, a gateway checks in a unit. A statement takes 3 to 7 µs, also a refused one of four bytes. For honest frames the
job's work is larger."""
MAX_FRAME_WORK = 40 << 10
"""The most work that a center accepts in a frame: 0.8 s. All queries wait while it is applied."""
FULL_FRAME_WORK = MAX_FRAME_WORK * 3 // 4
"""The work up to which an edge fills its frames; the last slice may exceed it."""

WORK_PER_S = 25_000
"""The work per second that a gateway accepts from one edge, by default: half of the job's capacity, so others keep
room. An edge that catches up after an outage can send 2,000 slices per second."""


@dataclass(slots=True)
class FrameWork:
    """The work of a frame as its parts are added.

    Attributes:
        window, measures: of the frame's query.
        units: the work so far.
    """

    window: SlicedWindow
    measures: int
    units: int = 0
    _windows_from_ms: int | None = field(default=None, init=False)

    @classmethod
    def of(cls, spec: QuerySpec) -> FrameWork:
        assert isinstance(spec.window, SlicedWindow), "edges answer no other queries"
        return cls(spec.window, len(spec.measures))

    def add_slice(self, start_ms: int, parts: int, most: float = inf) -> bool:
        """Adds a slice, later than those before: its parts' work, and the windows over it and over none of those.

        Returns:
            Whether it was added: not if the frame's work would be more than `most`.
        """
        units, windows_from_ms = parts, None
        if isinstance(self.window, TimeWindow) and not self.window.is_tumbling:
            windows = self.window.windows_over(start_ms)
            first = windows.start if self._windows_from_ms is None else max(windows.start, self._windows_from_ms)
            units, windows_from_ms = parts + len(range(first, windows.stop, windows.step)), windows.stop
        if self.units + units > most:
            return False
        self.units, self._windows_from_ms = self.units + units, windows_from_ms
        return True

    def of_partial(self, size: int) -> int:
        """The work of a partial of so many bytes."""
        return PER_PARTIAL + PER_MEASURE * self.measures + size // BYTES_PER_UNIT

    def of_close(self, withheld: int) -> int:
        """The work of a close with reports about so many measures."""
        return PER_CLOSE + withheld
