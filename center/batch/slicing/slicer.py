"""General stream slicing: each record updates one slice, windows are merges of slices.

Traub et al., "Efficient Window Aggregation with General Stream Slicing" (EDBT 2019), as Condor uses it for sliding and
session windows. Pure: takes records and watermarks, returns answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from center.batch.slicing import snapshots
from center.batch.slicing.counts import CountSlices
from center.batch.slicing.families import MAX_TIME_MS, SlidingCount, WindowFamily, WindowGrid, grid_of
from center.batch.slicing.kernels import kernel_of
from center.batch.slicing.results import LateCounts, WindowResult
from center.batch.slicing.rows import PendingRecords, TimedRows, rows_of
from center.batch.slicing.time_slices import TimeSlices
from center.batch.slicing.watermarks import SiteWatermarks
from edgewater.model.errors import InvalidQuery
from edgewater.model.windows import CountWindow, SessionWindow, SlidingWindow

Grids = list[tuple[int, WindowGrid]]


class Slicer:
    """The windows of one stream, for any number of families at once.

    A record updates one slice by event time, which all tumbling, sliding and session families share, and one by rank if
    there are count windows. Windows without records have no answer. A count window is answered when it is full.

    A record behind the watermark updates its slice, and answered windows over that slice get a new revision with the
    next `advance`. A window is final when the watermark has passed its end by `lateness_ms` (a count window: its last
    record); a record whose windows are all final is dropped and counted. Sessions that a late record joins become one,
    whose answer names those that it replaces. A session that exceeds its family's maximum length is cut where the
    center cuts it too.

    Order-based synopses (a Haar wavelet) take no lateness, since values can only be appended to their slices; their
    windows are `SliceManager`s.

    Args:
        make: creates an empty synopsis, always an equal one. A sample's `source` must be that of the stream: the slicer
            numbers the records. A `GroupedAggregate` takes record batches with a column per key and per measure; any
            other class with `update` and `merge_many` takes the values as given.
        windows: families; `WindowResult.window_index` is the index in this sequence.
        lateness_ms: how long after its end a window may still change.
        sites: sites or partitions that are expected from the beginning (see `SiteWatermarks`).
        idle_after_ms: a site whose watermark is this far behind the most advanced one does not hold the stream back.

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
            reason = "values can only be appended to an order-based synopsis, so late records cannot be inserted"
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
        """Creates the stores of slices: here one that all families of a kind share."""
        time = [TimeSlices(self._kernel, grids, sessions, self.lateness_ms)] if grids or sessions else []
        return time, [CountSlices(self._kernel, counts, self.lateness_ms)] if counts else []

    @property
    def watermark_ms(self) -> int:
        """The least of the live sites' watermarks; never decreases."""
        return self._clocks.watermark

    @property
    def slices(self) -> int:
        """Number of slices held."""
        return sum(len(store.slices) for store in self._time) + sum(len(store.slices) for store in self._count)

    def update(self, values: Any, times_ms: Any, site: str = "") -> LateCounts:
        """Adds a batch of records of one site, in any order.

        Args:
            values: what the synopsis' `update` takes: NumPy or Arrow array, sequence; for a `GroupedAggregate` a record
                batch, table or mapping of columns.
            times_ms: int64 (or Arrow/NumPy timestamps) event times, one per value, without nulls.

        Raises:
            InvalidRecord: wrong type or number of times, or values that the synopsis does not accept; nothing is added.
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

    def _add(self, rows: TimedRows, watermark: int) -> dict[int, int]:
        """Adds rows; returns the number of dropped ones per family."""
        dropped = {}
        open_ends = watermark - self.lateness_ms
        for index, grid in self._grids:
            # Window ends ascend with times: the dropped rows are in front.
            early = rows.times[: int(np.searchsorted(rows.times, max(open_ends, -MAX_TIME_MS)))]
            dropped[index] = int(np.searchsorted(grid.last_ends(early), open_ends, side="right"))
        for store in self._time:
            dropped.update(store.add(rows, watermark))
        for number in self._count:
            least = number.add(rows, watermark)
            dropped.update({windows.index: least for windows in number.windows})
        return dropped

    def advance(self, site: str, watermark_ms: int) -> list[WindowResult]:
        """Advances a site's watermark: its later records with earlier times are late.

        Returns:
            The answers that are due, by family, and by time within a family.
        """
        return self._answer_due(self._clocks.advance(site, watermark_ms))

    def idle(self, site: str) -> list[WindowResult]:
        """Marks a site as idle: it does not hold the stream back until its next record or watermark."""
        return self._answer_due(self._clocks.set_idle(site))

    def retire(self, site: str) -> list[WindowResult]:
        """Removes a site."""
        return self._answer_due(self._clocks.retire(site))

    def finish(self) -> list[WindowResult]:
        """Ends the stream: every window that is complete is answered."""
        self._clocks.watermark = MAX_TIME_MS + 1
        return self._answer_due(2 * MAX_TIME_MS)

    def snapshot(self) -> bytes:
        """The whole state, with a checksum, for `restore`. Its size is that of all open slices."""
        return snapshots.to_bytes(self)

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
        """Restores a slicer from a snapshot, given the same arguments as the original.

        Raises:
            Conflict: the snapshot has other windows, another lateness or another kind of synopsis.
            StorageError: corrupt or foreign bytes.
        """
        result = cls(make, windows, lateness_ms, idle_after_ms=idle_after_ms)
        snapshots.restore_into(result, snapshot)
        return result

    def _answer_due(self, watermark: int) -> list[WindowResult]:
        if self._kernel.in_order and (rows := self._waiting.take(watermark)) is not None:
            # Add them as of the watermark before: none of them is late.
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
    """The same answers as `Slicer`, computed window by window: a record updates every window that contains it.

    This is what most systems do, and the better choice for one tumbling family. A sliding family is split into families
    without overlap; they share nothing.
    """

    def _stores(
        self, grids: Grids, sessions: list[tuple[int, SessionWindow]], counts: Grids
    ) -> tuple[list[TimeSlices], list[CountSlices]]:
        late = self.lateness_ms
        time = [TimeSlices(self._kernel, [(i, part)], [], late) for i, grid in grids for part in grid.buckets()]
        time += [TimeSlices(self._kernel, [], [session], late) for session in sessions]
        return time, [CountSlices(self._kernel, [(i, part)], late) for i, grid in counts for part in grid.buckets()]
