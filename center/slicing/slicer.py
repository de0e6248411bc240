"""General stream slicing: each record updates one slice, windows are merges of slices.

Traub et al., "Efficient Window Aggregation with General Stream Slicing" (EDBT 2019), as Condor uses it for
sliding and session windows. Pure: what comes in is records and watermarks, what goes out is answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from center.slicing import snapshots
from center.slicing.counts import CountSlices
from center.slicing.families import MAX_TIME_MS, SlidingCount, WindowFamily, WindowGrid, grid_of
from center.slicing.kernels import kernel_of
from center.slicing.results import LateCounts, WindowResult
from center.slicing.rows import PendingRecords, Records, rows_of
from center.slicing.time_slices import TimeSlices
from center.slicing.watermarks import SiteWatermarks
from edgewater.errors import InvalidQuery
from edgewater.windows import CountWindow, SessionWindow, SlidingWindow

Grids = list[tuple[int, WindowGrid]]


class Slicer:
    """The windows of one stream, any number of families at once.

    A record updates one slice by event time, which all tumbling, sliding and session families share, and one
    by rank if there are count windows. Windows without records have no answer. A count window is answered
    when it is full; what never fills one is in no answer.

    A record behind the watermark goes to its slice, and windows over it that were answered get a new revision
    with the next `advance`; only those. A window is final when the watermark has passed its end by
    `lateness_ms` (a count window: its last record), and a record of which all windows are final is dropped and
    counted. Sessions which a late record joins become one, whose answer says which it replaces. What would be longer
    than a family's greatest length is cut, where the center cuts it too.

    What a synopsis' algebra forbids is refused here: order-based ones (a Haar wavelet) take no lateness, since
    their slices only grow behind; their windows are `SliceManager`s.

    Args:
        make: builds an empty synopsis; all that it builds are equal. A sample's `source` must be that of the
            stream: records are numbered by the slicer. A `GroupedAggregate` takes record batches with a column
            per key and per measure; anything else with `update` and `merge_many` takes what it is given.
        windows: families; `WindowResult.window_index` is the place in this sequence.
        lateness_ms: how long after its end a window may still change.
        sites: sites or partitions that are expected from the beginning (see `SiteWatermarks`).
        idle_after_ms: a site whose watermark is this far behind the most advanced one no longer holds it back.

    Raises:
        InvalidQuery: no windows, unknown ones, or lateness for an order-based synopsis.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        windows: Sequence[WindowFamily],
        lateness_ms: int = 0,
        *,
        sites: Sequence[str] = (),
        idle_after_ms: int | None = None,
    ) -> None:
        self.windows = tuple(windows)
        self.lateness_ms = lateness_ms
        self._kernel = kernel_of(make)
        for family in self.windows:
            if not isinstance(family, SlidingWindow | SessionWindow | CountWindow | SlidingCount):
                raise InvalidQuery(
                    "windows", family, "TumblingWindow, SlidingWindow, SessionWindow, CountWindow or SlidingCount"
                )
        if not self.windows:
            raise InvalidQuery("windows", windows, "at least one family of windows")
        if isinstance(lateness_ms, bool) or not isinstance(lateness_ms, int) or not 0 <= lateness_ms < MAX_TIME_MS:
            raise InvalidQuery("lateness_ms", lateness_ms, "a whole number of ms, 0 or more")
        if lateness_ms and self._kernel.in_order:
            reason = "an order-based synopsis only grows behind, so records behind the watermark cannot be put in"
            raise InvalidQuery("lateness_ms", lateness_ms, "0", reason)
        self._clocks = SiteWatermarks(sites, idle_after_ms)
        self._waiting = PendingRecords()  # of order-based synopses
        self._number = 0
        grids: Grids = [(i, grid_of(f)) for i, f in enumerate(self.windows) if isinstance(f, SlidingWindow)]
        sessions = [(i, f) for i, f in enumerate(self.windows) if isinstance(f, SessionWindow)]
        counts: Grids = [
            (i, grid_of(f)) for i, f in enumerate(self.windows) if isinstance(f, CountWindow | SlidingCount)
        ]
        self._grids = grids
        self._time, self._count = self._stores(grids, sessions, counts)

    def _stores(
        self, grids: Grids, sessions: list[tuple[int, SessionWindow]], counts: Grids
    ) -> tuple[list[TimeSlices], list[CountSlices]]:
        """The slices that records are put in: here one store for all that share them."""
        time = [TimeSlices(self._kernel, grids, sessions, self.lateness_ms)] if grids or sessions else []
        return time, [CountSlices(self._kernel, counts, self.lateness_ms)] if counts else []

    @property
    def watermark_ms(self) -> int:
        """The least of the live sites' watermarks; it never goes back."""
        return self._clocks.watermark

    @property
    def slices(self) -> int:
        """Slices held now."""
        return sum(len(store.slices) for store in self._time) + sum(len(store.slices) for store in self._count)

    def update(self, values: Any, times_ms: Any, site: str = "") -> LateCounts:
        """Adds a batch of records of one site, in any order.

        Args:
            values: what the synopsis' `update` takes: NumPy or Arrow array, sequence; record batch, table or
                mapping of columns for a `GroupedAggregate`.
            times_ms: int64 (or Arrow/NumPy timestamps) event times, one per value, without nulls.

        Raises:
            InvalidRecord: times of another form or number, or values that the synopsis does not take; nothing is
                added then.
        """
        rows = rows_of(values, times_ms, self._number)
        self._kernel.check(rows.values)
        self._clocks.heard(site)
        self._number += len(rows)
        rows = rows.in_order()
        watermark = self.watermark_ms
        late = int(np.searchsorted(rows.times, watermark))
        if self._kernel.in_order:
            self._waiting.add(rows.between(late, len(rows)))
            return LateCounts(len(rows), 0, (late,) * len(self.windows))
        dropped = self._add(rows, watermark)
        late -= min(dropped.get(i, 0) for i in range(len(self.windows)))
        return LateCounts(len(rows), late, tuple(dropped.get(i, 0) for i in range(len(self.windows))))

    def _add(self, rows: Records, watermark: int) -> dict[int, int]:
        """Returns per family how many are dropped."""
        dropped = {}
        open_ends = watermark - self.lateness_ms
        for index, grid in self._grids:
            # Ends grow with times: those dropped are in front.
            early = rows.times[: int(np.searchsorted(rows.times, max(open_ends, -MAX_TIME_MS)))]
            dropped[index] = int(np.searchsorted(grid.last_ends(early), open_ends, side="right"))
        for store in self._time:
            dropped.update(store.add(rows, watermark))
        for number in self._count:
            least = number.add(rows, watermark)
            dropped.update({windows.index: least for windows in number.windows})
        return dropped

    def advance(self, site: str, watermark_ms: int) -> list[WindowResult]:
        """A site promises that nothing earlier than `watermark_ms` comes from it any more (what does, is late).

        Returns:
            The answers that are due by that, by family and by time within a family.
        """
        return self._moved(self._clocks.advance(site, watermark_ms))

    def idle(self, site: str) -> list[WindowResult]:
        """A site holds nothing back until it is heard of again."""
        return self._moved(self._clocks.set_idle(site))

    def retire(self, site: str) -> list[WindowResult]:
        """A site is gone."""
        return self._moved(self._clocks.retire(site))

    def finish(self) -> list[WindowResult]:
        """The end of the stream: every window that has all its records is answered."""
        self._clocks.watermark = MAX_TIME_MS + 1
        return self._moved(2 * MAX_TIME_MS)

    def snapshot(self) -> bytes:
        """All that it holds, for `restore`; checked against damage. Costs the bytes of all open slices."""
        return snapshots.taken(self)

    @classmethod
    def restore(
        cls,
        make: Callable[[], Any],
        windows: Sequence[WindowFamily],
        snapshot: bytes,
        lateness_ms: int = 0,
        *,
        idle_after_ms: int | None = None,
    ) -> Self:
        """A slicer that goes on where the one of the snapshot was; to be given what that one was given.

        Raises:
            Conflict: the snapshot is of other windows, another lateness or another kind of synopsis.
            StorageError: damaged or foreign bytes.
        """
        result = cls(make, windows, lateness_ms, idle_after_ms=idle_after_ms)
        snapshots.put_back(result, snapshot)
        return result

    def _moved(self, watermark: int) -> list[WindowResult]:
        if self._kernel.in_order and (rows := self._waiting.take(watermark)) is not None:
            # As of before they were passed: nothing of them is late.
            self._add(rows, int(rows.times[0]))
        results: list[WindowResult] = []
        for store in self._time:
            results += store.close(watermark)
            store.purge(watermark)
        for number in self._count:
            number.settle(watermark)
            results += number.close()
            number.purge(watermark)
        return sorted(results, key=lambda r: (r.window_index, r.start))


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
