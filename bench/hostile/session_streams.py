"""Target: the compressed stream of a session, as the gateway decompresses it.

An input is the packed messages of a session, each after its length (u32, little endian).
"""

from __future__ import annotations

import struct

import numpy as np
import zstandard
from google.protobuf.message import DecodeError

from bench.hostile.frames import honest_frames
from bench.hostile.mutate import Rng, mutated_bytes, pick
from bench.hostile.targets import Target, register
from edgewater.base.errors import CorruptFrame
from edgewater.wire import uplink_pb2 as pb
from edgewater.wire.session_stream import SessionPacker, SessionUnpacker, unpacker_bytes

WINDOW_LOG, MAX_MESSAGE_BYTES = 16, 1 << 20
_LENGTH = struct.Struct("<I")


def honest_streams() -> list[bytes]:
    frames = [pb.Frame.FromString(each) for each in honest_frames()]
    messages = [pb.FromEdge(heartbeat=pb.Heartbeat(sent_at_ms=n)) for n in range(3)]
    messages += [pb.FromEdge(frame=frame) for frame in frames]
    messages += [pb.FromEdge(frames=pb.Frames(frames=frames)), _noise(200_000)]
    streams = []
    for level in (3, 19):
        packer, parts = SessionPacker(WINDOW_LOG, level), []
        for number, message in enumerate(messages):
            if number == 2:
                packer.set_level(6)
            parts.append(packer.pack(message.SerializeToString())[0].packed)
        streams.append(_joined(parts))
    return streams


def mutated_stream(data: bytes, rng: Rng) -> bytes:
    """Repeats, removes or changes a part of a stream, or the length that it states."""
    try:
        parts = _split(data)
    except (DecodeError, struct.error):
        return mutated_bytes(data, rng)
    at = int(rng.integers(len(parts))) if parts else 0
    match int(rng.integers(6)) if parts else 5:
        case 0:
            parts.insert(at, parts[at])
        case 1:
            del parts[at]
        case 2:
            stated = parts[at].plain_bytes
            parts[at].plain_bytes = int(pick(rng, (0, 1, stated + 1, MAX_MESSAGE_BYTES, (1 << 32) - 1)))
        case 3:
            parts[at].data = _zeros(int(pick(rng, (10, 1 << 16, 1 << 23))), int(pick(rng, (10, 16, 24))))
        case 4:
            parts[at].data = mutated_bytes(parts[at].data, rng)
        case _:
            return mutated_bytes(data, rng)
    return _joined(parts)


def run_stream(data: bytes) -> None:
    unpacker = SessionUnpacker(WINDOW_LOG, MAX_MESSAGE_BYTES)
    try:
        parts = _split(data)
    except (DecodeError, struct.error) as exc:  # gRPC ends the call
        raise CorruptFrame(str(exc)) from exc
    for part in parts:
        message, _ = unpacker.unpack(part)
        if message.ByteSize() > MAX_MESSAGE_BYTES or message.WhichOneof("message") in ("hello", "packed"):
            raise AssertionError("a message that must not be packed was read")


def stream_limit(data: bytes) -> int:
    """Returns the memory of a message of the largest size: the buffer, its bytes, and the parsed message."""
    return 4 * MAX_MESSAGE_BYTES + unpacker_bytes(WINDOW_LOG) + 8 * len(data)


def _noise(size: int) -> pb.FromEdge:
    return pb.FromEdge(frame=pb.Frame(body=np.random.default_rng(6).bytes(size)))


def _zeros(size: int, window_log: int) -> bytes:
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=window_log)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return stream.compress(bytes(size)) + stream.flush()


def _joined(parts: list[pb.Packed]) -> bytes:
    messages = [part.SerializeToString() for part in parts]
    return b"".join(_LENGTH.pack(len(message)) + message for message in messages)


def _split(data: bytes) -> list[pb.Packed]:
    parts, at = list[pb.Packed](), 0
    while at < len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        parts.append(pb.Packed.FromString(data[at : at + length]))
        at += length
    return parts


register(Target("session-stream", honest_streams, run_stream, mutated_stream, limit=stream_limit))
