"""Values that are written as another type than their column has, in the columns that the configuration names."""

from __future__ import annotations

import functools
import json
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


def lenient_value(value: Any, target: pa.DataType) -> Any:
    """Returns a value of JSON as a value of a type; None if it is no value of the type."""
    if value is None or isinstance(value, dict | list):
        return None
    text = value if isinstance(value, str) else json.dumps(value)
    return text if pa.types.is_string(target) else _parsed(text, target)


@functools.lru_cache(4096)
def _parsed(text: str, target: pa.DataType) -> Any:
    return lenient_parse(pa.array([text], pa.string()), target)[0].as_py()
