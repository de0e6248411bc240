"""The formats `regex`, `combined` and `logfmt`."""

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.codecs.access_log import ACCESS_TIME
from edge.codecs.fields_codec import LinePattern
from edge.codecs.formats import TextFormat, TextFormatName
from edge.codecs.schema import EventTime, RecordSchema
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
ACCESS = RecordSchema(COLUMNS, EventTime("time", ACCESS_TIME))
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
    assert decode("common", common, ACCESS).batch.column("path").to_pylist() == ["/a"]
    assert reasons(decode("combined", common, ACCESS)) == {"malformed": 1}
    assert reasons(decode("common", NGINX, ACCESS)) == {"malformed": 3}


LINE = f'192.0.2.7 - anna [{AT}] "GET /a?b=c HTTP/1.1" 200 5 "-" "Mozilla/5.0 (X11; Linux)"'
CLIENTS = {"remote_addr": pa.string(), "ident": pa.string(), "remote_user": pa.string(), "user_agent": pa.string()}


@pytest.mark.parametrize(
    "line",
    [
        f"www.example.org:443 {LINE}",
        f"www.example.org {LINE}",
        f"192.0.2.1, {LINE}",
        f"192.0.2.1,{LINE}",
        f"192.0.2.1, 192.0.2.2, {LINE}",
        LINE.replace("- anna", "- - anna"),
        LINE.replace("- anna", "anna"),
        LINE.replace(" [", "["),
        LINE[:-1],
        LINE[:-30],
        LINE.partition(' "-" ')[0],
        LINE.partition(' "-" ')[0] + ' "-"',
        LINE + ' "open',
        LINE + " ",
        LINE + '"x"',
        LINE.replace("200 5", "200"),
        LINE.replace("200", "20"),
        LINE.replace("X11", 'X"11'),
        LINE.replace("GET", 'G"ET'),
        f"{LINE} {LINE[:40]}\0",
    ],
)
def test_a_line_of_another_form_never_passes_with_fields_in_other_columns(line: str) -> None:
    schema = RecordSchema(CLIENTS, ACCESS.time)
    decoded = decode("combined", f"{LINE}\n{line}\n{LINE}\n", schema)
    record = {"remote_addr": "192.0.2.7", "ident": None, "remote_user": "anna"}
    assert decoded.batch.to_pylist() == [{**record, "user_agent": "Mozilla/5.0 (X11; Linux)", "event_time_ms": NOW}] * 2
    assert reasons(decoded) == {"malformed": 1}


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ("GET /a?b=c HTTP/1.1", ("GET", "/a", "b=c", "HTTP/1.1")),
        ("M-SEARCH * HTTP/1.1", ("M-SEARCH", "*", None, "HTTP/1.1")),
        ("CONNECT example.org:443 HTTP/1.1", ("CONNECT", "example.org:443", None, "HTTP/1.1")),
        ("GET /", ("GET", "/", None, None)),
        ('GET /a\\"b HTTP/1.1', ("GET", '/a\\"b', None, "HTTP/1.1")),
        ("-", (None,) * 4),
        ("", (None,) * 4),
        ("\\x16\\x03\\x01 \\xff", (None,) * 4),
        ("GET /a b HTTP/1.1", (None,) * 4),
        ("GET /a HTTP/1.1 x", (None,) * 4),
        ("hello world", (None,) * 4),
        ("\\n", (None,) * 4),
    ],
)
@pytest.mark.parametrize("kind", ["common", "combined", "vhost_combined", "forwarded_combined"])
def test_a_line_counts_and_its_request_has_all_fields_or_none(
    kind: Any, request_: str, expected: tuple[str | None, ...]
) -> None:
    line = LINE.replace("GET /a?b=c HTTP/1.1", request_)
    line = line.partition(' "-" "')[0] if kind == "common" else line
    line = f"www.example.org:443 {line}" if kind == "vhost_combined" else line
    schema = RecordSchema({name: pa.string() for name in ("method", "path", "query", "protocol")}, ACCESS.time)
    decoded = decode(kind, line, schema)
    assert decoded.rejected == ()
    assert tuple(decoded.batch.to_pylist()[0].values())[:4] == expected


def test_virtual_hosts_and_lists_of_addresses_have_formats_of_their_own() -> None:
    hosts = RecordSchema({"vhost": pa.string(), "port": pa.int64(), "remote_addr": pa.string()}, ACCESS.time)
    decoded = decode("vhost_combined", f"www.example.org:443 {LINE}\n[::1]:80 {LINE}\n{LINE}\na {LINE}", hosts)
    assert [tuple(row.values())[:3] for row in decoded.batch.to_pylist()] == [
        ("www.example.org", 443, "192.0.2.7"),
        ("[::1]", 80, "192.0.2.7"),
    ]
    assert reasons(decoded) == {"malformed": 2}
    lists = RecordSchema(
        {"addresses": pa.string(), "remote_addr": pa.string(), "remote_user": pa.string()}, ACCESS.time
    )
    lines = [f"203.0.113.7, 10.0.0.5, {LINE}", LINE, LINE.replace("192.0.2.7", "-"), f"www.example.org:443 {LINE}"]
    decoded = decode("forwarded_combined", "\n".join(lines), lists)
    assert [tuple(row.values())[:3] for row in decoded.batch.to_pylist()] == [
        ("203.0.113.7, 10.0.0.5, 192.0.2.7", "203.0.113.7", "anna"),
        ("192.0.2.7", "192.0.2.7", "anna"),
        (None, None, "anna"),
    ]
    assert reasons(decoded) == {"malformed": 1}


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
        (r"t={} level=C:\new\\tmp", (r"C:\new\\tmp", None, None, None)),
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


def test_a_nul_in_logfmt_stays_beside_an_escaped_text() -> None:
    lines = [f't={NOW} level="a\0b"', f't={NOW} level="x\\\\n\\ny\\\\"']
    decoded = decode("logfmt", "\n".join(lines), RecordSchema({"level": pa.string()}, LEVELS.time))
    assert decoded.batch.column("level").to_pylist() == ["a\0b", "x\\n\ny\\"]


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
    for kind, pattern in (
        ("logfmt", None),
        ("combined", None),
        ("common", None),
        ("regex", LinePattern("(?P<t>1*)(?P<a>.*)")),
    ):
        of = ACCESS if kind in ("combined", "common") else schema
        decoded = decode(kind, data, of, pattern)  # type: ignore[arg-type]
        assert decoded.batch.num_rows + sum(reasons(decoded).values()) == count


@pytest.mark.parametrize(
    "request_",
    [
        'GET /a" 200 5 "r" "u HTTP/1.1',
        'GET /a" 200 - "r" "u',
        'GET /a" 200 5 "r" "u" 1 "x',
        'GET /a" 200 5 ',  # with a referer that begins with a quote, the status is within quotes
    ],
)
@pytest.mark.parametrize("kind", ["combined", "vhost_combined", "forwarded_combined"])
def test_a_client_cannot_write_the_status_if_the_server_escapes_no_quotes(kind: str, request_: str) -> None:
    for rest in ('"-" "curl"', '" "x" "curl"'):
        line = f'203.0.113.7 - - [10/Oct/2000:13:55:36 -0700] "{request_}" 404 7 {rest}'
        line = f"www.example.org:443 {line}" if kind == "vhost_combined" else line
        assert reasons(decode(kind, line, ACCESS)) == {"malformed": 1}
