"""Bucketing: each window has a synopsis of its own, and a record updates all windows it lies in."""

from __future__ import annotations

from center.slicing.counts import CountSlices
from center.slicing.slicer import Grids, Slicer
from center.slicing.time_slices import TimeSlices
from edgewater.windows import SessionWindow


class Bucketing(Slicer):
    """The same answers as `Slicer`, computed window by window.

    What most systems do, and the better way for tumbling windows of one family. A sliding family is taken
    apart into families without overlap; nothing is shared between any of them.
    """

    def _stores(
        self, grids: Grids, sessions: list[tuple[int, SessionWindow]], counts: Grids
    ) -> tuple[list[TimeSlices], list[CountSlices]]:
        late = self.lateness_ms
        time = [TimeSlices(self._kernel, [(i, part)], [], late) for i, grid in grids for part in grid.buckets()]
        time += [TimeSlices(self._kernel, [], [session], late) for session in sessions]
        return time, [CountSlices(self._kernel, [(i, part)], late) for i, grid in counts for part in grid.buckets()]
