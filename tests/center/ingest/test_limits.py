"""What silent, many, large and fast connections cost the gateway, over real sockets."""

from __future__ import annotations

import asyncio
import itertools
import threading
from pathlib import Path
from typing import Any

import google_crc32c
import grpc
import pyarrow as pa
import pytest

from center.catalog import Catalog
from center.config import TlsSection
from center.ingest import limits
from center.ingest.frame_check import CheckedFrame
from center.ingest.frame_validator import LOOP_BYTES, FrameValidator
from center.ingest.metrics import GatewayMetrics
from center.ingest.status_writer import MAX_STATUSES, StatusWriter
from edgewater.base.streams import EdgeId
from edgewater.guard.frame_work import MAX_FRAME_WORK, STATEMENTS_PER_UNIT
from edgewater.model.edge_records import QueryStatusRecord
from edgewater.wire import Frame, FrameBody, Partial, QueryRef, SliceClose, uplink_pb2_grpc
from edgewater.wire import uplink_pb2 as pb
from edgewater.wire.frames import Encoding
from tests.center.gateway_world import MILES, Center, RawEdge, center, eventually, frame, spec, tokens
from tests.certificates import make_certificates
from tests.insides import reading

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"
"""HTTP/2's, and empty settings."""

HEADERS = (
    b"\x83\x86\x04\x1c/edgewater.v1.Uplink/Session\x01\x09localhost\x0f\x10\x10application/grpc\x00\x02te\x08trailers"
)
"""Of a call, as HPACK writes fields that are not indexed."""


def calls(streams: range) -> bytes:
    """The HEADERS frames of calls."""
    return b"".join(len(HEADERS).to_bytes(3) + b"\x01\x04" + stream.to_bytes(4) + HEADERS for stream in streams)


def limited(c: Center, limit: str) -> float:
    return float(reading(c.gateway.metrics.limited.labels(limit)))


async def test_connections_that_say_nothing_are_closed_and_an_edge_connects_meanwhile(tmp_path: Path) -> None:
    async with center(tmp_path, hello_timeout_ms=1_000) as c, RawEdge(c.port) as edge:
        silent = [await asyncio.open_connection("127.0.0.1", c.port) for _ in range(100)]
        for _, writer in silent[::2]:
            writer.write(PREFACE)  # and then no call
        await edge.hello()
        for reader, writer in silent:
            while await reader.read(1_000):
                pass
            writer.close()
        # The edge, whose call is open, is still there.
        await edge.call.write(pb.FromEdge(heartbeat=pb.Heartbeat(sent_at_ms=5)))
        await edge.until("time_echo")


@pytest.mark.nightly
async def test_calls_that_begin_all_at_once_reach_the_gateway_and_none_is_cancelled(tmp_path: Path) -> None:
    connections, streams = 125, range(1, 2 * limits.STREAMS_PER_CONNECTION, 2)
    async with center(tmp_path, hello_timeout_ms=1_000) as c:
        writers = []
        for _ in range(connections):
            _, writer = await asyncio.open_connection("127.0.0.1", c.port)
            writer.write(PREFACE + calls(streams))
            writers.append(writer)
        # gRPC would cancel a part of those beyond 1,000 that this process has not taken yet.
        await eventually(lambda: limited(c, "hello-timeout") == connections * len(streams))
        for writer in writers:
            writer.close()


async def test_tls_handshakes_that_never_end_are_closed_and_an_edge_connects_meanwhile(tmp_path: Path) -> None:
    make_certificates(tmp_path, {"center": "IP:127.0.0.1"})
    tls = TlsSection(cert=tmp_path / "center.pem", key=tmp_path / "center.key")
    async with center(tmp_path, hello_timeout_ms=300, tls=tls) as c:
        begun = [await asyncio.open_connection("127.0.0.1", c.port) for _ in range(60)]
        for _, writer in begun[::2]:
            writer.write(b"\x16\x03\x01\x02\x00\x01")  # a part of a ClientHello
        credentials = grpc.ssl_channel_credentials((tmp_path / "ca.pem").read_bytes())
        async with grpc.aio.secure_channel(f"127.0.0.1:{c.port}", credentials) as channel:
            await channel.channel_ready()
            for reader, writer in begun:
                await _closed(reader)
                writer.close()


