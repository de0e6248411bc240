from __future__ import annotations

import asyncio
import errno
import functools
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from center.catalog import Catalog, Indexed, UnindexedFrame
from center.gateway import CODE_METADATA, Gateway
from center.gateway_config import GatewayConfig
from center.gateway_http import observe
from center.log import FrameLog, Location, StoredFrame
from edgewater.errors import InvalidConfig, StorageError
from edgewater.query import QuerySpec
from edgewater.streams import EdgeId
from edgewater.wire import uplink_pb2 as pb
from edgewater.wire import uplink_pb2_grpc
from edgewater.wire.frames import Frame, FrameBody, Partial, QueryRef

PATIENCE_S = 20
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
    return Frame.pack(seq, query, FrameBody(1_000 + seq, (Partial(0, 0, content),)))


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a test on an event loop, and fails it rather than wait for ever."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(PATIENCE_S):
                await test(*args, **kwargs)

        asyncio.run(bounded())

    return run


class WatchedLog(FrameLog):
    """A real log that counts, and that can be told to be full."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.syncs = 0
        self.refuse_append = False
        self.refuse_sync = False
        self.refused = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.durable: list[tuple[str, int]] = []
        self._written: list[StoredFrame] = []

    def _refuse(self) -> None:
        self._loop.call_soon_threadsafe(self.refused.set)
        raise OSError(errno.ENOSPC, "No space left on device")

    def append(self, frames: Sequence[StoredFrame]) -> list[Location]:
        if self.refuse_append:
            self._refuse()
        self._written += frames
        return super().append(frames)

    def sync(self) -> None:
        if self.refuse_sync:
            self._refuse()
        super().sync()
        self.syncs += 1
        self.durable += [(f.edge, f.frame.seq) for f in self._written]
        self._written = []


class WatchedCatalog(Catalog):
    """A real catalog that notes what is indexed, and that can be held up or broken."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.batches: list[int] = []
        self.indexed: set[int] = set()
        self.refuse = False
        self.gate: asyncio.Event | None = None

    def index(self, frames: Sequence[UnindexedFrame]) -> list[Indexed]:
        if self.refuse:
            raise StorageError("database: disk I/O error")
        if self.gate is not None:
            gate, self.gate = self.gate, None
            asyncio.run_coroutine_threadsafe(gate.wait(), self.loop).result(PATIENCE_S)
        outcomes = super().index(frames)
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
        return [(e.edge, e.seq) for e in self.catalog.frames(key, 0, 1 << 40)]


@asynccontextmanager
async def center(path: Path, log: str = "log", **settings: Any) -> AsyncIterator[Center]:
    catalog = WatchedCatalog(f"sqlite:///{path}/catalog.db")
    catalog.loop = asyncio.get_running_loop()
    frame_log = WatchedLog(path / log)
    clock = [1_000_000]
    quick = {"poll_ms": 20, "heartbeat_ms": 20, "retry_ms": 5, "retry_max_ms": 20}
    gateway = Gateway(catalog, frame_log, GatewayConfig(**(quick | settings)), lambda: clock[0])
    port = await gateway.start("127.0.0.1:0")
    try:
        yield Center(gateway, catalog, frame_log, port, clock)
    finally:
        await gateway.stop()
        catalog.close()


class RawEdge:
    """The other end of a session, message by message."""

    def __init__(self, port: int, token: str | None = None) -> None:
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)])
        metadata = (("authorization", f"Bearer {token}"),) if token is not None else ()
        self.call = uplink_pb2_grpc.UplinkStub(self._channel).Session(metadata=metadata)
        self.received: list[pb.ToEdge] = []

    async def __aenter__(self) -> RawEdge:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self.call.cancel()
        await self._channel.close()

    async def hello(
        self, edge: str = "jfk", oldest: int = 0, following: int = 0, incarnation: str = "i1", **fields: Any
    ) -> pb.Welcome:
        columns = [pb.Stream.Column(name="carrier", type="string"), pb.Stream.Column(name="distance", type="int64")]
        hello = pb.Hello(
            protocol_min=1,
            protocol_max=1,
            edge=edge,
            incarnation=incarnation,
            streams=[pb.Stream(name="flights", columns=columns)],
            oldest_seq=oldest,
            next_seq=max(following, oldest),
            sent_at_ms=1,
        )
        for name, value in fields.items():
            setattr(hello, name, value)
        await self.call.write(pb.FromEdge(hello=hello))
        return (await self.until("welcome")).welcome

    async def send(self, *frames: Frame) -> None:
        for each in frames:
            await self.call.write(pb.FromEdge(frame=each.to_wire()))

    async def until(self, kind: str, test: Callable[[Any], bool] = lambda _: True) -> pb.ToEdge:
        """The next message of a kind that passes the test."""
        while True:
            message = await self.call.read()
            if message is grpc.aio.EOF:
                raise AssertionError(f"the session ended before {kind}: {await self.call.code()}")
            self.received.append(message)
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
    """Waits until a statement about another thread's or process's state holds (bounded by `on_a_loop`)."""
    while not await asyncio.to_thread(test):
        await asyncio.sleep(0.005)


