"""The memory of slices: how much memory a query's slices may have, and which slices take no more records.

Values of closed slices leave as fast as the link carries them. So backpressure on the sources bounds their memory: it
ends when the center takes them. Other memory is not freed by the link:

- groups of open slices, until the watermark passes the slice's end,
- groups that a budget withholds, until their windows are final,
- counters of slices that were sent completely, until their windows are final.

Backpressure cannot bound this memory, because a stopped source never advances the watermark that would free it. We say
that slices *hold* this memory, and it has limits of its own. Beyond them the query that uses the memory loses records,
and no other query or source waits.

The core's decisions have to be the same in a replay, but the memory of a state is not: arrays grow ahead of their use.
So the decisions are events (`MemoryLimited`), made by `next_limit` and journaled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self, TypeVar

from edgewater.base.streams import MIN_TIME_MS

Q = TypeVar("Q")

QUERY_SHARE = 2
"""The default bound of a query is the memory limit divided by this."""
ROOM_SHARE = 4
"""The memory limit divided by this is reserved for frames and closed slices, whatever open slices hold."""
RESUME_SHARE = 2
"""A suspended query resumes when its slices hold less than its bound divided by this."""


class MemoryAction(StrEnum):
    """What is done about the memory of a query's open slices; the values are those in the journal."""

    FORGET = "forget"
    """The older half of the closed slices that wait for late records is forgotten. They take no more late records."""
    SUSPEND = "suspend"
    """The slices that are open now take no more records. Their values are shipped when they close."""
    RESUME = "resume"
    """Suspended slices take records again."""
    DISCARD = "discard"
    """The values of all slices are dropped, and the slices take no more records."""


@dataclass(frozen=True, slots=True)
class SliceMemoryLimits:
    """Limits of the memory that slices hold.

    Attributes:
        query_bytes: of one query; at most `all_bytes`.
        all_bytes: of all queries together.
    """

    query_bytes: int
    all_bytes: int

    @property
    def state_bytes(self) -> int:
        """The maximum size of a query's groups, estimated before a batch is applied."""
        return 2 * self.query_bytes

    @classmethod
    def of(cls, max_pending_bytes: int, max_query_bytes: int | None = None) -> Self:
        """Returns the limits for a memory limit in bytes. If `max_query_bytes` is None, a query may use a fixed part of
        it.
        """
        all_bytes = max_pending_bytes - max_pending_bytes // ROOM_SHARE
        return cls(max_query_bytes or max_pending_bytes // QUERY_SHARE, all_bytes)


@dataclass(frozen=True, slots=True)
class HeldMemory:
    """The memory that the slices of a query hold.

    Attributes:
        nbytes: of all slices.
        withheld_bytes: of closed slices that wait for late records: withheld values and counters.
        grows: whether an open slice with records accepts more.
        is_suspended: whether some open slices are suspended.
    """

    nbytes: int
    withheld_bytes: int
    grows: bool
    is_suspended: bool


def next_limit(held: Mapping[Q, HeldMemory], limits: SliceMemoryLimits) -> tuple[Q, MemoryAction] | None:
    """Returns the next action and its query; None if the memory is within its limits.

    The caller applies the action and calls again until the result is None, after a few calls. While all queries
    together hold more than `all_bytes`, the slices of the largest query are discarded. So a small query never pays for
    a large one. This happens with many queries, or after a batch that takes far more than a query may hold.
    """
    if sum(h.nbytes for h in held.values()) > limits.all_bytes:
        return max(held, key=lambda q: held[q].nbytes), MemoryAction.DISCARD
    for query, memory in held.items():
        if memory.nbytes > limits.query_bytes and memory.withheld_bytes:
            return query, MemoryAction.FORGET
        if memory.nbytes > limits.query_bytes and memory.grows:
            return query, MemoryAction.SUSPEND
        if memory.is_suspended and memory.nbytes <= limits.query_bytes // RESUME_SHARE:
            return query, MemoryAction.RESUME
    return None


MAX_STARTS = 16_384
"""The number of full slices that are listed one by one. If there are more, a range replaces the older half."""


@dataclass(slots=True)
class FullSlices:
    """The slices of a query, by start, that take no more records.

    Attributes:
        suspended: slices that take no records until they close or the query resumes.
        discarded: slices that never take records again.
        floor_ms: slices that start before this event time never take records again.
        stated: slices whose loss of records is stated.
        stated_span: the first and the last slice of a range whose losses are all stated; None: there is none.
    """

    suspended: set[int] = field(default_factory=set)
    discarded: set[int] = field(default_factory=set)
    stated: set[int] = field(default_factory=set)
    floor_ms: int = MIN_TIME_MS
    stated_span: tuple[int, int] | None = None

    def __bool__(self) -> bool:
        return bool(self.suspended or self.discarded)

    def refuses(self, start: int, *, is_open: bool) -> bool:
        return start < self.floor_ms or start in self.discarded or (is_open and start in self.suspended)

    def raise_floor(self, floor_ms: int) -> None:
        self.floor_ms = max(floor_ms, self.floor_ms)
        self.discarded = {start for start in self.discarded if start >= self.floor_ms}

    def discard(self, start: int) -> None:
        self.discarded.add(start)
        if len(self.discarded) > MAX_STARTS:
            self.raise_floor(sorted(self.discarded)[MAX_STARTS // 2])

    def state(self, start: int) -> tuple[int, int] | None:
        """Returns the first and the last slice of the loss to state when a slice refuses a record. None if this loss
        is already stated.
        """
        if start in self.stated or (self.stated_span and self.stated_span[0] <= start <= self.stated_span[1]):
            return None
        self.stated.add(start)
        if len(self.stated) <= MAX_STARTS:
            return start, start
        older = [*sorted(self.stated)[: MAX_STARTS // 2], *(self.stated_span or ())]
        self.stated_span = min(older), max(older)
        self.stated.difference_update(older)
        return min(start, self.stated_span[0]), max(start, self.stated_span[1])

    def forget(self, is_final: Callable[[int], bool]) -> None:
        """Forgets the slices whose windows are final: they take no records anyway."""
        for starts in (self.suspended, self.discarded, self.stated):
            starts.difference_update([start for start in starts if is_final(start)])

    def to_state(self) -> list[Any]:
        starts = [sorted(starts) for starts in (self.suspended, self.discarded, self.stated)]
        return [*starts, self.floor_ms, None if self.stated_span is None else list(self.stated_span)]

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> FullSlices:
        suspended, discarded, stated, floor_ms, span = state
        return cls(set(suspended), set(discarded), set(stated), floor_ms, None if span is None else tuple(span))
