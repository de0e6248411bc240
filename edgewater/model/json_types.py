"""Types of JSON: documents of any form, groups of answers, and intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypeAlias, cast

from typing_extensions import TypedDict  # pydantic accepts no other one in Python 3.11

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | IntervalCell | None"
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


def as_document(mapping: object) -> dict[str, Any]:
    """Returns a mapping whose values are JSON, such as a spec, for a field of a model."""
    return cast(dict[str, Any], mapping)
