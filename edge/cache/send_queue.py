"""A slice's entries in the order in which they leave, found once and drawn from by many pulls.

To rank n entries costs O(n log n). A narrow link pulls a few at a time, so they are not ranked at each
pull but after a small part of the time that the slice has left (`FRESH`); until then a pull takes the next ones of
the list, amortised O(log n) an entry. What records have touched since then is passed over: its place has
changed, and the next ranking has it.

The list is part of the core's state. A checkpoint holds it, so that what is recovered sends the same frames.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from edge.cache.entries import SliceEntries
from edgewater.synopses import FloatArray, IntArray

FRESH = 0.03
"""The part of an open slice's time left after which its entries are ranked again."""
PORTION = 0.015
"""The part of an open slice's time left that one frame may take on the link: it holds the values of its beginning."""
FEWEST = 16
"""So many entries a frame may carry at any rate, so that it is not mostly envelope."""
MOST = 1 << 14
"""Of an open slice, so many of the best are kept; when they have left, it is ranked again."""


def portion(left_ms: float, entries_per_ms: float) -> int:
    """How many entries of an open slice one frame should carry at most (`PORTION`). There is no bound where the rate is
    not known (0), nor where a slice should have closed and waits for its records."""
    if left_ms <= 0.0 or entries_per_ms <= 0.0:
        return MOST
    return max(int(PORTION * left_ms * entries_per_ms), FEWEST)


@dataclass(frozen=True, slots=True)
class Choice:
    """The groups that leave, ascending; and whether nothing else of the primary cache is left behind."""

    groups: IntArray
    drained: bool


NOTHING = Choice(np.zeros(0, np.int64), True)


@dataclass(slots=True)
class Ranking:
    """Entries in the order in which they leave.

    Attributes:
        groups: the first to leave first.
        closed: of a closed slice, and so good until a late record comes.
        whole: all that may leave are in `groups`.
        newest: `SliceEntries.newest` as it was made; -1: there is none yet.
        made_ms: event time.
        at: how many were drawn.
    """

    groups: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    closed: bool = False
    whole: bool = False
    newest: int = -1
    made_ms: int = 0
    at: int = 0

    @classmethod
    def of_open(cls, ranks: FloatArray, groups: IntArray, newest: int, now_ms: int) -> Ranking:
        """By rank, the lowest first; equal ranks leave in group order, so that equal states give equal frames."""
        whole = len(groups) <= MOST
        if not whole:
            best = np.sort(np.argpartition(ranks, MOST - 1)[:MOST])
            ranks, groups = ranks[best], groups[best]
        order = np.argsort(ranks, kind="stable")
        return cls(groups[order].astype(np.int32), False, whole, newest, now_ms)

    @classmethod
    def of_closed(cls, groups: IntArray, newest: int) -> Ranking:
        return cls(groups.astype(np.int32), True, True, newest)

    def is_due(self, now_ms: int, end_ms: int) -> bool:
        """Is an open slice to be ranked (again)?"""
        if self.newest < 0 or self.closed or (self.at >= len(self.groups) and not self.whole):
            return True
        return now_ms - self.made_ms >= max(FRESH * (end_ms - self.made_ms), 1.0)

    def is_overtaken(self, entries: SliceEntries) -> bool:
        """Is a closed slice to be ranked (again)?"""
        return not self.closed or entries.newest != self.newest

    def draw(self, entries: SliceEntries, count: int) -> Choice:
        """The next `count` entries, or as many as there are."""
        drawn: list[IntArray] = []
        missing = count
        while missing > 0 and self.at < len(self.groups):
            some = self.groups[self.at : self.at + missing].astype(np.int64)
            self.at += len(some)
            some = some[entries.has_pending[some] & (entries.touched[some] <= self.newest)]
            drawn.append(some)
            missing -= len(some)
        groups = np.sort(np.concatenate(drawn)) if drawn else NOTHING.groups
        return Choice(groups, self.whole and self.at >= len(self.groups))

    def snapshot(self) -> tuple[list[Any], npt.NDArray[np.int32]]:
        """What `restore` reads back; what was drawn is left out."""
        return [self.closed, self.whole, self.newest, self.made_ms], self.groups[self.at :]

    @classmethod
    def restore(cls, document: list[Any], groups: npt.NDArray[np.int32]) -> Ranking:
        closed, whole, newest, made_ms = document
        return cls(groups, closed, whole, newest, made_ms)
