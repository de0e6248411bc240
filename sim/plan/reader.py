"""Reads the columns that a plan needs from data files: CSV, NDJSON (both also compressed) or Parquet."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from edge.codecs.csv_codec import CsvDialect, read_header
from edge.codecs.decompression import CODECS
from edge.codecs.formats import EXTENSIONS
from edgewater.base.errors import InvalidConfig

MAX_BLOCK_BYTES = 1 << 30
"""Arrow infers types from the first block, so a block is the whole file up to this size."""
FILE_ACCEPTED = "files that end in .csv, .ndjson, .jsonl or .parquet, the text ones also with .gz, .zst or .bz2"


@dataclass(frozen=True, slots=True)
class ColumnSelection:
    """The columns to read.

    Attributes:
        columns: column -> the flag or query field that needs it, for error messages.
        texts: columns that are read as text from CSV. So 1.10 and 1.1 are different keys, and times are not converted.
    """

    columns: dict[str, str]
    texts: Collection[str] = field(default=())


def read_files(paths: Sequence[Path], selection: ColumnSelection, notify: Callable[[str], None]) -> pa.Table:
    """Returns the rows of all files, with the column types of a stream, or time types.

    Args:
        notify: called with a message about omitted rows.

    Raises:
        InvalidConfig: a file that cannot be read or lacks a column; the message lists the existing columns.
    """
    tables = [_read(path, selection, notify) for path in paths]
    try:
        return pa.concat_tables([_widened(t) for t in tables], promote_options="permissive").combine_chunks()
    except (pa.ArrowInvalid, pa.ArrowTypeError) as exc:
        raise InvalidConfig("TRACE", [str(p) for p in paths], "files with columns of the same types", str(exc)) from exc


def _read(path: Path, selection: ColumnSelection, notify: Callable[[str], None]) -> pa.Table:
    suffixes = path.suffixes
    codec = CODECS.get(suffixes[-1]) if suffixes else None
    plain = suffixes[-2] if codec and len(suffixes) > 1 else path.suffix
    form = EXTENSIONS.get(plain)
    if form is None or (form == "parquet" and codec):
        raise InvalidConfig("TRACE", str(path), FILE_ACCEPTED)
    try:
        if form == "parquet":
            return _parquet(path, selection)
        with pa.input_stream(str(path), compression=codec) as stream:
            data = stream.read()
        return _csv(path, data, selection, notify) if form == "csv" else _ndjson(path, data, selection)
    except (OSError, pa.ArrowInvalid, pa.ArrowNotImplementedError) as exc:
        accepted = {"csv": "CSV with a header line", "ndjson": "one JSON object per line", "parquet": "Parquet"}
        reason = str(exc).partition("\n")[0]
        raise InvalidConfig("TRACE", str(path), f"a readable file: {accepted[form]}", reason) from exc


def _parquet(path: Path, selection: ColumnSelection) -> pa.Table:
    with pyarrow.parquet.ParquetFile(path) as file:
        _check(path, selection, file.schema_arrow.names)
        return file.read(columns=list(selection.columns))


def _csv(path: Path, data: bytes, selection: ColumnSelection, notify: Callable[[str], None]) -> pa.Table:
    header = list(read_header(data.partition(b"\n")[0], CsvDialect()))
    _check(path, selection, header)
    ragged = 0

    def skip(_: Any) -> str:
        nonlocal ragged
        ragged += 1
        return "skip"

    table = pyarrow.csv.read_csv(
        pa.BufferReader(data),
        read_options=pyarrow.csv.ReadOptions(
            block_size=min(len(data) + 1, MAX_BLOCK_BYTES), column_names=header, skip_rows=1
        ),
        parse_options=pyarrow.csv.ParseOptions(invalid_row_handler=skip),
        convert_options=pyarrow.csv.ConvertOptions(
            include_columns=list(selection.columns), column_types=dict.fromkeys(selection.texts, pa.string())
        ),
    )
    if ragged:
        notify(f"{path.name}: omitted {ragged} lines whose number of fields differs from the header")
    for at, name in enumerate(table.column_names):
        if pa.types.is_string(table.column(at).type):
            column = table.column(at)
            table = table.set_column(at, name, pc.if_else(pc.equal(column, ""), None, column))
    return table


def _ndjson(path: Path, data: bytes, selection: ColumnSelection) -> pa.Table:
    # An empty first record, because Arrow crashes on data whose first value is null (apache/arrow#47409).
    data = b"{}\n" + data
    table = pyarrow.json.read_json(
        pa.BufferReader(data), read_options=pyarrow.json.ReadOptions(block_size=min(len(data) + 1, MAX_BLOCK_BYTES))
    )
    _check(path, selection, table.column_names)
    return table.select(list(selection.columns)).slice(1)


def _check(path: Path, selection: ColumnSelection, present: Sequence[str]) -> None:
    for name, needed_by in selection.columns.items():
        if present.count(name) != 1:
            why = f"{path.name} has two columns of this name" if name in present else f"{path.name} has no such column"
            raise InvalidConfig(needed_by, name, f"one of its columns {', '.join(present) or '(none)'}", why)


def _widened(table: pa.Table) -> pa.Table:
    """Returns the columns in the types of a stream; time columns keep their types."""
    columns = {}
    for name in table.column_names:
        column = table.column(name)
        kind = column.type
        if pa.types.is_dictionary(kind):
            column = column.cast(kind.value_type)
            kind = column.type
        if pa.types.is_integer(kind):
            column = column.cast(pa.int64())
        elif pa.types.is_floating(kind) or pa.types.is_decimal(kind) or pa.types.is_null(kind):
            column = column.cast(pa.float64())
        elif pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
            column = column.cast(pa.string())
        columns[name] = column
    return pa.table(columns)
