"""Time parameters: RFC 3339 or unix milliseconds."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, WithJsonSchema
from pydantic_core import PydanticCustomError

from center.api.measure_models import Params
from edgewater.base.streams import MAX_TIME_MS, MIN_TIME_MS
from edgewater.base.timestamps import TIME_ACCEPTED as ACCEPTED
from edgewater.base.timestamps import parse_time, rfc3339


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


def _not_before_start(end: int | None, info: ValidationInfo) -> int | None:
    start = info.data.get("start")
    if end is not None and start is not None and end < start:
        raise PydanticCustomError("time", "{accepted}", {"accepted": f"a time not before start, {rfc3339(start)}"})
    return end


EndTime = Annotated[Time | None, AfterValidator(_not_before_start)]
"""The end of a range that begins at the parameter `start`. Exclusive."""


class FromParams(Params):
    """The parameter `from` of requests that go through stored answers."""

    start: Annotated[Time | None, Field(alias="from")] = None
    """Start of the first window; default: the oldest stored answer."""


def border(time_ms: int) -> str | None:
    """Returns an end of a range of event times in RFC 3339; None: the range has no such end."""
    return rfc3339(time_ms) if MIN_TIME_MS < time_ms < MAX_TIME_MS else None


def time_text(millis: int | None) -> str | None:
    """Returns a time in RFC 3339; null: there is none."""
    return None if millis is None else rfc3339(millis)
