"""Scans of Parquet files that tasks read with Arrow: Spark plans, schedules and retries them, but passes no rows.

Handing rows from the JVM to Python takes most of a job's time. If the records are plain columns of local Parquet files,
each task gets the byte ranges that Spark would have read itself, under the same partition number, and reads the same
rows in the same order, so all results are equal to the byte. Filters may compare whole numbers and texts with
constants. Whatever is not known to be read equally is left to Spark: other formats, file systems, options, operators
and filters, partition columns, casts that are not exact, columns that some file lacks or has of another type,
timestamps that Spark may shift (INT96, or before 1900).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from center.batch.compute_phase import CHUNK_ROWS, BatchJob, Compute
from edgewater.errors import InvalidRecord

MAX_FILES = 1 << 12
"""Files whose footers are read before a job; a scan of more is left to Spark."""

_FORMAT = "org.apache.spark.sql.execution.datasources.parquet.ParquetFileFormat"
_EXACT_CASTS = {("tinyint", "bigint"), ("smallint", "bigint"), ("int", "bigint"), ("float", "double")}
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
"""Spark's type -> those that files may have; batches have the first one."""
_WHOLE = ("tinyint", "smallint", "int", "bigint")
_COMPARISONS = {
    "EqualTo": pc.equal,
    "LessThan": pc.less,
    "LessThanOrEqual": pc.less_equal,
    "GreaterThan": pc.greater,
    "GreaterThanOrEqual": pc.greater_equal,
}
_UNSHIFTED_FROM_MS = -2_208_988_800_000  # 1900-01-01
_PER_MS = {"ms": 1, "us": 1000}
_MUST_BE_FALSE = (
    "spark.sql.files.ignoreCorruptFiles",
    "spark.sql.files.ignoreMissingFiles",
    "spark.sql.parquet.mergeSchema",
    "spark.sql.parquet.fieldId.read.enabled",
)


@dataclass(frozen=True, slots=True)
class FileRange:
    """A range of a file's bytes; the row groups whose middle lies in it belong to it. `size`: of the whole file."""

    path: str
    start: int
    length: int
    size: int


@dataclass(frozen=True, slots=True)
class Condition:
    """A column's value is not null, and `comparison` with `value` holds unless that is None."""

    column: str
    comparison: str = "IsNotNull"
    value: int | str | None = None

    def of(self, table: pa.RecordBatch) -> pa.Array:
        column = table.column(self.column)
        return column.is_valid() if self.value is None else _COMPARISONS[self.comparison](column, self.value)


