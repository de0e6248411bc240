"""CSV, decoded by Arrow. A header names the columns. A quoted field may contain delimiters, quotes and line breaks."""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from edge.codecs.csv_records import are_all_records, are_lines, whole_records
from edge.codecs.fields_codec import typed_table
from edge.codecs.schema import RecordSchema
from edge.records import RejectionReason, Rejections
from edgewater.base.errors import InvalidRecord, did_you_mean

_TRUE = ["1", "true", "True", "TRUE"]
_FALSE = ["0", "false", "False", "FALSE"]


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
    """A `LineCodec` for the records after a header.

    Raises:
        InvalidRecord: the header lacks a declared column or has it twice.
    """

    def __init__(self, schema: RecordSchema, header: Sequence[str], dialect: CsvDialect, where: str = "") -> None:
        self.schema = schema
        self._textual = schema.textual
        self._decimal = schema.decimal.encode()
        self._header = list(header)
        self._dialect = dialect
        check_columns(self._textual, self._header, f"{where}: header" if where else "header")

    def parse(self, data: bytes, rejections: Rejections) -> pa.Table:
        has_lines, has_quotes = are_lines(data), b'"' in data
        table = self._converted(data, rejections, has_quotes) if has_lines else None
        if table is None and (has_quotes or not has_lines):
            data = whole_records(data, self._dialect.delimiter, rejections)
            table = self._converted(data, rejections)
        return self._checked(data, rejections) if table is None else table

    def _converted(self, data: bytes, rejections: Rejections, has_quotes: bool = False) -> pa.Table | None:
        """Returns the records in Arrow's own conversion; None if a record needs a closer look.

        Arrow's conversion accepts less than `arithmetic.parse`, apart from hexadecimal integers and ``nan(…)``.

        Args:
            has_quotes: whether the data have quotes, and perhaps line breaks in quotes.
        """
        if not data.strip(b" \t\r\n".replace(self._dialect.delimiter.encode(), b"")):
            return pa.schema(list(self._textual.items())).empty_table()
        if not _is_utf8(data) or (b"(" in data and re.search(rb"(?i)nan\(", data)) or _has_hexadecimals(data):
            return None
        if self._decimal != b"." and b"." in data:
            return None
        found = Rejections()
        try:
            table = self._read(data, self._header, self._textual, found, self._dialect.nulls)
        except pa.ArrowInvalid:  # a value is invalid
            return None
        if has_quotes and not are_all_records(data, table.num_rows + found.count, self._dialect.delimiter):
            return None
        rejections.extend(found.as_tuple())
        return table if self._dialect.nulls else _empty_texts_to_null(table)

    def _checked(self, data: bytes, rejections: Rejections) -> pa.Table:
        """Returns the valid records, whose values are examined one by one."""
        names = [str(number) for number in range(len(self._header))]
        is_utf8 = _is_utf8(data)
        # Only the columns that are read have to be UTF-8. Latin-1 keeps each byte.
        text = data if is_utf8 else data.decode("latin-1").encode()
        fields = self._read(text, names, dict.fromkeys(names, pa.string()), rejections).combine_chunks()
        texts = {name: self._texts(fields, name, is_utf8) for name in self._textual}

        def line(row: int) -> str:
            return self._dialect.delimiter.join(column[row].as_py() for column in fields.columns)

        may_hide = np.zeros(fields.num_rows, np.bool_)
        for column in fields.columns if b'"' in data else ():
            may_hide |= pc.match_substring(column, "\n").to_numpy()
        return typed_table(self.schema, texts, np.ones(fields.num_rows, np.bool_), line, rejections, may_hide)

    def _texts(self, fields: pa.Table, name: str, is_utf8: bool) -> pa.Array:
        """Returns the texts of a column, with null for the texts that mean null; bytes if they may not be UTF-8."""
        texts = fields.column(self._header.index(name))
        texts = texts.chunk(0) if texts.num_chunks else pa.array([], pa.string())
        nulls = self._dialect.nulls or [""]
        if not self._dialect.nulls and not pa.types.is_string(self._textual[name]):
            nulls = _pyarrow_csv().ConvertOptions().null_values
        texts = pc.if_else(pc.is_in(texts, pa.array(nulls)), None, texts)
        if is_utf8:
            return texts
        return pa.array([None if text is None else text.encode("latin-1") for text in texts.to_pylist()], pa.binary())

    def _read(
        self,
        data: bytes,
        names: Sequence[str],
        types: Mapping[str, pa.DataType],
        rejections: Rejections,
        nulls: Sequence[str] = (),
    ) -> pa.Table:
        """Returns the columns of `types`. Rejects rows with another number of fields.

        Raises:
            pa.ArrowInvalid: a value has another type. Nothing has been added to `rejections`.
        """
        pv, ragged = _pyarrow_csv(), list[pa.csv.InvalidRow]()

        def note(row: pa.csv.InvalidRow) -> str:
            ragged.append(row)
            return "skip"

        table = pv.read_csv(
            pa.BufferReader(data),
            read_options=pv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=names),
            parse_options=pv.ParseOptions(delimiter=self._dialect.delimiter, invalid_row_handler=note),
            convert_options=pv.ConvertOptions(
                column_types=types,
                include_columns=list(types),
                true_values=_TRUE,
                false_values=_FALSE,
                **({"null_values": nulls, "strings_can_be_null": True} if nulls else {}),
            ),
        )
        if ragged:
            message = f"{ragged[0].actual_columns} fields; expected {len(self._header)}: {', '.join(self._header)}"
            rejections.add(RejectionReason.MALFORMED, ragged[0].text, message, len(ragged))
        return table

    def reject_invalid(self, lines: list[bytes], rejections: Rejections) -> list[bytes]:
        return lines  # `parse` rejects each record by itself


def _has_hexadecimals(data: bytes) -> bool:
    if b"x" not in data and b"X" not in data:
        return False
    text = np.frombuffer(data, np.uint8)
    return bool(((text[:-1] == ord("0")) & (text[1:] | 0x20 == ord("x"))).any())


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


def check_columns(declared: Sequence[str] | dict[str, pa.DataType], present: Sequence[str], where: str) -> None:
    """Raises InvalidRecord unless every declared column is present exactly once."""
    for name in declared:
        if present.count(name) != 1:
            accepted = f"the column {name} once; columns present: {', '.join(present) or '(none)'}"
            missing = f"missing column{did_you_mean(name, present)}"
            raise InvalidRecord(where, name, accepted, missing if name not in present else "column named twice")
