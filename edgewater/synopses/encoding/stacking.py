"""Joins the messages of many partials to the message of one stack, which has all their groups in order.

The kind's own `from_message` then reads the stack, and checks every number once for all partials. It cannot see
differences within a partial that cancel out between partials. So this module checks each partial: arrays of a common
length have equal lengths, counts add up to the lengths that they describe, and group numbers are numbers of the
partial's own groups. If the bytes are not output of `codec`, it raises `NotStackable`. The caller then reads the
partials one by one, which also reports errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from edgewater.synopses.base import IntArray
from edgewater.synopses.encoding import codec
from edgewater.synopses.encoding.codec import ArrayRoles
from edgewater.synopses.encoding.layout import KEYS, Field, Layout
from edgewater.wire.synopsis_pb2 import Array as ArrayMessage
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

_ONE = Field("number", ("<i8",), (("one",),))


class NotStackable(Exception):
    """The messages have to be read one by one."""


def stacked(
    messages: Sequence[SynopsisMessage], layout: Layout, roles: ArrayRoles, groups: IntArray
) -> SynopsisMessage:
    """Returns the message of a stack of the groups of all messages.

    Args:
        messages: of one kind, version, parameters and seed, with the arrays of `layout`.
        groups: how many groups each message has, int64, shape (messages,).

    Raises:
        NotStackable: the messages have to be read one by one.
    """
    first = messages[0]
    result = SynopsisMessage(kind=first.kind, version=first.version, parameters=first.parameters, seed=first.seed)
    lengths = {"groups": groups}
    for number, field in enumerate(layout.fields):
        arrays = [message.arrays[number] for message in messages]
        if number in roles.equal:
            require_stackable(all(array == arrays[0] for array in arrays))
            result.arrays.append(arrays[0])
            continue
        joined = _joined_sums(field, arrays, groups) if len(field.shapes) > 1 else _joined(field, arrays, lengths)
        if number in roles.group_numbers:
            places = lengths[str(field.shapes[0][0])]
            require_stackable(bool((joined < np.repeat(groups, places)).all()))
            joined = joined + np.repeat(np.cumsum(groups) - groups, places)
        result.arrays.append(_message(arrays[0].type, joined))
    return result


def keys(arrays: Sequence[ArrayMessage], groups: IntArray) -> pa.Array:
    """Returns one column with the keys of all partials, from the output of `codec.encode_keys` for each partial.

    Raises:
        NotStackable, CorruptSynopsis: the messages have to be read one by one.
    """
    first = arrays[0]
    validity = [array.valid for array in arrays]
    if first.encoding == ArrayMessage.UTF8:
        require_stackable(all(array.encoding == first.encoding for array in arrays))
        require_stackable([tuple(array.shape) for array in arrays] == [(n,) for n in groups.tolist()])
        result = codec.decode_strings(arrays)
    else:
        field = Field("keys", (first.type,), (("groups",),))
        require_stackable(first.type in codec.TYPES)
        numbers = _joined(field, arrays, {"groups": groups}, checked_validity=True)
        result = pa.array(numbers.astype(codec.TYPES[first.type]))
    if not any(validity):
        return result
    require_stackable(all(len(v) in (0, n) for v, n in zip(validity, groups.tolist(), strict=True)))
    valid = b"".join([v or b"\1" * n for v, n in zip(validity, groups.tolist(), strict=True)])
    return codec.with_nulls(result, valid)


def numbers(arrays: Sequence[ArrayMessage]) -> IntArray:
    """Returns the numbers of arrays of one int64 each. Raises NotStackable."""
    one = np.ones(len(arrays), np.int64)
    return _joined(_ONE, arrays, {"one": one}).astype(np.int64)


def require_stackable(condition: bool) -> None:
    """Raises NotStackable if the condition does not hold."""
    if not condition:
        raise NotStackable


def _message(declared: str, values: npt.NDArray[Any]) -> ArrayMessage:
    return ArrayMessage(
        encoding=ArrayMessage.FIXED,
        type=declared,
        stored=values.dtype.str,
        shape=values.shape,
        data=values.tobytes(),
    )


def _require_numbers(field: Field, arrays: Sequence[ArrayMessage], checked_validity: bool = False) -> None:
    """Checks that all arrays contain numbers of one declared type that the field accepts."""
    types = {array.type for array in arrays}
    require_stackable(len(types) == 1 and all(array.encoding in codec.NUMBERS for array in arrays))
    require_stackable(types <= set(field.types) and KEYS not in field.types)
    require_stackable(checked_validity or not any(array.valid for array in arrays))


def _joined(
    field: Field, arrays: Sequence[ArrayMessage], lengths: dict[str, IntArray], *, checked_validity: bool = False
) -> npt.NDArray[Any]:
    """Returns the numbers of all arrays, concatenated along the first axis, in a type that stores them exactly."""
    _require_numbers(field, arrays, checked_validity)
    shapes = [tuple(array.shape) for array in arrays]
    rest = shapes[0][1:]
    require_stackable({shape[1:] for shape in shapes} == {rest} and len(rest) == len(field.shapes[0]) - 1)
    require_stackable(() not in shapes)
    counts = np.array([shape[0] for shape in shapes], np.int64)
    each = int(np.prod(rest, dtype=np.int64))
    require_stackable(bool((counts >= 0).all()) and 0 < each <= codec.MAX_BYTES)
    _agree(lengths, field.shapes[0][0], counts)
    numbers = _numbers(arrays, (counts * each).tolist())
    if field.total or field.used:
        ends = np.cumsum(counts)
        for name, added in ((field.total, numbers), (field.used, numbers != 0)):
            if name:
                sums = np.concatenate([[0], np.cumsum(added, dtype=np.int64)])
                _agree(lengths, name, sums[ends] - sums[ends - counts])
    return numbers.reshape(-1, *rest) if rest else numbers


def _agree(lengths: dict[str, IntArray], name: Any, found: IntArray) -> None:
    """Checks that arrays with a common length have equal lengths in every partial. Adds a length that was not known."""
    if isinstance(name, str):
        require_stackable(np.array_equal(lengths.setdefault(name, found), found))


def _numbers(arrays: Sequence[ArrayMessage], items: Sequence[int]) -> npt.NDArray[Any]:
    """Returns the stored numbers of all arrays, one after the other. NumPy widens them to a common type."""
    declared = arrays[0].type
    require_stackable(all((array.stored, declared) in codec.EXACTLY for array in arrays))
    sizes = [len(array.data) for array in arrays]
    require_stackable(sizes == [n * codec.TYPES[a.stored].itemsize for n, a in zip(items, arrays, strict=True)])
    are_plain = all(array.encoding == ArrayMessage.FIXED for array in arrays)
    found = [(a.stored, a.data) if are_plain else codec.plain(a) for a in arrays]
    stored = {of for of, _ in found}
    if len(stored) == 1:
        joined_bytes = b"".join([data for _, data in found])
        require_stackable(stored != {"|b1"} or not joined_bytes.strip(b"\0\1"))
        return np.frombuffer(joined_bytes, stored.pop())
    require_stackable("|b1" not in stored)  # stored bytes other than 0 and 1 would become numbers
    joined = np.concatenate([np.frombuffer(data, of) for of, data in found])
    if joined.dtype.str not in codec.TYPES or (joined.dtype.str, declared) not in codec.EXACTLY:
        joined = joined.astype(declared) if joined.dtype.kind == codec.TYPES[declared].kind else _reject()
    return joined


def _reject() -> Any:
    raise NotStackable


def _joined_sums(field: Field, arrays: Sequence[ArrayMessage], groups: IntArray) -> npt.NDArray[Any]:
    """Returns expansions of sums, shape (parts, groups); each array has the shape (groups,) or (parts, groups)."""
    _require_numbers(field, arrays)
    shapes = [tuple(array.shape) for array in arrays]
    if all(len(shape) == 1 for shape in shapes):
        return _joined(Field(field.name, field.types, (("groups",),)), arrays, {"groups": groups})
    most = max(shape[0] if len(shape) == 2 else 1 for shape in shapes)
    require_stackable(1 <= most <= 64)
    result = np.zeros((most, int(groups.sum())))
    at = 0
    for array, shape, count in zip(arrays, shapes, groups.tolist(), strict=True):
        parts = shape[0] if len(shape) == 2 else 1
        require_stackable(len(shape) in (1, 2) and parts >= 1 and shape[-1] == count)
        result[:parts, at : at + count] = _numbers([array], [parts * count]).reshape(parts, count)
        at += count
    return result
