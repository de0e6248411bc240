"""Tables as JSON, CSV and Arrow, and their values as JSON.

The process that runs a SELECT imports this module, so it imports little.
"""

from __future__ import annotations

import json
import math
from decimal import Decimal
from io import BytesIO
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from edgewater.base.streams import type_name
from edgewater.base.timestamps import rfc3339
from edgewater.model.key_texts import not_finite

JSON, CSV, ARROW = "application/json", "text/csv", "application/vnd.apache.arrow.stream"
Texts: TypeAlias = pa.StringArray
TIME = pa.timestamp("ms")
"""Times are UTC without a zone, because DuckDB converts times with a zone to the machine's zone."""
_KEYS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_string)
_AT_ONCE = 10_000  # limit: memory of texts
"""The number of values of which the texts are in memory besides the result."""
_ESCAPED = r'["\\\x00-\x1f]'
"""Texts with characters that JSON escapes."""


class TooLong(Exception):
    """The text of a table is longer than allowed."""


def rendered(table: pa.Table, form: str, most_bytes: float = math.inf) -> bytes:
    """Returns a table as JSON, CSV or an Arrow IPC stream, without its index. Raises TooLong.

    Args:
        form: `JSON`, `CSV` or `ARROW`.
        most_bytes: of a text, because JSON and CSV may take several times as much memory as the table.
    """
    sink = BytesIO()
    if form == ARROW:
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return sink.getvalue()
    rows = max(1, _AT_ONCE // max(1, table.num_columns))
    if form == JSON:
        columns = [{"name": name, "type": kind} for name, kind in columns_of(table)]
        sink.write(b'{"columns":%b,"rows":[' % to_json(columns))
    for first in range(0, max(1, table.num_rows), rows):
        part = table.slice(first, rows)
        if form == CSV:
            pyarrow.csv.write_csv(csv_table(part), sink, pyarrow.csv.WriteOptions(include_header=first == 0))
        else:
            texts = [text for column in part.columns for text in (",", _json_texts(column))]
            each = joined("[", *texts[1:], "]").to_pylist()
            sink.write(("," if first else "").encode() + ",".join(each).encode())
        if sink.tell() > most_bytes:
            raise TooLong
    if form == JSON:
        sink.write(b"]}")
    return sink.getvalue()


def columns_of(table: pa.Table) -> list[tuple[str, str]]:
    """Returns the names and types of a table's columns."""
    return [(field.name, "timestamp" if field.type == TIME else type_name(field.type)) for field in table.schema]


def _json_texts(column: pa.ChunkedArray) -> Texts:
    """Returns values as JSON: times in RFC 3339, NaN and infinity by name, values of other types as text."""
    kind = column.type
    if pa.types.is_timestamp(kind):
        millis = column.cast(pa.timestamp("ms", kind.tz), safe=False).cast(pa.int64())
        column = pa.array([None if m is None else rfc3339(m) for m in millis.to_pylist()], pa.string())
    elif not any(is_one(kind) for is_one in _KEYS):
        return pa.array([json_text(_plain(value)) for value in column.to_pylist()], pa.string())
    return key_texts(column)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return plain_key(value)
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return str(value)


_FORMULA = "^'*[=+@\\-\t\r\n]"
"""Texts that a spreadsheet reads as formulas. Apostrophes before the formula match too, so that a reader can undo what
`csv_table` adds."""


def without_zone(table: pa.Table) -> pa.Table:
    """Returns the table with times of type `TIME`."""
    fields = [f.with_type(TIME) if pa.types.is_timestamp(f.type) else f for f in table.schema]
    return table.cast(pa.schema(fields))


def csv_table(table: pa.Table) -> pa.Table:
    """Returns the table in the form for CSV: lists as JSON strings, and no text that a spreadsheet executes.

    If a text or a column name begins like a formula, an apostrophe is put before it. Numbers do not change.
    """
    for at, field in enumerate(table.schema):
        column = table.column(at)
        if pa.types.is_list(field.type):
            column = list_texts(column)
        elif pa.types.is_string(field.type):
            column = _without_formulas(column)
        table = table.set_column(at, field.name, column)
    return table.rename_columns(_without_formulas(pa.array(table.column_names, pa.string())).to_pylist())


def list_texts(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Returns the lists of a column as JSON texts."""
    return pa.array([None if v is None else _text(v) for v in column.to_pylist()], pa.string())


def _without_formulas(texts: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    escaped = pc.binary_join_element_wise("'", texts, "")
    return pc.if_else(pc.match_substring_regex(texts, _FORMULA), escaped, texts)


def _text(value: list[Any]) -> str:
    return json_text([{k: plain_key(v) for k, v in e.items()} if isinstance(e, dict) else plain_key(e) for e in value])


def key_texts(column: pa.Array | pa.ChunkedArray) -> Texts:
    """Returns values of keys, or items, as JSON (`plain_key`)."""
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return pc.cast(column, pa.string())
    if pa.types.is_string(kind) and not pc.any(pc.match_substring_regex(column, _ESCAPED)).as_py():
        return pc.binary_join_element_wise('"', column, '"', "")
    if pa.types.is_floating(kind) and bool(np.isfinite(np.asarray(column.fill_null(0.0))).all()):
        texts = pc.cast(column, pa.string())
        is_float = pc.match_substring_regex(texts, "[.e]")
        return pc.if_else(is_float, texts, pc.binary_join_element_wise(texts, ".0", ""))
    return pa.array([None if v is None else json_text(plain_key(v)) for v in column.to_pylist()], pa.string())


def json_text(value: object) -> str:
    """Returns JSON without white space. Raises ValueError for NaN and infinity."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def to_json(value: object) -> bytes:
    """Returns `json_text` as UTF-8."""
    return json_text(value).encode()


def joined(*texts: Texts | str) -> Texts:
    """Returns the texts of each row, one after another. A null is ``null``."""
    return pc.binary_join_element_wise(*texts, "", null_handling="replace", null_replacement="null")


def plain_key(value: Any) -> Any:
    """A value of a group's key, or an item, as JSON: NaN and infinity become their names, since null is another key."""
    return not_finite(value) if isinstance(value, float) and not math.isfinite(value) else value
