"""Reads many serialised synopses of one kind at once: array by array over all partials, not partial by partial.

Partials of one kind and of equal parameters begin with the same bytes and have the same number of arrays. Lengths and
stored types of the arrays differ (if these are equal too, `flat` is faster). A protobuf parser takes its steps for one
message at a time; this module takes each step for all partials at a time. Each partial has a position, and a step of
the format advances all positions. An array becomes (type, length, offset) per partial; one join extracts its data.

Only the output of `codec.seal` for numeric arrays, with fields in order, is supported. For anything else `read` returns
None. The caller then uses the protobuf parser, which also reports errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edgewater.model.errors import CorruptSynopsis, IncompatibleSynopses
from edgewater.synopses.base import BoolArray, IntArray
from edgewater.synopses.encoding import codec
from edgewater.synopses.encoding.codec import ArrayRoles
from edgewater.synopses.encoding.flat import HEADER_BYTES, checksums
from edgewater.synopses.hashing import WordArray
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

_TYPE_AND_STORED = (0x1A00_0000_0312_0108, 0xFF00_0000_FFFF_FFFF), (0x22_0000_0003, 0xFF_0000_00FF)
"""The 13 bytes of an array from its encoding to its shape, as two words: (expected bits, mask of the compared bits)."""
_HIGH = 0x8080_8080_8080_8080
_RECORDS_TAG, _ARRAY_TAG, _DATA_TAG = 0x28, 0x32, 0x2A
_HEAD_BYTES = 32
"""The usual limit of the bytes of an array before its data."""


class MessageBatch(Protocol):
    """Messages of one group each, of one kind and of equal parameters."""

    def stacked(self, roles: ArrayRoles) -> SynopsisMessage:
        """Returns the message of a stack of all these groups (`codec.stacked`)."""

    def array(self, number: int, of: slice = slice(None)) -> npt.NDArray[Any]:
        """Returns one array, concatenated over these messages, in its declared type; read-only.

        Raises SynopsisError.
        """

    def scalars(self, number: int) -> npt.NDArray[Any]:
        """Returns an array that has one value per message. Raises IncompatibleSynopses if it has another length."""


@dataclass(frozen=True, slots=True)
class ParsedBatch:
    """A `MessageBatch` of parsed messages."""

    messages: Sequence[SynopsisMessage]

    def stacked(self, roles: ArrayRoles) -> SynopsisMessage:
        return codec.stacked(self.messages, roles)

    def array(self, number: int, of: slice = slice(None)) -> npt.NDArray[Any]:
        return codec.decode(codec.joined([message.arrays[number] for message in self.messages[of]]))

    def scalars(self, number: int) -> npt.NDArray[Any]:
        if any(list(message.arrays[number].shape) != [1] for message in self.messages):
            raise _not_single(self.messages[0].kind)
        return self.array(number)


class _Unsupported(Exception):
    """Bytes that only the protobuf parser reads."""


@dataclass(frozen=True, slots=True)
class _Column:
    """One array of many partials, in columns of one row per partial.

    Attributes:
        dims: lengths per axis; the first axis differs between partials.
        types: declared and stored type, as three characters each in an integer.
        places: offset of the data in the joined partials, and its length in bytes.
        numbers: indices of the partials.
    """

    dims: list[IntArray]
    types: tuple[WordArray, WordArray]
    places: tuple[IntArray, IntArray]
    numbers: IntArray

    def of(self, chosen: slice) -> _Column:
        (declared, stored), (begins, lengths) = self.types, self.places
        dims = [dim[chosen] for dim in self.dims]
        return _Column(
            dims, (declared[chosen], stored[chosen]), (begins[chosen], lengths[chosen]), self.numbers[chosen]
        )


class _Reader:
    """A position in every partial; all advance together."""

    def __init__(self, partials: Sequence[bytes]) -> None:
        self.joined = b"".join([*partials, bytes(_HEAD_BYTES)])
        # An overlapping view with one word per byte, since numbers may begin at any byte.
        self._words: WordArray = np.ndarray((len(self.joined) - 7,), "<u8", self.joined, strides=(1,))
        self.ends = np.cumsum(np.fromiter(map(len, partials), np.int64, len(partials)))
        self.starts = np.concatenate([[0], self.ends[:-1]])
        self.at = self.starts.copy()

    def word(self, at: IntArray | None = None) -> WordArray:
        if int(self.at.max()) >= len(self._words):
            raise _Unsupported
        return self._words[self.at if at is None else at]

    def pieces(self, at: IntArray, size: int) -> npt.NDArray[np.uint8]:
        """Returns `size` bytes from each of these positions, in a new array of shape (positions, size)."""
        if int(at.max(initial=0)) + size > len(self.joined):
            raise _Unsupported
        pieces = np.ndarray((len(self.joined) - size + 1,), f"V{size}", self.joined, strides=(1,))
        return pieces[at].view(np.uint8).reshape(len(at), size)

    def expect(self, tag: int) -> None:
        if ((self.word() & np.uint64(0xFF)) != tag).any():
            raise _Unsupported
        self.at = self.at + 1

    def varint(self, here: BoolArray | None = None) -> IntArray:
        """Reads a number of up to 5 bytes per partial. Where `here` is false, it returns 0 and does not advance."""
        word = self.word()
        last = ~word & np.uint64(_HIGH)
        if here is None and (last & np.uint64(0x80)).all():
            self.at = self.at + 1
            return (word & np.uint64(0x7F)).view(np.int64)
        width = (np.bitwise_count((last & (~last + np.uint64(1))) - np.uint64(1)) >> 3).astype(np.int64) + 1
        if (width > 5).any():
            raise _Unsupported
        number = np.zeros(len(word), np.uint64)
        for place in range(int(width.max())):
            digit = (word >> np.uint64(8 * place)) & np.uint64(0x7F)
            number |= np.where(place < width, digit << np.uint64(7 * place), np.uint64(0))
        moved = number.view(np.int64)
        if here is not None:
            width, moved = np.where(here, width, 0), np.where(here, moved, 0)
        self.at = self.at + width
        return moved


class ColumnBatch:
    """A `MessageBatch` of partials that are not parsed. `read` constructs it.

    Attributes:
        records: the sum of the partials' numbers of records.
    """

    def __init__(self, partials: Sequence[bytes], first: SynopsisMessage, reader: _Reader) -> None:
        self._partials, self._first, self._pieces = partials, first, reader.pieces
        records = _optional(reader, _RECORDS_TAG)
        self.records = int(records.sum())
        self._columns = [_column(reader) for _ in first.arrays]
        self._starts = reader.starts
        if (reader.at != reader.ends).any():
            raise _Unsupported

    def stacked(self, roles: ArrayRoles) -> SynopsisMessage:
        first = self._first
        if not self._is_single(roles.groups) or not all(self._all_equal(number) for number in roles.equal):
            raise _not_single(first.kind)
        result = codec.header(first.kind, first.version, {}, seed=first.seed)
        result.parameters = first.parameters
        for number, column in enumerate(self._columns):
            if number in roles.first_only or number in roles.equal:
                result.arrays.append(first.arrays[number])
            elif number in roles.group_numbers:
                result.arrays.append(codec.encode(np.flatnonzero(column.dims[0])))
            else:
                result.arrays.append(codec.encode(self.array(number)))
        return result

    def scalars(self, number: int) -> npt.NDArray[Any]:
        if not self._is_single(number):
            raise _not_single(self._first.kind)
        return self.array(number)

    def _is_single(self, number: int) -> bool:
        dims = self._columns[number].dims
        return len(dims) == 1 and bool((dims[0] == 1).all())

    def _all_equal(self, number: int) -> bool:
        column = self._columns[number]
        data, one = self._data(column), self._data(column.of(slice(1)))
        same_layout = all((varying == varying[0]).all() for varying in (*column.dims, *column.types))
        return same_layout and bytes(data) == bytes(one) * len(self._partials)

    def array(self, number: int, of: slice = slice(None)) -> npt.NDArray[Any]:
        column = self._columns[number].of(of)
        (declared, stored), (_, lengths) = column.types, column.places
        rest = [int(dim.max()) for dim in column.dims[1:]]
        filled = lengths > 0
        ragged = any((dim[filled] != most).any() for dim, most in zip(column.dims[1:], rest, strict=True))
        if ragged or (declared != declared[0]).any():
            raise CorruptSynopsis(f"{self._first.kind}: array {number} has several types or shapes")
        type_, each, used = _name(declared[0]), math.prod(rest), _distinct(stored[filled])
        if each > codec.MAX_BYTES or column.dims[0].max() > codec.MAX_BYTES:
            raise CorruptSynopsis(f"{self._first.kind}: array {number} has axes of {column.dims[0].max()}, {rest}")
        items, sizes = column.dims[0] * each, np.zeros(len(stored), np.int64)
        for code in used.tolist():
            codec.require_exact(type_, _name(code))
            sizes[stored == code] = codec.TYPES[_name(code)].itemsize
        # Checked before any allocation, because a length in a message costs no bytes.
        if (items * sizes != lengths).any() or items[~filled].any() or type_ not in codec.TYPES:
            raise CorruptSynopsis(f"{self._first.kind}: shapes and lengths of array {number} do not fit")
        shape = int(column.dims[0].sum()), *rest
        if len(used) == 1 and filled.all():
            return self._decoded(column, type_, _name(used[0]), None).reshape(shape)
        values = np.zeros(int(items.sum()), type_)
        for code in used:
            chosen = filled & (stored == code)
            values[np.repeat(chosen, items)] = self._decoded(column, type_, _name(code), chosen)
        return values.reshape(shape)

    def _decoded(self, column: _Column, type_: str, stored: str, chosen: BoolArray | None) -> npt.NDArray[Any]:
        """Returns the items of all partials, or of the chosen ones, which are stored in one type."""
        return np.frombuffer(self._data(column, chosen), stored).astype(type_, copy=False)

    def _data(self, column: _Column, chosen: BoolArray | None = None) -> bytes | memoryview:
        """Returns the data of one array of all partials, or of the chosen ones."""
        (begins, lengths), numbers = column.places, column.numbers
        if chosen is not None:
            begins, lengths, numbers = begins[chosen], lengths[chosen], numbers[chosen]
        size = int(lengths[0])
        if size and (lengths == size).all():
            return self._pieces(begins, size).data
        froms = begins - self._starts[numbers]
        places = zip(numbers.tolist(), froms.tolist(), (froms + lengths).tolist(), strict=True)
        return b"".join([self._partials[number][begin:end] for number, begin, end in places])


def read(like: SynopsisMessage, partials: Sequence[bytes]) -> ColumnBatch | None:
    """Reads sealed synopses that differ from `like` only in records and arrays; None: there are other differences."""
    bare = SynopsisMessage(kind=like.kind, version=like.version, parameters=like.parameters, seed=like.seed)
    head = bare.SerializeToString(deterministic=True)
    first = codec.unseal(partials[0])
    same_shape = len(first.arrays) == len(like.arrays) and not first.parts
    if not same_shape or not all(map(bytes.startswith, partials, repeat(head), repeat(HEADER_BYTES))):
        return None
    reader = _Reader(partials)
    magic = np.uint64(int.from_bytes(codec.MAGIC, "little"))
    if (reader.word() != (checksums(partials).astype(np.uint64) << np.uint64(32) | magic)).any():
        return None
    reader.at = reader.at + HEADER_BYTES + len(head)
    try:
        return ColumnBatch(partials, first, reader)
    except _Unsupported:
        return None


def _column(reader: _Reader) -> _Column:
    """Advances over an array."""
    return _similar_column(reader) or _any_column(reader)


def _similar_column(reader: _Reader) -> _Column | None:
    """Advances over an array whose heads differ only in their numbers: types and widths of numbers are equal.

    For any other array it returns None and does not advance.
    """
    begin = int(reader.at[0])
    model = reader.joined[begin : begin + _HEAD_BYTES]
    types = _width(model, 1) + 1  # after the tag and the length
    shape = types + 14
    if shape > len(model):
        return None
    numbers = [slice(1, types), *_widths(model, shape, shape + model[shape - 1])]
    size = numbers[-1].stop
    has_data = begin + size < int(reader.ends[0]) and model[size : size + 1] == bytes([_DATA_TAG])
    if has_data:
        numbers.append(slice(size + 1, size + 1 + _width(model, size + 1)))
        size = numbers[-1].stop
    words = (int.from_bytes(model[at : at + 8], "little") for at in (types, types + 8))
    is_expected = all(word & mask == expected for word, (expected, mask) in zip(words, _TYPE_AND_STORED, strict=True))
    if not is_expected or model[0] != _ARRAY_TAG or size > _HEAD_BYTES or size - has_data < shape:
        return None
    mask = np.full(size, 0xFF, np.uint8)
    for where in numbers:
        mask[where] = 0x80
    heads = reader.pieces(reader.at, size)
    if ((heads ^ heads[0]) & mask).any():
        return None
    length, *dims = (_packed(heads[:, where]) for where in numbers)
    data = dims.pop() if has_data else np.zeros(len(heads), np.int64)
    end, begins = reader.at + types + length, reader.at + size
    if (begins + data != end).any() or (end > reader.ends).any():
        return None
    reader.at = end
    declared, stored = (int.from_bytes(model[at : at + 3], "little") for at in (types + 4, types + 9))
    names = np.full(len(end), declared, np.uint64), np.full(len(end), stored, np.uint64)
    return _Column(dims, names, (begins, data), np.arange(len(end)))


def _width(data: bytes, at: int) -> int:
    """Returns the number of bytes of the number at a position. If the number does not end, returns a larger length."""
    return next((n for n in range(1, 5) if data[at + n - 1 : at + n] < b"\x80"), len(data) + 1)


def _widths(data: bytes, at: int, end: int) -> Iterator[slice]:
    """Yields the positions of the numbers from `at` to `end`."""
    while at < end:
        yield slice(at, at := at + _width(data, at))


def _packed(digits: npt.NDArray[np.uint8]) -> IntArray:
    """Returns the numbers whose bytes are `digits`, shape (numbers, width)."""
    result = (digits[:, 0] & 0x7F).astype(np.int64)
    for place in range(1, digits.shape[1]):
        result |= (digits[:, place] & 0x7F).astype(np.int64) << 7 * place
    return result


def _any_column(reader: _Reader) -> _Column:
    """Advances over any array."""
    reader.expect(_ARRAY_TAG)
    length = reader.varint()
    end = reader.at + length
    words = []
    for (expected, mask), step in zip(_TYPE_AND_STORED, (8, 6), strict=True):
        word = reader.word()
        if ((word & np.uint64(mask)) != expected).any():
            raise _Unsupported
        words.append(word)
        reader.at = reader.at + step
    types = (words[0] >> np.uint64(32)) & np.uint64(0xFF_FFFF), (words[1] >> np.uint64(8)) & np.uint64(0xFF_FFFF)
    shape_end = reader.at + ((words[1] >> np.uint64(40)) & np.uint64(0xFF)).view(np.int64)
    dims = []
    while (reader.at < shape_end).any():
        dims.append(reader.varint())
    if not dims or (reader.at != shape_end).any():
        raise _Unsupported
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
        raise _Unsupported
    return _Column(dims, types, (begin, data), np.arange(len(end)))


def _optional(reader: _Reader, tag: int, expected: BoolArray | None = None) -> IntArray:
    """Reads the number after a tag; 0 where the tag is missing."""
    there = (reader.word() & np.uint64(0xFF)) == tag
    if expected is not None and (there != expected).any():
        raise _Unsupported
    reader.at = reader.at + there
    return reader.varint(there)


def _not_single(kind: str) -> IncompatibleSynopses:
    return IncompatibleSynopses(f"{kind}: levels differ, or there is more than one group")


def _distinct(codes: WordArray) -> WordArray:
    """Returns each of the numbers once; fast where all are equal."""
    return codes[:1] if (codes == codes[:1]).all() else np.unique(codes)


def _name(code: Any) -> str:
    return int(code).to_bytes(3, "little").decode("ascii", "replace")
