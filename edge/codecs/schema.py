"""The schema of a stream's records: its columns and its event time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from edge.records import MAX_VALUES
from edgewater.base.streams import TIME_COLUMN, Constant, is_constant, type_name
from edgewater.model import arithmetic
from edgewater.synopses import BoolArray

MS_PER_UNIT = {"s": 1000.0, "ms": 1.0, "us": 1e-3, "ns": 1e-6}
"""ms per unit of a number."""
TIME_UNITS = (*MS_PER_UNIT, "iso8601")

DAY_MS = 86_400_000
MAX_SKEW_MS = 600_000
"""How far an event time may be ahead by default. One record that is ahead moves the watermark, and then the records of
all others are late. So a device with a wrong clock or zone loses its own records.
"""
YEAR_2000_MS = 946_684_800_000
YEAR_2200_MS = 7_258_118_400_000
"""The latest accepted event time, under every clock. It separates the units, as a time in another unit is wrong by a
factor of at least 1000. It also keeps arithmetic far from overflow.
"""


@dataclass(frozen=True, slots=True)
class EventTime:
    """The event time of a record, and its plausible range.

    Attributes:
        column: name of the column in the input. It need not be among the stream's columns.
        unit: the unit of numbers (a key of `MS_PER_UNIT`); iso8601 for texts such as 2013-01-01T05:15:00Z; or a pattern
            of `strptime` for other texts, such as ``%d/%b/%Y:%H:%M:%S %z``.
        min_ms: earlier event times are rejected.
        max_skew_ms: how far the event time may be ahead of the arrival time; None for no limit (replays).
        time_of_day: name of the column with the time of day, if `column` has dates. The unit must be iso8601.
        zone: IANA name of the zone of times that state none.
    """

    column: str
    unit: str = "ms"
    min_ms: int = YEAR_2000_MS
    max_skew_ms: int | None = MAX_SKEW_MS
    time_of_day: str | None = None
    zone: str = "UTC"

    @property
    def is_text(self) -> bool:
        """Whether event times are texts."""
        return self.unit not in MS_PER_UNIT

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns from which the event time is read."""
        return (self.column,) if self.time_of_day is None else (self.column, self.time_of_day)

    def latest_ms(self, arrival_ms: int) -> int:
        """Returns the latest plausible event time of a record that arrives at `arrival_ms`."""
        if self.max_skew_ms is None:
            return YEAR_2200_MS
        return min(YEAR_2200_MS, arrival_ms + self.max_skew_ms)


@dataclass(frozen=True, slots=True)
class RecordSchema:
    """The output of a decoder: declared columns and event time.

    Attributes:
        constants: columns with one value in all records. Null becomes this value, and a record with another value is
            rejected.
        lenient: columns whose values may be written as another type (`lenient_parse`).
        decimal: the decimal mark of texts in lenient columns.
        nulls: by column, the words, or the values, that mean null.
        on_nan: by column of float64, whether NaN is kept (the default), becomes null, or rejects the record.
        rejects_by: the column by whose values rejected records are told apart; None: they are not.
    """

    columns: Mapping[str, pa.DataType]
    time: EventTime
    constants: Mapping[str, Constant] = field(default_factory=dict)
    lenient: frozenset[str] = frozenset()
    decimal: str = "."
    nulls: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    on_nan: Mapping[str, str] = field(default_factory=dict)
    rejects_by: str | None = None

    @property
    def output(self) -> pa.Schema:
        """The schema of every decoded batch."""
        return pa.schema([*self.columns.items(), (TIME_COLUMN, pa.int64())])

    @property
    def textual(self) -> dict[str, pa.DataType]:
        """The type of each column that a text decoder reads: the declared columns and the event time."""
        # float64 represents every ms and us until the year 2200 exactly, and fractions of seconds; but not every ns.
        kind = pa.string() if self.time.is_text else pa.int64() if self.time.unit == "ns" else pa.float64()
        undeclared = [name for name in self.time.columns if name not in self.columns]
        return {**self.columns, **dict.fromkeys(undeclared, kind)}

    @property
    def has_time(self) -> bool:
        """Whether `textual` has the event time. The bodies of messages may lack it."""
        return all(name in self.textual for name in self.time.columns)

    def with_nulls(self, values: pa.Array, name: str) -> pa.Array:
        """Returns the values of a column, with null for the values that mean null there."""
        if words := self.nulls.get(name):
            is_text = pa.types.is_string(values.type)
            meant = pa.array(words) if is_text else arithmetic.parse(pa.array(words), values.type)
            values = pc.if_else(pc.is_in(values, meant.drop_null()), None, values)
        if self.on_nan.get(name) == "null":
            values = pc.if_else(pc.is_nan(values), None, values)
        return values

    def only(self, value: object) -> str:
        """Returns `Rejection.only` for a value of the column `rejects_by`."""
        name = self.rejects_by or ""
        if name not in self.columns or not is_constant(value, type_name(self.columns[name])):
            return ""
        if name in self.nulls and self.with_nulls(pa.array([value], self.columns[name]), name).null_count:
            return ""
        return f"{{{json.dumps(name)}:{json.dumps(value)}}}"

    def apart(self, values: pa.Table, rejected: BoolArray) -> Iterator[tuple[str, BoolArray]]:
        """Yields rejected records by their value of the column `rejects_by`: `Rejection.only`, and a mask.

        Args:
            values: the values of the columns, as far as they could be read; some columns may be absent.
        """
        if self.rejects_by not in values.column_names:
            yield "", rejected
            return
        column = values.column(self.rejects_by)
        found = pc.unique(column.filter(pa.array(rejected))).to_pylist()[:MAX_VALUES]
        rest = rejected.copy()
        for value, only in ((value, self.only(value)) for value in found):
            if only:
                equal = pc.fill_null(pc.equal(column, pa.scalar(value, column.type)), False)
                mask = rejected & equal.to_numpy(zero_copy_only=False)
                rest &= ~mask
                yield only, mask
        if rest.any():
            yield "", rest

    def empty(self) -> pa.RecordBatch:
        schema = self.output
        return pa.RecordBatch.from_arrays([pa.nulls(0, t) for t in schema.types], schema=schema)
