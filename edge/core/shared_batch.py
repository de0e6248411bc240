"""A batch as the queries of its stream read it. A result that several queries need is computed once.

Queries of a stream often have a condition, key columns or windows in common. These three steps do not depend on a
query's state: to evaluate a condition, to copy the matching records, and to encode their keys. They take a third of the
CPU of many queries (`docs/decisions/0012-scheduling.md`). The results of a query are the same as without sharing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import numpy as np
import pyarrow as pa

from edgewater.base.streams import TIME_COLUMN
from edgewater.model.query import BoundQuery
from edgewater.model.syntax import called_names, column_names, parse_sql
from edgewater.model.windows import SlicedWindow
from edgewater.synopses import BoolArray, EncodedKeys, IntArray

MOST_KEPT = 4
"""The cached results of a batch take at most this many times its size. Each query computes further results for itself.
"""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a query computes of a batch independently of its state.

    Attributes:
        condition: equal for queries whose conditions select the same records, with columns of the same tables.
        slicing: equal for queries whose slices have the same borders.
        keys: equal for queries with the same key columns.
        columns: all columns that the query reads of its matching records.
    """

    condition: Hashable
    slicing: Hashable
    keys: Hashable
    columns: tuple[str, ...]

    @classmethod
    def of(cls, bound: BoundQuery, query: Hashable) -> Reading:
        """Returns the reading of `query`. Plugin calls are not shared, because failures count per query."""
        spec = bound.spec
        calls = spec.where is not None and called_names(parse_sql(spec.where, "where"))
        key_calls = any(called_names(parse_sql(text, "")) for _, text in spec.computed)
        texts = [*dict(spec.computed).values(), *(m.argument for m in spec.measures if m.argument is not None)]
        read = chain.from_iterable(column_names(parse_sql(text, "")) for text in texts)
        columns = dict.fromkeys([TIME_COLUMN, *spec.plain_keys, *read])
        condition = (spec.where, spec.lookups, query) if calls else (spec.where, spec.lookups)
        keys = (spec.key_sources, query) if key_calls else spec.key_sources
        return cls(condition, spec.window.slicing, keys, tuple(columns))


@dataclass(slots=True)
class Sharing:
    """Which results several queries need, how many bytes the cache of results may take, and how many it takes."""

    readers: Counter[Hashable] = field(default_factory=Counter)
    columns: dict[Hashable, dict[str, None]] = field(default_factory=dict)
    most_bytes: int = 0
    kept_bytes: int = 0

    @classmethod
    def among(cls, readings: Iterable[Reading], batch: pa.RecordBatch) -> Sharing:
        """Returns the results that these queries share of a batch."""
        readers, columns = Counter[Hashable](), dict[Hashable, dict[str, None]]()
        for reading in readings:
            columns.setdefault(reading.condition, {}).update(dict.fromkeys(reading.columns))
            readers[reading.condition] += 1
            readers[reading.condition, reading.slicing] += 1
            readers[reading.condition, reading.keys] += 1
        return cls(readers, columns, MOST_KEPT * int(batch.nbytes))

    def columns_of(self, reading: Reading) -> list[str]:
        """Returns the columns that queries with this reading's condition read. Other columns are not copied."""
        return list(self.columns.get(reading.condition, reading.columns))

    def keeps(self, result: Hashable, nbytes: int) -> bool:
        """Returns whether to cache a result of `nbytes`. If so, its size is counted."""
        if self.readers[result] < 2 or self.kept_bytes + nbytes > self.most_bytes:
            return False
        self.kept_bytes += nbytes
        return True


