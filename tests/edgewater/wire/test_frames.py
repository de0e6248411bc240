from __future__ import annotations

import dataclasses
from contextlib import suppress

import google_crc32c
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewater.base.errors import CorruptFrame
from edgewater.wire import (
    FRAME_OVERHEAD_BYTES,
    MAX_BODY_BYTES,
    Encoding,
    Frame,
    FrameBody,
    Partial,
    QueryRef,
    Rest,
    SliceClose,
    Withheld,
)
from edgewater.wire import uplink_pb2 as pb

QUERY = QueryRef("bytes_by_url", 3)
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
AMOUNT = st.floats(0, allow_infinity=True, allow_nan=False)
REST = st.none() | st.builds(Rest, st.integers(0, 1 << 40), st.lists(AMOUNT, max_size=3).map(tuple), AMOUNT)
WITHHELD = st.builds(Withheld, st.text(max_size=5), AMOUNT, AMOUNT, st.integers(0, 1 << 40), rest=REST)
CLOSES = st.builds(
    SliceClose,
    INT64,
    st.integers(0, 1 << 40),
    st.integers(0, 1 << 40),
    st.lists(WITHHELD, max_size=3).map(tuple),
    st.none() | INT64,
    st.none() | INT64,
)
PARTIALS = st.builds(Partial, INT64, st.binary(max_size=200))
BODIES = st.builds(
    FrameBody,
    INT64,
    st.lists(PARTIALS, max_size=4).map(tuple),
    st.lists(CLOSES, max_size=4).map(tuple),
    since_ms=st.none() | INT64,
)


def over_the_wire(frame: Frame) -> Frame:
    return Frame.from_wire(pb.Frame.FromString(frame.to_wire().SerializeToString()))


@given(st.integers(0, (1 << 64) - 1), BODIES)
def test_what_is_packed_is_unpacked_on_the_other_side(seq: int, body: FrameBody) -> None:
    frame = Frame.pack(seq, QUERY, body)
    arrived = over_the_wire(frame)
    assert arrived == frame and arrived.unpack() == body
    assert (arrived.seq, arrived.query) == (seq, QUERY)


def test_a_start_of_zero_is_told_from_none() -> None:
    for since in (None, 0, -1):
        assert Frame.pack(1, QUERY, FrameBody(5, since_ms=since)).unpack().since_ms == since


def test_a_body_is_compressed_only_where_that_makes_it_smaller() -> None:
    large = Frame.pack(1, QUERY, FrameBody(0, (Partial(0, bytes(100_000)),)))
    assert large.encoding is Encoding.ZSTD and len(large.body) < 200 < large.raw_bytes
    assert large.plain().encoding is Encoding.PLAIN and large.plain().compressed() == large
    tiny = Frame.pack(1, QUERY, FrameBody(7))
    assert tiny.encoding is Encoding.PLAIN and tiny.raw_bytes == len(tiny.body)


def test_the_same_body_is_the_same_bytes() -> None:
    body = FrameBody(9, (Partial(1, b"x" * 500),), (SliceClose(1, 2, 3),))
    assert Frame.pack(4, QUERY, body) == Frame.pack(4, QUERY, body)


@pytest.mark.parametrize("repeat", [1, 500])
def test_any_flipped_bit_of_the_body_is_found_or_says_the_same(repeat: int) -> None:
    """Compression leaves a few bits unused, such as those behind the last one of a deflate stream."""
    frame = Frame.pack(12, QUERY, FrameBody(0, (Partial(0, b"synopsis" * repeat),)))
    same = 0
    for bit in range(8 * len(frame.body)):
        flipped = (int.from_bytes(frame.body, "little") ^ 1 << bit).to_bytes(len(frame.body), "little")
        try:
            assert dataclasses.replace(frame, body=flipped).unpack() == frame.unpack()
            same += 1
        except CorruptFrame as error:
            assert error.code == "corrupt-frame" and "frame 12: " in str(error)
    assert same <= 8
    with pytest.raises(CorruptFrame):
        dataclasses.replace(frame, body=frame.body[:-1]).unpack()


def test_a_flipped_bit_of_a_plain_body_is_told_with_both_checksums() -> None:
    frame = Frame.pack(12, QUERY, FrameBody(7))
    assert frame.encoding is Encoding.PLAIN
    with pytest.raises(CorruptFrame):
        dataclasses.replace(frame, body=bytes([frame.body[0] ^ 1]) + frame.body[1:]).plain_body()


def test_the_checksum_is_of_what_is_said_and_not_of_how_it_is_compressed() -> None:
    frame = Frame.pack(4, QUERY, FrameBody(9, (Partial(1, b"x" * 500),)))
    plain = frame.plain_body()
    assert frame.encoding is Encoding.ZSTD and google_crc32c.value(plain) == frame.crc32c
    zstd = pa.Codec("zstd", compression_level=19).compress(plain, asbytes=True)
    for encoding, body in ((Encoding.PLAIN, plain), (Encoding.ZSTD, zstd)):
        assert dataclasses.replace(frame, encoding=encoding, body=body).unpack() == frame.unpack()


@pytest.mark.parametrize("size", [0, 50, 5000])
@pytest.mark.parametrize("wrong", [-1, 1, 1000])
def test_a_wrong_length_before_compression_is_found(size: int, wrong: int) -> None:
    frame = Frame.pack(3, QUERY, FrameBody(7, (Partial(0, bytes(size)),) if size else ()))
    with pytest.raises(CorruptFrame):
        dataclasses.replace(frame, raw_bytes=max(frame.raw_bytes + wrong, 0)).unpack()


def test_a_body_that_would_fill_the_memory_is_refused_before_it_is_unpacked() -> None:
    frame = Frame.pack(3, QUERY, FrameBody(0, (Partial(0, bytes(5000)),)))
    with pytest.raises(CorruptFrame):
        dataclasses.replace(frame, raw_bytes=MAX_BODY_BYTES + 1).unpack()


@given(st.binary(max_size=60), st.sampled_from(Encoding), st.integers(0, 500))
def test_foreign_bytes_under_a_valid_checksum_are_refused_or_a_body(body: bytes, encoding: Encoding, raw: int) -> None:
    try:
        with suppress(CorruptFrame):  # nearly none can be decompressed
            assert isinstance(Frame(1, QUERY, body, 0, encoding, raw).unpack(), FrameBody)
        frame = Frame(1, QUERY, body, google_crc32c.value(body), Encoding.PLAIN, len(body))
        assert isinstance(frame.unpack(), FrameBody)
    except CorruptFrame as error:
        assert error.code == "corrupt-frame"


def test_an_unknown_encoding_is_refused() -> None:
    message = Frame.pack(6, QUERY, FrameBody(0)).to_wire()
    for encoding in (pb.Frame.ENCODING_UNSPECIFIED, 99):
        message.encoding = encoding  # type: ignore[assignment]
        with pytest.raises(CorruptFrame):
            Frame.from_wire(message)


@given(BODIES)
def test_wire_bytes_are_never_underestimated(body: FrameBody) -> None:
    frame = Frame.pack((1 << 64) - 1, QueryRef("q" * 63, (1 << 64) - 1), body)
    actual = pb.FromEdge(frame=frame.to_wire()).ByteSize()
    assert actual <= frame.wire_bytes <= actual + FRAME_OVERHEAD_BYTES
