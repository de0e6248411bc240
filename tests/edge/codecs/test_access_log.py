"""Access logs whose lines a directive of nginx or of Apache declares."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from edge.codecs.access_log import ACCESS_NULLS, log_format
from edge.codecs.fields_codec import LinePattern
from edge.codecs.formats import TextFormat
from edge.codecs.schema import EventTime, RecordSchema
from edge.config import parse_config
from edgewater.base.errors import InvalidConfig
from tests.refusals import refused

AT_MS = 1_700_000_000_000
NGINX = """log_format timed '$remote_addr - $remote_user [$time_local] "$request" '
                    '$status $body_bytes_sent "$http_referer" "$http_user_agent" '
                    '"$http_x_forwarded_for" rt=$request_time uct="$upstream_connect_time" '
                    '$host $upstream_response_time';"""
NGINX_LINES = (
    '203.0.113.9 - anna [14/Nov/2023:22:13:20 +0000] "GET /shop?id=7 HTTP/1.1" 200 512 "-" "Mozilla/5.0 (X11)" '
    '"10.0.0.1, 10.0.0.2" rt=0.032 uct="0.000, 0.001" shop.example.org 0.001, 0.030\n'
    '::1 - - [14/Nov/2023:22:13:20 +0000] "\\x16\\x03" 400 157 "-" "-" "-" rt=0.000 uct="-" _ -\n'
)
APACHE = r'LogFormat "%v:%p %h %l %u %t \"%r\" %>s %O \"%{Referer}i\" \"%{User-Agent}i\" %D %{X-Request-Id}o" timed'
APACHE_LINES = (
    'www.example.org:443 203.0.113.9 - - [14/Nov/2023:22:13:20 +0000] "POST /cart HTTP/2.0" 499 981 "-" "curl/8.1" '
    "1234 7f-3a\n"
)


def read(declared: str, lines: str, **columns: pa.DataType) -> tuple[list[dict[str, Any]], dict[str, int]]:
    found = log_format(declared)
    assert found.time_unit is not None
    schema = RecordSchema(columns, EventTime("time", found.time_unit))
    text = TextFormat("access", schema, pattern=LinePattern(found.pattern, ACCESS_NULLS))
    decoded = text.decoder(None, "log").decode(lines.encode(), AT_MS)
    assert set(decoded.batch.column("event_time_ms").to_pylist()) <= {AT_MS}
    rows = decoded.batch.drop_columns("event_time_ms").to_pylist()
    return rows, {each.reason: each.count for each in decoded.rejected}


def test_a_log_format_of_nginx_is_read() -> None:
    text, number, whole = pa.string(), pa.float64(), pa.int64()
    rows, rejected = read(
        NGINX,
        NGINX_LINES,
        remote_user=text,
        path=text,
        query=text,
        status=whole,
        bytes=whole,
        request_time=number,
        host=text,
        http_x_forwarded_for=text,
        upstream_response_time=text,
        upstream_connect_time=text,
    )
    assert rejected == {} and rows == [
        {
            "remote_user": "anna",
            "path": "/shop",
            "query": "id=7",
            "status": 200,
            "bytes": 512,
            "request_time": 0.032,
            "host": "shop.example.org",
            "http_x_forwarded_for": "10.0.0.1, 10.0.0.2",
            "upstream_response_time": "0.001, 0.030",
            "upstream_connect_time": "0.000, 0.001",
        },
        {
            "remote_user": None,
            "path": None,
            "query": None,
            "status": 400,
            "bytes": 157,
            "request_time": 0.0,
            "host": "_",
            "http_x_forwarded_for": None,
            "upstream_response_time": None,
            "upstream_connect_time": None,
        },
    ]
    assert read(NGINX, NGINX_LINES.replace(" rt=", " "), status=whole) == ([], {"malformed": 2})


def test_a_log_format_of_apache_is_read() -> None:
    rows, rejected = read(
        APACHE,
        APACHE_LINES,
        vhost=pa.string(),
        port=pa.int64(),
        method=pa.string(),
        status=pa.int64(),
        bytes_sent=pa.int64(),
        user_agent=pa.string(),
        duration_us=pa.int64(),
        x_request_id=pa.string(),
    )
    assert rejected == {} and rows == [
        {
            "vhost": "www.example.org",
            "port": 443,
            "method": "POST",
            "status": 499,
            "bytes_sent": 981,
            "user_agent": "curl/8.1",
            "duration_us": 1234,
            "x_request_id": "7f-3a",
        }
    ]


@pytest.mark.parametrize(
    ("template", "line", "status"),
    [
        ("$time_iso8601|$status|$uri", "2023-11-14T22:13:20+00:00|404|/a b", 404),
        ("$msec $status", "1700000000.000 204", 204),
        ("%{usec}t %>s %U%q", "1700000000000000 200 /x?y=1", 200),
        ("${time_local}\t$status\t$request_uri", "14/Nov/2023:22:13:20 +0000\t301\t/x?y=1", 301),
        ("[$time_local] $msec ($status)", "[14/Nov/2023:22:13:20 +0000] 1700000000.000 (500)", 500),
        (r"log_format tsv '$time_local\t$http_x\t$status';", "14/Nov/2023:22:13:20 +0000\ta b\t302", 302),
        ("$time_local $status $uri", "14/Nov/2023:22:13:20 +0000 200 /ok x", 200),
        ("$time_local $mapped $status $host", "14/Nov/2023:22:13:20 +0000  400 ", 400),
        ("$msec $scheme://$host$request_uri $status", "1700000000.000 http://a/b?c=1 404", 404),
        (
            '[$time_local] "$request" "$request_uri" $request_method $uri $args $status $status',
            '[14/Nov/2023:22:13:20 +0000] "GET /no?q=a%20b HTTP/1.1" "/no?q=a%20b" GET /no q=a%20b 404 404',
            404,
        ),
        (r"%t \"%r\" %>s", '[14/Nov/2023:22:13:20 +0000] "GET / HTTP/1.1" 200', 200),
        ('log_format x escape=default "[$time_local] $status";', "[14/Nov/2023:22:13:20 +0000] 500", 500),
    ],
)
def test_templates(template: str, line: str, status: int) -> None:
    assert read(template, line + "\n", status=pa.int64()) == ([{"status": status}], {})


@pytest.mark.parametrize(
    ("template", "line"),
    [
        ("$msec $http_x $status $host", "1700000000.000 evil 200 404 shop.example"),
        ("$msec|$http_user_agent|$status|$host", "1700000000.000|b|200|404|shop.example"),
        ("$msec $uri $status $http_x", "1700000000.000 /a 200 404 -"),
        ('$msec "$http_x $status" $http_y', '1700000000.000 "a 200 404" b'),
    ],
)
def test_a_client_cannot_write_the_status_of_its_request(template: str, line: str) -> None:
    """nginx has written these lines about requests that got 404."""
    assert read(template, line + "\n", status=pa.int64()) == ([], {"malformed": 1})


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        ("log_format j escape=json '{\"status\": $status}';", "use format: ndjson"),
        ("plain text", "no field"),
        ("$status$bytes_sent", "nothing separates $status"),
        ("%h %{%d/%b/%Y}t", "is not supported"),
        ("%h %Z", "%Z is not supported"),
        ("$time_local $request $status", "$request has spaces"),
        ("log_format x escape=none '$time_local \"$http_x\" $status';", "escape=default"),
        ("log_format x '$status", "quotes"),
    ],
)
def test_what_is_no_log_format_is_refused(declared: str, says: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        configured(declared, "status")
    assert says in str(caught.value) and "log_format" in caught.value.field


def configured(declared: str, *columns: str) -> Any:
    stream = {
        "columns": dict.fromkeys(columns, "string"),
        "sources": [{"file": {"path": "access.log", "log_format": declared}}],
    }
    return parse_config({"edge": "a", "state_dir": "s", "streams": {"requests": stream}}).streams["requests"]


def test_the_configuration_takes_the_line_of_the_server() -> None:
    assert configured(NGINX, "status").time.unit == "%d/%b/%Y:%H:%M:%S %z"
    assert configured("$msec $status", "status").time.unit == "s"
    with refused(InvalidConfig, "streams.requests"):
        configured(APACHE, "request_time")
