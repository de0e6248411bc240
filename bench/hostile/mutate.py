"""Mutators: of bytes, and of the structure of synopses, whose checksum is computed again."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import google_crc32c
import numpy as np

from edgewater.base.errors import SynopsisError
from edgewater.synopses.encoding import codec
from edgewater.wire.synopsis_pb2 import Array, Synopsis

Rng = np.random.Generator
Mutator = Callable[[bytes, Rng], bytes]

NUMBERS = (
    0, 1, 2, 3, 7, 8, 63, 64, 127, 128, 255, 256, 65535, 65536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32,
    (1 << 53) - 1, 1 << 53, (1 << 61) + 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1,
)  # fmt: skip
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 5e-324, 1e-300, 1e140, 1e300, 1.7e308, -1.7e308, np.inf, -np.inf, np.nan)
TYPES = ("|b1", "|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f4", "<f8", "", "<c8", "|S9", "|O", ">i8")
PARAMETERS: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 4, 14, 18, 19, 64, 65, 1000, 1 << 20, 1 << 31, 1 << 40, 1 << 63, 10**29,
    1.5, -0.5, 0.0, 1e-320, 1e308, "", "x", "int64", "string", [], [[]], {}, [1, 2], {"a": 1}, [["key", "int64"]],
)  # fmt: skip
TEXTS = ("", "{", "[" * 300, "[" * 70_000, '{"k":' * 200, "null", "[]", '"x"', "1", '{"precision":' + "9" * 5000 + "}",
         '{"k":NaN}', '{"k":1e999}', "{}")  # fmt: skip


def pick(rng: Rng, items: Any) -> Any:
    return items[int(rng.integers(len(items)))]


def mutated_bytes(data: bytes, rng: Rng) -> bytes:
    """Changes, inserts, removes or repeats a few bytes."""
    held = bytearray(data)
    for _ in range(1 + int(rng.integers(3))):
        at, kind = int(rng.integers(len(held) + 1)), int(rng.integers(7))
        length = 1 + int(rng.integers(8))
        if kind == 0 and at < len(held):
            held[at] ^= 1 << int(rng.integers(8))
        elif kind == 1 and at < len(held):
            held[at] = int(rng.integers(256))
        elif kind == 2:
            held[at:at] = rng.bytes(length)
        elif kind == 3:
            del held[at : at + length]
        elif kind == 4:
            held[at:at] = held[at : at + 4 * length]
        elif kind == 5:
            number = int(pick(rng, NUMBERS))
            held[at : at + 8] = number.to_bytes(8, "little") if rng.random() < 0.5 else varint(number)
        else:
            del held[at:]
    return bytes(held)


def varint(number: int) -> bytes:
    result = bytearray()
    while number > 127:
        result.append(number & 127 | 128)
        number >>= 7
    return bytes([*result, number])


def sealed(body: bytes) -> bytes:
    return codec.MAGIC + google_crc32c.value(body).to_bytes(4, "little") + body


def mutated_synopsis(data: bytes, rng: Rng) -> bytes:
    """Changes fields of a sealed synopsis, or of a nested one.

    In one of eight cases it changes the bytes of the message.
    """
    try:
        message = codec.unseal(data)
    except SynopsisError:
        return mutated_bytes(data, rng)
    kind = int(rng.integers(16))
    if kind == 0:
        return sealed(mutated_bytes(data[8:], rng))
    if kind == 1:
        return mutated_bytes(data, rng)
    for _ in range(1 + int(rng.geometric(0.6)) % 4):
        within = _one_of(message, rng)
        change: Callable[[Synopsis, Rng], None] = pick(rng, _CHANGES)
        change(within, rng)
    try:
        return codec.seal(message)
    except ValueError:  # protobuf writes no such number
        return data


def _one_of(message: Synopsis, rng: Rng) -> Synopsis:
    while message.parts and rng.random() < 0.75:
        message = pick(rng, message.parts)
    return message


def _array_of(message: Synopsis, rng: Rng) -> Array:
    if not message.arrays:
        return message.arrays.add()
    array: Array = pick(rng, message.arrays)
    return array.repeats if array.HasField("repeats") and rng.random() < 0.3 else array


def _change_header(message: Synopsis, rng: Rng) -> None:
    match int(rng.integers(5)):
        case 0:
            message.kind = pick(rng, ("", "count", "haar", "kll", "grouped_aggregate", "hyperloglog", "x" * 300))
        case 1:
            message.version = int(pick(rng, (0, 1, 2, (1 << 32) - 1)))
        case 2:
            message.seed = int(pick(rng, NUMBERS))
        case 3:
            message.records = int(pick(rng, NUMBERS))
        case 4:
            message.parameters = pick(rng, TEXTS)


def _change_parameters(message: Synopsis, rng: Rng) -> None:
    try:
        held = json.loads(message.parameters or "{}")
    except (ValueError, RecursionError):
        held = {}
    if not isinstance(held, dict) or not held:
        message.parameters = pick(rng, TEXTS)
        return
    name = pick(rng, sorted(held))
    if rng.random() < 0.1:
        del held[name]
    else:
        value = held[name]
        held[name] = value * 2 if isinstance(value, int | float) and rng.random() < 0.2 else pick(rng, PARAMETERS)
    message.parameters = json.dumps(held, sort_keys=True, separators=(",", ":"))


def _change_arrays(message: Synopsis, rng: Rng) -> None:
    if not message.arrays:
        message.arrays.add()
        return
    at = int(rng.integers(len(message.arrays)))
    match int(rng.integers(4)):
        case 0:
            del message.arrays[at]
        case 1:
            message.arrays.add().CopyFrom(message.arrays[at])
        case 2:
            message.arrays[at].CopyFrom(pick(rng, message.arrays))
        case 3:
            message.arrays[at].Clear()


def _change_parts(message: Synopsis, rng: Rng) -> None:
    if not message.parts or rng.random() < 0.2:
        part = message.parts.add()
        if rng.random() < 0.5:
            held = Synopsis()
            held.CopyFrom(message)
            part.CopyFrom(held)
        return
    at = int(rng.integers(len(message.parts)))
    if rng.random() < 0.5:
        del message.parts[at]
    else:
        message.parts.add().CopyFrom(message.parts[at])


def _change_array(message: Synopsis, rng: Rng) -> None:
    """Changes the fields of an array, so that they hardly fit each other."""
    array = _array_of(message, rng)
    match int(rng.integers(9)):
        case 0:
            array.type = pick(rng, TYPES)
        case 1:
            array.stored = pick(rng, TYPES)
        case 2:
            array.type = array.stored = pick(rng, TYPES)
        case 3:
            array.data = mutated_bytes(array.data, rng)
        case 4:
            array.valid = rng.bytes(int(pick(rng, (0, 1, max(len(array.data), 1)))))
        case 5:
            array.encoding = int(rng.integers(4))  # type: ignore[assignment]
        case 6:
            array.exponent = int(pick(rng, (-1, 0, 1, 52, 63, 64, 1 << 30)))
        case 7:
            array.codes = mutated_bytes(array.codes or array.data, rng)
        case 8:
            shape = list(array.shape)
            if shape and rng.random() < 0.7:
                shape[int(rng.integers(len(shape)))] = int(pick(rng, NUMBERS))
            else:
                shape.insert(int(rng.integers(len(shape) + 1)), int(pick(rng, (0, 1, 2, 1 << 40))))
            if rng.random() < 0.1:
                shape = shape[:-1]
            array.shape[:] = shape
            if 0 in shape and rng.random() < 0.5:
                array.data = b""


def _change_numbers(message: Synopsis, rng: Rng) -> None:
    """Changes some numbers of an array, which stays well-formed."""
    array = _array_of(message, rng)
    try:
        values = codec.decode(array)
    except SynopsisError:
        if array.data:
            held = bytearray(array.data)
            held[int(rng.integers(len(held)))] = int(rng.integers(256))
            array.data = bytes(held)
        return
    values = np.array(values)
    flat = values.reshape(-1)
    if len(flat):
        at = rng.integers(len(flat), size=1 + int(rng.integers(3)))
        match int(rng.integers(5)):
            case 0 | 1:
                flat[at] = _numbers(values.dtype, rng)
            case 2:
                flat[at] = flat[rng.integers(len(flat), size=len(at))]
            case 3:
                step = np.array(pick(rng, (1, -1, 2))).astype(values.dtype)
                flat[at] = ~flat[at] if flat.dtype == bool else flat[at] + step
            case 4:
                flat[:] = _numbers(values.dtype, rng)
    _put(array, values)


def _numbers(dtype: np.dtype[Any], rng: Rng) -> Any:
    if dtype.kind == "f":
        return pick(rng, FLOATS)
    if dtype.kind == "b":
        return bool(rng.integers(2))
    number = int(pick(rng, NUMBERS)) * int(pick(rng, (1, 1, 1, -1)))
    limits = np.iinfo(dtype)
    return min(max(number, int(limits.min)), int(limits.max))


def _put(array: Array, values: np.ndarray[Any, Any]) -> None:
    valid = array.valid
    array.CopyFrom(codec.encode(values))
    array.valid = valid


def _change_length(message: Synopsis, rng: Rng) -> None:
    """Changes the length of all arrays that have one length, as for another number of groups or rows."""
    arrays = [a for a in message.arrays if a.encoding == Array.FIXED and len(a.shape) == 1]
    if not arrays:
        return
    length = int(pick(rng, arrays).shape[0])
    wanted = int(pick(rng, (0, 1, 2, length + 1, max(length - 1, 0), 2 * length, 300)))
    chosen = [a for a in arrays if a.shape[0] == length]
    if rng.random() < 0.3:
        chosen = [pick(rng, chosen)]
    for array in chosen:
        try:
            values = codec.decode(array)
        except SynopsisError:
            continue
        if len(values) or not wanted:
            _put(array, np.resize(values, wanted))
        else:
            _put(array, np.zeros(wanted, values.dtype))


_CHANGES = (
    _change_header,
    _change_parameters,
    _change_parameters,
    _change_arrays,
    _change_parts,
    _change_array,
    _change_array,
    *[_change_numbers] * 6,
    *[_change_length] * 2,
)
