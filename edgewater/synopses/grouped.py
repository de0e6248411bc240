"""`GroupedAggregate`: keys of groups, and a stack of states per measure. It is the content of a query's partial.

A query without ``group_by`` has no key columns and at most one group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import pyarrow as pa

from edgewater.base.errors import CorruptSynopsis, IncompatibleSynopses, SynopsisError
from edgewater.base.streams import COLUMN_TYPES, type_name
from edgewater.synopses.base import Estimates, IntArray, Properties, Question, Stack, run_indices
from edgewater.synopses.checks import MAX_DENSE_BYTES
from edgewater.synopses.encoding import codec, stacking
from edgewater.synopses.encoding.layout import KEYS, Field, Layout, layout_for
from edgewater.synopses.encoding.stacking import require_stackable
from edgewater.synopses.key_table import EncodedKeys, KeyTable
from edgewater.synopses.quantiles.kll import KllStack
from edgewater.synopses.registry import MAX_STATE_BYTES, kind_named, stack_from_message
from edgewater.synopses.sampling.sample_stack import SampleStack
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

T = TypeVar("T")
R = TypeVar("R")
_MIN_STACKED = 4
"""The least number of partials for which it is faster to read them as one stack."""
_STACKED_BYTES = 1 << 22  # measured: bench.merging
"""The bytes of partials that are read as one stack. The arrays of this stack then stay in the cache."""
_NO_GROUPS = np.zeros(0, np.int64)
_GROUPS = Field("number of groups", ("<i8",), ((1,),), total="groups")
_MERGE_PARAMETERS = ("parameters", "seed", "item_type")
_MERGE_BYTES = 256 << 20  # limit: memory of a merge
"""Memory of partials that are merged at a time."""


class GroupedAggregate:
    """Aggregates of named measures per group.

    Args:
        keys: name -> Arrow type of each key column, in order.
        measures: name -> empty stack, in order.

    >>> import pyarrow as pa
    >>> from edgewater.synopses import CountStack
    >>> hits = GroupedAggregate({"country": pa.string()}, {"hits": CountStack()})
    >>> hits.update([pa.array(["de", "fr", "de"])], {"hits": None}, rows=3).tolist()  # the group of each record
    [0, 1, 0]
    >>> hits.query("hits").value.tolist()
    [2.0, 1.0]
    """

    kind: ClassVar[str] = "grouped_aggregate"
    version: ClassVar[int] = 1

    def __init__(self, keys: Mapping[str, pa.DataType], measures: Mapping[str, Stack]) -> None:
        self._key_names = tuple(keys)
        self.table = KeyTable(tuple(keys.values()))
        self._measures = dict(measures)
        self.records = 0

    def __len__(self) -> int:
        """The number of groups."""
        return len(self.table)

    @property
    def key_names(self) -> tuple[str, ...]:
        return self._key_names

    @property
    def measures(self) -> Mapping[str, Stack]:
        return self._measures

    @property
    def properties(self) -> Properties:
        """The properties that hold for all measures."""
        each = [m.properties for m in self._measures.values()]
        return Properties(
            **{
                name: (any if name == "ordered" else all)(getattr(p, name) for p in each)
                for name in Properties.__dataclass_fields__
            }
        )

    @property
    def nbytes(self) -> int:
        return self.table.nbytes + sum(m.nbytes for m in self._measures.values())

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters that must be equal for a merge, without the parameters of the measures."""
        keys = [[n, type_name(t)] for n, t in zip(self._key_names, self.table.types, strict=True)]
        return {"keys": keys, "measures": list(self._measures)}

    def encode(self, keys: Sequence[pa.Array], rows: int) -> IntArray:
        """Returns the group codes (int64, one per row) of rows of keys; new keys become new groups."""
        encoded = EncodedKeys.of(keys, rows)
        return self.look_up(encoded)[encoded.inverse]

    def look_up(self, keys: EncodedKeys) -> IntArray:
        """Returns the group code (int64) of each distinct key; new keys become new groups."""
        codes = self.table.look_up(keys)
        for stack in self._measures.values():
            stack.grow(len(self.table))
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
        self.update_groups(codes, values, times=times, ids=ids)
        return codes

    def update_groups(
        self,
        codes: IntArray,
        values: Mapping[str, pa.Array | None],
        *,
        times: IntArray | None = None,
        ids: IntArray | None = None,
    ) -> None:
        """Adds a batch of records whose groups have been looked up.

        Args:
            codes: the records' group codes, int64, shape (rows,), from `encode` or `look_up`.
            values, times, ids: as in `update`.
        """
        for name, stack in self._measures.items():
            _update(stack, codes, values[name], times, ids)
        self.records += len(codes)

    @property
    def samples(self) -> bool:
        """Whether any measure is a sample, which needs `ids`."""
        return any(isinstance(stack, SampleStack) for stack in self._measures.values())

    def set_source(self, source: int) -> None:
        """Sets the identity of the source that numbers the records, from 0 to 2^64 - 1.

        Call it while the aggregate is empty.

        Aggregates that merge must have different sources, unless they assign equal numbers to equal records.
        """
        for stack in self._measures.values():
            if isinstance(stack, SampleStack | KllStack):
                stack.source = source

    def merge(self, other: Self) -> IntArray:
        """Merges `other` into this aggregate and returns its groups' codes in this aggregate; see `merge_all`."""
        return self.merge_all([other])

    def merge_all(self, others: Sequence[Self]) -> IntArray:
        """Merges others into this aggregate and returns their groups' codes in this aggregate, concatenated.

        Looks up all keys together, so that many partials cost little more than one.

        Raises:
            IncompatibleSynopses: keys, measures or parameters of measures differ.
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
        self._compact()
        return codes

    def _codes_of(self, others: Sequence[Self]) -> IntArray:
        """Returns the codes of all groups of `others` in this aggregate. Neighbours with equal keys share a look-up."""
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
                # Checked before anything changes: a merge of stacks without groups raises the same error.
                stack.take(_NO_GROUPS).merge(theirs.take(_NO_GROUPS), _NO_GROUPS)

    def merge_many(self, others: Sequence[Self]) -> Self:
        """Returns the union of this aggregate and all others as a new aggregate."""
        result = self.take(np.arange(len(self)))
        result.records = self.records
        result.merge_all(others)
        return result

    def rows(self, groups: IntArray | None = None) -> list[pa.Array]:
        """Returns the key columns of these groups; None: of all groups."""
        return self.table.rows(groups)

    def take(self, groups: IntArray) -> Self:
        """Returns a copy of these groups, in this order, in the form that is shipped.

        The caller sets `records`, which are 0 in the copy, if they are known.
        """
        keys = dict(zip(self._key_names, self.table.types, strict=True))
        result = type(self)(keys, {name: stack.take(groups) for name, stack in self._measures.items()})
        table = KeyTable.of_distinct(self.table.types, self.rows(groups), len(groups), checked=True)
        assert table is not None, "groups are distinct"
        result.table = table
        return result

    def replace(self, measure: str, stack: Stack) -> None:
        """Replaces the states of a measure by the states of a stack of its kind, with as many groups."""
        self._measures[measure] = stack

    def reset(self, groups: IntArray) -> None:
        """Empties the states of these groups; their codes stay."""
        for stack in self._measures.values():
            stack.reset(groups)

    def query(self, measure: str, question: Question | None = None) -> Estimates:
        """Returns the estimate per group, in the order of `rows`."""
        return self._measures[measure].query(question)

    def to_message(self) -> SynopsisMessage:
        """Returns the whole state. An aggregate that is read from it behaves like this aggregate.

        To ship groups, `take` them, which compacts buffered values.
        """
        message = codec.header(self.kind, self.version, self.parameters, records=self.records)
        message.arrays.extend(codec.encode_keys(column) for column in self.rows())
        message.arrays.append(codec.encode(np.array([len(self)], np.int64)))
        message.parts.extend(stack.to_message() for stack in self._measures.values())
        return message

    def to_bytes(self) -> bytes:
        return codec.seal(codec.pack(self.to_message()))

    @classmethod
    def _open(cls, message: SynopsisMessage) -> tuple[dict[str, pa.DataType], list[str]]:
        """Returns the keys' types and the measures' names. Raises CorruptSynopsis or UnsupportedVersion."""
        parameters = codec.open_message(message, cls.kind, cls.version, len(message.arrays), len(message.parts))
        try:
            keys = {str(name): COLUMN_TYPES[t] for name, t in parameters["keys"]}
            names = [str(n) for n in parameters["measures"]]
        except (KeyError, TypeError, ValueError) as exc:
            raise CorruptSynopsis(f"{cls.kind}: parameters {message.parameters!r} lack keys or measures") from exc
        if len(set(names)) != len(message.parts) or len(keys) + 1 != len(message.arrays):
            raise CorruptSynopsis(f"{cls.kind}: {len(message.parts)} states for the measures {names}")
        return keys, names

    @classmethod
    def from_message(cls, message: SynopsisMessage, *, are_distinct: bool = False) -> Self:
        """Reads the result of `to_message`.

        Args:
            are_distinct: these bytes were read before, so that no two groups have the same key.

        Raises:
            CorruptSynopsis, UnsupportedVersion: the message is damaged, or of a newer release.
        """
        keys, names = cls._open(message)
        # First the number of groups, which is the last array: all keys have as many values.
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
        table = KeyTable.of_distinct(tuple(keys.values()), columns, groups, checked=are_distinct)
        if table is None:
            raise CorruptSynopsis(f"{cls.kind}: two groups have the same key")
        result.table = table
        result.records = message.records
        return result

    @classmethod
    def from_bytes(cls, data: bytes, *, are_distinct: bool = False) -> Self:
        """As `from_message`."""
        return cls.from_message(codec.unseal(data), are_distinct=are_distinct)

    @classmethod
    def merge_bytes(cls, partials: Sequence[bytes]) -> bytes:
        """Returns the union of at least one partial. A single partial is checked and returned unchanged.

        Raises the errors of `from_bytes` and `merge_all`, with the number of the partial.
        """
        if not partials:
            raise ValueError("a merge needs at least one partial")
        if len(partials) >= _MIN_STACKED:
            with suppress(Exception):  # reading them one by one reports the error and the partial
                return cls._stacked_union(partials)._sealed()
        return cls.merge_one_by_one(partials)

    @classmethod
    def merge_one_by_one(cls, partials: Sequence[bytes]) -> bytes:
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
        return first._sealed()

    def _sealed(self) -> bytes:
        """Returns the bytes of a merged aggregate.

        Raises IncompatibleSynopses if its numbers are too large to be read again.
        """
        message = self.to_message()
        for stack, part in zip(self._measures.values(), message.parts, strict=True):
            require_readable(stack, part)
        return codec.seal(codec.pack(message))

    @classmethod
    def _stacked_union(cls, partials: Sequence[bytes]) -> Self:
        """Returns the union of partials, read as one stack of all their groups (`encoding.stacking`).

        Raises:
            Exception: the caller has to read the partials one by one.
        """
        first = codec.unseal(partials[0])
        head, heads = _head(first), [_head(part) for part in first.parts]
        keys, names = cls._open(first)
        require_stackable(not any(part.parts for part in first.parts))
        result = cls(keys, {})
        at = 0
        while at < len(partials):
            messages, held = [], 0
            while at < len(partials) and held < _STACKED_BYTES:
                message = codec.unseal(partials[at])
                require_stackable(_head(message) == head and [_head(part) for part in message.parts] == heads)
                require_stackable(len(message.arrays) == len(keys) + 1)
                messages.append(message)
                held += len(partials[at])
                at += 1
            result._add_messages(names, messages)
        result._compact()
        return result

    def _add_messages(self, names: Sequence[str], messages: Sequence[SynopsisMessage]) -> None:
        """Merges the messages of aggregates with equal headers, and adds missing measures.

        Raises:
            Exception: the caller has to read the partials one by one. Some changes may be applied already.
        """
        groups = stacking.numbers([message.arrays[-1] for message in messages])
        require_stackable(bool(self._key_names) or groups.max() <= 1)
        kinds = [kind_named(part.kind) for part in messages[0].parts]
        require_stackable(all(kind is not None and kind.__module__.startswith("edgewater.") for kind in kinds))
        if any(hasattr(kind, "state_bytes") for kind in kinds):
            for message, count in zip(messages, groups.tolist(), strict=True):
                _check_state_bytes(count, message.parts)
        codes = self._stacked_codes(messages, groups)
        for number, (name, kind) in enumerate(zip(names, kinds, strict=True)):
            parts = [message.parts[number] for message in messages]
            held = self._measures.get(name)
            try:
                stack = _stacked(kind, parts, groups)
            except stacking.NotStackable:
                self._measures[name] = self._merged_apart(held, parts, codes, groups)
                continue
            held = stack.take(_NO_GROUPS) if held is None else held
            held.grow(len(self))
            held.merge(stack, codes)
            self._measures[name] = held
        self.records += sum(message.records for message in messages)

    def _merged_apart(
        self, held: Stack | None, parts: Sequence[SynopsisMessage], codes: IntArray, groups: IntArray
    ) -> Stack:
        """Merges the stacks of one measure one after the other. Without `held`, the first stack is the target."""
        starts = np.cumsum(groups) - groups
        for part, start, count in zip(parts, starts.tolist(), groups.tolist(), strict=True):
            other = stack_from_message(part)
            require_stackable(len(other) == count and (held is None or _may_merge(held, other)))
            if held is None:
                held = other  # its groups are the first ones here
                held.grow(len(self))
            else:
                held.merge(other, codes[start : start + count])
        assert held is not None, "there is a message"
        return held

    def _stacked_codes(self, messages: Sequence[SynopsisMessage], groups: IntArray) -> IntArray:
        """Returns the codes of the groups of all messages. Messages with equal keys share a look-up."""
        runs: dict[tuple[Any, ...], int] = {}
        which, last = list[int](), None
        for message in messages:
            arrays = message.arrays
            if arrays != last:  # faster than the bytes
                last, run = arrays, runs.setdefault(_key_bytes(message), len(runs))
            which.append(run)
        firsts = np.unique(which, return_index=True)[1].tolist()
        counts = groups[firsts]
        found = self.encode(self._stacked_keys([messages[i] for i in firsts], counts), int(counts.sum()))
        require_stackable(not _repeats(found, counts, len(self)))
        if len(runs) == len(messages):
            return found
        return found[run_indices((np.cumsum(counts) - counts)[which], counts[which])]

    def _stacked_keys(self, messages: Sequence[SynopsisMessage], groups: IntArray) -> list[pa.Array]:
        """Returns the key columns of all messages, concatenated."""
        keys = [stacking.keys(arrays, groups) for arrays in zip(*(m.arrays[:-1] for m in messages), strict=True)]
        require_stackable(all(key.type == of for key, of in zip(keys, self.table.types, strict=True)))
        return keys

    def _compact(self) -> None:
        for stack in self._measures.values():
            compact = getattr(stack, "compact", None)
            if compact is not None:
                compact()


def _stacked(kind: Any, parts: Sequence[SynopsisMessage], groups: IntArray) -> Stack:
    """Returns one stack of the groups of all parts. Raises NotStackable, SynopsisError."""
    roles = getattr(kind, "stacking", None)
    if roles is None or len({len(part.arrays) for part in parts}) > 1:
        raise stacking.NotStackable
    layout = layout_for(parts[0].kind, kind.layouts, parts[0].arrays)
    stack: Stack = kind.from_message(stacking.stacked(parts, layout, roles, groups))
    return stack


def _head(message: SynopsisMessage) -> tuple[Any, ...]:
    """Returns the part of a message that must be equal in messages that are read as one stack."""
    return message.kind, message.version, message.parameters, message.seed, len(message.parts)


def _repeats(codes: IntArray, counts: IntArray, groups: int) -> bool:
    """Returns whether a code repeats within a run.

    Args:
        codes: int64, runs of codes below `groups`.
        counts: int64, the length of each run.
    """
    marks = np.repeat(np.arange(len(counts)) * groups, counts) + codes
    if len(counts) * groups <= 8 * len(codes):
        return bool(np.bincount(marks).max(initial=0) > 1)
    marks.sort()
    return bool((marks[1:] == marks[:-1]).any())


def _key_bytes(message: SynopsisMessage) -> tuple[bytes, ...]:
    """Returns bytes that are equal if two aggregates have the same keys in the same order.

    Of aggregates with equal bytes, only the first is checked.
    """
    return tuple(array.SerializeToString(deterministic=True) for array in message.arrays)


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
    """Checks that the message of a merged stack can be read again. Raises IncompatibleSynopses.

    Only a stack with large numbers needs the check.
    """
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
