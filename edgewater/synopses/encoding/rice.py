"""Golomb-Rice codes of many integers that are mostly small."""

from __future__ import annotations

import struct

import numpy as np

from edgewater.base.errors import CorruptSynopsis
from edgewater.synopses.base import IntArray

_BLOCK, _MOST_BITS = 32, 40  # format: of Rice codes on the wire
"""Numbers that have one parameter, and the largest parameter. A number n with parameter k is written as n >> k zeros
and a one, and k bits."""
_LENGTH = struct.Struct("<I")
_MOST_SUM = float(1 << 62)


def pack_integers(values: IntArray) -> bytes:
    """Encodes integers that are 0 or more, int64. `unpack_integers` needs to know how many there are."""
    count = len(values)
    blocks = np.pad(values, (0, -count % _BLOCK)).reshape(-1, _BLOCK)
    likely = np.frexp(blocks.sum(axis=1) / _BLOCK)[1]  # log2 of the mean, rounded up
    parameters = np.clip(likely[:, None] + np.array([-2, -1, 0]), 0, _MOST_BITS).astype(np.int64)
    bits = (blocks[:, None] >> parameters[..., None]).sum(axis=2) + parameters * _BLOCK
    best = np.take_along_axis(parameters, np.argmin(bits, axis=1)[:, None], axis=1)[:, 0]
    width = np.repeat(best, _BLOCK)[:count]
    high = values >> width
    zeros_and_ones = np.zeros(int((high + 1).sum()), np.uint8)
    zeros_and_ones[np.cumsum(high + 1) - 1] = 1
    unary, place = np.packbits(zeros_and_ones).tobytes(), np.cumsum(width) - width
    low = np.zeros(int(width.sum()), np.uint8)
    for bit in range(int(width.max(initial=0))):
        wide = width > bit
        low[place[wide] + bit] = values[wide] >> bit & 1
    return _LENGTH.pack(len(unary)) + best.astype(np.uint8).tobytes() + unary + np.packbits(low).tobytes()


def unpack_integers(data: bytes, at: int, count: int) -> tuple[IntArray, int]:
    """Returns `count` integers, and the position behind them.

    Raises:
        CorruptSynopsis: the bytes are not those of `count` integers, or their sum may exceed int64.
    """
    try:
        (length,) = _LENGTH.unpack_from(data, at)
        blocks, at = -(-count // _BLOCK), at + _LENGTH.size
        best = np.frombuffer(data, np.uint8, blocks, at).astype(np.int64)
        unary = np.unpackbits(np.frombuffer(data, np.uint8, length, at + blocks))
        at += blocks + length
        ends, width = np.flatnonzero(unary), np.repeat(best, _BLOCK)[:count]
        if len(ends) != count or int(best.max(initial=0)) > _MOST_BITS:
            raise ValueError(f"{len(ends)} numbers, expected {count}")
        size = -(-int(width.sum()) // 8)
        low = np.unpackbits(np.frombuffer(data, np.uint8, size, at))
    except (struct.error, ValueError) as exc:
        raise CorruptSynopsis(f"integers cannot be read: {exc}") from exc
    values = np.diff(ends, prepend=-1) - 1
    if ((values + 1) * 2.0**width).sum() > _MOST_SUM:
        raise CorruptSynopsis("integers cannot be read: their sum exceeds int64")
    values, place = values << width, np.cumsum(width) - width
    for bit in range(int(width.max(initial=0))):
        wide = width > bit
        values[wide] |= low[place[wide] + bit].astype(np.int64) << bit
    return values, at + size
