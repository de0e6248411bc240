"""An agent in memory, a link that can be cut, a real gateway and a scripted one, for tests of the uplink."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from center.catalog import Catalog
from center.ingest.gateway import Gateway
from center.storage.frame_log import FrameLog
from edge.process import now_ms
from edge.uplink import LinkForecast, LinkLimits, Uplink, UplinkEndpoint, accepted, refused
from edgewater.model.query import QuerySpec
from edgewater.model.window_range import NO_BORDERS, WindowRange
from edgewater.wire import (
    MIN_PROTOCOL,
    PROTOCOL,
    RETRY_METADATA,
    Frame,
    FrameBody,
    InputLoss,
    QueryRef,
    uplink_pb2_grpc,
)
from edgewater.wire import uplink_pb2 as pb
from edgewater.wire.session_stream import LEAST_WINDOW_LOG, SessionUnpacker
from tests.center.gateway_world import configured
from tests.query_specs import query_spec

PATIENCE_S = 120
MILES = QueryRef("miles", 1)
SPEC = query_spec(
    name="miles",
    stream="flights",
    measures={"miles": "sum(distance)"},
    window={"tumbling": "60s"},
    budget={"error": {"miles": 100}},
)


QUICK = LinkLimits(heartbeat_s=0.02, reconnect_max_s=0.05)

SCRIPTED = LinkLimits(heartbeat_s=0.02, reconnect_max_s=0.05, goodbye_s=0.01)


def frame(seq: int, size: int = 200) -> Frame:
    """A frame of about `size` bytes, which the gateway keeps as it is."""
    text = base64.b64encode(np.random.default_rng(seq).bytes(size)).decode()
    losses = tuple(InputLoss(text[at : at + 4_000], "restart") for at in range(0, len(text), 4_000))
    return Frame.pack(seq, MILES, FrameBody(seq, losses=losses))


class Agent:
    """An `UplinkEndpoint` with its journal in memory, which records the control messages that it received."""

    def __init__(self, edge: str = "jfk") -> None:
        self.edge = edge
        self.journal: list[Frame] = []
        self.acked = -1
        self.capacities: list[int] = []
        self.welcomes: list[int | None] = []
        self.queries: list[tuple[QueryRef, QuerySpec]] = []
        self.shares: dict[str, float] = {}
        self.budget: pb.Budget | None = None
        self.sampling: pb.Sampling | None = None
        self._reported: pb.Budget | None = pb.Budget(from_ms=-1)
        self.forecast: Callable[[], LinkForecast] = LinkForecast
        self.refuse = self.news = False
        self.refused: list[tuple[QueryRef, str, int]] = []
        self._made = asyncio.Event()
        self._received = asyncio.Event()
        self._ready: list[Frame] = []
        self.taking = 0
        self.at_once = 1
        self.durable = asyncio.Event()
        self.durable.set()

    def make(self, frames: Iterable[Frame]) -> None:
        """Makes frames available to `take`."""
        self._ready += frames
        self._made.set()

    def table_rows(self) -> Iterable[str]:
        return [lookup.rows for _, spec in self.queries for lookup in spec.lookups]

    def unacknowledged(self, after: int | None) -> Iterable[Frame]:
        return [f for f in self.journal if after is None or f.seq > after]

    async def take(self, capacity_bytes: int) -> Sequence[Frame]:
        self.taking += 1
        assert self.taking == 1, "one take at a time"
        self.capacities.append(capacity_bytes)
        try:
            while not self._ready:
                self._made.clear()
                await self._made.wait()
            taken, self._ready = self._ready[: self.at_once], self._ready[self.at_once :]
            await self.durable.wait()
            self.journal += taken
            return taken
        finally:
            self.taking -= 1

    def on_welcome(self, acked_through: int | None) -> None:
        self.welcomes.append(acked_through)
        if acked_through is not None:
            self.on_ack(acked_through)
        self._received.set()

    def on_ack(self, through: int) -> None:
        assert through >= self.acked, "an acknowledgement never goes back"
        self.acked = through
        self.journal = [f for f in self.journal if f.seq > through]
        self._received.set()

    def on_queries(
        self, queries: Sequence[tuple[QueryRef, QuerySpec]], windows: Mapping[QueryRef, WindowRange] = NO_BORDERS
    ) -> Sequence[pb.QueryStatus]:
        self.queries = list(queries)
        self._received.set()
        return [refused(ref, "invalid-query", "") if self.refuse else accepted(ref) for ref, _ in queries]

    def on_budget(self, budget: pb.Budget) -> None:
        self.budget, self.shares = budget, dict(budget.shares)
        self._received.set()

    def on_sampling(self, sampling: pb.Sampling) -> None:
        self.sampling = sampling

    async def budget_reports(self, *, all_queries: bool) -> Sequence[pb.BudgetReport]:
        if not self.queries or not (all_queries or self.budget != self._reported):
            return []
        self._reported, applied = self.budget, self.budget or pb.Budget()
        ref = self.queries[0][0]
        report = pb.BudgetReport(
            query=ref.name, query_version=ref.version, version=applied.version, from_ms=applied.from_ms
        )
        report.shares.update(applied.shares)
        return [report]

    def on_refused(self, query: QueryRef, reason: str, message: str, frames: int) -> None:
        self.refused.append((query, reason, frames))

    def on_link(self, forecast: Callable[[], LinkForecast]) -> None:
        self.forecast = forecast
        self._received.set()

    def hello(self) -> pb.Hello:
        following = max([self.acked, *(f.seq for f in self.journal)]) + 1
        return pb.Hello(
            protocol_min=MIN_PROTOCOL,
            protocol_max=PROTOCOL,
            edge=self.edge,
            incarnation="i1",
            streams=[pb.Stream(name="flights", columns=[pb.Stream.Column(name="distance", type="int64")])],
            oldest_seq=self.journal[0].seq if self.journal else following,
            next_seq=following,
            sent_at_ms=0,
        )

    def heartbeat(self) -> pb.Heartbeat:
        return pb.Heartbeat(sent_at_ms=now_ms())

    def link_report(self, low_bytes_s: float, high_bytes_s: float, *, all_queries: bool) -> pb.LinkReport | None:
        return None

    def has_news(self) -> bool:
        return self.news

    def may_omit(self) -> bool:
        return False

    async def until(self, test: Callable[[], object]) -> None:
        """Waits until a received message makes the test true."""
        while not test():
            self._received.clear()
            await self._received.wait()


class Proxy:
    """A TCP link that can be cut, or made to drop all data."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.passed = 0
        self.cut_after: int | None = None
        self.swallow = False
        self.rate_bytes_s: float | None = None
        self.connections = 0

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_exc: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers += [writer, up_writer]
        self._tasks.append(asyncio.create_task(self._pump(reader, up_writer, count=True)))
        self._tasks.append(asyncio.create_task(self._pump(up_reader, writer, count=False)))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, count: bool) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16 if self.rate_bytes_s is None else 1 << 11):
                if count and self.rate_bytes_s is not None:
                    await asyncio.sleep(len(data) / self.rate_bytes_s)
                if self.swallow:
                    continue
                if count:
                    self.passed += len(data)
                    if self.cut_after is not None and self.passed >= self.cut_after:
                        self.cut_after = None
                        self.cut()
                        return
                writer.write(data)
                await writer.drain()
        writer.transport.abort()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers = []


