"""Converts the time columns of a data file to event times in int64 ms."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from edge.codecs.event_time import UNIT_NAMES, read_times, time_values
from edge.codecs.schema import DAY_MS, MS_PER_UNIT, YEAR_2000_MS, YEAR_2200_MS, EventTime
from edgewater.base.errors import InvalidConfig
from edgewater.model import arithmetic
from edgewater.synopses import BoolArray, IntArray

ACCEPTED = (
    "event times: numbers since 1970 (--time-unit ms, s, us or ns), ISO 8601 text such as 2015-01-01T05:15:00Z, or"
    " Parquet's own; a date and a time in two columns: --time DATE --time TIME"
)
NUMBER = re.compile(r"^\s*[+-]?\d+(\.\d*)?([eE][+-]?\d+)?\s*$")


def event_times(
    table: pa.Table, columns: Sequence[str], unit: str | None, notify: Callable[[str], None]
) -> tuple[IntArray, BoolArray]:
    """Returns times in ms, and a mask of the valid times. Reports the number of invalid times to `notify`.

    Args:
        columns: one column, or a date and a time of day.
        unit: unit of numeric times, a key of `MS_PER_UNIT`; None: ms.

    Raises:
        InvalidConfig: no time can be read, or the range of the numbers shows another unit.
    """
    field = " ".join(columns)
    if len(columns) > 2:
        raise InvalidConfig("--time", field, "one column, or two: a date and a time of day", f"{len(columns)} columns")
    raw = time_values(table, columns)
    read = _numbers_of_text(raw)
    kind = read.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        _check_unit(read, unit, field)
    elif not (pa.types.is_string(kind) or pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
        raise InvalidConfig("--time", field, ACCEPTED, f"the column has the type {kind}")
    times = read_times(read, EventTime("", unit or ("iso8601" if pa.types.is_string(kind) else "ms")), 0)
    millis, valid = times.millis, ~(times.missing | times.unparseable)
    negative = valid & (millis < 0)
    valid &= ~negative
    if not valid.any():
        shown = next((v for v in raw.slice(0, 1000).to_pylist() if v is not None), None)
        raise InvalidConfig("--time", field, ACCEPTED, f"no row has a readable time (the first one is {shown})")
    unreadable = int(np.count_nonzero(~valid))
    if unreadable:
        first = raw[int(np.argmin(valid))].as_py()
        notify(f"{unreadable:,} of {len(valid):,} records have no readable time in {field} (the first one is {first})")
    if not (millis[valid] % DAY_MS).any():
        notify(f"every time in {field} is a midnight; with a time of day in another column: --time DATE --time TIME")
    return millis, valid


def _numbers_of_text(raw: pa.Array) -> pa.Array:
    """Converts texts that are numbers. Time columns of CSV files are read as text."""
    if not pa.types.is_string(raw.type):
        return raw
    some = next((v for v in raw.slice(0, 1000).to_pylist() if v), "")
    return arithmetic.parse(raw, pa.float64()) if NUMBER.fullmatch(some) else raw


def _check_unit(raw: pa.Array, unit: str | None, field: str) -> None:
    """Raises InvalidConfig if the range of the numbers suggests another unit than the stated one."""
    numbers = pc.fill_null(raw.cast(pa.float64(), safe=False), np.nan).to_numpy(zero_copy_only=False)
    numbers = numbers[np.isfinite(numbers)]
    if not len(numbers):
        return
    earliest, latest = float(numbers.min()), float(numbers.max())
    scale = MS_PER_UNIT[unit or "ms"]
    if unit is None and YEAR_2000_MS <= earliest * 1000 <= latest * 1000 <= YEAR_2200_MS:
        raise InvalidConfig(
            "--time",
            field,
            "--time-unit s (or --time-unit ms, if they are milliseconds)",
            f"times from {earliest:.0f} to {latest:.0f} look like seconds since 1970; milliseconds are the default",
        )
    if latest * scale > YEAR_2200_MS:
        likely = {u: s for u, s in MS_PER_UNIT.items() if YEAR_2000_MS <= latest * s <= YEAR_2200_MS}
        looks = f" and look like {UNIT_NAMES[next(iter(likely))]}" if likely else ""
        accepted = f"--time-unit {next(iter(likely))}" if likely and "ns" not in likely else ACCEPTED
        reason = f"as {UNIT_NAMES[unit or 'ms']}, times up to {latest:.0f} are after the year 2200{looks}"
        raise InvalidConfig("--time", field, accepted, reason)
