"""The state of a stream: its watermark, and the event times of its sources."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from edge.core.ahead import AheadRecords
from edge.core.backfill import TimeCounts
from edge.core.events import InputLost
from edge.records import RejectedRecords
from edgewater.base.streams import (
    LIVE,
    MAX_TIME_MS,
    MIN_TIME_MS,
    TIME_COLUMN,
    Constant,
    Delivery,
    StreamClock,
    type_name,
)
from edgewater.wire import GUESSES, REJECTIONS, InputLoss, LossReason

MAX_LOSSES = 32
"""Losses of input that are stored one by one."""
LIVE_MS = 60_000  # limit: how late a source that falls behind is noticed
"""A source keeps up with the stream's clock if its newest record is at most this far behind the clock."""
RECENT_RECORDS, LEAST_RECORDS = 64, 16
"""How many of a source's newest records decide whether a column has values: about the first number, at least the
second."""


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """A stream of this edge.

    Attributes:
        columns: name -> Arrow type of a record's columns.
        clock: maps wall time to event time; None: records are read as fast as possible, without a clock.
        disorder_ms: how far the watermark is behind the newest event time.
        idle_ms: the wall time without input after which a source's watermark follows the clock; None: never.
        deliveries: the deliveries of its sources except exactly-once, sorted.
        constants: columns that have one value in all records.
    """

    columns: Mapping[str, pa.DataType]
    clock: StreamClock | None = LIVE
    disorder_ms: int = 0
    idle_ms: int | None = None
    deliveries: tuple[Delivery, ...] = ()
    constants: Mapping[str, Constant] = field(default_factory=dict)


def constant_type(data_type: pa.DataType, constant: Constant | None) -> str:
    """Returns the name of a column's type, with its constant. Neither may change while a query uses the column."""
    return type_name(data_type) if constant is None else f"{type_name(data_type)}, always {constant!r}"


@dataclass(slots=True)
class ColumnValues:
    """How many of the newest records of a source have no value in a column.

    Attributes:
        records, nulls: counts of the newest records; older records have less and less weight.
        had_values: whether few of the newest records were null at some time.
    """

    records: int = 0
    nulls: int = 0
    had_values: bool = False

    def add(self, records: int, nulls: int) -> None:
        """Counts a batch."""
        if records >= RECENT_RECORDS:
            self.records = self.nulls = 0
        elif self.records + records > RECENT_RECORDS:
            self.records, self.nulls = self.records // 2, self.nulls // 2
        self.records += records
        self.nulls += nulls
        self.had_values |= self.records >= LEAST_RECORDS and 4 * self.nulls <= self.records

    @property
    def is_gone(self) -> bool:
        """Whether the column had values, and most of the newest records have none."""
        return self.had_values and self.records >= LEAST_RECORDS and 2 * self.nulls > self.records


