"""Event time: from whatever a record carries to int64 ms, and whether that is plausible.

A wrong unit is the commonest mistake in a first configuration, and a silent one: every record falls
into 1970 or into the far future, watermarks jump, windows never close. So an implausible time is
refused, with a message that names the unit that would make it plausible.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from edge.codecs.schema import EventTime, RecordSchema
from edge.records import Decoded, Reason, Rejections
from edgewater.quantities import format_duration

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

UNIT_NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds"}
_MS_PER_UNIT = {"s": 1000.0, "ms": 1.0, "us": 0.001}
_ISO_SHAPE = r"^\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}(\.\d+)?)?(Z|[+-]\d{2}(:?\d{2})?)?)?$"
_ISO_ZONE = r"\d{2}:\d{2}.*(Z|[+-]\d{2}(:?\d{2})?)$"
_FAR_MS = float(1 << 62)


@dataclass(frozen=True, slots=True)
class _Times:
    """`millis` is meaningful where neither `missing` nor `unparseable`."""

    millis: IntArray
    missing: BoolArray
    unparseable: BoolArray


def decoded(table: pa.Table, schema: RecordSchema, arrival_ms: int, rejections: Rejections) -> Decoded:
    """The batch of a raw table, without the records whose time is missing, unreadable or implausible.

    Args:
        table: has the declared columns in their types, and the time column as it came.
        rejections: what was refused before; this adds to it.
    """
    raw = _one_array(table.column(schema.time.column))
    times = _read_times(raw, schema.time.unit)
    implausible = _implausible(times, schema.time, arrival_ms)
    keep = ~(times.missing | times.unparseable | implausible)
    arrays = [_one_array(table.column(name)) for name in schema.columns]
    arrays.append(pa.array(times.millis))
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema.output)
    if not keep.all():
        _explain(raw, times, implausible, schema.time, arrival_ms, rejections)
        batch = batch.filter(pa.array(keep))
    return Decoded(batch, rejections.as_tuple())


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks or [pa.nulls(0, column.type)])


def _read_times(raw: pa.Array, unit: str) -> _Times:
    if pa.types.is_date(raw.type):
        raw = raw.cast(pa.timestamp("us"))
    if pa.types.is_string(raw.type):
        return _from_timestamps(raw, parse_iso8601(raw))
    if pa.types.is_timestamp(raw.type):
        return _from_timestamps(raw, raw.cast(pa.timestamp("us"), safe=False))
    return _from_numbers(raw, unit)


def _from_timestamps(raw: pa.Array, micros: pa.Array) -> _Times:
    missing = _mask(raw.is_null())
    millis = pc.fill_null(micros.cast(pa.int64()), 0).to_numpy() // 1000
    return _Times(millis, missing, _mask(micros.is_null()) & ~missing)


def _from_numbers(raw: pa.Array, unit: str) -> _Times:
    missing = _mask(raw.is_null())
    numbers = pc.fill_null(raw.cast(pa.float64(), safe=False), 0.0).to_numpy()
    finite = np.isfinite(numbers)
    # Floor, as for every unit; but a double of seconds, such as 1.001, is no finer than 0.5 µs.
    exact = np.where(finite, numbers, 0.0) * 1000 + 0.0005 if unit == "s" else np.where(finite, numbers, 0.0)
    if unit == "us":
        exact = exact / 1000
    millis = np.floor(np.clip(exact, -_FAR_MS, _FAR_MS)).astype(np.int64)
    return _Times(millis, missing, ~finite)


def _mask(array: pa.Array) -> BoolArray:
    mask: BoolArray = array.to_numpy(zero_copy_only=False)
    return mask


def parse_iso8601(texts: pa.Array) -> pa.Array:
    """UTC timestamps in µs of ISO 8601 texts; null where there is none. Without a zone: UTC."""
    for target in (pa.timestamp("us", "UTC"), pa.timestamp("us")):
        try:
            return texts.cast(target).cast(pa.timestamp("us"))
        except pa.ArrowInvalid:
            continue
    # Zones differ from record to record, fractions are finer than µs, or some are not times at all.
    shaped = pc.if_else(pc.match_substring_regex(texts, _ISO_SHAPE), texts, None)
    shaped = pc.replace_substring_regex(shaped, r"(\.\d{6})\d+", r"\1")
    zoned = pc.match_substring_regex(shaped, _ISO_ZONE)
    with_zone = cast_or_null(pc.if_else(zoned, shaped, None), pa.timestamp("us", "UTC"))
    without = cast_or_null(pc.if_else(zoned, None, shaped), pa.timestamp("us"))
    return pc.coalesce(with_zone.cast(pa.timestamp("us")), without)


def cast_or_null(array: pa.Array, target: pa.DataType) -> pa.Array:
    """`array` cast, with null for each value that cannot be. O(n + k log n) for k of those."""
    try:
        return array.cast(target)
    except pa.ArrowInvalid:
        if len(array) == 1:
            return pa.nulls(1, target)
        middle = len(array) // 2
        return pa.concat_arrays([cast_or_null(array[:middle], target), cast_or_null(array[middle:], target)])


def _implausible(times: _Times, time: EventTime, arrival_ms: int) -> BoolArray:
    outside = (times.millis < time.min_ms) | (times.millis > time.latest_ms(arrival_ms))
    implausible: BoolArray = outside & ~times.missing & ~times.unparseable
    return implausible


def _explain(
    raw: pa.Array, times: _Times, implausible: BoolArray, time: EventTime, arrival_ms: int, rejections: Rejections
) -> None:
    def add(reason: Reason, mask: BoolArray, message: str) -> None:
        if mask.any():
            first = raw[int(np.argmax(mask))].as_py()
            rejections.add(reason, f"{time.column} = {first}", message, int(mask.sum()))

    add(Reason.TIME_MISSING, times.missing, f"{time.column}: no value; every record needs its event time")
    add(Reason.TIME_UNPARSEABLE, times.unparseable, f"{time.column}: not a time; expected {time_accepted(time.unit)}")
    if implausible.any():
        first = int(np.argmax(implausible))
        message = _why_implausible(raw[first].as_py(), int(times.millis[first]), time, arrival_ms)
        add(Reason.TIME_OUT_OF_RANGE, implausible, f"{time.column}: {message}")


def time_accepted(unit: str) -> str:
    """What a time in this unit looks like, as a phrase."""
    if unit == "iso8601":
        return "ISO 8601 text such as 2013-01-01T05:15:00Z"
    example = {"s": "1357017300", "ms": "1357017300000", "us": "1357017300000000"}[unit]
    return f"a number of {UNIT_NAMES[unit]} since 1970 such as {example}"


def _why_implausible(value: object, millis: int, time: EventTime, arrival_ms: int) -> str:
    latest = time.latest_ms(arrival_ms)
    if isinstance(value, int | float):
        for unit, scale in _MS_PER_UNIT.items():
            if unit != time.unit and time.min_ms <= value * scale <= latest:
                return f"looks like {UNIT_NAMES[unit]}; set time.unit: {unit}"
    if millis < time.min_ms:
        return f"before {_iso(time.min_ms)}; if that is right, set time.min_time to an earlier time"
    if time.max_skew_ms is None:
        return "after the year 2200; check time.unit"
    skew = format_duration(time.max_skew_ms)
    return f"more than {skew} later than its arrival; set the clock at the source, or a greater time.max_skew"


def _iso(millis: int) -> str:
    return f"{np.datetime64(millis, 'ms')}Z"
