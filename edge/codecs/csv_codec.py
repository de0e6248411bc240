"""CSV, decoded by Arrow: one record per line. A header names the columns.

A quoted field may contain delimiters and quotes, but no line breaks. So input can be split at any line, and a stray
quote costs one record instead of the rest of the file.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import pyarrow as pa
import pyarrow.compute as pc

from edge.codecs.event_time import cast_or_null, readable_times, time_accepted
from edge.codecs.line_decoder import Undecodable, count_lines
from edge.codecs.schema import RecordSchema
from edge.records import IntArray, RejectionReason, Rejections
from edgewater.model.errors import InvalidRecord
from edgewater.model.streams import type_name

_TRUE = ["1", "true", "True", "TRUE"]
_FALSE = ["0", "false", "False", "FALSE"]
_EXAMPLES = {"string": "JFK in UTF-8", "int64": "42", "float64": "4.2", "bool": "true or false"}


@functools.cache
def _pyarrow_csv() -> ModuleType:
    import pyarrow.csv  # imported late, so that an edge with other formats does not load it

    return pyarrow.csv  # type: ignore[no-any-return,unused-ignore]


@dataclass(frozen=True, slots=True)
class CsvDialect:
    """The dialect of CSV input.

    Attributes:
        delimiter: one character.
        nulls: texts that mean null in every column. If empty, an empty field means null in every column. NA, NULL and
            NaN then mean null only in columns that are not strings (NA may be Namibia).
    """

    delimiter: str = ","
    nulls: tuple[str, ...] = ()


def read_header(line: bytes, dialect: CsvDialect) -> tuple[str, ...]:
    """Returns the column names of a header line. Raises InvalidRecord if the line is not CSV."""
    text = line.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace").rstrip("\r\n")
    try:
        names = next(csv.reader([text], delimiter=dialect.delimiter), [])
    except csv.Error as exc:
        raise InvalidRecord("header", text[:80], "a line of column names, ended by a line feed", str(exc)) from exc
    return tuple(name.strip() for name in names)


class CsvCodec:
    """A `LineCodec` for the lines after a header.

    Raises:
        InvalidRecord: the header lacks a declared column or has it twice.
    """

    def __init__(self, schema: RecordSchema, header: Sequence[str], dialect: CsvDialect, where: str = "") -> None:
        self.schema = schema
        self._textual = schema.textual
        self._header = list(header)
        self._dialect = dialect
        check_columns(self._textual, self._header, f"{where}: header" if where else "header")

    def parse(self, data: bytes, rejections: Rejections) -> pa.Table:
        ragged = 0
        first: tuple[str, int] = "", 0

        def note(row: pa.csv.InvalidRow) -> str:
            nonlocal ragged, first
            if not ragged:
                first = row.text, row.actual_columns
            ragged += 1
            return "skip"

        # PyArrow decodes each row for the handler, and writes rows that are not UTF-8 to stderr.
        table = self._read(data, note if _is_utf8(data) else None) if data.strip() else self._empty_table()
        # Without quotes and lone carriage returns, each row is a line. Otherwise rows are compared with lines.
        rows = table.num_rows + ragged
        if (b'"' in data or b"\r" in data) and rows != count_lines(data, rows):
            raise Undecodable("a quoted field contains a line break; expected one record per line")
        if ragged:
            rejections.add(RejectionReason.MALFORMED, first[0], self._ragged_message(first[1]), ragged)
        return table

    def _read(self, data: bytes, note: object) -> pa.Table:
        pv = _pyarrow_csv()
        nulls = {"null_values": self._dialect.nulls, "strings_can_be_null": True} if self._dialect.nulls else {}
        try:
            table = pv.read_csv(
                pa.BufferReader(data),
                read_options=pv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=self._header),
                parse_options=pv.ParseOptions(delimiter=self._dialect.delimiter, invalid_row_handler=note),
                convert_options=pv.ConvertOptions(
                    column_types=self._textual,
                    include_columns=list(self._textual),
                    true_values=_TRUE,
                    false_values=_FALSE,
                    **nulls,
                ),
            )
        except pa.ArrowInvalid as exc:
            raise Undecodable(str(exc)) from exc
        return table if self._dialect.nulls else _empty_texts_to_null(table)

    def _empty_table(self) -> pa.Table:
        return pa.schema(list(self._textual.items())).empty_table()

    def reject_invalid(self, lines: list[bytes], rejections: Rejections) -> list[bytes]:
        rows = []
        for line in lines:
            try:
                # Latin-1 preserves each byte, because only the columns that are read have to be UTF-8.
                fields = next(csv.reader([line.decode("latin-1").rstrip("\r")], delimiter=self._dialect.delimiter))
            except csv.Error as exc:
                rejections.add(RejectionReason.MALFORMED, line, f"not CSV: {exc}; expected one record per line")
                continue
            if len(fields) != len(self._header):
                rejections.add(RejectionReason.MALFORMED, line, self._ragged_message(len(fields)))
            else:
                rows.append((line, fields))
        return self._reject_wrong_types(rows, rejections)

    def _reject_wrong_types(self, rows: list[tuple[bytes, list[str]]], rejections: Rejections) -> list[bytes]:
        bad: dict[int, tuple[RejectionReason, str]] = {}
        for name, declared in self._textual.items():
            at = self._header.index(name)
            for row in self._unconvertible([fields[at] for _, fields in rows], declared):
                bad.setdefault(row, self._wrong(name, declared, rows[row][1][at]))
        for row, (reason, message) in sorted(bad.items()):
            rejections.add(reason, rows[row][0], message)
        wrong = [rows[row][1] for row, (reason, _) in bad.items() if reason is RejectionReason.WRONG_TYPE]
        if wrong and self.schema.has_time:
            rejections.add_times(RejectionReason.WRONG_TYPE, self._times(wrong))
        return [line for row, (line, _) in enumerate(rows) if row not in bad]

    def _times(self, rows: list[list[str]]) -> IntArray:
        columns = []
        for name in self.schema.time.columns:
            texts, kind = _texts([fields[self._header.index(name)] for fields in rows]), self._textual[name]
            columns.append(texts if pa.types.is_string(kind) else cast_or_null(pc.ascii_trim_whitespace(texts), kind))
        return readable_times(columns, self.schema.time.unit)

    def _unconvertible(self, fields: list[str], declared: pa.DataType) -> list[int]:
        texts = _texts(fields)
        if pa.types.is_string(declared):
            return _rows(texts.is_null())
        nulls = self._dialect.nulls or _pyarrow_csv().ConvertOptions().null_values
        trimmed = pc.ascii_trim_whitespace(texts)
        if pa.types.is_boolean(declared):
            converted = pc.is_in(trimmed, pa.array([*_TRUE, *_FALSE]))
            return _rows(pc.invert(pc.or_(converted, pc.is_in(texts, pa.array(nulls)))))
        converted = cast_or_null(trimmed, declared).is_valid()
        return _rows(pc.invert(pc.or_(converted, pc.is_in(texts, pa.array(nulls)))))

    def _wrong(self, name: str, declared: pa.DataType, field: str) -> tuple[RejectionReason, str]:
        got = f"got {field[:40]!r}"
        if name in self.schema.time.columns:
            return RejectionReason.TIME_UNPARSEABLE, f"{name}: {got}; expected {time_accepted(self.schema.time.unit)}"
        kind = type_name(declared)
        return RejectionReason.WRONG_TYPE, f"{name}: {got}; expected {kind} such as {_EXAMPLES.get(kind, '')}"

    def _ragged_message(self, fields: int) -> str:
        names = ", ".join(self._header)
        return f"{fields} fields; expected {len(self._header)}, in one line: {names}"


def _texts(fields: list[str]) -> pa.Array:
    """Converts fields that were decoded as Latin-1 to UTF-8 texts; null for a field that is not UTF-8."""
    return cast_or_null(pa.array([field.encode("latin-1") for field in fields], pa.binary()), pa.string())


def _is_utf8(data: bytes) -> bool:
    try:
        return data.isascii() or data.decode() is not None
    except UnicodeDecodeError:
        return False


def _empty_texts_to_null(table: pa.Table) -> pa.Table:
    for at, field in enumerate(table.schema):
        if pa.types.is_string(field.type):
            empty = pc.equal(table.column(at), "")
            if pc.any(empty).as_py():
                table = table.set_column(at, field, pc.if_else(empty, None, table.column(at)))
    return table


def _rows(mask: pa.Array) -> list[int]:
    return [int(row) for row in pc.indices_nonzero(mask).to_pylist()]


def check_columns(declared: Sequence[str] | dict[str, pa.DataType], present: Sequence[str], where: str) -> None:
    """Raises InvalidRecord unless every declared column is present exactly once."""
    for name in declared:
        if present.count(name) != 1:
            accepted = f"the column {name} once; columns present: {', '.join(present) or '(none)'}"
            raise InvalidRecord(
                where, name, accepted, "missing column" if name not in present else "column named twice"
            )
