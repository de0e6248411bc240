"""The kind of sources ``otlp`` (extra ``otlp``): logs, metrics and spans from OpenTelemetry SDKs and collectors.

Requests arrive at ``/v1/logs``, ``/v1/metrics`` and ``/v1/traces`` of `http.listen`, or over gRPC at `http.grpc`. Each
record goes to all streams whose source has the record's signal. Exporters repeat a request unchanged. Therefore a
request counts once for each stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Literal

import pyarrow as pa
from google.protobuf import json_format
from pydantic import Field, field_validator
from starlette.responses import Response

from edge.codecs.schema import RecordSchema
from edge.config import Model
from edge.receivers import Body, Counted, Part, PushedSource, Receiver, Refused, Request
from edge.records import Source
from edge.source_kinds import SourceContext, require_module
from edge.sources.grpc_receiving import MEDIA as GRPC
from edge.sources.grpc_receiving import STATUS
from edge.sources.http_body import ENCODINGS
from edgewater.base.errors import InvalidConfig
from edgewater.base.streams import type_name
from edgewater.runtime.configuration import refusal

PROTOBUF, JSON = "application/x-protobuf", "application/json"
MAX_SERIES = 1_000_000  # limit: memory of series
_PREFIXES = ("attributes.", "resource.", "scope.attributes.")
_SERVICES = {"logs": "logs.v1.LogsService", "metrics": "metrics.v1.MetricsService", "traces": "trace.v1.TraceService"}
_ANY, _NUMBER = ("string", "int64", "float64", "bool"), ("int64", "float64")

Signal = Literal["logs", "metrics", "traces"]


class OtlpConfig(Model):
    """The options below ``otlp:``.

    Attributes:
        signal: the signal whose records the stream receives.
        columns: by column, the path of a field or attribute, such as ``resource.service.name``. A column without an
            entry takes the field with the column's name.
        metrics: names of the metrics that the stream receives. A name may end in ``*``. None: all metrics.
        max_series: the largest number of remembered cumulative series. Points of further series are rejected.
    """

    signal: Signal
    columns: dict[str, str] = {}
    metrics: list[str] | None = Field(default=None, min_length=1, max_length=1000)
    max_series: int = Field(default=100_000, ge=1, le=MAX_SERIES)

    @field_validator("metrics")
    @classmethod
    def _patterns(cls, names: list[str] | None) -> list[str] | None:
        for name in names or ():
            if not name or any(mark in name.removesuffix("*") for mark in "*?["):
                raise refusal("names of metrics such as http.server.request.duration or http.server.*", f"got {name!r}")
        return names


class Otlp:
    """The kind of sources ``otlp``."""

    name = "otlp"
    config = OtlpConfig

    def sources(self, options: OtlpConfig, context: SourceContext) -> Sequence[Source]:
        require_module("google.rpc.status_pb2", "googleapis-common-protos", "otlp")
        require_module("opentelemetry.proto", "opentelemetry-proto", "otlp")
        _paths(options, context)
        return [_source(options, context)]

    def receivers(self, entries: Sequence[tuple[OtlpConfig, SourceContext]]) -> Sequence[Receiver]:
        by_signal: dict[str, list[tuple[OtlpConfig, SourceContext]]] = {}
        for options, context in entries:
            by_signal.setdefault(options.signal, []).append((options, context))
        return [OtlpReceiver(signal, given) for signal, given in by_signal.items()]


KIND = Otlp()


def _source(options: OtlpConfig, context: SourceContext) -> PushedSource:
    name = f"{context.stream}:otlp:{options.signal}"
    return PushedSource(name, context.stream, context.schema, context.idle)


def _fields(signal: str) -> Mapping[str, str]:
    from edge.sources.otlp.columns import LogRows, SpanRows
    from edge.sources.otlp.metrics import MetricRows

    return {"logs": LogRows.fields, "metrics": MetricRows.fields, "traces": SpanRows.fields}[signal]


def _paths(options: OtlpConfig, context: SourceContext) -> dict[str, str]:
    """Returns the path of each column. The column of the event time has a path only if `columns` names one.

    Raises:
        InvalidConfig: a path is neither a field nor an attribute, or the type of a column does not fit its field.
    """
    schema = context.schema
    fields, given = _fields(options.signal), options.columns
    names = [*schema.columns, *(name for name in schema.time.columns if name not in schema.columns)]
    for name in given:
        if name not in names:
            raise InvalidConfig(f"columns.{name}", name, f"one of the columns {', '.join(names)}")
    if options.metrics is not None and options.signal != "metrics":
        raise InvalidConfig("metrics", options.metrics, "no metrics with another signal than metrics")
    result = {}
    for name in names:
        is_time = name in schema.time.columns
        path = given.get(name, None if is_time or name in schema.constants else name)
        if path is None and name in schema.constants:
            path = "attributes." + name
        if path is None:
            _check_time(schema)
            continue
        is_attribute = any(path.startswith(prefix) and len(path) > len(prefix) for prefix in _PREFIXES)
        if path not in (*fields, "scope.name", "scope.version") and not is_attribute:
            prefixes = ", ".join(prefix + "NAME" for prefix in _PREFIXES)
            accepted = f"one of {', '.join(fields)}, scope.name, scope.version, {prefixes}"
            raise InvalidConfig(f"columns.{name}", path, accepted)
        _check_type(f"columns.{name}", path, schema.textual[name], fields.get(path, "any"))
        result[name] = path
    return result


def _check_time(schema: RecordSchema) -> None:
    if schema.time.time_of_day is not None or schema.time.is_text:
        accepted = "time.unit ms, s or us, without time.time_of_day: the event time is a field of the records"
        raise InvalidConfig("", schema.time.unit, accepted)


def _check_type(field: str, path: str, kind: pa.DataType, accepted: str) -> None:
    types = {"any": _ANY, "number": _NUMBER}.get(accepted, (accepted,))
    if type_name(kind) not in types:
        raise InvalidConfig(field, path, f"a column of type {' or '.join(types)}", f"the column is {type_name(kind)}")


class OtlpReceiver:
    """A `Receiver` of one signal, for all streams with a source of the signal."""

    encodings = ENCODINGS

    def __init__(self, signal: str, entries: Sequence[tuple[OtlpConfig, SourceContext]]) -> None:
        self.path = f"/v1/{signal}"
        self.grpc_method: str | None = f"/opentelemetry.proto.collector.{_SERVICES[signal]}/Export"
        self._signal = signal
        self._sources = [_source(options, context) for options, context in entries]
        self._entries = [
            (source, options, _paths(options, context))
            for source, (options, context) in zip(self._sources, entries, strict=True)
        ]

    def sources(self, request: Request) -> Sequence[PushedSource]:
        if request.media not in (PROTOBUF, JSON, GRPC):
            detail = f"Content-Type {request.media[:100] or '(none)'} is not accepted; expected {PROTOBUF} or {JSON}"
            raise Refused(415, "unsupported-media-type", detail)
        return self._sources

    def decode(self, request: Request, body: Body) -> Sequence[Part]:
        from edge.sources.otlp.columns import ROWS, prepare
        from edge.sources.otlp.messages import Budget, read_json, read_request
        from edge.sources.otlp.metrics import MetricRows, MetricStream

        read = read_json if request.media == JSON else read_request
        records = read(body.plain, self._signal, Budget(body))
        rows = ROWS[self._signal](records) if self._signal in ROWS else None
        parts = []
        for source, options, paths in self._entries:
            body.check()
            if rows is not None:
                decoded = prepare(rows, paths, source.schema).decoded(source.schema, body.arrival_ms)
                parts.append(Part(source, decoded))
                continue
            chosen = MetricRows(records, options.metrics, Budget(body))
            stream = MetricStream(source.schema, paths, options.max_series)
            parts.append(Part(source, *stream.decode(chosen, body.arrival_ms)))
        return parts

    def reply(self, request: Request, counted: Sequence[Counted]) -> Response:
        rejected = {each.source.stream: each.rejected for each in counted if each.rejected}
        message = self._response()
        if rejected:
            total = sum(r.count for rejections in rejected.values() for r in rejections)
            name = {"logs": "log_records", "metrics": "data_points", "traces": "spans"}[self._signal]
            setattr(message.partial_success, f"rejected_{name}", total)
            message.partial_success.error_message = "; ".join(
                f"stream {stream}: {r.count} rejected, {r.reason}: {r.message}"
                for stream, rejections in rejected.items()
                for r in rejections
            )
        return _rendered(message, request, 200)

    def _response(self) -> Any:
        """Returns an empty reply of the signal's service."""
        package, service = _SERVICES[self._signal].rsplit(".", maxsplit=1)
        name = f"opentelemetry.proto.collector.{package}.{package.partition('.')[0]}_service_pb2"
        return getattr(import_module(name), f"Export{service}Response")()

    def refusal(self, request: Request, refused: Refused) -> Response:
        """Returns a `google.rpc.Status`. Exporters repeat only requests with status 429 or 503, so a time-out gets
        503.
        """
        from google.rpc import error_details_pb2, status_pb2

        code, _ = STATUS[refused.status].value
        message = status_pb2.Status(code=code, message=refused.detail)
        retry_s = refused.retry_after_s if refused.status != 408 else 1
        if retry_s is not None:
            delay = error_details_pb2.RetryInfo()
            delay.retry_delay.seconds = retry_s
            message.details.add().Pack(delay)
        return _rendered(message, request, 503 if refused.status == 408 else refused.status)


def _rendered(message: Any, request: Request, status: int) -> Response:
    if request.media == JSON:
        return Response(json_format.MessageToJson(message), status, media_type=JSON)
    return Response(message.SerializeToString(), status, media_type=PROTOBUF)
