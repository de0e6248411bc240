"""Windows over slices as merges, amortised O(1) merges per window of a sliding family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from center.slicing.kernels import Kernel

_STEP = 3
"""Slices per merge of `SlidingMerge`."""


@dataclass(frozen=True, slots=True)
class MergedSlices:
    """The state of consecutive slices.

    Attributes:
        key: where the first of them begins on the axis of the window's family.
        records, first_ms, last_ms: as in `WindowResult`.
    """

    key: int
    state: Any
    records: int
    first_ms: int
    last_ms: int


def merged(kernel: Kernel, parts: Sequence[MergedSlices]) -> MergedSlices:
    """A new partial; its state shares nothing with those of the parts."""
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

    Two stacks: slices come in at the back, where a running merge is kept; when the front is used up, the back is
    turned over into merges of its suffixes. Both only know every third merge, and a window takes the up to two
    slices on either side that are in none as they are. So a window costs 1⅔ merges of 6½ states in all, however many
    slices it has. With every merge known it were three merges of two states each, hardly less to read, and for all but
    the largest synopses it is the number of merges that costs. The order of merging is that of the slices.
    (Subtracting what leaves would need invertible synopses, a tree O(log n) merges per window.)
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.clear()

    def clear(self) -> None:
        """Forgets all merges: a slice has changed, or one has come up between them."""
        self._front: list[MergedSlices] = []  # slices; the first is the last of the list
        self._suffixes: list[MergedSlices] = []  # merges of slices with all that follow in the front, in the same order
        self._back: list[MergedSlices] = []  # slices, ascending
        self._running: MergedSlices | None = None  # merge of the back but for what is loose
        self._loose: list[MergedSlices] = []
        self.end: int | None = None

    def slide(self, start: int, end: int, between: Callable[[int, int], Sequence[MergedSlices]]) -> MergedSlices | None:
        """The merge of all slices with keys in [start, end), as a new state; None if there are none.

        Args:
            start, end: neither less than at the last call.
            between: the slices with keys in a range, in order.
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
        """What the window is the merge of, in order."""
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
    """The windows of one grid: which are to be answered, and which were.

    Args:
        index: of the family in the slicer.
    """

    def __init__(self, index: int, size: int, every: int, kernel: Kernel) -> None:
        self.index, self.size = index, size
        self.pending: set[int] = set()  # starts of windows that need an answer, or a new one
        self.answered: dict[int, int] = {}  # start -> revision
        self._kernel = kernel
        # A manager holds its slices as they are, and windows without overlap have no merge in common.
        self._sliding = None if kernel.in_order or every >= size else SlidingMerge(kernel)

    def touch(self, starts: range, key: int, *, new: bool) -> None:
        """A slice over these windows has records that it had not; `new`: it was not there before."""
        if new or (len(starts) and starts[0] in self.answered):
            self.pending.update(starts)
        if self._sliding is not None and self._sliding.end is not None and key < self._sliding.end:
            self._sliding.clear()

    def answer(
        self, starts: Sequence[int], between: Callable[[int, int], Sequence[MergedSlices]]
    ) -> list[tuple[int, int, MergedSlices]]:
        """(start, revision, merge) of these windows, ascending; they are pending no longer."""
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
        """These windows are final."""
        for start in starts:
            self.answered.pop(start, None)