@on_a_loop
async def test_a_frame_is_acknowledged_once_it_is_durable_and_indexed_and_not_before(tmp_path: Path) -> None:
    async with center(tmp_path) as c, RawEdge(c.port) as edge:
        c.catalog.register(spec(), 1)
        c.catalog.gate = gate = asyncio.Event()
        await edge.hello()
        await edge.send(frame(0))
        await eventually(lambda: c.log.durable == [("jfk", 0)])
        await edge.call.write(pb.FromEdge(heartbeat=pb.Heartbeat(sent_at_ms=5)))
        await edge.until("time_echo")
        assert "ack" not in [m.WhichOneof("message") for m in edge.received], "the index does not have it yet"
        gate.set()
        await edge.acked(0)
        assert c.entries() == [("jfk", 0)]
        (entry,) = c.catalog.frames("miles@1", 0, 1)
        assert c.log.read(entry.segment, entry.offset, entry.length) == StoredFrame(JFK, "i1", frame(0))
        assert entry.received_at_ms == c.clock[0]


@on_a_loop
async def test_all_frames_that_wait_share_one_fsync_and_one_transaction(tmp_path: Path) -> None:
    async with center(tmp_path) as c, RawEdge(c.port) as edge, RawEdge(c.port) as other:
        c.catalog.register(spec(), 1)
        c.catalog.gate = gate = asyncio.Event()
        await edge.hello()
        await other.hello("lga")
        await edge.send(frame(0))
        await eventually(lambda: c.log.durable)
        await edge.send(*(frame(n) for n in range(1, 50)))
        await other.send(*(frame(n) for n in range(50)))
        await eventually(lambda: c.gateway.metrics.waiting._value.get() >= 100 * frame(0).wire_bytes)
        gate.set()
        await edge.acked(49)
        await other.acked(49)
        assert c.catalog.batches == [1, 99]
        assert c.log.syncs == 2


@on_a_loop
async def test_a_session_cut_in_mid_stream_goes_on_where_the_center_is(tmp_path: Path) -> None:
    async with center(tmp_path) as c:
        c.catalog.register(spec(), 1)
        async with RawEdge(c.port) as edge:
            welcome = await edge.hello()
            assert not welcome.any_acked
            await edge.send(frame(0), frame(1), frame(2))
            await edge.acked(2)
        async with RawEdge(c.port) as edge:
            welcome = await edge.hello(oldest=0, following=4)
            assert (welcome.any_acked, welcome.acked_through) == (True, 2)
            await edge.send(frame(3))
            await edge.acked(3)
        assert c.entries() == [("jfk", n) for n in range(4)]


@on_a_loop
async def test_a_re_delivered_frame_is_acknowledged_and_neither_written_nor_indexed_again(tmp_path: Path) -> None:
    async with center(tmp_path) as c:
        c.catalog.register(spec(), 1)
        async with RawEdge(c.port) as edge:
            await edge.hello()
            await edge.send(frame(0), frame(1))
            await edge.acked(1)
        async with RawEdge(c.port) as edge:
            await edge.hello(oldest=0, following=3)
            await edge.send(frame(0), frame(1), frame(2))
            await edge.acked(2)
        assert c.entries() == [("jfk", 0), ("jfk", 1), ("jfk", 2)]
        assert c.log.durable == [("jfk", 0), ("jfk", 1), ("jfk", 2)]


