"""Reads many serialised synopses of one layout as one matrix, in which only some numbers at fixed offsets differ.

Dense sketches of equal parameters have equal bytes apart from the counters, the number of records and the checksum. As
rows of a matrix of bytes, their fixed columns are compared with those of one partial that was parsed, and their
counters are views in the stored type. The other partials are not parsed and become no objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
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
    """The positions of numbers in a partial's bytes.

    Attributes:
        length: bytes of a partial.
        records: position of the varint with the number of records; empty if the number is 0.
        arrays: (position, stored type, shape) of each array.
        mask: bits that are equal in all partials, of the bytes before the end of the last varying array. Bits of the
            checksum, the number of records and the varying arrays are 0.
        after: position of the end of the last varying array. All partials are equal from there on.
    """

    length: int
    records: slice
    arrays: tuple[tuple[slice, np.dtype[Any], tuple[int, ...]], ...]
    mask: npt.NDArray[np.uint8]
    after: int

    @classmethod
    def of(cls, partial: bytes, message: SynopsisMessage, varying: Sequence[int]) -> Layout:
        """Returns the layout of sealed bytes that were parsed as `message`; `varying`: indices of the arrays that
        differ."""
        records, found = slice(0, 0), []
        for field, where in _fields(partial, HEADER_BYTES, len(partial)):
            if field == _RECORDS:
                records = where
            elif field == _ARRAYS:
                inner = (place for number, place in _fields(partial, where.start, where.stop) if number == _DATA)
                found.append(next(inner, slice(where.stop, where.stop)))
        arrays = tuple(
            (where, np.dtype(array.stored), tuple(array.shape[:]))
            for where, array in zip(found, message.arrays, strict=True)
        )
        differing = (_CHECKSUM, *(arrays[number][0] for number in varying))
        last = max(differing, key=lambda where: where.start)
        mask = np.full(last.start, 0xFF, np.uint8)
        for where in differing:
            mask[where] = 0
        mask[records] = 0x80  # the numbers must have equal lengths: otherwise the positions after them differ
        return cls(len(partial), records, arrays, mask, last.stop)

    def matches(self, rows: npt.NDArray[np.uint8], first: npt.NDArray[np.uint8]) -> BoolArray:
        """Returns which partials `rows`, shape (partials, length), equal `first` in the fixed positions."""
        before, after = slice(len(self.mask)), slice(self.after, None)
        differ = [(rows[:, before] ^ first[before]) & self.mask, rows[:, after] != first[after]]
        if not any(np.count_nonzero(one) for one in differ):  # the usual case; a reduction per row is slow
            return np.ones(len(rows), bool)
        return np.asarray(~np.logical_or.reduce([one.any(axis=1) for one in differ]))

    def total_records(self, rows: npt.NDArray[np.uint8]) -> int:
        digits = np.add.reduce(rows[:, self.records] & 127, axis=0, dtype=np.int64).tolist()
        return sum(digit << 7 * place for place, digit in enumerate(digits))

    def array(self, rows: npt.NDArray[np.uint8], number: int) -> npt.NDArray[Any]:
        """Returns one array of all partials, shape (partials, *shape), in its stored type."""
        where, stored, shape = self.arrays[number]
        items = (where.stop - where.start) // stored.itemsize
        # A view, not a copy: NumPy also reads numbers that are not aligned.
        columns: npt.NDArray[Any] = np.ndarray(
            (len(rows), items), stored, rows, where.start, (rows.strides[0], stored.itemsize)
        )
        return columns.reshape(len(rows), *shape)


def valid_checksums(rows: npt.NDArray[np.uint8]) -> BoolArray:
    """Returns which partials, shape (partials, length), have the checksum that their header states."""
    # Rows of the matrix are in the cache, and need no copies, as slices of the partials would.
    value: Callable[[Any], int] = google_crc32c.value
    actual = np.fromiter(map(value, rows[:, HEADER_BYTES:]), np.uint32, len(rows))
    return np.asarray(np.ascontiguousarray(rows[:, _CHECKSUM]).view("<u4")[:, 0] == actual)


def checksums(partials: Sequence[bytes]) -> npt.NDArray[np.uint32]:
    """Returns the CRC32C of each partial's body."""
    bodies = map(itemgetter(slice(HEADER_BYTES, None)), partials)
    return np.fromiter(map(google_crc32c.value, bodies), np.uint32, len(partials))


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, slice]]:
    """Yields the number, and the position of the value, of each field of a valid protobuf message."""
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
