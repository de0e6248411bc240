"""The send queue of a slice: its entries in the order in which they are sent. A ranking serves many pulls.

Ranking n entries costs O(n log n). A narrow link pulls a few at a time, so an open slice is ranked again only after a
small part of its remaining time (`RERANK_FRACTION`). Until then a pull takes the next entries of the queue, amortised
O(log n) per entry. Entries that records have updated since the ranking are skipped: their rank has changed, and the
next ranking includes them.

The queue is part of the core's state, so that a recovered edge sends the same frames.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from edge.cache.entries import SliceEntries
from edgewater.synopses import FloatArray, IntArray
from edgewater.synopses.encoding.state import State

RERANK_FRACTION = 0.03  # limit: time of rankings
"""The fraction of an open slice's remaining time after which its entries are ranked again."""
MAX_QUEUED = 1 << 14
"""The maximum length of the queue of an open slice. When these entries have been sent, the slice is ranked again."""


@dataclass(frozen=True, slots=True)
class GroupSelection:
    """The groups of a slice to send.

    Attributes:
        groups: int64, ascending.
        drained: whether the primary cache is empty once these groups have been sent.
    """

    groups: IntArray
    drained: bool


EMPTY_SELECTION = GroupSelection(np.zeros(0, np.int64), True)


@dataclass(slots=True)
class SendQueue:
    """Entries in the order in which they are sent.

    Attributes:
        groups: int32; the first group is sent first.
        closed: whether the slice was closed when it was ranked. The queue is then valid until a late record arrives.
        complete: whether `groups` has all entries that may be sent.
        newest_batch: `SliceEntries.newest_batch` at the ranking; -1: never ranked.
        ranked_ms: event time of the ranking.
        position: number of groups drawn so far.
        errors: the errors of the groups of a closed slice, if they were asked for. No part of the state.
    """

    groups: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    closed: bool = False
    complete: bool = False
    newest_batch: int = -1
    ranked_ms: int = 0
    position: int = 0
    errors: FloatArray = field(default_factory=lambda: np.zeros(0))

    @classmethod
    def for_open_slice(cls, ranks: FloatArray, groups: IntArray, newest_batch: int, now_ms: int) -> SendQueue:
        """Orders by rank, the lowest first. Equal ranks are in group order, so that equal states give equal frames."""
        complete = len(groups) <= MAX_QUEUED
        if not complete:
            best = np.sort(np.argpartition(ranks, MAX_QUEUED - 1)[:MAX_QUEUED])
            ranks, groups = ranks[best], groups[best]
        order = np.argsort(ranks, kind="stable")
        return cls(groups[order].astype(np.int32), False, complete, newest_batch, now_ms)

    @classmethod
    def for_closed_slice(cls, groups: IntArray, newest_batch: int) -> SendQueue:
        return cls(groups.astype(np.int32), True, True, newest_batch)

    @property
    def left(self) -> int:
        """The number of entries that have not been drawn. Some may have been updated since the ranking."""
        return len(self.groups) - self.position

    def expired_open(self, now_ms: int, end_ms: int) -> bool:
        """Returns whether an open slice that ends at `end_ms` has to be ranked (again)."""
        if self.newest_batch < 0 or self.closed or (self.position >= len(self.groups) and not self.complete):
            return True
        return now_ms - self.ranked_ms >= max(RERANK_FRACTION * (end_ms - self.ranked_ms), 1.0)

    def expired_closed(self, entries: SliceEntries) -> bool:
        """Returns whether a closed slice has to be ranked (again)."""
        return not self.closed or entries.newest_batch != self.newest_batch

    def draw(self, entries: SliceEntries, count: int) -> GroupSelection:
        """Removes the next `count` entries that change something at the center, or as many as there are."""
        unsent, unchanged = entries.has_pending, entries.unchanged()
        if len(unchanged):
            left = self.groups[self.position :]
            self.groups, self.position = left[~np.isin(left, unchanged)], 0
        drawn: list[IntArray] = []
        missing = count
        while missing > 0 and self.position < len(self.groups):
            some = self.groups[self.position : self.position + missing].astype(np.int64)
            self.position += len(some)
            some = some[unsent[some] & (entries.last_batch[some] <= self.newest_batch)]
            drawn.append(some)
            missing -= len(some)
        groups = np.sort(np.concatenate(drawn)) if drawn else EMPTY_SELECTION.groups
        return GroupSelection(groups, self.complete and self.position >= len(self.groups))

    def to_state(self) -> State:
        """Returns the state of the queue, without the groups that have been drawn."""
        numbers = [self.closed, self.complete, self.newest_batch, self.ranked_ms]
        return State(numbers, {"groups": self.groups[self.position :]})

    @classmethod
    def from_state(cls, state: State) -> SendQueue:
        return cls(state.arrays["groups"], *state.numbers)
