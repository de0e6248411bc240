"""The columns of the tables that one phase of a job passes to the next phase."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from edgewater.base.streams import COLUMN_TYPES

SPARK_TYPES = {"string": "string", "int64": "bigint", "float64": "double", "bool": "boolean"}
"""Spark's name of each column type."""

TIMESTAMP = pa.timestamp("us", tz="UTC")
RESULT_COLUMNS = ("window_start", "window_end", "synopsis", "records", "nulls")
"""The columns of `build`'s result, after the strata."""
FORMER_COLUMNS = ("revision", "late")
"""Further columns of the results of releases up to 0.3."""

_PARTIAL = ("slice_start", "block", "part", "first_ms", "last_ms", "records", "nulls")


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """The columns of a job's records: strata, values, then the time and the record number, if the job has them.

    Attributes:
        strata: name and type name of each column of `stratify_by`.
        values: type names of the values. There is one value, or a grouped aggregate's keys and arguments.
        value_names: the user's names of the values, for error messages.
        time: the user's name of the time column; None without a time column.
        numbered: whether records have a number in event time.
    """

    strata: tuple[tuple[str, str], ...]
    values: tuple[str, ...]
    value_names: tuple[str, ...]
    time: str | None = None
    numbered: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of the strata between the phases. They differ from all other column names."""
        return tuple(f"_s{i}" for i in range(len(self.strata)))

    @property
    def stratum_types(self) -> tuple[pa.DataType, ...]:
        return tuple(COLUMN_TYPES[t] for _, t in self.strata)

    @property
    def partial_schema(self) -> pa.Schema:
        """The schema of partials: strata, then a slice's counters and bytes."""
        fields = [pa.field(k, t) for k, t in zip(self.keys, self.stratum_types, strict=True)]
        fields += [pa.field(name, pa.int64()) for name in _PARTIAL]
        return pa.schema([*fields, pa.field("synopsis", pa.binary())])

    @property
    def result_schema(self) -> pa.Schema:
        fields = [pa.field(k, t) for k, t in zip(self.keys, self.stratum_types, strict=True)]
        fields += [pa.field("window_start", TIMESTAMP), pa.field("window_end", TIMESTAMP)]
        fields += [pa.field("synopsis", pa.binary())]
        return pa.schema([*fields, *(pa.field(n, pa.int64()) for n in ("records", "nulls"))])


def timestamp(millis: int | None) -> int | None:
    """Converts ms to the µs of Arrow and Spark timestamps."""
    return None if millis is None else millis * 1000
