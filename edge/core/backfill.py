"""The backfill of a query: the edge reads again the records that sources delivered before the registration.

The edge counts a source's records by event time when it delivers them. When a query with ``since`` is registered, these
counts are what its backfill has to read. Each record that is read again is subtracted. The remaining counts bound the
event times of the unread records, whatever the order of files, so they give the backfill's watermark. At the end of the
backfill, the remaining records can no longer be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edge.core.ahead import no_numbers, span_begins
from edgewater.base.streams import MAX_TIME_MS, MIN_TIME_MS
from edgewater.synopses import IntArray

MAX_BUCKETS = 2048
"""Maximum number of buckets per source. Beyond it, the buckets become twice as wide."""
FIRST_WIDTH_MS = 1_000  # limit: memory of the first step
MAX_SPANS = 8
"""Spans of event time in which a backfill states the lost records of one source."""
FIRST_RECORD_NUMBER = MIN_TIME_MS
"""Number of the first record of a backfill. Numbers identify records, so they differ from the numbers of live records.
"""


@dataclass(slots=True)
class TimeCounts:
    """Numbers of records by event time, in at most `MAX_BUCKETS` non-empty buckets of equal width.

    Attributes:
        buckets: int64, ascending: event times divided by `width_ms`, rounded down.
        counts: int64, one per bucket.
    """

    width_ms: int = FIRST_WIDTH_MS
    buckets: IntArray = field(default_factory=no_numbers)
    counts: IntArray = field(default_factory=no_numbers)

    def add(self, times_ms: IntArray, sign: int = 1) -> None:
        """Counts records with these event times; removes them with sign -1."""
        if not len(times_ms):
            return
        first, last = int(times_ms.min()) // self.width_ms, int(times_ms.max()) // self.width_ms
        at = int(np.searchsorted(self.buckets, first))
        if first == last and at < len(self.buckets) and self.buckets[at] == first:
            self.counts[at] += sign * len(times_ms)  # nearly every batch of a live source
            return
        if last - first < MAX_BUCKETS:  # faster than sorting
            numbers = np.bincount(times_ms // self.width_ms - first)
            places = np.flatnonzero(numbers)
            buckets, counts = places + first, numbers[places]
        else:
            buckets, counts = np.unique(times_ms // self.width_ms, return_counts=True)
        self._merge(np.concatenate([self.buckets, buckets]), np.concatenate([self.counts, sign * counts]))

    def _merge(self, buckets: IntArray, counts: IntArray) -> None:
        while True:
            self.buckets, place = np.unique(buckets, return_inverse=True)
            self.counts = np.zeros(len(self.buckets), np.int64)
            np.add.at(self.counts, place, counts)
            if len(self.buckets) <= MAX_BUCKETS:
                return
            self.width_ms *= 2
            buckets, counts = self.buckets // 2, self.counts

    @property
    def records(self) -> int:
        return int(self.counts.sum())

    def since(self, since_ms: int) -> TimeCounts:
        """Returns a copy of the buckets that reach beyond an event time."""
        reached = (self.buckets + 1) * self.width_ms > since_ms
        return TimeCounts(self.width_ms, self.buckets[reached], self.counts[reached])

    def first_ms(self) -> int:
        """Returns the start of the first bucket that is not 0; the maximum time if there is none."""
        filled = np.flatnonzero(self.counts)
        return int(self.buckets[filled[0]]) * self.width_ms if len(filled) else MAX_TIME_MS

    def spans(self) -> list[tuple[int, int, int | None]]:
        """Returns the event times [from, to) and the number of records of adjacent buckets that are not 0.

        The number is None where more records were removed than added. Beyond `MAX_SPANS`, the spans with the least time
        between them are joined.
        """
        filled = np.flatnonzero(self.counts)
        if not len(filled):
            return []
        buckets, counts = self.buckets[filled], self.counts[filled]
        begins = span_begins(np.diff(buckets), 2, MAX_SPANS)
        ends = np.concatenate([begins[1:], [len(buckets)]])
        width = self.width_ms
        return [
            (
                int(buckets[b]) * width,
                (int(buckets[e - 1]) + 1) * width,
                int(counts[b:e].sum()) if (counts[b:e] > 0).all() else None,
            )
            for b, e in zip(begins.tolist(), ends.tolist(), strict=True)
        ]

    def to_state(self) -> list[Any]:
        return [self.width_ms, self.buckets.tolist(), self.counts.tolist()]

    @classmethod
    def from_state(cls, state: list[Any]) -> TimeCounts:
        width_ms, buckets, counts = state
        return cls(width_ms, np.array(buckets, np.int64), np.array(counts, np.int64))


@dataclass(slots=True)
class Backfill:
    """The progress of a query's backfill.

    Attributes:
        since_ms: event time from which records count.
        unread: by source, the records that have not been read again. A source is removed when its backfill ends.
        records: number of records that the backfill has read.
    """

    since_ms: int
    unread: dict[str, TimeCounts]
    records: int = 0

    @property
    def watermark_ms(self) -> int:
        """Event time before which the backfill has no more records."""
        return min((counts.first_ms() for counts in self.unread.values()), default=MAX_TIME_MS)

    @property
    def unread_records(self) -> int:
        return sum(counts.records for counts in self.unread.values())

    def read(self, source: str, times_ms: IntArray) -> None:
        """Subtracts records that were read again. Records before `since_ms` may be in the first bucket too."""
        counts = self.unread[source]
        counts.add(times_ms[times_ms >= self.since_ms // counts.width_ms * counts.width_ms], -1)
        self.records += len(times_ms)

    def end(self, source: str) -> list[tuple[int, int, int | None]]:
        """Ends the backfill of a source; returns the spans of event time of the records that were not read."""
        spans = self.unread.pop(source).spans()
        return [(max(from_ms, self.since_ms), to_ms, records) for from_ms, to_ms, records in spans]

    def to_state(self) -> dict[str, Any]:
        unread = {source: counts.to_state() for source, counts in self.unread.items()}
        return {"since_ms": self.since_ms, "unread": unread, "records": self.records}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Backfill:
        unread = {source: TimeCounts.from_state(counts) for source, counts in state["unread"].items()}
        return cls(state["since_ms"], unread, state["records"])
