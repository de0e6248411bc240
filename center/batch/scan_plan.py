"""Reads which Parquet files, columns and filters a scan has from Spark's plans, if the records are only a scan.

Spark lists the files and cuts them into ranges, a list of ranges per partition. Columns may be renamed, or cast from a
narrower number. Filters may require values that are not null. Records with any other operation have no
`ScanPlan`: other operators, casts that are not exact, partition columns, catalog tables, files that are not local.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

MAX_FILES = 1 << 12
"""The most files that are checked before a job. If a scan has more files, Spark reads them."""

_EXACT_CASTS = {("tinyint", "bigint"), ("smallint", "bigint"), ("int", "bigint"), ("float", "double")}
_FILE_RANGE = re.compile(r"path: (file:/\S*), range: (\d+)-(\d+), partition values: \[empty row\]")
"""A range in the text of Spark's `PartitionedFile`. The path is encoded as in a URI."""
_MUST_BE_FALSE = (
    "spark.sql.files.ignoreCorruptFiles",
    "spark.sql.files.ignoreMissingFiles",
    "spark.sql.parquet.mergeSchema",
    "spark.sql.parquet.fieldId.read.enabled",
)
_PARQUET = "org.apache.spark.sql.execution.datasources.parquet.ParquetFileFormat"


@dataclass(frozen=True, slots=True)
class FileRange:
    """A range of a file's bytes. A row group belongs to the range that contains the row group's middle.

    Attributes:
        size: size of the whole file in bytes.
    """

    path: str
    start: int
    length: int
    size: int


@dataclass(frozen=True, slots=True)
class ScanPlan:
    """A scan of Parquet files.

    Attributes:
        fields: name and Spark's type of each column of the files, in the order of the files.
        columns: for each column of the records, its name in the files.
        not_null: columns that have a value in each row that is a record.
        partitions: the ranges that each partition reads, in this order.
    """

    fields: tuple[tuple[str, str], ...]
    columns: tuple[str, ...]
    not_null: tuple[str, ...]
    partitions: tuple[tuple[FileRange, ...], ...]

    @property
    def used(self) -> dict[str, str]:
        """Spark's type of each column of the files that the records or `not_null` need."""
        known = dict(self.fields)
        return {name: known[name] for name in (*self.columns, *self.not_null)}

    @property
    def paths(self) -> list[str]:
        return sorted({part.path for ranges in self.partitions for part in ranges})

    def records(self, batch: pa.RecordBatch, types: dict[str, pa.DataType]) -> pa.RecordBatch:
        """Returns the records of a batch of rows.

        Args:
            types: Arrow type of each column, by its name in the files.
        """
        for name in self.not_null:
            batch = batch.filter(batch.column(name).is_valid())
        columns = [batch.column(name).cast(types[name]) for name in self.columns]
        return pa.RecordBatch.from_arrays(columns, [str(i) for i in range(len(columns))])


def scan_plan(records: DataFrame) -> ScanPlan | None:
    """Returns a scan whose rows are `records`, in equal partitions and order; None if the records are more
    than a scan.
    """
    conf, frame = records.sparkSession.conf, getattr(records, "_jdf", None)  # None: of Spark Connect
    if frame is None or records.isStreaming or any(conf.get(n, "false") != "false" for n in _MUST_BE_FALSE):
        return None
    try:
        return _plan_of(frame.queryExecution(), records.sparkSession._jvm)
    except (OSError, Py4JError, PySparkException):
        return None  # Spark then reads the files and reports the error, such as a missing file


def _plan_of(execution: Any, jvm: Any) -> ScanPlan | None:
    plan, outputs = execution.optimizedPlan(), None
    not_null: list[str | None] = []
    if _name(plan) == "Project":
        outputs, plan = _listed(plan.projectList()), plan.child()
    if _name(plan) == "Filter":
        not_null, plan = _not_null(plan.condition()), plan.child()
    columns = [_column(output) for output in (_listed(plan.output()) if outputs is None else outputs)]
    if _name(plan) != "LogicalRelation" or None in columns or None in not_null or not _is_plain(plan):
        return None
    leaves = _listed(execution.executedPlan().collectLeaves())
    if [_name(leaf) for leaf in leaves] != ["FileSourceScanExec"]:
        return None
    partitions = _partitions(leaves[0], jvm)
    if partitions is None or not columns:
        return None
    relation = plan.relation()
    options = {str(name).lower() for name in _listed(relation.options().keys().toSeq())}
    if relation.fileFormat().getClass().getName() != _PARQUET or options - {"path"}:
        return None
    schema = StructType.fromJson(json.loads(relation.dataSchema().json()))
    found = ScanPlan(
        tuple((field.name, field.dataType.simpleString()) for field in schema),
        tuple(name for name in columns if name is not None),
        tuple(name for name in not_null if name is not None),
        partitions,
    )
    known = [name for name, _ in found.fields]
    named = all(known.count(name) == 1 for name in (*found.columns, *found.not_null))
    return found if named and 0 < len(found.paths) <= MAX_FILES else None


def _listed(sequence: Any) -> list[Any]:
    """Returns the items of a Scala sequence."""
    return [sequence.apply(i) for i in range(sequence.size())]


def _name(node: Any) -> str:
    return str(node.getClass().getSimpleName())


def _column(expression: Any) -> str | None:
    """Returns the name in the files of a column that is only renamed or cast exactly; else None."""
    if _name(expression) == "Alias":
        expression = expression.child()
    if _name(expression) == "Cast":
        child = expression.child()
        if (child.dataType().simpleString(), expression.dataType().simpleString()) not in _EXACT_CASTS:
            return None
        expression = child
    return str(expression.name()) if _name(expression) == "AttributeReference" else None


def _not_null(condition: Any) -> list[str | None]:
    """Returns the columns that a filter requires to have a value. A part with which only Spark can filter is None."""
    kind = _name(condition)
    if kind == "And":
        return [*_not_null(condition.left()), *_not_null(condition.right())]
    if kind == "IsNotNull" and _name(condition.child()) == "AttributeReference":
        return [str(condition.child().name())]
    return [None]


def _is_plain(node: Any) -> bool:
    """Returns whether a relation consists only of files."""
    relation = node.relation()
    return bool(
        _name(relation) == "HadoopFsRelation"
        and relation.partitionSchema().isEmpty()
        and relation.bucketSpec().isEmpty()
        and node.catalogTable().isEmpty()
    )


def _partitions(scan: Any, jvm: Any) -> tuple[tuple[FileRange, ...], ...] | None:
    """Returns the ranges of each partition. Returns None if a file is not local, or has another size than
    Spark listed.
    """
    text_of = getattr(jvm, "scala.runtime.ScalaRunTime").stringOf
    found: list[list[tuple[str, int, int]]] = []
    covered: Counter[str] = Counter()
    for partition in scan.inputRDD().partitions():
        files = partition.files()
        # This takes one call to the JVM per partition. Reading the fields of each file would take ten calls per file.
        ranges = _FILE_RANGE.findall(text_of(files))
        if len(ranges) != len(files):
            return None
        found.append([(unquote(urlsplit(uri).path), int(start), int(end)) for uri, start, end in ranges])
        for path, start, end in found[-1]:
            covered[path] += end - start
    sizes = {path: Path(path).stat().st_size for path in covered}
    if sizes != covered:
        return None
    return tuple(tuple(FileRange(path, a, b - a, sizes[path]) for path, a, b in ranges) for ranges in found)
