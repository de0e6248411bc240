"""Targets: OTLP requests that clients send to an edge."""

from __future__ import annotations

import base64
import json
from functools import partial
from typing import Any

from google.protobuf import json_format
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from bench.hostile.mutate import mutated_bytes
from bench.hostile.pushes import LIMITS, NOW_MS, _memory, _mutated_text, _refusals
from bench.hostile.targets import Target, register
from bench.sources import otlp_request
from edge.codecs.schema import EventTime, RecordSchema
from edge.receivers import Request
from edge.series import SeriesMemory
from edge.source_kinds import SourceContext
from edge.sources.otlp import KIND, OtlpConfig
from edgewater.base.streams import COLUMN_TYPES

AT_NS = NOW_MS * 1_000_000
COLUMNS = {
    "logs": {"body": "string", "severity_number": "int64", "trace_id": "string", "a": "string", "n": "int64"},
    "traces": {"name": "string", "kind": "string", "duration_ms": "float64", "span_id": "string", "a": "string"},
    "metrics": {"name": "string", "part": "string", "value": "float64", "count": "int64", "sum": "float64",
                "lower": "float64", "quantile": "float64", "a": "string"},
}  # fmt: skip
PATHS = {"a": "attributes.http.route", "n": "attributes.bytes"}


def _logs() -> list[bytes]:
    request = ExportLogsServiceRequest.FromString(otlp_request(1))
    for group in request.resource_logs:
        del group.scope_logs[0].log_records[20:]
    request.resource_logs[0].scope_logs[0].log_records[0].body.kvlist_value.values.add(key="k")
    return [request.SerializeToString()]


def _traces() -> list[bytes]:
    request = ExportTraceServiceRequest()
    spans = request.resource_spans.add().scope_spans.add().spans
    for n in range(10):
        span = spans.add(name=f"s{n}", start_time_unix_nano=AT_NS - n, end_time_unix_nano=AT_NS, span_id=bytes(8))
        span.attributes.add(key="http.route").value.string_value = f"/{n}"
    return [request.SerializeToString()]


def _metrics() -> list[bytes]:
    request, times = ExportMetricsServiceRequest(), {"start_time_unix_nano": AT_NS - 9, "time_unix_nano": AT_NS}
    metrics = request.resource_metrics.add().scope_metrics.add().metrics
    metrics.add(name="gauge").gauge.data_points.add(as_double=1.5, time_unix_nano=AT_NS)
    total = metrics.add(name="sum").sum
    total.aggregation_temporality, total.is_monotonic = 2, True  # type: ignore[assignment]
    total.data_points.add(as_int=7, **times).attributes.add(key="http.route").value.string_value = "/a"
    histogram = metrics.add(name="histogram").histogram
    histogram.aggregation_temporality = 2  # type: ignore[assignment]
    histogram.data_points.add(count=3, sum=4.0, bucket_counts=[1, 2], explicit_bounds=[1.0], **times)
    exponential = metrics.add(name="exponential").exponential_histogram
    exponential.aggregation_temporality = 1  # type: ignore[assignment]
    exponential.data_points.add(count=3, scale=2, zero_count=1, **times).positive.bucket_counts.extend([1, 0, 1])
    metrics.add(name="summary").summary.data_points.add(count=3, sum=4.0, **times).quantile_values.add(quantile=0.5)
    return [request.SerializeToString()]


CORPUS = {"logs": _logs, "traces": _traces, "metrics": _metrics}
REQUESTS = {
    "logs": ExportLogsServiceRequest,
    "traces": ExportTraceServiceRequest,
    "metrics": ExportMetricsServiceRequest,
}


def _json(signal: str) -> list[bytes]:
    def with_hexadecimal_ids(members: dict[str, Any]) -> dict[str, Any]:
        ids = {name: base64.b64decode(members[name]).hex() for name in ("traceId", "spanId") if name in members}
        return members | ids

    texts = [json_format.MessageToJson(REQUESTS[signal]().FromString(data)) for data in CORPUS[signal]()]
    return [json.dumps(json.loads(text, object_hook=with_hexadecimal_ids)).encode() for text in texts]


def _decode(signal: str, media: str, data: bytes) -> None:
    columns = {name: COLUMN_TYPES[kind] for name, kind in COLUMNS[signal].items()}
    paths = {name: path for name, path in PATHS.items() if name in columns}
    options = OtlpConfig.model_validate({"signal": signal, "columns": paths, "max_series": 1000})
    context = SourceContext("s", RecordSchema(columns, EventTime("at")), lambda: NOW_MS)
    (receiver,) = KIND.receivers([(options, context)])
    memory = SeriesMemory(0)
    for part in receiver.decode(Request(media, {}), LIMITS.of(data, NOW_MS)):
        if part.convert is not None:
            decoded, update = part.convert(memory)
            decoded.batch.validate(full=True)
            memory.apply(update)
        part.decoded.batch.validate(full=True)


for _signal, _corpus in CORPUS.items():
    _protobuf, _text = (partial(_decode, _signal, f"application/{media}") for media in ("x-protobuf", "json"))
    register(Target(f"otlp/{_signal}", _corpus, _protobuf, mutated_bytes, _refusals, _memory))
    register(Target(f"otlp/{_signal}-json", partial(_json, _signal), _text, _mutated_text, _refusals, _memory))
