"""Converts event times of any supported type to int64 ms and validates them.

A wrong unit is the most common mistake in a first configuration, and it causes no error by itself. Every record would
fall into 1970 or into the far future, watermarks would jump, and windows would never close. So a record with an
implausible time is rejected. The message names the unit that would make the time plausible.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from edge.codecs.schema import MS_PER_UNIT, EventTime, RecordSchema
from edge.records import Decoded, Rejection, RejectionReason, Rejections, guesses, truncate_example
from edgewater.base.quantities import format_duration
from edgewater.wire import DropReason

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

UNIT_NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
_ISO_SHAPE = r"^\d{4}-\d{2}-\d{2}([T ]\d{2}(:\d{2}(:[0-5]\d(\.\d+)?)?)?(Z|[+-]\d{2}(:?\d{2})?)?)?$"
"""All texts that Arrow's cast accepts, and fractions of any length."""
_ISO_ZONE = r"[T ]\d{2}.*(Z|[+-]\d{2}(:?\d{2})?)$"
_OTHER_SHAPES = (
    (r"^(\d{4})(\d{2})(\d{2})([T ]|$)", r"\1-\2-\3\4"),  # the basic form, 20130101T051500
    (r"([T ]\d{2})(\d{2})(\d{2})", r"\1:\2:\3"),
    (r"([T ]\d{2})(\d{2})", r"\1:\2"),
    (r"(:\d{2}),(\d)", r"\1.\2"),
    (r" (?:UTC|GMT)$", "Z"),
    (r" (Z|[+-]\d{2}(?::?\d{2})?)$", r"\1"),
    (r"(:(?:14|29|44|59)):60(?:\.\d+)?", r"\1:59.999999"),  # a leap second stays in its minute
)
"""What Arrow's cast does not read, and the same time as Arrow reads it."""
_FAR_MS = float(1 << 62)
MAX_TIME_TEXT = 64
"""No time has more characters. It bounds the search for a zone in one."""


@dataclass(frozen=True, slots=True)
class ParsedTimes:
    """Parsed event times. `millis` is valid where both `missing` and `unparseable` are false.

    Attributes:
        other_ms: the other time that may be meant, where the clocks of a zone show a time twice; elsewhere `millis`.
    """

    millis: IntArray
    missing: BoolArray
    unparseable: BoolArray
    other_ms: IntArray

    def spans(self, records: BoolArray) -> tuple[IntArray, IntArray]:
        """Returns the first ms of each of these records with a valid time, and the ms after its last."""
        valid = records & ~(self.missing | self.unparseable)
        first, other = self.millis[valid], self.other_ms[valid]
        return np.minimum(first, other), np.maximum(first, other) + 1


def extract_event_times(table: pa.Table, schema: RecordSchema, arrival_ms: int, rejections: Rejections) -> Decoded:
    """Adds the event time column, and drops invalid records.

    A record is invalid if its time is missing, unparseable or implausible, or if a value contradicts a constant of the
    stream.

    Args:
        table: the declared columns in their types, and the raw time column.
        arrival_ms: the time against which event times are validated (`EventTime.latest_ms`).
        rejections: earlier rejections of the same records. New rejections are added.
    """
    raw = time_values(table, schema.time.columns)
    times = read_times(raw, schema.time, arrival_ms)
    implausible = _implausible(times, schema.time, arrival_ms)
    keep = ~(times.missing | times.unparseable | implausible)
    arrays = [_one_array(table.column(name)) for name in schema.columns]
    for at, name in enumerate(schema.columns):
        values = schema.with_nulls(arrays[at], name)
        if schema.on_nan.get(name) == "reject":
            nan = mask_of(pc.fill_null(pc.is_nan(values), False)) & keep
            told = described(name, "on_nan is reject", values)
            reject(RejectionReason.WRONG_TYPE, nan, table, schema, told, rejections)
            keep &= ~nan
        if name in schema.constants:
            constant = schema.constants[name]
            other = mask_of(pc.fill_null(pc.not_equal(values, pa.scalar(constant, values.type)), False)) & keep
            message = f"expected {constant!r}, the constant of this stream at this edge, or no value"
            reject(RejectionReason.OTHER_CONSTANT, other, table, schema, described(name, message, values), rejections)
            keep &= ~other
            values = pa.repeat(pa.scalar(constant, schema.columns[name]), len(keep))
        arrays[at] = values
    arrays.append(pa.array(times.millis))
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema.output)
    if not keep.all():
        _explain(raw, times, implausible, table, schema, arrival_ms, rejections)
        batch = batch.filter(pa.array(keep))
    if rejections.count:
        rejections.place(schema.time.min_ms, schema.time.latest_ms(arrival_ms), times.millis[keep])
    return Decoded(batch, rejections.as_tuple(), guessed=_doubled(times, keep))


