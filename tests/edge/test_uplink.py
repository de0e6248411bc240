from __future__ import annotations

import asyncio
import functools
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from center.catalog import Catalog
from center.config import TlsFiles as ServerTls
from center.gateway import Gateway
from center.gateway_config import GatewayConfig
from center.log import FrameLog
from edge.link import LinkLimits
from edge.uplink import QueryStatusReport, TlsFiles, Uplink
from edgewater.errors import InvalidConfig
from edgewater.query import QuerySpec
from edgewater.wire import uplink_pb2 as pb
from edgewater.wire import uplink_pb2_grpc
from edgewater.wire.frames import Frame, FrameBody, Partial, QueryRef

PATIENCE_S = 30
MILES = QueryRef("miles", 1)
SPEC = QuerySpec.from_mapping(
    {
        "name": "miles",
        "from": "flights",
        "measures": {"miles": "sum(distance)"},
        "window": {"tumbling": "60s"},
        "budget": {"error": {"miles": 100}},
    }
)
QUICK = LinkLimits(heartbeat_s=0.02, reconnect_max_s=0.05)

SCRIPTED = LinkLimits(heartbeat_s=0.02, reconnect_max_s=0.05, goodbye_s=0.01)


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a test on an event loop, and fails it rather than wait for ever."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(PATIENCE_S):
                await test(*args, **kwargs)

        asyncio.run(bounded())

    return run


def frame(seq: int, size: int = 200) -> Frame:
    return Frame.pack(seq, MILES, FrameBody(seq, (Partial(0, 0, np.random.default_rng(seq).bytes(size)),)))


class Agent:
    """An agent's journal and ears, in memory: what `Outbox` and `Listener` promise, and what was heard."""

    def __init__(self, edge: str = "jfk") -> None:
        self.edge = edge
        self.journal: list[Frame] = []
        self.acked = -1
        self.capacities: list[int] = []
        self.welcomes: list[int | None] = []
        self.queries: list[tuple[QueryRef, QuerySpec]] = []
        self.shares: dict[str, float] = {}
        self.link = (0.0, 0.0)
        self.refuse = False
        self._made = asyncio.Event()
        self._heard = asyncio.Event()
        self._ready: list[Frame] = []
        self.taking = 0
        self.durable = asyncio.Event()
        self.durable.set()

    def make(self, frames: Iterable[Frame]) -> None:
        """Frames become worth sending."""
        self._ready += frames
        self._made.set()

    def unacknowledged(self, after: int | None) -> Iterable[Frame]:
        return [f for f in self.journal if after is None or f.seq > after]

    async def take(self, capacity_bytes: int) -> Frame:
        self.taking += 1
        assert self.taking == 1, "one take at a time"
        self.capacities.append(capacity_bytes)
        try:
            while not self._ready:
                self._made.clear()
                await self._made.wait()
            taken = self._ready.pop(0)
            await self.durable.wait()
            self.journal.append(taken)
            return taken
        finally:
            self.taking -= 1

    def on_welcome(self, acked_through: int | None) -> None:
        self.welcomes.append(acked_through)
        if acked_through is not None:
            self.on_ack(acked_through)
        self._heard.set()

    def on_ack(self, through: int) -> None:
        assert through >= self.acked, "an acknowledgement never goes back"
        self.acked = through
        self.journal = [f for f in self.journal if f.seq > through]
        self._heard.set()

    def on_queries(self, version: int, queries: Sequence[tuple[QueryRef, QuerySpec]]) -> Sequence[QueryStatusReport]:
        self.queries = list(queries)
        self._heard.set()
        return [QueryStatusReport(ref, not self.refuse, "invalid-query" if self.refuse else "") for ref, _ in queries]

    def on_budget(self, query: QueryRef, shares: Mapping[str, float]) -> None:
        self.shares = dict(shares)
        self._heard.set()

    def on_link(self, bandwidth_bytes_s: float, rtt_ms: float) -> None:
        self.link = (bandwidth_bytes_s, rtt_ms)
        self._heard.set()

    def hello(self) -> pb.Hello:
        following = max([self.acked, *(f.seq for f in self.journal)]) + 1
        return pb.Hello(
            protocol_min=1,
            protocol_max=1,
            edge=self.edge,
            incarnation="i1",
            streams=[pb.Stream(name="flights", columns=[pb.Stream.Column(name="distance", type="int64")])],
            oldest_seq=self.journal[0].seq if self.journal else following,
            next_seq=following,
            sent_at_ms=0,
        )

    def heartbeat(self) -> pb.Heartbeat:
        return pb.Heartbeat(sent_at_ms=time.monotonic_ns())

    async def until(self, test: Callable[[], object]) -> None:
        """Waits until what was heard makes the test true."""
        while not test():
            self._heard.clear()
            await self._heard.wait()


