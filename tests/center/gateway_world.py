"""A real gateway over real storage that tests can watch and hold up, and an edge spoken message by message."""

from __future__ import annotations

import asyncio
import errno
import functools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
import pytest

from center.catalog import Catalog, IndexOutcome, UnindexedFrame
from center.config import CenterConfig, Columns, GatewaySection
from center.edge_access import EdgeAccess
from center.ingest.gateway import Gateway, GatewayBounds
from center.storage.frame_log import FrameLocation, FrameLog, StoredFrame
from center.storage.segment_files import SegmentDirectory
from edgewater.base.errors import StorageError
from edgewater.base.streams import EdgeId
from edgewater.model.query import QuerySpec
from edgewater.synopses import GroupedAggregate
from edgewater.wire import CODE_METADATA, Frame, FrameBody, Partial, QueryRef, uplink_pb2_grpc
from edgewater.wire import uplink_pb2 as pb
from tests.insides import engine_of

PATIENCE_S = 60
JFK = EdgeId("jfk")
MILES = QueryRef("miles", 1)


def spec(name: str = "miles", **changes: object) -> QuerySpec:
    mapping = {
        "name": name,
        "from": "flights",
        "group_by": ["carrier"],
        "measures": {"miles": "sum(distance)", "farthest": "max(distance)"},
        "window": {"tumbling": "60s"},
    }
    return QuerySpec.from_mapping(mapping | changes)


def frame(seq: int, query: QueryRef = MILES, content: bytes = b"synopsis") -> Frame:
    return Frame.pack(seq, query, FrameBody(1_000 + seq, (Partial(0, synopsis(content)),)))


@functools.cache
def synopsis(content: bytes) -> bytes:
    """A partial of the query `spec`, with one group, which is named by `content`."""
    bound = spec().bind({"carrier": pa.string(), "distance": pa.int64()})
    stacks = {m.measure.name: m.measure.stack(pa.int64()) for m in bound.measures}
    partial = GroupedAggregate({"carrier": pa.string()}, stacks)
    partial.update([pa.array([content.hex()])], {name: pa.array([1]) for name in stacks}, 1)
    return partial.to_bytes()


def tokens(**secrets: str) -> dict[str, EdgeAccess]:
    """Entries in the short form."""
    return {edge: EdgeAccess.model_validate({"tokens": [secret]}) for edge, secret in secrets.items()}


