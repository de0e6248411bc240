from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest

from edge.codecs.event_time import cast_or_null, extract_event_times
from edge.codecs.schema import DAY_MS, EventTime, RecordSchema
from edge.records import Decoded, Rejections

NOW = 1_700_000_000_000


def times(values: pa.Array, unit: str = "ms", **more: object) -> Decoded:
    schema = RecordSchema({}, EventTime("t", unit, **more))  # type: ignore[arg-type]
    return extract_event_times(pa.table({"t": values}), schema, NOW, Rejections())


def millis(values: pa.Array, unit: str = "ms", **more: object) -> list[int]:
    result = times(values, unit, **more)
    assert result.rejected == ()
    return list(result.batch.column("event_time_ms").to_pylist())


@pytest.mark.parametrize(
    ("values", "unit"),
    [
        ([NOW], "ms"),
        ([NOW / 1000], "s"),
        ([NOW * 1000], "us"),
        ([NOW * 1000 + 999], "us"),
        ([NOW + 0.9], "ms"),
        (["2023-11-14T22:13:20Z"], "iso8601"),
        (["2023-11-14 22:13:20"], "iso8601"),
        (["2023-11-15T03:43:20.000999+05:30"], "iso8601"),
        ([datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)], "ms"),
    ],
)
def test_every_unit_comes_out_in_whole_milliseconds(values: list[object], unit: str) -> None:
    assert millis(pa.array(values), unit) == [NOW]


def test_fractions_of_seconds_are_exact_to_the_millisecond() -> None:
    wanted = NOW + np.arange(1000)
    assert millis(pa.array(wanted / 1000), "s") == wanted.tolist()


def test_texts_of_mixed_shapes_are_parsed_and_only_the_bad_ones_refused() -> None:
    texts = pa.array(
        ["2023-11-14T22:13:20Z", "2023-11-14 22:13:20.5", "2023-11-14", "2023-11-14T22:13:20.123456789+01", "noon",
         "2023-13-14T22:13:20Z", None]
    )  # fmt: skip
    result = times(texts, "iso8601")
    found = [str(np.datetime64(t, "ms")) for t in result.batch.column("event_time_ms").to_pylist()]
    assert found == [
        "2023-11-14T22:13:20.000",
        "2023-11-14T22:13:20.500",
        "2023-11-14T00:00:00.000",
        "2023-11-14T21:13:20.123",
    ]
    rejected = {r.reason: r for r in result.rejected}
    assert (rejected["time-unparseable"].count, rejected["time-missing"].count) == (2, 1)
    assert rejected["time-unparseable"].example == "t = noon"
    assert "2013-01-01T05:15:00Z" in rejected["time-unparseable"].message


