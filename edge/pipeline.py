"""One query at one edge: filter, assign slices, update entries; later, decide what leaves.

A slice is open until the stream's watermark passes its end, then closed: its primary entries are
drained, and a `SliceClose` says what was observed and what is withheld. It is kept, for late
records, until the last window over it can no longer be revised, and then forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from edge.cache.budgets import primary
from edge.cache.entries import SliceEntries
from edge.cache.eviction import first_to_leave, least_recently_used
from edge.events import END_OF_TIME_MS
from edgewater.query import BoundQuery, ErrorBudget, QuerySpec, StalenessBudget
from edgewater.streams import TIME_COLUMN
from edgewater.synopses.base import IntArray
from edgewater.synopses.grouped import GroupedAggregate
from edgewater.wire.frames import FrameBody, Partial, QueryRef, SliceClose

NEVER_MS = -END_OF_TIME_MS
NOTHING_OPEN = (NEVER_MS, NEVER_MS)
INITIAL_ENTRY_BYTES = 48.0


@dataclass(slots=True)
class Slice:
    """A slice's entries and counters. `stated` is False while there is news for a `SliceClose`."""

    entries: SliceEntries
    observed: int = 0
    late: int = 0
    stated: bool = False


@dataclass(slots=True)
class Progress:
    """What the edge has told the center about a query, besides partials."""

    through_ms: int = NEVER_MS
    entry_bytes: float = INITIAL_ENTRY_BYTES


