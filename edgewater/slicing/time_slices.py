"""Slices by event time, shared by all time windows and sessions of a stream.

A slice is the records of one cell of the grid (`Edges`) that belong together for sessions: a run in which
each follows the one before by less than the smallest gap. Under new records runs only ever grow and grow
together, so no slice is ever split, nothing but states is kept, and a late record costs one update (and a
merge where it joins two runs).

A session that is final must not grow any more, but its slices may still be open to other windows. So a slice
knows for which families of sessions it lives, and takes only records that live for the same ones.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from edgewater.slicing.families import Edges, Grid
from edgewater.slicing.kernels import Kernel
from edgewater.slicing.merging import GridWindows, Partial
from edgewater.slicing.results import WindowResult
from edgewater.slicing.rows import Rows
from edgewater.slicing.sessions import SessionWindows
from edgewater.synopses.base import IntArray


@dataclass(slots=True, eq=False)
class Slice:
    """Records of the cell [start, end) with event times from `first` to `last`.

    Attributes:
        live: bit f is set if the f-th family of sessions may still change in it.
    """

    start: int
    end: int
    first: int
    last: int
    live: int
    records: int
    state: Any

    def partial(self) -> Partial:
        return Partial(self.first, self.state, self.records, self.first, self.last)


def _first(one: Slice) -> int:
    return one.first


class TimeSlices:
    """The slices of one stream and the windows over them.

    Args:
        grids: (index of the family, grid) of windows with known borders.
        sessions: (index of the family, gap in ms).
    """

    def __init__(
        self, kernel: Kernel, grids: Sequence[tuple[int, Grid]], sessions: Sequence[tuple[int, int]], lateness_ms: int
    ) -> None:
        self.kernel, self._lateness = kernel, lateness_ms
        self._edges = Edges([grid for _, grid in grids])
        self.windows = [GridWindows(index, grid.size, grid.every, kernel) for index, grid in grids]
        self.sessions = [SessionWindows(index, gap) for index, gap in sessions]
        self._gap = min((gap for _, gap in sessions), default=0)
        self.slices: list[Slice] = []  # by event time of the first record

    def add(self, rows: Rows, watermark: int) -> dict[int, int]:
        """Adds rows in the order of event time.

        Returns:
            Per family of sessions how many of them come too late for it.
        """
        if not len(rows):
            return {}
        runs = self._runs(rows.times, self._gap) if self._gap else [0, len(rows)]
        live, dropped = self._judged(rows.times, runs[:-1], watermark - self._lateness)
        at = 0
        for stop, mask in zip(runs[1:], live, strict=True):
            while at < stop:
                start, end = self._edges.cell(int(rows.times[at]))
                inside = at + int(np.searchsorted(rows.times[at:stop], end))
                self._add_piece(rows.between(at, inside), start, end, mask, watermark)
                at = inside
        return dropped

    @staticmethod
    def _runs(times: IntArray, gap: int) -> list[int]:
        """Where runs without a pause of `gap` begin, and the end of the last."""
        return [0, *(np.flatnonzero(np.diff(times) >= gap) + 1).tolist(), len(times)]

    def _judged(self, times: IntArray, runs: list[int], open_ends: int) -> tuple[list[int], dict[int, int]]:
        """Per run for which families of sessions it lives; per family how many rows it drops."""
        live, dropped = np.zeros(len(times), np.int64), {}
        for bit, windows in enumerate(self.sessions):
            borders = self._runs(times, windows.gap)
            dropped[windows.index] = 0
            for a, b in pairwise(borders):
                if windows.takes(int(times[a]), int(times[b - 1]), open_ends):
                    live[a:b] |= 1 << bit
                else:
                    dropped[windows.index] += b - a
        return live[runs].tolist(), dropped

    def _add_piece(self, rows: Rows, start: int, end: int, live: int, watermark: int) -> None:
        """Adds rows of one cell and one run."""
        first, last = int(rows.times[0]), int(rows.times[-1])
        open_ends = watermark - self._lateness
        until = self._edges.needed_until(start)
        if not live and (until is None or until <= open_ends):
            return
        joined = self._joined(start, end, first, last, live)
        if len(joined) == 1 and joined[0].first <= first:
            held = joined[0]
            self.kernel.add(held.state, rows)
            held.last, held.records = max(held.last, last), held.records + len(rows)
        else:
            held = Slice(start, end, first, last, live, len(rows), self.kernel.built(rows))
            for one in joined:
                self.slices.remove(one)
                held.first, held.last = min(held.first, one.first), max(held.last, one.last)
                held.records += one.records
            if joined:
                held.state = self.kernel.merged([*(one.state for one in joined), held.state])
            insort(self.slices, held, key=_first)
        self._touch(held, first, last, open_ends, new=not joined)

    def _touch(self, held: Slice, first: int, last: int, open_ends: int, *, new: bool) -> None:
        for windows, grid in zip(self.windows, self._edges.grids, strict=True):
            starts = grid.starts_over(held.start)
            # Windows that are final stay as they are.
            final = max(-((starts.start + grid.size - open_ends - 1) // grid.every), 0) if len(starts) else 0
            windows.touch(starts[final:], held.first, new=new)
        for bit, sessions in enumerate(self.sessions):
            if held.live >> bit & 1:
                sessions.touch(first, last)

    def _joined(self, start: int, end: int, first: int, last: int, live: int) -> list[Slice]:
        """The slices of a cell that records from `first` to `last` belong to, by event time."""
        at = bisect_left(self.slices, min(end, last + self._gap) if live else end, key=_first)
        found = []
        while at and self.slices[at - 1].first >= start:
            at -= 1
            one = self.slices[at]
            if one.live == live:
                if live and one.last <= first - self._gap:
                    break  # those of the same families do not overlap: the rest are further away
                found.append(one)
        return found[::-1]

    def between(self, start: int, end: int) -> list[Partial]:
        """Slices whose first record is in [start, end)."""
        low, high = (bisect_left(self.slices, at, key=_first) for at in (start, end))
        return [one.partial() for one in self.slices[low:high]]

    def close(self, watermark: int) -> Iterator[WindowResult]:
        """The answers that a watermark allows and that are due."""
        for windows in self.windows:
            due = sorted(start for start in windows.pending if start + windows.size <= watermark)
            for start, revision, whole in windows.answer(due, self.between):
                end = start + windows.size
                yield WindowResult(
                    windows.index, start, end, revision, whole.state, whole.records, whole.first_ms, whole.last_ms
                )
        for bit, sessions in enumerate(self.sessions):
            yield from sessions.answer(watermark, partial(self._alive, bit), self.kernel)

    def _alive(self, bit: int, first: int, last: int) -> list[Slice]:
        low, high = bisect_left(self.slices, first, key=_first), bisect_left(self.slices, last + 1, key=_first)
        return [one for one in self.slices[low:high] if one.live >> bit & 1]

    def purge(self, watermark: int) -> None:
        """Forgets what is final."""
        open_ends = watermark - self._lateness
        for windows in self.windows:
            windows.forget([start for start in windows.answered if start + windows.size <= open_ends])
        for bit, sessions in enumerate(self.sessions):
            for first, last in sessions.forget(open_ends):
                for one in self._alive(bit, first, last):
                    one.live &= ~(1 << bit)
        gone = 0
        for one in self.slices:
            until = self._edges.needed_until(one.start)
            if one.live or (until is not None and until > open_ends):
                break
            gone += 1
        del self.slices[:gone]