async def test_connections_beyond_their_number_are_closed_at_once(tmp_path: Path) -> None:
    async with center(tmp_path, max_sessions=5, hello_timeout_ms=60_000) as c:
        opened = [await asyncio.open_connection("127.0.0.1", c.port) for _ in range(10 + limits.SPARE_CONNECTIONS + 4)]
        closed = [asyncio.create_task(_closed(reader)) for reader, _ in opened]
        await asyncio.wait(closed, return_when=asyncio.FIRST_COMPLETED)
        await eventually(lambda: sum(task.done() for task in closed) >= 4)
        assert sum(task.done() for task in closed) == 4
        for task in closed:
            task.cancel()
        for _, writer in opened:
            writer.close()


async def _closed(reader: asyncio.StreamReader) -> None:
    try:
        while await reader.read(1_000):
            pass
    except ConnectionError:
        return


async def test_one_identity_cannot_take_the_places_of_others_by_calls_without_a_hello(tmp_path: Path) -> None:
    entries = tokens(jfk="secret-j", lga="secret-l")
    async with center(tmp_path, tokens=entries) as c, RawEdge(c.port, "secret-j") as first:
        stub = uplink_pb2_grpc.UplinkStub(first._channel)
        metadata = (("authorization", "Bearer secret-j"),)
        calls = [first.call, *(stub.Session(metadata=metadata) for _ in range(limits.CALLS_AWAITING_HELLO))]
        ends = [asyncio.create_task(call.code()) for call in calls]
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result() for task in done] == [grpc.StatusCode.RESOURCE_EXHAUSTED]
        assert limited(c, "awaiting-hello") == 1
        async with RawEdge(c.port, "secret-l") as other:
            await other.hello("lga")
        for call in calls:
            call.cancel()


@pytest.mark.parametrize(
    ("message", "limit"),
    [
        (pb.FromEdge(heartbeat=pb.Heartbeat(drops={"x" * 1_000 + str(n): 1 for n in range(140)})), "message-size"),
        (pb.FromEdge(query_status=pb.QueryStatus(query="miles", message="x" * 140_000)), "message-size"),
        (pb.FromEdge(heartbeat=pb.Heartbeat(sent_at_ms=1)), "messages"),
        (pb.FromEdge(budget_report=pb.BudgetReport(query="miles", query_version=1)), "messages"),
    ],
)
async def test_messages_that_are_too_large_or_too_many_end_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: pb.FromEdge, limit: str
) -> None:
    monkeypatch.setattr(limits, "MESSAGES", 20)
    async with center(tmp_path, queries=[spec()]) as c, RawEdge(c.port, greets=True) as edge:
        for _ in range(1 if limit == "message-size" else 20 + limits.MESSAGES_PER_QUERY + 1):
            await edge.call.write(message)
        status, code, text = await edge.refusal()
        assert (status, code) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "limit-exceeded")
        assert "edge jfk: a " in text and len(text) < 200
        assert limited(c, limit) == 1


async def test_a_hello_is_bounded_in_size_and_in_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HELLOS", 3)
    async with center(tmp_path) as c:
        async with RawEdge(c.port) as edge:
            with pytest.raises(grpc.aio.AioRpcError, match="a Hello of"):
                await edge.hello(incarnation="i" * limits.HELLO_BYTES)
        for number in itertools.count(1):
            async with RawEdge(c.port) as edge:
                if number > 3:
                    with pytest.raises(grpc.aio.AioRpcError, match="more than 3 sessions began in 10 s"):
                        await edge.hello()
                    break
                await edge.hello()
        assert (limited(c, "message-size"), limited(c, "hellos")) == (1, 1)
        c.clock[0] += limits.WINDOW_MS
        async with RawEdge(c.port) as edge:
            await edge.hello()


async def test_statuses_of_many_queries_do_not_keep_heartbeats_waiting(tmp_path: Path) -> None:
    catalog = Catalog(f"sqlite:///{tmp_path}/catalog.db")
    ref = catalog.queries.register(spec(), 1)[0].ref
    writer = StatusWriter(catalog, GatewayMetrics(), 1.0, lambda: 0)
    edges = [EdgeId(f"e{n}") for n in range(2 * MAX_STATUSES + 7)]
    for edge in edges:
        writer.status(QueryStatusRecord(ref, edge, True, "", ""))
    written = []
    for _ in range(4):
        await writer.flush()
        written.append(len(catalog.queries.statuses(ref)))
    assert written == [MAX_STATUSES, 2 * MAX_STATUSES, len(edges), len(edges)]
    catalog.close()


