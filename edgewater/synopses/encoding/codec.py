"""Synopses as bytes: ``EWS1`` + CRC32C (4 bytes, little endian) + a `Synopsis` message.

Arrays are stored in the narrowest NumPy type that represents each value exactly: a small count takes one byte, and
integral float64 sums take as much as integers. `pack` changes large numbers of many groups so that they compress well.
Frames are compressed on top.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from google.protobuf.message import DecodeError

from edgewater.base.errors import CorruptSynopsis, IncompatibleSynopses, UnsupportedVersion
from edgewater.base.nesting import MAX_PACKED, Nesting, check_nesting
from edgewater.synopses.base import IntArray
from edgewater.wire.synopsis_pb2 import Array as ArrayMessage
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

MAGIC = b"EWS1"
_HEADER = struct.Struct("<4sI")
MAX_BYTES = 1 << 30  # limit: memory of a message
MAX_RECORDS = (1 << 64) - 1
"""The largest number of records that a message can state. Sums stop at this number."""
MAX_PARAMETERS = 64 << 10
"""Characters of a synopsis' parameters."""
_MAX_BRACKETS = 256  # limits the depth of the parameters
_MAX_DIGITS = 30  # limit: CPU of parameters
MAX_DEPTH = 4
"""Levels of nested synopses: a manager of managers of wavelets has three."""
_BYTES_PER_MESSAGE = 16  # limit: memory of nested messages
"""Every nested message that `seal` wrote has more bytes than this. In memory each takes about 100."""


def _is_plain(data: bytes, at: int, end: int) -> bool:
    """Returns whether this is an array of numbers as `encode` writes it: types of three characters, a short shape, and
    data up to the end.
    """
    begin = at + 14
    if end - at < 18 or data[at : at + 4] != b"\x08\x01\x12\x03" or data[at + 12] != 0x22:
        return False
    begin += data[at + 13]
    if data[at + 13] > MAX_PACKED or end - begin < 5 or data[begin] != 0x2A:
        return False
    length, shift, begin = 0, 0, begin + 1
    while shift < 35 and begin < end:
        length |= (data[begin] & 127) << shift
        begin, shift = begin + 1, shift + 7
        if data[begin - 1] < 128:
            return begin + length == end
    return False


_ARRAY = Nesting({6: Nesting(packed=frozenset({4}))}, frozenset({4}), _is_plain)
_STACK = Nesting({6: _ARRAY})
_SYNOPSIS = Nesting({6: _ARRAY, 7: Nesting({6: _ARRAY, 7: Nesting({6: _ARRAY, 7: _STACK})})})
_MAX_AXES = 8  # limit: CPU of a shape
_FACTOR_BITS = 32  # derived: an int32 has the quotients
_VALUES_PER_STRING, _SAMPLE = 4, 1 << 10  # numbers take fewer bytes than strings from this many values per string on
_PLANES_FROM = 32  # with fewer numbers, the order of bytes does not matter; measured: bench.synopses
_MANY_RUNS = 3 / 4  # measured: bench.synopses
_FEW_STRINGS, _FEW_NUMBERS = 64, 64  # it is faster to compare so few in Python; measured: bench.synopses
_SHOWN = 100  # limit: length of a message
_CACHED = 1 << 10  # parameters up to this many characters are parsed once; limit: memory of the cache
_NARROWER = {
    of: [(np.dtype(t), int(np.iinfo(t).min), int(np.iinfo(t).max)) for t in narrower]
    for of, narrower in {"i": ("|u1", "|i1", "<u2", "<i2", "<u4", "<i4"), "u": ("|u1", "<u2", "<u4")}.items()
}
"""By kind, the narrower types with their least and greatest numbers, the narrowest first."""
TYPES = {t: np.dtype(t) for t in ("|b1", "|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f4", "<f8")}
EXACTLY = frozenset((s, t) for s in TYPES for t in TYPES if np.can_cast(s, t, "safe"))
"""(stored, declared) types between which every value converts exactly."""
NUMBERS = frozenset((ArrayMessage.FIXED, ArrayMessage.PLANES))
"""The encodings of arrays of numbers."""
MIN_EXPONENT, MAX_EXPONENT = -1_074, 900
"""An integer of 32 bits times 2 to such a power is a float64."""
END = b"\xff"
"""The byte at the end of a string, which UTF-8 never has."""
MAX_REPEATED = 32
"""Memory of repeated strings, at most, per byte of the message. A reader accepts twice as much."""
MAX_CODED = 256  # format: codes of one byte


