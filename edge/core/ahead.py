"""Records that were ahead of the clock when the edge read them. Queries registered later lack these records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from edgewater.synopses import IntArray

MAX_SPANS = 16
"""Spans of event time per source. If there are more, the spans with the least time between them are joined."""
JOINED_MS = 1_000  # limit: number of spans
"""Records whose event times differ by less than this are in one span."""


def no_numbers() -> IntArray:
    return np.zeros(0, np.int64)


def span_begins(between: IntArray, least: int, most: int) -> IntArray:
    """Returns where spans begin: at place 0, and at each place that is at least `least` after the place before it.

    Args:
        between: int64; distances of n + 1 places, each to the next place.
        most: the maximum number of spans. If there are more, the spans with the least distance between them are joined.
    """
    apart = between >= least
    if np.count_nonzero(apart) >= most:
        apart = np.zeros(len(between), bool)
        apart[np.argsort(between, kind="stable")[-(most - 1) :]] = True
    return np.concatenate([[0], np.flatnonzero(apart) + 1])


@dataclass(slots=True)
class AheadRecords:
    """The event times of one source's records that are ahead of the clock, as disjoint ascending spans.

    Attributes:
        first_ms, last_ms, records: int64, one element per span.
    """

    first_ms: IntArray = field(default_factory=no_numbers)
    last_ms: IntArray = field(default_factory=no_numbers)
    records: IntArray = field(default_factory=no_numbers)

    def __len__(self) -> int:
        return len(self.records)

    def add(self, times_ms: IntArray) -> None:
        """Adds records with these event times."""
        times, counts = np.unique(times_ms, return_counts=True)
        first = np.concatenate([self.first_ms, times])
        order = np.argsort(first, kind="stable")
        first = first[order]
        last = np.maximum.accumulate(np.concatenate([self.last_ms, times])[order])
        begins = span_begins(first[1:] - last[:-1], JOINED_MS, MAX_SPANS)
        self.first_ms = first[begins]
        self.last_ms = np.maximum.reduceat(last, begins)
        self.records = np.add.reduceat(np.concatenate([self.records, counts])[order], begins)

    def drop_before(self, time_ms: int) -> None:
        """Drops the spans that end before this event time: the clock has reached them."""
        ahead = self.last_ms >= time_ms
        if not ahead.all():
            self.first_ms, self.last_ms, self.records = self.first_ms[ahead], self.last_ms[ahead], self.records[ahead]

    def spans(self, from_ms: int) -> list[tuple[int, int, int]]:
        """Returns first time, last time and number of records of each span that reaches beyond an event time."""
        rows = zip(self.first_ms.tolist(), self.last_ms.tolist(), self.records.tolist(), strict=True)
        return [row for row in rows if row[1] >= from_ms]

    def to_state(self) -> list[list[int]]:
        return [self.first_ms.tolist(), self.last_ms.tolist(), self.records.tolist()]

    @classmethod
    def from_state(cls, state: Sequence[Sequence[int]]) -> AheadRecords:
        return cls(*(np.array(column, np.int64) for column in state))
