"""Many serialised synopses of one kind read at once: array by array over all of them, not part by part.

Parts of one kind and of equal parameters begin with the same bytes and have as many arrays, whose lengths and stored
types differ (`flat` is for those that do not even differ there). So what a protobuf parser does part by part is done
here for all parts at a time: each has a position, and a step of the format moves all positions on. An array becomes
(type, length, place) per part, and its data leave the parts in one join.

Only what `codec.seal` writes for numbers is read, fields in their order. Anything else is for the parser, and so is
saying what is wrong: `read` then gives None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import google_crc32c
import numpy as np
import numpy.typing as npt

from edgewater.errors import CorruptSynopsis, IncompatibleSynopses
from edgewater.synopses.base import BoolArray, IntArray
from edgewater.synopses.encoding import codec
from edgewater.synopses.hashing import WordArray
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

_HEADER_BYTES = 8  # magic and checksum
_TYPE_AND_STORED = (0x1A00_0000_0312_0108, 0xFF00_0000_FFFF_FFFF), (0x22_0000_0003, 0xFF_0000_00FF)
"""The 13 bytes of an array from its encoding to its shape, as two words, where the masks are set."""
_HIGH = 0x8080_8080_8080_8080
_RECORDS_TAG, _ARRAY_TAG, _DATA_TAG = 0x28, 0x32, 0x2A


class Many(Protocol):
    """Messages of one group each, of one kind and of equal parameters."""

    def stacked(
        self, groups: int, *, alike: Sequence[int] = (), own: Sequence[int] = (), rows: Sequence[int] = ()
    ) -> SynopsisMessage:
        """The message of a stack of all these groups (`codec.stacked`)."""

    def array(self, number: int, of: slice = slice(None)) -> npt.NDArray[Any]:
        """One array of all messages, or of these, one after the other, in its declared type; not to be written to.

        Raises SynopsisError.
        """

    def each(self, number: int) -> npt.NDArray[Any]:
        """An array of one value, of each message. Raises IncompatibleSynopses where it has not one."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """`Many` as messages."""

    messages: Sequence[SynopsisMessage]

    def stacked(
        self, groups: int, *, alike: Sequence[int] = (), own: Sequence[int] = (), rows: Sequence[int] = ()
    ) -> SynopsisMessage:
        return codec.stacked(self.messages, groups, alike=alike, own=own, rows=rows)

    def array(self, number: int, of: slice = slice(None)) -> npt.NDArray[Any]:
        return codec.decode(codec.joined([message.arrays[number] for message in self.messages[of]]))

    def each(self, number: int) -> npt.NDArray[Any]:
        if any(list(message.arrays[number].shape) != [1] for message in self.messages):
            raise _not_single(self.messages[0].kind)
        return self.array(number)


class _Odd(Exception):
    """Bytes that only the parser understands."""


@dataclass(frozen=True, slots=True)
class _Column:
    """One array of many parts, in columns of one row per part.

    Attributes:
        dims: lengths per axis; the first axis differs from part to part.
        types: declared and stored, as three characters each in an integer.
        places: where the data begin in the joined parts, and how many bytes they are.
        numbers: of the parts.
    """

    dims: list[IntArray]
    types: tuple[WordArray, WordArray]
    places: tuple[IntArray, IntArray]
    numbers: IntArray

    def of(self, parts: slice) -> _Column:
        (declared, stored), (begins, lengths) = self.types, self.places
        dims = [dim[parts] for dim in self.dims]
        return _Column(dims, (declared[parts], stored[parts]), (begins[parts], lengths[parts]), self.numbers[parts])


class _Reader:
    """Positions in all parts, which move on together."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        joined = b"".join([*parts, bytes(8)])
        # Numbers begin at any byte: an overlapping view, one word per byte.
        self._words: WordArray = np.ndarray((len(joined) - 7,), "<u8", joined, strides=(1,))
        self.ends = np.cumsum([len(part) for part in parts])
        self.starts = np.concatenate([[0], self.ends[:-1]])
        self.at = self.starts.copy()

    def word(self, at: IntArray | None = None) -> WordArray:
        if int(self.at.max()) >= len(self._words):
            raise _Odd
        return self._words[self.at if at is None else at]

    def expect(self, tag: int) -> None:
        if ((self.word() & np.uint64(0xFF)) != tag).any():
            raise _Odd
        self.at = self.at + 1

    def varint(self, here: BoolArray | None = None) -> IntArray:
        """A number per part, of up to 5 bytes; 0 and no step where `here` is false."""
        word = self.word()
        last = ~word & np.uint64(_HIGH)
        if here is None and (last & np.uint64(0x80)).all():
            self.at = self.at + 1
            return (word & np.uint64(0x7F)).view(np.int64)
        width = (np.bitwise_count((last & (~last + np.uint64(1))) - np.uint64(1)) >> 3).astype(np.int64) + 1
        if (width > 5).any():
            raise _Odd
        number = np.zeros(len(word), np.uint64)
        for place in range(int(width.max())):
            digit = (word >> np.uint64(8 * place)) & np.uint64(0x7F)
            number |= np.where(place < width, digit << np.uint64(7 * place), np.uint64(0))
        moved = number.view(np.int64)
        if here is not None:
            width, moved = np.where(here, width, 0), np.where(here, moved, 0)
        self.at = self.at + width
        return moved


