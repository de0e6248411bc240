"""Prometheus remote write: requests to the endpoint, hostile requests, and a real Prometheus and a real agent."""

from __future__ import annotations

import asyncio
import math
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
import yaml
from cramjam import snappy
from starlette.applications import Starlette

from edge.agent import Agent, AgentHealth, open_agent
from edge.config import parse_config
from edge.core.events import Configured
from edge.process import now_ms
from edge.receivers import Body, Request
from edge.records import Chunk
from edge.source_kinds import SourceContext
from edge.sources import remote_write
from edgewater.base.errors import InvalidConfig
from edgewater.wire import remote_write_pb2 as pb
from sim.demo.ports import free_port
from tests.edge.agent_process import COUNT, QUERY, AgentProcess
from tests.programs import running
from tests.query_specs import query_spec

PATH = "/api/v1/write"
HEADERS = {
    "Content-Type": "application/x-protobuf",
    "Content-Encoding": "snappy",
    "X-Prometheus-Remote-Write-Version": "0.1.0",
}
STALE = struct.unpack("<d", (0x7FF0000000000002).to_bytes(8, "little"))[0]
TIMEOUT_S = 60.0
Series = tuple[Mapping[str, str], Sequence[tuple[float, int]]]
"""Labels, and samples of a value and a time in seconds after `start_ms`."""


def request(series: Sequence[Series], start_ms: int, histograms: int = 0) -> bytes:
    message = pb.WriteRequest()
    for labels, samples in series:
        each = pb.TimeSeries(
            labels=[pb.Label(name=name, value=value).SerializeToString() for name, value in labels.items()],
            samples=[pb.Sample(value=value, timestamp=start_ms + 1000 * at) for value, at in samples],
            histograms=[b""] * histograms,
        )
        message.timeseries.append(each.SerializeToString())
    return message.SerializeToString()


def named(name: str, **labels: str) -> dict[str, str]:
    return {"__name__": name, **labels}


class Edge:
    """An agent in this process that has learned its query, with what its streams have counted."""

    def __init__(self, directory: Path, sources: dict[str, dict[str, Any]] | None = None, **limits: Any) -> None:
        columns = {"value": "float64", "metric": "string", "job": "string"}
        served = sources or {"events": {}}
        self._document = {
            "edge": "e",
            "center": {"address": "127.0.0.1:1"},
            "state_dir": str(directory / "state"),
            "limits": limits,
            "streams": {
                name: {"columns": columns, "time": {"column": "at"}, "sources": [{"remote_write": options}]}
                for name, options in served.items()
            },
        }
        self.start_ms = now_ms() - 60_000
        self.agent = self._opened()
        self.records: list[dict[str, Any]] = []
        self._runner = asyncio.Runner()

    def _opened(self) -> Agent:
        agent = open_agent(parse_config(self._document))
        if not agent.durable.core.configured:
            agent.durable.handle(Configured(((QUERY, COUNT),)))
        agent.outbox.configured.set()
        count = agent.states.count

        def seen(source: str, chunk: Chunk) -> None:
            self.records += [{"stream": source.partition(":")[0], **row} for row in chunk.batch.to_pylist()]
            count(source, chunk)

        agent.states.count = seen  # type: ignore[method-assign]
        return agent

    def restart(self) -> None:
        """As after ``kill -9``: what is not synced is lost."""
        self.agent.durable.close()
        self.agent = self._opened()

    def send(self, *series: Series, histograms: int = 0, **options: Any) -> httpx.Response:
        return self.post(bytes(snappy.compress_raw(request(series, self.start_ms, histograms))), **options)

    def post(self, body: bytes, headers: Mapping[str, str] = HEADERS, path: str = PATH) -> httpx.Response:
        return self.posts([body], headers, path)[0]

    def posts(
        self, bodies: Sequence[bytes], headers: Mapping[str, str] = HEADERS, path: str = PATH
    ) -> list[httpx.Response]:
        async def run() -> list[httpx.Response]:
            commit = asyncio.create_task(self.agent.commit.run())
            app = Starlette(routes=self.agent.endpoint().routes)
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://edge") as client:
                replies = await asyncio.gather(*(client.post(path, content=b, headers=headers) for b in bodies))
            commit.cancel()
            await asyncio.wait([commit])
            return list(replies)

        return self._runner.run(asyncio.wait_for(run(), TIMEOUT_S))

    def close(self) -> None:
        self._runner.close()
        self.agent.durable.close()

    def values(self) -> list[float]:
        return [row["value"] for row in self.records]

    def reasons(self) -> dict[str, int]:
        counts = Counter[str]()
        for status in AgentHealth(self.agent).source_statuses():
            counts.update(status.rejected)
        return dict(counts)

    def skipped(self) -> dict[str, int]:
        return {reason: count for (_, reason), count in self.agent.skipped.items() if count}


