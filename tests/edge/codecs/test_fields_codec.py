"""The formats `regex`, `combined` and `logfmt`."""

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.codecs import COMBINED_TIME, EventTime, LinePattern, RecordSchema, TextFormat, TextFormatName
from edge.records import Decoded
from tests.examples import examples

NOW = 1_700_000_000_000
AT = "14/Nov/2023:22:13:20 +0000"
NGINX = (
    f'203.0.113.9 - - [{AT}] "GET /shop/item?id=7 HTTP/1.1" 200 512 "https://example.org/" "Mozilla/5.0 (X11)"\n'
    f'203.0.113.9 - anna [{AT}] "POST /cart HTTP/2.0" 499 - "-" "curl/8.1"\n'
    f'::1 - - [14/Nov/2023:17:13:20 -0500] "\\x16\\x03\\x01" 400 157 "-" "-" "203.0.113.1"\n'
)
COLUMNS = {
    "remote_user": pa.string(),
    "path": pa.string(),
    "query": pa.string(),
    "status": pa.int64(),
    "bytes": pa.int64(),
}
ACCESS = RecordSchema(COLUMNS, EventTime("time", COMBINED_TIME))
LEVELS = RecordSchema(
    {"level": pa.string(), "took": pa.float64(), "n": pa.int64(), "cached": pa.bool_()}, EventTime("t", "ms")
)


def decode(
    kind: TextFormatName, lines: str | bytes, schema: RecordSchema, pattern: LinePattern | None = None
) -> Decoded:
    data = lines.encode() if isinstance(lines, str) else lines
    return TextFormat(kind, schema, pattern=pattern).decoder(None, "log").decode(data, NOW)


def reasons(decoded: Decoded) -> dict[str, int]:
    return {str(rejection.reason): rejection.count for rejection in decoded.rejected}


def test_access_logs_of_nginx_and_apache_are_records() -> None:
    decoded = decode("combined", NGINX, ACCESS)
    assert decoded.batch.to_pylist() == [
        {"remote_user": None, "path": "/shop/item", "query": "id=7", "status": 200, "bytes": 512, "event_time_ms": NOW},
        {"remote_user": "anna", "path": "/cart", "query": None, "status": 499, "bytes": None, "event_time_ms": NOW},
        {"remote_user": None, "path": None, "query": None, "status": 400, "bytes": 157, "event_time_ms": NOW},
    ]
    assert decoded.rejected == ()
    common = f'127.0.0.1 - - [{AT}] "GET /a HTTP/1.0" 200 5\r\n'
    assert decode("combined", common, ACCESS).batch.column("path").to_pylist() == ["/a"]


def test_lines_of_another_form_are_malformed_and_the_other_lines_are_records() -> None:
    lines = NGINX + "# rotated\n\n   \n" + NGINX.replace("14/Nov/2023:22:13:20", "yesterday")
    decoded = decode("combined", lines, ACCESS)
    assert decoded.batch.num_rows == 4
    assert reasons(decoded) == {"malformed": 1, "time-unparseable": 2}


def test_days_that_do_not_exist_are_no_times() -> None:
    line = NGINX.splitlines()[0] + "\n"
    lines = "".join(line.replace("14/Nov", day) for day in ("31/Feb", "30/Feb", "31/Apr", "01/Mar", "04/May", "28/Feb"))
    decoded = decode("combined", lines, ACCESS)
    assert decoded.batch.num_rows == 3
    assert reasons(decoded) == {"time-unparseable": 3}


def test_a_line_that_is_not_utf8_costs_only_itself() -> None:
    decoded = decode("combined", NGINX.encode() + b"\xff\xfe\n" + NGINX.encode(), ACCESS)
    assert decoded.batch.num_rows == 6
    assert reasons(decoded) == {"malformed": 1}