@pytest.mark.parametrize(
    ("value", "unit", "says"),
    [
        (NOW // 1000, "ms", "looks like seconds; set time.unit: s"),
        (NOW, "s", "looks like milliseconds; set time.unit: ms"),
        (NOW, "us", "looks like milliseconds; set time.unit: ms"),
        (NOW * 1000, "ms", "looks like microseconds; set time.unit: us"),
        (5, "ms", "before 2000-01-01T00:00:00.000Z"),
        (-1, "s", "before 2000-01-01T00:00:00.000Z"),
        (NOW + 2 * DAY_MS, "ms", "more than 10m later than its arrival"),
        (1e300, "s", "more than 10m later"),
    ],
)
def test_an_implausible_time_is_refused_and_the_likely_unit_named(value: float, unit: str, says: str) -> None:
    (rejection,) = times(pa.array([value]), unit).rejected
    assert rejection.reason == "time-out-of-range"
    assert says in rejection.message


def test_what_is_plausible_can_be_configured() -> None:
    assert millis(pa.array([5]), "ms", min_ms=0) == [5]
    assert millis(pa.array([NOW + 2 * DAY_MS]), "ms", max_skew_ms=3 * DAY_MS) == [NOW + 2 * DAY_MS]


def test_a_replay_has_no_upper_bound_but_still_knows_its_units() -> None:
    future = NOW + 1000 * DAY_MS
    assert millis(pa.array([future]), "ms", max_skew_ms=None) == [future]
    (rejection,) = times(pa.array([NOW]), "s", max_skew_ms=None).rejected
    assert "looks like milliseconds" in rejection.message


def test_nan_is_no_time() -> None:
    (rejection,) = times(pa.array([float("nan"), float(NOW)])).rejected
    assert (rejection.reason, rejection.count) == ("time-unparseable", 1)


def test_casting_keeps_the_good_values_among_bad_ones() -> None:
    texts = pa.array(["x" if n % 3 == 0 else str(n) for n in range(100)])
    wanted = [None if n % 3 == 0 else n for n in range(100)]
    assert cast_or_null(texts, pa.int64()).to_pylist() == wanted


def test_no_texts_are_no_times() -> None:
    assert millis(pa.array([], pa.string()), "iso8601") == []


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("2023-11-14T22:13:20,5Z", "2023-11-14T22:13:20.500"),
        ("2023-11-14t22:13:20z", "2023-11-14T22:13:20.000"),
        ("20231114T221320Z", "2023-11-14T22:13:20.000"),
        ("20231114T221320,25+0100", "2023-11-14T21:13:20.250"),
        ("20231114", "2023-11-14T00:00:00.000"),
        ("2023-11-14 22:13:20 +0000", "2023-11-14T22:13:20.000"),
        ("2023-11-14 22:13:20.75 UTC", "2023-11-14T22:13:20.750"),
        ("2023-11-14T22+01", "2023-11-14T21:00:00.000"),
        ("2016-12-31T23:59:60Z", "2016-12-31T23:59:59.999"),
    ],
)
def test_the_forms_of_iso_8601_that_programs_write(text: str, read: str) -> None:
    among_others = pa.array(["2023-11-14T22:13:20Z", text, "2023-11-14 22:13:20"])
    for given, at in ((pa.array([text]), 0), (among_others, 1)):
        assert str(np.datetime64(millis(given, "iso8601")[at], "ms")) == read


@pytest.mark.parametrize("text", ["2023-11-14T22:13:60Z", "20231314", "2023-11-14T22:13:20,Z", "2023-1-4", "UTC"])
def test_what_is_no_time_stays_none(text: str) -> None:
    assert [r.reason for r in times(pa.array([text, "2023-11-14"]), "iso8601").rejected] == ["time-unparseable"]


def test_a_text_that_is_no_time_is_searched_for_a_zone_in_bounded_time() -> None:
    (rejection,) = times(pa.array(["T05" * 1_000_000]), "iso8601").rejected
    assert rejection.reason == "time-unparseable"


def test_nanoseconds_are_exact_to_the_millisecond() -> None:
    wanted = NOW + np.arange(1000)
    assert millis(pa.array(wanted * 1_000_000 + 999_999), "ns") == wanted.tolist()
    assert millis(pa.array(wanted * 1_000_000), "ns") == wanted.tolist()
    assert millis(pa.array((wanted * 1_000_000).astype(float)), "ns") == wanted.tolist()


BERLIN = "Europe/Berlin"


@pytest.mark.parametrize(
    ("values", "unit"),
    [
        (["2023-07-01T14:00:00", "2023-01-01 13:00:00", "2023-07-01T12:00:00Z"], "iso8601"),
        (["01.07.2023 14:00:00", "01.01.2023 13:00:00"], "%d.%m.%Y %H:%M:%S"),
        ([datetime(2023, 7, 1, 14), datetime(2023, 1, 1, 13)], "ms"),
    ],
)
def test_times_without_a_zone_are_in_the_zone_of_the_stream(values: list[object], unit: str) -> None:
    for at in millis(pa.array(values), unit, zone=BERLIN):
        assert str(np.datetime64(at, "ms"))[11:] == "12:00:00.000"


def test_an_hour_that_the_clocks_skip_is_no_time() -> None:
    result = times(
        pa.array(["2023-03-26T02:30:00", "2023-03-26T03:00:00", "2023-03-26T01:59:59"]), "iso8601", zone=BERLIN
    )
    assert result.batch.num_rows == 2
    (rejection,) = result.rejected
    assert (rejection.reason, rejection.count, rejection.example) == ("time-unparseable", 1, "t = 2023-03-26T02:30:00")
    assert BERLIN in rejection.message