def costly(seq: int) -> Frame:
    """A frame that makes three quarters of the work that one may, by windows of 500 slices."""
    slices = range(3 * MAX_FRAME_WORK // 4 // 500)
    return Frame.pack(
        seq, QueryRef("wide", 1), FrameBody(0, (), tuple(SliceClose(n * 60_000_000, 0, 0) for n in slices))
    )


async def test_an_edge_that_makes_too_much_work_waits_and_nobody_else_does(tmp_path: Path) -> None:
    """Two frames are its burst; the third has to wait for days at this rate, whatever session it comes by."""
    async with center(tmp_path, work_per_s=1, open_windows=1 << 20, queries=[spec()]) as c:
        c.catalog.queries.register(spec("wide", window={"sliding": "30000s", "every": "60s"}), 1)
        c.clock[0] = 1 << 41
        for following in (0, 2):
            async with RawEdge(c.port) as evil, RawEdge(c.port) as honest:
                await evil.hello("evil", following=following)
                await evil.until("queries")
                await evil.send(*(costly(seq) for seq in range(following, 5)))
                if not following:
                    await evil.acked(1)
                await evil.call.write(pb.FromEdge(heartbeat=pb.Heartbeat(sent_at_ms=5)))
                await evil.until("time_echo")
                await honest.hello(following=following)
                await honest.until("queries")
                await honest.send(frame(following), frame(following + 1))
                await honest.acked(following + 1)
                await eventually(lambda: c.gateway.sessions[EdgeId("evil")]._frames.is_delayed)
            await eventually(lambda: not c.gateway.sessions)
        assert c.entries("wide@1") == [("evil", 0), ("evil", 1)]
        assert reading(c.gateway.metrics.delayed_seconds) > 10_000
        # Frames of ended sessions do not stay.
        await eventually(lambda: reading(c.gateway.metrics.pending) == 0)


def statements(seq: int, kind: str) -> Frame:
    """A frame of about 100 bytes with 60,000 statements of four bytes, most of which are refused; or fields that the
    format does not have."""
    plain = {
        "partials": b"\x0a\x02\x08\x01",
        "closes": b"\x12\x02\x08\x01",
        "losses": b"\x32\x02\x18\x01",
        "dropped": b"\x3a\x02\x08\x01",
        "unknown": b"\x78\x01" * 12,
    }[kind] * 60_000
    body = pa.compress(plain, codec="zstd", asbytes=True)
    return Frame(seq, MILES, body, google_crc32c.value(plain), Encoding.ZSTD, len(plain))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["partials", "closes", "losses", "dropped", "unknown"])
async def test_statements_that_cost_the_gateway_time_use_up_their_edges_share(tmp_path: Path, kind: str) -> None:
    """They were charged by their size alone: less than half of what losses cost, a quarter of ignored fields."""
    async with center(tmp_path, work_per_s=1, queries=[spec()]) as c, RawEdge(c.port) as evil:
        c.clock[0] = 1 << 41
        await evil.hello("evil")
        await evil.until("queries")
        frames = [statements(seq, kind) for seq in range(9)]
        assert all(f.wire_bytes < 1_000 for f in frames)
        await evil.send(*frames)
        await eventually(lambda: c.gateway.sessions[EdgeId("evil")]._frames.is_delayed)
        accepted = len(c.entries())
        assert accepted * 60_000 // STATEMENTS_PER_UNIT <= 2 * MAX_FRAME_WORK + 60_000


async def test_the_event_loop_checks_small_frames_until_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_the_loop: list[bool] = []
    check = FrameValidator.check

    def noted(*args: Any) -> CheckedFrame:
        on_the_loop.append(threading.current_thread() is threading.main_thread())
        return check(*args)

    monkeypatch.setattr(FrameValidator, "check", noted)
    async with center(tmp_path, max_frame_bytes=1 << 20, queries=[spec()]) as c, RawEdge(c.port, greets=True) as edge:
        await edge.until("queries")
        refused = Frame.pack(3, MILES, FrameBody(1_003, (Partial(0, b"no synopsis"),)))
        frames = [frame(0), frame(1), frame(2, content=bytes(LOOP_BYTES)), refused, frame(4)]
        for seq, each in enumerate(frames):
            await edge.send(each)
            await edge.acked(seq)
        assert len(c.entries()) == len(frames)
    assert on_the_loop == [False, True, False, True, False]
