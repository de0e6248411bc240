"""Traces, the records that a simulation replays, and the traces of the benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from edgewater.model.errors import InvalidRequest
from edgewater.model.streams import TIME_COLUMN
from edgewater.synopses import FloatArray, IntArray, KeyTable

ZIPF_EXPONENT = 1.1


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

    def split(self, edges: int, seed: int = 0) -> list[Trace]:
        """Returns one trace per edge. Each record is assigned to a random edge, so every edge has every group."""
        if edges == 1:
            return [self]
        home = np.random.default_rng(seed).integers(0, edges, len(self))
        return [self.rows(np.flatnonzero(home == edge)) for edge in range(edges)]


def _array(values: Any) -> pa.Array:
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    array = values if isinstance(values, pa.Array) else pa.array(values)
    if pa.types.is_integer(array.type):
        return array.cast(pa.int64())
    return array.cast(pa.float64()) if pa.types.is_floating(array.type) else array


def zipf(
    windows: int,
    window_ms: int,
    *,
    records: int = 100_000,
    groups: int = 40_000,
    sigma: float = 1.5,
    exponent: float = ZIPF_EXPONENT,
    seed: int = 1,
) -> Trace:
    """Returns `records` per window at uniform times, with Zipf-distributed groups and lognormal values.

    With the defaults, about 13,500 of the groups occur in a window.
    """
    rng = np.random.default_rng(seed)
    weights = np.arange(1, groups + 1) ** -exponent
    total = windows * records
    times = np.sort(rng.integers(0, windows * window_ms, total))
    keys = rng.choice(groups, total, p=weights / weights.sum())
    return Trace.from_columns(times, {"key": keys}, {"value": np.exp(rng.normal(10.0, sigma, total))})


RHYTHM_RATIO = 12.0
RHYTHM_ACTIVE = 0.25
RHYTHM_DRIFT = 0.1


def rhythm(
    windows: int, window_ms: int, *, records: int = 100_000, groups: int = 40_000, sigma: float = 1.5, seed: int = 1
) -> Trace:
    """Returns up to `records` per window, like `zipf` but with a rhythm that repeats in every window.

    The rate rises and falls by a factor of 12 within a window. Each group occurs in only one quarter of the window, and
    each group has its own phase. From window to window its weight is multiplied by a lognormal factor of 0.1.
    """
    rng = np.random.default_rng(seed)
    weights = np.arange(1, groups + 1) ** -ZIPF_EXPONENT
    begin, drift = rng.random(groups), np.zeros(groups)
    times, keys = [], []
    for number in range(windows):
        drift += rng.normal(0.0, RHYTHM_DRIFT, groups)
        weight = weights * np.exp(drift)
        key = rng.choice(groups, 3 * records, p=weight / weight.sum())
        phase = (begin[key] + RHYTHM_ACTIVE * rng.random(len(key))) % 1.0
        rate = 1.0 + (RHYTHM_RATIO - 1.0) * (1.0 - np.cos(2.0 * np.pi * phase)) / 2.0
        chosen = np.flatnonzero(rng.random(len(key)) < rate / RHYTHM_RATIO)[:records]
        times.append(number * window_ms + np.minimum(phase[chosen] * window_ms, window_ms - 1).astype(np.int64))
        keys.append(key[chosen])
    at = np.concatenate(times)
    values = np.exp(rng.normal(10.0, sigma, len(at)))
    return Trace.from_columns(at, {"key": np.concatenate(keys)}, {"value": values})


CRAN_KEYS = ("package", "version", "country")


def cran(directory: Path, days: Sequence[str] | None = None) -> Trace:
    """Returns RStudio's CRAN download logs: bytes by package, version and country.

    The files have the rows of each hour in random order; the trace has them in order of time, like the log of an edge.

    Raises:
        InvalidRequest: the directory has no such files.
    """
    paths = sorted(p for p in directory.glob("*.csv.gz") if days is None or p.name.removesuffix(".csv.gz") in days)
    if not paths:
        raise InvalidRequest("trace", str(directory), "a directory with days of CRAN logs, such as 2015-01-05.csv.gz")
    options = pyarrow.csv.ConvertOptions(
        include_columns=["date", "time", "size", *CRAN_KEYS],
        column_types={
            "date": pa.string(),
            "time": pa.string(),
            "size": pa.int64(),
            **dict.fromkeys(CRAN_KEYS, pa.string()),
        },
        strings_can_be_null=False,
    )
    table = pa.concat_tables([pyarrow.csv.read_csv(p, convert_options=options) for p in paths])
    stamps = pc.binary_join_element_wise(table["date"], table["time"], " ")
    times = pc.strptime(stamps, "%Y-%m-%d %H:%M:%S", "ms").cast(pa.int64())
    return Trace.from_columns(times.to_numpy(), {k: table[k] for k in CRAN_KEYS}, {"size": table["size"]})
