"""What a stream's records look like, and how its event time runs against the wall clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

import pyarrow as pa

EdgeId = NewType("EdgeId", str)
Seq = NewType("Seq", int)
EventMillis = NewType("EventMillis", int)
"""Event time: int64 milliseconds since the epoch, UTC."""

END_OF_TIME_MS = 1 << 62
"""Later than every event: where a stream stands that has ended."""
NEVER_MS = -END_OF_TIME_MS
"""Earlier than every event: where a stream stands of which nothing is known."""

TIME_COLUMN = "event_time_ms"
"""Name of the int64 column that every decoded batch carries besides the user's columns."""

COLUMN_TYPES: dict[str, pa.DataType] = {
    "string": pa.string(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
}
"""The column types of a stream, by the name a user writes. Narrower inputs are widened on decoding."""


def type_name(data_type: pa.DataType) -> str:
    """The name in `COLUMN_TYPES` of an Arrow type, or Arrow's own name for any other."""
    for name, known in COLUMN_TYPES.items():
        if known == data_type:
            return name
    return str(data_type)


@dataclass(frozen=True, slots=True)
class StreamClock:
    """How event time runs against wall time on one stream.

    A live stream's event time *is* wall time. A replay runs recorded event time at `speed` event
    milliseconds per wall millisecond, so that deadlines and staleness mean the same thing in both.
    """

    event_origin_ms: int = 0
    wall_origin_ms: int = 0
    speed: float = 1.0

    @property
    def is_live(self) -> bool:
        return self.speed == 1.0 and self.event_origin_ms == self.wall_origin_ms

    def to_wall_ms(self, event_ms: int) -> int:
        """The wall time at which event time `event_ms` is reached."""
        return self.wall_origin_ms + round((event_ms - self.event_origin_ms) / self.speed)

    def to_event_ms(self, wall_ms: int) -> int:
        """The event time that is reached at wall time `wall_ms`."""
        return self.event_origin_ms + round((wall_ms - self.wall_origin_ms) * self.speed)


LIVE = StreamClock()
