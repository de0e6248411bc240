"""Reads tables that clients send: CSV with a header, NDJSON and Parquet."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import pyarrow as pa
import pyarrow.compute as pc

from edgewater.base.errors import InvalidRequest
from edgewater.base.streams import COLUMN_TYPES, type_name
from edgewater.model.json_types import load_json
from edgewater.model.lookups import KEY_TYPES, MAX_TABLE_BYTES, MAX_TABLE_COLUMNS, MAX_TABLE_ROWS, LookupTable

CSV, NDJSON, PARQUET = "text/csv", "application/x-ndjson", "application/vnd.apache.parquet"
MAX_NAME = 128  # limit: characters of a column
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,18})")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_PLAIN = {pa.types.is_integer: "int64", pa.types.is_floating: "float64", pa.types.is_boolean: "bool"}


def read_table(body: bytes, media_type: str, key: str | None) -> tuple[str, pa.Table]:
    """Returns the key column and the rows of a table. Each row has a key of its own.

    Args:
        media_type: a key of `READERS`.
        key: name of the key column; None: the first column.

    Raises:
        InvalidRequest: the body is no such table, or is too large.
    """
    table = READERS[media_type](body)
    _require(bool(table.num_rows), "0 rows", "at least one row")
    _require(table.num_rows <= MAX_TABLE_ROWS, f"{table.num_rows} rows", f"at most {MAX_TABLE_ROWS} rows")
    _require(table.nbytes <= MAX_TABLE_BYTES, f"{table.nbytes} bytes", f"rows of at most {MAX_TABLE_BYTES} bytes")
    for name, column in zip(table.schema.names, table.columns, strict=True):
        if pa.types.is_floating(column.type) and not pc.all(pc.is_finite(column)).as_py():
            _refuse(name, "a column of finite numbers", "it has an infinity or NaN")
    key = table.schema.names[0] if key is None else key
    if key not in table.schema.names:
        raise InvalidRequest("key", key, f"one of the columns {', '.join(table.schema.names)}")
    keys = table.column(key).combine_chunks()
    if (kind := type_name(keys.type)) not in KEY_TYPES:
        raise InvalidRequest("key", key, f"a column of one of the types {', '.join(KEY_TYPES)}", f"it is {kind}")
    try:
        LookupTable(keys, {})
    except ValueError as exc:
        raise InvalidRequest("key", key, "a key of its own in each row", str(exc)) from None
    return key, table.combine_chunks()


def _require(is_right: bool, value: str, accepted: str) -> None:
    if not is_right:
        raise InvalidRequest("body", value, accepted)


def _refuse(value: object, accepted: str, reason: str = "") -> NoReturn:
    raise InvalidRequest("body", value, accepted, reason)


def _require_names(names: Sequence[str]) -> None:
    shown = ", ".join(names)[:MAX_NAME]
    if not 2 <= len(names) <= MAX_TABLE_COLUMNS:
        _refuse(shown, f"a key and another column, at most {MAX_TABLE_COLUMNS} columns", f"it has {len(names)}")
    if len(set(names)) < len(names) or not all(0 < len(name) <= MAX_NAME for name in names):
        _refuse(shown, f"columns with different names of at most {MAX_NAME} characters")


def _text(body: bytes) -> str:
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = body[: exc.start].count(b"\n") + 1
        _refuse(body[exc.start : exc.end].hex(), "UTF-8", f"line {line} has other bytes")


def _read_csv(body: bytes) -> pa.Table:
    reader = csv.reader(io.StringIO(_text(body), newline=""), strict=True)
    try:
        names, *rows = [row for row in reader if row] or [[]]
    except csv.Error as exc:
        _refuse(f"line {reader.line_num}", "CSV with a header", str(exc))
    names = [name.strip() for name in names]
    _require_names(names)
    for number, row in enumerate(rows, 1):
        if len(row) != len(names):
            _refuse(f"row {number}", f"{len(names)} fields, as in the header", f"it has {len(row)}")
    columns = list(zip(*rows, strict=True)) or [()] * len(names)
    return pa.table([_typed(column) for column in columns], names)


def _typed(texts: Sequence[str]) -> pa.Array:
    """Returns the values of a column of CSV; an empty text is null.

    Numbers are numbers only if each is written in the usual way and no integer would be rounded. So a code such as 007
    or an identifier of 20 digits stays a text.
    """
    values = [text or None for text in texts]
    present = [text for text in values if text is not None]

    def are(is_one: Callable[[str], object]) -> bool:
        return bool(present) and all(map(is_one, present))

    if are(_INTEGER.fullmatch) and all(-(1 << 63) <= int(text) < 1 << 63 for text in present):
        return pa.array([None if text is None else int(text) for text in values], pa.int64())
    if are(_NUMBER.fullmatch) and all(float(text) == int(text) for text in present if text.lstrip("-").isdecimal()):
        return pa.array([None if text is None else float(text) for text in values], pa.float64())
    if are(("true", "false").__contains__):
        return pa.array([None if text is None else text == "true" for text in values], pa.bool_())
    return pa.array(values, pa.string())


def _read_ndjson(body: bytes) -> pa.Table:
    rows: list[Mapping[str, object]] = []
    for number, line in enumerate(_text(body).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = load_json(line)
        except (ValueError, RecursionError) as exc:
            _refuse(f"line {number}", "a JSON object per line", str(exc))
        if not isinstance(row, dict):
            _refuse(f"line {number}", "a JSON object per line")
        rows.append(row)
        _require(len(rows) <= MAX_TABLE_ROWS, f"{len(rows)} rows", f"at most {MAX_TABLE_ROWS} rows")
    names = list(dict.fromkeys(name for row in rows for name in row))
    _require_names(names)
    return pa.table({name: _of_one_type(name, [row.get(name) for row in rows]) for name in names})


def _of_one_type(name: str, values: Sequence[object]) -> pa.Array:
    kinds = {type(value) for value in values if value is not None}
    kind = pa.float64() if kinds == {int, float} else _JSON_TYPES.get(next(iter(kinds), str))
    if kind is None or (len(kinds) > 1 and kinds != {int, float}):
        shown = ", ".join(sorted(each.__name__ for each in kinds))
        _refuse(name, "a column of texts, of numbers or of booleans", f"it has {shown}")
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, OverflowError, UnicodeEncodeError) as exc:
        _refuse(name, "integers of 64 bits, and texts of Unicode characters", str(exc))


_JSON_TYPES = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}


def _read_parquet(body: bytes) -> pa.Table:
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(io.BytesIO(body))
        groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
        size = sum(group.column(at).total_uncompressed_size for group in groups for at in range(group.num_columns))
        _require(file.metadata.num_rows <= MAX_TABLE_ROWS, f"{file.metadata.num_rows} rows", f"{MAX_TABLE_ROWS} rows")
        _require(size <= 2 * MAX_TABLE_BYTES, f"{size} bytes", f"rows of at most {MAX_TABLE_BYTES} bytes")
        _require_names(file.schema_arrow.names)
        table = file.read()
        return pa.table({name: _plain(name, table.column(name)) for name in table.schema.names})
    except (pa.ArrowException, OSError, ValueError) as exc:
        if isinstance(exc, InvalidRequest):
            raise
        _refuse("…", "a Parquet file", str(exc).partition("\n")[0])


def _plain(name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    plain = "string" if is_text else next((each for is_one, each in _PLAIN.items() if is_one(kind)), None)
    if plain is None:
        _refuse(name, f"a column of one of the types {', '.join(COLUMN_TYPES)}", f"it is {kind}")
    return column.cast(COLUMN_TYPES[plain])


READERS: Mapping[str, Callable[[bytes], pa.Table]] = {CSV: _read_csv, NDJSON: _read_ndjson, PARQUET: _read_parquet}
