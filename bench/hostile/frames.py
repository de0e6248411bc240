"""Targets: wire frames, as the gateway receives them and as the job decodes them."""

from __future__ import annotations

import google_crc32c
import numpy as np
import pyarrow as pa
from google.protobuf.message import DecodeError

from bench.hostile.mutate import Rng, mutated_bytes, pick
from bench.hostile.targets import Target, register
from edgewater.base.errors import CorruptFrame, EdgewaterError
from edgewater.wire import (
    Arrivals,
    DroppedRecords,
    Encoding,
    Frame,
    FrameBody,
    InputLoss,
    Partial,
    QueryRef,
    Rest,
    SliceClose,
    Withheld,
)
from edgewater.wire import uplink_pb2 as pb
from edgewater.wire.frames import MAX_BODY_BYTES, DropReason, encode_body

QUERY = QueryRef("bytes_by_url", 3)


def honest_frames() -> list[bytes]:
    rng = np.random.default_rng(5)
    withheld = Withheld("m", 1.5, 0.0, 2, 7.0, rest=Rest(3, (3.0,)))
    bodies = [
        FrameBody(0),
        FrameBody(1 << 41, (Partial(1_700_000_000_000, rng.bytes(200)), Partial(1_700_000_010_000, bytes(9999)))),
        FrameBody(
            7, (), (SliceClose(0, 5, 1, (withheld, withheld)), SliceClose(10, 0, 0, (), 3, 9)), -5,
            Arrivals(9, (b"abc", rng.bytes(30))), (InputLoss("s", "file-gone", 1, 2, 3), InputLoss("s", "r")),
            (DroppedRecords(-(1 << 62), DropReason.TOO_LATE, 4),),
        ),
        FrameBody(9, (), tuple(SliceClose(1_700_000_000_000 + i, i, 0) for i in range(1_200))),
    ]  # fmt: skip
    return [Frame.pack(seq, QUERY, body).to_wire().SerializeToString() for seq, body in enumerate(bodies)]


def mutated_frame(data: bytes, rng: Rng) -> bytes:
    """Changes the message, the packed body, or the body, whose length and checksum are then computed again."""
    try:
        message = pb.Frame.FromString(data)
        plain = Frame.from_wire(message).plain_body()
    except (DecodeError, EdgewaterError):
        return mutated_bytes(data, rng)
    match int(rng.integers(6)):
        case 0:
            return mutated_bytes(data, rng)
        case 1:
            message.body = mutated_bytes(message.body, rng)
        case 2:
            message.raw_bytes = int(pick(rng, (0, 1, len(plain) + 1, 1 << 20, 1 << 26, (1 << 26) + 1, (1 << 32) - 1)))
        case 3:
            message.encoding = int(rng.integers(5))  # type: ignore[assignment]
        case _:
            changed = _many_messages(rng) if rng.random() < 0.02 else mutated_bytes(plain, rng)
            message.crc32c, message.raw_bytes = google_crc32c.value(changed), len(changed)
            encoding = Encoding(1 + int(rng.integers(2)))
            message.encoding = int(encoding)  # type: ignore[assignment]
            message.body = _packed(changed, encoding)
    return message.SerializeToString()


def _packed(plain: bytes, encoding: Encoding) -> bytes:
    return plain if encoding is Encoding.PLAIN else pa.compress(plain, codec="zstd", asbytes=True)


def _many_messages(rng: Rng) -> bytes:
    return bytes([pick(rng, (0x0A, 0x12, 0x32, 0x3A)), 0]) * int(pick(rng, (1 << 10, 1 << 15, 1 << 18)))


def run_frame(data: bytes) -> None:
    try:
        message = pb.Frame.FromString(data)
    except DecodeError as exc:  # gRPC ends the call
        raise CorruptFrame(str(exc)) from exc
    frame = Frame.from_wire(message)
    written = encode_body(frame.unpack())
    again = Frame(1, QUERY, written, google_crc32c.value(written), Encoding.PLAIN, len(written))
    if encode_body(again.unpack()) != written:
        raise AssertionError("a body that was read is written differently")


def frame_limit(data: bytes) -> int:
    """Returns twice the memory of a body of the largest size. A frame of few bytes may decompress to it."""
    return 3 * MAX_BODY_BYTES


register(Target("frame", honest_frames, run_frame, mutated_frame, limit=frame_limit))