class WatchedSegments(SegmentDirectory):
    """A real directory that counts, and that can be told to be full."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.commits = 0
        self.refuse_append = self.refuse_sync = False

    def append(self, batch: Sequence[bytes]) -> str:
        if self.refuse_append:
            raise OSError(errno.ENOSPC, "No space left on device")
        name = super().append(batch)
        if self.refuse_sync:
            self.delete(name)
            raise OSError(errno.EIO, "Input/output error")
        self.commits += 1
        return name


class WatchedLog(FrameLog):
    """A real log that notes what is durable."""

    def __init__(self, path: Path) -> None:
        self.segment_files = WatchedSegments(path)
        super().__init__(self.segment_files)
        self.durable: list[tuple[str, int]] = []

    def append(self, frames: Sequence[StoredFrame]) -> list[FrameLocation]:
        locations = super().append(frames)
        self.durable += [(f.edge, f.seq) for f in frames]
        return locations


class WatchedCatalog(Catalog):
    """A real catalog that notes what is indexed, and that can be held up or broken."""

    def __init__(self, url: str, columns: Mapping[str, Columns] | None = None) -> None:
        super().__init__(url, columns)
        self.batches: list[int] = []
        self.indexed: set[int] = set()
        self.refuse = False
        self.gate: asyncio.Event | None = None
        self._index, self.frames.index = self.frames.index, self._watched_index  # type: ignore[method-assign]

    def _watched_index(self, frames: Sequence[UnindexedFrame]) -> list[IndexOutcome]:
        if self.refuse:
            raise StorageError("database: disk I/O error")
        if self.gate is not None:
            gate, self.gate = self.gate, None
            asyncio.run_coroutine_threadsafe(gate.wait(), self.loop).result(PATIENCE_S)
        outcomes = self._index(frames)
        self.batches.append(len(frames))
        self.indexed |= {f.seq for f in frames}
        return outcomes

    loop: asyncio.AbstractEventLoop


@dataclass
class Center:
    gateway: Gateway
    catalog: WatchedCatalog
    log: WatchedLog
    port: int
    clock: list[int]

    def entries(self, key: str = "miles@1") -> list[tuple[str, int]]:
        return [(e.edge, e.seq) for e in self.catalog.frames.entries(key, 0, 1 << 40)]


def configured(settings: dict[str, Any], now_ms: Callable[[], int]) -> tuple[Any, ...]:
    """Arguments of a gateway. Sections of the configuration get the settings that they have, whatever their bounds."""
    names = [set(kind.model_fields) for kind in (GatewaySection, CenterConfig)] + [
        {f.name for f in fields(GatewayBounds)},
        {"wakes"},
    ]
    section, config, bounds, others = ({n: settings.pop(n) for n in settings.keys() & known} for known in names)
    assert not settings
    gateway = GatewaySection().model_copy(update=section)
    center_config = CenterConfig().model_copy(update={"gateway": gateway, **config})
    return center_config, now_ms, others.get("wakes"), GatewayBounds(**bounds)


@asynccontextmanager
async def center(
    path: Path,
    log: str = "log",
    url: str | None = None,
    listen: str = "127.0.0.1:0",
    columns: Mapping[str, Columns] | None = None,
    queries: Sequence[QuerySpec] = (),
    **settings: Any,
) -> AsyncIterator[Center]:
    """Runs a gateway, and then registers queries."""
    catalog = WatchedCatalog(url or f"sqlite:///{path}/catalog.db", columns)
    catalog.loop = asyncio.get_running_loop()
    frame_log = WatchedLog(path / log)
    clock = [1_000_000]
    quick = {"poll_ms": 20, "write_ms": 20, "retry_ms": 5, "retry_max_ms": 20}
    gateway = Gateway(catalog, frame_log, *configured(quick | settings, lambda: clock[0]))
    port = await gateway.start(listen)
    for query in queries:
        catalog.queries.register(query, 1)
    try:
        yield Center(gateway, catalog, frame_log, port, clock)
    finally:
        await gateway.stop()
        # A look at the catalog that was cancelled is still being taken, in its thread.
        await eventually(lambda: not engine_of(catalog).pool.checkedout())
        catalog.close()


class RawEdge:
    """The other end of a session, message by message."""

    _greets = False

    def __init__(self, port: int, token: str | None = None, *, greets: bool = False) -> None:
        """Opens a session. With `greets`, it begins with the Hello of `jfk`."""
        self._greets = greets
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)])
        metadata = (("authorization", f"Bearer {token}"),) if token is not None else ()
        self.call = uplink_pb2_grpc.UplinkStub(self._channel).Session(metadata=metadata)
        self.received: list[pb.ToEdge] = []
        self.budget: pb.Budget | None = None

    async def __aenter__(self) -> RawEdge:
        if self._greets:
            await self.hello()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self.call.cancel()
        await self._channel.close()

    async def hello(
        self,
        edge: str = "jfk",
        oldest: int = 0,
        following: int = 0,
        incarnation: str = "i1",
        streams: Sequence[pb.Stream] | None = None,
        **fields: Any,
    ) -> pb.Welcome:
        columns = [pb.Stream.Column(name="carrier", type="string"), pb.Stream.Column(name="distance", type="int64")]
        hello = pb.Hello(
            protocol_min=1,
            protocol_max=1,
            edge=edge,
            incarnation=incarnation,
            streams=[pb.Stream(name="flights", columns=columns)] if streams is None else streams,
            oldest_seq=oldest,
            next_seq=max(following, oldest),
            sent_at_ms=1,
        )
        hello.tables.extend(fields.pop("tables", ()))
        for name, value in fields.items():
            setattr(hello, name, value)
        await self.call.write(pb.FromEdge(hello=hello))
        return (await self.until("welcome")).welcome

    async def deliver(self, *frames: Frame) -> None:
        """Sends frames, and waits until they are acknowledged."""
        await self.send(*frames)
        await self.acked(frames[-1].seq)

    async def send(self, *frames: Frame) -> None:
        for each in frames:
            await self.call.write(pb.FromEdge(frame=each.to_wire()))

    async def send_together(self, *frames: Frame) -> None:
        """In one message, as protocol 2 has it."""
        await self.call.write(pb.FromEdge(frames=pb.Frames(frames=[each.to_wire() for each in frames])))

    async def report_budget(self, through_ms: int = -(1 << 62), shares: dict[str, float] | None = None) -> None:
        """Says that the last Budget heard is applied, as an edge that has closed so far does."""
        given = self.budget or pb.Budget(query="miles", query_version=1)
        report = pb.BudgetReport(query=given.query, query_version=given.query_version, version=given.version)
        report.shares.update(dict(given.shares) if shares is None else shares)
        report.from_ms = max(given.from_ms, through_ms)
        await self.call.write(pb.FromEdge(budget_report=report))

    async def until(self, kind: str, test: Callable[[Any], bool] = lambda _: True) -> pb.ToEdge:
        """The next message of a kind that passes the test."""
        while True:
            message = await self.call.read()
            if message is grpc.aio.EOF:
                raise AssertionError(f"the session ended before {kind}: {await self.call.code()}")
            self.received.append(message)
            if message.HasField("budget"):
                self.budget = message.budget
            if message.WhichOneof("message") == kind and test(getattr(message, kind)):
                return message

    async def acked(self, through: int) -> None:
        await self.until("ack", lambda ack: ack.through >= through)

    async def refusal(self) -> tuple[grpc.StatusCode, str, str]:
        """How the center ends the session: status, error code and message."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await self.call.read() is not grpc.aio.EOF:
                pass
            raise AssertionError("the center ended the session without a reason")
        trailing = dict(caught.value.trailing_metadata() or ())
        return caught.value.code(), str(trailing.get(CODE_METADATA)), caught.value.details() or ""


async def eventually(test: Callable[[], object]) -> None:
    """Waits until a statement about another thread's or process's state holds (until the limit of a test)."""
    while not await asyncio.to_thread(test):
        await asyncio.sleep(0.02)
