"""Compressed streams of sessions at a real gateway: what they may cost, and how wrong ones end."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from center.ingest import limits
from center.ingest.metrics import GatewayMetrics
from edgewater.wire import Frame, FrameBody, Partial
from edgewater.wire import uplink_pb2 as pb
from edgewater.wire.session_stream import LEAST_WINDOW_LOG, MOST_WINDOW_LOG, SessionPacker, unpacker_bytes
from tests.center.gateway_world import MILES, Center, RawEdge, center, eventually, frame, spec, synopsis
from tests.center.kept_frames import read_frame, stored_frame

NOTHING = b"\x28\xb5\x2f\xfd\x00\x48" + b"\x00\x00\x00" * 1_000_000
"""A zstd frame of empty blocks."""


def pack(packer: SessionPacker, message: pb.FromEdge) -> pb.FromEdge:
    return packer.pack(message.SerializeToString())[0]


def many_groups(seq: int, groups: int = 2_000) -> Frame:
    content = b"".join(b"carrier %d," % n for n in range(groups))
    return Frame.pack(seq, MILES, FrameBody(1_000 + seq, (Partial(0, synopsis(content)),)))


async def test_frames_of_a_stream_are_stored_as_those_that_come_alone_and_counted_by_what_has_passed(
    tmp_path: Path,
) -> None:
    async with center(tmp_path, queries=[spec()]) as c, RawEdge(c.port) as edge:
        welcome = await edge.hello()
        assert welcome.window_log == MOST_WINDOW_LOG
        packer, sent = SessionPacker(welcome.window_log, 3), [frame(0), many_groups(1), many_groups(2)]
        sizes = []
        for each in sent:
            packed = pack(packer, pb.FromEdge(frame=each.plain().to_wire()))
            sizes.append(packed.ByteSize())
            await edge.call.write(packed)
        await edge.acked(2)
        # Other messages may come between.
        await edge.send(frame(3))
        together = [many_groups(n).plain().to_wire() for n in (4, 5)]
        packed = pack(packer, pb.FromEdge(frames=pb.Frames(frames=together)))
        await edge.call.write(packed)
        await edge.acked(5)
        entries = c.catalog.frames.entries("miles@1", 0, 1 << 40)
        assert [e.crc32c for e in entries[:3]] == [each.crc32c for each in sent]
        assert [e.wire_bytes for e in entries[:3]] == pytest.approx(sizes, abs=2)
        assert sizes[2] < sizes[1] / 5 < entries[2].plain_bytes / 5
        assert sum(e.wire_bytes for e in entries[4:]) == pytest.approx(packed.ByteSize(), abs=4)
        stored = [read_frame(c.log, e.segment, e.offset, e.length) for e in entries]
        assert stored[:3] == [stored_frame(each) for each in sent]
        assert entries[1].length < entries[1].plain_bytes / 2, "the log compresses by itself"


@pytest.mark.parametrize(
    ("packed", "reason"),
    [
        pytest.param(pb.Packed(data=b"garbage", plain_bytes=10), "cannot be decompressed", id="garbage"),
        pytest.param(pb.Packed(data=b"", plain_bytes=1 << 31), "expected at most", id="a large one"),
        pytest.param(pb.Packed(data=NOTHING), "expected at most", id="much that is nothing"),
        pytest.param(pb.Packed(data=b"\x50\x2a\x4d\x18" + NOTHING[:4], plain_bytes=1), "", id="a skipped frame"),
        pytest.param(pack(SessionPacker(16, 3), pb.FromEdge(hello=pb.Hello())).packed, "contains a hello", id="hello"),
    ],
)
async def test_a_wrong_stream_ends_its_session_and_no_other(tmp_path: Path, packed: pb.Packed, reason: str) -> None:
    async with center(tmp_path, queries=[spec()]) as c, RawEdge(c.port) as edge, RawEdge(c.port) as other:
        await edge.hello()
        await other.hello("lga")
        await edge.call.write(pb.FromEdge(packed=packed))
        status, code, text = await edge.refusal()
        assert (status, code) == (grpc.StatusCode.DATA_LOSS, "corrupt-frame")
        assert "edge jfk, incarnation " in text and reason in text
        packer = SessionPacker(MOST_WINDOW_LOG, 3)
        await other.call.write(pack(packer, pb.FromEdge(frame=frame(0).plain().to_wire())))
        await other.acked(0)
        async with RawEdge(c.port) as again:
            await again.hello()
            await again.deliver(frame(0))


async def test_limits_of_messages_hold_for_what_is_in_a_stream(tmp_path: Path) -> None:
    async with center(tmp_path, queries=[spec()]) as c, RawEdge(c.port, greets=True) as edge:
        large = pb.FromEdge(heartbeat=pb.Heartbeat(drops={"x" * limits.CONTROL_BYTES: 1}))
        packed = pack(SessionPacker(MOST_WINDOW_LOG, 3), large)
        assert packed.ByteSize() < 1_000
        await edge.call.write(packed)
        assert (await edge.refusal())[:2] == (grpc.StatusCode.RESOURCE_EXHAUSTED, "limit-exceeded")


async def test_without_memory_for_streams_they_are_not_permitted_and_frames_come_alone(tmp_path: Path) -> None:
    async with center(tmp_path, compression_bytes=0, queries=[spec()]) as c, RawEdge(c.port) as edge:
        assert (await edge.hello()).window_log == 0
        await edge.deliver(frame(0))
        await edge.call.write(pack(SessionPacker(16, 3), pb.FromEdge(heartbeat=pb.Heartbeat())))
        status, code, _ = await edge.refusal()
        assert (status, code) == (grpc.StatusCode.FAILED_PRECONDITION, "protocol")


def reserved(c: Center) -> float | None:
    return c.gateway.metrics.registry.get_sample_value("edgewater_gateway_decompression_bytes")


async def test_a_session_that_ends_gives_its_memory_back(tmp_path: Path) -> None:
    async with center(tmp_path) as c:
        async with RawEdge(c.port) as edge, RawEdge(c.port) as other:
            await edge.hello()
            await other.hello("lga")
            assert reserved(c) == 2 * unpacker_bytes(MOST_WINDOW_LOG)
        await eventually(lambda: reserved(c) == 0)


def test_the_memory_of_all_streams_is_bounded_and_later_sessions_get_smaller_windows() -> None:
    metrics = GatewayMetrics()
    memory = limits.DecompressionMemory(256 << 20, metrics)
    logs = [memory.take() for _ in range(20_000)]
    assert logs == sorted(logs, reverse=True)
    assert (logs[0], logs[99], logs[-1]) == (MOST_WINDOW_LOG, MOST_WINDOW_LOG, 0)
    assert set(logs) == {0, *range(LEAST_WINDOW_LOG, MOST_WINDOW_LOG + 1)}
    reserved = sum(map(unpacker_bytes, logs))
    assert reserved <= 256 << 20
    assert metrics.registry.get_sample_value("edgewater_gateway_decompression_bytes") == reserved
    for log in logs:
        memory.release(log)
    assert memory.take() == MOST_WINDOW_LOG