@dataclass(frozen=True, slots=True)
class ParquetScan:
    """Records that are columns of Parquet files.

    Attributes:
        columns: names in the files, in the order of the job's columns.
        types: name in the files -> Spark's type, of these columns and of those of the conditions.
        conditions: which rows are records.
        partitions: the ranges that each partition reads, in this order.
    """

    columns: tuple[str, ...]
    types: dict[str, str]
    conditions: tuple[Condition, ...]
    partitions: tuple[tuple[FileRange, ...], ...]

    def batches(self, partition: int) -> Iterator[pa.RecordBatch]:
        """Reads the rows of a partition.

        Raises:
            InvalidRecord: a file has changed, and has another size or other columns than were planned.
        """
        for part in self.partitions[partition]:
            with pq.ParquetFile(part.path) as file:
                size = Path(part.path).stat().st_size
                if size != part.size or not _fits(file, self.types):
                    planned = f"{part.size} bytes and columns {', '.join(self.types)}"
                    raise InvalidRecord(part.path, f"{size} bytes", planned, "the file has changed")
                groups = [i for i in range(file.num_row_groups) if 0 <= _middle(file, i) - part.start < part.length]
                for batch in file.iter_batches(CHUNK_ROWS, groups, list(self.types), use_threads=False):
                    yield self._records(batch)

    def _records(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        for condition in self.conditions:
            batch = batch.filter(condition.of(batch))
        columns = [batch.column(name).cast(_ARROW_TYPES[self.types[name]][0]) for name in self.columns]
        return pa.RecordBatch.from_arrays(columns, [str(i) for i in range(len(columns))])


class ScanAndCompute:
    """The compute phase over a scan, for `mapInArrow` over the numbers of its partitions, one in each."""

    def __init__(self, job: BatchJob, scan: ParquetScan) -> None:
        self._compute, self._scan = Compute(job), scan

    def __call__(self, numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        partitions = [number for batch in numbers for number in batch.column(0).to_pylist()]
        yield from self._compute(batch for number in partitions for batch in self._scan.batches(number))


def parquet_scan(records: DataFrame) -> ParquetScan | None:
    """Returns the scan that gives these records, in equal partitions and order; None: Spark must read them."""
    conf, frame = records.sparkSession.conf, getattr(records, "_jdf", None)  # None: of Spark Connect
    if frame is None or records.isStreaming or any(conf.get(n, "false") != "false" for n in _MUST_BE_FALSE):
        return None
    try:
        return _scan_of(frame.queryExecution())
    except (Py4JError, PySparkException):
        return None  # Spark says what is wrong when it reads, such as a file that is gone


def _scan_of(execution: Any) -> ParquetScan | None:
    plan, outputs, conditions = execution.optimizedPlan(), None, []
    if _name(plan) == "Project":
        outputs, plan = _listed(plan.projectList()), plan.child()
    if _name(plan) == "Filter":
        conditions, plan = _conditions(plan.condition()), plan.child()
    columns = [_column(output) for output in (_listed(plan.output()) if outputs is None else outputs)]
    if _name(plan) != "LogicalRelation" or None in columns or None in conditions or not _is_plain(plan):
        return None
    leaves = _listed(execution.executedPlan().collectLeaves())
    if [_name(leaf) for leaf in leaves] != ["FileSourceScanExec"]:
        return None
    partitions = [_ranges(partition) for partition in leaves[0].inputRDD().partitions()]
    if None in partitions:
        return None
    known = {attribute.name(): attribute.dataType().simpleString() for attribute in _listed(plan.output())}
    names = [name for name in columns if name is not None]
    used = {name: known[name] for name in (*names, *(c.column for c in conditions if c is not None))}
    found = ParquetScan(
        tuple(names), used, tuple(c for c in conditions if c), tuple(part for part in partitions if part is not None)
    )
    return found if names and _all_fit(found) else None


def _listed(sequence: Any) -> list[Any]:
    """Returns the items of a Scala sequence."""
    return [sequence.apply(i) for i in range(sequence.size())]


def _name(node: Any) -> str:
    return str(node.getClass().getSimpleName())


def _column(expression: Any) -> str | None:
    """Returns the name in the files of a column, renamed or cast exactly; None: it is something else."""
    if _name(expression) == "Alias":
        expression = expression.child()
    if _name(expression) == "Cast":
        child = expression.child()
        if (child.dataType().simpleString(), expression.dataType().simpleString()) not in _EXACT_CASTS:
            return None
        expression = child
    return str(expression.name()) if _name(expression) == "AttributeReference" else None


def _conditions(expression: Any) -> list[Condition | None]:
    """Returns the conditions of which all must hold; None for one that only Spark evaluates."""
    kind = _name(expression)
    if kind == "And":
        return [*_conditions(expression.left()), *_conditions(expression.right())]
    if kind == "IsNotNull" and _name(expression.child()) == "AttributeReference":
        return [Condition(str(expression.child().name()))]
    if kind not in _COMPARISONS:
        return [None]
    column, constant = expression.left(), expression.right()
    if _name(column) != "AttributeReference" or _name(constant) != "Literal" or constant.value() is None:
        return [None]
    type_ = column.dataType().simpleString()
    if type_ in _WHOLE:
        return [Condition(str(column.name()), kind, int(constant.value()))]
    if type_ == "string" and kind == "EqualTo":
        return [Condition(str(column.name()), kind, str(constant.value().toString()))]
    return [None]


def _is_plain(node: Any) -> bool:
    """Returns whether a relation is Parquet files, and nothing says how to read them."""
    relation = node.relation()
    return bool(
        _name(relation) == "HadoopFsRelation"
        and relation.fileFormat().getClass().getName() == _FORMAT
        and relation.partitionSchema().isEmpty()
        and relation.bucketSpec().isEmpty()
        and node.catalogTable().isEmpty()
        and all(key == "path" for key in _listed(relation.options().keys().toSeq()))
    )


def _ranges(partition: Any) -> tuple[FileRange, ...] | None:
    """Returns the ranges of a partition; None: they are not in local files."""
    found = []
    for file in partition.files():
        uri = file.filePath().toUri()
        if uri.getScheme() != "file":
            return None
        found.append(FileRange(str(uri.getPath()), int(file.start()), int(file.length()), int(file.fileSize())))
    return tuple(found)


def _all_fit(scan: ParquetScan) -> bool:
    paths = sorted({part.path for ranges in scan.partitions for part in ranges})
    return 0 < len(paths) <= MAX_FILES and all(_footer_fits(path, scan.types) for path in paths)


def _footer_fits(path: str, types: Mapping[str, str]) -> bool:
    try:
        with pq.ParquetFile(path) as file:
            return _fits(file, types)
    except (OSError, pa.ArrowException):
        return False  # Spark says what is wrong with it


def _fits(file: pq.ParquetFile, types: Mapping[str, str]) -> bool:
    """Returns whether each column is at the top of the file, has this type, and no value that Spark may shift."""
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
    """Returns whether the statistics say that no time is before 1900."""
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
    """Returns the position of a row group's middle, by which Spark assigns row groups to ranges."""
    chunks = [file.metadata.row_group(group).column(i) for i in range(file.metadata.num_columns)]
    first = chunks[0]
    begin = first.data_page_offset
    if first.has_dictionary_page:
        begin = min(begin, first.dictionary_page_offset)
    return int(begin + sum(chunk.total_compressed_size for chunk in chunks) // 2)
