"""Layouts: which arrays a message of a kind has, which of them have equal lengths, and the ranges of their numbers.

A kind declares its layout once. It is checked on the message before any array is decoded. So no length, rank or count
of a foreign message decides about an allocation. The check reads the stored numbers only of arrays with a range, and
allocates no more than a copy of one array's bytes at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from edgewater.base.errors import CorruptSynopsis
from edgewater.synopses.encoding import codec
from edgewater.wire.synopsis_pb2 import Array as ArrayMessage

KEYS = "keys"
"""The type of a field that is an array of strings, or of numbers, with or without nulls (`codec.encode_keys`)."""
STRINGS = "utf8"
MAX_RANK = 8  # limit: CPU of a shape
MAX_COUNT = 1 << 62
"""The largest number of values of a group. The sum of two such numbers fits into int64."""
MAX_SHIPPED = 1 << 40
"""The largest number of values of a group in a partial of an edge."""


_KEYS = (KEYS,)
_KEY_TYPES = (STRINGS, "<i8", "<f8", "|b1")
_FLOATS = ("<f8",)
_WIDE = ("<i8", "<u8")  # counts of more than 32 bits
_TYPES = codec.TYPES
_FEW = 16  # measured: bench.synopses
_SHORT = 64  # limit: lengths that cost no bytes
_SIZES = {name: dtype.itemsize for name, dtype in codec.TYPES.items()}
_LIMITS = {
    name: (float(np.iinfo(dtype).min), float(np.iinfo(dtype).max)) if dtype.kind in "iu" else (-math.inf, math.inf)
    for name, dtype in codec.TYPES.items()
}


@dataclass(frozen=True, slots=True)
class AtMost:
    """The length of an axis, from 1 to `most`."""

    most: int

    def __str__(self) -> str:
        return f"1 to {self.most}"


Shape = tuple[str | int | AtMost, ...]
"""Lengths of the axes. A name stands for a length that is equal in all arrays of a message."""


@dataclass(frozen=True, slots=True)
class Field:
    """An array of a layout.

    Attributes:
        types: accepted declared types; `KEYS` stands for all types of keys, `STRINGS` for strings.
        shapes: accepted shapes.
        least, most: bounds of all numbers, both included. NaN is outside.
        total: name of a length. The numbers are counts, from 0, and their sum is this length.
        used: name of a length. The number of counts above 0 is this length.
        counts: whether the numbers count values. `MAX_SHIPPED` limits them in a partial of an edge.
    """

    name: str
    types: tuple[str, ...]
    shapes: tuple[Shape, ...]
    least: float | None = None
    most: float | None = None
    total: str = ""
    used: str = ""
    counts: bool = False


def field(name: str, type_: str = "<i8", *shape: str | int | AtMost, **limits: Any) -> Field:
    """Returns a field of one type and shape; the default shape is one number per group."""
    return Field(name, (type_,), (shape or ("groups",),), **limits)


def count(name: str) -> Field:
    """Returns a field with the number of values of each group."""
    return field(name, least=0, most=MAX_COUNT, counts=True)


def totals(name: str, rows: str, used: str = "") -> Field:
    """Returns a field with the number of rows of each group."""
    return field(name, total=rows, used=used)


@dataclass(frozen=True, slots=True)
class Layout:
    """The arrays of a message, in their order."""

    fields: tuple[Field, ...]

    @classmethod
    def of(cls, *fields: Field) -> Self:
        return cls(fields)

    def strict(self) -> Layout:
        """Returns the layout of messages that an edge ships: numbers of values are from 0 to `MAX_SHIPPED`."""
        fields = (replace(f, least=max(f.least or 0, 0), most=MAX_SHIPPED) if f.counts else f for f in self.fields)
        return Layout(tuple(fields))

    def check(self, kind: str, arrays: Sequence[ArrayMessage], lengths: dict[str, int] | None = None) -> int:
        """Checks arrays, as many as fields, and returns how many bytes they have when decoded.

        Args:
            lengths: known lengths by name; the check adds further lengths.

        Raises:
            CorruptSynopsis: names the array, its properties, and the accepted properties.
        """
        known = {} if lengths is None else lengths
        size = 0
        for field, array in zip(self.fields, arrays, strict=True):
            found = _checked(kind, field, array, known)
            size += found[-1]
            if found[0] == STRINGS and not found[2].translate(None, codec.END).isascii():
                codec.distinct_strings([array.data], [codec.string_facts(array).count])
        return size

    def may_overflow(self, arrays: Sequence[ArrayMessage]) -> bool:
        """Returns whether numbers of values, or sums, are so large that another merge may exceed their bounds."""
        return any(
            (field.counts and array.stored in _WIDE)
            or (field.types == _FLOATS and field.most is not None and array.stored == "<f8" and _is_large(field, array))
            for field, array in zip(self.fields, arrays, strict=True)
        )

    def decode(self, kind: str, arrays: Sequence[ArrayMessage]) -> list[Any]:
        """Returns checked arrays: NumPy arrays, or Arrow arrays of keys or strings. Raises CorruptSynopsis."""
        known: dict[str, int] = {}
        result: list[Any] = []
        for field, array in zip(self.fields, arrays, strict=True):
            type_, shape, data, stored, _ = _checked(kind, field, array, known)
            if type_ == STRINGS or field.types == _KEYS:
                result.append(codec.decode_keys(array))
                continue
            numbers = np.frombuffer(data, _TYPES[stored]).astype(_TYPES[type_])
            result.append(numbers if len(shape) == 1 else numbers.reshape(shape))
        return result


def _is_large(field: Field, array: ArrayMessage) -> bool:
    return field.most is not None and bool(np.abs(np.frombuffer(array.data, "<f8")).max(initial=0) > field.most / 1024)


def layout_for(kind: str, layouts: Iterable[Layout], arrays: Sequence[ArrayMessage]) -> Layout:
    """Returns the layout with as many fields as there are arrays. Raises CorruptSynopsis."""
    sizes = []
    for layout in layouts:
        if len(layout.fields) == len(arrays):
            return layout
        sizes.append(str(len(layout.fields)))
    raise CorruptSynopsis(f"{kind}: {len(arrays)} arrays, expected {' or '.join(sizes)}")


_Checked = tuple[str, tuple[int, ...], bytes, str, int]
"""Declared type, shape, data, stored type, and size of the decoded array in bytes."""


def check_array(kind: str, name: str, array: ArrayMessage) -> _Checked:
    """Checks an array by itself: its types, and that the number of its bytes fits its shape.

    An array without numbers must have a first axis of 0, or short axes, since their lengths cost no bytes.
    """
    shape, data, stored, declared = tuple(array.shape[:]), array.data, array.stored, array.type
    if array.encoding == ArrayMessage.UTF8:
        try:
            return STRINGS, shape, data, stored, codec.string_facts(array).nbytes
        except CorruptSynopsis as exc:
            raise CorruptSynopsis(f"{kind}: array {name}: {exc}") from exc
    if array.encoding not in codec.NUMBERS or (stored, declared) not in codec.EXACTLY:
        codec.require_exact(declared, stored)
        raise CorruptSynopsis(f"{kind}: array {name} has encoding {array.encoding}, which is not known")
    size = _SIZES[stored]
    if (shape[0] if len(shape) == 1 else _items(shape)) * size != len(data):
        raise CorruptSynopsis(f"{kind}: array {name} of shape {shape[:MAX_RANK]} has {len(data)} bytes of {stored}")
    decoded = len(data) // size * _SIZES[declared]
    if array.encoding == ArrayMessage.PLANES:
        stored, data = codec.plain(array)
    if stored == "|b1" and data.strip(b"\0\1"):
        raise CorruptSynopsis(f"{kind}: array {name} of booleans has other bytes than 0 and 1")
    return declared, shape, data, stored, decoded


def _items(shape: tuple[int, ...]) -> int:
    """Returns the number of values; -1 for a shape that is not accepted."""
    items = math.prod(shape)
    empty = max(shape, default=0) <= (codec.MAX_BYTES if shape and shape[0] == 0 else _SHORT)
    return items if len(shape) <= MAX_RANK and (items or empty) else -1


def _checked(kind: str, field: Field, array: ArrayMessage, lengths: dict[str, int]) -> _Checked:
    found = check_array(kind, field.name, array)
    type_, shape, data, stored, size = found
    accepted = _KEY_TYPES if field.types == _KEYS else field.types
    if type_ not in accepted or not _fits_any(field.shapes, shape, lengths):
        wanted = " or ".join(_shown(accepted, lengths) for accepted in field.shapes)
        raise CorruptSynopsis(
            f"{kind}: array {field.name} is {type_}{shape}, expected {' or '.join(field.types)} {wanted}"
        )
    if field.total or field.least is not None or field.most is not None:
        _check_numbers(kind, field, data, stored, lengths)
    valid = array.valid
    if not valid:
        return found
    if field.types != _KEYS or len(valid) != shape[0]:
        raise CorruptSynopsis(f"{kind}: array {field.name} of {shape[0]} values has {len(valid)} of validity")
    return *found[:-1], size + len(valid)


def _fits_any(shapes: tuple[Shape, ...], shape: tuple[int, ...], lengths: dict[str, int]) -> bool:
    first = shapes[0]
    if len(shape) == len(first) == 1 and isinstance(name := first[0], str):  # the usual case
        if lengths.setdefault(name, shape[0]) == shape[0]:
            return True
        shapes = shapes[1:]
    return any(_fits(accepted, shape, lengths) for accepted in shapes)


def _fits(accepted: Shape, shape: tuple[int, ...], lengths: dict[str, int]) -> bool:
    """Returns whether a shape is accepted; adds the lengths that were not known."""
    if len(accepted) != len(shape):
        return False
    found: dict[str, int] = {}
    for wanted, length in zip(accepted, shape, strict=True):
        if isinstance(wanted, AtMost):
            if not 1 <= length <= wanted.most:
                return False
            continue
        expected = wanted if isinstance(wanted, int) else lengths.get(wanted, found.setdefault(wanted, length))
        if expected != length:
            return False
    lengths.update({name: length for name, length in found.items() if name not in lengths})
    return True


def _shown(accepted: Shape, lengths: Mapping[str, int]) -> str:
    named = (f"{name}={lengths[name]}" if isinstance(name, str) and name in lengths else str(name) for name in accepted)
    return f"({', '.join(named)})"


def _check_numbers(kind: str, field: Field, data: bytes, stored: str, lengths: dict[str, int]) -> None:
    """Checks stored numbers. Their values are equal to the values of the declared type."""
    least, most = (0, codec.MAX_BYTES) if field.total else (field.least, field.most)
    lowest, highest = _LIMITS[stored]
    low, high = least is not None and lowest < least, most is not None and highest > most
    if not (low or high or field.total):
        return
    numbers = np.frombuffer(data, _TYPES[stored])
    if len(numbers) <= _FEW:
        # For few numbers, Python is faster than a reduction of NumPy.
        few = numbers.tolist()
        ends, total, used = (min(few), max(few)) if few else (0, 0), sum(few), len(few) - few.count(0)
        inside = all((least is None or n >= least) and (most is None or n <= most) for n in few)
    else:
        ends = (numbers.min() if low else least), (numbers.max() if high else most)
        # false for NaN
        inside = (least is None or ends[0] >= least) and (most is None or ends[1] <= most)
        total = int(numbers.sum(dtype=np.int64)) if inside and field.total else 0
        used = int(np.count_nonzero(numbers)) if field.used else 0
    if not inside:
        raise CorruptSynopsis(
            f"{kind}: array {field.name} has numbers from {ends[0]} to {ends[1]}, expected from {least} to {most}"
        )
    if field.total:
        _require_length(kind, field, field.total, total, lengths)
    if field.used:
        _require_length(kind, field, field.used, used, lengths)


def _require_length(kind: str, field: Field, name: str, found: int, lengths: dict[str, int]) -> None:
    if lengths.setdefault(name, found) != found:
        raise CorruptSynopsis(f"{kind}: array {field.name} adds up to {found} {name}, expected {lengths[name]}")