def seal(message: SynopsisMessage) -> bytes:
    """Serialises a message, with magic and checksum in front."""
    body = message.SerializeToString(deterministic=True)
    return _HEADER.pack(MAGIC, google_crc32c.value(body)) + body


def unseal(data: bytes, max_messages: int = 1 << 20) -> SynopsisMessage:
    """Reads the bytes that `seal` wrote. Raises CorruptSynopsis for other bytes, and for more nested messages."""
    require_intact(data)
    body = data[_HEADER.size :]
    try:
        check_nesting(body, _SYNOPSIS, _BYTES_PER_MESSAGE, MAX_DEPTH + 2, max_messages)
        return SynopsisMessage.FromString(body)
    except (DecodeError, ValueError) as exc:
        raise CorruptSynopsis(f"the checksum holds but the body is no Synopsis message: {exc}") from exc


def require_intact(data: bytes) -> None:
    """Raises CorruptSynopsis unless length, magic and checksum show that `seal` wrote the bytes."""
    if len(data) < _HEADER.size or len(data) > MAX_BYTES:
        raise CorruptSynopsis(f"{len(data)} bytes cannot be a synopsis (at least {_HEADER.size})")
    magic, checksum = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise CorruptSynopsis(f"foreign bytes: they begin with {data[:4]!r}, a synopsis with {MAGIC!r}")
    actual = google_crc32c.value(data[_HEADER.size :])
    if actual != checksum:
        raise CorruptSynopsis(f"damaged bytes: CRC32C is {actual:#010x}, the header says {checksum:#010x}")


def header(
    kind: str, version: int, parameters: Mapping[str, Any], *, seed: int = 0, records: int = 0
) -> SynopsisMessage:
    """Returns a message without arrays."""
    text = _TEXT(parameters) if parameters else "{}"
    return SynopsisMessage(kind=kind, version=version, parameters=text, seed=seed, records=min(records, MAX_RECORDS))


def open_message(message: SynopsisMessage, kind: str, version: int, arrays: int, parts: int = 0) -> dict[str, Any]:
    """Checks a message's header and returns its parameters. Raises CorruptSynopsis or UnsupportedVersion.

    Args:
        version: the newest version that the caller reads.
        arrays, parts: the numbers of arrays and of nested messages that the payload must have.
    """
    if message.kind != kind:
        raise CorruptSynopsis(f"a {message.kind!r} where a {kind!r} was expected")
    if not 1 <= message.version <= version:
        raise UnsupportedVersion(f"{kind} bytes of version {message.version}; this release reads 1 to {version}")
    if len(message.arrays) != arrays or len(message.parts) != parts:
        raise CorruptSynopsis(
            f"{kind}: {len(message.arrays)} arrays and {len(message.parts)} parts, expected {arrays} and {parts}"
        )
    return parameters(kind, message.parameters)


def parameters(kind: str, text: str) -> dict[str, Any]:
    """Returns a message's parameters. Lists and mappings in it may be shared: do not change them.

    Raises:
        CorruptSynopsis: the parameters are not a mapping in JSON, or too large.
    """
    if len(text) <= _CACHED:
        return dict(_cached_parameters(kind, text))
    return _parameters(kind, text)


def _parameters(kind: str, text: str) -> dict[str, Any]:
    shown = text[:_SHOWN] + ("…" if len(text) > _SHOWN else "")
    if len(text) > MAX_PARAMETERS or text.count("[") + text.count("{") > _MAX_BRACKETS:
        limits = f"at most {MAX_PARAMETERS} and {_MAX_BRACKETS} brackets"
        raise CorruptSynopsis(f"{kind}: parameters of {len(text)} characters, {shown!r}; expected {limits}")
    try:
        value = _JSON.decode(text or "{}")
    except ValueError as exc:
        raise CorruptSynopsis(f"{kind}: parameters are not JSON: {shown!r}") from exc
    if not isinstance(value, dict):
        raise CorruptSynopsis(f"{kind}: parameters are not a mapping: {shown!r}")
    return value


