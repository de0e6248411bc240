"""`GroupedAggregate`: keys of groups, and a stack of states per measure. It is the content of a query's partial.

A query without ``group_by`` has no key columns and at most one group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import pyarrow as pa

from edgewater.errors import CorruptSynopsis, IncompatibleSynopses, SynopsisError
from edgewater.streams import COLUMN_TYPES, type_name
from edgewater.synopses.base import Estimates, IntArray, Properties, Question, Stack
from edgewater.synopses.checks import MAX_DENSE_BYTES
from edgewater.synopses.encoding import codec
from edgewater.synopses.encoding.layout import KEYS, Field, Layout
from edgewater.synopses.key_table import KeyTable
from edgewater.synopses.quantiles.kll import KllStack
from edgewater.synopses.registry import MAX_STATE_BYTES, kind_named, stack_from_message
from edgewater.synopses.sampling.sample_stack import SampleStack
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

T = TypeVar("T")
R = TypeVar("R")
_NO_GROUPS = np.zeros(0, np.int64)
_GROUPS = Field("number of groups", ("<i8",), ((1,),), total="groups")
_MERGE_PARAMETERS = ("parameters", "seed", "item_type")
_MERGE_BYTES = 256 << 20
"""Memory of partials that are merged at a time."""


class GroupedAggregate:
    """Aggregates of named measures per group.

    Args:
        keys: name -> Arrow type of each key column, in order.
        measures: name -> empty stack, in order.
    """

    kind: ClassVar[str] = "grouped_aggregate"
    version: ClassVar[int] = 1

    def __init__(self, keys: Mapping[str, pa.DataType], measures: Mapping[str, Stack]) -> None:
        self._key_names = tuple(keys)
        self._table = KeyTable(tuple(keys.values()))
        self._measures = dict(measures)
        self.records = 0

    def __len__(self) -> int:
        """The number of groups."""
        return len(self._table)

    @property
    def key_names(self) -> tuple[str, ...]:
        return self._key_names

    @property
    def measures(self) -> Mapping[str, Stack]:
        return self._measures

    @property
    def properties(self) -> Properties:
        """The properties that all measures have together."""
        each = [m.properties for m in self._measures.values()]
        return Properties(
            **{
                name: (any if name == "ordered" else all)(getattr(p, name) for p in each)
                for name in Properties.__dataclass_fields__
            }
        )

    @property
    def nbytes(self) -> int:
        return self._table.nbytes + sum(m.nbytes for m in self._measures.values())

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters that must be equal for a merge, apart from the measures' own."""
        keys = [[n, type_name(t)] for n, t in zip(self._key_names, self._table.types, strict=True)]
        return {"keys": keys, "measures": list(self._measures)}

    def encode(self, keys: Sequence[pa.Array], rows: int) -> IntArray:
        """Returns the group codes (int64, one per row) of rows of keys; new keys become new groups."""
        codes = self._table.encode(list(keys), rows)
        for stack in self._measures.values():
            stack.grow(len(self._table))
        return codes

    def update(
        self,
        keys: Sequence[pa.Array],
        values: Mapping[str, pa.Array | None],
        rows: int,
        *,
        times: IntArray | None = None,
        ids: IntArray | None = None,
    ) -> IntArray:
        """Adds a batch of `rows` records.

        Args:
            keys: one Arrow array per key column.
            values: measure -> its argument per record, or None for a measure without an argument. A null argument
                does not change the measure of the record's group.
            times: int64 event times in ms, one per record, for ordered measures.
            ids: int64, the records' numbers within this aggregate's source (`set_source`), for samples.
                None: samples number records in the order of arrival.

        Returns:
            The records' group codes, int64, shape (rows,).
        """
        codes = self.encode(keys, rows)
        for name, stack in self._measures.items():
            _update(stack, codes, values[name], times, ids)
        self.records += rows
        return codes

    @property
    def samples(self) -> bool:
        """Whether any measure is a sample, which needs `ids`."""
        return any(isinstance(stack, SampleStack) for stack in self._measures.values())

    def set_source(self, source: int) -> None:
        """Sets the identity of the source that numbers the records, from 0 to 2^64 - 1. Aggregates that merge must have
        different sources, unless they assign equal numbers to equal records. Call it while the aggregate is empty."""
        for stack in self._measures.values():
            if isinstance(stack, SampleStack | KllStack):
                stack.source = source

    def merge(self, other: Self) -> IntArray:
        """Merges `other` into this aggregate and returns the codes of its groups in this one; see `merge_all`."""
        return self.merge_all([other])

    def merge_all(self, others: Sequence[Self]) -> IntArray:
        """Merges others into this aggregate and returns the codes of their groups in this one, concatenated.

        Looks up all keys together, so that many partials cost little more than one.

        Raises:
            IncompatibleSynopses: other keys, measures or parameters of measures.
        """
        if not others:
            return np.zeros(0, np.int64)
        for other in others:
            self._require_mergeable(other)
        codes = self._codes_of(others)
        at = 0
        for other in others:
            mine = codes[at : at + len(other)]
            at += len(other)
            for name, stack in self._measures.items():
                stack.merge(other._measures[name], mine)
            self.records += other.records
        for stack in self._measures.values():
            compact = getattr(stack, "compact", None)
            if compact is not None:
                compact()
        return codes

    def _codes_of(self, others: Sequence[Self]) -> IntArray:
        """Returns the codes of all their groups in this one. Neighbours with equal keys share a look-up."""
        runs: list[tuple[list[pa.Array], int]] = []
        which = []
        for other in others:
            columns = other.rows()
            if not runs or runs[-1][1] != len(other) or not all(map(pa.Array.equals, runs[-1][0], columns)):
                runs.append((columns, len(other)))
            which.append(len(runs) - 1)
        keys = [pa.concat_arrays([columns[i] for columns, _ in runs]) for i in range(len(self._key_names))]
        found = self.encode(keys, sum(groups for _, groups in runs))
        codes = np.split(found, np.cumsum([groups for _, groups in runs])[:-1])
        return np.concatenate([codes[run] for run in which])

    def _require_mergeable(self, other: Self) -> None:
        codec.require_equal(self.kind, self.parameters, other.parameters)
        for name, stack in self._measures.items():
            theirs = other._measures[name]
            if theirs.kind != stack.kind:
                raise IncompatibleSynopses(f"measure {name}: {stack.kind} and {theirs.kind} do not merge")
            if not _may_merge(stack, theirs):
                # Before anything changes: a merge of stacks without groups raises the error, if there is one.
                stack.take(_NO_GROUPS).merge(theirs.take(_NO_GROUPS), _NO_GROUPS)

    def merge_many(self, others: Sequence[Self]) -> Self:
        """Returns the union of this aggregate and all others as a new one."""
        result = self.take(np.arange(len(self)))
        result.records = self.records
        result.merge_all(others)
        return result

    def rows(self, groups: IntArray | None = None) -> list[pa.Array]:
        """Returns the key columns of these groups; None: of all."""
        return self._table.rows(groups)

    def take(self, groups: IntArray) -> Self:
        """Returns a copy of these groups, in this order, in the form in which it is shipped. Its `records` are 0; the
        caller sets them if they are known."""
        keys = dict(zip(self._key_names, self._table.types, strict=True))
        result = type(self)(keys, {name: stack.take(groups) for name, stack in self._measures.items()})
        result._table.encode(self.rows(groups), len(groups))
        return result

    def reset(self, groups: IntArray) -> None:
        """Empties the states of these groups; their codes stay."""
        for stack in self._measures.values():
            stack.reset(groups)

    def query(self, measure: str, question: Question | None = None) -> Estimates:
        """Returns the estimate per group, in the order of `rows`."""
        return self._measures[measure].query(question)

    def to_message(self) -> SynopsisMessage:
        """Returns the whole state: an aggregate that is read from it behaves as this one. To ship groups, `take` them,
        which compacts buffered values."""
        message = codec.header(self.kind, self.version, self.parameters, records=self.records)
        message.arrays.extend(codec.encode_keys(column) for column in self.rows())
        message.arrays.append(codec.encode(np.array([len(self)], np.int64)))
        message.parts.extend(stack.to_message() for stack in self._measures.values())
        return message

    def to_bytes(self) -> bytes:
        return codec.seal(self.to_message())

    @classmethod
    def from_message(cls, message: SynopsisMessage) -> Self:
        """Raises CorruptSynopsis or UnsupportedVersion."""
        parameters = codec.open_message(message, cls.kind, cls.version, len(message.arrays), len(message.parts))
        try:
            keys = {str(name): COLUMN_TYPES[t] for name, t in parameters["keys"]}
            names = [str(n) for n in parameters["measures"]]
        except (KeyError, TypeError, ValueError) as exc:
            raise CorruptSynopsis(f"{cls.kind}: parameters {message.parameters!r} lack keys or measures") from exc
        if len(set(names)) != len(message.parts) or len(keys) + 1 != len(message.arrays):
            raise CorruptSynopsis(f"{cls.kind}: {len(message.parts)} states for the measures {names}")
        # First the number of groups, which is last: all keys have as many.
        layout = _layout(tuple(keys))
        (count, *columns) = layout.decode(cls.kind, [message.arrays[-1], *message.arrays[:-1]])
        for (name, key_type), column in zip(keys.items(), columns, strict=True):
            if column.type != key_type:
                raise CorruptSynopsis(f"{cls.kind}: a column of {column.type} where the key {name} is {key_type}")
        groups = int(count[0])
        _check_state_bytes(groups, message.parts)
        stacks = {name: stack_from_message(part) for name, part in zip(names, message.parts, strict=True)}
        result = cls(keys, stacks)
        if any(len(c) != groups for c in columns) or any(len(s) != groups for s in stacks.values()):
            raise CorruptSynopsis(f"{cls.kind}: columns of unequal length for {groups} groups")
        table = KeyTable.of_distinct(tuple(keys.values()), columns, groups)
        if table is None:
            raise CorruptSynopsis(f"{cls.kind}: two groups have the same key")
        result._table = table
        result.records = message.records
        return result

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        return cls.from_message(codec.unseal(data))

    @classmethod
    def merge_bytes(cls, partials: Sequence[bytes]) -> bytes:
        """Returns the union of at least one partial; checks a single one and returns it unchanged.

        Raises the errors of `from_bytes` and `merge_all`, with the number of the partial.
        """
        if not partials:
            raise ValueError("a merge needs at least one partial")
        of = len(partials)
        first = numbered(0, of, cls.from_bytes, partials[0])
        if of == 1:
            return partials[0]
        others: list[GroupedAggregate] = []
        held = 0
        for number, partial in enumerate(partials[1:], 1):
            other = numbered(number, of, cls.from_bytes, partial)
            numbered(number, of, first._require_mergeable, other)
            others.append(other)
            held += other.nbytes
            if held > _MERGE_BYTES:
                first.merge_all(others)
                others, held = [], 0
        first.merge_all(others)
        message = first.to_message()
        for stack, part in zip(first._measures.values(), message.parts, strict=True):
            require_readable(stack, part)
        return codec.seal(message)


