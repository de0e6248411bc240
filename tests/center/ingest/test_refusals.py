"""Which frames the gateway refuses, over gRPC. The edge learns it, its other queries go on, honest frames are kept."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from edgewater.wire import Frame, FrameBody, InputLoss, Partial, QueryRef
from edgewater.wire import uplink_pb2 as pb
from tests.center.gateway_world import JFK, MILES, RawEdge, center, eventually, frame, spec
from tests.center.kept_frames import stored_body
from tests.edge.uplink_world import Agent, running, uplink
from tests.insides import reading

OTHERS = QueryRef("others", 1)


async def test_a_frame_for_a_query_that_names_other_edges_is_acknowledged_and_refused(tmp_path: Path) -> None:
    async with center(tmp_path, queries=[spec()]) as c, RawEdge(c.port) as edge, RawEdge(c.port) as lga:
        c.catalog.queries.register(spec("others", edges=["lga"]), 1)
        await edge.hello()
        await lga.hello("lga")
        await edge.send(frame(0, OTHERS), frame(1), frame(2, OTHERS))
        await lga.send(frame(0, OTHERS))
        refused = (await edge.until("refused", lambda r: r.frames == 2)).refused
        assert (refused.query, refused.query_version, refused.reason) == ("others", 1, "not-expected")
        assert refused.seq == 2 and "query others@1 does not expect this edge" in refused.message
        await edge.acked(2)
        await lga.acked(0)
        assert c.entries() == [("jfk", 1)] and c.entries("others@1") == [("lga", 0)]
        await eventually(c.catalog.alarms.latest)
        (alarm,) = c.catalog.alarms.latest()
        assert (alarm.kind, alarm.edge) == ("frame-refused", JFK)
        assert reading(c.gateway.metrics.refused.labels("not-expected")) == 2
    # What was refused is not asked for again.
    async with center(tmp_path) as c, RawEdge(c.port) as edge:
        assert (await edge.hello(oldest=0, following=3)).acked_through == 2


async def test_a_frame_for_a_stream_that_the_edge_does_not_serve_is_refused(tmp_path: Path) -> None:
    async with center(tmp_path, queries=[spec()]) as c, RawEdge(c.port) as edge:
        await edge.hello(streams=[pb.Stream(name="trains")])
        await edge.send(frame(0))
        await edge.until("refused")
        await edge.acked(0)
        assert c.entries() == []


async def test_what_an_edge_built_before_it_was_retired_or_ceased_to_serve_a_stream_is_kept(tmp_path: Path) -> None:
    async with center(tmp_path, poll_ms=60_000, queries=[spec()]) as c:
        async with RawEdge(c.port, greets=True) as edge:
            c.catalog.edges.retire(JFK)
            await edge.send(frame(0))
            with suppress(grpc.aio.AioRpcError):  # the session may end first; the frame is then sent again
                await edge.acked(0)
        async with RawEdge(c.port) as edge:
            with pytest.raises(grpc.aio.AioRpcError, match="edge jfk is retired: an admin of the center can reinstate"):
                await edge.hello(oldest=0, following=2)
        assert c.catalog.edges.get(JFK).retired
        c.catalog.edges.reinstate(JFK)
        async with RawEdge(c.port) as edge:
            await edge.hello(oldest=0, following=2, streams=[pb.Stream(name="trains")])
            await edge.send(frame(0))
            await edge.deliver(frame(1))
        assert c.entries() == [("jfk", 0), ("jfk", 1)]
        assert [s.name for s in c.catalog.edges.get(JFK).streams] == ["trains"]


async def test_an_agent_hears_of_a_refusal_before_it_lets_go_of_the_frame(tmp_path: Path) -> None:
    async with center(tmp_path, queries=[spec(edges=["lga"])]) as c:
        c.clock[0] = 1 << 45  # not behind the agent's
        agent = Agent()
        agent.make([frame(0), frame(1)])
        async with running(uplink(c.port, agent)):
            await eventually(lambda: agent.acked == 1)
        assert sum(frames for _, reason, frames in agent.refused if reason == "not-expected") == 2


async def test_of_frames_in_one_message_a_bad_one_costs_only_its_query(tmp_path: Path) -> None:
    """Of another edge's query, of none, and with a partial that cannot be merged; then all of them once more."""
    unmergeable = replace(frame(3, QueryRef("third", 1)).unpack(), partials=(Partial(0, b"nonsense"),))
    frames = [frame(0), frame(1, OTHERS), frame(2, QueryRef("unknown", 1))]
    frames += [Frame.pack(3, QueryRef("third", 1), unmergeable), frame(4, QueryRef("fourth", 1)), frame(5)]
    async with center(tmp_path, queries=[spec()]) as c:
        c.catalog.queries.register(spec("others", edges=["lga"]), 1)
        c.catalog.queries.register(spec("third"), 1)
        c.catalog.queries.register(spec("fourth"), 1)
        for _ in range(2):
            async with RawEdge(c.port) as edge:
                await edge.hello(following=6)
                await edge.send_together(*frames)
                await edge.acked(5)
                reasons = {m.refused.query: m.refused.reason for m in edge.received if m.HasField("refused")}
                assert reasons in ({"others": "not-expected", "third": "partial-refused"}, {})
            assert c.entries() == [("jfk", 0), ("jfk", 5)]
            assert c.entries("others@1") == [] and c.entries("fourth@1") == [("jfk", 4)]
            (third,) = c.catalog.frames.entries("third@1", 0, 1)
            (loss,) = stored_body(c.catalog, c.log, third).losses
            assert loss.reason == "partial-refused"


@pytest.mark.parametrize(
    ("count", "size", "expected", "message"),
    [
        (513, 1, "protocol", "513 frames in a message; expected at most 512"),
        (1, 50_000, "protocol", "frame 0 has 50024 bytes, at most 50000"),
        (3, 40_000, "None", "larger than max"),  # by gRPC
    ],
)
async def test_a_message_of_too_many_frames_or_bytes_ends_the_session(
    tmp_path: Path, count: int, size: int, expected: str, message: str
) -> None:
    async with center(tmp_path, max_frame_bytes=50_000, queries=[spec()]) as c, RawEdge(c.port) as edge:
        await edge.hello(protocol_max=2)
        body = FrameBody(0, losses=(InputLoss("s" * size, "lost"),))
        await edge.send_together(*(replace(Frame.pack(n, MILES, body), body=b"x" * size) for n in range(count)))
        _, code, details = await edge.refusal()
        assert code == expected and message in details
