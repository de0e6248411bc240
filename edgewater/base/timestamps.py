"""Event times as text: RFC 3339, or unix milliseconds."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Literal

TIME_ACCEPTED = "RFC 3339 with an offset, such as 2013-01-01T06:00:00Z, or unix time in ms, such as 1357020000000"

EARLIEST_MS = -62_135_596_800_000  # format: the year 1
"""0001-01-01. RFC 3339 can express times from `EARLIEST_MS` to `LATEST_MS`."""
LATEST_MS = 253_402_300_799_999  # format: the end of the year 9999

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# An unescaped `+` in a URL arrives as a space.
_UNESCAPED_OFFSET = re.compile(r"(\d) (\d\d:?\d\d)")


def parse_time(text: str) -> int:
    """Returns milliseconds since the epoch. Raises ValueError, which says what is accepted."""
    text = text.strip()
    if re.fullmatch(r"-?\d{1,17}", text):
        millis = int(text)
    else:
        repaired = _UNESCAPED_OFFSET.sub(r"\1+\2", text)
        if "T" not in repaired.upper():
            raise ValueError(TIME_ACCEPTED)
        try:
            moment = datetime.fromisoformat(repaired.upper())
        except ValueError:
            raise ValueError(TIME_ACCEPTED) from None
        if moment.tzinfo is None:
            raise ValueError(TIME_ACCEPTED)
        millis = (moment - _EPOCH) // timedelta(milliseconds=1)
    if not EARLIEST_MS <= millis <= LATEST_MS:
        raise ValueError(TIME_ACCEPTED)
    return millis


def rfc3339(time_ms: int) -> str:
    """Returns a time as RFC 3339 in UTC, with milliseconds only if they are not 0."""
    if EARLIEST_MS <= time_ms <= LATEST_MS:
        moment = _EPOCH + timedelta(milliseconds=time_ms)
        text = moment.isoformat(timespec="milliseconds" if time_ms % 1000 else "seconds")
        return text.removesuffix("+00:00") + "Z"
    import numpy as np  # imported here, so that commands that only parse times start fast

    unit: Literal["ms", "s"] = "ms" if time_ms % 1000 else "s"
    return str(np.datetime_as_string(np.array(time_ms, "datetime64[ms]"), unit=unit, timezone="UTC"))
