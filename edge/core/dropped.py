"""Records that an edge accepted but did not count in a query because they came too late, until the center is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from edgewater.streams import MIN_TIME_MS
from edgewater.wire import DroppedRecords, DropReason

MAX_SLICES = 1_024
"""Slices of which one frame names the dropped records. Those of further slices are reported without their slice."""
_REASONS = {reason.label: reason for reason in DropReason}


@dataclass(slots=True)
class UnreportedDrops:
    """The dropped records that no frame has reported.

    Attributes:
        counts: number of records by slice and reason.
        since_ms: wall time of the first of them; None: there are none.
    """

    counts: dict[tuple[int, DropReason], int] = field(default_factory=dict)
    since_ms: int | None = None

    def __bool__(self) -> bool:
        return bool(self.counts)

    def add(self, slice_start_ms: int, reason: str, records: int) -> None:
        """Adds records that were dropped for one of the reasons of `DropReason`; others are not reported by slice."""
        if reason not in _REASONS:
            return
        key = slice_start_ms, _REASONS[reason]
        if key not in self.counts and len(self.counts) >= MAX_SLICES:
            key = MIN_TIME_MS, _REASONS[reason]
        self.counts[key] = self.counts.get(key, 0) + records

    def begin(self, arrival_ms: int) -> None:
        """Sets `since_ms`, if these are the first records since the last report."""
        if self.counts and self.since_ms is None:
            self.since_ms = arrival_ms

    def take(self) -> tuple[DroppedRecords, ...]:
        """Returns the report, ordered by slice, and begins a new one."""
        taken = tuple(DroppedRecords(*key, records) for key, records in sorted(self.counts.items()))
        self.counts, self.since_ms = {}, None
        return taken

    def to_state(self) -> list[Any]:
        return [self.since_ms, [[start, int(reason), n] for (start, reason), n in sorted(self.counts.items())]]

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> UnreportedDrops:
        since_ms, counts = state
        return cls({(start, DropReason(reason)): n for start, reason, n in counts}, since_ms)