@asynccontextmanager
async def gateway(
    path: Path, address: str = "127.0.0.1:0", queries: Sequence[QuerySpec] = (), **settings: Any
) -> AsyncIterator[tuple[int, Catalog]]:
    """Runs a gateway whose catalog has these queries."""
    catalog = Catalog(f"sqlite:///{path}/catalog.db")
    for query in queries:
        catalog.queries.register(query, 1)
    quick = {"poll_ms": 20, "write_ms": 20, "heartbeat_ms": 20, "retry_ms": 5, "retry_max_ms": 20}
    serving = Gateway(catalog, FrameLog(path / "log"), *configured(quick | settings, now_ms))
    port = await serving.start(address)
    try:
        yield port, catalog
    finally:
        await serving.stop()
        catalog.close()


def uplink(port: int, agent: UplinkEndpoint, limits: LinkLimits = QUICK, **options: Any) -> Uplink:
    defaults: dict[str, Any] = {"token": None, "tls": None, "now_ms": lambda: 1_000, "monotonic": time.monotonic}
    return Uplink(f"localhost:{port}", agent, limits=limits, **(defaults | options))


@asynccontextmanager
async def running(link: Uplink) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(link.run())
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def entries(catalog: Catalog) -> list[int]:
    return [e.seq for e in catalog.frames.entries("miles@1", 0, 1 << 40)]