@pytest.fixture
def edge(tmp_path: Path) -> Iterator[Edge]:
    made = Edge(tmp_path)
    yield made
    made.close()


def test_gauges_are_records_and_counters_are_increments(edge: Edge) -> None:
    gauge, counter = named("temperature", job="node"), named("requests_total", job="node")
    assert edge.send((gauge, [(20.5, 0), (-1.0, 1)]), (counter, [(100, 0), (103, 1)])).status_code == 204
    assert edge.send((counter, [(103, 2), (110, 3)])).status_code == 204
    assert edge.values() == [20.5, -1.0, 3.0, 0.0, 7.0]
    assert edge.records[0] | {"event_time_ms": 0} == {
        "stream": "events", "value": 20.5, "metric": "temperature", "job": "node", "event_time_ms": 0
    }  # fmt: skip
    assert [row["event_time_ms"] - edge.start_ms for row in edge.records] == [0, 1000, 1000, 2000, 3000]
    assert edge.skipped() == {"no-increment": 1}


def test_a_counter_that_starts_again_counts_from_zero_and_a_stale_marker_is_skipped(edge: Edge) -> None:
    counter = named("requests_total")
    assert edge.send((counter, [(100, 0), (STALE, 1), (4, 2)]), (named("up"), [(STALE, 0)])).status_code == 204
    assert edge.values() == [4.0]
    assert edge.skipped() == {"stale": 2, "no-increment": 1}


def test_a_total_after_a_stale_marker_of_the_same_request_goes_on_on_a_guess(edge: Edge) -> None:
    counter = named("requests_total")
    assert edge.send((counter, [(100, 0), (STALE, 1), (100, 2), (STALE, 3), (104, 4), (105, 5)])).status_code == 204
    assert edge.values() == [0.0, 4.0, 1.0]
    (status,) = AgentHealth(edge.agent).source_statuses()
    assert status.guessed == {"first-total": 1, "overlapping-total": 2}


def test_old_and_repeated_samples_of_a_counter_add_nothing(edge: Edge) -> None:
    counter = named("requests_total")
    edge.send((counter, [(10, 0), (12, 10)]))
    assert edge.send((counter, [(11, 5), (12, 10), (15, 20)])).status_code == 204
    assert edge.values() == [2.0, 3.0]
    assert edge.skipped() == {"no-increment": 3}


def test_two_totals_at_one_time_are_of_two_senders(edge: Edge) -> None:
    edge.send((named("requests_total"), [(10, 0)]))
    assert edge.send((named("requests_total"), [(12, 1), (500, 1), (13, 2)])).status_code == 400
    assert (edge.values(), edge.reasons()) == ([2.0, 1.0], {"malformed": 1})


def test_a_request_that_comes_again_counts_once_also_after_a_kill(edge: Edge) -> None:
    series = (named("up"), [(1.0, 0)]), (named("requests_total"), [(5, 0), (9, 1)])
    assert edge.send(*series).status_code == 204
    assert edge.send(*series).status_code == 204
    edge.restart()
    assert edge.send(*series).status_code == 204
    assert edge.send((named("requests_total"), [(12, 2)])).status_code == 204
    assert edge.values() == [1.0, 4.0, 3.0]
    assert edge.agent.durable.core.streams["events"].records == 3


def test_requests_at_once_with_one_series_follow_each_other(edge: Edge) -> None:
    edge.send((named("requests_total"), [(0, 0)]))
    bodies = [
        bytes(snappy.compress_raw(request([(named("requests_total"), [(n, n)])], edge.start_ms))) for n in range(1, 30)
    ]
    assert {reply.status_code for reply in edge.posts(bodies)} == {204}
    assert sum(edge.values()) == 29


@pytest.mark.parametrize(
    ("series", "histograms", "reason"),
    [
        (({"job": "no name"}, [(1.0, 0)]), 0, "malformed"),
        ((named("x", huge="y" * (70 << 10)), [(1.0, 0)]), 0, "malformed"),
        ((named("requests_total"), [(math.nan, 0)]), 0, "wrong-type"),
        ((named("requests_total"), [(-1.0, 0)]), 0, "wrong-type"),
        ((named("up"), [(1.0, 10_000_000)]), 0, "time-out-of-range"),
        ((named("up"), [(1.0, -(1 << 40))]), 0, "time-out-of-range"),
        ((named("latency"), []), 1, "unsupported"),
    ],
)
def test_a_partly_bad_request_names_the_rest_and_counts_the_valid_samples(
    edge: Edge, series: Series, histograms: int, reason: str
) -> None:
    edge.send((named("requests_total"), [(1, 0)]))
    good = request([(named("requests_total"), [(3, 1)]), (named("up"), [(7.0, 0)])], edge.start_ms)
    bad = request([series], edge.start_ms, histograms)
    reply = edge.post(bytes(snappy.compress_raw(good + bad)))  # messages that follow each other are one message
    assert (reply.status_code, reason in reply.text) == (400, True)
    assert edge.values() == [2.0, 7.0]
    assert edge.reasons() == {reason: 1}


