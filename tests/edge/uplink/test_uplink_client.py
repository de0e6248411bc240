from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pyarrow as pa
import pytest
from pydantic import SecretStr

from center.config import TlsSection as ServerTls
from center.edge_access import EdgeAccess
from center.storage.frame_log import FrameLog
from edge.config import TlsConfig
from edge.uplink import LinkLimits
from edge.uplink.uplink_session import FIRST_HEARTBEATS
from edgewater.base.errors import InvalidConfig
from edgewater.model.lookups import digest_of, encode_rows, pack_rows
from edgewater.runtime.configuration import read_secret
from edgewater.wire import Encoding, Frame, uplink_pb2_grpc
from edgewater.wire import uplink_pb2 as pb
from tests.cells import at_night
from tests.center.kept_frames import read_frame, stored_frame
from tests.certificates import make_certificates
from tests.edge.uplink_world import (
    MILES,
    PATIENCE_S,
    SCRIPTED,
    SPEC,
    Agent,
    Proxy,
    ScriptedCenter,
    entries,
    frame,
    gateway,
    running,
    uplink,
)
from tests.refusals import refused

pytestmark = pytest.mark.slow


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
def script() -> ScriptedCenter:
    return ScriptedCenter()


async def test_frames_reach_the_center_and_are_acknowledged_in_order(tmp_path: Path, agent: Agent) -> None:
    async with gateway(tmp_path, queries=[SPEC]) as (port, catalog):
        async with running(uplink(port, agent)):
            agent.make(frame(n) for n in range(100))
            await agent.until(lambda: agent.acked == 99)
        assert entries(catalog) == list(range(100))
        assert agent.welcomes == [None]


async def test_queries_and_shares_come_down_and_statuses_go_up(tmp_path: Path, agent: Agent) -> None:
    async with gateway(tmp_path) as (port, catalog):
        agent.refuse = True
        async with running(uplink(port, agent)):
            await agent.until(lambda: agent.welcomes)
            await asyncio.to_thread(catalog.queries.register, SPEC, 1)
            await agent.until(lambda: agent.shares)
            assert agent.queries == [(MILES, SPEC)]
            assert agent.shares == {"miles": 100}
            while not (statuses := await asyncio.to_thread(catalog.queries.statuses, MILES)):
                await asyncio.sleep(0.005)
        assert [(s.accepted, s.code) for s in statuses.values()] == [(False, "invalid-query")]


@pytest.mark.nightly
async def test_the_link_is_measured_by_acknowledgements_and_heartbeats(tmp_path: Path, agent: Agent) -> None:
    async with gateway(tmp_path, queries=[SPEC]) as (port, _catalog), running(uplink(port, agent)):
        agent.make(frame(n, 20_000) for n in range(200))
        await agent.until(lambda: agent.acked >= 199)
        link = agent.forecast()
        assert link.low_bytes_s > 50_000.0, "it has carried 4 MB"
        assert 0 <= link.rtt_ms < 1_000 * PATIENCE_S  # echoes count whole milliseconds: none on a fast machine


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, *at_night(1, 2, 3)])
async def test_a_link_that_is_cut_again_and_again_loses_nothing_and_doubles_nothing(tmp_path: Path, seed: int) -> None:
    cuts = np.random.default_rng(seed)
    async with gateway(tmp_path, queries=[SPEC]) as (port, catalog), Proxy(port) as proxy:
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
        assert catalog.alarms.latest() == []
        log = FrameLog(tmp_path / "log")
        for entry, sent in zip(catalog.frames.entries("miles@1", 0, 999), frames, strict=True):
            assert read_frame(log, entry.segment, entry.offset, entry.length) == stored_frame(
                sent, entry.edge, entry.incarnation
            )


async def test_a_center_that_goes_away_and_comes_back_is_found_again(tmp_path: Path, agent: Agent) -> None:
    async with gateway(tmp_path, queries=[SPEC]) as (port, catalog):
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


async def test_a_frame_made_durable_while_the_link_breaks_is_sent_once_and_in_order(tmp_path: Path) -> None:
    async with gateway(tmp_path, queries=[SPEC]) as (port, catalog), Proxy(port) as proxy:
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


