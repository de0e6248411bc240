"""Types of JSON: documents of any form, groups of answers, and intervals. `load_json` reads it strictly."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, NotRequired, TypeAlias, cast

from typing_extensions import TypeAliasType, TypedDict  # pydantic accepts no other ones in Python 3.11

Json = TypeAliasType("Json", "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | IntervalCell | None")
Document: TypeAlias = Mapping[str, Json]
"""A JSON object whose form its reader knows."""
Key: TypeAlias = str | int | float | bool | None
"""A value of a column of groups."""
Group: TypeAlias = Mapping[str, Key]
"""The values of a group, by column."""
Groups: TypeAlias = Mapping[str, Key | Sequence[Key]]
"""A choice of groups: by column a value, or several."""


class IntervalCell(TypedDict):
    """A value and its bounds. None: unknown. ``not_finite`` names a value for which JSON has no number."""

    estimate: float | int | None
    lower: float | int | None
    upper: float | int | None
    not_finite: NotRequired[str]


class TotalCell(IntervalCell):
    """A value of all groups. ``confidence``: of bounds that do not always hold."""

    confidence: NotRequired[float]


def as_document(mapping: object) -> dict[str, Any]:
    """Returns a mapping whose values are JSON, such as a spec, for a field of a model."""
    return cast(dict[str, Any], mapping)


def load_json(text: str | bytes) -> object:
    """Parses JSON. Raises ValueError or RecursionError.

    Python accepts numbers that are no JSON, such as NaN, makes an infinity of 1e400, and of an entry that occurs twice
    it keeps the last one.
    """
    return json.loads(text, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_unique)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text} is out of range")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for key, count in Counter(key for key, _ in pairs).items():
        if count > 1:
            raise ValueError(f"duplicate key {key}")
    return dict(pairs)