def test_a_label_that_is_there_twice_or_is_not_utf8_makes_the_series_invalid(edge: Edge) -> None:
    name = pb.Label(name="__name__", value="up").SerializeToString()
    for label in (name, b"\x0a\x01\xff\x12\x01x"):
        series = pb.TimeSeries(labels=[name, label], samples=[pb.Sample(value=1, timestamp=edge.start_ms)])
        message = pb.WriteRequest(timeseries=[series.SerializeToString()])
        assert edge.post(bytes(snappy.compress_raw(message.SerializeToString()))).status_code == 400
    assert edge.reasons() == {"malformed": 2}


def test_streams_of_one_path_divide_the_metrics(tmp_path: Path) -> None:
    edge = Edge(
        tmp_path,
        {
            "requests": {"metrics": ["http_.*"], "columns": {"job": "label.path"}},
            "load": {"metrics": ["load[0-9]+"], "counters": ["load5"]},
        },
    )
    series = [
        (named("http_total", path="/a"), [(1.0, 0), (2.0, 1)]),
        (named("load1", job="n"), [(0.5, 0)]),
        (named("load5"), [(3.0, 0), (4.5, 1)]),
        (named("not_http_total"), [(1.0, 0)]),
    ]
    assert edge.send(*series).status_code == 204  # type: ignore[arg-type]
    rows = {(row["stream"], row["metric"], row["job"], row["value"]) for row in edge.records}
    assert rows == {
        ("requests", "http_total", "/a", 1.0), ("load", "load1", "n", 0.5), ("load", "load5", None, 1.5)
    }  # fmt: skip
    edge.close()


@pytest.mark.parametrize("damaged", [b"\x0a\xff", b"\xff", b"\x0a\x05ab", b"x" * (remote_write.MAX_SERIES_BYTES + 1)])
def test_a_series_that_cannot_be_read_costs_only_itself(edge: Edge, damaged: bytes) -> None:
    message = pb.WriteRequest.FromString(request([(named("a"), [(1.0, 0)]), (named("b"), [(2.0, 0)])], edge.start_ms))
    message.timeseries.insert(1, damaged)
    reply = edge.post(bytes(snappy.compress_raw(message.SerializeToString())))
    assert reply.status_code == 400 and "1 samples are rejected" in reply.text and "2 records count" in reply.text
    assert [row["metric"] for row in edge.records] == ["a", "b"]


def test_series_beyond_the_limit_are_rejected_and_known_ones_go_on(tmp_path: Path) -> None:
    edge = Edge(tmp_path, {"events": {"max_series": 2}})
    edge.send(*((named(f"c{n}_total"), [(1.0, 0)]) for n in range(2)))
    reply = edge.send((named("c0_total"), [(4.0, 1)]), (named("c2_total"), [(9.0, 1)]))
    assert (reply.status_code, "too-many-series" in reply.text) == (400, True)
    assert (edge.values(), edge.reasons()) == ([3.0], {"too-many-series": 1})
    edge.close()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "application/json"}, 415),
        ({"Content-Type": "application/x-protobuf;proto=io.prometheus.write.v2.Request"}, 415),
        ({"X-Prometheus-Remote-Write-Version": "2.0.0"}, 415),
        ({"X-Prometheus-Remote-Write-Version": "7"}, 415),
        ({"Content-Encoding": "gzip"}, 415),
    ],
)
def test_requests_of_another_kind_are_refused(edge: Edge, headers: dict[str, str], status: int) -> None:
    reply = edge.post(bytes(snappy.compress_raw(b"")), {**HEADERS, **headers})
    assert (reply.status_code, reply.headers["content-type"].partition(";")[0]) == (status, "text/plain")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"oops", 400),
        (b"\xff" * 20, 400),
        (bytes(snappy.compress_raw(b"oops")), 400),
        (b"\x80\x80\x80\x80\x08" + b"\xfe\x01\x00" * 100, 413),
        (bytes(snappy.compress_raw(bytes(9 << 20))), 413),
        (bytes(snappy.compress_raw(b"")), 204),
    ],
    ids=["empty", "text", "bytes", "no protobuf", "announces 2 GiB", "nine MiB of zeros", "no series"],
)
def test_bodies_that_cannot_be_decoded_are_refused(edge: Edge, body: bytes, status: int) -> None:
    assert edge.post(body).status_code == status
    assert edge.send((named("up"), [(1.0, 0)])).status_code == 204, "the next request is accepted"


