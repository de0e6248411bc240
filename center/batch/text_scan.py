"""Tasks read CSV and JSON lines with Arrow, if Arrow and Spark read these files with equal results.

Arrow and Spark agree on plain text, and differ on nearly all other text. A file is plain if

- it is printable ASCII, and its lines end in a line feed. It has no quotes (in CSV), escapes, tabs and carriage
  returns;
- each line of CSV has a value, possibly empty, for each column, and values have no spaces at their ends. Each line of
  JSON is one object;
- Arrow reads the columns in the types of the schema: whole numbers in range and not hexadecimal, finite doubles, texts,
  `true` and `false`. An empty value of CSV, and a missing value of JSON, is null.

To know whether files are plain, a job reads them once before the records are computed. Reading files twice with Arrow
takes a fraction of the time that Spark takes to pass their rows. Spark reads a scan in all other cases: other types (a
time must be ms in a whole number), more options, compressed files, and files that are not plain. The log then gives the
reason.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv
from pyarrow import json as json_lines
from pyspark.sql import SparkSession

from center.batch.scan_plan import FileRange, ScanPlan
from edgewater.model.errors import InvalidRecord

CSV = "org.apache.spark.sql.execution.datasources.csv.CSVFileFormat"
JSON = "org.apache.spark.sql.execution.datasources.json.JsonFileFormat"

log = logging.getLogger(__name__)
_SUFFIXES = {"", ".csv", ".txt", ".json", ".jsonl", ".ndjson"}  # Spark may decompress files with other suffixes
_OPTIONS = {CSV: {"path", "header", "sep", "delimiter", "inferschema"}, JSON: {"path"}}
_SEPARATORS = (",", ";", "|")
_TYPES = {
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "double": pa.float64(),
    "string": pa.string(),
    "boolean": pa.bool_(),
}
_PLAIN = bytes(range(32, 127)) + b"\n"
_BLOCK_BYTES = 1 << 22
_MAX_COLUMNS = 10_000  # Spark's reader of CSV refuses more than 20,480


class NotPlainError(Exception):
    """Raised if Arrow and Spark may read a file differently."""


@dataclass(frozen=True, slots=True)
class TextScan:
    """A scan of plain files whose columns are the columns of the records.

    Attributes:
        versions: by path, the modification time in ns of the file when it was checked.
    """

    plan: ScanPlan
    versions: dict[str, int]

    @property
    def _separator(self) -> str:
        return self.plan.options.get("sep", self.plan.options.get("delimiter", ","))

    def batches(self, partition: int) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a partition.

        Raises:
            InvalidRecord: a file has changed since it was checked.
        """
        for part in self.plan.partitions[partition]:
            found = Path(part.path).stat()
            if (found.st_size, found.st_mtime_ns) != (part.size, self.versions[part.path]):
                planned = f"{part.size} bytes, as when the scan was planned"
                raise InvalidRecord(part.path, f"{found.st_size} bytes", planned, "the file has changed")
            try:
                for batch in self._read(part):
                    yield self.plan.records(batch, {name: _TYPES[type_] for name, type_ in self.plan.used.items()})
            except NotPlainError as exc:
                raise InvalidRecord(part.path, str(exc), "a plain file", "the file has changed") from exc

    def difference(self, partition: int) -> str | None:
        """Returns a reason why Spark may read a partition differently, or None if the files are plain."""
        for part in self.plan.partitions[partition]:
            try:
                for _ in self._read(part):
                    pass
            except NotPlainError as exc:
                return f"{part.path}: {exc}"
        return None

    def _read(self, part: FileRange) -> Iterator[pa.RecordBatch]:
        """Yields the lines of a range as record batches.

        Raises:
            NotPlainError: Spark may read the lines differently.
        """
        is_csv = self.plan.file_format == CSV
        text = _lines(part)
        _check_bytes(text, self._separator if is_csv else None)
        if is_csv and part.start == 0 and self.plan.options.get("header", "false").lower() == "true":
            first, _, text = text.partition(b"\n")
            if not first.strip():
                raise NotPlainError("the first line is blank")
        if not text.strip():
            return
        try:
            yield from self._checked(self._csv(text) if is_csv else self._json(text))
        except (pa.ArrowException, UnicodeDecodeError) as exc:
            raise NotPlainError(str(exc)[:200]) from exc

    def _csv(self, text: bytes) -> Iterator[pa.RecordBatch]:
        used = {name: _TYPES[type_] for name, type_ in self.plan.used.items()}
        return iter(
            csv.open_csv(
                pa.BufferReader(text),
                csv.ReadOptions(
                    use_threads=False, block_size=_BLOCK_BYTES, column_names=[name for name, _ in self.plan.fields]
                ),
                csv.ParseOptions(delimiter=self._separator, quote_char=False, escape_char=False),
                csv.ConvertOptions(
                    column_types=used,
                    include_columns=list(used),
                    null_values=[""],
                    strings_can_be_null=True,
                    true_values=["true"],
                    false_values=["false"],
                ),
            )
        )

    def _json(self, text: bytes) -> Iterator[pa.RecordBatch]:
        body = text.removesuffix(b"\n")
        inner = body.count(b"\n")
        # If there are as many objects as lines, each line is an object.
        if not (body.startswith(b"{") and body.endswith(b"}")) or body.count(b"}\n{") != inner:
            raise NotPlainError("a line is not one JSON object")
        schema = pa.schema([(name, _TYPES[type_]) for name, type_ in self.plan.used.items()])
        rows = 0
        for batch in json_lines.open_json(
            pa.BufferReader(text),
            json_lines.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES),
            json_lines.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
        ):
            rows += len(batch)
            yield batch
        if rows != inner + 1:
            raise NotPlainError(f"{inner + 1} lines have {rows} JSON objects")

    def _checked(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the batches, after a check for values that Arrow accepts and Spark does not.

        Raises:
            NotPlainError: there is such a value.
        """
        for batch in batches:
            for column in batch.columns:
                if pa.types.is_floating(column.type) and pc.any(pc.invert(pc.is_finite(column))).as_py():
                    raise NotPlainError("a double is not finite")
            yield batch


def _lines(part: FileRange) -> bytes:
    """Returns the lines of a range: the lines that begin after the range's start and not after its end.

    If the range starts at 0, the first line of the file belongs to it.
    """
    with Path(part.path).open("rb") as file:
        if not part.size:
            return b""
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as held:
            begin = held.find(b"\n", part.start) + 1 if part.start else 0
            end = held.find(b"\n", part.start + part.length) + 1 or len(held)
            return held[begin:end] if begin or not part.start else b""


def _check_bytes(text: bytes, separator: str | None) -> None:
    """Checks that a text is plain.

    Args:
        separator: the separator of CSV; None for JSON.

    Raises:
        NotPlainError: the text has a byte that is not plain.
    """
    odd = text.translate(None, _PLAIN)
    if odd:
        raise NotPlainError(f"the byte {odd[:1]!r}")
    if b"\\" in text:
        raise NotPlainError("a backslash")
    if separator is None:
        return
    mark = separator.encode()
    edges = (b" " + mark, mark + b" ", b" \n", b"\n ", b"0x", b"0X")
    if b'"' in text or text[:1] == b" " or text[-1:] == b" " or any(edge in text for edge in edges):
        raise NotPlainError("a quote, a space at the end of a value, or a hexadecimal number")


def text_scan(spark: SparkSession, plan: ScanPlan) -> TextScan | None:
    """Returns the scan, after a Spark job has checked the files. Returns None if Spark must read the files."""
    reason = _left_to_spark(plan, str(spark.conf.get("spark.sql.columnNameOfCorruptRecord")))
    if reason is None:
        try:
            scan = TextScan(plan, {path: Path(path).stat().st_mtime_ns for path in plan.paths})
        except OSError:
            return None  # Spark then reads the file and reports the error
        numbers = range(len(plan.partitions))
        found = spark.sparkContext.parallelize(numbers, len(numbers)).map(scan.difference).collect()
        reason = next((difference for difference in found if difference is not None), None)
        if reason is None:
            return scan
    log.info("Spark reads the files, because Arrow may read them differently: %s", reason)
    return None


def _left_to_spark(plan: ScanPlan, corrupt: str) -> str | None:
    """Returns why Arrow cannot read a scan, whatever the content of the files, or None if it can.

    Args:
        corrupt: name of the column into which Spark writes corrupt lines.
    """
    options = plan.options
    if corrupt in (name for name, _ in plan.fields):
        return f"the column {corrupt}"
    if len(plan.fields) > _MAX_COLUMNS:
        return f"{len(plan.fields)} columns"
    if others := set(options) - _OPTIONS[plan.file_format]:
        return f"options {', '.join(sorted(others))}"
    separators = {options[name] for name in ("sep", "delimiter") if name in options}
    if separators - set(_SEPARATORS) or len(separators) > 1:
        return f"a separator other than one of {' '.join(_SEPARATORS)}"
    if odd := sorted({type_ for type_ in plan.used.values() if type_ not in _TYPES}):
        return f"columns of type {', '.join(odd)}"
    if suffixes := sorted({Path(path).suffix for path in plan.paths} - _SUFFIXES):
        return f"files named *{', *'.join(suffixes)}"
    return None
