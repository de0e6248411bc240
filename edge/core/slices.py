"""What an edge holds of one slice of a query, and what it knows of the link and of itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edge.cache.entries import SliceEntries
from edge.cache.partition import Limits, primary
from edge.cache.send_queue import Ranking
from edgewater.streams import MAX_TIME_MS, MIN_TIME_MS
from edgewater.synopses import IntArray

INITIAL_ENTRY_BYTES = 48.0


@dataclass(slots=True)
class Slice:
    """A slice's entries and counters.

    Attributes:
        first_ms, last_ms: event times of the first and the last record.
        stated: False while there is news for a `SliceClose`.
        learnt: the history has taken it in, when it was first found closed.
        in_time: it was found closed before its staleness budget's deadline, and so has had its chance.
        told_by_ms: of a query with an accuracy, when the last record came of a batch that was not processed whole, by
            the monitor's clock: the slice is closed when the center has been told of all that came by then.
        drawn_at: the least probability with which its records were drawn, of a function of a sample.
        ranking: the order in which its entries leave.
        waiting: the number of groups that may be sent, and of which state that is the number.
    """

    entries: SliceEntries
    observed: int = 0
    late: int = 0
    first_ms: int = MAX_TIME_MS
    last_ms: int = MIN_TIME_MS
    stated: bool = False
    learnt: bool = False
    in_time: bool = False
    told_by_ms: int = MIN_TIME_MS
    drawn_at: float = 1.0
    ranking: Ranking = field(default_factory=Ranking)
    waiting: tuple[tuple[Any, ...], int] = ((), 0)

    @property
    def counters(self) -> tuple[int, int, int, int]:
        return self.observed, self.late, self.first_ms, self.last_ms

    @property
    def flags(self) -> list[bool]:
        return [self.stated, self.learnt, self.in_time]

    @flags.setter
    def flags(self, flags: list[bool]) -> None:
        self.stated, self.learnt, self.in_time = flags

    def count_waiting(self, limits: Limits, margin: float) -> int:
        """The groups that have used up `margin` of their limit; counted once per state."""
        key = (self.entries.newest, *limits.absolute.items(), margin)
        if self.waiting[0] != key:
            self.waiting = key, int(np.count_nonzero(primary(self.entries, limits, margin)))
        return self.waiting[1]

    def count_out(self, limits: Limits, groups: IntArray) -> None:
        """These groups are about to leave: keeps the number up to date without counting all again."""
        key, waiting = self.waiting
        if key:
            gone = primary(self.entries, limits, float(key[-1]), groups)
            self.waiting = key, waiting - int(np.count_nonzero(gone))


@dataclass(slots=True)
class Progress:
    """What the edge has told the center about a query, besides partials."""

    through_ms: int = MIN_TIME_MS
    entry_bytes: float = INITIAL_ENTRY_BYTES


@dataclass(frozen=True, slots=True)
class Carrier:
    """What the link can do, as measured.

    Attributes:
        bytes_per_ms: bytes per ms of event time; 0: not known, taken as without limit.
        way_ms: event time from an edge's sending to the answer's standing at the center.
    """

    bytes_per_ms: float = 0.0
    way_ms: float = 0.0


UNKNOWN_CARRIER = Carrier()