def numbered(number: int, of: int, read: Callable[[T], R], partial: T) -> R:
    """Returns `read(partial)`; adds the partial's number to the message of a SynopsisError."""
    try:
        return read(partial)
    except SynopsisError as exc:
        raise type(exc)(f"partial {number + 1} of {of}: {exc}") from exc


@lru_cache(maxsize=256)
def _layout(keys: tuple[str, ...]) -> Layout:
    return Layout.of(_GROUPS, *(Field(f"key {name}", (KEYS,), (("groups",),)) for name in keys))


def require_readable(stack: Any, message: SynopsisMessage) -> None:
    """Checks that the message of a merged stack can be read again, if its numbers are so large that this is not
    certain. Raises IncompatibleSynopses."""
    for layout in getattr(stack, "layouts", ()):
        if len(layout.fields) == len(message.arrays) and layout.may_overflow(message.arrays):
            try:
                type(stack).from_message(message)
            except SynopsisError as exc:
                raise IncompatibleSynopses(f"the sum is out of range: {exc}") from exc


def _check_state_bytes(groups: int, parts: Sequence[SynopsisMessage]) -> None:
    """Checks that states of fixed size fit into memory, before they are decoded. Raises CorruptSynopsis."""
    total = 0
    for part in parts:
        state_bytes = getattr(kind_named(part.kind), "state_bytes", None)
        if state_bytes is not None:
            try:
                size = state_bytes(codec.parameters(part.kind, part.parameters))
            except (KeyError, TypeError, ValueError, OverflowError) as exc:
                raise CorruptSynopsis(f"{part.kind}: parameters {part.parameters[:100]!r}") from exc
            if size > MAX_STATE_BYTES:
                raise CorruptSynopsis(f"{part.kind}: {size} bytes per group; expected at most {MAX_STATE_BYTES}")
            total += size * groups
    if total > MAX_DENSE_BYTES:
        raise CorruptSynopsis(
            f"{GroupedAggregate.kind}: {total} bytes in {groups} groups; expected at most {MAX_DENSE_BYTES}"
        )


def _may_merge(stack: Stack, other: Stack) -> bool:
    """Returns whether two stacks of one kind merge for certain, since what built-in kinds require is equal; what a
    third-party kind requires is not known."""
    if not type(stack).__module__.startswith("edgewater."):
        return False
    return all(getattr(stack, name, None) == getattr(other, name, None) for name in _MERGE_PARAMETERS)


def _update(
    stack: Stack, codes: IntArray, values: pa.Array | None, times: IntArray | None, ids: IntArray | None
) -> None:
    if values is not None and values.null_count:
        present = values.is_valid()
        mask = present.to_numpy(zero_copy_only=False)
        codes, values = codes[mask], values.filter(present)
        times, ids = (None if column is None else column[mask] for column in (times, ids))
    if values is not None and pa.types.is_fixed_size_list(values.type):
        values = values.flatten().to_numpy().reshape(-1, values.type.list_size)
    elif values is not None and not pa.types.is_string(values.type):
        values = values.to_numpy(zero_copy_only=False)
    if isinstance(stack, SampleStack):
        stack.update(codes, values, times=times, ids=ids)
    else:
        stack.update(codes, values, times=times)