# Partials of one query have the same parameters.
_cached_parameters = lru_cache(maxsize=512)(_parameters)


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


_TEXT = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode
_JSON = json.JSONDecoder(parse_int=_integer, parse_constant=_constant)


def require_equal(kind: str, mine: object, theirs: object) -> None:
    """Raises IncompatibleSynopses, naming both, unless the parameters are equal."""
    if mine != theirs:
        raise IncompatibleSynopses(f"{kind}: {mine} and {theirs} do not merge; parameters must be equal")


def encode(values: npt.NDArray[Any]) -> ArrayMessage:
    """Encodes a NumPy array of bool, integers or floats, of any shape."""
    declared = _declared(values.dtype)
    if declared not in TYPES:
        raise TypeError(f"arrays of {values.dtype} have no encoding")
    stored = _narrow(np.ascontiguousarray(values, dtype=TYPES[declared]))
    return ArrayMessage(
        encoding=ArrayMessage.FIXED, type=declared, stored=stored.dtype.str, shape=values.shape, data=stored.tobytes()
    )


@lru_cache(maxsize=64)
def _declared(dtype: np.dtype[Any]) -> str:
    return dtype.newbyteorder("<").str


def _narrow(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if values.size == 0 or values.itemsize == 1:
        return values
    if values.dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            integers = values.astype(np.int64)
        # Compares bit patterns, not values: -0.0 == 0, but must be decoded as -0.0. NaN never compares equal.
        same = integers.astype(values.dtype).view(f"<i{values.itemsize}") == values.view(f"<i{values.itemsize}")
        if not same.all() or np.abs(values).max() >= 2.0**53:
            return values
        narrowed = _narrow(integers)
        return narrowed if narrowed.itemsize < values.itemsize else values
    few = values.size <= _FEW_NUMBERS
    numbers = values.ravel().tolist() if few else (int(values.min()), int(values.max()))
    low, high = min(numbers), max(numbers)
    for candidate, least, greatest in _NARROWER.get(values.dtype.kind, ()):
        if least <= low and high <= greatest and candidate.itemsize < values.itemsize:
            return values.astype(candidate)
    return values


def pack(message: SynopsisMessage) -> SynopsisMessage:
    """Changes the arrays of a message's parts, in place, so that they compress well; returns the message.

    Integers of several bytes become planes: neighbours have upper bytes in common. Multiples of a power of two, such as
    rounded sums, are divided by it.
    """
    for part in message.parts:
        for array in part.arrays:
            if array.encoding == ArrayMessage.FIXED and len(array.shape) == 1 and TYPES[array.stored].itemsize > 1:
                _pack(array)
    return message


def _pack(array: ArrayMessage) -> None:
    values = np.frombuffer(array.data, array.stored)
    if len(values) < 2:
        return
    exponent = _common_exponent(values)
    if exponent:
        divided = _narrow(np.ldexp(values, -exponent) if values.dtype.kind == "f" else values >> exponent)
        if divided.itemsize < values.itemsize:
            values, array.stored, array.exponent = divided, divided.dtype.str, exponent
    if values.dtype.kind == "f" or (len(values) < _PLANES_FROM and not array.exponent):
        return  # repeated floats, such as prices, compress better as a whole
    array.encoding = ArrayMessage.PLANES
    array.data = _transposed(values.tobytes(), values.itemsize)


def _common_exponent(values: npt.NDArray[Any]) -> int:
    """Returns the largest e for which all values are multiples of 2^e; 0 if quotients of floats do not fit into 32
    bits.
    """
    if values.dtype.kind != "f":
        common = int(np.bitwise_or.reduce(values))
        return (common & -common).bit_length() - 1 if common else 0
    if not np.isfinite(values).all():
        return 0
    mantissas, exponents = np.frexp(values.astype(np.float64))
    digits = np.ldexp(mantissas, 53).astype(np.int64)
    used = digits != 0
    if not used.any():
        return 0
    exponent = int((exponents - 53 + np.bitwise_count((digits & -digits) - 1))[used].min())
    fits = exponents[used].max() - exponent <= _FACTOR_BITS and MIN_EXPONENT <= exponent < MAX_EXPONENT
    return exponent if fits else 0


def _transposed(data: bytes, width: int) -> bytes:
    """Returns the bytes of a matrix of this width, column by column."""
    return np.frombuffer(data, np.uint8).reshape(-1, width).T.tobytes()


def plain(array: ArrayMessage) -> tuple[str, bytes]:
    """Returns the type and the bytes, in the order of `FIXED`, of an array of numbers whose length fits its data.

    Raises:
        CorruptSynopsis: the exponent is out of range.
    """
    if array.encoding != ArrayMessage.PLANES:
        return array.stored, array.data
    width = TYPES[array.stored].itemsize
    data = _transposed(array.data, len(array.data) // width) if array.data else b""
    return scaled(array.stored, array.type, data, array.exponent) if array.exponent else (array.stored, data)


def scaled(stored_as: str, type: str, data: bytes, exponent: int) -> tuple[str, bytes]:
    """Returns the type and the bytes of numbers that are stored as their quotients by a power of two.

    Raises CorruptSynopsis: the exponent is out of range.
    """
    stored, declared = np.frombuffer(data, stored_as), TYPES[type]
    if stored.dtype.kind in "iu" and declared.kind == "f" and MIN_EXPONENT <= exponent < MAX_EXPONENT:
        return type, np.ldexp(stored.astype(np.float64), exponent).astype(declared).tobytes()
    if stored.dtype.kind in "iu" and declared.kind in "iu" and 0 < exponent < 8 * declared.itemsize:
        values = stored.astype(declared)
        shifted = values << exponent
        if (shifted >> exponent == values).all():
            return type, shifted.tobytes()
    raise CorruptSynopsis(f"an array of {type} stored as {stored_as} has the exponent {exponent}")


def decode(message: ArrayMessage) -> npt.NDArray[Any]:
    """Returns the array that was encoded, with equal dtype, shape and bits. Raises CorruptSynopsis."""
    if message.encoding not in NUMBERS:
        raise CorruptSynopsis(f"an array of type {message.type!r} has another encoding than numbers")
    require_exact(message.type, message.stored)
    shape, stored, data = tuple(message.shape[:]), TYPES[message.stored], message.data
    if len(shape) > _MAX_AXES or math.prod(shape) * stored.itemsize != len(data) or (not data and not _is_short(shape)):
        raise CorruptSynopsis(f"an array of shape {shape[:_MAX_AXES]} has {len(data)} bytes of {message.stored}")
    of, data = plain(message)
    return np.frombuffer(data, of).reshape(shape).astype(TYPES[message.type])


def _is_short(shape: tuple[int, ...]) -> bool:
    """Returns whether NumPy represents an array without numbers of this shape."""
    return math.prod(max(length, 1) for length in shape) <= MAX_BYTES


def require_exact(declared: str, stored: str) -> None:
    """Raises CorruptSynopsis unless both are types, and `stored` represents every value of `declared` exactly."""
    if declared not in TYPES or stored not in TYPES:
        raise CorruptSynopsis(f"an array of type {declared!r} stored as {stored!r} cannot be read")
    if (stored, declared) not in EXACTLY:
        raise CorruptSynopsis(f"{stored} does not store {declared} exactly")


@dataclass(frozen=True, slots=True)
class ArrayRoles:
    """How each array of a kind is treated when messages of one group each are joined to one stack.

    An array that is not in `equal` or `group_numbers` is concatenated.

    Attributes:
        groups: index of an array whose length is the number of groups.
        equal: indices of arrays that describe the whole stack and must be equal in all messages. One is kept.
        group_numbers: indices of arrays of group numbers. They are written anew.
    """

    groups: int
    equal: tuple[int, ...] = ()
    group_numbers: tuple[int, ...] = ()


def encode_keys(values: pa.Array) -> ArrayMessage:
    """Encodes an Arrow array of string, int64, float64 or bool, with nulls."""
    valid = (
        b"" if values.null_count == 0 else values.is_valid().cast(pa.uint8()).to_numpy(zero_copy_only=False).tobytes()
    )
    if pa.types.is_string(values.type):
        message = _encode_strings(values.fill_null("") if valid else values)
    else:
        fill: Any = False if pa.types.is_boolean(values.type) else 0
        message = encode((values.fill_null(fill) if valid else values).to_numpy(zero_copy_only=False))
    message.valid = valid
    return message


def _encode_strings(values: pa.Array) -> ArrayMessage:
    """Encodes strings without nulls.

    Equal neighbours, such as sorted keys, are stored once. A column of few different strings is stored as numbers of
    strings.
    """
    message = ArrayMessage(encoding=ArrayMessage.UTF8, shape=[len(values)])
    if len(values) <= _FEW_STRINGS and len(set(values.to_pylist())) == len(values):
        message.data = _joined(values)
        return message
    runs = pc.run_end_encode(values)
    if len(runs.values) <= _MANY_RUNS * len(values):
        repeats = np.diff(runs.run_ends.to_numpy(), prepend=0).astype(np.int64)
        message.data = _joined(runs.values)
        message.repeats.CopyFrom(encode(repeats))
    elif len(values) > _VALUES_PER_STRING * len(values[:_SAMPLE].unique()) <= min(len(values), _SAMPLE):
        coded = values.dictionary_encode()
        order = pc.sort_indices(coded.dictionary).to_numpy()
        if len(order) <= MAX_CODED:
            numbers = np.empty(len(order), np.uint8)
            numbers[order] = np.arange(len(order))
            message.data = _joined(coded.dictionary.take(pa.array(order)), ended=True)
            message.codes = numbers[coded.indices.to_numpy()].tobytes()
    most = MAX_REPEATED * (len(message.data) + len(message.repeats.data) + len(message.codes))
    if values.nbytes > min(most, MAX_BYTES) or not message.data:
        message.ClearField("repeats")
        message.ClearField("codes")
        message.data = _joined(values)
    return message


def _joined(strings: pa.Array, *, ended: bool = False) -> bytes:
    """Returns the concatenation of strings. A byte `END` follows each string, unless all lengths are equal and `ended`
    is false.
    """
    _, offsets, text = strings.buffers()
    if text is None or not len(strings):
        return END * (len(strings) if ended or len(strings) > 1 else 0)
    ends: npt.NDArray[np.int32] = np.frombuffer(offsets, np.int32, len(strings) + 1, 4 * strings.offset)
    data = np.frombuffer(text, np.uint8)[ends[0] : ends[-1]]
    lengths = np.diff(ends)
    if not ended and (lengths == lengths[0]).all() and (lengths[0] or len(lengths) == 1):
        return data.tobytes()
    joined = np.full(len(data) + len(lengths), END[0], np.uint8)
    is_text = np.ones(len(joined), bool)
    is_text[ends[1:] - ends[0] + np.arange(len(lengths))] = False
    joined[is_text] = data
    return joined.tobytes()


def decode_keys(message: ArrayMessage) -> pa.Array:
    """Returns the Arrow array that `encode_keys` encoded. Raises CorruptSynopsis."""
    is_text = message.encoding == ArrayMessage.UTF8
    result = decode_strings([message]) if is_text else pa.array(decode(message))
    return with_nulls(result, message.valid) if message.valid else result


def with_nulls(values: pa.Array, valid: bytes) -> pa.Array:
    """Returns the values, null where the byte in `valid` is 0. Raises CorruptSynopsis for another number of bytes."""
    if len(valid) != len(values):
        raise CorruptSynopsis(f"{len(valid)} validity bytes for {len(values)} keys")
    mask = np.frombuffer(valid, np.uint8) == 0
    return pc.if_else(pa.array(mask), pa.scalar(None, values.type), values)


def decode_strings(messages: Sequence[ArrayMessage]) -> pa.Array:
    """Returns the strings of arrays, concatenated, without nulls. Raises CorruptSynopsis."""
    texts = [message.data for message in messages]
    if not any(message.codes or message.HasField("repeats") for message in messages):
        shapes = [message.shape[:] for message in messages]
        if all(len(shape) == 1 for shape in shapes):
            return distinct_strings(texts, [length for (length,) in shapes])
    facts = [string_facts(message) for message in messages]
    result = distinct_strings(texts, [each.count for each in facts])
    starts = np.cumsum([0, *(each.count for each in facts)])
    places = (np.arange(each.count) if each.places is None else each.places for each in facts)
    return result.take(pa.array(np.concatenate([start + p for start, p in zip(starts[:-1], places, strict=True)])))


def distinct_strings(texts: Sequence[bytes], counts: Sequence[int]) -> pa.Array:
    """Returns the distinct strings of the `Array.data` of some arrays. Raises CorruptSynopsis."""
    lengths = string_lengths(texts, counts)
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    joined = b"".join(texts)
    text = pa.py_buffer(joined if len(joined) == offsets[-1] else joined.translate(None, END))
    result = pa.Array.from_buffers(pa.string(), len(lengths), [None, pa.py_buffer(offsets), text])
    try:
        result.validate(full=True)
    except pa.ArrowInvalid as exc:
        raise CorruptSynopsis(f"keys are not UTF-8: {exc}") from exc
    return result


def string_lengths(texts: Sequence[bytes], counts: Sequence[int]) -> IntArray:
    """Returns the bytes of all strings of some arrays.

    Args:
        texts: `Array.data` of each array.
        counts: how many strings each array has.

    Raises:
        CorruptSynopsis: an array has not so many strings.
    """
    widths = [string_width(data, count) for data, count in zip(texts, counts, strict=True)]
    ended = [data for data, width in zip(texts, widths, strict=True) if width < 0]
    ends_at = np.flatnonzero(np.frombuffer(b"".join(ended), np.uint8) == END[0])
    lengths = np.diff(ends_at, prepend=-1) - 1
    if len(ended) == len(texts):
        return lengths
    result = np.repeat(np.array(widths, np.int64), counts)
    result[result < 0] = lengths
    return result


def string_width(data: bytes, count: int) -> int:
    """Returns the bytes of each of `count` strings; -1: a byte `END` follows each string. Raises CorruptSynopsis if
    there are not `count` strings.
    """
    ends = data.count(END)
    if ends == count and data.endswith(END):
        return -1
    if ends or len(data) % max(count, 1) or (not data and count > 1) or (data and not count):
        raise CorruptSynopsis(f"{len(data)} bytes, with {ends} ends, are not {count} strings")
    return len(data) // max(count, 1)


@dataclass(frozen=True, slots=True)
class StringFacts:
    """The size and the order of an array of strings, read before the strings are decoded.

    Attributes:
        count: the strings in `Array.data`.
        places: for each value, the number of its string; None: the values are the strings, in order.
        nbytes: the memory that the values take.
    """

    count: int
    places: IntArray | None
    nbytes: int


def string_facts(message: ArrayMessage) -> StringFacts:
    """Reads an array of strings without decoding the strings.

    Raises:
        CorruptSynopsis: the number of values contradicts the shape, or they would take too much memory.
    """
    if len(message.shape) != 1:
        raise CorruptSynopsis(f"strings of shape {tuple(message.shape)[:_MAX_AXES]}; expected one axis")
    length, data = message.shape[0], message.data
    if not message.codes and not message.HasField("repeats"):
        ended = string_width(data, length) < 0
        return StringFacts(length, None, len(data) - ended * length + 4 * length)
    max_bytes = min(2 * MAX_REPEATED * (len(data) + len(message.repeats.data) + len(message.codes)), MAX_BYTES)
    count, places = _codes(message) if message.codes else _repeated(message, max_bytes // 4)
    nbytes = int(string_lengths([data], [count])[places].sum()) + 4 * length
    if len(places) != length or nbytes > max_bytes:
        raise CorruptSynopsis(f"{len(data)} bytes of {count} strings, for {length} values that take {nbytes} bytes")
    return StringFacts(count, places, nbytes)


def _codes(message: ArrayMessage) -> tuple[int, IntArray]:
    count, codes = message.data.count(END), np.frombuffer(message.codes, np.uint8)
    if codes.max() >= count or message.HasField("repeats"):
        raise CorruptSynopsis(f"strings have numbers up to {codes.max()}; expected numbers below {count}")
    return count, codes.astype(np.int64)


def _repeated(message: ArrayMessage, most: int) -> tuple[int, IntArray]:
    repeats = decode(message.repeats)
    fit = repeats.ndim == 1 and repeats.dtype == np.int64 and repeats.min(initial=1) >= 1
    if not fit or repeats.max(initial=1) > most or repeats.sum() > most:
        raise CorruptSynopsis(f"repeats of {len(message.repeats.data)} bytes; expected int64, up to {most} altogether")
    return len(repeats), np.repeat(np.arange(len(repeats)), repeats)
