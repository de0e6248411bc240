"""The compressed stream of a session: what is sent arrives, in bounded memory, and nothing else is accepted."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from edgewater.base.errors import CorruptFrame
from edgewater.wire import Frame, FrameBody, Partial, QueryRef
from edgewater.wire import uplink_pb2 as pb
from edgewater.wire.session_stream import (
    LEAST_WINDOW_LOG,
    MOST_WINDOW_LOG,
    SessionPacker,
    SessionUnpacker,
    unpacker_bytes,
)
from tests.examples import examples

MOST = 1 << 20
GOLDEN = (
    # A heartbeat; the end of a zstd frame, and another heartbeat; a frame.
    ("28b52ffd00305800001a0910073080d095ffbc31", 11),
    ("01000028b52ffd00305800001a0910073081d095ffbc31", 11),
    ("e80000121b080115d092e472180122090a05120361626318052a017130013809", 29),
)


def heartbeat(n: int) -> pb.FromEdge:
    return pb.FromEdge(heartbeat=pb.Heartbeat(sent_at_ms=1_700_000_000_000 + n, backlog_bytes=7))


def frame(body: bytes, seq: int = 1) -> pb.FromEdge:
    return pb.FromEdge(frame=Frame.pack(seq, QueryRef("q", 1), FrameBody(5, (Partial(0, body),))).plain().to_wire())


def noise(size: int, seed: int = 1) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def test_a_stream_of_this_release_is_read_as_it_was_written() -> None:
    unpacker = SessionUnpacker(16, MOST)
    read = [unpacker.unpack(pb.Packed(data=bytes.fromhex(data), plain_bytes=size))[0] for data, size in GOLDEN]
    assert read == [heartbeat(0), heartbeat(1), frame(b"abc")]


PIECES = st.tuples(
    st.sampled_from(["known", "noise", "heartbeat"]), st.integers(0, 300_000), st.sampled_from([None, 1, 3, 19])
)


@examples(100, deadline=None)
@given(st.lists(PIECES, max_size=8), st.integers(LEAST_WINDOW_LOG, MOST_WINDOW_LOG))
def test_each_message_arrives_alone_whatever_its_size_level_and_window(
    pieces: list[tuple[str, int, int | None]], window_log: int
) -> None:
    """A message can be read as soon as it has arrived: none waits for the next one."""
    packer, unpacker, known = SessionPacker(window_log, 3), SessionUnpacker(window_log, MOST), noise(300_000)
    for number, (kind, size, level) in enumerate(pieces):
        if level is not None:
            packer.set_level(level)
        content = known[:size] if kind == "known" else noise(size, number)
        message = heartbeat(number) if kind == "heartbeat" else frame(content, number)
        packed, packed_bytes = packer.pack(message.SerializeToString())
        assert packed.ByteSize() == packed_bytes <= 1.001 * message.ByteSize() + 64
        assert unpacker.unpack(packed.packed) == (message, packed_bytes / message.ByteSize())


def test_what_was_sent_before_costs_a_few_bytes() -> None:
    packer, keys = SessionPacker(20, 3), noise(10_000)
    sizes = [packer.pack(frame(keys, seq).SerializeToString())[1] for seq in range(4)]
    assert sizes[0] > 10_000 and max(sizes[1:]) < 100
    again = SessionPacker(20, 3)
    assert again.pack(frame(keys, 9).SerializeToString())[1] > 10_000, "a new session remembers nothing"


def test_a_stream_cannot_be_joined_later() -> None:
    packer = SessionPacker(20, 3)
    packer.pack(frame(noise(3_000), 1).SerializeToString())
    packed, _ = packer.pack(frame(noise(3_000), 2).SerializeToString())
    with pytest.raises(CorruptFrame, match="cannot be decompressed"):
        SessionUnpacker(20, MOST).unpack(packed.packed)


def zeros(size: int, window_log: int = 16) -> bytes:
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=window_log)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return stream.compress(bytes(size)) + stream.flush()


@pytest.mark.parametrize(
    ("data", "stated"),
    [
        pytest.param(zeros(16 << 20), 1_000, id="bomb"),
        pytest.param(zeros(64 << 20), MOST, id="bomb of the largest message"),
        pytest.param(zeros(100), MOST + 1, id="more than permitted"),
        pytest.param(zeros(100), 99, id="one more"),
        pytest.param(zeros(100), 101, id="one less"),
        pytest.param(zeros(100, window_log=24), 100, id="a larger window"),
        pytest.param(b"\x28\xb5\x2f\xfdgarbage", 100, id="garbage"),
        pytest.param(b"", 100, id="nothing"),
        pytest.param(zeros(100), 100, id="not a message"),
    ],
)
def test_a_part_that_is_not_what_it_says_ends_the_stream_in_bounded_memory(data: bytes, stated: int) -> None:
    unpacker = SessionUnpacker(16, MOST)
    tracemalloc.start()
    with pytest.raises(CorruptFrame):
        unpacker.unpack(pb.Packed(data=data, plain_bytes=stated))
    assert tracemalloc.get_traced_memory()[1] < 4 * MOST
    tracemalloc.stop()


@pytest.mark.parametrize("message", [pb.FromEdge(hello=pb.Hello()), pb.FromEdge(packed=pb.Packed())])
def test_a_hello_and_a_packed_message_are_not_packed(message: pb.FromEdge) -> None:
    packed, _ = SessionPacker(16, 3).pack(message.SerializeToString())
    with pytest.raises(CorruptFrame, match="contains a"):
        SessionUnpacker(16, MOST).unpack(packed.packed)


@pytest.mark.parametrize("window_log", [LEAST_WINDOW_LOG, MOST_WINDOW_LOG])
def test_the_stated_memory_is_not_exceeded(window_log: int) -> None:
    """By zstd's own estimate for a stream with such a window."""
    window = 1 << window_log
    assert window < unpacker_bytes(window_log) < 2 * window + (512 << 10)
    assert unpacker_bytes(0) == 0
