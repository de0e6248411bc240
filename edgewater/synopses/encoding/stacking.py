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

from edgewater.synopses.base import IntArray, run_indices
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
        require_stackable({array.encoding for array in arrays} == {first.encoding})
        require_stackable([array.shape[:] for array in arrays] == [[n] for n in groups.tolist()])
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
        encoding=ArrayMessage.FIXED, type=declared, stored=values.dtype.str, shape=values.shape, data=values.tobytes()
    )


class _Arrays:
    """The same array of all partials, by attribute. Each attribute of a message is read once, because reading is slow.

    Attributes:
        shapes: as lists, because a slice of a repeated field is read faster than its items.
    """

    def __init__(self, arrays: Sequence[ArrayMessage]) -> None:
        self.encodings = [array.encoding for array in arrays]
        self.types = [array.type for array in arrays]
        self.stored = [array.stored for array in arrays]
        self.exponents = [array.exponent for array in arrays]
        self.shapes = [array.shape[:] for array in arrays]
        self.data = [array.data for array in arrays]
        self.has_nulls = {array.valid for array in arrays} != {b""}

    def require_numbers(self, field: Field, checked_validity: bool = False) -> None:
        """Checks that all arrays contain numbers of one declared type that the field accepts."""
        types = set(self.types)
        require_stackable(len(types) == 1 and set(self.encodings) <= set(codec.NUMBERS))
        require_stackable(types <= set(field.types) and KEYS not in field.types)
        require_stackable(checked_validity or not self.has_nulls)

    def numbers(self, items: IntArray) -> npt.NDArray[Any]:
        """Returns the numbers of all arrays, one after the other. NumPy widens them to a common type.

        Args:
            items: int64, how many numbers each array has.
        """
        declared = self.types[0]
        kinds: dict[tuple[str, int, int], int] = {}
        each = zip(self.stored, self.encodings, self.exponents, strict=True)
        which = np.array([kinds.setdefault(kind, len(kinds)) for kind in each])
        require_stackable(all((stored, declared) in codec.EXACTLY for stored, _, _ in kinds))
        widths = np.array([codec.TYPES[stored].itemsize for stored, _, _ in kinds])
        require_stackable(np.array_equal(np.array(list(map(len, self.data))), items * widths[which]))
        if len(kinds) == 1:
            return _plain(*next(iter(kinds)), declared, b"".join(self.data), items)
        parts = []
        for kind, number in kinds.items():
            (chosen,) = np.nonzero(which == number)
            data = b"".join([self.data[i] for i in chosen.tolist()])
            parts.append((chosen, _plain(*kind, declared, data, items[chosen])))
        require_stackable(not any(of.dtype.kind == "b" for _, of in parts))  # other bytes would become numbers
        common = np.result_type(*(values.dtype for _, values in parts))
        if common.str not in codec.TYPES or (common.str, declared) not in codec.EXACTLY:
            require_stackable(common.kind == codec.TYPES[declared].kind)
            common = codec.TYPES[declared]
        joined, starts = np.empty(int(items.sum()), common), np.cumsum(items) - items
        for chosen, values in parts:
            joined[run_indices(starts[chosen], items[chosen])] = values
        return joined


def _plain(stored: str, encoding: int, exponent: int, declared: str, data: bytes, items: IntArray) -> npt.NDArray[Any]:
    """Returns the numbers of some arrays of one encoding, one after the other, from their concatenated bytes."""
    width = codec.TYPES[stored].itemsize
    if encoding == ArrayMessage.PLANES and width > 1:
        # Byte j of number k of an array of n numbers is at j * n + k, from the start of the array on.
        starts = np.repeat((np.cumsum(items) - items) * (width - 1), items) + np.arange(int(items.sum()))
        places = starts[:, None] + np.repeat(items, items)[:, None] * np.arange(width)
        data = np.frombuffer(data, np.uint8)[places].tobytes()
    require_stackable(stored != "|b1" or not data.strip(b"\0\1"))
    if encoding == ArrayMessage.PLANES and exponent:
        stored, data = codec.scaled(stored, declared, data, exponent)
    return np.frombuffer(data, stored)


def _joined(
    field: Field, messages: Sequence[ArrayMessage], lengths: dict[str, IntArray], *, checked_validity: bool = False
) -> npt.NDArray[Any]:
    """Returns the numbers of all arrays, concatenated along the first axis, in a type that stores them exactly."""
    arrays = _Arrays(messages)
    arrays.require_numbers(field, checked_validity)
    rest = arrays.shapes[0][1:]
    require_stackable([shape[1:] for shape in arrays.shapes] == [rest] * len(messages))
    require_stackable(len(rest) == len(field.shapes[0]) - 1)
    require_stackable(all(arrays.shapes))
    counts = np.array([shape[0] for shape in arrays.shapes], np.int64)
    each = int(np.prod(rest, dtype=np.int64))
    require_stackable(bool((counts >= 0).all()) and 0 < each <= codec.MAX_BYTES)
    _agree(lengths, field.shapes[0][0], counts)
    numbers = arrays.numbers(counts * each)
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


def _joined_sums(field: Field, messages: Sequence[ArrayMessage], groups: IntArray) -> npt.NDArray[Any]:
    """Returns expansions of sums, shape (parts, groups); each array has the shape (groups,) or (parts, groups)."""
    arrays = _Arrays(messages)
    arrays.require_numbers(field)
    axes = {len(shape) for shape in arrays.shapes}
    require_stackable(axes <= {1, 2})
    parts = np.array([shape[0] if len(shape) == 2 else 1 for shape in arrays.shapes], np.int64)
    require_stackable(bool((parts >= 1).all()) and parts.max() <= 64)
    require_stackable(np.array_equal(np.array([shape[-1] for shape in arrays.shapes]), groups))
    numbers = arrays.numbers(parts * groups)
    if axes == {1}:
        return numbers
    result = np.zeros((int(parts.max()), int(groups.sum())))
    # Of each array, part p begins p * groups numbers after its start.
    starts, columns = np.cumsum(parts * groups) - parts * groups, np.cumsum(groups) - groups
    for part in range(len(result)):
        (has,) = np.nonzero(parts > part)
        place = run_indices(columns[has], groups[has])
        result[part, place] = numbers[run_indices(starts[has] + part * groups[has], groups[has])]
    return result
