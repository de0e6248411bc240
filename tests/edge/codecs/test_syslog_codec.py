"""Syslog messages as records: RFC 5424, RFC 3164, structured data, years and zones, and messages that are neither."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.codecs.formats import TextFormat
from edge.codecs.line_decoder import LineDecoder
from edge.codecs.messages import ColumnsSchema, MessageDecoder
from edge.codecs.schema import EventTime, RecordSchema
from edge.codecs.syslog import SyslogFormat
from edge.records import Decoded
from edgewater.base.streams import TIME_COLUMN
from tests.examples import examples

ARRIVAL = dt.datetime(2023, 10, 11, 22, 20, tzinfo=dt.UTC)
COLUMNS = {
    "facility": pa.string(),
    "severity": pa.int64(),
    "host": pa.string(),
    "app": pa.string(),
    "procid": pa.int64(),
    "message": pa.string(),
}
SD = '[exampleSDID@32473 iut="3" eventSource="App \\"x\\" [other iut=\\"9\\"] \\\\" eventID="1011"][other a="b"]'


def decode(
    *messages: str | bytes, arrival: dt.datetime = ARRIVAL, zone: str = "UTC", more: dict[str, str] | None = None
) -> Decoded:
    columns = {**COLUMNS, **dict.fromkeys(more or {}, pa.string())}
    schema = RecordSchema(columns, EventTime("at", "iso8601", max_skew_ms=None, zone=zone))
    fields = {"at": "time", **{name: name for name in COLUMNS}, **(more or {})}
    arrival_ms = int(arrival.timestamp() * 1000)
    data = b"\n".join(each.encode() if isinstance(each, str) else each for each in messages)
    return LineDecoder(SyslogFormat(schema, fields).codec(arrival_ms)).decode(data, arrival_ms)


def times(decoded: Decoded) -> list[str]:
    millis = decoded.batch.column(TIME_COLUMN).to_pylist()
    return [dt.datetime.fromtimestamp(ms / 1000, dt.UTC).replace(tzinfo=None).isoformat() for ms in millis]


def row(message: str | bytes, **options: Any) -> dict[str, Any]:
    decoded = decode(message, **options)
    assert not decoded.rejected, decoded.rejected
    (found,) = decoded.batch.to_pylist()
    return dict(found)


def test_a_message_of_rfc_5424_has_all_fields() -> None:
    found = row(
        f"<165>1 2023-10-11T22:14:15.003Z web-1 nginx 4711 ID47 {SD} \ufeffhello: world",
        more={"iut": "sd.exampleSDID@32473.iut", "source": "sd.exampleSDID@32473.eventSource", "none": "sd.other.iut"},
    )
    assert found == {
        "facility": "local4", "severity": 5, "host": "web-1", "app": "nginx", "procid": 4711,
        "message": "hello: world", "iut": "3", "source": 'App "x" [other iut="9"] \\', "none": None,
        TIME_COLUMN: 1_697_062_455_003,
    }  # fmt: skip


def test_nil_values_are_null_and_the_text_of_a_message_stays() -> None:
    found = row("<0>1 2023-10-11T22:14:15Z - - - - - -")
    assert (found["facility"], found["severity"], found["message"]) == ("kern", 0, "-")
    assert found["host"] is found["app"] is found["procid"] is None
    assert row("<191>1 2023-10-11T22:14:15Z h a 1 - -")["message"] is None


@pytest.mark.parametrize(
    "message",
    [
        "Oct 11 22:14:15 web-1",
        "<34>Oct 11 22:14:15 [7]: x",
        "<34>Oct 11 22:14:15 web-1",
        "<34>Oct 11 2023 22:14:15 web-1 su: x",
        "<34>2 2023-10-11T22:14:15Z web-1 su - - - x",
        "<34>1 2023-10-11T22:14:15Z web-1 su - - [x y=1] x",
        "<34>1 2023-10-11T22:14:15Z web-1 su - -",
        "<34>1 2023-10-11T22:14:15Z web-1 su - - -x",
    ],
)
def test_a_message_of_another_form_never_passes_with_fields_in_other_columns(message: str) -> None:
    good = "<34>Oct 11 22:14:15 2001:db8::1 su: x"
    decoded = decode(good, message, good)
    assert decoded.batch.column("host").to_pylist() == ["2001:db8::1"] * 2
    assert {r.reason: r.count for r in decoded.rejected} == {"malformed": 1}


@given(st.lists(st.integers(0, 365), min_size=1, max_size=5))
@examples(100)
def test_the_year_of_a_time_does_not_depend_on_the_other_messages(days: list[int]) -> None:
    at = [ARRIVAL - dt.timedelta(days=days_ago, hours=-9) for days_ago in days]
    messages = [f"<34>{time:%b} {time.day:2} {time:%H:%M:%S} h a: x" for time in at]
    assert times(decode(*messages)) == [time for message in messages for time in times(decode(message))]


def test_a_message_of_rfc_3164_has_a_host_and_a_tag() -> None:
    found = row("<34>Oct 11 22:14:15 web-1 su[12]: 'su root' failed")
    assert (found["facility"], found["severity"], found["host"]) == ("auth", 2, "web-1")
    assert (found["app"], found["procid"], found["message"]) == ("su", 12, "'su root' failed")
    assert row("<13>Oct  1 22:14:15 h no tag here")["message"] == "no tag here"
    assert times(decode("<13>2023-10-11T23:14:15.5+02:00 h app: x")) == ["2023-10-11T21:14:15.500000"]


@pytest.mark.parametrize(
    ("arrival", "written", "read"),
    [
        (dt.datetime(2024, 1, 1, 0, 0, 5, tzinfo=dt.UTC), "Dec 31 23:59:58", "2023-12-31T23:59:58"),
        (dt.datetime(2023, 12, 31, 23, 59, 59, tzinfo=dt.UTC), "Jan  1 00:00:02", "2024-01-01T00:00:02"),
        (dt.datetime(2024, 3, 1, tzinfo=dt.UTC), "Feb 29 12:00:00", "2024-02-29T12:00:00"),
        (dt.datetime(2025, 1, 5, tzinfo=dt.UTC), "Feb 29 12:00:00", "2024-02-29T12:00:00"),
    ],
)
def test_the_year_is_the_one_nearest_to_the_arrival(arrival: dt.datetime, written: str, read: str) -> None:
    assert times(decode(f"<13>{written} h a: m", arrival=arrival)) == [read]


@pytest.mark.parametrize(
    ("arrival", "read"),
    [
        (dt.datetime(2023, 10, 29, 0, 31, tzinfo=dt.UTC), "2023-10-29T00:30:00"),
        (dt.datetime(2023, 10, 29, 1, 31, tzinfo=dt.UTC), "2023-10-29T01:30:00"),
    ],
)
def test_an_hour_that_a_zone_has_twice_is_the_one_nearer_to_the_arrival(arrival: dt.datetime, read: str) -> None:
    decoded = decode("<13>Oct 29 02:30:00 h a: m", arrival=arrival, zone="Europe/Berlin")
    assert times(decoded) == [read]
    assert [(each.reason, each.count) for each in decoded.guessed] == [("doubled-hour", 1)]


def test_messages_of_both_kinds_keep_their_order() -> None:
    decoded = decode(
        "<13>Oct 11 22:14:01 h a: first",
        "<13>1 2023-10-11T22:14:02Z h a - - - second",
        "<13>Oct 11 22:14:03 h a: third",
    )
    assert decoded.batch.column("message").to_pylist() == ["first", "second", "third"]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("no priority", "malformed"),
        ("<192>1 2023-10-11T22:14:15Z h a 1 - - x", "malformed"),
        ("<13>1 2023-10-11T22:14:15Z h a 1 - [open x", "malformed"),
        ("<13>1 2023-10-11T22:14:15Z h a", "malformed"),
        ("<13>hello", "malformed"),
        (b"<13>1 2023-10-11T22:14:15Z h a 1 - - \xff", "malformed"),
        ("<13>1 2023-10-11T22:14:15Z h a twelve - - x", "wrong-type"),
        ("<13>1 - h a 1 - - x", "time-missing"),
        ("<13>Foo 11 22:14:15 h a: x", "time-unparseable"),
        ("<13>Feb 30 22:14:15 h a: x", "time-unparseable"),
    ],
)
def test_a_message_that_cannot_be_read_costs_only_itself(message: str | bytes, reason: str) -> None:
    decoded = decode("<13>Oct 11 22:14:15 h a: m", message, "<13>1 2023-10-11T22:14:15Z h a 1 - - m")
    assert decoded.batch.num_rows == 2
    assert [(r.reason, r.count) for r in decoded.rejected] == [(reason, 1)]


@given(st.lists(st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), max_size=60), max_size=20))
@examples(200)
def test_any_text_is_read_or_rejected(texts: list[str]) -> None:
    messages = [*(f"<13>1 {text}" for text in texts), *(f"<13>{text}" for text in texts)]
    decoded = decode(*messages)
    assert decoded.batch.num_rows + sum(r.count for r in decoded.rejected) == len(messages)


@pytest.mark.parametrize(
    ("text", "body"),
    [
        (TextFormat("ndjson", RecordSchema({}, EventTime("at"))), b'{"n": "x"}'),
        (TextFormat("logfmt", RecordSchema({}, EventTime("at"))), b"n=x"),
        (TextFormat("csv", RecordSchema({}, EventTime("at")), header=("n",)), b"x"),
    ],
    ids=["ndjson", "logfmt", "csv"],
)
def test_a_wrong_type_in_a_body_without_a_time_is_rejected(text: TextFormat, body: bytes) -> None:
    """The time is a property of the message, such as a timestamp of Kafka."""
    schema = RecordSchema({"n": pa.int64()}, EventTime("at", max_skew_ms=None))
    decoder = MessageDecoder(TextFormat(text.format, schema, header=text.header), ["at"], "t")
    decoded = decoder.decode([body], {"at": [1_700_000_000_000]}, 0)
    assert (decoded.batch.num_rows, [r.reason for r in decoded.rejected]) == (0, ["wrong-type"])


def test_columns_of_a_part_need_no_time() -> None:
    assert not ColumnsSchema({"n": pa.int64()}, EventTime("at")).has_time
    assert RecordSchema({"n": pa.int64()}, EventTime("at")).has_time


@pytest.mark.parametrize(
    ("line", "host", "app", "severity", "message"),
    [
        ("<13>Oct 11 22:14:15 web-1 su: hello", "web-1", "su", 5, "hello"),
        ("Oct 11 22:14:15 web-1 su: hello", "web-1", "su", None, "hello"),
        ("<13>Oct 11 22:14:15 su: hello", None, "su", 5, "hello"),
        ("<13>Oct  1 22:14:15 cron[7]: (root) CMD", None, "cron", 5, "(root) CMD"),
        ("Oct 11 22:14:15 cron[7]: x", None, "cron", None, "x"),
        ("2023-10-11T22:14:15Z web-1 app: x", "web-1", "app", None, "x"),
    ],
)
def test_a_priority_or_a_host_may_be_missing(
    line: str, host: str | None, app: str, severity: int | None, message: str
) -> None:
    (found,) = decode(line).batch.to_pylist()
    assert (found["host"], found["app"], found["severity"], found["message"]) == (host, app, severity, message)


CISCO = {
    "<189>29: *Oct 11 22:14:15.043: %SYS-5-CONFIG_I: Configured from console": (None, "%SYS-5-CONFIG_I", 43),
    "<189>29: router1: Oct 11 2023 22:14:15 UTC: %SYS-5-CONFIG_I: by vty0": ("router1", "%SYS-5-CONFIG_I", 0),
    "<189>: 2023 Oct 11 22:14:15 GMT: %ETHPORT-5-IF_UP: Interface Ethernet1/1": (None, "%ETHPORT-5-IF_UP", 0),
    "<189>Oct 11 22:14:15: %SYS-5-CONFIG_I: without a number": (None, "%SYS-5-CONFIG_I", 0),
    ".Oct 11 22:14:15.5: %LINK-3-UPDOWN: without a priority": (None, "%LINK-3-UPDOWN", 500),
    "<166>Oct 11 2023 22:14:15 asa1 : %ASA-6-302013: Built outbound TCP": ("asa1", "%ASA-6-302013", 0),
    "<166>Oct 11 2023 22:14:15: %ASA-6-302013: Built inbound": (None, "%ASA-6-302013", 0),
}


def test_messages_of_cisco_have_a_sequence_number_a_year_fractions_or_no_host() -> None:
    others = ["<13>Oct 11 22:14:15 h a: b", "<13>1 2023-10-11T22:14:15Z h a - - - b", "no message"]
    decoded = decode(*CISCO, *others)
    found = [(row["host"], row["app"], row["event_time_ms"]) for row in decoded.batch.to_pylist()]
    at_ms = int(dt.datetime(2023, 10, 11, 22, 14, 15, tzinfo=dt.UTC).timestamp() * 1000)
    assert found == [(host, app, at_ms + ms) for host, app, ms in (*CISCO.values(), *[("h", "a", 0)] * 2)]
    assert [(each.reason, each.count) for each in decoded.rejected] == [("malformed", 1)]


@pytest.mark.parametrize(
    "message",
    ["<189>1: Oct 11 22:14:15 CEST: %SYS-5-X: y", "<189>1: Oct 32 22:14:15: %SYS-5-X: y", "<189>1: %SYS-5-X: no time"],
)
def test_messages_of_cisco_whose_time_is_not_known_are_rejected(message: str) -> None:
    assert sum(each.count for each in decode(message).rejected) == 1


def test_a_time_with_utc_and_one_without_a_zone_are_each_in_theirs() -> None:
    forms = ("Oct 11 22:14:15 UTC", "Oct 12 00:14:15", "Oct 11 2023 22:14:15 UTC", "2022 Oct 12 00:14:15")
    decoded = decode(*(f"<189>1: {form}: %SYS-5-X: y" for form in forms), zone="Europe/Berlin")
    assert times(decoded) == ["2023-10-11T22:14:15"] * 3 + ["2022-10-11T22:14:15"]
