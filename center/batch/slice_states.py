"""The states of one task: one synopsis per slice and stratum. This module uses Arrow data and no Spark.

The state of a slice is one stack over the slice's strata. One call updates it with all records, as at the edge. Kinds
without a stack (a wavelet, a user's own kind) have one object per stratum. Each object is updated by its own call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from center.batch.pattern import SynopsisPattern
from edgewater.synopses import IntArray, KeyTable, SampleStack, Stack
from edgewater.synopses.encoding import codec

ROWS_BYTES = 64 << 20  # limit: memory of a task
"""Size of a batch of emitted partials. Arrow's binary arrays are limited to 2 GiB."""

_ZEROS = np.zeros(1 << 17, np.int64)
_ZEROS.setflags(write=False)
_COUNTERS = ("records", "nulls", "first_ms", "last_ms")
_EMPTY = (0, 0, np.iinfo(np.int64).max, np.iinfo(np.int64).min)


class Records(NamedTuple):
    """Records of a task.

    Attributes:
        values: the values, or a grouped aggregate's keys and arguments. Nulls are counted and skipped.
        times: event times in ms, int64.
        ids: numbers from `SliceStates.number`, int64.
    """

    strata: list[pa.Array]
    values: list[pa.Array]
    times: IntArray
    ids: IntArray

    def at(self, rows: IntArray) -> Records:
        """Returns the records with these positions."""
        index = pa.array(rows)
        strata, values = ([c.take(index) for c in columns] for columns in (self.strata, self.values))
        return Records(strata, values, self.times[rows], self.ids[rows])

    def between(self, begin: int, end: int) -> Records:
        """Returns the records with the positions [begin, end)."""
        strata, values = ([c[begin:end] for c in columns] for columns in (self.strata, self.values))
        return Records(strata, values, self.times[begin:end], self.ids[begin:end])


class _StackStates:
    """The states of a slice's strata as one stack."""

    def __init__(self, stack: Stack, source: int) -> None:
        self._stack = stack
        if isinstance(stack, SampleStack):
            stack.source = source

    @property
    def nbytes(self) -> int:
        return self._stack.nbytes

    def update(self, codes: IntArray, columns: Sequence[pa.Array], times: IntArray, ids: IntArray, groups: int) -> None:
        (values,) = columns
        self._stack.grow(groups)
        if not len(values):
            return
        held = values if pa.types.is_string(values.type) else values.to_numpy(zero_copy_only=False)
        numbered = {"ids": ids} if isinstance(self._stack, SampleStack) else {}
        self._stack.update(codes, held, times=times, **numbered)

    def to_bytes(self, group: int, records: int) -> bytes:
        message = self._stack.take(np.array([group], np.int64)).to_message()
        message.records = records
        return codec.seal(message)


class _ObjectStates:
    """The states of a slice's strata, as one object per stratum."""

    def __init__(self, pattern: SynopsisPattern) -> None:
        self._template = pattern
        self._held: list[Any] = []

    @property
    def nbytes(self) -> int:
        return sum(int(getattr(one, "nbytes", 0)) for one in self._held)

    def update(self, codes: IntArray, columns: Sequence[pa.Array], times: IntArray, ids: IntArray, groups: int) -> None:
        self._held += [self._template.fresh() for _ in range(groups - len(self._held))]
        order = np.argsort(codes, kind="stable")
        present, starts = np.unique(codes[order], return_index=True)
        for group, index in zip(present.tolist(), np.split(order, starts[1:]), strict=True):
            every = len(present) == 1
            part = list(columns) if every else [c.take(pa.array(index)) for c in columns]
            self._add(self._held[group], part, times if every else times[index])

    def _add(self, held: Any, columns: list[pa.Array], times: IntArray) -> None:
        if not self._template.is_grouped:
            held.update(columns[0], times=times)
            return
        keys, values = columns[: len(self._template.keys)], columns[len(self._template.keys) :]
        given = dict(zip(self._template.arguments, values, strict=True))
        held.update(keys, {m: given.get(m) for m in self._template.measures}, len(times), times=times)

    def to_bytes(self, group: int, records: int) -> bytes:
        return bytes(self._held[group].to_bytes())


