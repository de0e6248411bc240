"""The work that a frame causes at the center, in one unit for all limits on it.

Edges divide their frames by this work. The gateway refuses frames above the limit, and delays an edge that sends too
much work. The job reads frames in portions by this work. A unit is at most 20 µs of the job's CPU, the cost of one more
window (`bench/frame_work.py`).

On one core, reading, merging, deciding and storing takes (measured):

- 45 µs for a close of a slice, with its window; 65 µs in session windows,
- 140 µs for a partial of one measure, 250 to 600 µs for 8 measures, 700 µs for 32 sums,
- 26 µs per KiB of large partials,
- 18 µs for a further window over a slice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from edgewater.model.windows import SlicedWindow, TimeWindow

if TYPE_CHECKING:  # a configuration names this module's constants, and a query loads all synopses
    from edgewater.model.query import QuerySpec

PER_CLOSE = 4  # measured: bench.frame_work
PER_PARTIAL, PER_MEASURE = 4, 4  # measured: bench.frame_work
BYTES_PER_UNIT = 512  # measured: bench.frame_work
"""The bytes of the body, before compression, that cost one unit."""
STATEMENTS_PER_UNIT, FIELDS_PER_UNIT = 2, 64  # measured: bench.frame_work
"""The numbers of statements and of fields that a gateway checks in a unit of work. A statement is a partial, a close, a
loss, a count of dropped records, or a sub-stream. A statement takes 3 to 7 µs, even if it has four bytes and is
refused. Honest frames cause more work at the job.
"""
MAX_FRAME_WORK = 40 << 10
"""The largest work of a frame that a center accepts (0.8 s). All queries wait while it is applied."""
FULL_FRAME_WORK = MAX_FRAME_WORK * 3 // 4
"""The work up to which an edge fills its frames. The last slice may exceed it."""

WORK_PER_S = 25_000  # default: gateway.work_per_s
"""The work per second that a gateway accepts from one edge, by default. It is half of the job's capacity, so that other
edges have room. After an outage, an edge can send 2,000 slices per second.
"""


@dataclass(slots=True)
class FrameWork:
    """The work of a frame while its parts are added.

    Attributes:
        window, measures: the window, and the number of measures, of the frame's query.
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
        """Adds a slice that is later than all earlier slices. Counts the work of its parts and of windows not counted
        yet.

        Args:
            start_ms: start of the slice.
            parts: the work of the slice's parts.
            most: the largest work of the frame.

        Returns:
            Whether the slice was added. It is not added if the frame's work would exceed `most`.
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
        """Returns the work of a partial.

        Args:
            size: bytes of the partial.
        """
        return PER_PARTIAL + PER_MEASURE * self.measures + size // BYTES_PER_UNIT

    def of_close(self, withheld: int) -> int:
        """Returns the work of a close.

        Args:
            withheld: number of measures whose withheld values the close reports.
        """
        return PER_CLOSE + withheld
