"""Column types of a stream's records, and the relation of its event time to wall time."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType, TypeGuard

import pyarrow as pa

EdgeId = NewType("EdgeId", str)
Seq = NewType("Seq", int)
EventMillis = NewType("EventMillis", int)
"""Event time: int64 milliseconds since the epoch, UTC."""

MAX_TIME_MS = 1 << 62
"""A time after every event. It is the watermark of a stream that has ended."""
MIN_TIME_MS = -MAX_TIME_MS
"""A time before every event. It is the watermark of a stream before its first record."""

TIME_COLUMN = "event_time_ms"
"""Name of the int64 column of event times that decoding adds to the user's columns."""

COLUMN_TYPES: dict[str, pa.DataType] = {
    "string": pa.string(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
}
"""The column types of a stream by their names in configurations. Decoding widens narrower types."""


Constant = str | int | bool
"""The value of a constant: a column with one value in all records of a stream at an edge."""
MAX_CONSTANT = 256
"""The largest length of a constant, in characters. It is small, because each answer states the constants."""
_SURROGATE = re.compile("[\ud800-\udfff]")


def is_constant(value: object, column_type: str) -> TypeGuard[Constant]:
    """Returns whether a value may be the constant of a column. A float64 column has no constant."""
    match column_type:
        case "string":
            return isinstance(value, str) and len(value) <= MAX_CONSTANT and not _SURROGATE.search(value)
        case "int64":
            return type(value) is int and -(1 << 63) <= value < 1 << 63
    return column_type == "bool" and isinstance(value, bool)


class Delivery(StrEnum):
    """How often a record of a source counts if processes crash or connections are lost."""

    EXACTLY_ONCE = "exactly-once"
    AT_LEAST_ONCE = "at-least-once"
    """The source may deliver a record again. If the edge does not recognise the record, it counts twice."""
    AT_MOST_ONCE = "at-most-once"
    """The source cannot be read again, so a crash may lose the records that it delivered shortly before."""

    @property
    def summary(self) -> str:
        """One sentence that says what the delivery means for answers."""
        return _SUMMARIES[self]


_SUMMARIES = {
    Delivery.EXACTLY_ONCE: "each record counts exactly once",
    Delivery.AT_LEAST_ONCE: (
        "no record is lost if the source keeps it until the edge has it; a record that is delivered again may count"
        " twice"
    ),
    Delivery.AT_MOST_ONCE: "no record counts twice, and a crash may lose records that were not on disk",
}


def weaker_than_exactly_once(deliveries: Iterable[Delivery]) -> tuple[Delivery, ...]:
    """Returns the deliveries that are not exactly-once, sorted and without duplicates.

    With both at-least-once and at-most-once, records may be lost, and others may count twice.
    """
    return tuple(sorted(set(deliveries) - {Delivery.EXACTLY_ONCE}))


def type_name(data_type: pa.DataType) -> str:
    """Returns the name of an Arrow type in `COLUMN_TYPES`; Arrow's own name for other types."""
    for name, known in COLUMN_TYPES.items():
        if known == data_type:
            return name
    return str(data_type)


@dataclass(frozen=True, slots=True)
class StreamClock:
    """The mapping between event time and wall time of one stream.

    On a live stream, event time is wall time. In a replay, the recorded event time advances by `speed` milliseconds per
    millisecond of wall time. Staleness and its budget are in wall time for both.
    """

    event_origin_ms: int = 0
    wall_origin_ms: int = 0
    speed: float = 1.0

    @property
    def is_live(self) -> bool:
        return self.speed == 1.0 and self.event_origin_ms == self.wall_origin_ms

    def to_wall_ms(self, event_ms: int) -> int:
        """Returns the wall time at which event time `event_ms` is reached."""
        return self.wall_origin_ms + round((event_ms - self.event_origin_ms) / self.speed)

    def to_event_ms(self, wall_ms: int) -> int:
        """Returns the event time that is reached at wall time `wall_ms`."""
        return self.event_origin_ms + round((wall_ms - self.wall_origin_ms) * self.speed)


LIVE = StreamClock()