@on_a_loop
async def test_the_same_identity_with_another_checksum_is_an_alarm_that_names_it(tmp_path: Path) -> None:
    async with center(tmp_path) as c:
        c.catalog.register(spec(), 1)
        async with RawEdge(c.port) as edge:
            await edge.hello()
            await edge.send(frame(0))
            await edge.acked(0)
        async with RawEdge(c.port) as edge:
            await edge.hello(oldest=0, following=2)
            await edge.send(frame(0, content=b"another"), frame(1))
            status, code, message = await edge.refusal()
        assert (status, code) == (grpc.StatusCode.DATA_LOSS, "conflict")
        assert "edge jfk, incarnation i1, frame 0" in message
        await eventually(c.catalog.alarms)
        assert [(a.kind, a.edge, a.message) for a in c.catalog.alarms()] == [("frame-conflict", "jfk", message)]
        assert c.entries() == [("jfk", 0)]
        assert c.gateway.metrics.alarms.labels("frame-conflict")._value.get() == 1


@on_a_loop
async def test_a_frame_whose_checksum_is_wrong_is_refused_by_name(tmp_path: Path) -> None:
    async with center(tmp_path) as c, RawEdge(c.port) as edge:
        c.catalog.register(spec(), 1)
        await edge.hello()
        damaged = frame(0).to_wire()
        damaged.body = damaged.body[:-1] + bytes([damaged.body[-1] ^ 1])
        await edge.call.write(pb.FromEdge(frame=damaged))
        status, code, message = await edge.refusal()
        assert (status, code) == (grpc.StatusCode.DATA_LOSS, "corrupt-frame")
        assert "edge jfk, incarnation i1: frame 0: CRC32C" in message
        assert c.entries() == []


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        (pb.FromEdge(frame=frame(2).to_wire()), "frame 2 came where 0 is expected"),
        (pb.FromEdge(frame=frame(0, QueryRef("../x", 1)).to_wire()), "'../x', which is no query's name"),
        (pb.FromEdge(frame=frame(0, content=os.urandom(5_000)).to_wire()), "frame 0 has"),
        (pb.FromEdge(hello=pb.Hello()), "second Hello"),
        (pb.FromEdge(query_status=pb.QueryStatus(query="")), "a status of ''"),
    ],
)
@on_a_loop
async def test_a_message_that_breaks_the_protocol_ends_the_session_by_name(
    tmp_path: Path, broken: pb.FromEdge, named: str
) -> None:
    async with center(tmp_path, max_frame_bytes=4_000) as c, RawEdge(c.port) as edge:
        await edge.hello()
        await edge.call.write(broken)
        status, code, message = await edge.refusal()
        assert (status, code) == (grpc.StatusCode.FAILED_PRECONDITION, "protocol")
        assert named in message


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"protocol_min": 2, "protocol_max": 3}, "protocol 2 to 3"),
        ({"edge": "a b"}, "edge 'a b'"),
        ({"incarnation": ""}, "incarnation ''"),
        ({"oldest_seq": 9}, "frames 9"),
    ],
)
@on_a_loop
async def test_a_hello_that_makes_no_sense_is_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], named: str
) -> None:
    async with center(tmp_path) as c, RawEdge(c.port) as edge:
        with pytest.raises(grpc.aio.AioRpcError, match=named):
            await edge.hello(**fields)
        assert c.catalog.edges() == []


@on_a_loop
async def test_a_session_that_begins_with_something_else_or_nothing_is_ended(tmp_path: Path) -> None:
    async with center(tmp_path, hello_timeout_ms=50) as c:
        async with RawEdge(c.port) as edge:
            await edge.send(frame(0))
            assert "the first message was frame" in (await edge.refusal())[2]
        async with RawEdge(c.port) as edge:
            assert "no Hello within 50 ms" in (await edge.refusal())[2]


@on_a_loop
async def test_only_the_owner_of_a_token_is_let_in_and_only_under_its_own_id(tmp_path: Path) -> None:
    async with center(tmp_path, tokens={"jfk": "secret-j", "lga": "secret-l"}) as c:
        for token, named in ((None, "no credential"), ("wrong", "unknown credential"), ("", "unknown credential")):
            async with RawEdge(c.port, token) as edge:
                status, code, message = await edge.refusal()
                assert (status, code) == (grpc.StatusCode.UNAUTHENTICATED, "unauthenticated")
                assert named in message
        async with RawEdge(c.port, "secret-l") as edge:
            with pytest.raises(grpc.aio.AioRpcError, match="Hello of edge jfk with the credential of edge lga"):
                await edge.hello("jfk")
        assert c.catalog.edges() == []
        async with RawEdge(c.port, "secret-j") as edge:
            await edge.hello("jfk")


