"""Merges slices into windows, in amortised O(1) merges per window of a sliding family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from center.batch.slicing.kernels import Kernel

_STEP = 3
"""Slices per merge of `SlidingMerge`."""


@dataclass(frozen=True, slots=True)
class MergedSlices:
    """The merged state of consecutive slices.

    Attributes:
        key: start of the first slice, in event time or ranks.
        records, first_ms, last_ms: the same as in `WindowResult`.
    """

    key: int
    state: Any
    records: int
    first_ms: int
    last_ms: int


def merged(kernel: Kernel, parts: Sequence[MergedSlices]) -> MergedSlices:
    """Merges parts. The new state shares no memory with the states of the parts."""
    if kernel.in_order:
        state: Any = kernel.managed([(p.key, p.state) for p in parts])
    else:
        state = kernel.merged([p.state for p in parts])
    return MergedSlices(
        parts[0].key,
        state,
        sum(p.records for p in parts),
        min(p.first_ms for p in parts),
        max(p.last_ms for p in parts),
    )


class SlidingMerge:
    """The merge of the slices in a window whose two ends only move forward.

    The algorithm has two stacks. New slices are added to the back, which has a running merge. When the front is empty,
    the back becomes the front, and merges of its suffixes are computed. Only every third merge is stored on both
    stacks. So a window is merged from the stored merges and up to two slices on either side.

    A window costs 1⅔ merges of 6½ states in all, however many slices it has. If every merge were stored, a window would
    cost three merges of two states each. These read hardly fewer states. Except for the largest synopses, the number of
    merges determines the time. (Subtracting old slices would need invertible synopses. A tree needs O(log n) merges per
    window.)

    Slices are merged in their order.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.clear()

    def clear(self) -> None:
        """Drops all stored merges. Called when a slice has changed, or when a slice was inserted between
        merged slices.
        """
        self._front: list[MergedSlices] = []  # slices in descending order
        self._suffixes: list[MergedSlices] = []  # merges of a slice and all later ones in the front, descending
        self._back: list[MergedSlices] = []  # slices, ascending
        self._running: MergedSlices | None = None  # merge of the back, without the slices in `_loose`
        self._loose: list[MergedSlices] = []
        self.end: int | None = None

    def slide(self, start: int, end: int, between: Callable[[int, int], Sequence[MergedSlices]]) -> MergedSlices | None:
        """Returns the merge of all slices with keys in [start, end) as a new state, or None if there are no such
        slices.

        Args:
            start, end: not less than in the previous call.
            between: returns the slices with keys in a range, in order.
        """
        known = start if self.end is None else max(self.end, start)
        self.end = end
        for held in (self._front, self._suffixes):
            while held and held[-1].key < start:
                held.pop()
        if not self._front:
            self._turn(start)
        self._push(between(known, end))
        parts = self._parts()
        return merged(self._kernel, parts) if parts else None

    def _parts(self) -> list[MergedSlices]:
        """Returns the merges and slices that the window is merged from, in order."""
        covered = self._suffixes[-1:]
        parts = list(takewhile(lambda one: not covered or one.key < covered[0].key, reversed(self._front)))
        parts += covered
        if self._running is not None:
            parts.append(self._running)
        return parts + self._loose

    def _push(self, fresh: Sequence[MergedSlices]) -> None:
        self._back += fresh
        self._loose += fresh
        if len(self._loose) >= _STEP:
            running = [] if self._running is None else [self._running]
            self._running, self._loose = merged(self._kernel, running + self._loose), []

    def _turn(self, start: int) -> None:
        kept = [part for part in self._back if part.key >= start]
        self._front = kept[::-1]
        for at in range(len(kept) - _STEP, -1, -_STEP):
            self._suffixes.append(merged(self._kernel, kept[at : at + _STEP] + self._suffixes[-1:]))
        self._back, self._running, self._loose = [], None, []


class GridWindows:
    """The windows of one grid that need an answer, and the windows that have an answer.

    Args:
        index: index of the family in the slicer.
    """

    def __init__(self, index: int, size: int, every: int, kernel: Kernel) -> None:
        self.index, self.size = index, size
        self.pending: set[int] = set()  # starts of windows that need an answer, or a new one
        self.answered: dict[int, int] = {}  # start -> revision
        self._kernel = kernel
        # A manager does not merge its slices. Windows that do not overlap share no merge.
        self._sliding = None if kernel.in_order or every >= size else SlidingMerge(kernel)

    def touch(self, starts: range, key: int, *, new: bool) -> None:
        """Marks windows as pending, because a slice in them has new records.

        Args:
            key: key of the slice.
            new: whether the slice did not exist before.
        """
        if new or (len(starts) and starts[0] in self.answered):
            self.pending.update(starts)
        if self._sliding is not None and self._sliding.end is not None and key < self._sliding.end:
            self._sliding.clear()

    def answer(
        self, starts: Sequence[int], between: Callable[[int, int], Sequence[MergedSlices]]
    ) -> list[tuple[int, int, MergedSlices]]:
        """Answers windows, and removes them from the pending windows.

        Returns:
            (start, revision, merge) of each window, ascending. A window without slices has no answer.
        """
        found = []
        for start in starts:
            if self._sliding is not None:
                if self._sliding.end is not None and start + self.size < self._sliding.end:
                    self._sliding.clear()
                whole = self._sliding.slide(start, start + self.size, between)
            else:
                parts = between(start, start + self.size)
                whole = merged(self._kernel, parts) if parts else None
            self.pending.discard(start)
            if whole is not None:
                self.answered[start] = self.answered.get(start, 0) + 1
                found.append((start, self.answered[start], whole))
        return found

    def forget(self, starts: Sequence[int]) -> None:
        """Drops windows that are final."""
        for start in starts:
            self.answered.pop(start, None)
