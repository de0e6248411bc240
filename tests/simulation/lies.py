"""The statements of a hostile edge: numbers that cannot be true, in frames that are its own in all other respects."""

from __future__ import annotations

import math
import random  # noqa: TID251  (a generator of its own per frame, so that a replay tells the same lies)
from dataclasses import replace

from edgewater.wire import DroppedRecords, DropReason, Frame, FrameBody, Rest, SliceClose, Withheld
from edgewater.wire import uplink_pb2 as pb
from edgewater.wire.session_stream import LEAST_WINDOW_LOG, MOST_WINDOW_LOG, SessionPacker, SessionUnpacker

SHARE = 0.3
"""Probability that a close is replaced by an impossible one."""
LATE_SHARE = 0.05
"""Probability that a frame states more late records than any edge can read."""
OVERFLOW = (1 << 63) - 1
_MAX_MESSAGE_BYTES = 4 << 20


class Liar:
    """Alters what one edge sends. A frame that is sent again tells the same lies.

    It takes messages out of the stream of the session, and sends them in a stream of its own.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._checksums: dict[int, int] = {}

    def altered(self, message: pb.FromEdge) -> pb.FromEdge:
        if message.HasField("hello"):
            self._unpacker = SessionUnpacker(MOST_WINDOW_LOG, _MAX_MESSAGE_BYTES)
            self._packer = SessionPacker(LEAST_WINDOW_LOG, 1)
        if message.HasField("packed"):
            told, _ = self._unpacker.unpack(message.packed)
            return self._packer.pack(self._lying(told).SerializeToString())[0]
        return self._lying(message)

    def _lying(self, message: pb.FromEdge) -> pb.FromEdge:
        result = pb.FromEdge.FromString(message.SerializeToString())
        for frame in (result.frame,) if result.HasField("frame") else result.frames.frames:
            honest = Frame.from_wire(frame)
            rng = random.Random(f"{self._seed} {honest.crc32c}")
            lying = Frame.pack(honest.seq, honest.query, _with_lies(rng, honest.unpack()))
            self._checksums[lying.seq] = lying.crc32c
            frame.CopyFrom(lying.to_wire())
        for digest in result.hello.frames:
            digest.crc32c = self._checksums.get(digest.seq, digest.crc32c)
        return result


def _with_lies(rng: random.Random, body: FrameBody) -> FrameBody:
    """Returns the body with impossible statements in the place of some."""
    closes = tuple(_impossible(rng, close) if rng.random() < SHARE else close for close in body.closes)
    dropped = body.dropped
    if closes and rng.random() < LATE_SHARE:
        dropped = (*dropped, DroppedRecords(closes[0].slice_start_ms, DropReason.TOO_LATE, OVERFLOW))
    return replace(body, closes=closes, dropped=dropped)


def _impossible(rng: random.Random, close: SliceClose) -> SliceClose:
    if rng.random() < 0.25:
        return replace(close, observed=OVERFLOW, late=rng.choice((0, OVERFLOW)))
    if rng.random() < 0.3:
        return replace(close, withheld=(Withheld("m0", 1.0, 0.0, 1, rest=Rest(OVERFLOW)),))
    amounts = [rng.choice((0.0, 1e6, 1e308)) for _ in range(2)]
    amounts[rng.randrange(2)] = rng.choice((math.nan, -1e9, -math.inf))
    return replace(close, withheld=(Withheld("m0", *amounts, groups=1),))
