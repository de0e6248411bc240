"""The programs of a world: production code, started as its own shell starts it, on virtual machines."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.streaming.datasource import ReadMaxRows

import edge.agent
from center.catalog import Catalog
from center.ingest.gateway import Gateway, GatewayConfig
from center.job.frame_source import FrameReader, SourceOptions
from center.job.leadership import Leadership
from center.job.ledger_writer import CatalogEvents, LedgerWriter
from center.job.metrics import JobMetrics
from center.job.microbatch import BatchProcessor
from center.ledger import Ledger
from center.results import LeaseLost, ResultStore
from center.storage.frame_log import FrameLog
from edge.config import parse_config
from edge.core import EdgeCore, Effect, Event, Ingested, SliceMemoryLimits
from edge.records import Chunk, Position, PushId, Rejection, Rejections
from edge.sources.http import http_source_name
from edgewater.model.errors import OutdatedState, StorageError
from edgewater.model.streams import TIME_COLUMN, Delivery, EdgeId
from edgewater.wire import QueryRef
from tests.simulation.scenario import COLUMN_NAMES, COLUMNS, STREAM, WRONG_TYPE, EdgePlan
from tests.simulation.virtual import Process

FILE = f"{STREAM}:file:log.ndjson"
PUSH_RETRY_S = 0.3
PUSH_ATTEMPTS = 40
JOB_POLL_S = 0.5
LEASE_POLL_S = 0.5
AHEAD = 2
"""Batches that have been read and not applied."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What the core's rules are about one record of one query.

    Attributes:
        watermark_ms: of the stream, when the record was ingested.
    """

    before_query: bool
    too_late: bool
    late: bool
    watermark_ms: int


class Disk:
    """The records of one edge: a file that grows as its records are written, or what its clients push.

    Attributes:
        accepted: per id of a pushed record, whether a positive reply was received; absent: it was never ingested.
        seen: per record id and query that ran, by which rule the core counted the record when it last ingested it.
        came_ms: per record id, the watermark of the stream when the core last ingested it.
        watermark_ms: of the stream, at the last event of the core; None: there was none.
    """

    def __init__(self, plan: EdgePlan) -> None:
        self.plan = plan
        rows = plan.records
        columns = {name: pa.array([r.values.get(name) for r in rows], t) for name, t in COLUMNS.items()}
        self.batch = pa.record_batch({**columns, TIME_COLUMN: pa.array([r.event_ms for r in rows], pa.int64())})
        self.accepted: dict[int, bool] = {}
        self.seen: dict[int, dict[QueryRef, Rule]] = {}
        self.came_ms: dict[int, int] = {}
        self.watermark_ms: int | None = None

    def read(self, row: int, end: int) -> tuple[pa.RecordBatch, tuple[Rejection, ...]]:
        """The valid records of these rows, and the others as a decoder rejects them."""
        rows, rejections = self.plan.records[row:end], Rejections()
        batch = self.batch.slice(row, end - row).filter(pa.array([r.rejected is None for r in rows], pa.bool_()))
        for record in rows:
            if record.rejected is not None:
                rejections.add(record.rejected, "", "")
                if record.rejected is WRONG_TYPE:
                    rejections.add_times(record.rejected, np.array([record.event_ms]))
        rejections.place(0, 1 << 62, batch.column(TIME_COLUMN).to_numpy())
        return batch, rejections.as_tuple()

    def written(self, at_s: float) -> int:
        return sum(r.at_s <= at_s for r in self.plan.records)


class FollowedFile:
    """A `Source` over a file that grows; it ends when its writer has ended."""

    replayable = True
    delivery = Delivery.EXACTLY_ONCE

    def __init__(self, disk: Disk, process: Process, idle: Callable[[str], AbstractContextManager[None]]) -> None:
        self.name, self.stream = FILE, STREAM
        self._disk, self._process, self._idle = disk, process, idle

    async def chunks(self, position: Position | None) -> AsyncIterator[Chunk]:
        loop, row = self._process.loop, position["row"] if position else 0
        total = self._disk.batch.num_rows
        while row < total:
            written = self._disk.written(loop.time())
            if row >= written:
                with self._idle(self.name):
                    await asyncio.sleep(max(0.01, self._disk.plan.records[row].at_s - loop.time()))
                continue
            end = min(written, row + self._process.rng.choice((1, 5, 1000)))
            yield self._chunk(row, end)
            row = end

    async def backfill(self, position: Position | None, until: Position, since_ms: int) -> AsyncGenerator[Chunk]:
        row = position["row"] if position else 0
        while row < until["row"]:
            end = min(until["row"], row + self._process.rng.choice((1, 5, 1000)))
            yield self._chunk(row, end)
            row = end
            await asyncio.sleep(0)

    def _chunk(self, row: int, end: int) -> Chunk:
        batch, rejected = self._disk.read(row, end)
        return Chunk(self.name, batch, {"row": row}, {"row": end}, rejected, 100 * (end - row))

    def reread(self, start: Position | None, end: Position) -> Chunk:
        return self._chunk(start["row"] if start else 0, end["row"])

    def fingerprints(self, position: Position, most: int) -> tuple[int, ...]:
        return ()


def observed_core(disk: Disk) -> type[EdgeCore]:
    """The production core; it also notes by which rule it counts each record."""

    class ObservedCore(EdgeCore):
        def handle(self, event: Event) -> list[Effect]:
            if isinstance(event, Ingested):
                watermark_ms = self.streams[event.stream].watermark_ms
                times = event.batch.column(TIME_COLUMN).to_pylist()
                ids = event.batch.column("id").to_pylist()
                for time, number in zip(times, ids, strict=True):
                    disk.came_ms[number] = watermark_ms
                    disk.seen[number] = {
                        ref: self._rule(pipeline.spec.window, pipeline, time, watermark_ms)
                        for ref, pipeline in self.queries.items()
                    }
            effects = super().handle(event)
            if STREAM in self.streams:
                disk.watermark_ms = self.streams[STREAM].watermark_ms
            return effects

        @staticmethod
        def _rule(window: Any, pipeline: Any, time: int, watermark_ms: int) -> Rule:
            start = window.slice_start(time)
            too_late = window.last_window_end(start) + pipeline.spec.lateness_ms <= watermark_ms
            return Rule(
                start < pipeline.store.since_ms, too_late, start + window.slice_ms <= watermark_ms, watermark_ms
            )

    return ObservedCore


class EdgeProgram:
    """`edge.agent`, without its HTTP server: pushes call what the server calls."""

    def __init__(self, process: Process, disk: Disk, state_dir: Path) -> None:
        self.process, self.disk = process, disk
        plan = disk.plan
        source: dict[str, Any] = {"http": {}} if plan.pushed else {"file": {"path": "log.ndjson"}}
        stream: dict[str, Any] = {"columns": COLUMN_NAMES, "time": {"column": "t"}, "sources": [source]}
        stream |= {"disorder": f"{plan.disorder_ms}ms", "idle": None if plan.idle_ms is None else f"{plan.idle_ms}ms"}
        stream |= {"constants": {} if plan.constant is None else {"k": plan.constant}}
        config = {"edge": plan.name, "state_dir": str(state_dir), "streams": {STREAM: stream}}
        self.agent = edge.agent.open_agent(parse_config({**config, "limits": {"checkpoint": "3s"}}))
        if plan.memory is not None:  # far below what a configuration may say
            self.agent.durable._memory = SliceMemoryLimits(*plan.memory)
        for loop in self.agent.loops().values():
            process.spawn(self._until_outdated(loop), plan.name)

    async def _until_outdated(self, loop: Coroutine[Any, Any, None]) -> None:
        """As `edgewater edge run`: an outdated state ends the agent, and the next one is a new incarnation."""
        try:
            await loop
        except OutdatedState:
            await self.agent.commit.checkpoint()
            edge.agent.begin_anew(self.agent)
            self.process.kill("begins anew")

    async def push(self, row: int) -> None:
        """Pushes a record; no reply if the process is killed meanwhile."""
        agent, name = self.agent, http_source_name(STREAM)
        batch, rejected = self.disk.read(row, row + 1)
        push = PushId(*2 * (row.to_bytes(16, "little"),))
        await agent.accept(Chunk(name, batch, None, None, rejected, 100, push=push), STREAM)
        self.disk.accepted[self.disk.batch.column("id")[row].as_py()] = True

    def close(self) -> None:
        self.agent.durable.close()


class GatewayProgram:
    """`center.ingest`, with a virtual server in the place of gRPC's."""

    def __init__(self, process: Process, directory: Path) -> None:
        self.process = process
        self.catalog = Catalog(f"sqlite:///{directory}/catalog.db")
        config = GatewayConfig(poll_ms=500, heartbeat_ms=1000)
        self._log = FrameLog(directory / "log")
        self.gateway = Gateway(self.catalog, self._log, config, process.now_ms)
        process.spawn(self._start(), "gateway")

    async def _start(self) -> None:
        while True:
            try:
                await self.gateway.start("127.0.0.1:0")
                return
            except StorageError:
                await asyncio.sleep(0.5)

    def serves(self, edge: str) -> bool:
        """Returns whether the gateway has a session with the edge."""
        return self.process.alive and EdgeId(edge) in self.gateway._sessions

    def close(self) -> None:
        self.catalog.close()


