"""Warms up Spark's Python workers before the job is ready.

Spark starts Python workers when a task first needs them, and each loads PySpark, Arrow and the center's modules. That
takes several seconds, by which the first answers would be late.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

import center.job.frame_source  # noqa: F401  (loaded by readers: loaded after `settle`, every collection would scan it)
from center.job.merge import merge_rows
from center.job.rows import ROW_DDL, FrameRow, RowKind, to_batch
from center.spark.workers import settle
from edgewater.synopses import CountStack, GroupedAggregate

ROUNDS = 2
PARTIALS = 64


class MergeTask:
    """Merges partials of its own, as `FrameReader.read` does, so that a worker loads and runs the code of a batch."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        aggregate = GroupedAggregate({"key": pa.string()}, {"n": CountStack()})
        aggregate.update([pa.array(["a", "b"])], {"n": None}, 2)
        rows = [FrameRow("", n, RowKind.PARTIAL, "", "", 0, 0, aggregate.to_bytes(), 0, 0) for n in range(1, PARTIALS)]
        settle()
        yield to_batch(merge_rows(rows))


def warm_up(spark: Any, cores: int) -> None:
    """Runs a batch of generated partials on every core."""
    for _ in range(ROUNDS):
        spark.range(0, cores, 1, cores).mapInArrow(MergeTask(), ROW_DDL).toArrow()