class Proxy:
    """A TCP link that can be cut, or made to swallow everything."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.passed = 0
        self.cut_after: int | None = None
        self.swallow = False
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
            while data := await reader.read(1 << 16):
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
async def gateway(path: Path, address: str = "127.0.0.1:0", **settings: Any) -> AsyncIterator[tuple[int, Catalog]]:
    catalog = Catalog(f"sqlite:///{path}/catalog.db")
    quick = {"poll_ms": 20, "heartbeat_ms": 20, "retry_ms": 5, "retry_max_ms": 20}
    serving = Gateway(catalog, FrameLog(path / "log"), GatewayConfig(**(quick | settings)), lambda: 1_000)
    port = await serving.start(address)
    try:
        yield port, catalog
    finally:
        await serving.stop()
        catalog.close()


def uplink(port: int, agent: Agent, limits: LinkLimits = QUICK, **options: Any) -> Uplink:
    defaults: dict[str, Any] = {"token": None, "tls": None, "now_ms": lambda: 1_000, "monotonic": time.monotonic}
    return Uplink(f"localhost:{port}", agent, agent, limits=limits, **(defaults | options))


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
    return [e.seq for e in catalog.frames("miles@1", 0, 1 << 40)]


@on_a_loop
async def test_frames_reach_the_center_and_are_acknowledged_in_order(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (port, catalog):
        catalog.register(SPEC, 1)
        agent = Agent()
        async with running(uplink(port, agent)):
            agent.make(frame(n) for n in range(100))
            await agent.until(lambda: agent.acked == 99)
        assert entries(catalog) == list(range(100))
        assert agent.welcomes == [None]


@on_a_loop
async def test_queries_and_shares_come_down_and_statuses_go_up(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (port, catalog):
        agent = Agent()
        agent.refuse = True
        async with running(uplink(port, agent)):
            await agent.until(lambda: agent.welcomes)
            await asyncio.to_thread(catalog.register, SPEC, 1)
            await agent.until(lambda: agent.shares)
            assert agent.queries == [(MILES, SPEC)]
            assert agent.shares == {"miles": 100}
            while not (statuses := await asyncio.to_thread(catalog.statuses, MILES)):
                await asyncio.sleep(0.005)
        assert [(s.accepted, s.code) for s in statuses.values()] == [(False, "invalid-query")]


@on_a_loop
async def test_the_link_is_measured_by_acknowledgements_and_heartbeats(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (port, catalog):
        catalog.register(SPEC, 1)
        agent = Agent()
        async with running(uplink(port, agent)):
            agent.make(frame(n, 20_000) for n in range(50))
            await agent.until(lambda: agent.acked == 49 and agent.link[1] > 0)
            assert agent.link[0] > 0


@pytest.mark.parametrize("seed", range(4))
@on_a_loop
async def test_a_link_that_is_cut_again_and_again_loses_nothing_and_doubles_nothing(tmp_path: Path, seed: int) -> None:
    cuts = np.random.default_rng(seed)
    async with gateway(tmp_path) as (port, catalog), Proxy(port) as proxy:
        catalog.register(SPEC, 1)
        agent = Agent()
        frames = [frame(n, int(cuts.integers(100, 60_000))) for n in range(150)]
        async with running(uplink(proxy.port, agent)):
            agent.make(frames)
            for _ in range(6):
                proxy.cut_after = proxy.passed + int(cuts.integers(1, 400_000))
                welcomes = len(agent.welcomes)
                await agent.until(lambda seen=welcomes: len(agent.welcomes) > seen or agent.acked == 149)
            proxy.cut_after = None
            await agent.until(lambda: agent.acked == 149)
        assert entries(catalog) == list(range(150))
        assert catalog.alarms() == []
        log = FrameLog(tmp_path / "log")
        for entry, sent in zip(catalog.frames("miles@1", 0, 999), frames, strict=True):
            assert log.read(entry.segment, entry.offset, entry.length).frame == sent


@on_a_loop
async def test_a_center_that_goes_away_and_comes_back_is_found_again(tmp_path: Path) -> None:
    agent = Agent()
    async with gateway(tmp_path) as (port, catalog):
        catalog.register(SPEC, 1)
        link = uplink(port, agent)
        task = asyncio.create_task(link.run())
        agent.make([frame(0)])
        await agent.until(lambda: agent.acked == 0)
        assert link.connected
    agent.make([frame(1)])
    while link.connected or not agent.journal:
        await asyncio.sleep(0.005)
    async with gateway(tmp_path, f"127.0.0.1:{port}") as (_, catalog):
        await agent.until(lambda: agent.acked == 1)
        assert entries(catalog) == [0, 1]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert agent.welcomes[-1] == 0


@on_a_loop
async def test_a_frame_that_is_being_made_durable_while_the_link_breaks_is_sent_once_and_in_its_place(
    tmp_path: Path,
) -> None:
    async with gateway(tmp_path) as (port, catalog), Proxy(port) as proxy:
        catalog.register(SPEC, 1)
        agent = Agent()
        async with running(uplink(proxy.port, agent)):
            agent.make([frame(0)])
            await agent.until(lambda: agent.acked == 0)
            agent.durable.clear()
            agent.make([frame(1), frame(2)])
            proxy.cut()
            await agent.until(lambda: len(agent.welcomes) == 2)
            assert agent.taking == 1, "the take outlives the session"
            agent.durable.set()
            await agent.until(lambda: agent.acked == 2)
        assert entries(catalog) == [0, 1, 2]


@on_a_loop
async def test_a_link_that_swallows_everything_is_noticed_and_replaced(tmp_path: Path) -> None:
    limits = LinkLimits(heartbeat_s=0.02, reconnect_max_s=0.02, silence_s=0.3)
    async with gateway(tmp_path) as (port, catalog), Proxy(port) as proxy:
        catalog.register(SPEC, 1)
        agent = Agent()
        async with running(uplink(proxy.port, agent, limits)):
            await agent.until(lambda: agent.welcomes)
            proxy.swallow = True
            agent.make([frame(0)])
            seen = proxy.connections
            while proxy.connections == seen:
                await asyncio.sleep(0.01)
            proxy.swallow = False
            await agent.until(lambda: agent.acked == 0)
        assert entries(catalog) == [0]


@on_a_loop
async def test_a_clean_stop_says_goodbye_and_hears_the_last_acknowledgements(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (port, catalog):
        catalog.register(SPEC, 1)
        agent = Agent()
        link = uplink(port, agent)
        async with running(link):
            agent.make(frame(n) for n in range(200))
            await agent.until(lambda: agent.acked >= 0)
        assert entries(catalog) == list(range(agent.acked + 1)), "what the center has, the agent knows of"
        assert not link.connected
        assert agent.taking == 0
        while catalog.edge("jfk").connected:
            await asyncio.sleep(0.005)


@on_a_loop
async def test_frames_keep_to_the_room_that_link_and_center_have(tmp_path: Path) -> None:
    async with gateway(tmp_path, credit_bytes=100_000, max_frame_bytes=50_000) as (port, catalog):
        catalog.register(SPEC, 1)
        agent = Agent()
        async with running(uplink(port, agent)):
            agent.make(frame(n, 4_000) for n in range(100))
            await agent.until(lambda: agent.acked == 99)
        assert all(0 < capacity <= 50_000 for capacity in agent.capacities)


@on_a_loop
async def test_a_cap_on_bandwidth_is_kept(tmp_path: Path) -> None:
    clock = [0.0]
    limits = LinkLimits(bandwidth_bytes_s=20_000, heartbeat_s=60)
    async with gateway(tmp_path) as (port, catalog):
        catalog.register(SPEC, 1)
        agent = Agent()
        async with running(uplink(port, agent, limits, monotonic=lambda: clock[0])):
            agent.make(frame(n, 5_000) for n in range(20))
            await agent.until(lambda: agent.acked >= 3)
            for second in range(1, 7):
                clock[0] = float(second)
                await agent.until(lambda due=second: agent.acked >= min(19, 3 * (due + 1)))
                assert (agent.acked + 1) * 5_000 <= 20_000 * (second + 1) + 5_000 + 1_000
        assert entries(catalog) == list(range(20))


@on_a_loop
async def test_a_center_that_holds_the_edge_back_is_obeyed_until_it_is_over(tmp_path: Path) -> None:
    script = ScriptedCenter()
    async with script.serve() as port:
        agent = Agent()
        async with running(uplink(port, agent, SCRIPTED)):
            script.say(pb.ToEdge(throttle=pb.Throttle(retry_after_ms=3_600_000)))
            script.say(pb.ToEdge(budget=pb.Budget(query="miles", query_version=1, shares={"miles": 7})))
            await agent.until(lambda: agent.shares)
            agent.make([frame(0)])
            await script.heard("heartbeat", 5)
            # One take may have been under way before the word came.
            assert len(script.frames) <= 1
            before = len(script.frames)
            agent.make([frame(1)])
            await script.heard("heartbeat", 5)
            assert len(script.frames) == before
            script.say(pb.ToEdge(throttle=pb.Throttle(retry_after_ms=0)))
            await script.heard("frame", 2)


@on_a_loop
async def test_a_center_that_acknowledges_what_was_never_sent_is_not_believed(tmp_path: Path) -> None:
    script = ScriptedCenter()
    async with script.serve() as port:
        agent = Agent()
        async with running(uplink(port, agent, SCRIPTED)):
            await agent.until(lambda: agent.welcomes)
            script.say(pb.ToEdge(ack=pb.Ack(through=12)))
            await agent.until(lambda: len(agent.welcomes) == 2)
            assert agent.acked == -1


@on_a_loop
async def test_a_query_that_this_release_cannot_read_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    script = ScriptedCenter()
    async with script.serve() as port:
        agent = Agent()
        async with running(uplink(port, agent, SCRIPTED)):
            text = '{"name": "miles", "from": "flights", "measures": {"m": "sum(x)"}, "window": {"tumbling": "1s"}}'
            strange = text.replace("sum(x)", "oracle(x)").replace("miles", "future")
            queries = [
                pb.Query(name="future", version=1, spec=strange),
                pb.Query(name="broken", version=1, spec="{"),
                pb.Query(name="miles", version=1, spec=text),
            ]
            script.say(pb.ToEdge(queries=pb.Queries(version=1, queries=queries)))
            await script.heard("query_status", 3)
        assert [ref.name for ref, _ in agent.queries] == ["miles"]
        statuses = {m.query_status.query: m.query_status for m in script.messages if m.HasField("query_status")}
        assert {name: s.accepted for name, s in statuses.items()} == {"future": False, "broken": False, "miles": True}
        assert "oracle" in statuses["future"].message


@on_a_loop
async def test_an_outbox_that_skips_a_frame_is_stopped_before_it_is_sent(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (port, catalog):
        catalog.register(SPEC, 1)
        agent = Agent()
        link = uplink(port, agent)
        agent.make([frame(0), frame(2)])
        with pytest.raises(RuntimeError, match="frame 2 after 0"):
            await link.run()


@on_a_loop
async def test_a_wrong_token_is_tried_again_until_it_is_right(tmp_path: Path) -> None:
    async with gateway(tmp_path, tokens={"jfk": "secret"}) as (port, _catalog):
        agent = Agent()
        async with running(uplink(port, agent, token="wrong")) as task:
            while "unknown credential" not in str(await refusals(port, "wrong")):
                pass
            assert not task.done()
            assert agent.welcomes == []
        async with running(uplink(port, agent, token="secret")):
            await agent.until(lambda: agent.welcomes)


async def refusals(port: int, token: str) -> str | None:
    async with grpc.aio.insecure_channel(f"localhost:{port}") as channel:
        call = uplink_pb2_grpc.UplinkStub(channel).Session(metadata=(("authorization", f"Bearer {token}"),))
        return await call.details()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA, and certificates of it for the center (localhost) and for edge jfk."""
    path = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=path, check=True, capture_output=True)

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca", "-days", "2")
    for name in ("localhost", "jfk"):
        (path / f"{name}.ext").write_text(f"subjectAltName=DNS:{name}")
        openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
            *("-out", f"{name}.pem", "-extfile", f"{name}.ext", "-days", "2"),
        )
    return path


