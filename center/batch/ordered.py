"""Order-based synopses: values are numbered in event time and distributed round-robin to parts. A manager has the parts
of a window and forwards questions by index to them (Condor, sections 5.1 and 6.2).

Numbering is serial. Spark sorts a window's records in one task, as Condor buffers them in one task. If windows overlap,
Spark sorts all records of a stratum in one task. All other steps are parallel. Value n goes to part n mod P.

A window that begins with value g has its value i in part (g + i) mod P. This part is registered under the number
i mod P, which is the rule of the manager. The slices of one part are consecutive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from center.batch.compute_phase import BatchJob, millis_of, with_times
from center.batch.inputs import BatchInput, default_partitions, number_in_order
from center.batch.layout import timestamp
from center.batch.merge_phase import stratum_of
from center.batch.slice_states import numbers, record_batches
from center.batch.strategy import Strategy
from center.batch.windows import Family, grid_of
from center.spark.workers import settle
from edgewater.model.windows import SlidingWindow
from edgewater.synopses import GeneralManager, IntArray, SliceManager, from_bytes


def build_ordered(job_input: BatchInput, job: BatchJob, chosen: Strategy) -> DataFrame:
    """Builds a manager per window and stratum. The arguments were checked by `build`."""
    layout = job_input.layout
    tasks = default_partitions(job_input.records)
    parts = chosen.partitions or tasks
    keys = [F.col(k) for k in layout.keys]
    sliced = _sliced(job_input, job, keys)
    # Overlapping windows share slices, so the numbering must continue from slice to slice.
    within = keys if job.slides else [*keys, F.col("_slice")]
    numbered = sliced.withColumn("_n", number_in_order(job_input, within))
    dealt = numbered.withColumn("_p", F.pmod(F.col("_n"), F.lit(parts)))
    place = [*keys, F.col("_slice"), F.col("_p")]
    placed = dealt.repartition(tasks, *place).sortWithinPartitions(*place, F.col("_n"))
    columns = placed.select(*keys, "_slice", "_p", "_n", "_t", "_v0")
    partials = columns.mapInArrow(_PartBuilder(job), from_arrow_schema(layout.partial_schema))
    order = [*keys, F.col("block"), F.col("slice_start"), F.col("part")]
    gathered = partials.repartition(tasks, *keys, "block").sortWithinPartitions(*order)
    return gathered.mapInArrow(_ManagerBuilder(job, parts), from_arrow_schema(layout.result_schema))


def _sliced(job_input: BatchInput, job: BatchJob, keys: list[Column]) -> DataFrame:
    """Returns the records with the start of their slice. For bucketing, a record has one row per window that contains
    it.
    """
    records, window = job_input.records, job.window
    grid = grid_of(window)
    if grid is None:
        return records.withColumn("_slice", F.lit(0).cast("bigint"))
    if job.family is Family.COUNT:
        number = number_in_order(job_input, keys)
        return records.withColumn("_slice", number - F.pmod(number, F.lit(grid.slice_ms)))
    millis = _millis(records)
    if not job.by_windows or not isinstance(window, SlidingWindow) or window.is_tumbling:
        start = millis - F.pmod(millis - F.lit(grid.origin_ms), F.lit(grid.slice_ms))
        return records.withColumn("_slice", start.cast("bigint"))
    last = millis - F.pmod(millis - F.lit(window.offset_ms), F.lit(window.every_ms))
    spread = [last - F.lit(back) for back in range(0, window.size_ms, window.every_ms)]
    exploded = records.withColumn("_slice", F.explode(F.array(*spread)))
    return exploded.where(F.col("_slice").isNull() | (F.col("_slice") + F.lit(window.size_ms) > millis))


def _millis(records: DataFrame) -> Column:
    job_input = dict(records.dtypes)["_t"]
    if job_input == "bigint":
        return F.col("_t")
    if job_input == "timestamp":
        return F.unix_millis(F.col("_t"))
    return F.expr("timestampdiff(MILLISECOND, timestamp_ntz'1970-01-01 00:00:00', _t)")


class _PartBuilder:
    """Builds the synopsis of each slice and part, for `mapInArrow`. Rows arrive sorted by stratum, slice, part and
    number.
    """

    def __init__(self, job: BatchJob) -> None:
        self._job = job

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        settle()
        layout = self._job.layout
        yield from record_batches(layout.partial_schema, len(layout.strata), self._partials(batches))

    def _partials(self, batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[list[Any], dict[str, Any]]]:
        """Yields the row of each part, for each block of windows."""
        for (*key, start, _), runs in groupby(self._read(batches), lambda run: run.place):
            synopsis, first = self._job.pattern.fresh(), next(runs)
            last_ms = records = 0
            for run in chain([first], runs):
                synopsis.update(run.values, times=run.times)
                last_ms, records = int(run.times[-1]), records + len(run.times)
            row = {
                "slice_start": start,
                "part": first.number,
                "first_ms": int(first.times[0]),
                "last_ms": last_ms,
                "records": records,
                "nulls": 0,
                "synopsis": synopsis.to_bytes(),
            }
            for block in self._job.blocks_of(start):
                yield key, row | {"block": block}

    def _read(self, batches: Iterator[pa.RecordBatch]) -> Iterator[_Run]:
        for batch in batches:
            *keys, slices, parts, numbered, times, values = batch.columns
            times = with_times(times, str(self._job.layout.time))
            for begin, end in _runs([*keys, slices, parts]):
                place = stratum_of(c[begin].as_py() for c in (*keys, slices, parts))
                yield _Run(place, numbered[begin].as_py(), values[begin:end], millis_of(times[begin:end]))


class _Run(NamedTuple):
    """Adjacent rows of one stratum, slice and part."""

    place: tuple[Any, ...]
    number: int
    values: pa.Array
    times: IntArray


def _runs(columns: list[pa.Array]) -> Iterator[tuple[int, int]]:
    """Yields [begin, end) of each run of rows that are equal in all columns."""
    rows = len(columns[0])
    changes = np.ones(rows + 1, bool)
    changes[1:rows] = False
    for column in columns:
        codes = numbers(column.dictionary_encode(null_encoding="encode").indices)
        changes[1:rows] |= codes[1:] != codes[:-1]
    borders = np.flatnonzero(changes).tolist() if rows else []
    yield from pairwise(borders)


class _ManagerBuilder:
    """Builds the managers of windows, for `mapInArrow`. Rows arrive sorted by stratum, block, slice and
    first number.
    """

    def __init__(self, job: BatchJob, parts: int) -> None:
        self._job, self._parts = job, parts

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        settle()
        layout = self._job.layout
        listed = (row for batch in batches for row in batch.to_pylist())
        keys = (*layout.keys, "block")
        rows = (
            (key, {"nulls": 0} | result)
            for (*key, block), held in groupby(listed, lambda r: stratum_of(r[k] for k in keys))
            for result in self._windows(block, list(held))
        )
        yield from record_batches(layout.result_schema, len(layout.strata), rows)

    def _windows(self, block: int, held: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        decoded = [from_bytes(r["synopsis"]) for r in held]
        if not self._job.slides:
            for _, same in groupby(zip(held, decoded, strict=True), lambda p: p[0]["slice_start"]):
                listed = list(same)
                start, end = self._bounds([r for r, _ in listed])
                yield self._result(start, end, listed)
            return
        grid, counted = self._job.grid, self._job.family is Family.COUNT
        first = grid.offset_ms + block * self._job.block_ms
        starts = {w for r in held for w in grid.windows_of_slice(r["slice_start"])}
        for start in sorted(w for w in starts if first <= w < first + self._job.block_ms):
            end = start + grid.size_ms
            inside = [p for p in zip(held, decoded, strict=True) if start <= p[0]["slice_start"] < end]
            if not counted:
                yield self._result(start, end, inside)
            elif start >= 0:  # count windows begin at the first record
                yield self._result(*self._bounds([r for r, _ in inside]), inside)

    def _bounds(self, rows: list[dict[str, Any]]) -> tuple[int, int]:
        start = rows[0]["slice_start"]
        if isinstance(self._job.window, SlidingWindow):
            return start, start + self._job.window.size_ms
        return min(r["first_ms"] for r in rows), max(r["last_ms"] for r in rows) + 1

    def _result(self, start: int, end: int, parts: Iterable[tuple[dict[str, Any], Any]]) -> dict[str, Any]:
        listed = list(parts)
        first = min(row["part"] for row, _ in listed)
        manager = GeneralManager(self._parts)
        of_part: dict[int, list[tuple[int, Any]]] = {}
        for row, synopsis in listed:
            of_part.setdefault((row["part"] - first) % self._parts, []).append((row["slice_start"], synopsis))
        for number, slices in of_part.items():
            manager.register(number, SliceManager(slices) if self._job.slides else slices[0][1])
        return {
            "window_start": timestamp(start),
            "window_end": timestamp(end),
            "synopsis": manager.to_bytes(),
            "records": sum(row["records"] for row, _ in listed),
        }
