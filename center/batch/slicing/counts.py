"""Count windows. Their slices are ranges of ranks, and a late record moves the borders of these slices.

Ranks follow the order of (event time, arrival). A record gets its rank when the watermark has passed the record. A late
record is inserted in order. The last record of every later slice then moves into the next slice. If the synopsis can
remove values, a slice is repaired by removing and adding values. If not, the slice is built again from its records.
Records stay in memory until all windows over them are final.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from center.batch.slicing.families import SliceEdges, WindowGrid
from center.batch.slicing.kernels import Kernel
from center.batch.slicing.merging import GridWindows, MergedSlices
from center.batch.slicing.results import WindowResult
from center.batch.slicing.rows import PendingRecords, TimedRows, concatenated
from center.batch.slicing.watermarks import NO_WATERMARK


@dataclass(slots=True, eq=False)
class CountSlice:
    """The records of ranks [start, start + len(rows)).

    Attributes:
        end: bound of the ranks. The slice has no rank from `end` on.
        state: the synopsis of the records; None if no window needs the slice.
    """

    start: int
    end: int
    rows: TimedRows
    state: Any

    def partial(self) -> MergedSlices:
        times = self.rows.times
        return MergedSlices(self.start, self.state, len(self.rows), int(times[0]), int(times[-1]))


class CountSlices:
    """The slices by rank of one stream, and the count windows over them.

    Args:
        grids: pairs of the index of a family and its grid of ranks.
    """

    def __init__(self, kernel: Kernel, grids: Sequence[tuple[int, WindowGrid]], lateness_ms: int) -> None:
        self.kernel, self._lateness = kernel, lateness_ms
        self._edges = SliceEdges([grid for _, grid in grids])
        self.windows = [GridWindows(index, grid.size, grid.every, kernel) for index, grid in grids]
        self.waiting = PendingRecords()
        self.slices: list[CountSlice] = []
        self.settled = 0  # records that have a rank
        self.repaired = 0  # slices that were repaired, and not built again, when their borders moved

    def add(self, rows: TimedRows, watermark: int) -> int:
        """Adds rows, in any order. Rows get ranks when the watermark has passed them.

        Returns:
            The number of rows that are too late. All windows that such a row would change are final.
        """
        late = rows.times < watermark - self._lateness
        if not late.any():
            self.waiting.add(rows)
            return 0
        self.waiting.add(rows.at(~late))
        return int(late.sum())

    def settle(self, watermark: int) -> None:
        """Assigns ranks to the records that the watermark has passed."""
        rows = self.waiting.take(watermark)
        if rows is None:
            return
        last = int(self.slices[-1].rows.times[-1]) if self.slices else NO_WATERMARK
        late = int(np.searchsorted(rows.times, last))
        if late:
            self._insert(rows.between(0, late))
        self._append(rows.between(late, len(rows)))

    def _append(self, rows: TimedRows) -> None:
        at = 0
        while at < len(rows):
            start, end = self._edges.cell(self.settled)
            piece = rows.between(at, min(at + end - self.settled, len(rows)))
            if self.slices and self.slices[-1].start <= self.settled < self.slices[-1].end:
                held = self.slices[-1]
                held.rows = concatenated([held.rows, piece])
                if held.state is not None:
                    self.kernel.add(held.state, piece)
                self._touch(held.start, new=False)
            else:
                self._open(max(start, self.settled), end, piece)
            at += len(piece)
            self.settled += len(piece)

    def _open(self, start: int, end: int, rows: TimedRows) -> None:
        covered = self._edges.needed_until(start) is not None
        self.slices.append(CountSlice(start, end, rows, self.kernel.built(rows) if covered else None))
        self._touch(start, new=True)

    def _touch(self, start: int, *, new: bool) -> None:
        for windows, grid in zip(self.windows, self._edges.grids, strict=True):
            starts = [at for at in grid.starts_over(start) if at >= 0]
            if starts:
                windows.touch(range(starts[0], starts[-1] + 1, grid.every), start, new=new)

    def _insert(self, late: TimedRows) -> None:
        """Inserts late rows between the rows that have ranks, and moves the borders of all later slices."""
        firsts = np.array([item.rows.times[0] for item in self.slices])
        from_slice = max(int(np.searchsorted(firsts, late.times[0], side="right")) - 1, 0)
        moved = self.slices[from_slice:]
        del self.slices[from_slice:]
        origin = np.repeat(np.arange(len(moved)), [len(item.rows) for item in moved])
        origin = np.append(origin, np.full(len(late), -1))
        rows = concatenated([*(item.rows for item in moved), late])
        order = np.lexsort((rows.numbers, rows.times))
        rows, origin = rows.at(order), origin[order]
        starts = np.array([item.start for item in moved])
        ranks = int(starts[0]) + np.arange(len(rows))
        now = np.searchsorted(starts, ranks, side="right") - 1
        now[ranks >= moved[-1].end] = len(moved)
        self.settled = int(starts[0])
        for number, item in enumerate(moved):
            mine = rows.at(now == number)
            added = rows.at((now == number) & (origin != number))
            removed = rows.at((origin == number) & (now != number))
            changed = len(added) or len(removed)
            if changed:
                item.state = self._repaired(item, mine, added, removed)
            item.rows = mine
            self.slices.append(item)
            self.settled += len(mine)
            if changed:
                self._touch(item.start, new=True)
        self._append(rows.at(now == len(moved)))

    def _repaired(self, item: CountSlice, rows: TimedRows, added: TimedRows, removed: TimedRows) -> Any:
        if item.state is None:
            return None
        if not len(removed) or (self.kernel.invertible and len(added) + len(removed) < len(rows)):
            if len(removed):
                self.kernel.remove(item.state, removed)
            self.kernel.add(item.state, added)
            self.repaired += 1
            return item.state
        return self.kernel.built(rows)

    def between(self, start: int, end: int) -> list[MergedSlices]:
        """Returns the slices that start at ranks in [start, end)."""
        starts = np.array([item.start for item in self.slices], np.int64)
        low, high = np.searchsorted(starts, [start, end])
        return [item.partial() for item in self.slices[low:high]]

    def close(self) -> Iterator[WindowResult]:
        """Answers the windows that are full and need an answer."""
        for windows in self.windows:
            due = sorted(start for start in windows.pending if start + windows.size <= self.settled)
            for start, revision, whole in windows.answer(due, self.between):
                yield WindowResult(
                    windows.index,
                    start,
                    start + windows.size,
                    revision,
                    whole.state,
                    whole.records,
                    whole.first_ms,
                    whole.last_ms,
                )

    def purge(self, watermark: int) -> None:
        """Drops final windows and slices. Records with event times before the watermark by more than the lateness
        cannot arrive.
        """
        fixed = 0
        for item in self.slices:
            fixed = item.start + int(np.searchsorted(item.rows.times, watermark - self._lateness))
            if fixed < item.start + len(item.rows):
                break
        for windows in self.windows:
            windows.forget([start for start in windows.answered if start + windows.size <= fixed])
        removed = 0
        # The last slice is kept: the next record belongs to it or follows it.
        for item in self.slices[:-1]:
            if max(self._edges.needed_until(item.start) or 0, item.start + len(item.rows)) > fixed:
                break
            removed += 1
        del self.slices[:removed]