@pytest.mark.slow
async def test_a_link_that_drops_all_data_is_detected_and_replaced(tmp_path: Path, agent: Agent) -> None:
    limits = LinkLimits(heartbeat_s=0.02, reconnect_max_s=0.02, silence_s=0.3)
    async with gateway(tmp_path, queries=[SPEC]) as (port, catalog), Proxy(port) as proxy:
        async with running(uplink(proxy.port, agent, limits)):
            await agent.until(lambda: agent.welcomes)
            proxy.swallow = True
            agent.make([frame(0)])
            seen = proxy.connections
            async with asyncio.timeout(30):  # gRPC's own keepalive takes 40 s
                while proxy.connections == seen:
                    await asyncio.sleep(0.01)
            proxy.swallow = False
            await agent.until(lambda: agent.acked == 0)
        assert entries(catalog) == [0]


async def test_a_clean_stop_sends_goodbye_and_receives_the_last_acknowledgements(agent: Agent) -> None:
    script = ScriptedCenter()
    async with script.serve() as port:
        link = uplink(port, agent)
        async with running(link):
            agent.at_once = 2  # this center acknowledges nothing before the end
            agent.make([frame(0), frame(1)])
            await script.until_received("frame", 2)
            assert agent.acked == -1
            assert link.connected
        assert agent.acked == 1
        assert script.messages[-1].HasField("goodbye")
        assert not link.connected
        assert agent.taking == 0


async def test_after_a_clean_stop_the_center_knows_that_the_edge_is_gone(tmp_path: Path, agent: Agent) -> None:
    async with gateway(tmp_path, queries=[SPEC]) as (port, catalog):
        async with running(uplink(port, agent)):
            agent.make(frame(n) for n in range(200))
            await agent.until(lambda: agent.acked >= 0)
        assert entries(catalog) == list(range(agent.acked + 1)), "what the center has, the agent knows of"
        while catalog.edges.get("jfk").connected:
            await asyncio.sleep(0.005)


async def test_frame_sizes_respect_the_limits_of_link_and_center(tmp_path: Path, agent: Agent) -> None:
    async with gateway(tmp_path, credit_bytes=100_000, max_frame_bytes=50_000, queries=[SPEC]) as (port, _catalog):
        async with running(uplink(port, agent)):
            agent.make(frame(n, 4_000) for n in range(100))
            await agent.until(lambda: agent.acked == 99)
        assert all(0 < capacity <= 50_000 for capacity in agent.capacities)


async def test_a_cap_on_bandwidth_is_kept(tmp_path: Path, agent: Agent) -> None:
    clock = [0.0]
    limits = LinkLimits(bandwidth_bytes_s=20_000, heartbeat_s=60)
    async with gateway(tmp_path, queries=[replace(SPEC, budget=None)]) as (port, catalog):
        async with running(uplink(port, agent, limits, monotonic=lambda: clock[0])):
            while not await asyncio.to_thread(
                catalog.queries.statuses, MILES
            ):  # all messages but frames have been sent
                await asyncio.sleep(0.01)
            agent.make(frame(n, 4_800) for n in range(20))  # a quarter of a second each
            for step in range(1, 24):
                clock[0] = step / 4
                await agent.until(lambda due=step - 2: agent.acked >= min(19, due))
                assert (agent.acked + 1) * 4_800 <= 20_000 * clock[0] + 4_800
        assert entries(catalog) == list(range(20))


async def test_a_throttled_edge_waits_until_the_throttle_ends(agent: Agent, script: ScriptedCenter) -> None:
    async with script.serve() as port, running(uplink(port, agent, SCRIPTED)):
        script.send(pb.ToEdge(throttle=pb.Throttle(retry_after_ms=3_600_000)))
        script.send(pb.ToEdge(budget=pb.Budget(query="miles", query_version=1, shares={"miles": 7})))
        await agent.until(lambda: agent.shares)
        agent.make([frame(0)])
        await script.until_received("heartbeat", 5)
        agent.make([frame(1)])
        await script.until_received("heartbeat", 5)
        # One take may have been in progress when the throttle arrived; its frame may come at any time.
        assert len(script.frames) <= 1
        script.send(pb.ToEdge(throttle=pb.Throttle(retry_after_ms=0)))
        await script.until_received("frame", 1)
        # Without an acknowledgement the edge takes the link for gone after some time, and sends nothing.
        script.send(pb.ToEdge(ack=pb.Ack(through=0)))
        await script.until_received("frame", 2)


async def send_frames(agent: Agent, script: ScriptedCenter, seconds: float) -> None:
    """The edge sends frames for a while, each when the frame before is acknowledged."""
    until_s, n = asyncio.get_running_loop().time() + seconds, 0
    while asyncio.get_running_loop().time() < until_s:
        agent.make([frame(n)])
        n += 1
        await script.until_received("frame", n)
        script.send(pb.ToEdge(ack=pb.Ack(through=n - 1)))