def _doubled(times: ParsedTimes, counted: BoolArray) -> tuple[Rejection, ...]:
    """Returns the statement of the counted records whose event time may also be the other one of a repeated hour."""
    doubled = counted & (times.other_ms != times.millis)
    return guesses(DropReason.DOUBLED_HOUR, *times.spans(doubled)) if doubled.any() else ()


def described(name: str, message: str, values: pa.Array) -> Callable[[int], tuple[str, str]]:
    """Returns a function that returns the example and the message for a row with a value that is not accepted."""
    return lambda row: (f"{name} = {values[row]}", f"{name}: got {truncate_example(str(values[row]))}; {message}")


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks or [pa.nulls(0, column.type)])


def time_values(table: pa.Table, columns: Sequence[str]) -> pa.Array:
    """Returns the raw times. If a date and a time of day are two columns, joins them to ISO 8601 texts."""
    return _joined([_one_array(table.column(name)) for name in columns])


def readable_times(columns: Sequence[pa.Array], time: EventTime) -> ParsedTimes:
    """Returns the times of records that are rejected for another reason.

    Args:
        columns: the raw times, in one column, or in two columns as for `time_values`.
    """
    return read_times(_joined(columns), replace(time, max_skew_ms=None), 0)


def reject(
    reason: RejectionReason,
    rejected: BoolArray,
    table: pa.Table,
    schema: RecordSchema,
    describe: Callable[[int], tuple[str, str]],
    rejections: Rejections,
) -> None:
    """Rejects records of a table, with their times as far as they can be read.

    Args:
        rejected: a mask of the records.
        describe: returns the example and the message for a record.
    """
    if not rejected.any():
        return
    rows, columns = np.flatnonzero(rejected), schema.time.columns if schema.has_time else ()
    times = readable_times([time_values(table.take(rows), columns)], schema.time) if columns else None
    for only, mask in schema.apart(table, rejected):
        rejections.add(reason, *describe(int(np.argmax(mask))), int(mask.sum()), only)
        if times is not None:
            rejections.add_times(reason, *times.spans(mask[rows]), only)


def _joined(arrays: Sequence[pa.Array]) -> pa.Array:
    if len(arrays) == 1:
        return arrays[0]
    return pc.binary_join_element_wise(*(array.cast(pa.string()) for array in arrays), " ")


