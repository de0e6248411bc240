"""A batch as the queries of its stream read it: what several queries compute of it alike is computed once.

Queries of a stream often have a condition, key columns or windows in common. Evaluating a condition, copying the
records that it keeps and encoding their keys does not depend on a query's state, and takes a third of the CPU of many
queries (`docs/decisions/0012-scheduling.md`). What a query gets is the same as if it had been alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import numpy as np
import pyarrow as pa

from edge.core.batch_queue import BatchQueue, QueuedBatch, joined
from edgewater.model.query import BoundQuery
from edgewater.model.streams import TIME_COLUMN
from edgewater.model.syntax import called_names, column_names, parse_sql
from edgewater.model.windows import SlicedWindow
from edgewater.synopses import BoolArray, EncodedKeys, IntArray

MOST_KEPT = 4
"""What is kept of a batch takes at most so many times the batch's size; the rest each query computes for itself."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a query computes of a batch before its state matters.

    Attributes:
        condition: equal for queries whose conditions keep the same records; None: all records.
        slicing: equal for queries whose slices have the same borders.
        keys: equal for queries with the same key columns.
        columns: all columns that it reads of the records that fulfil its condition.
    """

    condition: Hashable
    slicing: Hashable
    keys: Hashable
    columns: tuple[str, ...]

    @classmethod
    def of(cls, bound: BoundQuery, query: Hashable) -> Reading:
        """Returns the reading of `query`. What calls plugin functions is not shared: failures count by query."""
        spec = bound.spec
        calls = spec.where is not None and called_names(parse_sql(spec.where, "where"))
        key_calls = any(called_names(parse_sql(text, "")) for _, text in spec.computed)
        texts = [*dict(spec.computed).values(), *(m.argument for m in spec.measures if m.argument is not None)]
        read = chain.from_iterable(column_names(parse_sql(text, "")) for text in texts)
        columns = dict.fromkeys([TIME_COLUMN, *spec.plain_keys, *read])
        condition = (spec.where, query) if calls else spec.where
        keys = (spec.key_sources, query) if key_calls else spec.key_sources
        return cls(condition, spec.window.slicing, keys, tuple(columns))


@dataclass(slots=True)
class Sharing:
    """Which results are kept, as several queries need them, and the bytes that they may take and take."""

    readers: Counter[Hashable] = field(default_factory=Counter)
    columns: dict[Hashable, dict[str, None]] = field(default_factory=dict)
    most_bytes: int = 0
    kept_bytes: int = 0

    @classmethod
    def among(cls, readings: Iterable[Reading], batch: pa.RecordBatch) -> Sharing:
        """Returns what these queries share of a batch."""
        readers, columns = Counter[Hashable](), dict[Hashable, dict[str, None]]()
        for reading in readings:
            columns.setdefault(reading.condition, {}).update(dict.fromkeys(reading.columns))
            readers[reading.condition] += 1
            readers[reading.condition, reading.slicing] += 1
            readers[reading.condition, reading.keys] += 1
        return cls(readers, columns, MOST_KEPT * int(batch.nbytes))

    def columns_of(self, reading: Reading) -> list[str]:
        """Returns the columns that queries with its condition read; copying others would be in vain."""
        return list(self.columns.get(reading.condition, reading.columns))

    def keeps(self, result: Hashable, nbytes: int) -> bool:
        """Returns whether a result is kept, and counts its size then."""
        if self.readers[result] < 2 or self.kept_bytes + nbytes > self.most_bytes:
            return False
        self.kept_bytes += nbytes
        return True


class BatchRecords:
    """Some records of a batch.

    Args:
        ids: returns the numbers of the records in their stream, int64.
        sharing: of the batch; by default nothing is kept.
        condition: what the records were selected by (`Reading.condition`).
    """

    def __init__(
        self,
        batch: pa.RecordBatch,
        ids: Callable[[], IntArray],
        sharing: Sharing | None = None,
        condition: Hashable = None,
    ) -> None:
        self.batch = batch
        self._make_ids = ids
        self._sharing = sharing or Sharing()
        self._condition = condition
        self._matching: dict[Hashable, BatchRecords] = {}
        self._slices: dict[Hashable, list[tuple[int, BatchRecords]]] = {}
        self._keys: dict[Hashable, EncodedKeys] = {}

    @classmethod
    def numbered(cls, batch: pa.RecordBatch, first: int, sharing: Sharing | None = None) -> BatchRecords:
        """Returns all records of a batch; `first` is the number of its first one in the stream."""
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

    def matching(self, bound: BoundQuery, reading: Reading) -> BatchRecords:
        """Returns the records that fulfil the query's condition."""
        if bound.where is None:
            return self
        found = self._matching.get(reading.condition)
        if found is None:
            columns = self.batch.select(self._sharing.columns_of(reading))
            found = self._filtered(columns, bound.where.array(self.batch), self._sharing, reading.condition)
            if self._sharing.keeps(reading.condition, int(found.batch.nbytes)):
                self._matching[reading.condition] = found
        return found

    def filtered(self, kept: BoolArray) -> BatchRecords:
        """Returns the `kept` records; nothing of them is shared."""
        return self._filtered(self.batch, pa.array(kept), None, None)

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
        found = self._slices.get(reading.slicing)
        if found is None:
            starts = window.slice_starts(self.times)
            columns = self.batch.select(self._sharing.columns_of(reading))
            rows = [(start, np.flatnonzero(starts == start)) for start in np.unique(starts).tolist()]
            found = [(start, self._taken(columns, at)) for start, at in rows]
            size = sum(int(records.batch.nbytes) for _, records in found)
            if self._sharing.keeps((self._condition, reading.slicing), size):
                self._slices[reading.slicing] = found
        return found

    def _taken(self, columns: pa.RecordBatch, rows: IntArray) -> BatchRecords:
        return BatchRecords(columns.take(pa.array(rows)), lambda: self.ids[rows], self._sharing, self._condition)

    def keys(self, bound: BoundQuery, reading: Reading) -> EncodedKeys:
        """Returns the keys of the records in a query."""
        found = self._keys.get(reading.keys)
        if found is None:
            found = bound.encoded_keys(self.batch)
            if self._sharing.keeps((self._condition, reading.keys), found.nbytes):
                self._keys[reading.keys] = found
        return found


