"""Starts of calendar units in any time zone, as kernels on Arrow arrays and scalars.

Times are int64 ms since the epoch. Times outside the years 1 to 9999 give null.
"""

from __future__ import annotations

import zoneinfo

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from edgewater.base.timestamps import EARLIEST_MS, LATEST_MS
from edgewater.model.arithmetic import Value
from edgewater.model.calendar_units import UTC, CalendarUnit

IntArray = npt.NDArray[np.int64]

_DAY_MS = 86_400_000
_LONGER_THAN_OFFSETS = ("day", "week", "month", "quarter", "year")


def is_zone(name: str) -> bool:
    """Returns whether this is a zone of the IANA database, such as Europe/Berlin."""
    try:
        zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        return False
    return True


def truncated(times: Value, unit: str, zone: str = UTC, offset_ms: int = 0) -> Value:
    """Returns the start of the unit that contains each time, in ms.

    A day starts at midnight of the zone. If a clock change skips midnight, the day starts at the change. If a clock
    change repeats an hour, the two hours have different starts.

    Args:
        offset_ms: how much later a unit starts, by the clocks of the zone. Only for days and longer units.
    """
    local = local_times(times, zone)
    begin = pc.floor_temporal(_shifted(local, -offset_ms), 1, unit=unit, week_starts_monday=True)
    begin = _shifted(begin, offset_ms)
    if zone == UTC:
        return pc.cast(begin, pa.int64())
    if unit in _LONGER_THAN_OFFSETS:
        zoned = pc.assume_timezone(begin, zone, ambiguous="earliest", nonexistent="latest")
        return pc.cast(zoned, pa.int64())
    elapsed = pc.subtract(pc.cast(local, pa.int64()), pc.cast(begin, pa.int64()))
    return pc.subtract(_known(times), elapsed)


def unit_starts(times: IntArray, unit: CalendarUnit, zone: str, offset_ms: int) -> IntArray:
    """Returns, for each time, the last border of a unit at or before it, in ms. The unit is a day or longer.

    The border is the start that `truncated` returns, unless a clock change repeats a border. Then the unit begins at
    the first of the two equal borders, so each unit is one interval. Outside the years 1 to 9999,
    all units have their usual length, in UTC.
    """
    days = np.unique(times // _DAY_MS) * _DAY_MS
    begins = _begins(np.concatenate([days, days + _DAY_MS - 1]), unit, zone, offset_ms)
    borders = np.unique(np.concatenate([begins, _begins(begins + unit.into_next_ms, unit, zone, offset_ms)]))
    return np.asarray(borders[np.searchsorted(borders, times, "right") - 1])


def _begins(times: IntArray, unit: CalendarUnit, zone: str, offset_ms: int) -> IntArray:
    known = truncated(pa.array(times), unit.name, zone, offset_ms)
    return np.asarray(pc.fill_null(known, pa.array(times // unit.usual_ms * unit.usual_ms)))


def _shifted(local: Value, by_ms: int) -> Value:
    return pc.cast(pc.add(pc.cast(local, pa.int64()), by_ms), pa.timestamp("ms")) if by_ms else local


def _known(times: Value) -> Value:
    """Returns the times, int64 ms; null outside the years 1 to 9999."""
    inside = pc.and_(pc.greater_equal(times, EARLIEST_MS), pc.less_equal(times, LATEST_MS))
    return pc.if_else(inside, times, pa.scalar(None, pa.int64()))


def local_times(times: Value, zone: str) -> Value:
    """Returns the local times of the zone, as timestamps without a zone."""
    known = _known(times)
    if zone == UTC:
        return pc.cast(known, pa.timestamp("ms"))
    return pc.local_timestamp(pc.cast(known, pa.timestamp("ms", zone)))
