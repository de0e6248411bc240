"""The state of a stream: its watermark, and the event times of its sources."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from edgewater.streams import LIVE, MAX_TIME_MS, MIN_TIME_MS, TIME_COLUMN, StreamClock


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """A stream of this edge.

    Attributes:
        columns: name -> Arrow type of a record's columns.
        clock: maps wall time to event time; None: records are read as fast as possible, without a clock.
        disorder_ms: the watermark lags this much behind the newest event time.
        idle_ms: the watermark of a source that has been silent for this long (wall time) follows the clock; None:
            never.
    """

    columns: Mapping[str, pa.DataType]
    clock: StreamClock | None = LIVE
    disorder_ms: int = 0
    idle_ms: int | None = None


class StreamState:
    """The watermark of a stream: the minimum over its sources; it never decreases.

    Attributes:
        records: number of records read.
        newest_ms: the newest event time.
    """

    def __init__(self, spec: StreamSpec) -> None:
        self.spec = spec
        self.records = 0
        self.newest_ms = MIN_TIME_MS
        self._sources: dict[str, int] = {}  # watermark of each source
        # Wall time since which a source may have been silent. Absent: no tick has seen the source yet.
        self._quiet_since_ms: dict[str, int] = {}
        self._watermark_ms = MIN_TIME_MS

    @property
    def watermark_ms(self) -> int:
        """Event time before which no more records are expected."""
        return self._watermark_ms

    def set_sources(self, sources: Iterable[str]) -> None:
        """Sets the sources of the stream, and restarts the idle rule: they were not read until now."""
        self._sources = {source: self._sources.get(source, MIN_TIME_MS) for source in sources}
        self._quiet_since_ms.clear()
        self._update_watermark()

    def advance(self, source: str, batch: pa.RecordBatch, arrival_ms: int) -> None:
        """Updates the watermark with a batch of a source."""
        if batch.num_rows:
            newest = int(np.max(batch.column(TIME_COLUMN).to_numpy()))
            if self.spec.clock is not None:
                # A device whose clock is ahead must not close windows for which others have records.
                newest = min(newest, self.spec.clock.to_event_ms(arrival_ms))
            self.newest_ms = max(self.newest_ms, newest)
            current = self._sources.get(source, MIN_TIME_MS)
            self._sources[source] = max(current, newest - self.spec.disorder_ms)
            self.records += batch.num_rows
        self._quiet_since_ms[source] = max(self._quiet_since_ms.get(source, 0), arrival_ms)
        self._update_watermark()

    def end(self, source: str) -> None:
        self._sources[source] = MAX_TIME_MS
        self._update_watermark()

    def tick(self, now_ms: int, unread: Collection[str] = ()) -> None:
        """Applies the idle rule: the watermark of an idle source follows the stream's clock.

        Args:
            unread: the sources that could not be read until now; they are not idle.
        """
        clock, idle_ms = self.spec.clock, self.spec.idle_ms
        if clock is None or idle_ms is None:
            return
        idle_watermark_ms = clock.to_event_ms(now_ms - idle_ms) - self.spec.disorder_ms
        for source in self._active_sources():
            since_ms = now_ms if source in unread else self._quiet_since_ms.get(source, now_ms)
            self._quiet_since_ms[source] = since_ms
            if now_ms >= since_ms + idle_ms:
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
            "sources": self._sources,
            "watermark_ms": self._watermark_ms,
            "quiet_since_ms": self._quiet_since_ms,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], spec: StreamSpec) -> StreamState:
        result = cls(spec)
        result.records, result.newest_ms = state["records"], state["newest_ms"]
        result._sources, result._quiet_since_ms = dict(state["sources"]), dict(state["quiet_since_ms"])
        result._watermark_ms = state["watermark_ms"]
        return result