class Columns:
    """`Many` parts, not parsed. `read` is the way to get one.

    Attributes:
        records: of all parts.
    """

    def __init__(self, parts: Sequence[bytes], first: SynopsisMessage, reader: _Reader) -> None:
        self._parts, self._first, self._words = parts, first, reader.word
        records = _optional(reader, _RECORDS_TAG)
        self.records = int(records.sum())
        self._columns = [_column(reader) for _ in first.arrays]
        self._starts = reader.starts
        if (reader.at != reader.ends).any():
            raise _Odd

    def stacked(
        self, groups: int, *, alike: Sequence[int] = (), own: Sequence[int] = (), rows: Sequence[int] = ()
    ) -> SynopsisMessage:
        first = self._first
        if not self._is_single(groups) or not all(self._all_alike(number) for number in alike):
            raise _not_single(first.kind)
        result = codec.header(first.kind, first.version, {}, seed=first.seed)
        result.parameters = first.parameters
        for number, column in enumerate(self._columns):
            if number in own or number in alike:
                result.arrays.append(first.arrays[number])
            elif number in rows:
                result.arrays.append(codec.encode(np.flatnonzero(column.dims[0])))
            else:
                result.arrays.append(codec.encode(self.array(number)))
        return result

    def each(self, number: int) -> npt.NDArray[Any]:
        if not self._is_single(number):
            raise _not_single(self._first.kind)
        return self.array(number)

    def _is_single(self, number: int) -> bool:
        dims = self._columns[number].dims
        return len(dims) == 1 and bool((dims[0] == 1).all())

    def _all_alike(self, number: int) -> bool:
        column = self._columns[number]
        data, one = self._data(column), self._data(column.of(slice(1)))
        alike = all((varying == varying[0]).all() for varying in (*column.dims, *column.types))
        return alike and data == one * len(self._parts)

    def array(self, number: int, of: slice = slice(None)) -> npt.NDArray[Any]:
        column = self._columns[number].of(of)
        (declared, stored), (_, lengths) = column.types, column.places
        rest = [int(dim.max()) for dim in column.dims[1:]]
        filled = lengths > 0
        ragged = any((dim[filled] != most).any() for dim, most in zip(column.dims[1:], rest, strict=True))
        if ragged or (declared != declared[0]).any():
            raise CorruptSynopsis(f"{self._first.kind}: array {number} has several types or shapes")
        type_, items = _name(declared[0]), column.dims[0] * math.prod(rest)
        shape = int(column.dims[0].sum()), *rest
        used = np.unique(stored[filled]).tolist() if (stored != stored[0]).any() else [int(stored[0])]
        if len(used) == 1:
            return self._decoded(column, items, type_, _name(used[0]), None).reshape(shape)
        values = np.zeros(int(items.sum()), type_)
        for code in used:
            chosen = stored == code
            values[np.repeat(chosen, items)] = self._decoded(column, items, type_, _name(code), chosen)
        return values.reshape(shape)

    def _decoded(
        self, column: _Column, items: IntArray, type_: str, stored: str, chosen: BoolArray | None
    ) -> npt.NDArray[Any]:
        """The items of all parts, or of these, which are stored in one type."""
        codec.require_exact(type_, stored)
        if chosen is not None:
            items = items[chosen]
        lengths = column.places[1] if chosen is None else column.places[1][chosen]
        if (items * np.dtype(stored).itemsize != lengths).any():
            raise CorruptSynopsis(f"{self._first.kind}: shapes and lengths of arrays of {stored} do not fit")
        return np.frombuffer(self._data(column, chosen), stored).astype(type_, copy=False)

    def _data(self, column: _Column, chosen: BoolArray | None = None) -> bytes:
        """The data of one array of all parts, or of these."""
        (begins, lengths), numbers = column.places, column.numbers
        if chosen is not None:
            begins, lengths, numbers = begins[chosen], lengths[chosen], numbers[chosen]
        size = int(lengths[0])
        if size <= 8 and (lengths == size).all():
            words = self._words(begins)
            return words.astype("<u8", copy=False).view(np.uint8).reshape(-1, 8)[:, :size].tobytes()
        froms = begins - self._starts[numbers]
        places = zip(numbers.tolist(), froms.tolist(), (froms + lengths).tolist(), strict=True)
        return b"".join([self._parts[number][begin:end] for number, begin, end in places])


