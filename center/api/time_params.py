"""Time parameters: RFC 3339 or unix milliseconds."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from center.api.measure_models import ApiModel
from edgewater.model.timestamps import TIME_ACCEPTED as ACCEPTED
from edgewater.model.timestamps import parse_time


def _validate(value: object) -> object:
    if isinstance(value, str):
        try:
            return parse_time(value)
        except ValueError as exc:
            raise PydanticCustomError("time", "{accepted}", {"accepted": str(exc)}) from exc
    return value


Time = Annotated[
    int,
    BeforeValidator(_validate),
    WithJsonSchema({"type": "string", "description": ACCEPTED, "examples": ["2013-01-01T06:00:00Z", "1357020000000"]}),
]
"""A time in a path or a query string; parsed to int64 ms."""


class FromParams(ApiModel):
    """The parameter `from` of requests that go through stored answers."""

    model_config = ConfigDict(extra="forbid")

    start: Annotated[Time | None, Field(alias="from")] = None
    """Start of the first window; default: the oldest stored answer."""
