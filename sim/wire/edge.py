"""Simulates an edge of a wire simulation: it has the parts of the production agent, and a trace as its source."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge.core.core import EdgeCore
from edge.core.events import Ingested, SourceEnded, SourcesOpened, TickEvent
from edge.core.streams import StreamSpec
from edge.durability import DurableCore, JournalGroupCommit
from edge.read_pace import ReadPace
from edge.records import Chunk
from edge.sources.pacing import paced
from edge.uplink import LinkLimits, UplinkOutbox, Workload
from edge.uplink.uplink_session import Pacing, PendingTake, UplinkSession
from edgewater.base.streams import StreamClock
from edgewater.synopses import source_of
from sim.budgets.trace import Trace
from sim.wire.connection import Call

SOURCE = "trace"
TICK_S = 0.2  # limit: time of a simulation
LIVE_IDLE_MS = 10_000  # default: idle
"""The default of an edge's configuration."""
FOREVER_S = 86_400.0  # limit: longest virtual wait


@dataclass(frozen=True, slots=True)
class EdgeTimes:
    """Times of an edge's processor, measured on two cores.

    Attributes:
        batch_s: time of each batch of records, in the source, the journal and the query.
        record_s: time of each record.
        thread_s: time of each call in a thread, such as the fsync of the journal before a frame is sent.
    """

    batch_s: float = 0.004
    record_s: float = 3e-6
    thread_s: float = 0.02


class WireEdge:
    """One edge: `loops` are its tasks.

    Args:
        directory: the directory of the journal.
        call: the edge's end of the connection.
    """

    def __init__(
        self,
        number: int,
        part: Trace,
        stream: str,
        clock: StreamClock,
        directory: Path,
        call: Call,
        times: EdgeTimes,
        limits: LinkLimits,
        now_ms: Callable[[], int],
    ) -> None:
        self._loop, name = asyncio.get_running_loop(), f"edge{number}"
        self._part, self._stream, self._clock, self._times, self._now_ms = part, stream, clock, times, now_ms
        self._cpu_s, self._counted = 0.0, (0.0, 0.0)
        incarnation = f"{number:032x}"
        spec = StreamSpec(part.columns, clock, idle_ms=LIVE_IDLE_MS if clock.is_live else None)
        self._durable = DurableCore(
            directory, lambda: EdgeCore({stream: spec}, source_of(name, incarnation)), self._reread, incarnation
        )
        self._durable.begin_run(number + 1)
        self._durable.handle(SourcesOpened(((stream, SOURCE),), (SOURCE,)))
        self._commit = JournalGroupCommit(self._durable)
        self._outbox = UplinkOutbox(name, {}, self._durable, self._commit, now_ms)
        self._outbox.workload = Workload(self._busy_share)
        self._pace = ReadPace(self._durable.core)
        self._pending_take = PendingTake(self._outbox)
        self._session = UplinkSession(
            call,
            self._outbox,
            self._pending_take,
            Pacing(limits, now_ms, self._loop.time),
            limits=limits,
            silence_s=FOREVER_S,
            monotonic=self._loop.time,
        )

    def _busy_share(self) -> float:
        """Returns the processor's busy share since the last call."""
        (cpu_s, at_s), self._counted = self._counted, (self._cpu_s, self._loop.time())
        return min((self._cpu_s - cpu_s) / max(self._loop.time() - at_s, 1e-3), 1.0)

    def _reread(self, *_: Any) -> Any:
        raise AssertionError("nothing is recovered")

    def loops(self) -> list[Coroutine[Any, Any, None]]:
        """Returns the loops of the edge. Each runs until it is cancelled."""
        return [self._commit.run(), self._connect(), self._read(), self._tick()]

    async def _connect(self) -> None:
        try:
            await self._session.open()
            await self._session.run()
        finally:
            await self._pending_take.cancel()

    async def _read(self) -> None:
        await self._outbox.configured.wait()
        wait = lambda: round(1000 * self._pace.wait_s(self._stream, SOURCE))  # noqa: E731
        async for chunk in paced(self._chunks(), self._clock, now_ms=self._now_ms, interval_ms=wait):
            took_s = self._times.batch_s + self._times.record_s * chunk.batch.num_rows
            self._cpu_s += took_s
            await asyncio.sleep(took_s)
            event = Ingested(self._stream, SOURCE, chunk.batch, self._now_ms())
            assert chunk.end is not None
            self._durable.ingest_range(event, chunk.start, chunk.end)
            self._pace.count(self._stream, chunk.batch.num_rows)
            self._outbox.changed.set()
        self._durable.handle(SourceEnded(self._stream, SOURCE))
        self._outbox.changed.set()
        await asyncio.Event().wait()

    async def _chunks(self) -> AsyncIterator[Chunk]:
        batch = self._part.batch
        if batch.num_rows:
            end = {"offset": 1, "row": batch.num_rows}
            yield Chunk(SOURCE, batch, {"offset": 0, "row": 0}, end, (), batch.nbytes)

    async def _tick(self) -> None:
        await self._outbox.configured.wait()
        while True:
            now_ms = self._now_ms()
            due_ms = self._durable.core.next_deadline()
            if due_ms is not None and due_ms <= now_ms:
                self._durable.handle(TickEvent(now_ms))
                self._outbox.changed.set()
            await asyncio.sleep(TICK_S)