@on_a_loop
async def test_without_credentials_only_this_machine_is_served(tmp_path: Path) -> None:
    catalog = Catalog(f"sqlite:///{tmp_path}/c.db")
    gateway = Gateway(catalog, FrameLog(tmp_path / "log"), GatewayConfig(), lambda: 0)
    with pytest.raises(InvalidConfig, match=r"gateway\.listen: '0\.0\.0\.0:0'.*loopback"):
        await gateway.start("0.0.0.0:0")
    await gateway.stop()
    catalog.close()


@on_a_loop
async def test_a_port_that_somebody_has_is_refused_by_name(tmp_path: Path) -> None:
    async with center(tmp_path) as c:
        second = Gateway(c.catalog, FrameLog(tmp_path / "log2"), GatewayConfig(), lambda: 0)
        with pytest.raises(InvalidConfig, match=f"127.0.0.1:{c.port}"):
            await second.start(f"127.0.0.1:{c.port}")
        await second.stop()


@on_a_loop
async def test_a_frame_of_an_unknown_or_deleted_query_is_acknowledged_counted_and_not_stored(tmp_path: Path) -> None:
    async with center(tmp_path) as c, RawEdge(c.port) as edge:
        c.catalog.register(spec(), 1)
        await edge.hello()
        await edge.send(frame(0), frame(1, QueryRef("unknown", 7)))
        await edge.acked(1)
        c.catalog.delete("miles", 2)
        await edge.send(frame(2))
        await edge.acked(2)
        assert c.log.durable[0] == ("jfk", 0)
        assert c.entries() == [("jfk", 0)]
        assert c.catalog.positions() == {"miles@1": 1}
        assert c.gateway.metrics.frames.labels("discarded")._value.get() == 2
        assert c.catalog.acked_through(JFK, "i1") == 2, "the edge has let go of them: they are not asked for again"


@on_a_loop
async def test_a_query_registered_a_moment_ago_elsewhere_is_known_when_its_first_frame_comes(tmp_path: Path) -> None:
    async with center(tmp_path, poll_ms=60_000) as c, RawEdge(c.port) as edge:
        await edge.hello()
        c.catalog.register(spec(), 1)
        await edge.send(frame(0))
        await edge.acked(0)
        assert c.entries() == [("jfk", 0)]


@pytest.mark.parametrize("where", ["append", "sync", "index"])
@on_a_loop
async def test_a_disk_that_is_full_costs_time_and_no_frame(tmp_path: Path, where: str) -> None:
    async with center(tmp_path) as c, RawEdge(c.port) as edge:
        c.catalog.register(spec(), 1)
        await edge.hello()
        await edge.send(frame(0))
        await edge.acked(0)
        setattr(c.catalog if where == "index" else c.log, {"index": "refuse"}.get(where, f"refuse_{where}"), True)
        await edge.send(frame(1), frame(2))
        assert (await edge.until("throttle")).throttle.retry_after_ms > 0
        assert "cannot be made durable" in c.gateway.readiness()[0]
        assert c.gateway.metrics.stalled._value.get() == 1
        async with httpx.AsyncClient(transport=httpx.ASGITransport(observe(c.gateway)), base_url="http://g") as http:
            answer = await http.get("/readyz")
            assert answer.status_code == 503 and "made durable" in answer.json()["missing"][0]
            assert (await http.get("/livez")).status_code == 200
            assert "edgewater_gateway_stalled 1.0" in (await http.get("/metrics")).text
        assert c.entries() == [("jfk", 0)]
        assert all(m.ack.through < 1 for m in edge.received if m.WhichOneof("message") == "ack")
        c.log.refuse_append = c.log.refuse_sync = c.catalog.refuse = False
        await edge.acked(2)
        assert c.entries() == [("jfk", n) for n in range(3)]
        for entry in c.catalog.frames("miles@1", 0, 9):
            assert c.log.read(entry.segment, entry.offset, entry.length).frame.seq == entry.seq
        assert c.gateway.readiness() == []


@on_a_loop
async def test_a_center_killed_between_log_and_index_takes_the_frame_again_and_counts_it_once(tmp_path: Path) -> None:
    async with center(tmp_path) as c, RawEdge(c.port) as edge:
        c.catalog.register(spec(), 1)
        await edge.hello()
        c.catalog.refuse = True
        await edge.send(frame(0))
        await eventually(lambda: c.log.durable)
    torn = next(tmp_path.rglob("*.frames"))
    os.truncate(torn, torn.stat().st_size - 3)
    async with center(tmp_path) as c, RawEdge(c.port) as edge:
        welcome = await edge.hello(oldest=0, following=1)
        assert not welcome.any_acked
        await edge.send(frame(0))
        await edge.acked(0)
        (entry,) = c.catalog.frames("miles@1", 0, 9)
        assert c.log.read(entry.segment, entry.offset, entry.length).frame == frame(0)


