"""Flights whose records arrive when they land: the demo's stream with stragglers, for which early answers are useful.

The event time is the scheduled departure. The record arrives after the flight's real delay and its real time in the
air, which are 0.3 to 13.4 hours together in these days. No delay is invented.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sim.demo.data import TIME
from sim.demo.pusher import Pusher

STREAM = "landings"
FIRST_DAY, DAYS = "2013-10-01T00:00:00Z", 15
END = "2013-10-15T00:00:00Z"
"""Later windows are not compared. The records of the last day bring the watermark past the earlier windows."""
_FIRST_MS, _END_MS = 1_380_585_600_000, 1_381_881_600_000  # format: two weeks of October 2013
DISORDER = "14h"
"""The shortest whole number of hours within which each flight of these days has landed."""
PUSH_EVERY_S = 0.05  # limit: pushes per second


def landings(flights: pa.Table) -> pa.Table:
    """Returns the flights of the `DAYS` that landed, in order of landing, with the time in column `landed_ms`."""
    times = flights[TIME]
    inside = pc.and_(pc.greater_equal(times, _FIRST_MS), pc.less(times, _END_MS))
    found = flights.filter(pc.and_(inside, pc.is_valid(flights["air_time"])))
    minutes = pc.add(found["dep_delay"], found["air_time"])
    landed = pc.add(found[TIME], pc.cast(pc.multiply(minutes, 60_000.0), pa.int64()))
    return found.append_column("landed_ms", landed).sort_by([("landed_ms", "ascending")])


def stream(seconds: float, at: str) -> dict[str, Any]:
    """Returns the configuration of the stream: the days take `seconds` of wall time and begin at `at`."""
    return {
        "columns": {"distance": "int64"},
        "time": {"column": TIME, "unit": "ms"},
        "disorder": DISORDER,
        "replay": {"start": FIRST_DAY, "speed": DAYS * 86_400 / seconds, "at": at},
        "sources": [{"http": None}],
    }


def feed(url: str, rows: pa.Table, seconds: float, begin_s: float) -> Pusher:
    """Returns a thread that pushes the records of one airport to its edge, each at the time of its landing.

    Args:
        url: of the edge's stream.
        rows: landings of the airport, in order.
        seconds: wall time of the days.
        begin_s: wall time of their begin.
    """
    offsets = (np.asarray(rows["landed_ms"]) - _FIRST_MS) / (_END_MS - _FIRST_MS)
    records = zip(rows[TIME].to_pylist(), rows["distance"].to_pylist(), strict=True)
    lines = [f'{{"{TIME}":{at},"distance":{miles}}}\n' for at, miles in records]
    return Pusher(url, begin_s + seconds * offsets, lambda first, end: "".join(lines[first:end]), PUSH_EVERY_S)
