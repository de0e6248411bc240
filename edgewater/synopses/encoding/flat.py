"""Serialised synopses of one layout as one array: what differs between them is some numbers at fixed places.

Dense sketches of equal parameters are the same bytes but for their counters, the number of records and the checksum.
So many of them, one below the other, are a matrix: its fixed columns are compared with those of one part that was
read in full, and its counters are views in the type they are stored in. No part is parsed, and none becomes an object.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from edgewater.synopses.base import BoolArray
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

HEADER_BYTES = 8  # magic and checksum (`codec`)
_CHECKSUM = slice(4, 8)
_RECORDS, _ARRAYS, _DATA = 5, 6, 5  # field numbers in synopsis.proto
_VARINT, _FIXED64, _BYTES = 0, 1, 2  # wire types


@dataclass(frozen=True)
class Layout:
    """Where in a part's bytes its numbers stand.

    Attributes:
        records: of the varint that is the number of records; empty if that is 0.
        arrays: (where, stored type, shape) of each array.
        fixed: what is the same in all parts: all but the checksum, the number of records and the free arrays.
    """

    length: int
    records: slice
    arrays: tuple[tuple[slice, np.dtype[Any], tuple[int, ...]], ...]
    fixed: tuple[slice, ...]

    @classmethod
    def of(cls, part: bytes, message: SynopsisMessage, free: Sequence[int]) -> Layout:
        """The layout of sealed bytes that were read as `message`; `free`: numbers of the arrays that differ."""
        records, found = slice(0, 0), []
        for field, where in _fields(part, HEADER_BYTES, len(part)):
            if field == _RECORDS:
                records = where
            elif field == _ARRAYS:
                inner = (place for number, place in _fields(part, where.start, where.stop) if number == _DATA)
                found.append(next(inner, slice(where.stop, where.stop)))
        arrays = tuple(
            (where, np.dtype(array.stored), tuple(array.shape))
            for where, array in zip(found, message.arrays, strict=True)
        )
        varying = (_CHECKSUM, records, *(arrays[number][0] for number in free))
        borders = sorted([0, len(part), *(end for where in varying for end in (where.start, where.stop))])
        fixed = tuple(slice(begin, end) for begin, end in zip(borders[0::2], borders[1::2], strict=True) if begin < end)
        return cls(len(part), records, arrays, fixed)

    def alike(self, rows: npt.NDArray[np.uint8], first: npt.NDArray[np.uint8]) -> BoolArray:
        """Which of the parts `rows`, shape (parts, length), are the same as `first` where parts of this layout are."""
        records = self.records
        # The same number of bytes in the varint, or what is behind it would have moved.
        same = [rows[:, records] & 128 == first[records] & 128, *(rows[:, at] == first[at] for at in self.fixed)]
        if all(bool(one.all()) for one in same):  # most often, and a reduction per row takes long
            return np.ones(len(rows), bool)
        return np.asarray(np.logical_and.reduce([one.all(axis=1) for one in same]))

    def total_records(self, rows: npt.NDArray[np.uint8]) -> int:
        digits = (rows[:, self.records] & 127).sum(axis=0, dtype=np.int64).tolist()
        return sum(digit << 7 * place for place, digit in enumerate(digits))

    def array(self, rows: npt.NDArray[np.uint8], number: int) -> npt.NDArray[Any]:
        """One array of all parts, shape (parts, *shape), in the type it is stored in."""
        where, stored, shape = self.arrays[number]
        items = (where.stop - where.start) // stored.itemsize
        # Not a copy: numbers may begin at any byte, and NumPy reads those that are not aligned too.
        columns: npt.NDArray[Any] = np.ndarray(
            (len(rows), items), stored, rows, where.start, (rows.strides[0], stored.itemsize)
        )
        return columns.reshape(len(rows), *shape)


def checksums_hold(parts: Sequence[bytes], rows: npt.NDArray[np.uint8]) -> BoolArray:
    actual = np.array([google_crc32c.value(part[HEADER_BYTES:]) for part in parts], np.uint32)
    return np.asarray(np.ascontiguousarray(rows[:, _CHECKSUM]).view("<u4")[:, 0] == actual)


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, slice]]:
    """Number and place of the value of each field of a sound protobuf message."""
    while at < end:
        tag, at = _varint(data, at)
        kind, begin = tag & 7, at
        if kind == _VARINT:
            _, at = _varint(data, at)
        elif kind == _FIXED64:
            at += 8
        elif kind == _BYTES:
            length, begin = _varint(data, at)
            at = begin + length
        else:
            return
        yield tag >> 3, slice(begin, at)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at
