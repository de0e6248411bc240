"""The records of a query that came too late, that a source rejected, or that the edge guessed about.

They stay here until a frame reports them to the center.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from edgewater.model.streams import MIN_TIME_MS
from edgewater.wire import UNCERTAIN, DroppedRecords, DropReason

MAX_SLICES = 1_024
"""The largest number of slices for which one frame states dropped records. Beyond it, late records are reported without
their slice, and other records are reported per reason, with the range of their slices."""
_REASONS = {reason.label: reason for reason in DropReason if reason.is_late} | UNCERTAIN

_Place = tuple[int, int, DropReason]
"""Slice, end of the last slice (`_ONE`: there is only this slice), reason."""
_ONE = MIN_TIME_MS


@dataclass(slots=True)
class UnreportedDrops:
    """The dropped records that no frame has reported.

    Attributes:
        counts: number of records by place.
        since_ms: wall time of the first unreported record; None: there are none.
    """

    counts: dict[_Place, int] = field(default_factory=dict)
    since_ms: int | None = None

    def __bool__(self) -> bool:
        return bool(self.counts)

    def add(self, slice_start_ms: int, reason: str, records: int, until_ms: int | None = None) -> None:
        """Adds records that were dropped or guessed for one of the reasons of `DropReason`; other reasons are not
        reported by slice.

        Args:
            until_ms: as in `DroppedRecords`; always given for records that did not come too late.
        """
        if reason not in _REASONS:
            return
        key = slice_start_ms, _ONE if until_ms is None else until_ms, _REASONS[reason]
        if key not in self.counts and len(self.counts) >= MAX_SLICES:
            key = (MIN_TIME_MS, _ONE, key[2]) if key[2].is_late else self._unite(key)
        self.counts[key] = self.counts.get(key, 0) + records

    def inherit(self, other: UnreportedDrops) -> None:
        """Adds the late records of a removed version. They have no slices here, because no version has these slices."""
        for (_, _, reason), records in other.counts.items():
            if not reason.is_rejection:
                self.add(MIN_TIME_MS, reason.label, records)
        self.since_ms = self.since_ms if other.since_ms is None or not self.counts else other.since_ms

    def _unite(self, key: _Place) -> _Place:
        """Replaces all places of a reason by one that covers them and `key`; returns that place."""
        reason = key[2]
        of_reason = [key, *(place for place in self.counts if place[2] is reason)]
        records = sum(self.counts.pop(place, 0) for place in of_reason)
        united = min(start for start, _, _ in of_reason), max(until for _, until, _ in of_reason), reason
        self.counts[united] = records
        return united

    def begin(self, arrival_ms: int) -> None:
        """Sets `since_ms` to the wall time `arrival_ms`, if it is not set since the last report."""
        if self.counts and self.since_ms is None:
            self.since_ms = arrival_ms

    def take(self) -> tuple[DroppedRecords, ...]:
        """Returns the report, ordered by slice, and begins a new one."""
        report = tuple(
            DroppedRecords(start, reason, records, None if until == _ONE else until)
            for (start, until, reason), records in sorted(self.counts.items())
        )
        self.counts, self.since_ms = {}, None
        return report

    def to_state(self) -> list[Any]:
        counts = [[start, int(reason), n, until] for (start, until, reason), n in sorted(self.counts.items())]
        return [self.since_ms, counts]

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> UnreportedDrops:
        since_ms, counts = state
        return cls({(start, until, DropReason(reason)): n for start, reason, n, until in counts}, since_ms)