def test_a_pattern_names_the_columns_and_matches_whole_lines() -> None:
    pattern = LinePattern(r"(?P<t>\d+) (?P<level>\w+)(?: took=(?P<took>\S+))? n=(?P<n>\S+)(?P<cached> cached)?", ("-",))
    schema = RecordSchema({**LEVELS.columns, "cached": pa.string()}, LEVELS.time)
    decoded = decode(
        "regex", f"{NOW} info took=1.5 n=7 cached\n{NOW} warn n=-\n{NOW} warn n=x\nx{NOW} a n=1\n", schema, pattern
    )
    assert decoded.batch.to_pylist() == [
        {"level": "info", "took": 1.5, "n": 7, "cached": " cached", "event_time_ms": NOW},
        {"level": "warn", "took": None, "n": None, "cached": None, "event_time_ms": NOW},
    ]
    assert reasons(decoded) == {"wrong-type": 1, "malformed": 1}
    wrong = next(r for r in decoded.rejected if r.reason == "wrong-type")
    assert wrong.spans == ((NOW, NOW + 1, 1),)


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?P<a>\w+) (?P=a)",
        r"(?P<a>\w+) \1",
        r"(?P<a>x(?=y))",
        r"(?P<a>\w+) (?P<a>\w+)",
        r"\w+",
        r"(\w+) (?P<a>\w+)",
        r"(?P<a>(?:x{1000}){1000})",
        r"(?P<a>",
    ],
)
def test_a_pattern_that_cannot_give_columns_has_a_fault(pattern: str) -> None:
    assert LinePattern(pattern).fault
    assert LinePattern(r"(?P<a>\w+) (?:x)(?<b>\w+)").fault is None


def test_a_pattern_that_takes_other_engines_forever_takes_linear_time() -> None:
    pattern = LinePattern(r"(?P<t>\d+) (?P<level>(?:a+)+)")
    schema = RecordSchema({"level": pa.string()}, LEVELS.time)
    assert reasons(decode("regex", f"{NOW} {'a' * 100_000}!\n", schema, pattern)) == {"malformed": 1}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("t={} level=info took=1.5 n=7 cached", ("info", 1.5, 7, True)),
        ('cached=false n=+7 level="a \\"b\\" level=x" t={}', ('a "b" level=x', None, 7, False)),
        ("  level=   took=1e3\tt={}  ", (None, 1000.0, None, None)),
        ('t={} msg="level=x" level="tab\\tback\\\\slash"', ("tab\tback\\slash", None, None, None)),
        ('t="{}" level=a=b', ("a=b", None, None, None)),
        ("t={} level=ü", ("ü", None, None, None)),
    ],
)
def test_logfmt_is_split_at_white_space_outside_of_quotes(line: str, expected: tuple[Any, ...]) -> None:
    (row,) = decode("logfmt", line.format(NOW), LEVELS).batch.to_pylist()
    assert (row["level"], row["took"], row["n"], row["cached"]) == expected


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('t={} level="open n=1', "malformed"),
        ("t={} =x", "malformed"),
        ("hello {} world", "malformed"),
        ("t={} n=1 n=2", "malformed"),
        ("t={} n=1.5", "wrong-type"),
        ("t={} n=99999999999999999999", "wrong-type"),
        ("t={} cached=maybe", "wrong-type"),
        ("t={} took=fast", "wrong-type"),
        ("t=noon{}", "time-unparseable"),
        ("level={}", "time-missing"),
    ],
)
def test_a_bad_logfmt_line_is_rejected_with_its_reason_alone(line: str, reason: str) -> None:
    good = f"t={NOW} n=3 level=ok\n"
    decoded = decode("logfmt", good + line.format(NOW) + "\n" + good, LEVELS)
    assert decoded.batch.column("n").to_pylist() == [3, 3]
    assert reasons(decoded) == {reason: 1}


WORD = st.text(st.sampled_from('ab="\\ tn'), max_size=6)


def quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{escaped}"'


@given(st.lists(st.dictionaries(st.sampled_from(["level", "other", "lev", "levels"]), WORD), min_size=1, max_size=8))
@examples(200)
def test_what_is_written_as_logfmt_is_read_again(rows: list[dict[str, str]]) -> None:
    lines = "".join(
        f"t={NOW} " + " ".join(f"{key}={quoted(value)}" for key, value in row.items()) + "\n" for row in rows
    )
    decoded = decode("logfmt", lines, RecordSchema({"level": pa.string()}, LEVELS.time))
    assert decoded.rejected == ()
    assert decoded.batch.column("level").to_pylist() == [row.get("level") or None for row in rows]


@given(st.lists(st.text(st.sampled_from('ab="\\ t1-[]\n\r\0ü'), max_size=12), max_size=6))
@examples(200)
def test_whatever_the_lines_are_each_is_a_record_or_rejected(lines: list[str]) -> None:
    data = "\n".join(lines)
    count = sum(1 for line in data.split("\n") if line.strip(" \t\r\v\f"))
    schema = RecordSchema({"a": pa.string()}, LEVELS.time)
    for kind, pattern in (("logfmt", None), ("combined", None), ("regex", LinePattern("(?P<t>1*)(?P<a>.*)"))):
        of = ACCESS if kind == "combined" else schema
        decoded = decode(kind, data, of, pattern)  # type: ignore[arg-type]
        assert decoded.batch.num_rows + sum(reasons(decoded).values()) == count
