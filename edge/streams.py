"""What the core knows of a stream: its columns, its clock, and how far event time has come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from edgewater.streams import END_OF_TIME_MS, LIVE, NEVER_MS, TIME_COLUMN, StreamClock


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """A stream that this edge serves.

    Attributes:
        columns: name -> Arrow type of a record's columns.
        clock: how event time runs against wall time; None: as fast as records come, without a clock.
        disorder_ms: how far behind the newest event time records may come and still be punctual.
        idle_ms: without records for this long (wall), the watermark follows the clock; None: never.
    """

    columns: Mapping[str, pa.DataType]
    clock: StreamClock | None = LIVE
    disorder_ms: int = 0
    idle_ms: int | None = None


class StreamState:
    """The watermark of a stream: the least over its sources, and never going back."""

    def __init__(self, spec: StreamSpec) -> None:
        self.spec = spec
        self.records = 0
        self.newest_ms = NEVER_MS
        self._sources: dict[str, int] = {}
        self._watermark_ms = NEVER_MS
        self._last_arrival_ms: int | None = None

    @property
    def watermark_ms(self) -> int:
        """Event time before which no more records are expected."""
        return self._watermark_ms

    def open(self, source: str) -> None:
        self._sources.setdefault(source, NEVER_MS)
        self._settle()

    def advance(self, source: str, batch: pa.RecordBatch, arrival_ms: int) -> None:
        """Takes note of a batch from a source."""
        if batch.num_rows:
            newest = int(np.max(batch.column(TIME_COLUMN).to_numpy()))
            self.newest_ms = max(self.newest_ms, newest)
            held = self._sources.get(source, NEVER_MS)
            self._sources[source] = max(held, newest - self.spec.disorder_ms)
            self.records += batch.num_rows
        self._last_arrival_ms = max(self._last_arrival_ms or 0, arrival_ms)
        self._settle()

    def end(self, source: str) -> None:
        self._sources[source] = END_OF_TIME_MS
        self._settle()

    def tick(self, now_ms: int) -> None:
        """The idle rule: a quiet stream's watermark follows its clock."""
        if self._last_arrival_ms is None:
            self._last_arrival_ms = now_ms
        due = self._idle_from()
        if due is None or self.spec.clock is None or now_ms < due:
            return
        follows = self.spec.clock.to_event_ms(now_ms - (self.spec.idle_ms or 0)) - self.spec.disorder_ms
        self._sources = {s: max(held, follows) for s, held in self._sources.items()}
        self._settle()

    def _idle_from(self) -> int | None:
        if self.spec.idle_ms is None or self.spec.clock is None or self._last_arrival_ms is None:
            return None
        if not self._sources or self._watermark_ms >= END_OF_TIME_MS:
            return None
        return self._last_arrival_ms + self.spec.idle_ms

    def next_deadline(self) -> int | None:
        """Wall time at which a tick may move the watermark."""
        if self._last_arrival_ms is None and self.spec.idle_ms is not None:
            return 0
        return self._idle_from()

    def _settle(self) -> None:
        if self._sources:
            self._watermark_ms = max(self._watermark_ms, min(self._sources.values()))

    def snapshot(self) -> dict[str, object]:
        return {
            "records": self.records,
            "newest_ms": self.newest_ms,
            "sources": self._sources,
            "watermark_ms": self._watermark_ms,
            "last_arrival_ms": self._last_arrival_ms,
        }

    def restore(self, state: Mapping[str, object]) -> None:
        sources = state["sources"]
        last = state["last_arrival_ms"]
        assert isinstance(sources, dict)
        self.records = int(str(state["records"]))
        self.newest_ms = int(str(state["newest_ms"]))
        self._sources = {str(k): int(v) for k, v in sources.items()}
        self._watermark_ms = int(str(state["watermark_ms"]))
        self._last_arrival_ms = None if last is None else int(str(last))
