"""The agent: real sources, a real clock, the network and signals around `DurableCore`.

One event loop. Reading and decoding, and fsyncs, run in threads; everything that touches the core
runs on the loop, one event at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import uvicorn
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from edge import metrics as telemetry
from edge.config import EdgeConfig, StreamConfig, TlsConfig
from edge.core.core import EdgeCore
from edge.core.events import Ingested, SourceEnded, SourcesOpened, Tick
from edge.core.streams import StreamSpec
from edge.durability.durable_core import DurableCore, Position, load_identity
from edge.durability.group_commit import GroupCommit
from edge.durability.quota_file import SpentFile
from edge.process import give_back, now_ms
from edge.records import Chunk, Source
from edge.sources.factory import build_sources
from edge.sources.http import Busy, push_routes
from edge.sources.pacing import replay_clock
from edge.uplink.client import TlsFiles, Uplink
from edge.uplink.flow_control import DailyCap, LinkLimits
from edge.uplink.outbox import Session
from edge.utilization import BusyMeter
from edgewater.errors import InvalidConfig, InvalidInput, StorageError
from edgewater.streams import StreamClock
from edgewater.synopses.sampling.sample_rows import source_of

log = logging.getLogger(__name__)

MAX_UNSYNCED_BYTES = 8 << 20
TICK_MIN_S = 0.2
BACKPRESSURE_POLL_S = 0.05
SOURCE_RETRY_S = 5.0
FAILURE_MS = 3000 * SOURCE_RETRY_S
"""A source that has not failed for so long, though it is tried again, is being read."""
UNREAD_S = 0.1
"""A source that has not waited for input for longer may have some that is not read. What it reads meanwhile comes late
by about that much at most, as it usually does, and the watermark knows how late records usually are."""
HELD_BACK_MS = 500
"""A wait for room that is longer counts: meanwhile records may have piled up in the source."""


@dataclass(slots=True)
class Agent:
    """An edge agent. Build it with `open_agent`, then `await run()`."""

    config: EdgeConfig
    durable: DurableCore
    sources: list[Source]
    commit: GroupCommit
    session: Session
    uplink: Uplink
    meter: BusyMeter
    daily: DailyCap | None = None
    rejected: dict[tuple[str, str], int] = field(default_factory=dict)
    failing: dict[str, tuple[str, int]] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)

    async def run(self, stop: asyncio.Event) -> None:
        """Runs until `stop` is set or a task fails; leaves a checkpoint behind.

        Raises:
            InvalidConfig: `http.listen` cannot be listened on.
        """
        listening = _listen(self.config.http.listen)
        server = _Server(uvicorn.Config(self._app(), log_config=None, access_log=False, lifespan="off"))
        serving = asyncio.create_task(server.serve([listening]))
        loops = [self.commit.run(), self.uplink.run(), self._tick(), self._checkpoint(), self._read_all()]
        tasks = [asyncio.create_task(loop) for loop in loops]
        stopping = asyncio.create_task(stop.wait())
        try:
            await self._first_failure([*tasks, serving], stopping)
        finally:
            server.should_exit = server.force_exit = True
            for task in [*tasks, stopping]:
                task.cancel()
            await asyncio.gather(*tasks, stopping, serving, return_exceptions=True)
            listening.close()
            await self.commit.checkpoint()
            self.durable.close()
            if self.daily is not None:
                with contextlib.suppress(StorageError):  # What was written down ahead counts, then.
                    self.daily.close()

    async def _first_failure(self, tasks: list[asyncio.Task[None]], stopping: asyncio.Task[bool]) -> None:
        waiting: set[asyncio.Task[None] | asyncio.Task[bool]] = {*tasks, stopping}
        while not stopping.done():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    def _app(self) -> Starlette:
        registry = CollectorRegistry()
        registry.register(telemetry.EdgeCollector(self.durable, self._gauges, self.rejected))
        routes = telemetry.routes(registry, self.missing)
        pushed = push_routes(self.config, self.accept, self.busy, now_ms, self.meter.working, self.meter.refused)
        return Starlette(routes=[*routes, *pushed])

    def _gauges(self) -> dict[str, tuple[str, float]]:
        core = self.durable.core
        return {
            "connected": ("1 while a session with the center stands.", float(self.uplink.connected)),
            "backlog_bytes": ("Bytes of frames the center has not acknowledged.", core.unacked_bytes),
            "pending_bytes": ("Memory held for groups and frames.", core.pending_bytes),
            "journal_bytes": ("Size of the current journal.", self.durable.journal_bytes),
            "bandwidth_bytes_per_second": ("Measured bandwidth up.", self.session.bandwidth_bytes_s),
            "rtt_seconds": ("Measured round trip.", self.session.rtt_ms / 1000),
            "queries": ("Queries answered.", len(core.queries)),
            "busy_share": ("Part of time that the busiest source does not wait for input.", self.meter.recent),
        }

    def missing(self) -> list[str]:
        """What keeps this edge from accepting records."""
        reasons = []
        if not self.session.configured.is_set():
            reasons.append("queries: none known yet; the center has not been reached since this state was created")
        if self.commit.failure is not None:
            reasons.append(f"journal: {self.commit.failure}")
        return reasons + [f"source {name}: {message}" for name, message in self._failures().items()]

    def _failures(self) -> dict[str, str]:
        """By source that cannot be read now, why."""
        now = now_ms()
        return {name: message for name, (message, at_ms) in self.failing.items() if now - at_ms <= FAILURE_MS}

    def busy(self) -> Busy | None:
        """Why a pushed request cannot be taken now, or None."""
        if reasons := self.missing():
            return Busy("; ".join(reasons), retry_after_s=1)
        if self._full():
            return Busy("the edge holds as much as limits.max_pending_bytes allows", retry_after_s=1)
        return None

    def _full(self) -> bool:
        return self.durable.core.pending_bytes > self.config.limits.max_pending_bytes

    async def accept(self, chunk: Chunk, stream: str) -> None:
        """Takes a pushed chunk; returns when it is durable."""
        self._count_rejected(stream, chunk)
        if chunk.batch.num_rows:
            with self.meter.working(chunk.source):
                self.durable.ingest_payload(Ingested(stream, chunk.source, chunk.batch, now_ms()))
            self.session.changed.set()
            await self.commit.durable()

    def _count_rejected(self, stream: str, chunk: Chunk) -> None:
        for rejection in chunk.rejected:
            key = (stream, rejection.reason)
            if key not in self.rejected:
                log.warning("stream %s, source %s: %s (%s)", stream, chunk.source, rejection.message, rejection.example)
            self.rejected[key] = self.rejected.get(key, 0) + rejection.count

    async def _read_all(self) -> None:
        # Before the first queries are known there is nobody to count a record for.
        await self.session.configured.wait()
        self._reads_on(*self.sources)
        async with asyncio.TaskGroup() as group:
            for source in self.sources:
                group.create_task(self._read(source))
        await asyncio.Event().wait()  # all that there was has been read; shipping and answering go on

    async def _read(self, source: Source) -> None:
        """Reads a source to its end. One that cannot be read holds its stream's watermark back, so that
        no answer takes it for finished; it is named in /readyz and tried again."""
        with self.meter.working(source.name):
            while True:
                try:
                    await self._read_on(source)
                    break
                except (InvalidInput, OSError) as exc:
                    if source.name not in self._failures():
                        log.error("source %s cannot be read: %s; again every %.0f s", source.name, exc, SOURCE_RETRY_S)
                    self.failing[source.name] = str(exc), now_ms()
                    with self.meter.held(source.name):
                        await asyncio.sleep(SOURCE_RETRY_S)
        self.durable.handle(SourceEnded(source.stream, source.name))
        self.session.changed.set()
        log.info("source %s of stream %s has ended", source.name, source.stream)

    async def _read_on(self, source: Source) -> None:
        async for chunk in source.chunks(self.durable.positions.get(source.name)):
            self.failing.pop(source.name, None)
            self._count_rejected(source.stream, chunk)
            event = Ingested(source.stream, source.name, chunk.batch, now_ms())
            if source.replayable and chunk.end is not None:
                self.durable.ingest_range(event, chunk.start, chunk.end)
            elif chunk.batch.num_rows:
                self.durable.ingest_payload(event)
            self.session.changed.set()
            await self._hold_back(source)
        self.failing.pop(source.name, None)

    def _reads_on(self, *sources: Source) -> None:
        """What lies in these sources came while they were not read: the idle rule begins anew for them."""
        names = {source.name for source in sources}
        self.durable.handle(Tick(now_ms(), tuple(sorted(names.union(self._unread())))))

    async def _hold_back(self, source: Source) -> None:
        """Backpressure: a source reads on only when there is room for what it reads."""
        since_ms = now_ms()
        self.held.add(source.name)
        try:
            with self.meter.held(source.name):
                if self.durable.unsynced_bytes > MAX_UNSYNCED_BYTES or self.commit.failure is not None:
                    await self.commit.durable()
                while self._full():
                    await asyncio.sleep(BACKPRESSURE_POLL_S)
            await asyncio.sleep(0)
            if now_ms() - since_ms >= HELD_BACK_MS:
                self._reads_on(source)
        finally:
            self.held.discard(source.name)

    async def _tick(self) -> None:
        while True:
            deadline = self.durable.core.next_deadline()
            now = now_ms()
            if deadline is not None and deadline <= now:
                before = {n: s.watermark_ms for n, s in self.durable.core.streams.items()}
                self.durable.handle(Tick(now, self._unread()))
                if before != {n: s.watermark_ms for n, s in self.durable.core.streams.items()}:
                    self.session.changed.set()
            await asyncio.sleep(max(TICK_MIN_S, ((deadline or now) - now) / 1000))

    def _unread(self) -> tuple[str, ...]:
        """Sources that are not read now, so that nothing of theirs says that they are quiet."""
        if not self.session.configured.is_set() or self.commit.failure is not None or self._full():
            return tuple(source.name for source in self.sources)
        return (*self._failures(), *self.held)

    async def _checkpoint(self) -> None:
        interval_s = self.config.limits.checkpoint_ms / 1000
        written = -1
        while True:
            await asyncio.sleep(interval_s)
            if self.durable.journal_bytes != written or self.commit.failure is not None:
                await self.commit.checkpoint()
                written = self.durable.journal_bytes
                give_back()


def _listen(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host.strip("[]"), int(port)), family=family)
    except OSError as exc:
        raise InvalidConfig("http.listen", address, "an address of this machine that is free", str(exc)) from exc


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the agent has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def open_agent(config: EdgeConfig) -> Agent:
    """Recovers the state in `config.state_dir` and wires everything; reads no source yet.

    Raises:
        InvalidConfig, StorageError: with what to do about it.
    """
    directory = Path(config.state_dir)
    identity = load_identity(directory, lambda: _fresh_identity(config))
    clocks = {name: _clock(identity["clocks"].get(name), stream) for name, stream in config.streams.items()}
    meter = BusyMeter(time.monotonic)
    sources = build_sources(config, clocks, now_ms=now_ms, waiting=meter.waiting)
    by_name = {source.name: source for source in sources}

    def make_core() -> EdgeCore:
        return EdgeCore(
            {
                name: StreamSpec(stream.arrow_columns, clocks[name], stream.disorder_ms, stream.idle_ms)
                for name, stream in config.streams.items()
            },
            source_of(config.edge, str(identity["incarnation"])),
        )

    def reread(name: str, start: Position | None, end: Position) -> pa.RecordBatch:
        if name not in by_name:
            raise StorageError(
                f"{directory}: the journal has records of source {name}, which the configuration no longer names; "
                "put it back until the edge has run once more"
            )
        return by_name[name].reread(start, end).batch

    durable = DurableCore(directory, make_core, reread, identity["incarnation"])
    durable.handle(SourcesOpened(tuple((s.stream, s.name) for s in sources)))
    commit = GroupCommit(durable)
    daily = _daily_cap(config, directory)
    streams = {source.name: source.stream for source in sources}

    def unread() -> tuple[str, ...]:
        return tuple(sorted({streams[name] for name in meter.unread(UNREAD_S)}))

    session = Session(config.edge, config.labels, durable, commit, now_ms, config.center.bandwidth, meter.take, unread)
    uplink = Uplink(
        config.center.address,
        session,
        session,
        token=config.center.token.get_secret_value() if config.center.token else None,
        tls=_tls(config.center.tls),
        limits=LinkLimits(config.center.bandwidth),
        now_ms=now_ms,
        monotonic=time.monotonic,
        daily=daily,
    )
    return Agent(config, durable, sources, commit, session, uplink, meter, daily)


def _daily_cap(config: EdgeConfig, directory: Path) -> DailyCap | None:
    if config.center.daily is None:
        return None
    file = SpentFile(directory)
    return DailyCap(config.center.daily, file.load(), file.save)


def _fresh_identity(config: EdgeConfig) -> dict[str, Any]:
    """A replay that begins when the agent is first started must begin there after a restart, too."""
    clocks = {name: replay_clock(stream.replay, now_ms()) for name, stream in config.streams.items()}
    return {
        "incarnation": uuid.uuid4().hex,
        "clocks": {name: asdict(clock) for name, clock in clocks.items() if clock is not None},
    }


def _clock(kept: dict[str, Any] | None, stream: StreamConfig) -> StreamClock | None:
    return StreamClock(**kept) if kept is not None else replay_clock(stream.replay, now_ms())


def _tls(given: TlsConfig | None) -> TlsFiles | None:
    if given is None:
        return None
    return TlsFiles(*(Path(p) if p else None for p in (given.ca, given.cert, given.key)))
