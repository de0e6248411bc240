"""Slices by event time, which all time windows and sessions of a stream share.

A slice has the records of one cell of the grid (`SliceEdges`). Cells are not wider than the smallest session gap, so
the records of a cell belong to one session. A late record may move the cuts of sessions. All multiples of the gap are
edges, so every possible cut is an edge. Slices are never split. Only their states are stored, and a late record costs
one update.

A final session must not grow, but its slices may still change for other windows. So each slice has the set of session
families for which it is live. It takes only records that are live for the same families.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from center.batch.slicing.families import SliceEdges, WindowGrid
from center.batch.slicing.kernels import Kernel
from center.batch.slicing.merging import GridWindows, MergedSlices
from center.batch.slicing.results import WindowResult
from center.batch.slicing.rows import TimedRows
from center.batch.slicing.sessions import SessionTracker
from edgewater.model.windows import SessionWindow
from edgewater.synopses import IntArray


@dataclass(slots=True, eq=False)
class TimeSlice:
    """The records of the cell [start, end) with event times from `first` to `last`.

    Attributes:
        live: a bit set. Bit f is set if the session of the f-th family may still change.
    """

    start: int
    end: int
    first: int
    last: int
    live: int
    records: int
    state: Any

    def partial(self) -> MergedSlices:
        return MergedSlices(self.first, self.state, self.records, self.first, self.last)


def _first(item: TimeSlice) -> int:
    return item.first


class TimeSlices:
    """The slices of one stream and the windows over them.

    Args:
        grids: pairs of the index of a family and its grid, for windows with fixed borders.
        sessions: pairs of the index of a family and the family.
    """

    def __init__(
        self,
        kernel: Kernel,
        grids: Sequence[tuple[int, WindowGrid]],
        sessions: Sequence[tuple[int, SessionWindow]],
        lateness_ms: int,
    ) -> None:
        self.kernel, self._lateness = kernel, lateness_ms
        self._edges = SliceEdges([grid for _, grid in grids], [family.gap_ms for _, family in sessions])
        self.windows = [GridWindows(index, grid.size, grid.every, kernel) for index, grid in grids]
        self.sessions = [SessionTracker(index, family) for index, family in sessions]
        self._gap = min((family.gap_ms for _, family in sessions), default=0)
        self.slices: list[TimeSlice] = []  # by event time of the first record

    def add(self, rows: TimedRows, watermark: int) -> dict[int, int]:
        """Adds rows in event-time order.

        Returns:
            Per session family, the number of rows that are too late.
        """
        if not len(rows):
            return {}
        runs = self._session_groups(rows.times)
        live, dropped = self._live_families(rows.times, runs[:-1], watermark - self._lateness)
        at = 0
        for stop, mask in zip(runs[1:], live, strict=True):
            while at < stop:
                start, end = self._edges.cell(int(rows.times[at]))
                inside = at + int(np.searchsorted(rows.times[at:stop], end))
                self._add_piece(rows.between(at, inside), start, end, mask, watermark)
                at = inside
        return dropped

    def _session_groups(self, times: IntArray) -> list[int]:
        """Returns the starts of groups of rows, and the end of the last group.

        The rows of a group are in the same session of each family, or in no session of the family.
        """
        if not self._gap:
            return [0, len(times)]
        sealed = np.searchsorted(times, [windows.sealed for windows in self.sessions])
        return sorted({*self._runs(times, self._gap), *sealed.tolist()})

    @staticmethod
    def _runs(times: IntArray, gap: int) -> list[int]:
        """Returns the starts of the runs without a pause of `gap`, and the end of the last run."""
        return [0, *(np.flatnonzero(np.diff(times) >= gap) + 1).tolist(), len(times)]

    def _live_families(self, times: IntArray, runs: list[int], open_ends: int) -> tuple[list[int], dict[int, int]]:
        """Returns, per run, the bit set of the session families that accept the run; and per family, the number of
        dropped rows.
        """
        live, dropped = np.zeros(len(times), np.int64), {}
        for bit, windows in enumerate(self.sessions):
            sealed = dropped[windows.index] = int(np.searchsorted(times, windows.sealed))
            borders = self._runs(times[sealed:], windows.gap) if sealed < len(times) else []
            for a, b in pairwise(sealed + at for at in borders):
                if windows.takes(int(times[a]), int(times[b - 1]), open_ends):
                    live[a:b] |= 1 << bit
                else:
                    dropped[windows.index] += b - a
        return live[runs].tolist(), dropped

    def _add_piece(self, rows: TimedRows, start: int, end: int, live: int, watermark: int) -> None:
        """Adds rows of one cell that are live for the same families."""
        first, last = int(rows.times[0]), int(rows.times[-1])
        open_ends = watermark - self._lateness
        until = self._edges.needed_until(start)
        if not live and (until is None or until <= open_ends):
            return
        at = self._place(start, end, live)
        if at is None:
            held = TimeSlice(start, end, first, last, live, len(rows), self.kernel.built(rows))
            insort(self.slices, held, key=_first)
        else:
            held = self.slices[at]
            self.kernel.add(held.state, rows)
            held.last, held.records = max(held.last, last), held.records + len(rows)
            if first < held.first:
                del self.slices[at]
                held.first = first
                insort(self.slices, held, key=_first)
        self._touch(held, first, last, open_ends, new=at is None)

    def _touch(self, held: TimeSlice, first: int, last: int, open_ends: int, *, new: bool) -> None:
        for windows, grid in zip(self.windows, self._edges.grids, strict=True):
            starts = grid.starts_over(held.start)
            # Final windows do not change.
            final = max(-((starts.start + grid.size - open_ends - 1) // grid.every), 0) if len(starts) else 0
            windows.touch(starts[final:], held.first, new=new)
        for bit, sessions in enumerate(self.sessions):
            if held.live >> bit & 1:
                sessions.touch(first, last)

    def _place(self, start: int, end: int, live: int) -> int | None:
        """Returns the index of the cell's slice that is live for these families, or None if there is no such slice."""
        at = bisect_left(self.slices, end, key=_first)
        while at and self.slices[at - 1].first >= start:
            at -= 1
            if self.slices[at].live == live:
                return at
        return None

    def between(self, start: int, end: int) -> list[MergedSlices]:
        """Returns the slices whose first record is in [start, end)."""
        low, high = (bisect_left(self.slices, at, key=_first) for at in (start, end))
        return [item.partial() for item in self.slices[low:high]]

    def close(self, watermark: int) -> Iterator[WindowResult]:
        """Answers the pending windows that end before the watermark."""
        for windows in self.windows:
            due = sorted(start for start in windows.pending if start + windows.size <= watermark)
            for start, revision, whole in windows.answer(due, self.between):
                end = start + windows.size
                yield WindowResult(
                    windows.index, start, end, revision, whole.state, whole.records, whole.first_ms, whole.last_ms
                )
        for bit, sessions in enumerate(self.sessions):
            yield from sessions.answer(watermark, partial(self._alive, bit), self.kernel)

    def _alive(self, bit: int, first: int, last: int) -> list[TimeSlice]:
        low, high = bisect_left(self.slices, first, key=_first), bisect_left(self.slices, last + 1, key=_first)
        return [item for item in self.slices[low:high] if item.live >> bit & 1]

    def purge(self, watermark: int) -> None:
        """Drops final windows, sessions and slices."""
        open_ends = watermark - self._lateness
        for windows in self.windows:
            windows.forget([start for start in windows.answered if start + windows.size <= open_ends])
        for bit, sessions in enumerate(self.sessions):
            alive = partial(self._alive, bit)
            for first, last in sessions.forget(open_ends, alive):
                for item in alive(first, last):
                    item.live &= ~(1 << bit)
        gone = 0
        for item in self.slices:
            until = self._edges.needed_until(item.start)
            if item.live or (until is not None and until > open_ends):
                break
            gone += 1
        del self.slices[:gone]