@dataclass(slots=True)
class QueryPipeline:
    """The state of one query.

    Attributes:
        since_ms: event time from which on this edge has all records; slices before it are skipped.
        shares: this edge's shares of the error budget per measure and window.
    """

    ref: QueryRef
    bound: BoundQuery
    since_ms: int = NEVER_MS
    shares: dict[str, float] = field(default_factory=dict)
    slices: dict[int, Slice] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)

    @property
    def spec(self) -> QuerySpec:
        return self.bound.spec

    @property
    def nbytes(self) -> int:
        return sum(s.entries.nbytes for s in self.slices.values())

    @property
    def bounded_measures(self) -> tuple[str, ...]:
        """Every measure of a query under an error budget: all of them are reported as withheld."""
        return tuple(m.name for m in self.spec.measures) if isinstance(self.spec.budget, ErrorBudget) else ()

    def ingest(self, batch: pa.RecordBatch, watermark_ms: int, touch: int) -> dict[str, int]:
        """Updates the slices with a batch; returns how many records were not counted, by reason."""
        if self.bound.where is not None:
            batch = batch.filter(self.bound.where.array(batch))
        if batch.num_rows == 0:
            return {}
        dropped: dict[str, int] = {}
        times = batch.column(TIME_COLUMN).to_numpy()
        starts = self.spec.window.slice_starts(times)
        distinct = np.unique(starts)
        for start in distinct.tolist():
            rows = None if len(distinct) == 1 else np.flatnonzero(starts == start)
            part = batch if rows is None else batch.take(pa.array(rows))
            reason = self._refused(start, watermark_ms)
            if reason:
                dropped[reason] = dropped.get(reason, 0) + part.num_rows
                continue
            self._update(start, part, times if rows is None else times[rows], watermark_ms, touch)
        return dropped

    def _refused(self, start: int, watermark_ms: int) -> str:
        if start < self.since_ms:
            return "before-query"
        return "too-late" if self._final(start, watermark_ms) else ""

    def _update(self, start: int, part: pa.RecordBatch, times: IntArray, watermark_ms: int, touch: int) -> None:
        held = self.slices.get(start)
        if held is None:
            held = self.slices[start] = Slice(self._entries())
        keys = [part.column(name) for name in self.spec.group_by]
        values = {m.measure.name: m.argument.array(part) if m.argument else None for m in self.bound.measures}
        held.entries.update(keys, values, part.num_rows, times, touch)
        held.observed += part.num_rows
        if self._end(start) <= watermark_ms:
            held.late += part.num_rows
        held.stated = False

    def _entries(self) -> SliceEntries:
        keys = dict(zip(self.spec.group_by, self.bound.group_types, strict=True))
        stacks = {
            m.measure.name: m.measure.function.make(m.measure.parameters, m.argument.type if m.argument else None)
            for m in self.bound.measures
        }
        return SliceEntries(GroupedAggregate(keys, stacks), self.bounded_measures)

    def _end(self, start: int) -> int:
        return start + self.spec.window.slice_ms

    def _final(self, start: int, watermark_ms: int) -> bool:
        return self.spec.window.last_window_end(start) + self.spec.lateness_ms <= watermark_ms

    def slice_shares(self) -> dict[str, float]:
        """Shares per slice: a window of k slices may hold back E in all, or E in each for extrema."""
        if not isinstance(self.spec.budget, ErrorBudget):
            return {}
        functions = {m.name: m.function for m in self.spec.measures}
        k = self.spec.window.slices_per_window
        return {
            name: self.shares.get(name, 0.0) / (k if functions[name].error == "sum" else 1)
            for name, _ in self.spec.budget.limits
        }

    def closed_bytes(self, watermark_ms: int) -> int:
        """Estimated bytes of closed slices that are still to be sent."""
        return sum(size for end, size in self._sizes() if end <= watermark_ms)

    def open_bytes(self, watermark_ms: int, after_ms: int) -> tuple[int, int | None]:
        """Estimated bytes of open slices that may leave early, and the first one's end.

        Args:
            after_ms: where the clock stands. A slice that should have closed by it waits for its
                records; to send what it has now would be to send most groups twice.
        """
        after = watermark_ms if self.wants_news else max(watermark_ms, after_ms)
        sizes = [(end, size) for end, size in self._sizes() if end > after and size]
        return sum(size for _, size in sizes), min((end for end, _ in sizes), default=None)

    def _sizes(self) -> Iterator[tuple[int, int]]:
        shares = self.slice_shares()
        for start, held in self.slices.items():
            groups = np.count_nonzero(primary(held.entries, shares))
            yield self._end(start), int(groups * self.progress.entry_bytes)

    def has_news(self, watermark_ms: int) -> bool:
        """Is there something to tell the center about slices that the watermark has closed?"""
        return self._crossed(watermark_ms) or any(
            not held.stated and self._end(start) <= watermark_ms for start, held in self.slices.items()
        )

    def _crossed(self, through_ms: int) -> bool:
        """Has a slice ended since the center was last told how far this edge has come?"""
        border = self.spec.window.slice_start
        return through_ms > NEVER_MS and border(through_ms) > border(self.progress.through_ms)

    def pull(
        self, capacity_bytes: int, watermark_ms: int, open_between_ms: tuple[int, int] = NOTHING_OPEN
    ) -> FrameBody | None:
        """The body of the frame that is worth most: closed slices first, oldest first.

        Args:
            capacity_bytes: about how large the body may be before compression; at least one entry
                leaves, so that a small capacity delays but never blocks.
            open_between_ms: slices still open may be drawn from if they end behind the first and at or
                before the second. A staleness budget lifts the first: late or not, it wants news.
        """
        shares = self.slice_shares()
        partials: list[Partial] = []
        closes: list[SliceClose] = []
        through, room = watermark_ms, capacity_bytes
        for start in sorted(self.slices):
            held = self.slices[start]
            end = self._end(start)
            if end > watermark_ms and not self._may_leave_early(end, open_between_ms):
                continue
            candidates = np.flatnonzero(primary(held.entries, shares))
            if len(candidates) and room > 0:
                count = max(1, int(room / self.progress.entry_bytes))
                leaving = first_to_leave(held.entries, candidates, count, least_recently_used)
                made = list(self._partials(start, held.entries, leaving))
                partials += made
                room -= sum(len(p.synopsis) for p in made)
                drained = len(leaving) == len(candidates)
            else:
                drained = not len(candidates)
            if end > watermark_ms:
                continue
            if not drained:
                through = min(through, end - 1)
                break
            if not held.stated:
                closes.append(SliceClose(start, held.observed, held.late, held.entries.withheld()))
                held.stated = True
                if not self.bounded_measures:
                    held.entries = self._entries()  # sent in full: only late records can need it again
        through = max(through, self.progress.through_ms)
        if not partials and not closes and not self._crossed(through):
            return None
        self.progress.through_ms = through
        self._forget_final(watermark_ms)
        since = None if self.since_ms == NEVER_MS else self.since_ms
        return FrameBody(through, tuple(partials), tuple(closes), since)

    def _may_leave_early(self, end: int, open_between_ms: tuple[int, int]) -> bool:
        after, through = open_between_ms
        return end <= through and (end > after or self.wants_news)

    @property
    def wants_news(self) -> bool:
        """Is an answer given at its time, whatever has come by then?"""
        return isinstance(self.spec.budget, StalenessBudget)

    def _partials(self, start: int, entries: SliceEntries, groups: IntArray) -> Iterator[Partial]:
        taken = entries.send(groups)
        data = taken.to_bytes()
        # The estimate follows what entries really cost, so that frames come out near the capacity.
        self.progress.entry_bytes += 0.3 * (len(data) / len(groups) - self.progress.entry_bytes)
        yield Partial(start, 0, data)

    def _forget_final(self, watermark_ms: int) -> None:
        done = [
            s for s, held in self.slices.items() if held.stated and s < watermark_ms and self._final(s, watermark_ms)
        ]
        for start in done:
            del self.slices[start]