def read_times(raw: pa.Array, time: EventTime, arrival_ms: int) -> ParsedTimes:
    """Converts raw times: dates, timestamps, texts in ISO 8601 or in a pattern, or numbers in a unit.

    Args:
        time: its unit, and the zone of times that state none.
        arrival_ms: if the clocks of the zone show a time twice, the reading that is nearer to this time is taken.
    """
    if pa.types.is_date(raw.type):
        raw = raw.cast(pa.timestamp("us"))
    if pa.types.is_string(raw.type):
        utc, local = parse_iso8601(raw) if "%" not in time.unit else parse_times(raw, time.unit)
    elif pa.types.is_timestamp(raw.type):
        read = raw.cast(pa.timestamp("us", raw.type.tz), safe=False).cast(pa.timestamp("us"))
        utc, local = (None, read) if raw.type.tz is None else (read, None)
    else:
        return _from_numbers(raw, time.unit)
    readings = [] if local is None else [local] if time.zone == "UTC" else _readings(local, time.zone)
    if utc is not None:
        readings = [pc.coalesce(utc, each) for each in readings] or [utc]
    missing = mask_of(raw.is_null())
    unparseable = mask_of(readings[0].is_null()) & ~missing
    earlier, *more = (pc.fill_null(each.cast(pa.int64()), 0).to_numpy() // 1000 for each in readings)
    if not more:
        return ParsedTimes(earlier, missing, unparseable, earlier)
    later = more[0]
    # A reading that is implausible by itself is none.
    later = np.where(later > time.latest_ms(arrival_ms), earlier, later)
    earlier = np.where(earlier < time.min_ms, later, earlier)
    taken = np.where(np.abs(later - arrival_ms) < np.abs(earlier - arrival_ms), later, earlier)
    return ParsedTimes(taken, missing, unparseable, earlier + later - taken)


def _readings(local: pa.Array, zone: str) -> list[pa.Array]:
    """Returns the earlier and the later time in UTC at which the clocks of a zone show each local time; null if they
    skip it.
    """
    earlier, later = (
        pc.assume_timezone(local, zone, ambiguous=r, nonexistent="latest") for r in ("earliest", "latest")
    )
    shown = pc.equal(pc.local_timestamp(earlier), local)
    return [pc.if_else(shown, each.cast(pa.timestamp("us")), None) for each in (earlier, later)]


def _from_numbers(raw: pa.Array, unit: str) -> ParsedTimes:
    missing = mask_of(raw.is_null())
    if unit == "ns" and pa.types.is_integer(raw.type):
        millis = pc.fill_null(raw.cast(pa.int64()), 0).to_numpy() // 1_000_000
        return ParsedTimes(millis, missing, np.zeros(len(raw), np.bool_), millis)
    numbers = pc.fill_null(raw.cast(pa.float64(), safe=False), 0.0).to_numpy()
    finite = np.isfinite(numbers)
    # Rounded down. 0.5 µs are added to seconds and ns, because a float64 such as 1.001 s is not more precise.
    scaled = np.where(finite, numbers, 0.0)
    scaled = scaled / 1_000 if unit == "us" else scaled * MS_PER_UNIT[unit] + (0.0 if unit == "ms" else 0.0005)
    millis = np.floor(np.clip(scaled, -_FAR_MS, _FAR_MS)).astype(np.int64)
    return ParsedTimes(millis, missing, ~finite, millis)


def mask_of(array: pa.Array) -> BoolArray:
    mask: BoolArray = array.to_numpy(zero_copy_only=False)
    return mask


def parse_iso8601(texts: pa.Array) -> tuple[pa.Array | None, pa.Array | None]:
    """Parses ISO 8601 texts to timestamps in µs: times with a zone in UTC, and the local times of texts without one.

    Each array has null for the other texts; None: all are null.
    """
    first = (texts[0].as_py() or "")[:MAX_TIME_TEXT] if len(texts) else ""
    is_zoned = re.search(_ISO_ZONE, first) is not None
    with contextlib.suppress(pa.ArrowInvalid):  # a cast that fails is slow
        if is_zoned:
            return texts.cast(pa.timestamp("us", "UTC")).cast(pa.timestamp("us")), None
        return None, texts.cast(pa.timestamp("us"))
    # Zones differ between records, fractions are finer than µs, or some texts are in another form or are not times.
    known = pc.match_substring_regex(texts, _ISO_SHAPE)
    if not pc.all(pc.fill_null(known, True)).as_py():
        other = pc.utf8_upper(texts.filter(pc.invert(known)))
        for pattern, same in _OTHER_SHAPES:
            other = pc.replace_substring_regex(other, pattern, same)
        texts = pc.replace_with_mask(texts, pc.fill_null(pc.invert(known), False), other)
        known = pc.match_substring_regex(texts, _ISO_SHAPE)
    shaped = pc.replace_substring_regex(pc.if_else(known, texts, None), r"(\.\d{6})\d+", r"\1")
    zoned = pc.match_substring_regex(shaped, _ISO_ZONE)
    utc = cast_or_null(pc.if_else(zoned, shaped, None), pa.timestamp("us", "UTC")).cast(pa.timestamp("us"))
    return utc, cast_or_null(pc.if_else(zoned, None, shaped), pa.timestamp("us"))


def parse_times(texts: pa.Array, pattern: str) -> tuple[pa.Array | None, pa.Array | None]:
    """Parses texts by a pattern of `strptime`. Returns what `parse_iso8601` does. With ``%z``, times have a zone."""
    times = strptime(texts, pattern)
    return (times, None) if "%z" in pattern else (None, times)


def strptime(texts: pa.Array, pattern: str) -> pa.Array:
    """Returns timestamps in µs, in UTC if the pattern has ``%z``; null for texts of another form."""
    times = pc.strptime(texts, format=pattern, unit="us", error_is_null=True).cast(pa.timestamp("us"))
    # The C library reads the 31st of February as the 3rd of March, and 12:00:61 as 12:01:01. So only the first days of
    # a month and the first seconds of a minute are checked.
    in_seconds = pc.and_(pc.less_equal(pc.second(times), 1), pc.match_substring_regex(texts, "6[01]"))
    doubtful = pc.fill_null(pc.or_(pc.less_equal(pc.day(times), 4), in_seconds), False)
    if pc.any(doubtful).as_py():
        wrong = [text for text in pc.unique(texts.filter(doubtful)).to_pylist() if not _exists(text, pattern)]
        times = pc.if_else(pc.is_in(texts, pa.array(wrong, texts.type)), None, times) if wrong else times
    return times


def _exists(text: str, pattern: str) -> bool:
    try:
        dt.datetime.strptime(text, pattern)
    except ValueError:
        return False
    return True


def is_time_pattern(pattern: str) -> bool:
    """Returns whether Arrow can read date and time of day, to the second, with a pattern of `strptime`."""
    if "%Z" in pattern:
        return False  # Arrow does not read names of zones
    example = dt.datetime(2015, 12, 31, 22, 58, 47, tzinfo=dt.UTC)
    try:
        read = strptime(pa.array([example.strftime(pattern)]), pattern)[0].as_py()
    except (pa.ArrowInvalid, ValueError):
        return False
    return bool(read == example.replace(tzinfo=None))


def cast_or_null(array: pa.Array, target: pa.DataType) -> pa.Array:
    """Casts an array, with null for each value that cannot be cast. O(n + k log n) for k such values."""
    try:
        return array.cast(target)
    except pa.ArrowInvalid:
        if len(array) == 1:
            return pa.nulls(1, target)
        middle = len(array) // 2
        return pa.concat_arrays([cast_or_null(array[:middle], target), cast_or_null(array[middle:], target)])


def _implausible(times: ParsedTimes, time: EventTime, arrival_ms: int) -> BoolArray:
    outside = (times.millis < time.min_ms) | (times.millis > time.latest_ms(arrival_ms))
    implausible: BoolArray = outside & ~times.missing & ~times.unparseable
    return implausible


def _explain(
    raw: pa.Array,
    times: ParsedTimes,
    implausible: BoolArray,
    table: pa.Table,
    schema: RecordSchema,
    arrival_ms: int,
    rejections: Rejections,
) -> None:
    def add(reason: RejectionReason, rejected: BoolArray, message: str) -> None:
        for only, mask in schema.apart(table, rejected) if rejected.any() else ():
            first = _value(raw, int(np.argmax(mask)))
            rejections.add(reason, f"{field} = {first}", message, int(mask.sum()), only)

    time = schema.time
    field = " ".join(time.columns)

    add(RejectionReason.TIME_MISSING, times.missing, f"{field}: no value; every record needs its event time")
    add(RejectionReason.TIME_UNPARSEABLE, times.unparseable, f"{field}: not a time; expected {time_accepted(time)}")
    if implausible.any():
        first = int(np.argmax(implausible))
        message = _why_implausible(_value(raw, first), int(times.millis[first]), time, arrival_ms)
        add(RejectionReason.TIME_OUT_OF_RANGE, implausible, f"{field}: {message}")


def _value(raw: pa.Array, row: int) -> object:
    """Returns a raw time; a number for a timestamp beyond the range of Python's times."""
    try:
        return raw[row].as_py()
    except (OverflowError, ValueError):
        return raw[row].value


def time_accepted(time: EventTime) -> str:
    """Describes accepted times, for messages."""
    if not time.is_text:
        example = 1357017300 * round(1000 / MS_PER_UNIT[time.unit])
        return f"a number of {UNIT_NAMES[time.unit]} since 1970 such as {example}"
    shape = "ISO 8601 text such as 2013-01-01T05:15:00Z" if time.unit == "iso8601" else f"a time as {time.unit}"
    return shape if time.zone == "UTC" else f"{shape}, or a time that the clocks of {time.zone} show"


def _why_implausible(value: object, millis: int, time: EventTime, arrival_ms: int) -> str:
    latest = time.latest_ms(arrival_ms)
    if isinstance(value, int | float):
        for unit, scale in MS_PER_UNIT.items():
            if unit != time.unit and time.min_ms <= value * scale <= latest:
                return f"looks like {UNIT_NAMES[unit]}; set time.unit: {unit}"
    if millis < time.min_ms:
        return f"before {_iso(time.min_ms)}; if that is correct, set time.min_time to an earlier time"
    if time.max_skew_ms is None:
        return "after the year 2200; check time.unit"
    skew = format_duration(time.max_skew_ms)
    return f"more than {skew} later than its arrival; correct the source's clock, or increase time.max_skew"


def _iso(millis: int) -> str:
    return f"{np.datetime64(millis, 'ms')}Z"
