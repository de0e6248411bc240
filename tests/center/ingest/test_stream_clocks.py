"""A stream's clock is the configuration's: what an edge states moves neither windows nor watermarks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from center.config import CenterConfig, StreamSection
from center.ingest.stream_rules import CLOCK_LEAD_MS
from edgewater.base.streams import MAX_TIME_MS
from edgewater.wire import uplink_pb2 as pb
from tests.center.gateway_world import JFK, RawEdge, center, eventually, tokens

DAY_MS = 86_400_000
YEAR_2036_MS = 2_082_758_400_000


def stream(event_origin_ms: int, speed: float = 1.0) -> pb.Stream:
    clock = pb.Stream.Clock(event_origin_ms=event_origin_ms, wall_origin_ms=1_000_000, speed=speed)
    return pb.Stream(name="flights", clock=clock)


async def refused(port: int, *streams: pb.Stream) -> str:
    async with RawEdge(port) as edge:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await edge.hello(streams=streams)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        return caught.value.details() or ""


async def test_a_hello_cannot_move_a_live_stream_to_another_year(tmp_path: Path) -> None:
    # The first Hello decides nothing, so no query ever runs by this clock.
    rules = {"flights": StreamSection(replay=None)}
    async with center(tmp_path, streams=rules, listen="0.0.0.0:0", tokens=tokens(jfk="secret")) as c:
        async with RawEdge(c.port, "secret") as edge:
            with pytest.raises(grpc.aio.AioRpcError, match=r"expected live.*flights\.replay"):
                await edge.hello(streams=[stream(YEAR_2036_MS)])
        assert c.catalog.edges.all() == []
        async with RawEdge(c.port, "secret") as edge:
            await edge.hello(streams=[pb.Stream(name="flights")])


async def test_a_configured_replay_is_every_edges_clock(tmp_path: Path) -> None:
    config = CenterConfig.from_mapping(
        {
            "streams": {
                "flights": {"replay": {"speed": 60, "start": "2013-01-01T00:00:00Z", "at": "1970-01-01T00:16:40Z"}}
            }
        }
    )
    async with center(tmp_path, streams=config.streams) as c:
        message = await refused(c.port, pb.Stream(name="flights"))
        assert message == (
            "Hello: stream flights is live, without a replay; expected a replay {speed: 60, start: 2013-01-01T00:00:00Z"
            ", at: 1970-01-01T00:16:40Z}: streams.flights.replay in the center's configuration is so"
        )
        assert "speed: 61" in await refused(c.port, stream(1_356_998_400_000, 61))
        async with RawEdge(c.port) as edge:
            await edge.hello(streams=[stream(1_356_998_400_000, 60)])


async def test_an_edge_with_credentials_does_not_set_the_clock_though_it_comes_from_loopback(tmp_path: Path) -> None:
    """A proxy on the machine may pass on what others send."""
    allowed = {"others": StreamSection(replay="edges")}
    async with center(tmp_path, tokens=tokens(jfk="secret"), streams=allowed) as c:
        async with RawEdge(c.port, "secret") as edge:
            with pytest.raises(grpc.aio.AioRpcError, match=r"expected live.*flights\.replay"):
                await edge.hello(streams=[stream(YEAR_2036_MS)])
        async with RawEdge(c.port, "secret") as edge:
            other = stream(YEAR_2036_MS)
            other.name = "others"
            await edge.hello(streams=[other])


async def test_without_credentials_edges_bring_the_clock_of_their_replay(tmp_path: Path) -> None:
    async with center(tmp_path) as c, RawEdge(c.port) as edge:
        await edge.hello(streams=[stream(0, 86_400)])
        assert c.catalog.edges.get(JFK).streams[0].clock.speed == 86_400


async def test_a_watermark_beyond_the_clock_is_bounded_and_an_alarm_and_the_end_of_a_stream_is_neither(
    tmp_path: Path,
) -> None:
    async with center(tmp_path) as c, RawEdge(c.port, greets=True) as edge:
        for progress in (
            pb.StreamProgress(stream="flights", watermark_ms=YEAR_2036_MS),
            pb.StreamProgress(stream="flights", ended=True),
        ):
            await edge.call.write(pb.FromEdge(heartbeat=pb.Heartbeat(streams=[progress], sent_at_ms=5)))
            await edge.until("time_echo")
            latest_ms = MAX_TIME_MS if progress.ended else c.clock[0] + CLOCK_LEAD_MS + DAY_MS
            await eventually(lambda: c.catalog.edges.get(JFK).watermarks == {"flights": latest_ms})  # noqa: B023
            if not progress.ended:
                await eventually(c.catalog.alarms.latest)
                (alarm,) = await asyncio.to_thread(c.catalog.alarms.latest)
                assert (alarm.kind, alarm.edge, alarm.times) == ("watermark-ahead", JFK, 1)
        await eventually(lambda: c.catalog.alarms.latest() == [])


async def test_frames_of_an_edge_whose_clock_is_ahead_wait_in_its_journal_until_a_clock_is_set(tmp_path: Path) -> None:
    # Perhaps the center's is wrong: nothing is refused for good while the two differ.
    async with center(tmp_path) as c:
        async with RawEdge(c.port) as edge:
            await edge.hello(sent_at_ms=c.clock[0])
            await edge.call.write(pb.FromEdge(heartbeat=pb.Heartbeat(sent_at_ms=YEAR_2036_MS, rtt_ms=1e300)))
            status, code, message = await edge.refusal()
            assert (status, code) == (grpc.StatusCode.FAILED_PRECONDITION, "protocol")
            assert "edge jfk: its clock differs by more than 86460000 ms" in message
        await eventually(c.catalog.alarms.latest)
        (alarm,) = await asyncio.to_thread(c.catalog.alarms.latest)
        assert (alarm.kind, alarm.edge) == ("clock-differs", JFK)
        # Where a state is lost, the event time by which it is lost is taken from the edge's clock.
        assert c.catalog.edges.get(JFK).clock_offset_ms <= CLOCK_LEAD_MS + DAY_MS
        async with RawEdge(c.port) as edge:
            with pytest.raises(grpc.aio.AioRpcError, match="its clock differs"):
                await edge.hello(sent_at_ms=YEAR_2036_MS)
        c.clock[0] = YEAR_2036_MS
        async with RawEdge(c.port) as edge:
            await edge.hello(sent_at_ms=YEAR_2036_MS)
            await edge.call.write(pb.FromEdge(heartbeat=pb.Heartbeat(sent_at_ms=YEAR_2036_MS)))
            await eventually(lambda: c.catalog.alarms.latest() == [])
