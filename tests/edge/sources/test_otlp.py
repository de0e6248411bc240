"""OTLP requests as records: mapping, types, rejections, replies, metrics, and what a hostile request may cost."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
import yaml
from google.protobuf import json_format
from google.rpc import error_details_pb2, status_pb2
from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter as GrpcLogExporter
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter as HttpLogExporter
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor

from edge.config import parse_config
from edge.records import Chunk
from edge.sources.factory import package_receivers
from edge.sources.grpc_receiving import GrpcReceivers
from edge.sources.receiving import Unavailable
from edgewater.base.errors import InvalidConfig
from edgewater.runtime.health import EmbeddedServer, listen
from tests.edge.sources.push_edge import PushEdge
from tests.refusals import refused

AT_MS = 1_700_000_000_000
AT_NS = AT_MS * 1_000_000
S = 1_000_000_000
PROTOBUF = {"content-type": "application/x-protobuf"}
JSON = {"content-type": "application/json"}
DELTA, CUMULATIVE = 1, 2


def stream(columns: dict[str, str], *entries: dict[str, Any], **more: Any) -> dict[str, Any]:
    sources = [{"otlp": entry} for entry in entries]
    return {"columns": columns, "time": {"column": "at", "max_skew": "1h"}, "sources": sources, **more}


class Edge(PushEdge):
    """An edge that counts each request once."""

    def __init__(self, streams: dict[str, Any], **limits: Any) -> None:
        super().__init__(streams, AT_MS, **limits)
        self.counted: dict[bytes, int] = {}
        self.failing: set[str] = set()

    async def accept(self, chunk: Chunk, stream: str) -> int | None:
        if stream in self.failing:
            raise Unavailable("not now")
        assert chunk.push is not None
        if chunk.push.key in self.counted:
            return self.counted[chunk.push.key]
        self.counted[chunk.push.key] = chunk.batch.num_rows
        if chunk.series is not None:
            self.series[chunk.source].apply(chunk.series)
        return await super().accept(chunk, stream)

    def post(self, message: Any, signal: str = "logs", headers: dict[str, str] = PROTOBUF) -> httpx.Response:
        return self.sent(
            f"/v1/{signal}", message if isinstance(message, bytes) else message.SerializeToString(), headers
        )

    def records(self, stream: str = "s") -> list[dict[str, Any]]:
        rows = [row for name, chunk in self.taken if name == stream for row in chunk.batch.to_pylist()]
        return [{name: value for name, value in row.items() if name != "event_time_ms"} for row in rows]


def put(attributes: Any, **values: Any) -> None:
    """Adds attributes; an underscore in a name stands for a dot."""
    for name, value in values.items():
        kind = {str: "string_value", bool: "bool_value", int: "int_value", float: "double_value"}[type(value)]
        setattr(attributes.add(key=name.replace("_", ".")).value, kind, value)


def logs(*records: dict[str, Any], **resource: Any) -> ExportLogsServiceRequest:
    """A request with one log record for each mapping of attributes."""
    request = ExportLogsServiceRequest()
    group = request.resource_logs.add()
    put(group.resource.attributes, **resource)
    scope = group.scope_logs.add()
    scope.scope.name = "lib"
    for number, attributes in enumerate(records):
        record = scope.log_records.add(time_unix_nano=AT_NS + number * 1_000_000, severity_text="INFO")
        record.body.string_value = f"line {number}"
        put(record.attributes, **attributes)
    return request


def test_columns_get_fields_and_attributes_of_record_resource_and_scope() -> None:
    columns = {"service": "string", "lib": "string", "route": "string", "severity_text": "string", "body": "string",
               "status": "int64", "trace_id": "string"}  # fmt: skip
    paths = {"service": "resource.service.name", "lib": "scope.name", "route": "attributes.http.route",
             "status": "attributes.status"}  # fmt: skip
    edge = Edge({"s": stream(columns, {"signal": "logs", "columns": paths})})
    request = logs({"http_route": "/a", "status": 200}, {"status": 404}, service_name="shop")
    request.resource_logs[0].scope_logs[0].log_records[1].trace_id = bytes(range(16))
    reply = edge.post(request)
    assert (reply.status_code, reply.headers["content-type"]) == (200, "application/x-protobuf")
    assert ExportLogsServiceResponse.FromString(reply.content) == ExportLogsServiceResponse()
    common = {"service": "shop", "lib": "lib", "severity_text": "INFO"}
    assert edge.records() == [
        {**common, "route": "/a", "body": "line 0", "status": 200, "trace_id": None},
        {**common, "route": None, "body": "line 1", "status": 404, "trace_id": bytes(range(16)).hex()},
    ]
    assert edge.taken[0][1].batch.column("event_time_ms").to_pylist() == [AT_MS, AT_MS + 1]


def test_the_json_encoding_gives_the_same_records_with_hexadecimal_ids() -> None:
    columns = {"trace_id": "string", "span_id": "string", "traceId": "string", "n": "int64"}
    paths = {"traceId": "attributes.traceId", "n": "attributes.n"}
    edge = Edge({"s": stream(columns, {"signal": "logs", "columns": paths})})
    record = {
        "timeUnixNano": str(AT_NS), "traceId": "5b8efff798038103d269b633813fc60c", "spanId": "EEE19B7EC3C1B174",
        "severityNumber": 9, "unknownField": {"traceId": 7},
        "attributes": [{"key": "traceId", "value": {"stringValue": "zz"}}, {"key": "n", "value": {"intValue": "7"}}],
    }  # fmt: skip
    document = {"resourceLogs": [{"scopeLogs": [{"logRecords": [record]}]}]}
    reply = edge.post(json.dumps(document).encode(), headers=JSON)
    assert (reply.status_code, reply.headers["content-type"], reply.json()) == (200, "application/json", {})
    ids = {"trace_id": record["traceId"], "span_id": "eee19b7ec3c1b174"}
    assert edge.records() == [{**ids, "traceId": "zz", "n": 7}]
    wrong = edge.post(json.dumps(document).replace("5b8e", "zzzz").encode(), headers=JSON)
    assert wrong.status_code == 200 and wrong.json()["partialSuccess"]["rejectedLogRecords"] == "1"


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("string", ["a", 7, 1.5, True], []),
        ("int64", [7, "7", 7.0, -(1 << 63)], ["x", 1.5, True, "9" * 19, 1e300]),
        ("float64", [7, 1.5, "1.5"], ["x", True]),
        ("bool", [True, "false"], ["yes", 1]),
    ],
)
def test_values_are_converted_to_the_type_of_the_column_or_their_record_is_rejected(
    kind: str, good: list[Any], bad: list[Any]
) -> None:
    edge = Edge({"s": stream({"v": kind}, {"signal": "logs", "columns": {"v": "attributes.v"}})})
    reply = ExportLogsServiceResponse.FromString(edge.post(logs(*({"v": each} for each in (*good, *bad)))).content)
    assert reply.partial_success.rejected_log_records == len(bad)
    assert len(edge.records()) == len(good)
    assert all(isinstance(r["v"], {"string": str, "int64": int, "float64": float, "bool": bool}[kind])
               for r in edge.records())  # fmt: skip
    if bad:
        assert (
            f"'{bad[0]}'" in reply.partial_success.error_message
            and "attributes.v" in reply.partial_success.error_message
        )
        (rejection,) = edge.taken[0][1].rejected
        assert (rejection.reason, sum(n for _, _, n in rejection.spans)) == ("wrong-type", len(bad)), "with their times"


def test_structured_values_are_json_and_of_an_attribute_that_is_there_twice_the_last_counts() -> None:
    edge = Edge({"s": stream({"v": "string", "body": "string"}, {"signal": "logs", "columns": {"v": "attributes.v"}})})
    request = logs({"v": "first"})
    record = request.resource_logs[0].scope_logs[0].log_records[0]
    put(record.attributes, v="last")
    pair = record.body.kvlist_value.values.add(key="k")
    pair.value.array_value.values.add(int_value=1)
    pair.value.array_value.values.add(string_value="ä")
    edge.post(request)
    assert edge.records() == [{"v": "last", "body": '{"k":[1,"ä"]}'}]


def test_without_a_time_the_time_of_observation_counts_and_without_both_the_record_is_rejected() -> None:
    edge = Edge({"s": stream({"body": "string"}, {"signal": "logs"})})
    request = logs({}, {}, {})
    first, second, third = request.resource_logs[0].scope_logs[0].log_records
    first.time_unix_nano, first.observed_time_unix_nano = 0, AT_NS + 5_000_000
    second.time_unix_nano = 0
    third.time_unix_nano = (1 << 64) - 1
    reply = ExportLogsServiceResponse.FromString(edge.post(request).content)
    assert reply.partial_success.rejected_log_records == 2
    assert edge.taken[0][1].batch.column("event_time_ms").to_pylist() == [AT_MS + 5]
    assert {r.reason for r in edge.taken[0][1].rejected} == {"time-missing", "time-out-of-range"}


def test_all_streams_of_a_signal_get_a_request_and_a_repetition_counts_where_it_was_refused() -> None:
    streams = {name: stream({"body": "string"}, {"signal": "logs"}) for name in ("a", "b")}
    edge, request = Edge(streams), logs({}, {})
    edge.failing = {"b"}
    reply = edge.post(request)
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    status = status_pb2.Status.FromString(reply.content)
    delay = error_details_pb2.RetryInfo()
    assert status.code == 14 and status.details[0].Unpack(delay) and delay.retry_delay.seconds == 1
    edge.failing = set()
    assert edge.post(request).status_code == 200
    assert [name for name, _ in edge.taken] == ["a", "b"]


def broken(request: Any) -> bytes:
    """The bytes of a request, in which a text ``BADBYTE`` is not UTF-8."""
    return bytes(request.SerializeToString().replace(b"BADBYTE", b"B\xff\xfeBYTE"))


def rejected_of(reply: httpx.Response, signal: str = "logs") -> int:
    assert reply.status_code == 200, reply.content
    kinds = {"logs": ExportLogsServiceResponse, "metrics": ExportMetricsServiceResponse,
             "traces": ExportTraceServiceResponse}  # fmt: skip
    partial = kinds[signal].FromString(reply.content).partial_success
    return int(partial.rejected_log_records if signal == "logs" else
               partial.rejected_data_points if signal == "metrics" else partial.rejected_spans)  # fmt: skip


@pytest.mark.parametrize("where", ["attribute", "key", "nested", "body", "severity", "resource", "scope", "name"])
@pytest.mark.parametrize("is_used", [False, True])
def test_a_text_that_is_not_utf8_costs_only_the_records_whose_column_has_it(where: str, is_used: bool) -> None:
    paths = {"attribute": "attributes.file", "key": "attributes.file", "nested": "attributes.file", "body": "body",
             "severity": "severity_text", "resource": "resource.host", "scope": "scope.attributes.file",
             "name": "scope.name"}  # fmt: skip
    used = paths[where] if is_used else "attributes.http.route"
    edge = Edge({"s": stream({"x": "string"}, {"signal": "logs", "columns": {"x": used}})})
    request = logs({"http_route": "/a"}, {"http_route": "/b"})
    request.resource_logs.append(logs({"http_route": "/c"}, host="h").resource_logs[0])
    group = request.resource_logs[0]
    scope = group.scope_logs[0]
    record = scope.log_records[1]
    if where in ("attribute", "key"):
        put(record.attributes, **({"file": "BADBYTE"} if where == "attribute" else {"BADBYTE": "x"}))
    elif where == "nested":
        value = record.attributes.add(key="file").value.array_value.values.add().kvlist_value.values.add(key="BADBYTE")
        value.value.int_value = 1
    elif where == "body":
        record.body.string_value = "BADBYTE"
    elif where == "severity":
        record.severity_text = "BADBYTE"
    elif where == "resource":
        put(group.resource.attributes, host="BADBYTE")
    else:
        put(scope.scope.attributes, file="BADBYTE")
        scope.scope.name = "BADBYTE"
    bad = 0 if not is_used or where == "key" else 2 if where in ("resource", "scope", "name") else 1
    assert rejected_of(edge.post(broken(request))) == bad
    assert len(edge.records()) == 3 - bad
    if not is_used:
        assert [each["x"] for each in edge.records()] == ["/a", "/b", "/c"]


@pytest.mark.parametrize("signal", ["traces", "metrics"])
def test_a_text_that_is_not_utf8_costs_one_span_or_one_metric(signal: str) -> None:
    edge = Edge({"s": stream({"name": "string"}, {"signal": signal})})
    if signal == "traces":
        request: Any = ExportTraceServiceRequest()
        spans = request.resource_spans.add().scope_spans.add().spans
        for name in ("a", "BADBYTE", "c"):
            spans.add(name=name, end_time_unix_nano=AT_NS).status.message = "BADBYTE"
    else:
        request = ExportMetricsServiceRequest()
        metrics = request.resource_metrics.add().scope_metrics.add().metrics
        for name in ("a", "BADBYTE", "c"):
            metric = metrics.add(name=name, unit="BADBYTE")
            metric.gauge.data_points.add(time_unix_nano=AT_NS, as_int=1).attributes.add(key="BADBYTE")
    assert rejected_of(edge.post(broken(request), signal), signal) == 1
    assert [each["name"] for each in edge.records()] == ["a", "c"]


def test_a_part_that_is_no_message_costs_only_its_records() -> None:
    edge = Edge({"s": stream({"body": "string"}, {"signal": "logs"})})
    request = logs({}, {"x": "DAMAGED"}, {})
    request.resource_logs[0].scope_logs[0].log_records[1].trace_id = b"DAMAGED"
    data = bytearray(request.SerializeToString())
    at = data.index(b"DAMAGED", data.index(b"DAMAGED") + 1) if data.count(b"DAMAGED") > 1 else data.index(b"DAMAGED")
    data[at - 1] = 120  # the length of a field goes beyond the record
    assert rejected_of(edge.post(bytes(data))) == 1
    assert [each["body"] for each in edge.records()] == ["line 0", "line 2"]
    for damaged in (b"\x0a\x01\xff", b"\x0a\x04\x12\x02\x12\x05"):  # a resource and a scope
        edge = Edge({"s": stream({"body": "string"}, {"signal": "logs"})})
        assert rejected_of(edge.post(damaged + logs({}).SerializeToString())) == 1
        assert len(edge.records()) == 1


def test_half_a_surrogate_pair_and_a_wrong_member_of_json_cost_only_their_record() -> None:
    edge = Edge({"s": stream({"body": "string", "x": "string"}, {"signal": "logs", "columns": {"x": "attributes.x"}})})
    values = ['"a"', '"\\ud83d\\ude00"', '"\\ud800"', '"\\udc00x"', '"\\\\ud800"', '"􏿾"']
    unused = '{"key":"unused","value":{"stringValue":"\\ud800"}}'
    records = [
        f'{{"timeUnixNano":"{AT_NS}","attributes":[{{"key":"x","value":{{"stringValue":{value}}}}},{unused}]}}'
        for value in values
    ]
    records += ['{"timeUnixNano":"soon"}', '{"timeUnixNano":"1","spanId":"zz"}', "7", '{"attributes":[{"key":5}]}']
    body = f'{{"resourceLogs":[{{"scopeLogs":[{{"logRecords":[{",".join(records)}]}}]}}]}}'
    reply = edge.post(body.encode(), headers=JSON)
    assert (reply.status_code, reply.json()["partialSuccess"]["rejectedLogRecords"]) == (200, "6")
    assert [each["x"] for each in edge.records()] == ["a", "😀", "\\ud800", "􏿾"]


@pytest.mark.parametrize(("body", "headers"), [(b"", PROTOBUF), (b"{}", JSON), (b'{"resourceLogs":[]}', JSON)])
def test_a_request_without_records_is_accepted(body: bytes, headers: dict[str, str]) -> None:
    edge = Edge({"s": stream({"body": "string"}, {"signal": "logs"})})
    for signal in ("logs",):
        assert edge.post(body, signal, headers).status_code == 200
    assert edge.records() == []
    for signal in ("metrics", "traces"):
        assert Edge({"s": stream({"name": "string"}, {"signal": signal})}).post(b"", signal).status_code == 200


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"\x0a\xff", PROTOBUF, 422),
        (b"{", JSON, 422),
        (b"[]", JSON, 422),
        (b"[" * 100_000, JSON, 422),
        (b'{"resourceLogs": [{"scopeLogs": 5}]}', JSON, 422),
        (b"", {"content-type": "text/plain"}, 415),
        (b"x", {**PROTOBUF, "content-encoding": "br"}, 415),
    ],
)
def test_a_request_that_cannot_be_read_is_refused_with_a_status(
    body: bytes, headers: dict[str, str], status: int
) -> None:
    edge = Edge({"s": stream({"body": "string"}, {"signal": "logs"})})
    reply = edge.post(body, headers=headers)
    assert reply.status_code == status
    is_json = headers["content-type"] == JSON["content-type"]
    read = (
        json_format.Parse(reply.text, status_pb2.Status()) if is_json else status_pb2.Status.FromString(reply.content)
    )
    assert read.code == 3 and read.message and not read.details, "it is not to be repeated"
    assert not edge.taken


def test_records_of_two_bytes_are_refused_before_they_take_memory() -> None:
    edge = Edge({"s": stream({"body": "string"}, {"signal": "logs"})}, max_push_bytes=100_000)

    def nested(count: int) -> bytes:
        scope = b"\x12\x00" * count
        group = b"\x12" + varint(len(scope)) + scope
        return b"\x0a" + varint(len(group)) + group

    assert edge.post(nested(40_000)).status_code == 422
    assert edge.post(b"\x0a\x00" * 40_000).status_code == 422
    assert edge.post(b'{"a":[' + b"1," * 40_000 + b"1]}", headers=JSON).status_code == 422
    assert edge.post(nested(10)).status_code == 200


def varint(number: int) -> bytes:
    return bytes([number & 127 | 128]) + varint(number >> 7) if number > 127 else bytes([number])


SPAN = {"name": "string", "kind": "string", "status": "string", "duration_ms": "float64", "parent_span_id": "string"}


def test_spans_have_a_duration_and_their_end_as_event_time() -> None:
    edge = Edge({"s": stream(SPAN, {"signal": "traces"})})
    request = ExportTraceServiceRequest()
    spans = request.resource_spans.add().scope_spans.add().spans
    span = spans.add(name="GET /a", kind=2, start_time_unix_nano=AT_NS - 1_500_000, end_time_unix_nano=AT_NS)
    span.status.code = 2
    spans.add(name="b", start_time_unix_nano=AT_NS + 1, end_time_unix_nano=AT_NS, parent_span_id=b"12345678")
    spans.add(name="c")
    assert edge.post(request, "traces").status_code == 200
    assert edge.records() == [
        {"name": "GET /a", "kind": "server", "status": "error", "duration_ms": 1.5, "parent_span_id": None},
        {
            "name": "b",
            "kind": "unspecified",
            "status": "unset",
            "duration_ms": None,
            "parent_span_id": "3132333435363738",
        },
    ]
    assert edge.taken[0][1].batch.column("event_time_ms").to_pylist() == [AT_MS, AT_MS]
    assert [r.reason for r in edge.taken[0][1].rejected] == ["time-missing"]


METRIC = {"name": "string", "route": "string", "part": "string", "value": "float64", "count": "int64", "sum": "float64",
          "lower": "float64", "upper": "float64"}  # fmt: skip


def metric_edge(columns: dict[str, str] = METRIC, **options: Any) -> Edge:
    paths = {"route": "attributes.route"} if "route" in columns else {}
    return Edge({"s": stream(columns, {"signal": "metrics", "columns": paths, **options})})


def metrics(*added: Any) -> ExportMetricsServiceRequest:
    request = ExportMetricsServiceRequest()
    listed = request.resource_metrics.add().scope_metrics.add().metrics
    for add in added:
        add(listed.add())
    return request


def counter(
    name: str, value: float, *, at_s: int = 0, start_s: int | None = -60, route: str = "/a", **more: Any
) -> Any:
    def add(metric: Any) -> None:
        metric.name = name
        metric.sum.aggregation_temporality = more.get("temporality", CUMULATIVE)
        metric.sum.is_monotonic = more.get("monotonic", True)
        start_ns = 0 if start_s is None else AT_NS + start_s * S
        point = metric.sum.data_points.add(start_time_unix_nano=start_ns, time_unix_nano=AT_NS + at_s * S)
        setattr(point, "as_int" if isinstance(value, int) else "as_double", value)
        put(point.attributes, route=route)

    return add


def histogram(counts: Sequence[int], *, at_s: int = 0, temporality: int = CUMULATIVE, total: float = 0.0) -> Any:
    def add(metric: Any) -> None:
        metric.name = "took"
        metric.histogram.aggregation_temporality = temporality
        metric.histogram.data_points.add(
            start_time_unix_nano=AT_NS - 60 * S, time_unix_nano=AT_NS + at_s * S, explicit_bounds=[1.0, 2.0],
            bucket_counts=counts, count=sum(counts), sum=total, max=9.0,
        )  # fmt: skip

    return add


def values(edge: Edge, *names: str) -> list[Any]:
    rows = [tuple(record[name] for name in names) for record in edge.records()]
    return [row[0] for row in rows] if len(names) == 1 else rows


def test_totals_become_increments_and_deltas_and_other_sums_stay_what_they_are() -> None:
    edge = metric_edge()
    for at_s, value in ((0, 5), (1, 7), (2, 3)):
        edge.post(metrics(counter("hits", value, at_s=at_s)), "metrics")
    assert values(edge, "value") == [5, 2, 3], "a smaller total begins anew"
    edge.post(metrics(counter("old", 100, start_s=-7200), counter("none", 100, start_s=None)), "metrics")
    assert len(edge.records()) == 3, "what came before the first point is not known to be uncounted"
    edge.post(metrics(counter("old", 101.5, start_s=-7200, at_s=1), counter("hits", 4, at_s=3, route="/b")), "metrics")
    assert values(edge, "name", "route", "value")[3:] == [("old", "/a", 1.5), ("hits", "/b", 4)]
    more = [counter("d", 8, temporality=DELTA), counter("queue", -3, monotonic=False)]
    edge.post(metrics(*more), "metrics")
    assert values(edge, "name", "value")[5:] == [("d", 8), ("queue", -3)]


def test_a_repeated_request_of_totals_adds_nothing_and_rejects_nothing() -> None:
    edge = metric_edge()
    first, second = metrics(counter("hits", 5)), metrics(counter("hits", 7, at_s=1))
    replies = [edge.post(each, "metrics") for each in (first, second, first, second)]
    assert values(edge, "value") == [5, 2]
    assert all(ExportMetricsServiceResponse.FromString(reply.content).partial_success.rejected_data_points == 0
               for reply in replies)  # fmt: skip


def test_a_late_total_adds_nothing_and_points_of_another_process_in_the_future_or_negative_are_rejected() -> None:
    edge = metric_edge()
    edge.post(metrics(counter("hits", 5, at_s=10)), "metrics")
    reply = edge.post(metrics(counter("hits", 4, at_s=5)), "metrics")
    assert not ExportMetricsServiceResponse.FromString(reply.content).partial_success.rejected_data_points
    other, future = counter("hits", 9, at_s=5, start_s=-90), counter("hits", 9, at_s=86_400)
    answer = ExportMetricsServiceResponse.FromString(
        edge.post(metrics(other, future, counter("h", -1)), "metrics").content
    ).partial_success
    assert answer.rejected_data_points == 3 and "another process" in answer.error_message
    edge.post(metrics(counter("hits", 6, at_s=20)), "metrics")
    assert values(edge, "value") == [5, 1]


def test_the_configuration_of_the_how_to_is_accepted() -> None:
    page = (Path(__file__).parents[3] / "docs/how-to/receive-otlp.md").read_text()
    document = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])
    config = parse_config({"edge": "e", "state_dir": "s", **document}, {"OTLP_TOKEN": "t"})
    assert len(package_receivers(config, lambda: AT_MS)) == 3


def test_grpc_needs_a_source_that_is_received_over_it_and_a_free_address() -> None:
    files = {"columns": {"x": "int64"}, "time": {"column": "at"}, "sources": [{"stdin": {}}]}
    with refused(InvalidConfig, "http.grpc"):
        parse_config({"edge": "e", "state_dir": "s", "http": {"grpc": "127.0.0.1:1"}, "streams": {"s": files}}, {})
    edge = Edge({"s": stream({"body": "string"}, {"signal": "logs"})})

    async def run(address: str) -> None:
        with refused(InvalidConfig, "http.grpc"):
            GrpcReceivers(edge.endpoint, address, None)

    with listen("127.0.0.1:0", "x") as socket:
        asyncio.run(run(f"127.0.0.1:{socket.getsockname()[1]}"))


def test_histograms_have_a_row_of_totals_and_one_for_each_bucket_that_grew() -> None:
    edge, names = metric_edge(), ("part", "lower", "upper", "count", "sum")
    edge.post(metrics(histogram([2, 0, 1], total=6.0)), "metrics")
    edge.post(metrics(histogram([2, 3, 1], total=10.0, at_s=1)), "metrics")
    assert values(edge, *names) == [
        ("total", None, None, 3, 6.0), ("bucket", None, 1.0, 2, None), ("bucket", 2.0, None, 1, None),
        ("total", None, None, 3, 4.0), ("bucket", 1.0, 2.0, 3, None),
    ]  # fmt: skip
    edge.post(metrics(histogram([0, 4, 0], total=6.0, temporality=DELTA, at_s=2)), "metrics")
    assert values(edge, *names)[5:] == [("total", None, None, 4, 6.0), ("bucket", 1.0, 2.0, 4, None)]


def test_exponential_histograms_and_summaries_are_rows() -> None:
    def exponential(metric: Any, temporality: int = DELTA) -> None:
        metric.name = "size"
        metric.exponential_histogram.aggregation_temporality = temporality
        point = metric.exponential_histogram.data_points.add(
            time_unix_nano=AT_NS, scale=0, count=6, sum=9.0, zero_count=1
        )
        point.positive.offset = 1
        point.positive.bucket_counts.extend([3, 0, 1])
        point.negative.bucket_counts.append(1)

    def summary(metric: Any) -> None:
        metric.name = "rpc"
        point = metric.summary.data_points.add(start_time_unix_nano=AT_NS - S, time_unix_nano=AT_NS, count=4, sum=2.0)
        point.quantile_values.add(quantile=0.99, value=1.5)

    columns = {"part": "string", "lower": "float64", "upper": "float64", "count": "int64", "value": "float64",
               "quantile": "float64"}  # fmt: skip
    edge = metric_edge(columns)
    edge.post(metrics(exponential, summary), "metrics")
    assert values(edge, *columns) == [
        ("total", None, None, 6, None, None), ("bucket", 2.0, 4.0, 3, None, None), ("bucket", 8.0, 16.0, 1, None, None),
        ("bucket", -2.0, -1.0, 1, None, None), ("bucket", 0.0, 0.0, 1, None, None),
        ("total", None, None, 4, None, None), ("quantile", None, None, None, 1.5, 0.99),
    ]  # fmt: skip
    reply = edge.post(metrics(lambda metric: exponential(metric, CUMULATIVE)), "metrics")
    answer = ExportMetricsServiceResponse.FromString(reply.content).partial_success
    assert answer.rejected_data_points == 1 and "expected delta" in answer.error_message


@pytest.mark.parametrize("scale", [-(1 << 31), -11, 21, (1 << 31) - 1])
def test_an_exponential_histogram_of_an_impossible_scale_costs_only_itself(scale: int) -> None:
    def exponential(metric: Any) -> None:
        metric.exponential_histogram.aggregation_temporality = DELTA
        point = metric.exponential_histogram.data_points.add(time_unix_nano=AT_NS, scale=scale, count=1)
        point.positive.bucket_counts.append(1)

    edge = metric_edge()
    assert edge.post(metrics(exponential, counter("hits", 5)), "metrics").status_code == 200
    assert values(edge, "value") == [5]


def test_many_names_are_bounded_and_a_stream_of_one_name_is_not_affected() -> None:
    many = {"signal": "metrics", "max_series": 1000}
    one = {"signal": "metrics", "metrics": ["hits"]}
    columns = {"name": "string", "value": "int64"}
    edge = Edge({"all": stream(columns, many), "one": stream(columns, one)})
    names = [counter(f"n{number}", 1) for number in range(20_000)]
    reply = edge.post(metrics(*names, counter("hits", 5)), "metrics")
    answer = ExportMetricsServiceResponse.FromString(reply.content).partial_success
    assert answer.rejected_data_points == 19_001 and "max_series (1000)" in answer.error_message
    assert (len(edge.records("all")), edge.records("one")) == (1000, [{"name": "hits", "value": 5}])
    assert len(edge.series["all:otlp:metrics"]) == 1000


@pytest.mark.parametrize(
    ("columns", "entry", "more", "field"),
    [
        ({"a": "string"}, {"signal": "logs"}, {}, "streams.s.sources.otlp.columns.a"),
        ({"a": "string"}, {"signal": "logs", "columns": {"a": "attributes."}}, {}, "streams.s.sources.otlp.columns.a"),
        ({"value": "string"}, {"signal": "metrics"}, {}, "streams.s.sources.otlp.columns.value"),
        ({"body": "string"}, {"signal": "logs", "columns": {"b": "body"}}, {}, "streams.s.sources.otlp.columns.b"),
        ({"body": "string"}, {"signal": "logs", "metrics": ["a"]}, {}, "streams.s.sources.otlp.metrics"),
        (
            {"body": "string"},
            {"signal": "logs"},
            {"time": {"column": "at", "unit": "iso8601"}},
            "streams.s.sources.otlp",
        ),
    ],
)
def test_a_column_without_a_field_is_refused(
    columns: dict[str, str], entry: dict[str, Any], more: dict[str, Any], field: str
) -> None:
    with refused(InvalidConfig, field):
        Edge({"s": stream(columns, entry, **more)})


def test_a_request_without_points_or_with_fractions_of_a_base_is_no_fault() -> None:
    edge = metric_edge({"value": "int64", "name": "string"})
    assert edge.post(metrics(), "metrics").status_code == 200
    edge.post(metrics(counter("a", 1.5, start_s=None), counter("b", 0.5)), "metrics")
    assert [(r.reason, r.count) for _, chunk in edge.taken for r in chunk.rejected] == [("wrong-type", 1)]
    edge.post(metrics(counter("a", 3.5, start_s=None, at_s=1)), "metrics")
    assert edge.records() == [{"value": 2, "name": "a"}]
    huge = {"resourceMetrics": [{"scopeMetrics": [{"metrics": [{"gauge": {"dataPoints": [{"asDouble": 10**400}]}}]}]}]}
    assert edge.post(json.dumps(huge).encode(), "metrics", JSON).status_code == 422


def test_malformed_points_cost_no_more_than_others_and_are_counted() -> None:
    edge = metric_edge()
    wrong = [histogram([1, 2], total=1.0) for _ in range(3000)]
    answer = ExportMetricsServiceResponse.FromString(edge.post(metrics(*wrong, counter("a", 1)), "metrics").content)
    assert answer.partial_success.rejected_data_points == 3000
    assert "2 bucket counts and 2 bounds" in answer.partial_success.error_message
    assert values(edge, "value") == [1]


def test_a_constant_of_the_stream_needs_no_attribute_and_another_value_is_rejected() -> None:
    columns = {"site": "string", "body": "string"}
    edge = Edge({"s": stream(columns, {"signal": "logs"}, constants={"site": "jfk"})})
    edge.post(logs({}, {"site": "jfk"}, {"site": "lga"}))
    assert [record["site"] for record in edge.records()] == ["jfk", "jfk"]
    (rejection,) = edge.taken[0][1].rejected
    assert (rejection.reason, rejection.count) == ("other-constant", 1)


def test_exporters_that_are_refused_come_again_over_both_transports() -> None:
    """Over real sockets. The first two requests find the edge unavailable."""
    edge = Edge({"s": stream({"body": "string"}, {"signal": "logs"})})
    edge.unavailable = [Unavailable("not yet")] * 2

    def emit(exporter: Any) -> None:
        provider = LoggerProvider(shutdown_on_exit=False)
        provider.add_log_record_processor(SimpleLogRecordProcessor(exporter))
        provider.get_logger("t").emit(body="b", timestamp=AT_NS)
        provider.shutdown()

    async def run() -> None:
        rpc = GrpcReceivers(edge.endpoint, "127.0.0.1:0", None)
        await rpc.start()
        with listen("127.0.0.1:0", "http.listen") as socket:
            server = EmbeddedServer(uvicorn.Config(edge.app, lifespan="off", log_level="error"))
            serving = asyncio.create_task(server.serve([socket]))
            endpoint = f"http://127.0.0.1:{socket.getsockname()[1]}/v1/logs"
            exporters = [GrpcLogExporter(endpoint=f"127.0.0.1:{rpc.port}", insecure=True), HttpLogExporter(endpoint)]
            threads = [threading.Thread(target=emit, args=(each,)) for each in exporters]
            for thread in threads:
                thread.start()
            for thread in threads:
                await asyncio.to_thread(thread.join)
            server.should_exit = True
            await asyncio.gather(serving, rpc.stop(1))

    asyncio.run(run())
    assert [record["body"] for record in edge.records()] == ["b", "b"] and not edge.unavailable


@pytest.mark.parametrize("temporality", [DELTA, CUMULATIVE])
def test_a_count_beyond_int64_is_rejected_and_an_infinite_sum_stays_infinite(temporality: int) -> None:
    edge = metric_edge()
    huge = histogram([(1 << 64) - 1, 0, 0], temporality=temporality, total=1.0)
    infinite = histogram([1, 0, 0], temporality=temporality, total=float("inf"), at_s=1)
    reply = edge.post(metrics(huge), "metrics")
    assert values(edge, "part") == [] and reply.status_code == 200
    assert [r.reason for r in edge.taken[0][1].rejected] == ["wrong-type"]
    edge.post(metrics(infinite), "metrics")
    assert values(edge, "part", "sum") == [("total", float("inf")), ("bucket", None)]
    edge.post(metrics(histogram([2, 0, 0], temporality=temporality, total=float("inf"), at_s=2)), "metrics")
    count, total = values(edge, "count", "sum")[2]
    assert (count, str(total)) == ((1, "nan") if temporality == CUMULATIVE else (2, "inf"))


@pytest.mark.parametrize("bounds", [[5.0, 1.0], [1.0, 1.0], [1.0, float("nan")]])
def test_a_histogram_whose_bounds_do_not_increase_costs_only_itself(bounds: list[float]) -> None:
    edge = metric_edge()

    def faulty(metric: Any) -> None:
        histogram([1, 2, 3])(metric)
        metric.histogram.data_points[0].explicit_bounds[:] = bounds

    edge.post(metrics(faulty, histogram([2, 0, 0])), "metrics")
    assert values(edge, "part", "count") == [("total", 2), ("bucket", 2)]
    assert [r.reason for r in edge.taken[0][1].rejected] == ["malformed"]


@pytest.mark.parametrize("add", [counter("c", 5, temporality=0), histogram([1, 0, 0], temporality=0)])
def test_a_point_that_may_be_a_total_or_an_increment_is_rejected(add: Any) -> None:
    edge = metric_edge()
    edge.post(metrics(add, counter("d", 8, temporality=DELTA)), "metrics")
    assert values(edge, "name") == ["d"]
    assert [r.reason for r in edge.taken[0][1].rejected] == ["malformed"]