async def test_heartbeats_come_at_the_interval_that_the_center_asks_for(agent: Agent, script: ScriptedCenter) -> None:
    async with script.serve() as port, running(uplink(port, agent, replace(SCRIPTED, heartbeat_s=0.01))):
        await script.until_received("heartbeat", 3)
        script.heartbeat_ms = 3_600_000
        await script.until_received("heartbeat", 1)
        await script.until_received("heartbeat", 1)  # of an interval that began before the echo
        script.send(pb.ToEdge(budget=pb.Budget(query="miles", query_version=1, shares={"miles": 7})))
        await agent.until(lambda: agent.shares)
        at = script.heartbeats
        await send_frames(agent, script, 0.2)  # twenty of the edge's own intervals
        assert script.heartbeats <= at + 1


async def test_an_edge_that_sends_frames_sends_fewer_heartbeats(agent: Agent, script: ScriptedCenter) -> None:
    script.heartbeat_ms = 100
    async with script.serve() as port, running(uplink(port, agent, replace(SCRIPTED, heartbeat_s=0.1))):
        await script.until_received("heartbeat", FIRST_HEARTBEATS)
        at = script.heartbeats
        await send_frames(agent, script, 1.2)  # twelve intervals
        assert script.heartbeats <= at + 8
        await script.until_received("heartbeat", 3)


async def test_news_and_the_first_heartbeats_do_not_wait_for_the_interval(agent: Agent, script: ScriptedCenter) -> None:
    script.heartbeat_ms = 4_000
    async with script.serve() as port, running(uplink(port, agent, replace(SCRIPTED, heartbeat_s=0.01))):
        await script.until_received("heartbeat", FIRST_HEARTBEATS)
        at = script.heartbeats
        await send_frames(agent, script, 0.2)  # twenty of the edge's own intervals
        assert script.heartbeats <= at + 1
        agent.news = True
        await script.until_received("heartbeat", 3)