class BatchRecords:
    """Some records of a batch.

    Args:
        ids: returns the numbers of the records in their stream, int64.
        sharing: the sharing of the batch; by default nothing is cached.
        condition: the condition that selected the records (`Reading.condition`).
    """

    def __init__(
        self,
        batch: pa.RecordBatch,
        ids: Callable[[], IntArray],
        sharing: Sharing | None = None,
        condition: Hashable = (None, ()),
    ) -> None:
        self.batch = batch
        self._make_ids = ids
        self._sharing = sharing or Sharing()
        self._condition = condition
        self._joined: dict[Hashable, BatchRecords] = {}
        self._matching: dict[Hashable, BatchRecords] = {}
        self._slices: dict[Hashable, list[tuple[int, BatchRecords]]] = {}
        self._keys: dict[Hashable, EncodedKeys] = {}

    @classmethod
    def numbered(cls, batch: pa.RecordBatch, first: int, sharing: Sharing | None = None) -> BatchRecords:
        """Returns all records of a batch; `first` is the number of the first record in the stream."""
        return cls(batch, lambda: np.arange(first, first + batch.num_rows), sharing)

    def __len__(self) -> int:
        return int(self.batch.num_rows)

    @cached_property
    def ids(self) -> IntArray:
        return self._make_ids()

    @cached_property
    def times(self) -> IntArray:
        """Event times, int64 ms."""
        times: IntArray = self.batch.column(TIME_COLUMN).to_numpy()
        return times

    @cached_property
    def extent(self) -> tuple[int, int]:
        """The least and the greatest event time; there has to be a record."""
        return int(self.times.min()), int(self.times.max())

    def joined(self, bound: BoundQuery) -> BatchRecords:
        """Returns the records with the columns of the query's lookups."""
        lookups = bound.spec.lookups
        if not lookups:
            return self
        if lookups not in self._joined:
            self._joined[lookups] = BatchRecords(
                bound.joined(self.batch), self._make_ids, self._sharing, (None, lookups)
            )
        return self._joined[lookups]

    def matching(self, bound: BoundQuery, reading: Reading) -> BatchRecords:
        """Returns the records that fulfil the query's condition."""
        if bound.where is None:
            return self
        records = self._matching.get(reading.condition)
        if records is None:
            columns = self.batch.select(self._sharing.columns_of(reading))
            records = self._filtered(columns, bound.where.array(self.batch), self._sharing, reading.condition)
            if self._sharing.keeps(reading.condition, int(records.batch.nbytes)):
                self._matching[reading.condition] = records
        return records

    def filtered(self, mask: BoolArray) -> BatchRecords:
        """Returns the records of a mask, a bool per record. Nothing of the result is shared."""
        return self._filtered(self.batch, pa.array(mask), None, None)

    def _filtered(
        self, columns: pa.RecordBatch, mask: pa.BooleanArray, sharing: Sharing | None, condition: Hashable
    ) -> BatchRecords:
        ids: Callable[[], IntArray] = lambda: pa.array(self.ids).filter(mask).to_numpy()  # noqa: E731
        return BatchRecords(columns.filter(mask), ids, sharing, condition)

    def by_slice(self, window: SlicedWindow, reading: Reading) -> list[tuple[int, BatchRecords]]:
        """Returns the records by slice: the start of each slice, ascending, and its records, at least one."""
        least, greatest = self.extent
        # Nearly every batch lies in one slice.
        if (start := window.slice_start(least)) == window.slice_start(greatest):
            return [(start, self)]
        slices = self._slices.get(reading.slicing)
        if slices is None:
            slices = self._split(window.slice_starts(self.times), self._sharing.columns_of(reading))
            size = sum(int(records.batch.nbytes) for _, records in slices)
            if self._sharing.keeps((self._condition, reading.slicing), size):
                self._slices[reading.slicing] = slices
        return slices

    def _split(self, starts: IntArray, columns: list[str]) -> list[tuple[int, BatchRecords]]:
        """Returns the records by the start of their slice, ascending. The records of a slice stay in their order."""
        batch, ids = self.batch.select(columns), self._make_ids
        if (starts[1:] < starts[:-1]).any():
            order = np.argsort(starts, kind="stable")
            batch, starts, ids = batch.take(pa.array(order)), starts[order], lambda: self.ids[order]
        begins = np.flatnonzero(np.diff(starts, prepend=starts[0] - 1))
        split = _Split(BatchRecords(batch, ids, self._sharing, self._condition), begins)
        return [(start, split.part(number)) for number, start in enumerate(starts[begins].tolist())]

    def keys(self, bound: BoundQuery, reading: Reading) -> EncodedKeys:
        """Returns the keys of the records in a query."""
        keys = self._keys.get(reading.keys)
        if keys is None:
            keys = bound.encoded_keys(self.batch)
            if self._sharing.keeps((self._condition, reading.keys), keys.nbytes):
                self._keys[reading.keys] = keys
        return keys


class _Split:
    """The records of several slices, one slice after the other. What all slices need is computed once.

    Args:
        begins: the first row of each slice, int64, ascending from 0.
    """

    def __init__(self, records: BatchRecords, begins: IntArray) -> None:
        self.records, self._begins = records, begins
        self._bounds = [*begins.tolist(), len(records)]
        self._keys: dict[Hashable, list[EncodedKeys]] = {}

    def part(self, number: int) -> BatchRecords:
        return _Part(self, number, *self._bounds[number : number + 2])

    @cached_property
    def extents(self) -> list[tuple[int, int]]:
        """The least and the greatest event time of each slice."""
        times = self.records.times
        least, greatest = (f.reduceat(times, self._begins).tolist() for f in (np.minimum, np.maximum))
        return list(zip(least, greatest, strict=True))

    def keys(self, bound: BoundQuery, reading: Reading) -> list[EncodedKeys]:
        """Returns the keys of each slice."""
        if reading.keys not in self._keys:
            self._keys[reading.keys] = self.records.keys(bound, reading).split(self._begins)
        return self._keys[reading.keys]


class _Part(BatchRecords):
    """The records of one slice, rows `begin` to `end` of a `_Split`."""

    def __init__(self, split: _Split, number: int, begin: int, end: int) -> None:
        whole = split.records
        super().__init__(whole.batch.slice(begin, end - begin), lambda: whole.ids[begin:end])
        self._whole, self._number = split, number

    @property
    def extent(self) -> tuple[int, int]:
        return self._whole.extents[self._number]

    def keys(self, bound: BoundQuery, reading: Reading) -> EncodedKeys:
        return self._whole.keys(bound, reading)[self._number]