@on_a_loop
async def test_with_mutual_tls_an_edge_is_who_its_certificate_says(tmp_path: Path, certificates: Path) -> None:
    c = certificates
    server = ServerTls(cert=c / "localhost.pem", key=c / "localhost.key", client_ca=c / "ca.pem")
    client = TlsFiles(c / "ca.pem", c / "jfk.pem", c / "jfk.key")
    async with gateway(tmp_path, tls=server) as (port, catalog):
        catalog.register(SPEC, 1)
        agent, impostor = Agent("jfk"), Agent("lga")
        async with running(uplink(port, impostor, tls=client)), running(uplink(port, agent, tls=client)):
            agent.make([frame(0)])
            await agent.until(lambda: agent.acked == 0)
        assert impostor.welcomes == []
        assert [e.edge for e in catalog.edges()] == ["jfk"]


def test_tls_files_that_cannot_be_read_are_named() -> None:
    async def build() -> None:
        uplink(1, Agent(), tls=TlsFiles(ca=Path("/nowhere/ca.pem")))

    with pytest.raises(InvalidConfig, match=r"center\.tls\.ca: '/nowhere/ca\.pem'"):
        asyncio.run(build())


class ScriptedCenter:
    """A center that welcomes, echoes heartbeats, and otherwise says what it is told to and nothing else."""

    def __init__(self) -> None:
        self.messages: list[pb.FromEdge] = []
        self._to_say: asyncio.Queue[pb.ToEdge] = asyncio.Queue()
        self._changed = asyncio.Event()

    @property
    def frames(self) -> list[pb.Frame]:
        return [m.frame for m in self.messages if m.HasField("frame")]

    def say(self, message: pb.ToEdge) -> None:
        self._to_say.put_nowait(message)

    async def heard(self, kind: str, more: int) -> None:
        """Waits for so many more messages of a kind (frames: so many in all)."""
        base = 0 if kind in ("frame", "query_status") else self._count(kind)
        while self._count(kind) < base + more:
            self._changed.clear()
            await self._changed.wait()

    def _count(self, kind: str) -> int:
        return sum(m.WhichOneof("message") == kind for m in self.messages)

    async def Session(self, requests: Any, context: Any) -> None:  # noqa: N802
        await anext(requests)
        await context.write(pb.ToEdge(welcome=pb.Welcome(protocol=1, max_frame_bytes=1 << 20, credit_bytes=1 << 20)))
        hearing = asyncio.create_task(self._hear(requests))
        try:
            while True:
                await context.write(await self._to_say.get())
        finally:
            hearing.cancel()

    async def _hear(self, requests: Any) -> None:
        async for message in requests:
            self.messages.append(message)
            self._changed.set()
            if message.HasField("heartbeat"):
                self.say(pb.ToEdge(time_echo=pb.TimeEcho(edge_sent_at_ms=message.heartbeat.sent_at_ms)))

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