async def test_all_messages_of_a_session_are_one_stream_if_the_center_permits_it(agent: Agent) -> None:
    """Also large ones, which are compressed in a thread. A body that is too large for a message stays compressed."""
    script = ScriptedCenter()
    script.window_log = 20
    async with script.serve() as port:
        sizes = [200, 200, 300_000, 200, script.max_frame_bytes * 9 // 10, 200]
        sent = [frame(n, size) for n, size in enumerate(sizes)]
        assert sent[4].raw_bytes > script.max_frame_bytes > len(sent[4].body)
        agent.make(sent)
        async with running(uplink(port, agent, replace(SCRIPTED, heartbeat_s=0.01))):
            for number in range(len(sent)):
                await script.until_received("frame", number + 1)
                script.send(pb.ToEdge(ack=pb.Ack(through=number)))
            await script.until_received("heartbeat", 3)
            await agent.until(lambda: agent.acked == 5)
        arrived = [Frame.from_wire(f) for f in script.frames]
        assert [f.plain_body() for f in arrived] == [f.plain_body() for f in sent]
        assert [f.encoding is Encoding.PLAIN for f in arrived] == [n != 4 for n in range(6)]
        alone = sum(not m.HasField("goodbye") for m in script.messages) - script.packed
        assert alone == 0


@pytest.mark.parametrize("permitted", [0, 20])
async def test_the_edge_learns_how_small_its_frames_become_and_asks_for_larger_ones(
    tmp_path: Path, permitted: int, agent: Agent, script: ScriptedCenter
) -> None:
    script.window_log = permitted
    async with script.serve() as port:
        body = frame(0, 30_000).unpack()
        agent.make(Frame.pack(n, MILES, body) for n in range(20))
        async with running(uplink(port, agent, SCRIPTED)):
            for number in range(20):
                await script.until_received("frame", number + 1)
                script.send(pb.ToEdge(ack=pb.Ack(through=number)))
            await agent.until(lambda: agent.acked == 19)
        assert (agent.forecast().packed_fraction < 0.2) == bool(permitted)


async def test_a_refused_edge_comes_again_when_the_center_says(script: ScriptedCenter) -> None:
    script.refusals = 1
    async with script.serve() as port:
        agent, began_s = Agent(), asyncio.get_running_loop().time()
        # Without the hint it would come again within a quarter of a second.
        async with running(uplink(port, agent, SCRIPTED)):
            await agent.until(lambda: agent.welcomes)
        assert asyncio.get_running_loop().time() - began_s >= 1.0


async def test_an_acknowledgement_of_an_unsent_frame_ends_the_session(agent: Agent, script: ScriptedCenter) -> None:
    async with script.serve() as port, running(uplink(port, agent, SCRIPTED)):
        await agent.until(lambda: agent.welcomes)
        script.send(pb.ToEdge(ack=pb.Ack(through=12)))
        await agent.until(lambda: len(agent.welcomes) == 2)
        assert agent.acked == -1


async def test_a_query_that_this_release_cannot_read_is_refused_and_the_others_go_on(agent: Agent) -> None:
    script = ScriptedCenter()
    async with script.serve() as port:
        async with running(uplink(port, agent, SCRIPTED)):
            text = '{"name": "miles", "from": "flights", "measures": {"m": "sum(x)"}, "window": {"tumbling": "1s"}}'
            strange = text.replace("sum(x)", "oracle(x)").replace("miles", "future")
            queries = [
                pb.Query(name="future", version=1, spec=strange),
                pb.Query(name="broken", version=1, spec="{"),
                pb.Query(name="miles", version=1, spec=text),
            ]
            script.send(pb.ToEdge(queries=pb.Queries(version=1, queries=queries)))
            await script.until_received("query_status", 3)
        assert [ref.name for ref, _ in agent.queries] == ["miles"]
        statuses = {m.query_status.query: m.query_status for m in script.messages if m.HasField("query_status")}
        assert {name: s.accepted for name, s in statuses.items()} == {"future": False, "broken": False, "miles": True}
        assert "oracle" in statuses["future"].message


async def test_queries_have_the_rows_of_their_tables_also_after_a_new_session(agent: Agent) -> None:
    rows = encode_rows(pa.table({"carrier": ["UA"], "name": ["United"]}))
    asked = {**SPEC.to_mapping(), "lookup": {"names": {"key": "carrier", "columns": {"name": "string"}, "version": 1}}}
    table, digest = pb.ToEdge(table=pb.Table(rows=pack_rows(rows))), digest_of(pack_rows(rows))

    def queries(*names: str, tables: Mapping[str, int]) -> pb.ToEdge:
        specs = [json.dumps({**asked, "name": name}) for name in names]
        each = [pb.Query(name=n, version=1, spec=s, tables=tables) for n, s in zip(names, specs, strict=True)]
        return pb.ToEdge(queries=pb.Queries(version=1, queries=each))

    def given() -> dict[str, str]:
        return {ref.name: spec.lookups[0].rows for ref, spec in agent.queries}

    for further in ("more", "most"):
        script = ScriptedCenter()
        async with script.serve() as port, running(uplink(port, agent, SCRIPTED)):
            if further == "more":
                script.send(table)
            script.send(queries("miles", tables={"names": digest}))
            await agent.until(lambda: given() == {"miles": rows})
            script.send(queries("miles", further, tables={"names": digest}))
            await agent.until(lambda name=further: given() == {"miles": rows, name: rows})
    assert script.hello.tables == [digest]
    script = ScriptedCenter()
    async with script.serve() as port, running(uplink(port, agent, SCRIPTED)):
        script.send(queries("miles", tables={}))
        script.send(queries("miles", "more", tables={"names": digest}))
        await agent.until(lambda: given() == {"miles": "", "more": ""})  # the rows of a table without a query are gone


async def test_frames_taken_together_travel_in_one_message() -> None:
    """Frames 0 to 3 are unacknowledged, 4 to 9 are taken at once; a message has at most 1,000 bytes."""
    center, agent = ScriptedCenter(), Agent()
    center.max_frame_bytes, agent.at_once = 1_000, 6
    agent.journal = [frame(n) for n in range(4)]
    agent.make(frame(n) for n in range(4, 10))
    async with center.serve() as port, running(uplink(port, agent, SCRIPTED)):
        while len(center.frames) < 10:
            await center.until_received("heartbeat", 1)
    messages = [[f.seq for f in m.frames.frames] or [m.frame.seq] for m in center.messages if shipped(m)]
    assert [seq for message in messages for seq in message] == list(range(10))
    each = frame(0).wire_bytes
    fitting = 1_000 // each
    assert fitting in (2, 3, 4, 5)
    assert max(len(m) for m in messages) == fitting


def shipped(message: pb.FromEdge) -> bool:
    return message.WhichOneof("message") in ("frame", "frames")


async def test_a_gap_in_the_frame_numbers_is_an_error(tmp_path: Path, agent: Agent) -> None:
    async with gateway(tmp_path, queries=[SPEC]) as (port, _catalog):
        link = uplink(port, agent)
        agent.make([frame(0), frame(2)])
        with pytest.raises(RuntimeError, match="frame 2 follows 0"):
            await link.run()


async def test_a_wrong_token_is_tried_again_until_it_is_right(tmp_path: Path, agent: Agent) -> None:
    async with gateway(tmp_path, tokens={"jfk": EdgeAccess.model_validate({"tokens": ["secret"]})}) as (port, _catalog):
        async with running(uplink(port, agent, token=SecretStr("wrong"))) as task:
            while "unknown credential" not in str(await refusals(port, "wrong")):
                pass
            assert not task.done()
            assert agent.welcomes == []
        async with running(uplink(port, agent, token=SecretStr("secret"))):
            await agent.until(lambda: agent.welcomes)


async def test_a_token_whose_file_is_renewed_is_taken_without_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The kubelet renews a mounted Secret by the swap of a symbolic link to its folder."""
    for version, text in (("1", "of-yesterday"), ("2", "of-today")):
        (tmp_path / version).mkdir()
        (tmp_path / version / "jfk").write_text(text + "\n")
    link = tmp_path / "tokens"
    link.symlink_to("1")
    token = read_secret({"file": f"{tmp_path}/tokens/${{EDGE}}"}, {"EDGE": "jfk"})
    async with gateway(tmp_path, tokens={"jfk": EdgeAccess.model_validate({"tokens": ["of-today"]})}) as (port, _):
        agent = Agent()
        async with running(uplink(port, agent, token=token)) as task:
            while "UNAUTHENTICATED" not in caplog.text:
                assert not task.done()
                await asyncio.sleep(0.01)
            (tmp_path / "next").symlink_to("2")
            (tmp_path / "next").replace(link)
            await agent.until(lambda: len(agent.welcomes) == 1)


async def refusals(port: int, token: str) -> str | None:
    async with grpc.aio.insecure_channel(f"localhost:{port}") as channel:
        call = uplink_pb2_grpc.UplinkStub(channel).Session(metadata=(("authorization", f"Bearer {token}"),))
        return await call.details()


async def test_only_the_configuration_names_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    asked = list[bytes]()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).split()[1])
        inner, outer = await asyncio.open_connection("localhost", port)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            while data := await source.read(1 << 16):
                target.write(data)
            target.close()

        await asyncio.gather(pump(reader, outer), pump(inner, writer), return_exceptions=True)

    async with gateway(tmp_path, queries=[SPEC]) as (port, _catalog):
        agent = Agent()
        async with running(uplink(port, agent)):
            agent.make(frame(n) for n in range(5))
            await agent.until(lambda: agent.acked == 4)
        server = await asyncio.start_server(connect, "127.0.0.1", 0)
        proxy = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, running(uplink(port, agent, proxy=proxy)):
            agent.make(frame(n) for n in range(5, 10))
            await agent.until(lambda: agent.acked == 9)
        assert asked == [f"localhost:{port}".encode()]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA, and certificates of it for the center (localhost) and for edge jfk."""
    path = tmp_path_factory.mktemp("tls")
    return make_certificates(path, {"localhost": "DNS:localhost", "jfk": "DNS:jfk"})


async def test_mutual_tls_authenticates_the_edge(tmp_path: Path, certificates: Path) -> None:
    c = certificates
    server = ServerTls(cert=c / "localhost.pem", key=c / "localhost.key", client_ca=c / "ca.pem")
    client = TlsConfig(ca=f"{c}/ca.pem", cert=f"{c}/jfk.pem", key=f"{c}/jfk.key")
    async with gateway(tmp_path, tls=server, queries=[SPEC]) as (port, catalog):
        agent, impostor = Agent("jfk"), Agent("lga")
        async with running(uplink(port, impostor, tls=client)), running(uplink(port, agent, tls=client)):
            agent.make([frame(0)])
            await agent.until(lambda: agent.acked == 0)
        assert impostor.welcomes == []
        assert [e.edge for e in catalog.edges.all()] == ["jfk"]


def test_tls_files_that_cannot_be_read_are_named() -> None:
    async def build() -> None:
        uplink(1, Agent(), tls=TlsConfig(ca="/nowhere/ca.pem"))

    with refused(InvalidConfig, "center.tls.ca"):
        asyncio.run(build())