class ScriptedCenter:
    """A center that answers Hello, echoes heartbeats, acknowledges at Goodbye, and sends scripted messages."""

    def __init__(self) -> None:
        self.messages: list[pb.FromEdge] = []
        self.hello = pb.Hello()
        self.heartbeat_ms = 0
        self.refusals = self.window_log = 0
        self.packed = 0
        self.max_frame_bytes = 1 << 20
        self._script: asyncio.Queue[pb.ToEdge | None] = asyncio.Queue()
        self._changed = asyncio.Event()

    @property
    def frames(self) -> list[pb.Frame]:
        return [f for m in self.messages for f in ([m.frame] if m.HasField("frame") else m.frames.frames)]

    @property
    def heartbeats(self) -> int:
        return self._count("heartbeat")

    def send(self, message: pb.ToEdge) -> None:
        self._script.put_nowait(message)

    async def until_received(self, kind: str, more: int) -> None:
        """Waits for `more` further messages of a kind (frames: for `more` in total)."""
        base = 0 if kind in ("frame", "query_status") else self._count(kind)
        while self._count(kind) < base + more:
            self._changed.clear()
            await self._changed.wait()

    def _count(self, kind: str) -> int:
        if kind == "frame":  # several may share a message
            return len(self.frames)
        return sum(m.WhichOneof("message") == kind for m in self.messages)

    async def Session(self, requests: Any, context: Any) -> None:  # noqa: N802
        self.hello = (await anext(requests)).hello
        if self.refusals:
            self.refusals -= 1
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "later", ((RETRY_METADATA, "1000"),))
        welcome = pb.Welcome(
            protocol=PROTOCOL, max_frame_bytes=self.max_frame_bytes, credit_bytes=1 << 20, window_log=self.window_log
        )
        await context.write(pb.ToEdge(welcome=welcome))
        receiving = asyncio.create_task(self._receive(requests))
        try:
            while (message := await self._script.get()) is not None:
                await context.write(message)
        finally:
            receiving.cancel()

    async def _receive(self, requests: Any) -> None:
        unpacker = SessionUnpacker(self.window_log or LEAST_WINDOW_LOG, self.max_frame_bytes)
        async for message in requests:
            if message.HasField("packed"):
                self.packed += 1
                message, _ = unpacker.unpack(message.packed)
            self.messages.append(message)
            self._changed.set()
            if message.HasField("heartbeat"):
                sent_at_ms = message.heartbeat.sent_at_ms
                echo = pb.TimeEcho(edge_sent_at_ms=sent_at_ms, heartbeat_ms=self.heartbeat_ms)
                self.send(pb.ToEdge(time_echo=echo))
            if message.HasField("goodbye"):
                if self.frames:
                    self.send(pb.ToEdge(ack=pb.Ack(through=self.frames[-1].seq)))
                self._script.put_nowait(None)

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[int]:
        server = grpc.aio.server()
        uplink_pb2_grpc.add_UplinkServicer_to_server(self, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield port
        finally:
            await server.stop(0)