@pytest.mark.parametrize(
    ("count", "cache_bytes"), [(50, 2 << 10), pytest.param(20_000, 1 << 20, marks=pytest.mark.nightly)]
)
def test_many_metrics_and_empty_series_take_bounded_memory(
    edge: Edge, monkeypatch: pytest.MonkeyPatch, count: int, cache_bytes: int
) -> None:
    monkeypatch.setattr(remote_write, "MAX_CACHE_BYTES", cache_bytes)
    sample = pb.Sample(value=1, timestamp=edge.start_ms).SerializeToString()

    def series(name: bytes) -> bytes:
        label = b"\x0a\x08__name__\x12%c%b" % (len(name), name)
        body = b"\x0a%c%b\x12%c%b" % (len(label), label, len(sample), sample)
        return b"\x0a%c%b" % (len(body), body)

    for part in range(5):
        body = b"".join(series(b"metric_%d_%d" % (part, n)) for n in range(count))
        assert edge.post(bytes(snappy.compress_raw(body))).status_code == 204
    assert edge.agent.durable.core.streams["events"].records == 5 * count
    assert edge.post(bytes(snappy.compress_raw(b"\x0a\x00" * 100_000))).status_code == 204


@pytest.mark.parametrize(
    "body",
    [
        b"\x0a\x00" * 1_000_000,
        (b"\x0a\xa0\x8d\x06" + b"\x12\x00" * 50_000) * 12,
        b"\x0a\xc0\x96\xb1\x02" + b"\x12\x00" * 2_500_000,
        (b"\x0a\xa0\x8d\x06" + b"\x22\x00" * 50_000) * 12,
    ],
    ids=["empty series", "empty samples", "one series", "empty histograms"],
)
def test_bodies_of_empty_messages_are_refused_before_they_take_memory(edge: Edge, body: bytes) -> None:
    assert edge.post(bytes(snappy.compress_raw(body))).status_code == 400
    assert edge.agent.durable.core.streams["events"].records == 0


def test_refusals_that_should_come_again_are_503(edge: Edge) -> None:
    edge.agent.outbox.configured.clear()
    reply = edge.send((named("up"), [(1.0, 0)]))
    assert (reply.status_code, "retry-after" in reply.headers) == (503, True)


@pytest.mark.parametrize(
    "options",
    [
        {"metrics": ["("]},
        {"metrics": [r"(a)\1"]},
        {"counters": ["x" * 5000]},
        {"columns": {"job": "job"}},
        {"columns": {"nothing": "label.x"}},
        {"columns": {"job": "value"}},
        {"columns": {"value": "label.value"}},
        {"path": "write"},
        {"path": "/a b"},
        {"max_series": 0},
    ],
)
def test_options_that_cannot_be_right_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig) as refused:
        Edge(tmp_path, {"events": options})
    assert refused.value.field.startswith("streams.events.sources.")


def receiver(columns: dict[str, str], **options: Any) -> remote_write.RemoteWriteReceiver:
    source = {"remote_write": {"columns": {"v": "value"}, "counters": [], **options}}
    stream = {"columns": columns, "time": {"column": "at"}, "sources": [source]}
    config = parse_config({"edge": "e", "state_dir": "state", "streams": {"s": stream}})
    package = config.streams["s"].sources[0].package
    assert package is not None
    context = SourceContext("s", config.streams["s"].record_schema, now_ms)
    (made,) = remote_write.KIND.receivers([(package.options, context)])
    return made


def decoded(made: remote_write.RemoteWriteReceiver, *series: Series) -> pa.RecordBatch:
    body = Body(request(series, now_ms()), now_ms(), 1 << 20, lambda: None)
    (part,) = made.decode(Request("", {}), body)
    return part.decoded.batch


def test_columns_that_are_numbers_are_read_from_labels() -> None:
    made = receiver({"v": "float64", "le": "float64", "code": "int64"})
    series = (named("b", le="+Inf", code="200"), [(1.0, 0)]), (named("b", le="0.5", code="x"), [(2.0, 0)])
    batch = decoded(made, *series)
    assert batch.column("le").to_pylist() == [math.inf, 0.5]
    assert batch.column("code").to_pylist() == [200, None]