@on_a_loop
async def test_frames_go_to_a_new_segment_when_retention_has_taken_the_open_one(tmp_path: Path) -> None:
    async with center(tmp_path) as c, RawEdge(c.port) as edge:
        c.catalog.register(spec(), 1)
        await edge.hello()
        await edge.send(frame(0))
        await edge.acked(0)
        for segment in c.catalog.forget_frames({"miles@1": 1}):
            c.log.remove(segment)
        await edge.send(frame(1))
        await edge.acked(1)
        (entry,) = c.catalog.frames("miles@1", 0, 9)
        assert c.log.read(entry.segment, entry.offset, entry.length).frame == frame(1)


@on_a_loop
async def test_a_query_registered_in_the_catalog_reaches_a_connected_edge(tmp_path: Path) -> None:
    async with center(tmp_path) as c, RawEdge(c.port) as edge:
        await edge.hello()
        assert len((await edge.until("queries")).queries.queries) == 0
        began = asyncio.get_running_loop().time()
        await asyncio.to_thread(c.catalog.register, spec(), 1)
        (query,) = (await edge.until("queries")).queries.queries
        assert asyncio.get_running_loop().time() - began < 1.0
        assert (query.name, query.version) == ("miles", 1)
        await asyncio.to_thread(c.catalog.delete, "miles", 2)
        assert len((await edge.until("queries")).queries.queries) == 0


@on_a_loop
async def test_an_edge_is_asked_only_what_expects_it(tmp_path: Path) -> None:
    async with center(tmp_path) as c, RawEdge(c.port) as edge:
        c.catalog.register(spec("mine", edges=["jfk"]), 1)
        c.catalog.register(spec("theirs", edges=["lga"]), 1)
        c.catalog.register(spec("elsewhere", **{"from": "trains"}), 1)
        await edge.hello()
        queries = (await edge.until("queries")).queries.queries
        assert [q.name for q in queries] == ["mine"]


@on_a_loop
async def test_error_budgets_are_shared_by_the_edges_that_are_expected(tmp_path: Path) -> None:
    async with center(tmp_path) as c, RawEdge(c.port) as edge, RawEdge(c.port) as other:
        c.catalog.register(spec(budget={"error": {"miles": 1000, "farthest": 80}}), 1)
        await edge.hello()
        assert dict((await edge.until("budget")).budget.shares) == {"miles": 1000, "farthest": 80}
        await other.hello("lga")
        for each in (edge, other):
            assert dict((await each.until("budget")).budget.shares) == {"miles": 500, "farthest": 80}
        await asyncio.to_thread(c.catalog.retire, EdgeId("lga"))
        assert dict((await edge.until("budget")).budget.shares) == {"miles": 1000, "farthest": 80}


@on_a_loop
async def test_heartbeats_and_statuses_reach_the_catalog_and_each_heartbeat_is_echoed(tmp_path: Path) -> None:
    async with center(tmp_path) as c, RawEdge(c.port) as edge:
        await edge.hello()
        progress = [
            pb.StreamProgress(stream="flights", watermark_ms=77, records=5),
            pb.StreamProgress(stream="trains", watermark_ms=78, ended=True, records=6),
        ]
        beat = pb.Heartbeat(streams=progress, rtt_ms=40, drops={"late": 2}, sent_at_ms=c.clock[0] - 10)
        await edge.call.write(pb.FromEdge(heartbeat=beat))
        echo = (await edge.until("time_echo")).time_echo
        assert (echo.edge_sent_at_ms, echo.center_received_at_ms) == (c.clock[0] - 10, c.clock[0])
        refused = pb.QueryStatus(query="miles", query_version=1, code="invalid-query", message="no column")
        await edge.call.write(pb.FromEdge(query_status=refused))
        await eventually(lambda: c.catalog.statuses(MILES) and c.catalog.edge(JFK).records)
        record = c.catalog.edge(JFK)
        assert record.watermarks == {"flights": 77, "trains": 1 << 62}
        assert (record.records, record.drops, record.clock_offset_ms) == ({"flights": 5, "trains": 6}, {"late": 2}, 10)
        assert c.catalog.statuses(MILES)[JFK].message == "no column"
        assert record.connected
        await edge.call.write(pb.FromEdge(goodbye=pb.Goodbye(reason="done")))
        await eventually(lambda: not c.catalog.edge(JFK).connected)


