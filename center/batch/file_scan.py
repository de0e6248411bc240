"""Tasks read the records of files with Arrow. If Spark read them, Spark would pass each row to Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from center.batch import parquet_scan, text_scan
from center.batch.compute_phase import BatchJob, Compute
from center.batch.scan_plan import ScanPlan, scan_plan


class FileScan(Protocol):
    """Files that a task reads with the same result as Spark: equal rows in equal partitions and order."""

    @property
    def plan(self) -> ScanPlan: ...

    def batches(self, partition: int) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a partition.

        Raises:
            InvalidRecord: a file has changed since the scan was planned.
        """


_FORMATS: dict[str, Callable[[SparkSession, ScanPlan], FileScan | None]] = {
    parquet_scan.FORMAT: parquet_scan.parquet_scan,
    text_scan.CSV: text_scan.text_scan,
    text_scan.JSON: text_scan.text_scan,
}


def file_scan(records: DataFrame) -> FileScan | None:
    """Returns a scan whose rows are `records`, or None if Spark must read the files."""
    plan = scan_plan(records)
    read = None if plan is None else _FORMATS.get(plan.file_format)
    return None if plan is None or read is None else read(records.sparkSession, plan)


class ScanAndCompute:
    """The compute phase over a scan, for `mapInArrow`. Each input row has the number of a partition of the scan."""

    def __init__(self, job: BatchJob, scan: FileScan) -> None:
        self._compute, self._scan = Compute(job), scan

    def __call__(self, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        partitions = [number for batch in numbers for number in batch.column(0).to_pylist()]
        yield from self._compute(batch for number in partitions for batch in self._scan.batches(number))
