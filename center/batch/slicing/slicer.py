"""General stream slicing: each record updates one slice, and windows are merges of slices.

Traub et al., "Efficient Window Aggregation with General Stream Slicing" (EDBT 2019), as Condor uses it for sliding and
session windows. The slicer takes records and watermarks and returns answers. It has no I/O.
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

    A record updates one slice by event time. All tumbling, sliding and session families share this slice. If there are
    count windows, the record also updates one slice by rank. Windows without records have no answer. A count window is
    answered when it is full.

    A record behind the watermark updates its slice. Answered windows that contain this slice get a new revision with
    the next `advance`. A window is final when the watermark has passed its end by `lateness_ms`. A count window is
    final when the watermark has passed its last record by `lateness_ms`. If all windows of a record are final, the
    record is dropped and counted. If a late record joins sessions, they become one session, and the answer to this
    session names the sessions that it replaces. A session that exceeds its family's maximum length is cut at the same
    times as at the center.

    For an order-based synopsis (a Haar wavelet), `lateness_ms` must be 0, because values can only be appended to its
    slices. Its windows are `SliceManager`s.

    Args:
        make: creates an empty synopsis, with equal parameters in every call. The `source` of a sample must be the
            source of the stream, because the slicer numbers the records. A `GroupedAggregate` takes record batches with
            a column per key and per measure. Any other class with `update` and `merge_many` takes the values without
            conversion.
        windows: families. `WindowResult.window_index` is the index in this sequence.
        lateness_ms: event time after its end during which a window may still change.
        sites: sites or partitions that are expected from the beginning (see `SiteWatermarks`).
        idle_after_ms: if a site's watermark is this far behind the most advanced watermark, the site does not hold the
            stream back.

    Raises:
        InvalidQuery: there are no windows, a window is of an unknown class, or an order-based synopsis has a lateness.
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
        grids: Grids = [(i, grid_of(f)) for i, f in enumerate(self.windows) if isinstance(f, SlidingWindow)]
        sessions = [(i, f) for i, f in enumerate(self.windows) if isinstance(f, SessionWindow)]
        counts: Grids = [
            (i, grid_of(f)) for i, f in enumerate(self.windows) if isinstance(f, CountWindow | SlidingCount)
        ]
        self._grids = grids
        time, count = self._stores(grids, sessions, counts)
        self._state = snapshots.SlicerState(SiteWatermarks(sites, idle_after_ms), time, count, 0, PendingRecords())

    def _stores(
        self, grids: Grids, sessions: list[tuple[int, SessionWindow]], counts: Grids
    ) -> tuple[list[TimeSlices], list[CountSlices]]:
        """Creates the stores of slices. In this class, all families of a kind share one store."""
        time = [TimeSlices(self._kernel, grids, sessions, self.lateness_ms)] if grids or sessions else []
        return time, [CountSlices(self._kernel, counts, self.lateness_ms)] if counts else []

    @property
    def watermark_ms(self) -> int:
        """The least of the live sites' watermarks. It never decreases."""
        return self._state.clocks.watermark

    @property
    def slices(self) -> int:
        """Number of slices in memory."""
        by_time, by_rank = self._state.time, self._state.count
        return sum(len(store.slices) for store in by_time) + sum(len(store.slices) for store in by_rank)

    @property
    def repaired(self) -> int:
        """Number of slices of count windows that were repaired, and not built again, when their borders moved."""
        return sum(store.repaired for store in self._state.count)

    def update(self, values: Any, times_ms: Any, site: str = "") -> LateCounts:
        """Adds a batch of records of one site, in any order.

        Args:
            values: values that the synopsis' `update` takes: a NumPy or Arrow array or a sequence. For a
                `GroupedAggregate`, a record batch, a table or a mapping of columns.
            times_ms: event times, one per value, int64 ms or Arrow/NumPy timestamps, without nulls.

        Raises:
            InvalidRecord: the times have the wrong type or number, or the synopsis does not accept the values; nothing
                is added.
        """
        rows = rows_of(values, times_ms, self._state.number)
        self._kernel.check(rows.values)
        self._state.clocks.heard(site)
        self._state.number += len(rows)
        rows = rows.in_order()
        watermark = self.watermark_ms
        late = int(np.searchsorted(rows.times, watermark))
        if self._kernel.in_order:
            self._state.waiting.add(rows.between(late, len(rows)))
            return LateCounts(len(rows), 0, (late,) * len(self.windows))
        dropped = self._add(rows, watermark)
        late -= min(dropped.get(i, 0) for i in range(len(self.windows)))
        return LateCounts(len(rows), late, tuple(dropped.get(i, 0) for i in range(len(self.windows))))

    def _add(self, rows: TimedRows, watermark: int) -> dict[int, int]:
        """Adds rows, and returns the number of dropped rows per family."""
        dropped = {}
        open_ends = watermark - self.lateness_ms
        for index, grid in self._grids:
            # The ends of windows ascend with the times, so the dropped rows are the first rows.
            early = rows.times[: int(np.searchsorted(rows.times, max(open_ends, -MAX_TIME_MS)))]
            dropped[index] = int(np.searchsorted(grid.last_ends(early), open_ends, side="right"))
        for store in self._state.time:
            dropped.update(store.add(rows, watermark))
        for number in self._state.count:
            least = number.add(rows, watermark)
            dropped.update({windows.index: least for windows in number.windows})
        return dropped

    def advance(self, site: str, watermark_ms: int) -> list[WindowResult]:
        """Advances a site's watermark. If the site later sends records with earlier event times, these records are
        late.

        Returns:
            The new answers, sorted by family and then by time.
        """
        return self._answer_due(self._state.clocks.advance(site, watermark_ms))

    def idle(self, site: str) -> list[WindowResult]:
        """Marks a site as idle. The site then does not hold the stream back until its next record or watermark.

        Returns:
            The new answers, sorted by family and then by time.
        """
        return self._answer_due(self._state.clocks.set_idle(site))

    def retire(self, site: str) -> list[WindowResult]:
        """Removes a site, and returns the new answers, sorted by family and then by time."""
        return self._answer_due(self._state.clocks.retire(site))

    def finish(self) -> list[WindowResult]:
        """Ends the stream, and answers every window that is complete."""
        self._state.clocks.watermark = MAX_TIME_MS + 1
        return self._answer_due(2 * MAX_TIME_MS)

    def snapshot(self) -> bytes:
        """Returns the whole state, with a checksum, for `restore`. The size is the size of all open slices."""
        return snapshots.to_bytes(self._state, self._identity())

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
        """Restores a slicer from a snapshot. The other arguments must equal the arguments of the original slicer.

        Raises:
            Conflict: the snapshot has other windows, another lateness or another kind of synopsis.
            StorageError: the bytes are corrupt or not a snapshot of a slicer.
        """
        result = cls(make, windows, lateness_ms, idle_after_ms=idle_after_ms)
        snapshots.restore_into(result._state, result._identity(), snapshot)
        return result

    def _identity(self) -> dict[str, Any]:
        return {
            "strategy": type(self).__name__,
            "windows": [family.to_mapping() for family in self.windows],
            "lateness_ms": self.lateness_ms,
            "synopsis": self._kernel.kind,
        }

    def _answer_due(self, watermark: int) -> list[WindowResult]:
        if self._kernel.in_order and (rows := self._state.waiting.take(watermark)) is not None:
            # The watermark of this call is the time of the first record, so that no record counts as late.
            self._add(rows, int(rows.times[0]))
        results: list[WindowResult] = []
        for store in self._state.time:
            results += store.close(watermark)
            store.purge(watermark)
        for number in self._state.count:
            number.settle(watermark)
            results += number.close()
            number.purge(watermark)
        return sorted(results, key=lambda r: (r.window_index, r.start))


class Bucketing(Slicer):
    """Computes the same answers as `Slicer`, but window by window. A record updates every window that contains it.

    Most systems compute windows in this way. For one tumbling family, it is the better choice. A sliding family is
    split into families without overlap, which share no slices.
    """

    def _stores(
        self, grids: Grids, sessions: list[tuple[int, SessionWindow]], counts: Grids
    ) -> tuple[list[TimeSlices], list[CountSlices]]:
        late = self.lateness_ms
        time = [TimeSlices(self._kernel, [(i, part)], [], late) for i, grid in grids for part in grid.buckets()]
        time += [TimeSlices(self._kernel, [], [session], late) for session in sessions]
        return time, [CountSlices(self._kernel, [(i, part)], late) for i, grid in counts for part in grid.buckets()]
