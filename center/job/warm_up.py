"""Warms up Spark's Python workers before the job is ready, and checks whether executors can do its work.

Spark starts Python workers when a task first needs them, and each loads PySpark, Arrow and the center's modules. That
takes several seconds, by which the first answers would be late.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pyarrow as pa

import center.job.frame_source  # noqa: F401  (loaded by readers: loaded after `settle`, every collection would scan it)
from center.job.merge import merge_rows
from center.job.rows import ROW_DDL, row_of_partial, to_batch
from center.spark.workers import settle
from edgewater.synopses import CountStack, GroupedAggregate

ROUNDS = 2
PARTIALS = 64
DISTRIBUTION = "edgewater"


class MergeTask:
    """Merges partials of its own, as `FrameReader.read` does, so that a worker loads and runs the code of a batch."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        aggregate = GroupedAggregate({"key": pa.string()}, {"n": CountStack()})
        aggregate.update([pa.array(["a", "b"])], {"n": None}, 2)
        rows = [row_of_partial("", n, 0, aggregate.to_bytes()) for n in range(1, PARTIALS)]
        settle()
        yield to_batch(merge_rows(rows))


def warm_up(spark: Any, cores: int) -> None:
    """Runs a batch of generated partials on every core."""
    for _ in range(ROUNDS):
        spark.range(0, cores, 1, cores).mapInArrow(MergeTask(), ROW_DDL).toArrow()


def installed_on_executors(spark: Any, cores: int, distribution: str = DISTRIBUTION) -> dict[str, str]:
    """Returns the version of a distribution by executor host; empty: it is not installed there.

    Raises PySparkException if executors have another Python, or no Arrow.
    """

    def probe(batches: Any) -> Any:  # a nested function is sent as code, so executors need none of our modules
        import platform
        from importlib.metadata import PackageNotFoundError, version

        import pyarrow as pa

        for _ in batches:
            pass
        try:
            found = version(distribution)
        except PackageNotFoundError:
            found = ""
        yield pa.RecordBatch.from_arrays([pa.array([platform.node()]), pa.array([found])], ["host", "version"])

    rows = spark.range(0, cores, 1, cores).mapInArrow(probe, "host string, version string").toArrow().to_pylist()
    return {row["host"]: row["version"] for row in rows}


def problem_of_executors(spark: Any, cores: int, distribution: str = DISTRIBUTION) -> str:
    """Returns why executors cannot do the job's work, and what to do; empty: they can, or this is no installed release.

    Raises PySparkException if executors have another Python, or no Arrow.
    """
    try:
        wanted = version(DISTRIBUTION)
    except PackageNotFoundError:
        return ""
    for host, found in sorted(installed_on_executors(spark, cores, distribution).items()):
        if found != wanted:
            has = f"{distribution} {found}" if found else f"no {distribution}"
            return (
                f"the Python of the executors on {host} has {has}; expected {wanted}, as here. Install it there at the"
                " same path, or ship it with spark.archives: see docs/reference/center.md"
            )
    return ""