class _Table:
    """What `foreachBatch` gets: the rows of a micro-batch."""

    def __init__(self, batches: Sequence[pa.RecordBatch]) -> None:
        self._batches = batches

    def toArrow(self) -> pa.Table:  # noqa: N802  (Spark's name)
        return pa.Table.from_batches(self._batches)


class JobProgram:
    """`center.job` without Spark: its source, its processor and its deadlines, called as Spark calls them.

    One of several drivers leads by a lease; a single one needs none.
    """

    def __init__(self, process: Process, directory: Path, repeats: float, drivers: int) -> None:
        self.process, self._repeats = process, repeats
        url = f"sqlite:///{directory}/catalog.db"
        self.catalog, self.store = Catalog(url), ResultStore(f"sqlite:///{directory}/results.db")
        metrics, self.ledger = JobMetrics(), Ledger(margin_ms=50)
        self.store.load_ledger(self.ledger)
        self._writer = LedgerWriter(
            self.ledger,
            self.store,
            CatalogEvents(self.catalog, lambda: self.store.partition),
            metrics,
            now_ms=process.now_ms,
        )
        self._processor = BatchProcessor(
            self._writer, self.catalog, metrics, directory / "log", now_ms=process.now_ms,
            monotonic=process.monotonic, margin_ms=50,
        )  # fmt: skip
        self._leads_file = directory / f"leads-{process.name}"
        self._leads_file.unlink(missing_ok=True)
        self._options = SourceOptions(
            url, f"sqlite:///{directory}/results.db", str(directory / "log"), retention_every_ms=4000,
            leads=str(self._leads_file) if drivers > 1 else "",
        )  # fmt: skip
        self._leadership: Leadership | None = None
        if drivers > 1:
            self._leadership = Leadership(
                self.store, metrics, now_ms=process.now_ms, monotonic=process.monotonic, began=self._begin_term,
                drivers=drivers, owner=f"{process.name}:{process.now_ms()}|||",
            )  # fmt: skip
            process.spawn(self._lead(), "leadership")
        process.spawn(self._deadlines(), "deadlines")
        process.spawn(self._stream(), "stream")

    def _begin_term(self) -> None:
        self._processor.begin_term()
        self._writer.begin_term()
        self._leads_file.write_text(str(self.store.partition))

    async def _lead(self) -> None:
        while True:
            await asyncio.to_thread(self._look_at_lease)
            await asyncio.sleep(LEASE_POLL_S)

    def _look_at_lease(self) -> None:
        assert self._leadership is not None
        self._leadership.step()
        if not self.leads:
            self._leads_file.unlink(missing_ok=True)
        self.process.step("lease")

    @property
    def leads(self) -> bool:
        return self._leadership is None or self._leadership.leads.is_set()

    async def _deadlines(self) -> None:
        while True:
            if not self.leads:
                await asyncio.sleep(JOB_POLL_S)
                continue
            await asyncio.to_thread(self._advance)
            due_ms = self.ledger.next_deadline()
            pause_s = JOB_POLL_S if due_ms is None else (due_ms - self.process.now_ms()) / 1000
            await asyncio.sleep(min(max(pause_s, 0.005), JOB_POLL_S))

    def _advance(self) -> None:
        with contextlib.suppress(LeaseLost):  # as in `DeadlineThread`
            self._writer.advance()
        self.process.step("advanced")

    async def _stream(self) -> None:
        """Micro-batches as `BatchPipeline` has them: up to two have been read when the first of them is applied. A
        stream that fails begins again where the store is."""
        reader, batch_id = FrameReader(self._options), 0
        reader._catalog, reader._store = self.catalog, self.store  # type: ignore[misc]  # one process, one connection
        begin = reader.initialOffset()
        ahead: deque[list[pa.RecordBatch]] = deque()
        while True:
            await asyncio.sleep(self.process.rng.uniform(0.02, JOB_POLL_S))
            end = begin
            if self.leads and len(ahead) < AHEAD:
                reader.prepareForTriggerAvailableNow()
                end = reader.latestOffset(begin, ReadMaxRows(self.process.rng.choice((1, 3, 1000))))
            if end != begin:
                ahead.append(await asyncio.to_thread(self._read, reader, begin, end))
                reader.commit(end)  # for Spark it is done
                begin = end
                if self.process.rng.random() < 0.5:
                    continue
            if not ahead:
                continue
            batch_id += 1
            try:
                parts = ahead.popleft()
                await asyncio.to_thread(self._process, parts, batch_id)
                if self.process.rng.random() < self._repeats:
                    await asyncio.to_thread(self._process, parts, batch_id)
            except Exception as exc:
                cause = self._processor.failure or exc
                if not isinstance(cause, StorageError | LeaseLost):
                    self.process.report_failure(cause)
                ahead.clear()
                begin = reader.initialOffset()
                continue
            for frame in self.catalog.quarantine.frames():  # the frames here are all good
                self.process.report_failure(RuntimeError(f"{frame.key}, frame {frame.entry.position}: {frame.reason}"))

    def _read(self, reader: FrameReader, begin: dict[str, int], end: dict[str, int]) -> list[pa.RecordBatch]:
        return [b for part in reader.partitions(begin, end) for b in reader.read(part)]

    def _process(self, parts: list[pa.RecordBatch], batch_id: int) -> None:
        if parts:
            self._processor(_Table(parts), batch_id)
        self.process.step("applied")

    def close(self) -> None:
        self.store.close()
        self.catalog.close()
