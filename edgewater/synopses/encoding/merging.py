"""Merging many serialised synopses of one kind, as a center does: bytes in, bytes of the union out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from edgewater.errors import IncompatibleSynopses, SynopsisError
from edgewater.synopses.encoding import codec, columns, flat
from edgewater.synopses.encoding.columns import Many, Parsed
from edgewater.synopses.grouped import GroupedAggregate, named
from edgewater.synopses.single import SingleSynopsis, shipped
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

_FEW = 4  # parts of one layout, below which it does not pay to find that out
_STEP_BYTES = 1 << 22  # of what is in memory while many are read together
_MANY = 24  # parts from which it pays to read them all at once
_BLOCK_BYTES = 1 << 20  # of parts that are looked at together: they stay in the cache

TypeOf = Callable[[str], Any]
"""Kind -> class of the synopsis. Raises UnsupportedVersion."""


class Uniting(Protocol):
    """A stack whose bytes of many groups are those of single ones, array after array."""

    def unite(self, many: Many) -> None:
        """Merges messages of one group each, of equal parameters and seeds, into this stack, which has one group too:
        to the state that `merge_ones` gives. Raises SynopsisError.

        Args:
            many: these messages.
        """


class Flat(Protocol):
    """A stack of one group whose dense form merges as plain arrays.

    Attributes:
        free_arrays: places, in the message, of the arrays that differ between dense stacks of equal parameters.
    """

    free_arrays: tuple[int, ...]

    def absorb(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Merges many dense stacks of one group, given by their free arrays: shapes (parts, …), in the types that they
        are stored in. Raises ValueError, with nothing changed, unless these can be states of this stack."""


def merged(parts: Sequence[bytes], type_of: TypeOf) -> bytes:
    """See `edgewater.synopses.merge_bytes`."""
    if not parts:
        raise ValueError("nothing to merge: a merge needs at least one part")

    def make(message: SynopsisMessage) -> Any:
        return type_of(message.kind).from_message(message)

    message = named(0, len(parts), codec.unseal, parts[0])
    first = named(0, len(parts), make, message)
    if len(parts) == 1:
        return parts[0]
    if isinstance(first, GroupedAggregate):
        return GroupedAggregate.merge_bytes(parts)
    used = np.zeros(len(parts), bool)
    if isinstance(first, SingleSynopsis) and hasattr(first._stack, "absorb"):
        used = _absorbed(first, parts, type_of)
    rest = np.flatnonzero(~used)[1:].tolist()
    if len(rest) >= _FEW and isinstance(first, SingleSynopsis):
        united = _united(first, [parts[number] for number in rest])
        if united is not None:
            return bytes(united.to_bytes())
    messages = [named(number, len(parts), codec.unseal, parts[number]) for number in rest]
    others = [named(number, len(parts), make, message) for number, message in zip(rest, messages, strict=True)]
    whole: bytes = (_merged(first, others, rest, len(parts)) if others else first).to_bytes()
    return whole


def _united(first: SingleSynopsis[Any], parts: list[bytes]) -> Any:
    """`first` and all of these as one, read as a stack of many groups; None, if they are not alike enough for that."""
    if getattr(first._stack, "unite", None) is None:
        return None
    # The bytes of a step and, of what has a fixed size, sparse as it may be in bytes, the memory stay in the cache.
    fixed = first._stack.nbytes if hasattr(first._stack, "absorb") else len(parts[0])
    multiple = getattr(first._stack, "unite_parts", 2 * _FEW)
    step = -(-_STEP_BYTES // (fixed * multiple)) * multiple
    head = shipped(first._stack).to_message()
    whole = first.merge_many([])
    try:
        for at in range(0, len(parts), step):
            many, more = _read(head, parts[at : at + step])
            whole._stack.unite(many)
            whole.records += more
    except SynopsisError:
        return None  # what is wrong, and with which part, comes out when they are read one by one
    return whole


def _read(head: SynopsisMessage, parts: list[bytes]) -> tuple[Many, int]:
    """Parts like the one whose message that is, and their records. Raises SynopsisError."""
    if len(parts) >= _MANY:
        read = columns.read(head, parts)
        if read is not None:
            return read, read.records
    messages = [codec.unseal(part) for part in parts]
    if any(_head_of(message) != _head_of(head) for message in messages):
        raise IncompatibleSynopses(f"{head.kind}: not all alike")
    return Parsed(messages), sum(message.records for message in messages)


def _head_of(message: SynopsisMessage) -> tuple[Any, ...]:
    return message.kind, message.version, message.parameters, message.seed, len(message.arrays)


def _merged(first: Any, others: list[Any], numbers: list[int], of: int) -> Any:
    try:
        return first.merge_many(others)
    except IncompatibleSynopses as exc:
        _blame(exc, first, others, numbers, of)


def _blame(exc: IncompatibleSynopses, first: Any, others: list[Any], numbers: list[int], of: int) -> NoReturn:
    """Raises for the first part that does not go with the first of all, or for all together."""
    for number, other in zip(numbers, others, strict=True):
        named(number, of, first.merge_many, [other])
    raise exc


def _absorbed(first: SingleSynopsis[Any], parts: Sequence[bytes], type_of: TypeOf) -> npt.NDArray[np.bool_]:
    """Merges into `first`, the first part, those that are of its kind and dense; which these are. The first never is.

    Parts of one length are one layout, most often: counters of one type.
    """
    used = np.zeros(len(parts), bool)
    by_length: dict[int, list[int]] = defaultdict(list)
    for number in range(1, len(parts)):
        by_length[len(parts[number])].append(number)
    for length, numbers in by_length.items():
        model = parts[numbers[0]]
        layout = _layout_of(first, model, type_of) if len(numbers) >= _FEW else None
        if layout is None:
            continue
        step = max(_BLOCK_BYTES // length, _FEW)
        for at in range(0, len(numbers), step):
            block = numbers[at : at + step]
            used[block] = _absorbed_block(first, [parts[i] for i in block], layout, model)
    return used


def _layout_of(first: SingleSynopsis[Any], part: bytes, type_of: TypeOf) -> flat.Layout | None:
    """The layout of a part that is dense and can be merged into `first`."""
    try:
        message = codec.unseal(part)
        model = type_of(message.kind).from_message(message)
        if model.kind != first.kind or model._stack.level != first._stack.level:
            return None
        first._stack.take(_NO_GROUPS).merge(model._stack.take(_NO_GROUPS), _NO_GROUPS)
    except SynopsisError:
        return None  # what is wrong, and with which part, comes out when they are read one by one
    dense = message.arrays[first._stack.free_arrays[-1]].shape[0] == 1
    return flat.Layout.of(part, message, first._stack.free_arrays) if dense else None


def _absorbed_block(
    first: SingleSynopsis[Any], parts: list[bytes], layout: flat.Layout, model: bytes
) -> npt.NDArray[np.bool_]:
    """Which of these parts, all as long as `model`, were merged into `first`: those that are sound and alike."""
    rows = np.frombuffer(b"".join(parts), np.uint8).reshape(len(parts), layout.length)
    free = first._stack.free_arrays
    alike = flat.checksums_hold(parts, rows) & layout.alike(rows, np.frombuffer(model, np.uint8))
    chosen = rows if alike.all() else rows[alike]
    try:
        first._stack.absorb([layout.array(chosen, number) for number in free])
    except ValueError:
        return np.zeros(len(parts), bool)
    first.records += layout.total_records(chosen)
    return alike


_NO_GROUPS = np.zeros(0, np.int64)