class _Slice:
    """One slice: its strata, and the state and the counters of each stratum."""

    def __init__(
        self, pattern: SynopsisPattern, strata: tuple[pa.DataType, ...], states: _StackStates | _ObjectStates
    ) -> None:
        self._states = states
        self._skips_nulls = not pattern.is_grouped
        self._table = KeyTable(strata)
        self._counters: dict[str, IntArray] = {name: np.zeros(0, np.int64) for name in _COUNTERS}

    def __len__(self) -> int:
        return len(self._table)

    @property
    def nbytes(self) -> int:
        return self._states.nbytes + self._table.nbytes

    def update(self, records: Records) -> None:
        strata, columns, times, ids = records
        codes = self._table.encode(strata, len(times)) if strata else self._only_group(len(times))
        groups = len(self)
        for name, empty in zip(_COUNTERS, _EMPTY, strict=True):
            held = self._counters[name]
            self._counters[name] = np.concatenate([held, np.full(groups - len(held), empty, np.int64)])
        first, last = self._counters["first_ms"], self._counters["last_ms"]
        if groups == 1:
            first[0], last[0] = min(first[0], times.min()), max(last[0], times.max())
        else:
            np.minimum.at(first, codes, times)
            np.maximum.at(last, codes, times)
        if self._skips_nulls and columns[0].null_count:
            present = np.asarray(columns[0].is_valid())
            self._counters["nulls"] += _counted(codes[~present], groups)
            columns = [columns[0].drop_null()]
            codes, times, ids = codes[present], times[present], ids[present]
        self._counters["records"] += _counted(codes, groups)
        self._states.update(codes, columns, times, ids, groups)

    def _only_group(self, rows: int) -> IntArray:
        """Returns the group code of each record if there are no strata: 0."""
        self._table.encode([], 1)
        return zeros(rows)

    def rows(self, start: int) -> Iterator[tuple[list[Any], dict[str, Any]]]:
        columns = self._table.rows(None)
        counters = {name: held.tolist() for name, held in self._counters.items()}
        for group in range(len(self)):
            row = {name: held[group] for name, held in counters.items()}
            row |= {"slice_start": start, "synopsis": self._states.to_bytes(group, row["records"])}
            yield [c[group].as_py() for c in columns], row


class SliceStates:
    """All slices of one task.

    Args:
        strata: types of the stratum columns.
        source: sample source of this task, unique among all tasks whose samples are merged.
    """

    def __init__(self, pattern: SynopsisPattern, strata: Sequence[pa.DataType] = (), *, source: int = 0) -> None:
        self._template = pattern
        self._strata = tuple(strata)
        self._source = source
        self._empty = None if pattern.is_grouped else pattern.stack()
        self._slices: dict[int, _Slice] = {}
        self._next_id = 0

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self._slices.values())

    def number(self, rows: int) -> IntArray:
        """Returns record numbers that are unique within the task; zeros if the synopsis needs no numbers."""
        if not isinstance(self._empty, SampleStack):
            return zeros(rows)
        self._next_id += rows
        return np.arange(self._next_id - rows, self._next_id)

    def update(self, starts: IntArray | int, records: Records) -> None:
        """Adds records to slices.

        Args:
            starts: start of each record's slice, or one start if all records are in the same slice.
        """
        if not len(records.times):
            return
        if isinstance(starts, int):
            self._slice(starts).update(records)
            return
        if (starts[1:] < starts[:-1]).any():
            order = np.argsort(starts, kind="stable")
            starts, records = starts[order], records.at(order)
        borders = np.flatnonzero(np.concatenate([[True], starts[1:] != starts[:-1], [True]])).tolist()
        for begin, end in pairwise(borders):
            self._slice(int(starts[begin])).update(records.between(begin, end))

    def _slice(self, start: int) -> _Slice:
        held = self._slices.get(start)
        if held is None:
            held = self._slices[start] = _Slice(self._template, self._strata, self._states())
        return held

    def _states(self) -> _StackStates | _ObjectStates:
        if self._empty is None:
            return _ObjectStates(self._template)
        return _StackStates(self._empty.take(np.zeros(0, np.int64)), self._source)

    def drain(self) -> Iterator[tuple[list[Any], dict[str, Any]]]:
        """Removes all states. Yields the stratum and the columns of each state, ordered by slice."""
        slices, self._slices = self._slices, {}
        for start in sorted(slices):
            yield from slices.pop(start).rows(start)


def record_batches(
    schema: pa.Schema, strata: int, rows: Iterable[tuple[Sequence[Any], Mapping[str, Any]]]
) -> Iterator[pa.RecordBatch]:
    """Yields rows as record batches of about `ROWS_BYTES`.

    Args:
        schema: strata first, then the columns by name. A column that a row does not have is null.
        strata: number of the strata.
        rows: the strata of each row, and its columns.
    """
    waiting: list[tuple[Sequence[Any], Mapping[str, Any]]] = []
    size = 0
    for key, row in rows:
        waiting.append((key, row))
        size += len(row.get("synopsis") or b"") + 100
        if size > ROWS_BYTES:
            yield _batch(schema, strata, waiting)
            waiting, size = [], 0
    if waiting:
        yield _batch(schema, strata, waiting)


def _batch(schema: pa.Schema, strata: int, rows: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]) -> pa.RecordBatch:
    arrays = [pa.array([key[i] for key, _ in rows], schema.field(i).type) for i in range(strata)]
    arrays += [pa.array([row.get(field.name) for _, row in rows], field.type) for field in list(schema)[strata:]]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def numbers(column: pa.Array) -> npt.NDArray[np.int64]:
    return np.asarray(column, np.int64)


def zeros(rows: int) -> IntArray:
    """Returns zeros that must not be changed, because all chunks share the memory."""
    return _ZEROS[:rows] if rows <= len(_ZEROS) else np.zeros(rows, np.int64)


def _counted(codes: IntArray, groups: int) -> IntArray:
    """Returns the number of records per group."""
    return np.array([len(codes)]) if groups == 1 else np.bincount(codes, minlength=groups)
