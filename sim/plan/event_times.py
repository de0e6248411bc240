"""Converts the time columns of a data file to event times in int64 ms."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from edge.codecs import YEAR_2000_MS, YEAR_2200_MS, cast_or_null, parse_iso8601
from edgewater.errors import InvalidConfig
from edgewater.synopses import BoolArray, FloatArray, IntArray

UNITS = {"s": 1000.0, "ms": 1.0, "us": 1e-3}
"""ms per unit of a number."""
NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
ACCEPTED = (
    "event times: numbers since 1970 (--time-unit ms, s or us), ISO 8601 text such as 2015-01-01T05:15:00Z, or"
    " Parquet's own; a date and a time in two columns: --time DATE --time TIME"
)
NUMBER = re.compile(r"^\s*[+-]?\d+(\.\d*)?([eE][+-]?\d+)?\s*$")


def event_times(
    table: pa.Table, columns: Sequence[str], unit: str | None, notify: Callable[[str], None]
) -> tuple[IntArray, BoolArray]:
    """Returns times in ms, and a mask of the valid ones; reports the number of the others to `notify`.

    Args:
        columns: one column, or several whose texts are joined by a blank.
        unit: unit of numeric times, a key of `UNITS`; None: ms.

    Raises:
        InvalidConfig: no time can be read, or the range of the numbers shows another unit.
    """
    field = " ".join(columns)
    raw = _joined(table, columns)
    millis, valid = _read(raw, unit, field)
    negative = valid & (millis < 0)
    valid &= ~negative
    if not valid.any():
        shown = next((v for v in raw.slice(0, 1000).to_pylist() if v is not None), None)
        raise InvalidConfig("--time", field, ACCEPTED, f"no row has a readable time (the first one is {shown})")
    unreadable = int(np.count_nonzero(~valid))
    if unreadable:
        first = raw[int(np.argmin(valid))].as_py()
        notify(f"{unreadable:,} of {len(valid):,} records have no readable time in {field} (the first one is {first})")
    return millis, valid


def _joined(table: pa.Table, columns: Sequence[str]) -> pa.Array:
    arrays = [table.column(name).combine_chunks() for name in columns]
    if len(arrays) == 1:
        (array,) = arrays
        return array.chunk(0) if isinstance(array, pa.ChunkedArray) else array
    texts = [a.cast(pa.string()) for a in arrays]
    joined = pc.binary_join_element_wise(*texts, " ")
    return joined.combine_chunks() if isinstance(joined, pa.ChunkedArray) else joined


def _read(raw: pa.Array, unit: str | None, field: str) -> tuple[IntArray, BoolArray]:
    kind = raw.type
    if pa.types.is_date(kind):
        raw = raw.cast(pa.timestamp("ms"))
    if pa.types.is_timestamp(raw.type):
        return _from_micros(raw.cast(pa.timestamp("us", raw.type.tz), safe=False))
    if pa.types.is_string(kind):
        some = next((v for v in raw.slice(0, 1000).to_pylist() if v), "")
        if not NUMBER.fullmatch(some):
            return _from_micros(parse_iso8601(raw))
        raw = cast_or_null(raw, pa.float64())
    if pa.types.is_integer(raw.type) or pa.types.is_floating(raw.type):
        return _from_numbers(raw, unit, field)
    raise InvalidConfig("--time", field, ACCEPTED, f"the column has the type {kind}")


def _from_micros(micros: pa.Array) -> tuple[IntArray, BoolArray]:
    valid = micros.is_valid().to_numpy(zero_copy_only=False)
    whole = pc.fill_null(micros.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
    return np.asarray(whole // 1000, np.int64), np.array(valid)


def _from_numbers(raw: pa.Array, unit: str | None, field: str) -> tuple[IntArray, BoolArray]:
    numbers: FloatArray = pc.fill_null(raw.cast(pa.float64(), safe=False), np.nan).to_numpy(zero_copy_only=False)
    valid = np.isfinite(numbers)
    if not valid.any():
        return np.zeros(len(numbers), np.int64), valid
    earliest, latest = float(numbers[valid].min()), float(numbers[valid].max())
    _check_unit(earliest, latest, unit, field)
    # Half a microsecond against rounding of floats: 1.001 s is 1001 ms.
    exact = np.where(valid, numbers, 0.0) * UNITS[unit or "ms"] + (0.0005 if unit == "s" else 0.0)
    return np.floor(exact).astype(np.int64), valid


def _check_unit(earliest: float, latest: float, unit: str | None, field: str) -> None:
    """Raises InvalidConfig if the range of the numbers suggests another unit than the stated one."""
    scale = UNITS[unit or "ms"]
    if unit is None and YEAR_2000_MS <= earliest * 1000 <= latest * 1000 <= YEAR_2200_MS:
        raise InvalidConfig(
            "--time", field, "--time-unit s (or --time-unit ms, if they are milliseconds)",
            f"times from {earliest:.0f} to {latest:.0f} look like seconds since 1970; milliseconds are the default",
        )  # fmt: skip
    if latest * scale > YEAR_2200_MS:
        likely = {u: s for u, s in {**UNITS, "ns": 1e-6}.items() if YEAR_2000_MS <= latest * s <= YEAR_2200_MS}
        looks = f" and look like {NAMES[next(iter(likely))]}" if likely else ""
        accepted = f"--time-unit {next(iter(likely))}" if likely and "ns" not in likely else ACCEPTED
        raise InvalidConfig(
            "--time",
            field,
            accepted,
            f"as {NAMES[unit or 'ms']}, times up to {latest:.0f} are after the year 2200{looks}",
        )
