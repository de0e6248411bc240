"""The columns of a user's data file that a plan needs: CSV (also compressed), NDJSON or Parquet."""

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

from edge.codecs import CODECS, EXTENSIONS, CsvDialect, read_header
from edgewater.errors import InvalidConfig

MAX_BLOCK_BYTES = 1 << 30
"""Types are inferred of a file's first block, so a block is the whole file where Arrow allows it."""
FILE_ACCEPTED = "files that end in .csv, .ndjson, .jsonl or .parquet, the text ones also with .gz, .zst or .bz2"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to read.

    Attributes:
        columns: by name -> the flag or query field that asks for it, for messages.
        texts: of these, read as text in CSV, so that 1.10 and 1.1 are two keys, and a time keeps its form.
    """

    columns: dict[str, str]
    texts: Collection[str] = field(default=())


def read_files(paths: Sequence[Path], wanted: Wanted, note: Callable[[str], None]) -> pa.Table:
    """All rows of the files, one after another, in a stream's types (string, int64, float64, bool) or as times.

    Args:
        note: is told what was left out.

    Raises:
        InvalidConfig: a file that cannot be read or lacks a column (the message names those there are).
    """
    tables = [_read(path, wanted, note) for path in paths]
    try:
        return pa.concat_tables([_widened(t) for t in tables], promote_options="permissive").combine_chunks()
    except (pa.ArrowInvalid, pa.ArrowTypeError) as exc:
        raise InvalidConfig("TRACE", [str(p) for p in paths], "files with columns of the same types", str(exc)) from exc


def _read(path: Path, wanted: Wanted, note: Callable[[str], None]) -> pa.Table:
    suffixes = path.suffixes
    codec = CODECS.get(suffixes[-1]) if suffixes else None
    plain = suffixes[-2] if codec and len(suffixes) > 1 else path.suffix
    form = EXTENSIONS.get(plain)
    if form is None or (form == "parquet" and codec):
        raise InvalidConfig("TRACE", str(path), FILE_ACCEPTED)
    try:
        if form == "parquet":
            return _parquet(path, wanted)
        with pa.input_stream(str(path), compression=codec) as stream:
            data = stream.read()
        return _csv(path, data, wanted, note) if form == "csv" else _ndjson(path, data, wanted)
    except (OSError, pa.ArrowInvalid, pa.ArrowNotImplementedError) as exc:
        accepted = {"csv": "CSV with a header line", "ndjson": "one JSON object per line", "parquet": "a Parquet file"}
        reason = str(exc).partition("\n")[0]
        raise InvalidConfig("TRACE", str(path), f"{accepted[form]} that can be read", reason) from exc


def _parquet(path: Path, wanted: Wanted) -> pa.Table:
    with pyarrow.parquet.ParquetFile(path) as file:
        _check(path, wanted, file.schema_arrow.names)
        return file.read(columns=list(wanted.columns))


def _csv(path: Path, data: bytes, wanted: Wanted, note: Callable[[str], None]) -> pa.Table:
    header = list(read_header(data.partition(b"\n")[0], CsvDialect()))
    _check(path, wanted, header)
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
            include_columns=list(wanted.columns), column_types=dict.fromkeys(wanted.texts, pa.string())
        ),
    )
    if ragged:
        note(f"{path.name}: {ragged} lines with another number of fields than the header are left out")
    for at, name in enumerate(table.column_names):
        if pa.types.is_string(table.column(at).type):
            column = table.column(at)
            table = table.set_column(at, name, pc.if_else(pc.equal(column, ""), None, column))
    return table


def _ndjson(path: Path, data: bytes, wanted: Wanted) -> pa.Table:
    # A first record without columns: Arrow crashes on data whose first value is null (apache/arrow#47409).
    data = b"{}\n" + data
    table = pyarrow.json.read_json(
        pa.BufferReader(data), read_options=pyarrow.json.ReadOptions(block_size=min(len(data) + 1, MAX_BLOCK_BYTES))
    )
    _check(path, wanted, table.column_names)
    return table.select(list(wanted.columns)).slice(1)


def _check(path: Path, wanted: Wanted, present: Sequence[str]) -> None:
    for name, asked_by in wanted.columns.items():
        if present.count(name) != 1:
            why = f"{path.name} has it twice" if name in present else f"{path.name} has no such column"
            raise InvalidConfig(asked_by, name, f"one of its columns {', '.join(present) or '(none)'}", why)


def _widened(table: pa.Table) -> pa.Table:
    """Columns in the types that a stream has; times stay times."""
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
