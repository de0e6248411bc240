"""Tasks read Parquet files with Arrow. Spark plans, schedules and retries the tasks, but passes no rows.

Passing rows from the JVM to Python takes most of a job's time. If the records are plain columns of local Parquet files,
each task gets the byte ranges that Spark would have read, under the same partition number. It reads the same rows in
the same order, so all results are equal to the byte.

Spark reads a file in all cases in which the results may differ: a plan that `scan_plan` does not accept, options of the
reader, columns that some file lacks or has with another type, and timestamps that Spark may shift (INT96, or before
1900).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame

from center.batch.compute_phase import CHUNK_ROWS, BatchJob, ComputePhase
from center.batch.scan_plan import ScanPlan, scan_plan
from edgewater.base.errors import InvalidRecord

_ARROW_TYPES: dict[str, tuple[pa.DataType, ...]] = {
    "tinyint": (pa.int8(),),
    "smallint": (pa.int16(),),
    "int": (pa.int32(),),
    "bigint": (pa.int64(),),
    "float": (pa.float32(),),
    "double": (pa.float64(),),
    "string": (pa.string(), pa.large_string()),
    "boolean": (pa.bool_(),),
    "timestamp": (pa.timestamp("us", "UTC"), pa.timestamp("ms", "UTC")),
    "timestamp_ntz": (pa.timestamp("us"), pa.timestamp("ms")),
}
"""By Spark's type, the Arrow types that files may have. Batches have the first one of these types."""
_UNSHIFTED_FROM_MS = -2_208_988_800_000  # format: Spark's old calendar ends before 1900; 1900-01-01
_PER_MS = {"ms": 1, "us": 1000}


@dataclass(frozen=True, slots=True)
class ParquetScan:
    """A scan of records that are columns of Parquet files."""

    plan: ScanPlan

    def batches(self, partition: int) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a partition.

        Raises:
            InvalidRecord: a file has changed since the scan was planned: its size or its columns differ.
        """
        used = self.plan.used
        types = {name: _ARROW_TYPES[type_][0] for name, type_ in used.items()}
        for part in self.plan.partitions[partition]:
            with pq.ParquetFile(part.path) as file:
                size = Path(part.path).stat().st_size
                if size != part.size or not _fits(file, used):
                    planned = f"{part.size} bytes and columns {', '.join(used)}"
                    raise InvalidRecord(part.path, f"{size} bytes", planned, "the file has changed")
                groups = [i for i in range(file.num_row_groups) if 0 <= _middle(file, i) - part.start < part.length]
                for batch in file.iter_batches(CHUNK_ROWS, groups, list(used), use_threads=False):
                    yield self.plan.records(batch, types)


class ScanAndCompute:
    """The compute phase over a scan, for `mapInArrow`. Each input row has the number of a partition of the scan."""

    def __init__(self, job: BatchJob, scan: ParquetScan) -> None:
        self._compute, self._scan = ComputePhase(job), scan

    def __call__(self, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        partitions = [number for batch in numbers for number in batch.column(0).to_pylist()]
        yield from self._compute(batch for number in partitions for batch in self._scan.batches(number))


def parquet_scan(records: DataFrame) -> ParquetScan | None:
    """Returns a scan whose rows are `records`, in equal partitions and order; None if Spark must read the files."""
    plan = scan_plan(records)
    fits = plan is not None and all(_footer_fits(path, plan.used) for path in plan.paths)
    return ParquetScan(plan) if plan is not None and fits else None


def _footer_fits(path: str, types: Mapping[str, str]) -> bool:
    try:
        with pq.ParquetFile(path) as file:
            return _fits(file, types)
    except (OSError, pa.ArrowException):
        return False  # Spark then reads the file and reports the error


def _fits(file: pq.ParquetFile, types: Mapping[str, str]) -> bool:
    """Returns whether each column is at the top level of the file, has this type, and has no value that Spark may
    shift.
    """
    schema = file.schema_arrow
    paths = [file.schema.column(i).path for i in range(len(file.schema))]
    for name, type_ in types.items():
        alike = [field for field in schema if field.name.lower() == name.lower()]
        if len(alike) != 1 or alike[0].name != name or paths.count(name) != 1:
            return False
        at, found = paths.index(name), alike[0].type
        if found not in _ARROW_TYPES.get(type_, ()) or file.schema.column(at).physical_type == "INT96":
            return False
        if type_.startswith("timestamp") and not _is_recent(file.metadata, at, found.unit):
            return False
    return True


def _is_recent(metadata: pq.FileMetaData, column: int, unit: str) -> bool:
    """Returns whether the statistics of the file exclude times before 1900."""
    for group in range(metadata.num_row_groups):
        chunk = metadata.row_group(group).column(column)
        statistics = chunk.statistics
        if statistics is None or not statistics.has_min_max:
            if statistics is not None and statistics.null_count == chunk.num_values:
                continue
            return False
        if statistics.min_raw < _UNSHIFTED_FROM_MS * _PER_MS[unit]:
            return False
    return True


def _middle(file: pq.ParquetFile, group: int) -> int:
    """Returns the position of a row group's middle. Spark assigns a row group to the range that contains
    this position.
    """
    chunks = [file.metadata.row_group(group).column(i) for i in range(file.metadata.num_columns)]
    first = chunks[0]
    begin = first.data_page_offset
    if first.has_dictionary_page:
        begin = min(begin, first.dictionary_page_offset)
    return int(begin + sum(chunk.total_compressed_size for chunk in chunks) // 2)
