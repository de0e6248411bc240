"""Time parameters: RFC 3339 or unix milliseconds."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

ACCEPTED = "RFC 3339 with an offset, such as 2013-01-01T06:00:00Z, or unix time in ms, such as 1357020000000"

EARLIEST_MS = -62_135_596_800_000
"""0001-01-01; with `LATEST_MS`, the range of RFC 3339."""
LATEST_MS = 253_402_300_799_999

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# An unescaped `+` in a URL arrives as a space.
_UNESCAPED_OFFSET = re.compile(r"(\d) (\d\d:?\d\d)")


def parse_time(text: str) -> int:
    """Milliseconds since the epoch. Raises ValueError with what is accepted."""
    text = text.strip()
    if re.fullmatch(r"-?\d{1,17}", text):
        millis = int(text)
    else:
        repaired = _UNESCAPED_OFFSET.sub(r"\1+\2", text)
        if "T" not in repaired.upper():
            raise ValueError(ACCEPTED)
        try:
            moment = datetime.fromisoformat(repaired.upper())
        except ValueError:
            raise ValueError(ACCEPTED) from None
        if moment.tzinfo is None:
            raise ValueError(ACCEPTED)
        millis = (moment - _EPOCH) // timedelta(milliseconds=1)
    if not EARLIEST_MS <= millis <= LATEST_MS:
        raise ValueError(ACCEPTED)
    return millis


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
