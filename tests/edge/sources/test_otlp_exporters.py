"""The SDK's exporters send to a real agent over both transports, through refusals and kills."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from edge.durability import journal
from edge.durability.event_records import PAYLOAD, read_payload
from edge.process import now_ms
from sim.demo.ports import free_address
from tests.certificates import make_certificates
from tests.edge.agent_process import AgentProcess

pytestmark = pytest.mark.slow

Start = Callable[..., AgentProcess]
LOGS = {"otlp": {"signal": "logs", "columns": {"x": "attributes.x"}}}
METHOD = "/opentelemetry.proto.collector.logs.v1.LogsService/Export"


@pytest.fixture
def agent_of(tmp_path: Path) -> Iterator[Start]:
    made: list[AgentProcess] = []

    def make(*sources: dict[str, Any], **options: Any) -> AgentProcess:
        agent = AgentProcess(tmp_path, list(sources), **options)
        made.append(agent)
        return agent

    try:
        yield make
    finally:
        for agent in made:
            agent.close()


def logs(first: int, count: int) -> ExportLogsServiceRequest:
    request = ExportLogsServiceRequest()
    for x in range(first, first + count):
        record = request.resource_logs.add() if not request.resource_logs else request.resource_logs[0]
        scope = record.scope_logs[0] if record.scope_logs else record.scope_logs.add()
        line = scope.log_records.add(time_unix_nano=now_ms() * 1_000_000)
        attribute = line.attributes.add(key="x")
        attribute.value.int_value = x
    return request


def call(address: str, message: bytes, token: str = "", channel: Any = None, **more: Any) -> grpc.StatusCode:
    """Calls the method without a client library; returns the status."""
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with channel or grpc.insecure_channel(address) as opened:
        try:
            opened.unary_unary(METHOD)(message, timeout=20, metadata=metadata, **more)
        except grpc.RpcError as exc:
            return exc.code()  # type: ignore[no-any-return]
    return grpc.StatusCode.OK


def test_metrics_and_spans_of_the_sdk_are_records_and_a_counter_counts_its_increments_through_a_kill(
    agent_of: Start,
) -> None:
    metrics = {"otlp": {"signal": "metrics", "metrics": ["hits"], "columns": {"x": "value"}}}
    spans = {"otlp": {"signal": "traces", "columns": {"x": "duration_ns"}}}
    agent = agent_of(metrics, spans)
    agent.start()
    url = f"http://{agent.address}/v1"
    reader = PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=f"{url}/metrics"), 3_600_000)
    meters = MeterProvider([reader], resource=Resource({"service.name": "shop"}), shutdown_on_exit=False)
    hits, other = meters.get_meter("m").create_counter("hits"), meters.get_meter("m").create_counter("other")
    tracers = TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=f"{url}/traces")))
    for n in (3, 4):
        hits.add(n, {"route": "/a"})
        other.add(1)
        meters.force_flush()
        if n == 3:
            agent.kill()
            agent.start()
    with tracers.get_tracer("t").start_as_current_span("s"):
        pass
    meters.shutdown()
    tracers.shutdown()
    agent.until(lambda: agent.records() >= 3)
    agent.kill()
    with agent.state() as recovered:
        assert len(recovered.durable.state.series["events:otlp:metrics"]) == 1
    found = []
    for path in sorted((agent.directory / "state").glob("journal-*.log")):
        payloads = [read_payload(r.payload)[0] for r in journal.scan(path.read_bytes()).records if r.kind == PAYLOAD]
        found += [(p.source, p.batch.column("x").to_pylist()) for p in payloads if p.batch.num_rows]
    assert [x for source, values in found if source.endswith("metrics") for x in values if x] == [3, 4]
    assert [len(values) for source, values in found if source.endswith("traces")] == [1]


@pytest.mark.nightly
def test_grpc_needs_a_token_and_tls_and_refuses_what_is_too_large_or_malformed(agent_of: Start, tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path, {"edge": "IP:127.0.0.1"})
    address = free_address()
    tls = {"cert": str(certificates / "edge.pem"), "key": str(certificates / "edge.key")}
    metrics = free_address()
    http = {"grpc": address, "tokens": ["s3cret"], "tls": tls, "metrics": metrics}
    agent = agent_of(LOGS, http=http, max_push_bytes=20_000)
    agent._http = httpx.Client(base_url=f"http://{metrics}")
    agent.start()
    credentials = grpc.ssl_channel_credentials((certificates / "ca.pem").read_bytes())
    message = logs(0, 5).SerializeToString()

    def status(message: bytes, token: str = "s3cret", **more: Any) -> grpc.StatusCode:
        return call(address, message, token, grpc.secure_channel(address, credentials), **more)

    assert call(address, message, "s3cret") is grpc.StatusCode.UNAVAILABLE, "without TLS"
    assert status(message, "wrong") is grpc.StatusCode.UNAUTHENTICATED
    assert status(b"\x0a\xff") is grpc.StatusCode.INVALID_ARGUMENT
    assert status(logs(0, 1000).SerializeToString()) is grpc.StatusCode.INVALID_ARGUMENT
    bomb = b"\x0a\x80\x80\x80\x20" + bytes(64 << 20)
    assert status(bomb, compression=grpc.Compression.Gzip) in (
        grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED,
    )  # fmt: skip
    assert status(message, compression=grpc.Compression.Gzip) is grpc.StatusCode.OK
    assert agent.records() == 5