@on_a_loop
async def test_numbers_and_texts_that_no_database_holds_harm_nobody(tmp_path: Path) -> None:
    async with center(tmp_path) as c, RawEdge(c.port) as edge:
        await edge.hello()
        beat = pb.Heartbeat(
            rtt_ms=float("nan"), bandwidth_bytes_s=float("inf"), backlog_bytes=(1 << 64) - 1, drops={"a\0b": 1}
        )
        await edge.call.write(pb.FromEdge(heartbeat=beat))
        await eventually(lambda: c.catalog.edge(JFK).drops)
        record = c.catalog.edge(JFK)
        assert (record.rtt_ms, record.bandwidth_bytes_s, record.backlog_bytes) == (0, 0, 1 << 62)


@on_a_loop
async def test_after_goodbye_all_that_was_sent_is_acknowledged(tmp_path: Path) -> None:
    async with center(tmp_path) as c, RawEdge(c.port) as edge:
        c.catalog.register(spec(), 1)
        await edge.hello()
        await edge.send(*(frame(n) for n in range(20)))
        await edge.call.write(pb.FromEdge(goodbye=pb.Goodbye(reason="done")))
        await edge.acked(19)
        while await edge.call.read() is not grpc.aio.EOF:
            pass
        assert await edge.call.code() == grpc.StatusCode.OK


@on_a_loop
async def test_a_gateway_that_stops_acknowledges_what_it_has_read(tmp_path: Path) -> None:
    async with center(tmp_path) as c, RawEdge(c.port) as edge:
        c.catalog.register(spec(), 1)
        c.catalog.gate = gate = asyncio.Event()
        await edge.hello()
        await edge.send(frame(0))
        await eventually(lambda: c.log.durable)
        stopping = asyncio.create_task(c.gateway.stop())
        gate.set()
        await edge.acked(0)
        await stopping


@on_a_loop
async def test_a_newer_session_of_an_edge_takes_the_older_ones_place(tmp_path: Path) -> None:
    async with center(tmp_path) as c, RawEdge(c.port) as old, RawEdge(c.port) as new:
        await old.hello()
        await new.hello()
        assert "a newer session" in (await old.refusal())[2]
        await new.call.write(pb.FromEdge(heartbeat=pb.Heartbeat(sent_at_ms=1)))
        await new.until("time_echo")
        assert c.catalog.edge(JFK).connected


@on_a_loop
async def test_an_edge_that_sends_more_than_its_credit_is_read_no_further(tmp_path: Path) -> None:
    large = [frame(n, content=os.urandom(8_000)) for n in range(400)]
    async with center(tmp_path, credit_bytes=20_000) as c, RawEdge(c.port) as edge:
        c.catalog.register(spec(), 1)
        welcome = await edge.hello()
        assert welcome.credit_bytes == 20_000
        c.log.refuse_append = True
        sending = asyncio.create_task(edge.send(*large))
        await edge.until("throttle", lambda throttle: throttle.retry_after_ms > 0)
        for _ in range(20):
            await edge.until("throttle", lambda throttle: throttle.retry_after_ms > 0)
        assert c.gateway.metrics.waiting._value.get() <= 2 * 20_000 + large[0].wire_bytes
        c.log.refuse_append = False
        await edge.acked(399)
        await sending
        assert c.entries() == [("jfk", n) for n in range(400)]


def many(seqs: Iterable[int]) -> list[Frame]:
    return [frame(n) for n in seqs]


@on_a_loop
async def test_two_gateways_over_one_catalog_and_log_count_each_frame_once(tmp_path: Path) -> None:
    async with center(tmp_path) as a, center(tmp_path) as b:
        a.catalog.register(spec(), 1)
        async with RawEdge(a.port) as first, RawEdge(b.port) as second:
            await first.hello()
            await second.hello(following=30)
            await asyncio.gather(first.send(*many(range(20))), second.send(*many(range(30))))
            await asyncio.gather(first.acked(19), second.acked(29))
        assert b.entries() == [("jfk", n) for n in range(30)]
        assert [e.position for e in a.catalog.frames("miles@1", 0, 99)] == list(range(1, 31))
        for entry in a.catalog.frames("miles@1", 0, 99):
            assert a.log.read(entry.segment, entry.offset, entry.length).frame == frame(entry.seq)
        kinds = [c.gateway.metrics.frames.labels("new")._value.get() for c in (a, b)]
        assert sum(kinds) == 30