def read(like: SynopsisMessage, parts: Sequence[bytes]) -> Columns | None:
    """Sealed synopses that differ from `like` in nothing but records and arrays; None, if they are not that."""
    bare = SynopsisMessage(kind=like.kind, version=like.version, parameters=like.parameters, seed=like.seed)
    head = bare.SerializeToString(deterministic=True)
    first = codec.unseal(parts[0])
    alike = len(first.arrays) == len(like.arrays) and not first.parts
    if not alike or not all(part.startswith(head, _HEADER_BYTES) for part in parts):
        return None
    reader = _Reader(parts)
    checksums = [google_crc32c.value(part[_HEADER_BYTES:]) for part in parts]
    magic = np.uint64(int.from_bytes(codec.MAGIC, "little"))
    if (reader.word() != (np.array(checksums, np.uint64) << np.uint64(32) | magic)).any():
        return None
    reader.at = reader.at + _HEADER_BYTES + len(head)
    try:
        return Columns(parts, first, reader)
    except _Odd:
        return None


def _column(reader: _Reader) -> _Column:
    """Steps over an array."""
    reader.expect(_ARRAY_TAG)
    length = reader.varint()
    end = reader.at + length
    words = []
    for (expected, mask), step in zip(_TYPE_AND_STORED, (8, 6), strict=True):
        word = reader.word()
        if ((word & np.uint64(mask)) != expected).any():
            raise _Odd
        words.append(word)
        reader.at = reader.at + step
    types = (words[0] >> np.uint64(32)) & np.uint64(0xFF_FFFF), (words[1] >> np.uint64(8)) & np.uint64(0xFF_FFFF)
    shape_end = reader.at + ((words[1] >> np.uint64(40)) & np.uint64(0xFF)).view(np.int64)
    dims = []
    while (reader.at < shape_end).any():
        dims.append(reader.varint())
    if not dims or (reader.at != shape_end).any():
        raise _Odd
    filled = reader.at < end
    data = np.zeros(len(end), np.int64)
    if filled.all():
        reader.expect(_DATA_TAG)
        data = reader.varint()
    elif filled.any():
        data = _optional(reader, _DATA_TAG, filled)
    begin = reader.at
    reader.at = begin + data
    if (reader.at != end).any() or (end > reader.ends).any():
        raise _Odd
    return _Column(dims, types, (begin, data), np.arange(len(end)))


def _optional(reader: _Reader, tag: int, expected: BoolArray | None = None) -> IntArray:
    """The number behind a tag; 0 where the tag is not there."""
    there = (reader.word() & np.uint64(0xFF)) == tag
    if expected is not None and (there != expected).any():
        raise _Odd
    reader.at = reader.at + there
    return reader.varint(there)


def _not_single(kind: str) -> IncompatibleSynopses:
    return IncompatibleSynopses(f"{kind}: levels differ, or there is more than one group")


def _name(code: Any) -> str:
    return int(code).to_bytes(3, "little").decode("ascii", "replace")
