"""`TimedRows`: values in any columnar form, with event times and arrival numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from center.batch.slicing.families import MAX_TIME_MS
from edgewater.model.errors import InvalidRecord
from edgewater.synopses import IntArray


@dataclass(frozen=True, slots=True)
class TimedRows:
    """A number n of records as columns.

    Attributes:
        values: NumPy array, Arrow array or Arrow record batch of length n.
        times: event times in ms, int64.
        numbers: int64, ascending in the order of arrival, unique within a stream.
    """

    values: Any
    times: IntArray
    numbers: IntArray

    def __len__(self) -> int:
        return len(self.times)

    def at(self, index: npt.NDArray[Any]) -> TimedRows:
        """Returns the rows at these positions, or the rows that a mask selects."""
        if index.dtype == np.bool_:
            index = np.flatnonzero(index)
        values = self.values[index] if isinstance(self.values, np.ndarray) else self.values.take(pa.array(index))
        return TimedRows(values, self.times[index], self.numbers[index])

    def between(self, start: int, end: int) -> TimedRows:
        """Returns the records [start, end), without a copy."""
        if start == 0 and end == len(self):
            return self
        arrow = isinstance(self.values, pa.Array | pa.RecordBatch)
        values = self.values.slice(start, end - start) if arrow else self.values[start:end]
        return TimedRows(values, self.times[start:end], self.numbers[start:end])

    def in_order(self) -> TimedRows:
        """Returns the rows sorted by event time. Rows with equal times stay in the order of arrival."""
        if (self.times[1:] >= self.times[:-1]).all():
            return self
        return self.at(np.argsort(self.times, kind="stable"))


def concatenated(parts: Sequence[TimedRows]) -> TimedRows:
    """Concatenates parts whose values have the same form."""
    if len(parts) == 1:
        return parts[0]
    values: list[Any] = [p.values for p in parts]
    if all(isinstance(v, np.ndarray) for v in values):
        joined = np.concatenate(values)
    elif isinstance(values[0], pa.RecordBatch):
        tables = [pa.Table.from_batches([v]) for v in values]
        joined = columnar(pa.concat_tables(tables, promote_options="permissive"))
    else:
        tables = [pa.table({"values": v}) for v in values]
        joined = pa.concat_tables(tables, promote_options="permissive").combine_chunks().column(0).chunk(0)
    return TimedRows(joined, np.concatenate([p.times for p in parts]), np.concatenate([p.numbers for p in parts]))


def columnar(values: Any) -> Any:
    """Converts values to a NumPy array (numbers), an Arrow array (other values), or a record batch (tables and
    mappings).
    """
    if isinstance(values, Mapping):
        values = pa.table(dict(values))
    if isinstance(values, pa.Table):
        batches = values.combine_chunks().to_batches()
        return batches[0] if batches else pa.RecordBatch.from_pylist([], values.schema)
    if isinstance(values, pa.RecordBatch) or (isinstance(values, np.ndarray) and values.dtype.kind in "iufb"):
        return values
    if isinstance(values, pa.ChunkedArray):
        return values.combine_chunks() if values.num_chunks != 1 else values.chunk(0)
    return values if isinstance(values, pa.Array) else pa.array(values)


def rows_of(values: Any, times_ms: Any, first_number: int) -> TimedRows:
    """Converts and validates a batch of values and event times.

    Raises:
        InvalidRecord: the times have the wrong type, number or range.
    """
    held = columnar(values)
    count = held.num_rows if isinstance(held, pa.RecordBatch) else len(held)
    if isinstance(times_ms, pa.ChunkedArray):
        times_ms = times_ms.combine_chunks()
    accepted = f"{count} whole numbers of ms within ±2^60, one per value, without nulls"
    if isinstance(times_ms, pa.Array) and times_ms.null_count:
        raise InvalidRecord("times_ms", f"{times_ms.null_count} nulls", accepted)
    times = np.asarray(times_ms)
    if times.size == 0:
        times = times.astype(np.int64)
    if times.dtype.kind == "M":
        times = times.astype("datetime64[ms]").view(np.int64)
    if times.dtype.kind not in "iu" or times.shape != (count,):
        raise InvalidRecord("times_ms", f"{times.dtype}{times.shape}", accepted)
    outside = times[(times > MAX_TIME_MS) | (times < -MAX_TIME_MS)] if times.dtype.kind == "i" else times[:0]
    if times.dtype.kind == "u":
        outside = times[times > MAX_TIME_MS]
    if len(outside):
        raise InvalidRecord("times_ms", int(outside[0]), accepted)
    return TimedRows(held, times.astype(np.int64), np.arange(first_number, first_number + count))


class PendingRecords:
    """The records that the watermark has not passed."""

    def __init__(self) -> None:
        self.parts: list[TimedRows] = []

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def add(self, rows: TimedRows) -> None:
        if len(rows):
            self.parts.append(rows)

    def take(self, before_ms: int) -> TimedRows | None:
        """Removes and returns the records with event times before `before_ms`, sorted by (time, number); None if there
        are none.
        """
        if not self.parts:
            return None
        rows = concatenated(self.parts)
        due = rows.times < before_ms
        if not due.any():
            self.parts = [rows]
            return None
        self.parts = [] if due.all() else [rows.at(~due)]
        taken = rows.at(due)
        return taken.at(np.lexsort((taken.numbers, taken.times)))
