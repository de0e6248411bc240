"""The calendar functions of expressions: their kernels on Arrow arrays and scalars, and their binding.

They compute parts of times, and starts of calendar units, in any time zone. Times are int64 ms since the epoch. Times
outside the years 1 to 9999 give null.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc
from sqlglot import exp

from edgewater.base.streams import TIME_COLUMN, type_name
from edgewater.model.arithmetic import Value
from edgewater.model.binding import Binder, BoundExpression, Operator
from edgewater.model.calendar_units import UTC
from edgewater.model.calendars import is_zone, local_times, truncated
from edgewater.model.text_functions import MAX_PATTERN

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


def part(times: Value, name: str, zone: str = UTC) -> Value:
    """Returns a part of times, int64.

    Args:
        name: a key of `PARTS`.
    """
    return pc.cast(PARTS[name](local_times(times, zone)), pa.int64())


def formatted(times: Value, pattern: str, zone: str = UTC) -> Value:
    """Returns times as text by a pattern of strftime, such as ``%Y-%m-%d``. Fractions of seconds are dropped."""
    seconds = pc.cast(pc.floor_temporal(local_times(times, zone), 1, unit="second"), pa.timestamp("s"))
    if isinstance(seconds, pa.Scalar):
        return pc.strftime(seconds, format=pattern)
    distinct = pc.dictionary_encode(seconds)  # formatting takes 40 times as long as encoding
    return pc.strftime(distinct.dictionary, format=pattern).take(distinct.indices)


_TIME_PARTS: dict[type[exp.Expression], str] = {
    **{getattr(exp, name.title()): name for name in PARTS if name not in ("isodow", "doy")},
    exp.DayOfWeek: "isodow",
    exp.DayOfYear: "doy",
}


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