class QueuedRecords:
    """The records of queued batches: queries process them one after the other and share what they compute."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int, int], tuple[BatchRecords, Sharing, int]] = {}

    @property
    def nbytes(self) -> int:
        """Size of what is kept, without the batches as they were queued."""
        return sum(copied + sharing.kept_bytes for _, sharing, copied in self._held.values())

    def get(self, stream: str, parts: Sequence[QueuedBatch]) -> BatchRecords | None:
        """Returns the records of these parts if they are kept."""
        held = self._held.get((stream, parts[0].first, parts[-1].end))
        return None if held is None else held[0]

    def of(
        self, stream: str, parts: Sequence[QueuedBatch], queries: Sequence[tuple[BatchQueue, Reading]], most_bytes: int
    ) -> BatchRecords:
        """Returns the records of adjacent parts of a stream, which are not kept yet, as one batch.

        Args:
            queries: the queues of the stream's queries, and what these read.
            most_bytes: what more would take is not kept. Queries go through the same batches in turn, so to forget the
                oldest for the newest would leave each query with what it does not need next.
        """
        key = stream, parts[0].first, parts[-1].end
        needed = min((queue.next for queue, _ in queries if queue), default=math.inf)
        self._held = {key: held for key, held in self._held.items() if key[0] != stream or key[2] > needed}
        batch = joined(parts)
        if self.nbytes >= most_bytes or needed >= key[2]:
            return BatchRecords.numbered(batch, key[1])
        sharing = Sharing.among((reading for _, reading in queries), batch)
        records = BatchRecords.numbered(batch, parts[0].first, sharing)
        self._held[key] = records, sharing, int(batch.nbytes) if len(parts) > 1 else 0
        return records

    def clear(self) -> None:
        self._held.clear()
