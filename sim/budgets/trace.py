"""Traces, the records that a simulation replays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from edgewater.base.errors import InvalidRequest
from edgewater.base.streams import TIME_COLUMN
from edgewater.synopses import FloatArray, IntArray, KeyTable


@dataclass(frozen=True, slots=True)
class Trace:
    """Records in the order of their event times.

    Attributes:
        batch: the key and value columns, and `event_time_ms` (int64), ascending.
        keys: the key columns' names.
        codes: group number per record, int64, contiguous from 0.
    """

    batch: pa.RecordBatch
    keys: tuple[str, ...]
    codes: IntArray = field(repr=False)

    @classmethod
    def from_columns(cls, times_ms: Any, keys: Mapping[str, Any], values: Mapping[str, Any]) -> Trace:
        """Returns a trace of columns of the same length, in any order of time.

        Args:
            times_ms: event times, int64 ms.
            keys: name -> strings, integers, floats or booleans; none: one group.
            values: name -> numbers.

        Raises:
            InvalidRequest: columns of different lengths, or a duplicate name.
        """
        times = np.asarray(times_ms, np.int64)
        columns = {**{n: _array(v) for n, v in keys.items()}, **{n: _array(v) for n, v in values.items()}}
        if len(columns) != len(keys) + len(values) or TIME_COLUMN in columns:
            raise InvalidRequest("columns", [*keys, *values, TIME_COLUMN], "a different name for each column")
        for name, column in columns.items():
            if len(column) != len(times):
                raise InvalidRequest(name, len(column), f"{len(times)} values, as many as there are times")
        batch = pa.record_batch({**columns, TIME_COLUMN: pa.array(times)})
        order = np.argsort(times, kind="stable")
        if not np.array_equal(order, np.arange(len(order))):
            batch = batch.take(pa.array(order))
        table = KeyTable(tuple(columns[n].type for n in keys))
        codes = table.encode([batch.column(n) for n in keys], batch.num_rows)
        return cls(batch, tuple(keys), codes)

    def __len__(self) -> int:
        return int(self.batch.num_rows)

    @property
    def times_ms(self) -> IntArray:
        return np.asarray(self.batch.column(TIME_COLUMN).to_numpy(), np.int64)

    @property
    def columns(self) -> dict[str, pa.DataType]:
        """The columns of the stream, as an edge declares them."""
        return {f.name: f.type for f in self.batch.schema if f.name != TIME_COLUMN}

    def values(self, name: str) -> FloatArray:
        return np.asarray(self.batch.column(name).to_numpy(zero_copy_only=False), np.float64)

    def rows(self, chosen: IntArray) -> Trace:
        """Returns a trace of the chosen records; groups keep their numbers."""
        return Trace(self.batch.take(pa.array(chosen)), self.keys, self.codes[chosen])

    def split(self, homes: IntArray, edges: int) -> list[Trace]:
        """Returns one trace per edge. `homes` has the edge of each record, from 0, int64."""
        return [self.rows(np.flatnonzero(homes == edge)) for edge in range(edges)]


def _array(values: Any) -> pa.Array:
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    array = values if isinstance(values, pa.Array) else pa.array(values)
    if pa.types.is_integer(array.type):
        return array.cast(pa.int64())
    return array.cast(pa.float64()) if pa.types.is_floating(array.type) else array