@pytest.mark.parametrize("arrival", ["2023-10-29T00:31", "2023-10-29T01:31", "2023-11-14T00:00"])
def test_an_hour_that_the_clocks_show_twice_is_a_guess_about_both_hours(arrival: str) -> None:
    arrival_ms = int(np.datetime64(arrival, "ms").astype(np.int64))
    schema = RecordSchema({}, EventTime("t", "iso8601", max_skew_ms=None, zone=BERLIN))
    texts = pa.array(["2023-10-29T02:30:00", "2023-10-29T03:00:00", "2023-10-29T02:30:00+02:00"])
    result = extract_event_times(pa.table({"t": texts}), schema, arrival_ms, Rejections())
    first, second = (int(np.datetime64(f"2023-10-29T0{hour}:30", "ms").astype(np.int64)) for hour in (0, 1))
    taken = first if arrival == "2023-10-29T00:31" else second
    if arrival == "2023-10-29T00:31":  # at that time the second reading is an hour ahead
        bounded = RecordSchema({}, EventTime("t", "iso8601", zone=BERLIN))
        certain = extract_event_times(pa.table({"t": texts[:1]}), bounded, arrival_ms, Rejections())
        assert (certain.batch.column(0).to_pylist(), certain.guessed) == ([first], ())
    assert result.batch.column("event_time_ms").to_pylist() == [taken, second + 30 * 60_000, first]
    (guess,) = result.guessed
    assert (guess.reason, guess.count, guess.spans) == ("doubled-hour", 1, ((first, second + 1, 1),))


def test_a_date_and_a_time_of_day_in_two_columns_are_one_time() -> None:
    schema = RecordSchema({}, EventTime("day", "iso8601", time_of_day="hour"))
    table = pa.table(
        {
            "day": ["2023-11-14", "2023-11-14", "2023-11-14", None, "2023-11-14"],
            "hour": ["22:13:20", "22:13", "late", "22:13:20", None],
        }
    )
    result = extract_event_times(table, schema, NOW, Rejections())
    assert result.batch.column("event_time_ms").to_pylist() == [NOW, NOW - 20_000]
    rejected = {r.reason: r for r in result.rejected}
    assert (rejected["time-unparseable"].count, rejected["time-missing"].count) == (1, 2)
    assert rejected["time-unparseable"].example == "day hour = 2023-11-14 late"


def test_a_record_that_contradicts_a_constant_is_rejected_and_one_without_the_value_gets_it() -> None:
    columns = {"site": pa.string(), "rack": pa.int64()}
    schema = RecordSchema(columns, EventTime("t"), {"site": "north", "rack": 7})
    table = pa.table(
        {
            "site": pa.array(["north", None, "south", "north", "south"]),
            "rack": pa.array([7, None, 7, 8, 8]),
            "t": pa.array([NOW, NOW, NOW, NOW, None]),
        }
    )
    decoded = extract_event_times(table, schema, NOW, Rejections())
    assert decoded.batch.select(["site", "rack"]).to_pylist() == [{"site": "north", "rack": 7}] * 2
    assert sum(r.count for r in decoded.rejected) == 3
    assert {r.reason: r.count for r in decoded.rejected} == {"other-constant": 2, "time-missing": 1}


@pytest.mark.parametrize("unit", ["s", "ms", "us"])
def test_a_timestamp_beyond_the_range_of_dates_is_rejected(unit: str) -> None:
    raw = pa.table({"t": pa.array([1 << 40 if unit == "s" else 1 << 60], pa.timestamp(unit))})
    decoded = extract_event_times(raw, RecordSchema({}, EventTime("t")), 1_700_000_000_000, Rejections())
    assert [(r.reason, r.count) for r in decoded.rejected] == [("time-out-of-range", 1)]


@pytest.mark.parametrize("day", [1, 14, 30])
@pytest.mark.parametrize("zone", ["", " +0530"])
def test_a_second_that_does_not_exist_is_no_time_on_any_day(day: int, zone: str) -> None:
    unit = "%d/%b/%Y:%H:%M:%S" + (" %z" if zone else "")
    texts = [f"{day:02}/Oct/2023:22:{time}{zone}" for time in ("59:59", "59:60", "13:61", "13:00", "13:01")]
    decoded = times(pa.array(texts), unit)
    assert decoded.batch.num_rows == 3
    assert [(each.reason, each.count) for each in decoded.rejected] == [("time-unparseable", 2)]