def test_requests_at_once_get_their_own_labels_while_the_cache_is_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_write, "MAX_CACHE_BYTES", 2000)
    made = receiver({"v": "float64", "n": "float64"})

    def one(number: int) -> bool:
        series: list[Series] = [(named("x", n=str(n)), [(float(n), 0)]) for n in range(number, number + 30)]
        batch = decoded(made, *series)
        return bool(batch.column("v").to_pylist() == batch.column("n").to_pylist())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(one, [n * 7 % 300 for n in range(200)]))


# --- a real Prometheus and a real agent ------------------------------------------------------------------------------


class Exporter:
    """Counters that a Prometheus scrapes. A scrape gets the counters of all series at one moment."""

    def __init__(self) -> None:
        self.counts = [0] * 20
        self.scraped = [0] * 20
        self.scrapes = 0
        self._lock = threading.Lock()
        exporter = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                with exporter._lock:
                    exporter.scraped, exporter.scrapes = list(exporter.counts), exporter.scrapes + 1
                lines = ["# TYPE hits_total counter"]
                lines += [f'hits_total{{path="/{n}"}} {count}' for n, count in enumerate(exporter.scraped)]
                body = ("\n".join(lines) + "\n").encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def hit(self, times: int) -> None:
        with self._lock:
            for n in range(times):
                self.counts[n % len(self.counts)] += n % 7

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


SUM = query_spec(name="n", stream="events", measures={"n": "sum(value)"}, window={"tumbling": "1h"}, lateness="1h")


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.full)])
def test_increments_of_a_real_prometheus_count_once_through_refusals_and_kills(
    tmp_path: Path, prometheus: str, kills: int
) -> None:
    exporter, port = Exporter(), free_port()
    sources = [{"remote_write": {"metrics": ["hits_total"], "columns": {"path": "label.path"}}}]
    options: dict[str, Any] = {"columns": {"value": "float64", "path": "string"}, "port": port}
    for name in ("refusing", "counting"):
        (tmp_path / name).mkdir()
    refusing = AgentProcess(tmp_path / "refusing", sources, query=None, **options)
    agent, helpers = refusing, ExitStack()
    try:
        refusing.start()
        helpers.enter_context(running_prometheus(prometheus, tmp_path, exporter.port, port))
        refusing.until(lambda: refused(refusing) >= 3)
        refusing.close()
        agent = AgentProcess(tmp_path / "counting", sources, query=SUM, **options)
        agent.start()
        agent.until(lambda: first_values(agent) >= len(exporter.counts))
        for _ in range(kills):
            exporter.hit(1000)
            before = agent.records()
            agent.until(lambda before=before: agent.records() > before)  # type: ignore[misc]
            exporter.hit(1000)
            agent.kill()
            scrapes = exporter.scrapes
            while exporter.scrapes < scrapes + 2:  # samples wait in Prometheus meanwhile
                time.sleep(0.01)
            agent.start()
        exporter.hit(1000)
        last = exporter.scrapes + 2
        agent.until(lambda: exporter.scrapes >= last)
        agent.until(lambda: agent.records() >= (last - 1) * len(exporter.counts))
        rejected = [name for name in agent.metrics() or {} if "rejected_records_total{" in name]
        agent.kill()
        assert (*agent.recovered(), rejected) == (float(sum(exporter.counts)), [], [])
    finally:
        helpers.close()
        agent.close()
        exporter.close()


def refused(agent: AgentProcess) -> float:
    return (agent.metrics() or {}).get('edgewater_edge_refused_total{reason="unavailable"}', 0)


def first_values(agent: AgentProcess) -> float:
    name = 'edgewater_edge_skipped_values_total{reason="no-increment",stream="events"}'
    return (agent.metrics() or {}).get(name, 0)


@contextmanager
def running_prometheus(program: str, directory: Path, target: int, agent: int) -> Iterator[None]:
    config = {
        "global": {"scrape_interval": "200ms", "scrape_timeout": "200ms"},
        "scrape_configs": [{"job_name": "test", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}],
        "remote_write": [
            {
                "url": f"http://127.0.0.1:{agent}{PATH}",
                "queue_config": {"batch_send_deadline": "100ms", "min_backoff": "30ms", "max_backoff": "200ms"},
            }
        ],
    }
    path = directory / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    command = [
        program, f"--config.file={path}", f"--storage.tsdb.path={directory / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{free_port()}",
    ]  # fmt: skip
    with (directory / "prometheus.log").open("wb") as log, running(command, stdout=log, stderr=log):
        yield
