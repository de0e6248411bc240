"""The agent: connects sources, the wall clock, the network and signals to `DurableCore`.

It runs one event loop. Reading, decoding and fsync run in threads; every access to the core happens
on the loop, one event at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import uvicorn
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Scope

from edge import metrics
from edge.backfill import BackfillRunner
from edge.config import EdgeConfig, HttpTlsConfig, StreamConfig, TlsConfig
from edge.core import EdgeCore, Ingested, InputLost, MemoryLimits, SourceEnded, SourcesOpened, StreamSpec, TickEvent
from edge.durability import DurableCore, JournalGroupCommit, QuotaFile, Reread, load_identity
from edge.process import now_ms
from edge.records import Chunk, Position, Source
from edge.source_kinds import KeptSource
from edge.source_status import SourceStates, SourceStatus
from edge.sources import (
    GrpcReceivers,
    PushEndpoint,
    Unavailable,
    build_sources,
    package_receivers,
    problem,
    push_endpoint,
    replay_clock,
)
from edge.sources.lookups import StreamLookups, joined, open_lookups
from edge.tap import StreamTap, tap_routes
from edge.uplink import DailyQuota, Input, LinkLimits, TlsFiles, Uplink, UplinkOutbox
from edge.utilization import BusyMeter
from edge.worker import OFF, QUEUE_SHARE, Worker
from edgewater.model.errors import InvalidConfig, InvalidInput, Retired, StorageError
from edgewater.model.streams import Delivery, StreamClock, weaker_than_exactly_once
from edgewater.runtime.allocator import release_free_memory
from edgewater.runtime.connections import ConnectionLimits, guarded
from edgewater.runtime.health import EmbeddedServer, health_routes, listen
from edgewater.runtime.host_check import LocalHosts
from edgewater.synopses import source_of
from edgewater.wire import LossReason

log = logging.getLogger(__name__)

MAX_UNSYNCED_BYTES = 8 << 20
MAX_UNSYNCED_UNREPEATABLE_BYTES = 1 << 20
SYNC_S = 0.05
"""Journal records of a source that cannot be read again are synced after this time: a crash loses no more."""
GONE_CHECKPOINT_S = 0.1
"""Time between a source's report that its input is gone and the checkpoint, which then covers other reports. Longer if
checkpoints take long."""
TICK_MIN_S = 0.2
BACKPRESSURE_POLL_S = 0.05
SOURCE_RETRY_S = 5.0
STOP_GRACE_S = 2
"""How long requests in progress may take once the agent is told to stop."""
UNREAD_INPUT_S = 0.1
"""A source that has not been idle for longer than this may have unread input. Input that is read sooner is late by at
most about this much, which is within the usual lateness of records."""
LIMITS = ConnectionLimits()
RETIRED = "retired: the center has retired this edge; an admin of the center can reinstate it, then restart the agent"
LONG_BACKPRESSURE_MS = 500
"""After a longer backpressured wait the idle rule restarts for the source: records may have queued up in it."""
INPUTS_EVERY_S = 5.0
MAX_FINGERPRINTS = 64
"""Fingerprints of files that an edge reports, over all sources."""
LONG_PAUSE_MS = 500
"""After a longer time in which the agent did not run, the idle rule restarts for all sources, for the same reason."""


@dataclass(slots=True)
class Agent:
    """An edge agent. Build it with `open_agent`, then `await run(stop)`.

    Attributes:
        skipped: values that are no records although nothing is wrong with them, by (stream, reason).
        refused: pushed requests that were refused and connections that were closed, by reason.
        failing: per source whose last read failed, the message and the monotonic time of the failure in seconds.
        backpressured: names of the sources that wait for memory or the disk.
        lookups: by stream, for streams that have any.
    """

    config: EdgeConfig
    durable: DurableCore
    sources: list[Source]
    commit: JournalGroupCommit
    outbox: UplinkOutbox
    uplink: Uplink
    meter: BusyMeter
    backfills: BackfillRunner
    tap: StreamTap
    worker: Worker
    states: SourceStates
    daily_quota: DailyQuota | None = None
    skipped: dict[tuple[str, str], int] = field(default_factory=dict)
    lookups: dict[str, StreamLookups] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    failing: dict[str, tuple[str, float]] = field(default_factory=dict)
    backpressured: set[str] = field(default_factory=set)
    _unsynced: asyncio.Event = field(default_factory=asyncio.Event)
    _input_gone: asyncio.Event = field(default_factory=asyncio.Event)
    _reading: asyncio.TaskGroup | None = None
    _uncommitted: dict[str, Position] = field(default_factory=dict)

    async def run(self, stop: asyncio.Event) -> None:
        """Runs until `stop` is set or a task fails; then writes a checkpoint.

        Raises:
            InvalidConfig: the agent cannot listen on an address of `http`, or `http.tls` cannot be used.
            OutdatedState: the center knows a newer version of the state, or another one: see `begin_anew`.
        """
        http = self.config.http
        health, endpoint = self._health_routes(), self._endpoint()
        push = endpoint.routes + tap_routes(self.config, self.tap) + ([] if http.metrics else health)
        guard = Middleware(LocalHosts, hosts=http.hosts, key="http.hosts", refuse=self._misdirected)
        apps = [(http.listen, "http.listen", Starlette(False, push, [] if http.authenticates else [guard]), http.tls)]
        if http.metrics is not None:
            apps.append((http.metrics, "http.metrics", Starlette(False, health), None))
        with contextlib.ExitStack() as sockets:
            listening = [sockets.enter_context(listen(address, field)) for address, field, _, _ in apps]
            servers = [_server(app, tls, self._count_refused) for _, _, app, tls in apps]
            rpc = [GrpcReceivers(endpoint, http.grpc, http.tls)] if http.grpc is not None else []
            serving = [
                asyncio.create_task(server.serve([socket])) for server, socket in zip(servers, listening, strict=True)
            ]
            await self._run(servers, serving, rpc, stop)

    async def _run(
        self,
        servers: list[EmbeddedServer],
        serving: list[asyncio.Task[None]],
        rpc: list[GrpcReceivers],
        stop: asyncio.Event,
    ) -> None:
        for each in rpc:
            await each.start()
        tasks = [asyncio.create_task(loop) for loop in self.loops()]
        stopping = asyncio.create_task(stop.wait())
        try:
            await self._first_failure([*tasks, *serving], stopping)
        finally:
            # A push whose records have been ingested must be answered, or its client sends them again.
            for server in servers:
                server.should_exit = True
            stopped = [each.stop(STOP_GRACE_S) for each in rpc]
            await asyncio.gather(asyncio.wait(serving, timeout=2 * STOP_GRACE_S), *stopped)
            for server in servers:
                server.force_exit = True
            for task in [*tasks, stopping]:
                task.cancel()
            await asyncio.gather(*tasks, stopping, *serving, return_exceptions=True)
            await self.commit.checkpoint()
            self.durable.close()
            if self.daily_quota is not None:
                with contextlib.suppress(StorageError):  # the file then keeps the reserved, larger number
                    self.daily_quota.close()

    def loops(self) -> list[Coroutine[Any, Any, None]]:
        """Returns everything that runs but the HTTP server; each runs until cancelled."""
        return [
            self.commit.run(), self._connect(), self._tick(), self._sync(), self._checkpoint(), self._read_all(),
            self.backfills.run(), self.worker.run(), self._fingerprint_inputs(),
            *(lookups.run() for lookups in self.lookups.values()),
        ]  # fmt: skip

    async def _connect(self) -> None:
        await self.commit.durable()  # the center stores the number of this process, so the state must have it
        await self.uplink.run()

    async def _first_failure(self, tasks: list[asyncio.Task[None]], stopping: asyncio.Task[bool]) -> None:
        waiting: set[asyncio.Task[None] | asyncio.Task[bool]] = {*tasks, stopping}
        while not stopping.done():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    def _health_routes(self) -> list[Route]:
        registry = CollectorRegistry()
        registry.register(
            metrics.EdgeCollector(
                self.durable, self._gauges, self.source_statuses, self.outbox.refused_frames, self.refused,
                self.worker.loads, self.skipped,
            )
        )  # fmt: skip
        registry.register(metrics.LookupCollector(self.lookups.values()))

        async def sources(_: Request) -> Response:
            return JSONResponse({"sources": [status.to_json() for status in self.source_statuses()]})

        return [*health_routes(registry, self.missing), Route("/v1/sources", sources)]

    def source_statuses(self) -> list[SourceStatus]:
        """Returns how each entry of ``sources`` stands."""
        streams = self.durable.core.streams
        return self.states.statuses(
            self._failures(), self.durable.state.positions, lambda source: streams[source.stream].is_open(source.name)
        )

    def _endpoint(self) -> PushEndpoint:
        return push_endpoint(
            self.config, self.accept, self.unavailable, now_ms, self.meter.busy, self.meter.on_refused,
            self._count_refused, self.durable.state.series_of, self._count_skipped,
            package_receivers(self.config, now_ms),
        )  # fmt: skip

    def _misdirected(self, _: Scope, detail: str) -> Response:
        self._count_refused("host")
        return problem(421, "misdirected", detail)

    def _gauges(self) -> dict[str, tuple[str, float]]:
        core = self.durable.core
        return {
            "connected": ("1 while the agent is connected to the center.", float(self.uplink.connected)),
            "backlog_bytes": ("Bytes of frames the center has not acknowledged.", core.unacked_bytes),
            "pending_bytes": ("Memory held for groups and frames.", core.pending_bytes),
            "queued_bytes": ("Memory of batches that not all queries have processed.", core.queued_bytes),
            "journal_bytes": ("Size of the current journal.", self.durable.journal_bytes),
            "bandwidth_bytes_per_second": ("Measured bandwidth to the center.", self.outbox.bandwidth_bytes_s),
            "rtt_seconds": ("Measured round-trip time.", self.outbox.rtt_ms / 1000),
            "queries": ("Number of queries.", len(core.queries)),
            "limited_queries": (
                "Queries of which open windows take no more records, for lack of memory.",
                sum(bool(p.store.full) for p in core.queries.values()),
            ),
            "cumulative_series": (
                "Cumulative series whose last point is remembered.",
                sum(map(len, self.durable.state.series.values())),
            ),
            "retired": ("1 once the center has retired this edge.", float(self.uplink.retired.is_set())),
            "backfill_records": (
                "Records that backfills of queries have not read again yet.",
                sum(p.backfill.unread_records for p in core.queries.values() if p.backfill is not None),
            ),
            "clock_step_seconds": ("Step of the system's clock that is not followed yet.", now_ms.step_s),
            "refused_costs": (
                "Costs of queries that the center has stated and that cannot be right: the last one stays.",
                self.outbox.refused_costs,
            ),
            "failing_sources": ("Sources that cannot be read at the moment; /readyz says why.", len(self._failures())),
            "busy_share": ("Fraction of time the busiest source is busy.", self.meter.recent_busy_share),
        }

    def missing(self) -> list[str]:
        """Returns the reasons why this edge is not ready: its own, and the sources that cannot be read."""
        return self._own_reasons() + [f"source {name}: {message}" for name, message in self._failures().items()]

    def _own_reasons(self) -> list[str]:
        """Returns the reasons why this edge cannot accept records."""
        reasons = []
        if self.uplink.retired.is_set():
            reasons.append(RETIRED)
        if not self.outbox.configured.is_set():
            reasons.append("queries: none received yet; the center has not been reached since this state was created")
        if self.commit.failure is not None:
            reasons.append(f"journal: {self.commit.failure}")
        return reasons

    def _failures(self) -> dict[str, str]:
        """Returns the error message of each source that currently cannot be read, by source name."""
        for name, (_, at_s) in list(self.failing.items()):
            if self.meter.empty_for_s(name) < time.monotonic() - at_s:  # it has found that there is nothing to read
                self._end_failure(name)
        return {name: message for name, (message, _) in self.failing.items()}

    def _end_failure(self, source: str) -> None:
        if self.failing.pop(source, None) is not None:
            log.info("source %s can be read again", source)

    def unavailable(self) -> Unavailable | Retired | None:
        """Returns why a pushed request cannot be accepted, or None."""
        if self.uplink.retired.is_set():
            return Retired(RETIRED)
        if reasons := self._own_reasons():
            return Unavailable("; ".join(reasons), retry_after_s=1)
        if self._over_memory_limit():
            return Unavailable("the edge has reached limits.max_pending_bytes", retry_after_s=1)
        if not self.worker.pace.has_room.is_set():
            return Unavailable("the queries of the edge have not processed earlier records yet", retry_after_s=1)
        return None

    def _over_memory_limit(self) -> bool:
        return self.durable.core.pending_bytes > self.config.limits.max_pending_bytes

    async def accept(self, chunk: Chunk, stream: str) -> int | None:
        """Ingests a pushed chunk, unless its batch was counted before; returns when the batch is durable.

        Returns: the number of records, if the batch was counted before; None: it is new.

        Raises:
            Retired: the edge has been retired.
            InvalidRequest: the client has used its idempotency key for another body.
            StorageError: the journal cannot be written, or a lookup of the stream is not loaded yet.
        """
        if self.uplink.retired.is_set():
            raise Retired(RETIRED)
        arrival_ms, durable = now_ms(), self.durable
        counted = None if chunk.push is None else durable.state.pushes.records_of(chunk.push, arrival_ms)
        if counted is not None:
            durable.state.pushes.repeated += 1
            await self.commit.durable()  # the batch's first push may still wait for the journal
            return counted
        if stream in self.lookups:
            chunk = self.lookups[stream].joined(chunk)
        self.tap.offer(stream, chunk)
        self.states.count(chunk.source, chunk)
        if chunk.batch.num_rows or chunk.rejected or chunk.series is not None:
            with self.meter.busy(chunk.source):
                event = Ingested(stream, chunk.source, chunk.batch, arrival_ms, rejected=chunk.rejected_records)
                queued = self.worker.ingest_payload(event, push=chunk.push, series=chunk.series)
            if not queued:
                self.outbox.changed.set()
            await self.commit.durable()
        return None

    def _count_refused(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def _count_skipped(self, stream: str, skipped: Mapping[str, int]) -> None:
        for reason, count in skipped.items():
            self.skipped[stream, reason] = self.skipped.get((stream, reason), 0) + count

    async def _read_all(self) -> None:
        # Records that are read before the first queries are known would count in no query.
        await self.outbox.configured.wait()
        self._restart_idle_rule(*self.sources)
        tasks = [asyncio.create_task(t) for t in (self._read_sources(), self.uplink.retired.wait())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.Event().wait()  # all sources have ended, or none is read any more; serving continues

    async def _read_sources(self) -> None:
        async with asyncio.TaskGroup() as self._reading:
            for source in self.sources:
                self._reading.create_task(self._read(source))

    def _open(self, opener: Source, sources: Iterable[Source]) -> None:
        """Reads the sources among these that the agent does not read yet.

        Raises _SourceFailed: one of them promises less than the edge has told the center about the stream.
        """
        names = {source.name for source in self.sources}
        new = [source for source in sources if source.name not in names]
        told = self.durable.core.streams[opener.stream].spec.deliveries
        for source in new:
            if source.delivery not in (Delivery.EXACTLY_ONCE, *told):
                raise _SourceFailed(f"the new source {source.name} is {source.delivery}, unlike those before it")
        if new and self._reading is not None:
            self.sources += new
            self.backfills.add(new)
            self.durable.handle(sources_opened(self.sources, self.durable.core, self.config))
            for source in new:
                log.info("stream %s: source %s is new", source.stream, source.name)
                self.states.add(source, opener)
                self._reading.create_task(self._read(source))

    async def _read(self, source: Source) -> None:
        """Reads a source to its end, with retries. A source that cannot be read holds its stream's watermark
        back, so that no answer treats it as finished, and is named in /readyz."""
        if source.delivery is Delivery.AT_MOST_ONCE:
            await self.commit.durable()  # from now on a restart knows that the source was being read
        with self.meter.busy(source.name):
            while True:
                try:
                    await self._read_until_end(source)
                    break
                except _SourceFailed as exc:
                    if source.name not in self._failures():
                        log.error("cannot read source %s: %s; retry every %.0f s", source.name, exc, SOURCE_RETRY_S)
                        if not isinstance(exc.__cause__, InvalidInput | OSError):
                            log.error("the failure of source %s", source.name, exc_info=exc.__cause__)
                    self.failing[source.name] = str(exc), time.monotonic()
                    with self.meter.backpressured(source.name):
                        await asyncio.sleep(SOURCE_RETRY_S)
        self.durable.handle(SourceEnded(source.stream, source.name))
        self.worker.advance(source.stream)
        self.outbox.changed.set()
        log.info("source %s of stream %s has ended", source.name, source.stream)

    async def _read_until_end(self, source: Source) -> None:
        async for chunk in _contained(source.chunks(self.durable.state.positions.get(source.name))):
            self._end_failure(source.name)
            self.tap.offer(source.stream, chunk)
            self.states.count(source.name, chunk)
            rejected = chunk.rejected_records
            event = Ingested(source.stream, source.name, chunk.batch, now_ms(), rejected=rejected)
            self._open(source, chunk.opens)
            is_open = self.durable.core.streams[source.stream].is_open(source.name)
            for reason in chunk.losses if is_open else ():  # one that has ended has nothing to lose
                # Before the position after it: a crash in between states the loss twice rather than never.
                self.durable.handle(InputLost(source.stream, source.name, reason, event.arrival_ms))
            queued = False
            if source.replayable and chunk.end is not None and not chunk.keep:
                full = chunk.is_full_read
                queued = self.worker.ingest_range(event, chunk.start, chunk.end, is_full_read=full)
            elif chunk.batch.num_rows or rejected or chunk.keep:
                end = chunk.end if chunk.keep else None
                queued = self.worker.ingest_payload(event, end=end)
                if end is not None:
                    self._uncommitted[source.name] = end
                    self._unsynced.set()
            if source.delivery is Delivery.AT_MOST_ONCE:
                self._unsynced.set()
            if chunk.input_gone:
                self._input_gone.set()
            if not queued:
                self.outbox.changed.set()
            await self._wait_for_capacity(source)
        self._end_failure(source.name)

    def _restart_idle_rule(self, *sources: Source) -> None:
        """Restarts the idle rule for these sources: their input arrived while they were not read."""
        names = {source.name for source in sources}
        self.durable.handle(TickEvent(now_ms(), tuple(sorted(names.union(self._unread_sources())))))

    async def _wait_for_capacity(self, source: Source) -> None:
        """Applies backpressure: returns when the journal and the memory limit allow the source to continue."""
        since_ms = now_ms()
        self.backpressured.add(source.name)
        try:
            with self.meter.backpressured(source.name):
                repeatable = source.delivery is not Delivery.AT_MOST_ONCE
                unsynced_bytes = MAX_UNSYNCED_BYTES if repeatable else MAX_UNSYNCED_UNREPEATABLE_BYTES
                if self.durable.unsynced_bytes > unsynced_bytes or self.commit.failure is not None:
                    await self.commit.durable()
                await self.worker.pace.may_read.wait()
                while self._over_memory_limit():
                    await asyncio.sleep(BACKPRESSURE_POLL_S)
            await asyncio.sleep(0)
            if now_ms() - since_ms >= LONG_BACKPRESSURE_MS:
                self._restart_idle_rule(source)
        finally:
            self.backpressured.discard(source.name)

    async def _tick(self) -> None:
        due = now_ms()
        while True:
            if now_ms() - due >= LONG_PAUSE_MS:  # the process was stopped, the machine suspended, or the loop blocked
                self._restart_idle_rule(*self.sources)
            deadline = self.durable.core.next_deadline()
            now = now_ms()
            if deadline is not None and deadline <= now:
                before = {n: s.watermark_ms for n, s in self.durable.core.streams.items()}
                self.durable.handle(TickEvent(now, self._unread_sources(), self._empty_ms(now)))
                for stream in before:
                    self.worker.advance(stream)
                if before != {n: s.watermark_ms for n, s in self.durable.core.streams.items()}:
                    self.outbox.changed.set()
            wait_s = max(TICK_MIN_S, ((deadline or now) - now) / 1000)
            due = now_ms() + int(wait_s * 1000)
            await asyncio.sleep(wait_s)

    def _unread_sources(self) -> tuple[str, ...]:
        """Returns the sources that are not being read now; their silence does not mean that they are idle."""
        if not self.outbox.configured.is_set() or self.commit.failure is not None or self._over_memory_limit():
            return tuple(source.name for source in self.sources)
        return (*self._failures(), *self.backpressured)

    def _empty_ms(self, now: int) -> dict[str, int]:
        """Returns `TickEvent.empty_ms` of all sources; 0 for a source that has never been found empty."""
        ages = {source.name: self.meter.empty_for_s(source.name) for source in self.sources}
        return {name: now - round(1000 * age_s) if math.isfinite(age_s) else 0 for name, age_s in ages.items()}

    async def _fingerprint_inputs(self) -> None:
        """Keeps the fingerprints of the files that are read, for the center, which compares them over all edges."""
        sources = [source for source in self.sources if source.replayable][:MAX_FINGERPRINTS]
        while sources:
            found = []
            for source in sources:
                if (position := self.durable.state.positions.get(source.name)) is not None:
                    most = MAX_FINGERPRINTS // len(sources)
                    fingerprints = await asyncio.to_thread(source.fingerprints, position, most)
                    found += [Input(source.stream, source.name, fingerprints)] if fingerprints else []
            self.outbox.inputs = tuple(found)
            await asyncio.sleep(INPUTS_EVERY_S)
        await asyncio.Event().wait()

    async def _sync(self) -> None:
        while True:
            await self._unsynced.wait()
            await asyncio.sleep(SYNC_S)
            self._unsynced.clear()
            committed, self._uncommitted = self._uncommitted, {}
            await self.commit.durable()
            for source in self.sources if committed else ():
                if source.name in committed:
                    try:
                        source.committed(committed[source.name])
                    except Exception as exc:  # a source costs only itself
                        log.exception("source %s cannot acknowledge its records", source.name)
                        self.failing[source.name] = f"{type(exc).__name__}; the log says more", time.monotonic()

    async def _checkpoint(self) -> None:
        interval_s = self.config.limits.checkpoint_ms / 1000
        written, took_s = -1, 0.0
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._input_gone.wait()
                    await asyncio.sleep(max(GONE_CHECKPOINT_S, 10 * took_s))
            self._input_gone.clear()
            if self.durable.journal_bytes != written or self.commit.failure is not None:
                began_s = time.monotonic()
                await self.commit.checkpoint()
                took_s = time.monotonic() - began_s
                written = self.durable.journal_bytes
                release_free_memory()


def sources_opened(sources: Sequence[Source], core: EdgeCore, config: EdgeConfig) -> SourcesOpened:
    """Returns the event that states all sources of the edge."""
    memory = MemoryLimits.of(config.limits.max_pending_bytes, config.limits.max_query_bytes)
    replayable = tuple(s.name for s in sources if s.replayable)
    columns = {name: stream.column_types for name, stream in core.streams.items()}
    return SourcesOpened(tuple((s.stream, s.name) for s in sources), replayable, memory.state_bytes, columns)


class _SourceFailed(Exception):
    """A source has raised an exception, which is the cause."""


async def _contained(chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
    """Yields the chunks of a source. Raises _SourceFailed for any exception of the source: it must cost only itself."""
    try:
        async for chunk in chunks:
            yield chunk
    except (InvalidInput, OSError) as exc:
        raise _SourceFailed(str(exc)) from exc
    except Exception as exc:
        # Only the type: the message may quote records or credentials, and anybody may read /readyz.
        raise _SourceFailed(f"{type(exc).__name__}; the log says more") from exc


def _server(app: Starlette, tls: HttpTlsConfig | None, on_closed: Callable[[str], None]) -> EmbeddedServer:
    """Raises InvalidConfig: a file of `http.tls` cannot be used."""
    options: dict[str, Any] = {}
    if tls is not None:
        options = {"ssl_certfile": tls.cert, "ssl_keyfile": tls.key, "ssl_ca_certs": tls.client_ca}
        options["ssl_cert_reqs"] = ssl.CERT_NONE if tls.client_ca is None else ssl.CERT_REQUIRED
    config = uvicorn.Config(
        app, lifespan="off", timeout_graceful_shutdown=STOP_GRACE_S,
        **guarded(LIMITS, on_closed), **options,
    )  # fmt: skip
    try:
        config.load()
    except OSError as exc:  # ssl.SSLError is one
        raise InvalidConfig(
            "http.tls", config.ssl_certfile, "PEM files of a certificate and its key", str(exc)
        ) from exc
    return EmbeddedServer(config)


def open_agent(config: EdgeConfig) -> Agent:
    """Recovers the state in `config.state_dir` and builds the agent; reads no source yet.

    Raises:
        InvalidConfig: the configuration cannot be used.
        StorageError: the state cannot be recovered; the message names a remedy.
    """
    directory = Path(config.state_dir)
    identity = load_identity(directory, lambda: _fresh_identity(config))
    clocks = {name: _clock(identity["clocks"].get(name), stream) for name, stream in config.streams.items()}
    meter = BusyMeter(time.monotonic)

    def coalesce_s(stream: str, source: str) -> float:
        return worker.wait_s(stream, source)

    lookups = {name: open_lookups(name, stream, now_ms) for name, stream in config.streams.items() if stream.lookups}
    built = build_sources(config, clocks, now_ms=now_ms, idle=meter.idle, coalesce_s=coalesce_s)
    sources = [joined(source, lookups.get(source.stream)) for source in built]
    deliveries = {
        name: weaker_than_exactly_once(s.delivery for s in sources if s.stream == name) for name in config.streams
    }

    def make_core() -> EdgeCore:
        return EdgeCore(
            {
                name: StreamSpec(
                    stream.stream_columns,
                    clocks[name],
                    stream.disorder_ms,
                    stream.idle_ms,
                    deliveries[name],
                    stream.constants,
                )
                for name, stream in config.streams.items()
            },
            source_of(config.edge, str(identity["incarnation"])),
        )

    def reread_from(sources: list[Source]) -> Reread:
        by_name = {source.name: source for source in sources}

        def reread(name: str, start: Position | None, end: Position) -> pa.RecordBatch:
            if name not in by_name:
                raise StorageError(
                    f"{directory}: the journal has records of source {name}, which is not in the configuration; "
                    "put it back until the edge has run once more"
                )
            return by_name[name].reread(start, end).batch

        return reread

    memory = MemoryLimits.of(config.limits.max_pending_bytes, config.limits.max_query_bytes)
    # Backfills read the same files at other positions, so they have sources of their own.
    reading_again = build_sources(config, clocks, now_ms=now_ms)
    backfilled = [joined(source, lookups.get(source.stream)) for source in reading_again]
    durable = DurableCore(
        directory, make_core, reread_from(sources), identity["incarnation"],
        reread_backfill=reread_from(backfilled), now_ms=now_ms(),
        memory=memory,
    )  # fmt: skip
    opened = [
        joined(other, lookups.get(other.stream))
        for source in built if isinstance(source, KeptSource)
        for other in source.opened_before(durable.core.streams[source.stream].sources)
    ]  # fmt: skip
    sources += opened
    backfilled += opened
    durable.begin_run((uuid.uuid4().int >> 66) | 1)
    if durable.core.configured:
        # Until the first queries nothing was read.
        for source in sources:
            if source.delivery is Delivery.AT_MOST_ONCE and durable.core.streams[source.stream].is_open(source.name):
                log.warning("source %s cannot be read again: records may be lost since the last stop", source.name)
                durable.handle(InputLost(source.stream, source.name, LossReason.RESTART, now_ms()))
    durable.handle(sources_opened(sources, durable.core, config))
    commit = JournalGroupCommit(durable)
    daily_quota = _daily_quota(config, directory)

    def unread() -> tuple[str, ...]:
        streams = {source.name: source.stream for source in sources}
        return tuple(sorted({streams[name] for name in meter.unread_sources(UNREAD_INPUT_S)}))

    def busy_share() -> float:
        return max(meter.take_busy_share(), worker.take_short_share())

    outbox = UplinkOutbox(
        config.edge, config.labels, durable, commit, now_ms, config.center.bandwidth, busy_share, unread
    )
    uplink = Uplink(
        config.center.address,
        outbox,
        token=config.center.token.get_secret_value() if config.center.token else None,
        tls=_tls(config.center.tls),
        limits=LinkLimits(config.center.bandwidth),
        now_ms=now_ms,
        monotonic=time.monotonic,
        daily_quota=daily_quota,
    )
    backfills = BackfillRunner(
        durable, backfilled, config.limits.max_pending_bytes // 2,
        changed=outbox.changed.set, now_ms=now_ms, monotonic=time.monotonic,
    )  # fmt: skip
    worker = Worker(
        durable, changed=outbox.changed.set, busy_s=meter.busy_for_s, policy=config.limits.scheduling,
        limit_bytes=config.limits.max_pending_bytes // QUEUE_SHARE, now_ms=now_ms, clock=time.thread_time,
        answer_delay_ms=outbox.answer_delay_ms,
    )  # fmt: skip
    if config.limits.scheduling != OFF:
        outbox.delays = worker.delays
    tap = StreamTap(config.streams)
    states = SourceStates(meter)
    for source in sources:
        states.add(source)
    return Agent(config, durable, sources, commit, outbox, uplink, meter, backfills, tap, worker, states, daily_quota,
                 lookups=lookups)  # fmt: skip


def begin_anew(agent: Agent) -> None:
    """Begins a new incarnation, once `Agent.run` has raised `OutdatedState`; `open_agent` then opens it.

    What the agent has accepted and not shipped is given up: the center may have it from another agent, so it might
    count twice. The center states that in its answers, because the incarnation is new to it.

    Raises:
        StorageError: the disk cannot be written.
    """
    incarnation = uuid.uuid4().hex
    agent.durable.begin_anew(incarnation, source_of(agent.config.edge, incarnation))


def _daily_quota(config: EdgeConfig, directory: Path) -> DailyQuota | None:
    if config.center.daily is None:
        return None
    file = QuotaFile(directory)
    return DailyQuota(config.center.daily, file.load(), file.save)


def _fresh_identity(config: EdgeConfig) -> dict[str, Any]:
    """Returns the identity of a new state. It keeps the replay clocks, which must be the same after a restart."""
    clocks = {name: replay_clock(stream.replay, now_ms()) for name, stream in config.streams.items()}
    return {
        "incarnation": uuid.uuid4().hex,
        "clocks": {name: asdict(clock) for name, clock in clocks.items() if clock is not None},
    }


def _clock(stored: dict[str, Any] | None, stream: StreamConfig) -> StreamClock | None:
    return StreamClock(**stored) if stored is not None else replay_clock(stream.replay, now_ms())


def _tls(config: TlsConfig | None) -> TlsFiles | None:
    if config is None:
        return None
    return TlsFiles(*(Path(p) if p else None for p in (config.ca, config.cert, config.key)))
