"""What the core knows of a stream: its columns, its clock, and how far event time has come."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from edgewater.streams import LIVE, MAX_TIME_MS, MIN_TIME_MS, TIME_COLUMN, StreamClock


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """A stream that this edge serves.

    Attributes:
        columns: name -> Arrow type of a record's columns.
        clock: how event time runs against wall time; None: as fast as records come, without a clock.
        disorder_ms: how far behind the newest event time records may come and still be punctual.
        idle_ms: a source that has given nothing for this long (wall) follows the clock; None: never.
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
        self.newest_ms = MIN_TIME_MS
        self._sources: dict[str, int] = {}
        # Wall time since which a source may have been silent. Absent: nobody has looked yet.
        self._quiet_since_ms: dict[str, int] = {}
        self._watermark_ms = MIN_TIME_MS

    @property
    def watermark_ms(self) -> int:
        """Event time before which no more records are expected."""
        return self._watermark_ms

    def open_only(self, sources: Iterable[str]) -> None:
        """These are the sources from now on. What came while nobody read them is no silence of theirs."""
        self._sources = {source: self._sources.get(source, MIN_TIME_MS) for source in sources}
        self._quiet_since_ms.clear()
        self._settle()

    def advance(self, source: str, batch: pa.RecordBatch, arrival_ms: int) -> None:
        """Takes note of a batch from a source."""
        if batch.num_rows:
            newest = int(np.max(batch.column(TIME_COLUMN).to_numpy()))
            if self.spec.clock is not None:
                # A device whose clock is ahead must not close windows that others have records for.
                newest = min(newest, self.spec.clock.to_event_ms(arrival_ms))
            self.newest_ms = max(self.newest_ms, newest)
            held = self._sources.get(source, MIN_TIME_MS)
            self._sources[source] = max(held, newest - self.spec.disorder_ms)
            self.records += batch.num_rows
        self._quiet_since_ms[source] = max(self._quiet_since_ms.get(source, 0), arrival_ms)
        self._settle()

    def end(self, source: str) -> None:
        self._sources[source] = MAX_TIME_MS
        self._settle()

    def tick(self, now_ms: int, unread: Collection[str] = ()) -> None:
        """The idle rule: a quiet source's watermark follows the stream's clock.

        Args:
            unread: sources that could not be read until now. Of them nothing is known, so none is quiet.
        """
        clock, idle_ms = self.spec.clock, self.spec.idle_ms
        if clock is None or idle_ms is None:
            return
        follows = clock.to_event_ms(now_ms - idle_ms) - self.spec.disorder_ms
        for source in self._running():
            since_ms = now_ms if source in unread else self._quiet_since_ms.get(source, now_ms)
            self._quiet_since_ms[source] = since_ms
            if now_ms >= since_ms + idle_ms:
                self._sources[source] = max(self._sources[source], follows)
        self._settle()

    def next_deadline(self) -> int | None:
        """Wall time at which a tick may move the watermark, or has to look at a source first."""
        if self.spec.idle_ms is None or self.spec.clock is None:
            return None
        known = self._quiet_since_ms
        return min((known[s] + self.spec.idle_ms if s in known else 0 for s in self._running()), default=None)

    def _running(self) -> list[str]:
        return [source for source, held in self._sources.items() if held < MAX_TIME_MS]

    def _settle(self) -> None:
        if self._sources:
            self._watermark_ms = max(self._watermark_ms, min(self._sources.values()))

    def snapshot(self) -> dict[str, object]:
        return {
            "records": self.records,
            "newest_ms": self.newest_ms,
            "sources": self._sources,
            "watermark_ms": self._watermark_ms,
            "quiet_since_ms": self._quiet_since_ms,
        }

    def restore(self, state: Mapping[str, object]) -> None:
        sources, quiet = state["sources"], state["quiet_since_ms"]
        assert isinstance(sources, dict) and isinstance(quiet, dict)
        self.records = int(str(state["records"]))
        self.newest_ms = int(str(state["newest_ms"]))
        self._sources = {str(k): int(v) for k, v in sources.items()}
        self._watermark_ms = int(str(state["watermark_ms"]))
        self._quiet_since_ms = {str(k): int(v) for k, v in quiet.items()}