class StreamState:
    """The watermark of a stream: the minimum over its sources; it never decreases.

    Attributes:
        records: number of records read.
        newest_ms: the newest event time. A record ahead of the clock counts with the clock's time at its arrival.
        latest_ms: the newest event time, even if it was ahead of the clock.
        losses: the losses of input; the oldest are united.
        ahead: by source, the records that were ahead of the clock when they were read, until the clock reaches them.
        delivered: by source, the records that it has delivered.
        rejected: by source and reason, the number of records that it has rejected.
        first_rejected: by source and reason, `RejectedRecords.first` of the first record that has it.
        replayable: the sources whose records can be read again.
    """

    def __init__(self, spec: StreamSpec) -> None:
        self.spec = spec
        self.records = 0
        self.newest_ms = MIN_TIME_MS
        self.latest_ms = MIN_TIME_MS
        self.losses: tuple[InputLoss, ...] = ()
        self.ahead: dict[str, AheadRecords] = {}
        self.delivered: dict[str, TimeCounts] = {}
        self.replayable: frozenset[str] = frozenset()
        self.rejected: dict[str, dict[str, int]] = {}
        self.first_rejected: dict[str, dict[str, str]] = {}
        self._values: dict[str, dict[str, ColumnValues]] = {}
        self._sources: dict[str, int] = {}  # watermark of each source
        # Wall time since which a source may have been silent. Absent: no tick has seen the source yet.
        self._quiet_since_ms: dict[str, int] = {}
        self._watermark_ms = MIN_TIME_MS

    @property
    def column_types(self) -> dict[str, str]:
        return {n: constant_type(t, self.spec.constants.get(n)) for n, t in self.spec.columns.items()}

    @property
    def watermark_ms(self) -> int:
        """Event time before which no more records are expected."""
        return self._watermark_ms

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the sources. Sources of earlier runs are included until `set_sources` is called."""
        return tuple(self._sources)

    def source_watermark_ms(self, source: str) -> int:
        """Returns the event time before which no more records of a source are expected."""
        return self._sources.get(source, MIN_TIME_MS)

    def set_sources(self, sources: Iterable[str], replayable: Collection[str] = ()) -> None:
        """Sets the sources of the stream. Called when sources are opened: silence is measured anew from then on."""
        self._sources = {source: self._sources.get(source, MIN_TIME_MS) for source in sources}
        self.replayable = frozenset(self._sources.keys() & set(replayable))
        self._quiet_since_ms.clear()
        self._update_watermark()

    def advance(self, source: str, batch: pa.RecordBatch, arrival_ms: int) -> None:
        """Updates the watermark with a batch of a source."""
        times = batch.column(TIME_COLUMN).to_numpy()
        newest = int(np.max(times)) if batch.num_rows else MIN_TIME_MS
        self._advance(source, newest, batch.num_rows, arrival_ms)
        if batch.num_rows:
            self._count_nulls(source, batch)
        self.delivered.setdefault(source, TimeCounts()).add(times)
        if newest > self.newest_ms:
            self.ahead.setdefault(source, AheadRecords()).add(times[times > self.newest_ms])
        for records in self.ahead.values():
            records.drop_before(self.newest_ms)

    def reject(self, source: str, rejected: Iterable[RejectedRecords], arrival_ms: int) -> Iterator[RejectedRecords]:
        """Counts records that a source rejected, and yields them with the event times that they may have. Also yields
        the source's guesses.

        A record with an unreadable event time may lie anywhere between the source's watermark and the newest valid
        record of the input. If that record is within `LIVE_MS` of the stream's clock, the range ends at the clock.
        Without a valid record so far, the rejected record lies at the clock. Called before `advance` with the batch of
        the same input.
        """
        counts = self.rejected.setdefault(source, {})
        for each in rejected:
            if each.reason in GUESSES:
                yield each
                continue
            counts[each.reason] = counts.get(each.reason, 0) + each.records
            if each.first:
                self.first_rejected.setdefault(source, {}).setdefault(each.reason, each.first)
            if each.reason in REJECTIONS:
                yield each if each.is_timed else self._placed(source, each, arrival_ms)

    def _placed(self, source: str, rejected: RejectedRecords, arrival_ms: int) -> RejectedRecords:
        clock_ms = None if self.spec.clock is None else self.spec.clock.to_event_ms(arrival_ms)
        from_ms, to_ms = rejected.from_ms, rejected.to_ms
        watermark_ms = max(self._sources.get(source, MIN_TIME_MS), self._watermark_ms)
        if MIN_TIME_MS < watermark_ms < MAX_TIME_MS:
            newest_ms = watermark_ms + self.spec.disorder_ms
            from_ms = watermark_ms if from_ms is None else min(from_ms, watermark_ms)
            to_ms = newest_ms + 1 if to_ms is None else max(to_ms, newest_ms + 1)
        if clock_ms is not None and (to_ms is None or clock_ms - to_ms <= LIVE_MS):
            from_ms = clock_ms if from_ms is None else from_ms
            to_ms = clock_ms + 1 if to_ms is None else max(to_ms, clock_ms + 1)
        return replace(rejected, from_ms=from_ms, to_ms=to_ms)

    def _count_nulls(self, source: str, batch: pa.RecordBatch) -> None:
        values = self._values.setdefault(source, {})
        rows, recent = batch.num_rows, RECENT_RECORDS
        # Of a long batch, both ends: a column may lose its values within it.
        parts = [batch] if rows <= recent else [batch.slice(0, recent), batch.slice(max(recent, rows - recent))]
        for part in parts:
            for name, column in zip(part.schema.names, part.columns, strict=True):
                if name in self.spec.columns:
                    values.setdefault(name, ColumnValues()).add(part.num_rows, column.null_count)

    def null_columns(self) -> list[tuple[str, str]]:
        """Returns (source, column) of the columns that had values and are null in most of the newest records."""
        return [
            (source, name) for source in self._sources for name, v in self._values.get(source, {}).items() if v.is_gone
        ]

    def losses_ahead(self, since_ms: int, *, counted: bool) -> tuple[InputLoss, ...]:
        """Returns the records of slices from `since_ms` on that were read already. A query registered now lacks them.

        Args:
            counted: whether the query counts every record, so that their number is known.
        """
        return tuple(
            InputLoss(source, LossReason.BEFORE_QUERY, max(first, since_ms), last + 1, records if counted else None)
            for source, ahead in self.ahead.items()
            for first, last, records in ahead.spans(since_ms)
        )

    def _advance(self, source: str, newest: int, records: int, arrival_ms: int) -> None:
        if records:
            self.latest_ms = max(self.latest_ms, newest)
            if self.spec.clock is not None:
                # A device whose clock is ahead must not close windows that still get records of other devices.
                newest = min(newest, self.spec.clock.to_event_ms(arrival_ms))
            self.newest_ms = max(self.newest_ms, newest)
            current = self._sources.get(source, MIN_TIME_MS)
            self._sources[source] = max(current, newest - self.spec.disorder_ms)
            self.records += records
        self._quiet_since_ms[source] = max(self._quiet_since_ms.get(source, 0), arrival_ms)
        self._update_watermark()

    def lose(self, event: InputLost) -> InputLoss:
        """Applies a loss of input; returns it with the bounds that the stream's clock gives."""
        to_ms = event.to_ms
        if to_ms is None and self.spec.clock is not None:
            to_ms = max(self.spec.clock.to_event_ms(event.at_ms), self.latest_ms) + 1
        loss = InputLoss(event.source, event.reason, event.from_ms, to_ms, event.records)
        self.losses = add_loss(self.losses, loss)
        if event.was_ingested:
            # The records keep their numbers, and the watermark has passed them.
            newest = self.newest_ms if event.to_ms is None else event.to_ms - 1
            self._advance(event.source, newest, event.records or 0, event.at_ms)
        return loss

    def is_open(self, source: str) -> bool:
        """Whether the source was opened and has not ended."""
        return self._sources.get(source, MAX_TIME_MS) < MAX_TIME_MS

    def end(self, source: str) -> None:
        self._sources[source] = MAX_TIME_MS
        self._update_watermark()

    def tick(self, now_ms: int, unread: Collection[str] = (), empty_ms: Mapping[str, int] | None = None) -> None:
        """Applies the idle rule: the watermark of an idle source follows the stream's clock.

        A read may take long, on a slow disk. Its records arrived before the read ended. So a source is idle only up to
        the time at which its last read returned nothing, and not up to now.

        Args:
            unread: the sources that could not be read until now; they are not idle.
            empty_ms: as in `TickEvent`.
        """
        clock, idle_ms = self.spec.clock, self.spec.idle_ms
        if clock is None or idle_ms is None:
            return
        for source in self._active_sources():
            since_ms = now_ms if source in unread else self._quiet_since_ms.get(source, now_ms)
            self._quiet_since_ms[source] = since_ms
            quiet_until_ms = min(now_ms, (empty_ms or {}).get(source, now_ms))
            if quiet_until_ms >= since_ms + idle_ms:
                idle_watermark_ms = clock.to_event_ms(quiet_until_ms - idle_ms) - self.spec.disorder_ms
                self._sources[source] = max(self._sources[source], idle_watermark_ms)
        self._update_watermark()

    def next_deadline(self) -> int | None:
        """Returns the wall time at which a tick may change the state, or None."""
        if self.spec.idle_ms is None or self.spec.clock is None:
            return None
        quiet, idle_ms = self._quiet_since_ms, self.spec.idle_ms
        return min((quiet[s] + idle_ms if s in quiet else 0 for s in self._active_sources()), default=None)

    def _active_sources(self) -> list[str]:
        return [source for source, watermark_ms in self._sources.items() if watermark_ms < MAX_TIME_MS]

    def _update_watermark(self) -> None:
        if self._sources:
            self._watermark_ms = max(self._watermark_ms, min(self._sources.values()))

    def to_state(self) -> dict[str, Any]:
        return {
            "records": self.records,
            "newest_ms": self.newest_ms,
            "latest_ms": self.latest_ms,
            "losses": [astuple(loss) for loss in self.losses],
            "sources": self._sources,
            "watermark_ms": self._watermark_ms,
            "quiet_since_ms": self._quiet_since_ms,
            "ahead": {source: ahead.to_state() for source, ahead in self.ahead.items() if len(ahead)},
            "delivered": {source: counts.to_state() for source, counts in self.delivered.items()},
            "replayable": sorted(self.replayable),
            "rejected": self.rejected,
            "first_rejected": self.first_rejected,
            "values": {
                source: {name: astuple(v) for name, v in values.items()} for source, values in self._values.items()
            },
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], spec: StreamSpec) -> StreamState:
        result = cls(spec)
        result.records, result.newest_ms = state["records"], state["newest_ms"]
        result._sources, result._quiet_since_ms = dict(state["sources"]), dict(state["quiet_since_ms"])
        result._watermark_ms = state["watermark_ms"]
        result.latest_ms = state["latest_ms"]
        result.losses = tuple(InputLoss(*loss) for loss in state["losses"])
        result.ahead = {source: AheadRecords.from_state(ahead) for source, ahead in state["ahead"].items()}
        result.delivered = {source: TimeCounts.from_state(c) for source, c in state["delivered"].items()}
        result.replayable = frozenset(state["replayable"])
        result.rejected, result.first_rejected = state["rejected"], state.get("first_rejected", {})
        for source, values in state["values"].items():
            result._values[source] = {n: ColumnValues(*v) for n, v in values.items() if n in spec.columns}
        return result


def add_loss(losses: tuple[InputLoss, ...], loss: InputLoss) -> tuple[InputLoss, ...]:
    """Adds a loss. It is united with the last loss, if source and reason are the same. Beyond `MAX_LOSSES`, the two
    oldest losses are united.
    """
    if losses and (losses[-1].source, losses[-1].reason) == (loss.source, loss.reason):
        return (*losses[:-1], losses[-1].union(loss))
    if len(losses) >= MAX_LOSSES:
        return (losses[0].union(losses[1]), *losses[2:], loss)
    return (*losses, loss)
