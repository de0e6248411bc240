"""A batch as the queries of its stream read it: what several queries compute of it alike is computed once.

Queries of a stream often have a condition, key columns or windows in common. Evaluating a condition, copying the
records that it keeps and encoding their keys does not depend on a query's state, and takes a third of the CPU of many
queries (`docs/decisions/0046-what-queries-share.md`). What a query gets is the same as if it had been alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pyarrow as pa

from edgewater.query import BoundQuery
from edgewater.streams import TIME_COLUMN
from edgewater.synopses import BoolArray, EncodedKeys, IntArray
from edgewater.syntax import called_names, parse_sql
from edgewater.windows import SlicedWindow

MOST_KEPT = 4
"""What is kept of a batch takes at most so many times the batch's size; the rest each query computes for itself."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a query computes of a batch before its state matters.

    Attributes:
        condition: equal for queries whose conditions keep the same records; None: all records.
        slicing: equal for queries whose slices have the same borders.
        group_by: its key columns.
    """

    condition: Hashable
    slicing: Hashable
    group_by: tuple[str, ...]

    @classmethod
    def of(cls, bound: BoundQuery, query: Hashable) -> Reading:
        """Returns the reading of `query`. A condition with plugin functions is its own: failures count by query."""
        spec = bound.spec
        calls = spec.where is not None and called_names(parse_sql(spec.where, "where"))
        slicing = spec.window.slice_ms, spec.window.origin_ms % spec.window.slice_ms
        return cls((spec.where, query) if calls else spec.where, slicing, spec.group_by)


@dataclass(slots=True)
class Sharing:
    """Which results are kept, as several queries need them, and the bytes that are left for it."""

    readers: Counter[Hashable] = field(default_factory=Counter)
    left_bytes: int = 0

    @classmethod
    def among(cls, readings: Iterable[Reading], batch: pa.RecordBatch) -> Sharing:
        """Returns what these queries share of a batch."""
        readers = Counter[Hashable]()
        for reading in readings:
            readers[reading.condition] += 1
            readers[reading.condition, reading.slicing] += 1
            readers[reading.condition, reading.group_by] += 1
        return cls(readers, MOST_KEPT * int(batch.nbytes))

    def keeps(self, result: Hashable, nbytes: int) -> bool:
        """Returns whether a result is kept, and counts its size then."""
        if self.readers[result] < 2 or nbytes > self.left_bytes:
            return False
        self.left_bytes -= nbytes
        return True


class Records:
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
        self._matching: dict[Hashable, Records] = {}
        self._slices: dict[Hashable, list[tuple[int, Records]]] = {}
        self._keys: dict[tuple[str, ...], EncodedKeys] = {}

    @classmethod
    def numbered(cls, batch: pa.RecordBatch, first: int, sharing: Sharing | None = None) -> Records:
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

    def matching(self, bound: BoundQuery, reading: Reading) -> Records:
        """Returns the records that fulfil the query's condition."""
        if bound.where is None:
            return self
        found = self._matching.get(reading.condition)
        if found is None:
            found = self._filtered(bound.where.array(self.batch), self._sharing, reading.condition)
            if self._sharing.keeps(reading.condition, int(found.batch.nbytes)):
                self._matching[reading.condition] = found
        return found

    def filtered(self, kept: BoolArray) -> Records:
        """Returns the `kept` records; nothing of them is shared."""
        return self._filtered(pa.array(kept), None, None)

    def _filtered(self, mask: pa.BooleanArray, sharing: Sharing | None, condition: Hashable) -> Records:
        return Records(self.batch.filter(mask), lambda: pa.array(self.ids).filter(mask).to_numpy(), sharing, condition)

    def by_slice(self, window: SlicedWindow, reading: Reading) -> list[tuple[int, Records]]:
        """Returns the records by slice: the start of each slice, ascending, and its records, at least one."""
        least, greatest = self.extent
        # Nearly every batch lies in one slice.
        if (start := window.slice_start(least)) == window.slice_start(greatest):
            return [(start, self)]
        found = self._slices.get(reading.slicing)
        if found is None:
            starts = window.slice_starts(self.times)
            found = [(start, self._taken(np.flatnonzero(starts == start))) for start in np.unique(starts).tolist()]
            if self._sharing.keeps((self._condition, reading.slicing), int(self.batch.nbytes)):
                self._slices[reading.slicing] = found
        return found

    def _taken(self, rows: IntArray) -> Records:
        return Records(self.batch.take(pa.array(rows)), lambda: self.ids[rows], self._sharing, self._condition)

    def keys(self, group_by: tuple[str, ...]) -> EncodedKeys:
        """Returns the keys of the records."""
        found = self._keys.get(group_by)
        if found is None:
            found = EncodedKeys.of([self.batch.column(name) for name in group_by], len(self))
            if self._sharing.keeps((self._condition, group_by), found.nbytes):
                self._keys[group_by] = found
        return found
