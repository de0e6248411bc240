"""Values that are written as another type than their column has, in the columns that the configuration names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from prometheus_client import Counter

from edge.codecs.schema import RecordSchema
from edgewater.model import arithmetic

_BOOLEANS = {"true": ("yes", "y", "on", "t"), "false": ("no", "n", "off", "f")}
CONVERTED = Counter(
    "edgewater_edge_converted_values",
    "Values of `lenient` columns that were written as another type, by column.",
    ["column"],
    registry=None,
)


def lenient_parse(texts: pa.Array, name: str, schema: RecordSchema) -> pa.Array:
    """Returns the texts of a column as numbers or booleans, as `arithmetic.parse`. Null for a text that is no value of
    the type.

    Of a lenient column, also reads 200.0 as an integer, numbers with the decimal mark of the schema, and yes, no, y, n,
    on, off, t and f as booleans, in any case. Counts these. With a decimal comma, a number with a point is no value,
    because the point may separate thousands.
    """
    target = schema.textual[name]
    values = arithmetic.parse(texts, target)
    if name in schema.lenient and schema.decimal != "." and not pa.types.is_boolean(target):
        values = pc.if_else(pc.match_substring(texts, "."), None, values)
    if name not in schema.lenient or values.null_count == texts.null_count:
        return values
    read = pc.coalesce(values, _read(texts, target, schema.decimal))
    CONVERTED.labels(name).inc(values.null_count - read.null_count)
    return read


def _read(texts: pa.Array, target: pa.DataType, decimal: str) -> pa.Array:
    others = pc.utf8_lower(pc.utf8_trim_whitespace(texts))
    if pa.types.is_boolean(target):
        for meant, words in _BOOLEANS.items():
            others = pc.if_else(pc.is_in(others, pa.array(words)), meant, others)
    elif decimal != ".":
        others = pc.if_else(pc.match_substring(others, "."), "", pc.replace_substring(others, ",", "."))
    if pa.types.is_integer(target):
        others = pc.replace_substring_regex(others, r"^([+-]?\d+)\.0*$", r"\1")
    return arithmetic.parse(others, target)


def without_words(texts: pa.Array, words: Sequence[str]) -> pa.Array:
    """Returns the texts, with null for the words that mean null."""
    return pc.if_else(pc.is_in(texts, pa.array(words, texts.type)), None, texts) if words else texts


class WrittenFloat(float):
    """A number of JSON with its digits as they were written."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


def lenient_values(values: Sequence[Any], name: str, schema: RecordSchema) -> list[Any]:
    """Returns the values of JSON that are not of their column's type as values of the type.

    None for a value that is none of the type.
    """
    target = schema.textual[name]
    texts = pa.array([_text(value) for value in values], pa.string())
    if not pa.types.is_string(target):
        # A number of JSON has a point, whatever the decimal mark of texts is.
        numbers = pa.array([not isinstance(value, str) for value in values], pa.bool_())
        texts = pc.if_else(numbers, pc.replace_substring(texts, ".", schema.decimal), texts)
    found = texts if pa.types.is_string(target) else _read(texts, target, schema.decimal)
    CONVERTED.labels(name).inc(len(found) - found.null_count)
    result: list[Any] = found.to_pylist()
    return result


def is_null(value: Any, name: str, schema: RecordSchema) -> bool:
    """Returns whether a value of JSON stands for null in a column."""
    is_blank = isinstance(value, str) and name in schema.lenient and not value.strip()
    return value is None or is_blank or value in schema.nulls.get(name, ())


def _text(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, WrittenFloat):
        return value.text
    return str(value) if isinstance(value, int) else None
