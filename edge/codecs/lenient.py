"""Values that are written as another type than their column has, in the columns that the configuration names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from edgewater.model import arithmetic

_BOOLEANS = {"true": ("yes", "y", "on", "t"), "false": ("no", "n", "off", "f")}


def lenient_parse(texts: pa.Array, target: pa.DataType) -> pa.Array:
    """Returns texts as numbers or booleans, as `arithmetic.parse`. Also reads 200.0 as an integer, and yes, no, y, n,
    on, off, t and f as booleans, in any case. Null for a text that is no value of the type.
    """
    values = arithmetic.parse(texts, target)
    if values.null_count == texts.null_count or pa.types.is_floating(target):
        return values
    others = pc.utf8_lower(pc.utf8_trim_whitespace(texts))
    if pa.types.is_integer(target):
        others = pc.replace_substring_regex(others, r"^([+-]?\d+)\.0*$", r"\1")
    else:
        for meant, words in _BOOLEANS.items():
            others = pc.if_else(pc.is_in(others, pa.array(words)), meant, others)
    return pc.coalesce(values, arithmetic.parse(others, target))


class WrittenFloat(float):
    """A number of JSON with its digits as they were written."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


def lenient_values(values: Sequence[Any], target: pa.DataType) -> list[Any]:
    """Returns values of JSON as values of a type; None for a value that is none of the type, and for a blank text."""
    texts = pa.array([_text(value) for value in values], pa.string())
    found: list[Any] = (texts if pa.types.is_string(target) else lenient_parse(texts, target)).to_pylist()
    return found


def is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _text(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, WrittenFloat):
        return value.text
    return str(value) if isinstance(value, int) else None
