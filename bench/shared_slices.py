"""General stream slicing: each record updates one slice, and windows are merges of slices.

Traub et al., "Efficient Window Aggregation with General Stream Slicing" (EDBT 2019), as Condor uses it for concurrent
windows. The stream is in the order of event time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise, takewhile
from typing import Any, NamedTuple

import numpy as np

from edgewater.model.windows import SlidingWindow
from edgewater.synopses import IntArray

_STEP = 3
"""Slices per merge of `SlidingMerge`."""


class Slice(NamedTuple):
    """The synopsis of the records from `start` on, or of the slices from `start` on."""

    start: int
    state: Any


def merged(parts: Sequence[Slice]) -> Slice:
    """Merges parts. The new state shares no memory with the states of the parts."""
    return Slice(parts[0].start, parts[0].state.merge_many([part.state for part in parts[1:]]))


class SlidingMerge:
    """The merge of the slices in a window whose two ends only move forward.

    The algorithm has two stacks. New slices are added to the back, which has a running merge. When the front is empty,
    the back becomes the front, and merges of its suffixes are computed. Only every third merge is stored on both
    stacks. So a window is merged from the stored merges and up to two slices on either side: 1⅔ merges of 6½ states in
    all, however many slices it has. Slices are merged in their order.
    """

    def __init__(self) -> None:
        self._front: list[Slice] = []  # slices in descending order
        self._suffixes: list[Slice] = []  # merges of a slice and all later ones in the front, descending
        self._back: list[Slice] = []  # slices, ascending
        self._running: Slice | None = None  # merge of the back, without the slices in `_loose`
        self._loose: list[Slice] = []

    def slide(self, start: int, fresh: Sequence[Slice]) -> Slice | None:
        """Returns the merge of all slices from `start` on as a new state, or None if there are none.

        Args:
            fresh: the slices after the slices of the previous call, in order.
        """
        for held in (self._front, self._suffixes):
            while held and held[-1].start < start:
                held.pop()
        if not self._front:
            self._turn(start)
        self._back += fresh
        self._loose += fresh
        if len(self._loose) >= _STEP:
            running = [] if self._running is None else [self._running]
            self._running, self._loose = merged(running + self._loose), []
        parts = self._parts()
        return merged(parts) if parts else None

    def _parts(self) -> list[Slice]:
        """Returns the merges and slices that the window is merged from, in order."""
        covered = self._suffixes[-1:]
        parts = list(takewhile(lambda one: not covered or one.start < covered[0].start, reversed(self._front)))
        return parts + covered + ([] if self._running is None else [self._running]) + self._loose

    def _turn(self, start: int) -> None:
        left = [part for part in self._back if part.start >= start]
        self._front = left[::-1]
        for at in range(len(left) - _STEP, -1, -_STEP):
            self._suffixes.append(merged(left[at : at + _STEP] + self._suffixes[-1:]))
        self._back, self._running, self._loose = [], None, []


class Slicer:
    """The windows ``[offset + k·every, offset + k·every + size)`` of a stream, over slices that they share.

    Args:
        make: creates an empty synopsis, with equal parameters in every call.
    """

    def __init__(self, make: Callable[[], Any], window: SlidingWindow, offset_ms: int = 0) -> None:
        self._make, self._size, self._every, self._offset = make, window.size_ms, window.every_ms, offset_ms
        self._cell = math.gcd(self._size, self._every)
        self._fresh: list[Slice] = []  # slices that are in no window with an answer
        self._sliding = SlidingMerge()
        self._next: int | None = None  # start of the next window that gets an answer

    def update(self, values: Any, times_ms: IntArray) -> None:
        """Adds records in the order of event time, after the records of earlier calls."""
        cells = (times_ms - self._offset) // self._cell
        borders = [0, *(np.flatnonzero(np.diff(cells)) + 1).tolist(), len(cells)]
        for at, end in pairwise(borders):
            start = int(cells[at]) * self._cell + self._offset
            if self._next is None:
                last = (start - self._offset) // self._every * self._every + self._offset
                self._next = last - (self._size - 1 - (start - last)) // self._every * self._every
            if not self._fresh or self._fresh[-1].start < start:
                self._fresh.append(Slice(start, self._make()))
            self._fresh[-1].state.update(values[at:end])

    def advance(self, watermark_ms: int) -> list[Slice]:
        """Returns the answers of the windows that end at or before the watermark: their starts and synopses."""
        answers = []
        while self._next is not None and (end := self._next + self._size) <= watermark_ms:
            count = sum(1 for _ in takewhile(lambda one: one.start < end, self._fresh))
            whole = self._sliding.slide(self._next, self._fresh[:count])
            del self._fresh[:count]
            if whole is not None:
                answers.append(Slice(self._next, whole.state))
            self._next += self._every
        return answers

    def finish(self, last_ms: int) -> list[Slice]:
        """Returns the answers of all other windows with records. `last_ms`: the time of the last record."""
        return self.advance((last_ms - self._offset) // self._every * self._every + self._offset + self._size)


class Bucketing:
    """Gives the answers of `Slicer` window by window: a record updates every window that contains it."""

    def __init__(self, make: Callable[[], Any], window: SlidingWindow) -> None:
        apart = -(-window.size_ms // window.every_ms)
        bucket = SlidingWindow(window.size_ms, window.size_ms)
        self._buckets = [Slicer(make, bucket, k * window.every_ms) for k in range(apart)]

    def update(self, values: Any, times_ms: IntArray) -> None:
        for bucket in self._buckets:
            bucket.update(values, times_ms)

    def advance(self, watermark_ms: int) -> list[Slice]:
        return sorted((a for b in self._buckets for a in b.advance(watermark_ms)), key=lambda each: each.start)

    def finish(self, last_ms: int) -> list[Slice]:
        return sorted((a for b in self._buckets for a in b.finish(last_ms)), key=lambda each: each.start)
