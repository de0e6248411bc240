"""The calendar functions of expressions: their kernels on Arrow arrays and scalars, and their binding.

They compute parts of times, and starts of calendar units, in any time zone. Times are int64 ms since the epoch. Times
outside the years 1 to 9999 give null.
"""

from __future__ import annotations

import zoneinfo
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from sqlglot import exp

from edgewater.model.arithmetic import Value
from edgewater.model.binding import Binder, BoundExpression, Operator
from edgewater.model.streams import TIME_COLUMN, type_name
from edgewater.model.text_functions import MAX_PATTERN
from edgewater.model.windows import UTC, CalendarUnit

IntArray = npt.NDArray[np.int64]
FIRST_MS, LAST_MS = -62_135_596_800_000, 253_402_300_799_999
"""The first and the last ms of the years 1 to 9999."""

PARTS: dict[str, Callable[[Value], Value]] = {
    "year": pc.year,
    "quarter": pc.quarter,
    "month": pc.month,
    "week": pc.iso_week,
    "day": pc.day,
    "isodow": lambda local: pc.day_of_week(local, count_from_zero=False, week_start=1),
    "doy": pc.day_of_year,
    "hour": pc.hour,
    "minute": pc.minute,
    "second": pc.second,
}
"""The parts of a time, under the names of EXTRACT, as functions of local timestamps. ``isodow`` is 1 on Monday and 7 on
Sunday. ``week`` is the week of ISO 8601.
"""

UNITS = ("second", "minute", "hour", "day", "week", "month", "quarter", "year")
"""Units of `truncated`. A week begins on Monday."""
_DAY_MS = 86_400_000
_LONGER_THAN_OFFSETS = ("day", "week", "month", "quarter", "year")


def is_zone(name: str) -> bool:
    """Returns whether this is a zone of the IANA database, such as Europe/Berlin."""
    try:
        zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        return False
    return True


def part(times: Value, name: str, zone: str = UTC) -> Value:
    """Returns a part of times, int64.

    Args:
        name: a key of `PARTS`.
    """
    return pc.cast(PARTS[name](_local(times, zone)), pa.int64())


def truncated(times: Value, unit: str, zone: str = UTC, offset_ms: int = 0) -> Value:
    """Returns the start of the unit that contains each time, in ms.

    A day starts at midnight of the zone. If a clock change skips midnight, the day starts at the change. If a clock
    change repeats an hour, the two hours have different starts.

    Args:
        offset_ms: how much later a unit starts, by the clocks of the zone. Only for days and longer units.
    """
    local = _local(times, zone)
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


def formatted(times: Value, pattern: str, zone: str = UTC) -> Value:
    """Returns times as text by a pattern of strftime, such as ``%Y-%m-%d``. Fractions of seconds are dropped."""
    seconds = pc.cast(pc.floor_temporal(_local(times, zone), 1, unit="second"), pa.timestamp("s"))
    if isinstance(seconds, pa.Scalar):
        return pc.strftime(seconds, format=pattern)
    distinct = pc.dictionary_encode(seconds)  # formatting takes 40 times as long as encoding
    return pc.strftime(distinct.dictionary, format=pattern).take(distinct.indices)


def _known(times: Value) -> Value:
    """Returns the times, int64 ms; null outside the years 1 to 9999."""
    inside = pc.and_(pc.greater_equal(times, FIRST_MS), pc.less_equal(times, LAST_MS))
    return pc.if_else(inside, times, pa.scalar(None, pa.int64()))


def _local(times: Value, zone: str) -> Value:
    """Returns the local times of the zone, as timestamps without a zone."""
    known = _known(times)
    if zone == UTC:
        return pc.cast(known, pa.timestamp("ms"))
    return pc.local_timestamp(pc.cast(known, pa.timestamp("ms", zone)))


_TIME_PARTS: dict[type[exp.Expression], str] = {
    exp.Year: "year", exp.Quarter: "quarter", exp.Month: "month", exp.Week: "week", exp.Day: "day",
    exp.DayOfWeek: "isodow", exp.DayOfYear: "doy", exp.Hour: "hour", exp.Minute: "minute", exp.Second: "second",
}  # fmt: skip


def _time(binder: Binder, node: exp.Expression, parent: exp.Expression) -> tuple[BoundExpression, str]:
    """Binds a time in ms. Returns the bound expression, and the time zone of its calendar."""
    zone = UTC
    if isinstance(node, exp.AtTimeZone):
        zone = binder.text_literal(node.args.get("zone"), parent, "a time zone such as 'Europe/Berlin'")
        if not is_zone(zone):
            raise binder.error(parent, "a time zone of the IANA database, such as 'Europe/Berlin'")
        node = node.this
    bound = binder.bind(node)
    if not pa.types.is_int64(bound.type):
        accepted = f"a time in ms since 1970, such as {TIME_COLUMN}"
        raise binder.error(parent, accepted, f"its type is {type_name(bound.type)}")
    return bound, zone


def _time_part(binder: Binder, node: exp.Expression) -> BoundExpression:
    return _part_of(binder, node, node.this, _TIME_PARTS[type(node)])


def _extract(binder: Binder, node: exp.Extract) -> BoundExpression:
    name = node.this.name.lower()
    if name not in PARTS:
        raise binder.error(node, f"one of the parts {', '.join(PARTS)}")
    return _part_of(binder, node, node.expression, name)


def _part_of(binder: Binder, node: exp.Expression, operand: exp.Expression, name: str) -> BoundExpression:
    time, zone = _time(binder, operand, node)
    return BoundExpression(pa.int64(), lambda b: part(time.evaluate(b), name, zone))


def _date_trunc(binder: Binder, node: exp.DateTrunc) -> BoundExpression:
    unit = node.args["unit"].name.lower()
    if unit not in UNITS:
        raise binder.error(node, f"one of the units {', '.join(UNITS)}")
    time, zone = _time(binder, node.this, node)
    return BoundExpression(pa.int64(), lambda b: truncated(time.evaluate(b), unit, zone))


def bind_strftime(binder: Binder, node: exp.Anonymous) -> BoundExpression:
    usage = "strftime(time, '%Y-%m-%d')"
    if len(node.expressions) != 2:
        raise binder.error(node, usage)
    (time, zone), pattern = _time(binder, node.expressions[0], node), node.expressions[1]
    layout = binder.text_literal(pattern, node, usage)
    if len(layout) > MAX_PATTERN:
        raise binder.error(node, f"a pattern of at most {MAX_PATTERN} characters")
    try:
        formatted(pa.array([0]), layout, zone)
    except pa.ArrowInvalid as exc:
        raise binder.error(node, usage, str(exc)) from None
    return BoundExpression(pa.string(), lambda b: formatted(time.evaluate(b), layout, zone))


OPERATORS: tuple[Operator, ...] = (
    (tuple(_TIME_PARTS), _time_part, ("this",)),
    (exp.Extract, _extract, ("this", "expression")),
    (exp.DateTrunc, _date_trunc, ("unit", "this")),
)
