"""The records a stream takes: its columns, and where event time is found in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from edgewater.streams import TIME_COLUMN

TimeUnit = Literal["ms", "s", "us", "iso8601"]

DAY_MS = 86_400_000
YEAR_2000_MS = 946_684_800_000
YEAR_2200_MS = 7_258_118_400_000
"""No event time is later than this, whatever the clock: it keeps the units apart (one second in
another unit lies at least a factor of 1000 away) and arithmetic far from overflow."""


@dataclass(frozen=True, slots=True)
class EventTime:
    """Where a record's event time is, and what is plausible.

    Attributes:
        column: name of the column in the input; need not be among the stream's columns.
        unit: of numbers; or iso8601, text such as 2013-01-01T05:15:00Z (without a zone: UTC).
        min_ms: event times before this are refused.
        max_skew_ms: how far event time may be ahead of the arrival; None: no such check (replays).
    """

    column: str
    unit: TimeUnit = "ms"
    min_ms: int = YEAR_2000_MS
    max_skew_ms: int | None = DAY_MS

    def latest_ms(self, arrival_ms: int) -> int:
        """The latest plausible event time of a record that arrives at `arrival_ms`."""
        if self.max_skew_ms is None:
            return YEAR_2200_MS
        return min(YEAR_2200_MS, arrival_ms + self.max_skew_ms)


@dataclass(frozen=True, slots=True)
class RecordSchema:
    """What a decoder makes of its input."""

    columns: Mapping[str, pa.DataType]
    time: EventTime

    @property
    def output(self) -> pa.Schema:
        """The schema of every decoded batch."""
        return pa.schema([*self.columns.items(), (TIME_COLUMN, pa.int64())])

    @property
    def textual(self) -> dict[str, pa.DataType]:
        """Column -> type that a text decoder reads: the declared ones and the time."""
        if self.time.column in self.columns:
            return dict(self.columns)
        # float64 holds every ms and us until the year 2200 exactly, and fractions of seconds.
        return {**self.columns, self.time.column: pa.string() if self.time.unit == "iso8601" else pa.float64()}

    def empty(self) -> pa.RecordBatch:
        schema = self.output
        return pa.RecordBatch.from_arrays([pa.nulls(0, t) for t in schema.types], schema=schema)
