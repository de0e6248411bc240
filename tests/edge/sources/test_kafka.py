"""The Kafka source against a real broker."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from pydantic import ValidationError

from edge.codecs.schema import EventTime, RecordSchema
from edge.records import Chunk, Position
from edge.source_kinds import SourceCheck, SourceContext, SourceFailed
from edge.sources import kafka, kafka_client
from edge.sources.kafka import KIND, KafkaPartition
from edge.sources.kafka_client import KafkaConfig
from edge.utilization import ActivityMarker, no_marker
from edgewater.base.errors import InvalidConfig
from tests.brokers import KafkaBroker

AT_MS = 1_700_000_000_000
SCHEMA = RecordSchema({"n": pa.int64(), "k": pa.string(), "h": pa.string()}, EventTime("at", max_skew_ms=None))


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    with KafkaBroker(tmp_path_factory.mktemp("broker")) as made:
        made.create("present")
        yield made


def partition(broker: KafkaBroker, topic: str, *, idle: ActivityMarker = no_marker, **options: Any) -> KafkaPartition:
    config = KafkaConfig.model_validate({"brokers": [broker.address], "topic": topic, **options})
    (source,) = KIND.sources(config, SourceContext("s", SCHEMA, lambda: AT_MS, idle=idle))
    assert isinstance(source, KafkaPartition)
    return source


def check(broker: KafkaBroker, topic: str, records: int = 100, **options: Any) -> SourceCheck:
    config = KafkaConfig.model_validate({"brokers": [broker.address], "topic": topic, **options})
    return KIND.check(config, SourceContext("s", SCHEMA, lambda: AT_MS), records)


def read(
    source: KafkaPartition, enough: Callable[[list[Chunk]], bool], position: Position | None = None
) -> list[Chunk]:
    async def collect() -> list[Chunk]:
        chunks: list[Chunk] = []
        stream = source.chunks(position)
        async with asyncio.timeout(60):
            async for chunk in stream:
                chunks.append(chunk)
                if enough(chunks):
                    break
        await stream.aclose()  # type: ignore[attr-defined]
        return chunks

    return asyncio.run(collect())


def numbers(chunks: list[Chunk]) -> list[int]:
    return [n for chunk in chunks for n in chunk.batch.column("n").to_pylist()]


def record(n: int, **more: Any) -> bytes:
    return json.dumps({"n": n, "at": AT_MS + n, **more}).encode()


def test_messages_are_records_in_order_and_reading_goes_on_at_any_offset(broker: KafkaBroker) -> None:
    broker.create("plain")
    last = b'{"n":\n5,"at":%d}\0' % AT_MS
    broker.send("plain", 0, [*(record(n) for n in range(5)), b"oops", None, b"", last])
    chunks = read(partition(broker, "plain"), lambda c: bool(c) and c[-1].end == {"offset": 9})
    assert numbers(chunks) == list(range(6))
    assert [(r.reason, r.count) for chunk in chunks for r in chunk.rejected] == [("malformed", 1)]
    assert chunks[-1].end == {"offset": 9} and all(chunk.keep for chunk in chunks)
    for offset in range(5):
        rest = read(partition(broker, "plain"), lambda c, n=6 - offset: len(numbers(c)) >= n, {"offset": offset})
        assert numbers(rest) == list(range(offset, 6))


def test_the_lag_is_what_the_broker_has_and_the_agent_has_not_taken(broker: KafkaBroker) -> None:
    broker.create("lag")
    for n in range(3):
        broker.send("lag", 0, [record(n)], timestamp=AT_MS - 5000)
    source = partition(broker, "lag")
    assert (source.lag().messages, source.lag().seconds) == (None, None), "unknown before the first fetch"
    seen = []

    async def story() -> None:
        stream = source.chunks({"offset": 1})
        async with asyncio.timeout(60):
            async for chunk in stream:
                if chunk.batch.num_rows:
                    assert chunk.end is not None
                    assert source.lag().messages == 3 - chunk.end["offset"]
                    break
            reading = asyncio.ensure_future(anext(stream))
            while source.lag().messages != 0:
                await asyncio.sleep(0.01)
            seen.append(source.lag())
            reading.cancel()
        await asyncio.wait([reading])

    asyncio.run(story())
    assert [lag.seconds for lag in seen] == [0.0]
    assert source.lag().messages is None, "unknown while it is not read"


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_compressed_batches_are_read(broker: KafkaBroker, codec: str) -> None:
    broker.create(codec)
    broker.send(codec, 0, [record(n) for n in range(2000)], properties={"compression.type": codec})
    assert numbers(read(partition(broker, codec), lambda c: len(numbers(c)) == 2000)) == list(range(2000))


def test_key_timestamp_and_headers_are_columns_of_the_right_records(broker: KafkaBroker) -> None:
    broker.create("columns")
    for n in range(6):
        value = b"oops" if n in (1, 4) else json.dumps({"n": n}).encode()
        more = {"headers": {"h": f"h{n}"}} if n % 2 else {}
        broker.send("columns", 0, [value], key=f"k{n}", timestamp=AT_MS + n, **more)
    source = partition(broker, "columns", key="k", timestamp="at", headers={"h": "h"})
    chunks = read(source, lambda c: len(numbers(c)) == 4)
    rows = [row for chunk in chunks for row in chunk.batch.to_pylist()]
    assert rows == [
        {"n": n, "k": f"k{n}", "h": f"h{n}" if n % 2 else None, "event_time_ms": AT_MS + n} for n in (0, 2, 3, 5)
    ]


def test_a_blank_message_is_rejected_and_counted(broker: KafkaBroker) -> None:
    broker.create("blank")
    broker.send("blank", 0, [record(1), b"  ", record(2)])
    chunks = read(partition(broker, "blank"), lambda c: len(numbers(c)) == 2)
    (rejected,) = [r for chunk in chunks for r in chunk.rejected]
    assert (rejected.reason, rejected.count) == ("malformed", 1) and "offset 1" in rejected.message


POISON = (
    b"\0", b"\xff\xfe", b"[" * 100_000, b'{"n": {"x": 1}, "at": 1}', b'{"n": 1e400, "at": 1}', b'{"at": 1e400}', b"[]",
    b'{"n": 1}{"n": 2}', b'{"at": 1700000000000, "n": "x"}', b"x" * (9 << 20),
)  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("more", [{}, {"key": "k"}], ids=["body", "with-key"])
def test_a_poison_message_costs_only_itself_and_its_offset_is_named(
    broker: KafkaBroker, more: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    topic = f"poison{len(more)}"
    broker.create(topic, partitions=2)
    for poison in POISON:
        broker.send(topic, 1, [record(1), poison, record(2)])
    source = partition(broker, topic, **more)
    read(source, lambda c: bool(c[-1].opens))
    (second,) = source.opened_before([source.name[:-1] + "1"])
    assert isinstance(second, KafkaPartition)
    chunks = read(second, lambda c: len(numbers(c)) == 2 * len(POISON))
    assert numbers(chunks) == [1, 2] * len(POISON)
    assert sum(r.count for chunk in chunks for r in chunk.rejected) == len(POISON)
    first = next(chunk.rejected[0] for chunk in chunks if chunk.rejected)
    assert first.message.startswith(f"topic {topic}, partition 1, offset 1: ")
    lines = [m for m in caplog.messages if "offset 1" in m]
    assert len(lines) == 1 and topic in lines[0]


def test_a_key_that_does_not_fit_its_column_is_null(broker: KafkaBroker) -> None:
    broker.create("typed")
    for key in ("7", "x"):
        broker.send("typed", 0, [b'{"at": %d}' % AT_MS], key=key)
    chunks = read(partition(broker, "typed", key="n"), lambda c: len(numbers(c)) == 2)
    assert numbers(chunks) == [7, None]


def test_large_messages_are_read(broker: KafkaBroker) -> None:
    broker.create("large")
    broker.send("large", 0, [record(1, pad="x" * (10 << 20)), record(2)])
    assert numbers(read(partition(broker, "large"), lambda c: len(numbers(c)) == 2)) == [1, 2]


def test_the_first_partition_opens_the_others(broker: KafkaBroker) -> None:
    broker.create("three", partitions=3)
    chunks = read(partition(broker, "three"), lambda c: bool(c[-1].opens))
    assert [source.name for source in chunks[-1].opens] == ["s:kafka:three:1", "s:kafka:three:2"]


def test_records_of_an_open_transaction_are_read_once_it_is_committed(broker: KafkaBroker) -> None:
    """Aborted transactions cannot be tested here: tansu does not tell clients which transactions were aborted."""
    broker.create("transactions")
    producer = broker.producer(**{"transactional.id": "one"})
    producer.init_transactions(60)
    offsets = []
    for n in range(3):
        producer.begin_transaction()
        producer.produce("transactions", record(n), partition=0)
        producer.flush(60)
        seen = read(partition(broker, "transactions"), lambda c: len(numbers(c)) == n or bool(c[-1].opens))  # noqa: B023
        assert n not in numbers(seen), "the transaction is open"
        producer.commit_transaction(60)
        chunks = read(partition(broker, "transactions"), lambda c: len(numbers(c)) == n + 1)  # noqa: B023
        assert numbers(chunks) == list(range(n + 1))
        offsets.append(chunks[-1].end)
    assert numbers(read(partition(broker, "transactions"), lambda c: bool(numbers(c)), offsets[1])) == [2]


def test_a_quiet_partition_is_marked_as_idle_again_and_again(
    broker: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge.source_kinds.LOOK_S", 0.02)
    broker.create("quiet")
    broker.send("quiet", 0, [record(0)])
    marks = 0

    @contextlib.contextmanager
    def idle(_: str) -> Iterator[None]:
        nonlocal marks
        marks += 1
        if marks == 5:
            broker.send("quiet", 0, [record(1)])
        yield

    assert numbers(read(partition(broker, "quiet", idle=idle), lambda c: len(numbers(c)) == 2)) == [0, 1]
    assert marks >= 5


def test_a_partition_is_not_idle_while_its_broker_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge.source_kinds.LOOK_S", 0.02)
    mortal = KafkaBroker(tmp_path)
    marks: list[bool] = []

    @contextlib.contextmanager
    def idle(_: str) -> Iterator[None]:
        if len(marks) == 5:
            mortal.kill()
        marks.append(True)
        yield

    with mortal, pytest.raises(SourceFailed) as failed:
        mortal.create("t")
        read(partition(mortal, "t", idle=idle), lambda c: False)
    assert failed.value.fault.field == "brokers" and "refused" in failed.value.fault.reason
    # About the time that the client needs to see the end of its connection, and far less than the idle rule waits.
    assert len(marks) < 200


def test_a_topic_with_more_partitions_than_the_limit_is_refused(
    broker: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge.sources.kafka_client.MAX_PARTITIONS", 3)
    broker.create("many", partitions=4)
    with pytest.raises(SourceFailed) as failed:
        read(partition(broker, "many"), lambda c: False)
    assert (failed.value.fault.field, failed.value.fault.value) == ("topic", "many")
    assert "4 partitions" in failed.value.fault.reason
    with pytest.raises(InvalidConfig):
        check(broker, "many")


def test_a_partition_that_the_topic_no_longer_has_fails_alone(
    broker: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka, "PARTITIONS_EVERY_S", 0.2)
    broker.create("fewer")
    broker.send("fewer", 0, [record(n) for n in range(2)])
    source = partition(broker, "fewer")
    (gone,) = source.opened_before([source.name[:-1] + "7"])

    async def both() -> list[Chunk]:
        first, second = source.chunks(None), gone.chunks({"offset": 3})
        async with asyncio.timeout(60):
            failing = asyncio.ensure_future(anext(second))  # type: ignore[arg-type]
            chunks = [chunk async for chunk in _until(first, lambda c: len(numbers(c)) == 2)]
            with pytest.raises(SourceFailed) as failed:
                await failing
        assert "partition 7" in failed.value.fault.reason
        return chunks

    assert numbers(asyncio.run(both())) == [0, 1]


async def _until(chunks: AsyncIterator[Chunk], enough: Callable[[list[Chunk]], bool]) -> AsyncIterator[Chunk]:
    seen: list[Chunk] = []
    async for chunk in chunks:
        seen.append(chunk)
        yield chunk
        if enough(seen):
            break
    await chunks.aclose()  # type: ignore[attr-defined]


def test_a_topic_that_was_deleted_is_named(broker: KafkaBroker) -> None:
    broker.create("deleted")
    broker.send("deleted", 0, [record(0)])
    first = read(partition(broker, "deleted"), lambda c: bool(numbers(c)))
    broker.delete("deleted")
    with pytest.raises(SourceFailed) as failed:
        read(partition(broker, "deleted"), lambda c: True, first[-1].end)
    assert (failed.value.fault.field, failed.value.fault.value) == ("topic", "deleted")


def test_the_check_reads_the_newest_records_of_each_partition_and_moves_nothing(broker: KafkaBroker) -> None:
    broker.create("checked", partitions=2)
    for number in range(2):
        broker.send("checked", number, [record(100 * number + n) for n in range(50)])
    found = check(broker, "checked", records=20)
    assert found.facts[0] == "topic checked has 2 partition(s)" and "partition 1: oldest offset 0" in found.facts[2]
    assert sum(sample.batch.num_rows for sample in found.samples) >= 20 and found.nbytes > 0
    assert numbers(read(partition(broker, "checked"), lambda c: len(numbers(c)) == 50))[0] == 0


@pytest.fixture(scope="module")
def mock() -> Iterator[KafkaBroker]:
    """librdkafka's own broker. Unlike tansu it refuses offsets out of range, and knows the newest one."""
    made = KafkaBroker.__new__(KafkaBroker)
    cluster = Producer({"bootstrap.servers": "127.0.0.1:1", "test.mock.num.brokers": 1})
    (found,) = cluster.list_topics(timeout=60).brokers.values()
    made.port = found.port
    yield made
    cluster.flush()


def test_only_records_from_now_on_are_read_if_asked_for_and_the_place_is_known_before_the_first(
    mock: KafkaBroker,
) -> None:
    mock.send("latest", 0, [record(n) for n in range(3)])
    first = read(partition(mock, "latest", start="latest"), lambda c: bool(c))
    assert (numbers(first), first[0].end, first[0].keep) == ([], {"offset": 3}, True)
    mock.send("latest", 0, [record(3)])
    assert numbers(read(partition(mock, "latest"), lambda c: bool(numbers(c)), first[0].end)) == [3]


def test_a_request_that_times_out_while_messages_are_there_takes_none_of_them(
    broker: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failed request serves the client's callbacks by a call that may return a message."""
    broker.create("slow")
    broker.send("slow", 0, [record(n) for n in range(3)])
    monkeypatch.setattr(kafka_client, "FIRST_SLICE_S", 1e-9)
    with contextlib.closing(kafka.KafkaConsumer(KafkaConfig(brokers=[broker.address], topic="slow"))) as consumer:
        consumer.assign(0, 0)
        first = consumer.consume(1, 60.0)
        assert first[0].offset() == 0, "the client has fetched the other two"
        consumer.partitions()
        offsets = [consumer.consume(1, 60.0)[0].offset() for _ in range(2)]
        assert offsets == [1, 2]
        consumer.assign(0, 0)
        assert consumer.consume(1, 60.0)[0].offset() == 0
        consumer.partitions()
        consumer.assign(0, 2)
        assert consumer.consume(1, 60.0)[0].offset() == 2, "a message of the assignment before is not returned"


def test_offsets_that_are_gone_are_a_stated_loss_and_reading_goes_on(mock: KafkaBroker) -> None:
    mock.send("gone", 0, [record(n) for n in range(2)])
    chunks = read(partition(mock, "gone"), lambda c: bool(numbers(c)), {"offset": 5})
    losses = [(chunk.losses, chunk.end) for chunk in chunks if chunk.losses]
    assert losses == [(("input-gone",), {"offset": 0, "again": 5})]
    assert numbers(chunks) == [0, 1]
    assert [(g.reason, g.count) for chunk in chunks for g in chunk.guessed] == [("read-again", 2)]
    mock.send("gone", 0, [record(n) for n in range(2, 8)])
    more = read(partition(mock, "gone"), lambda c: len(numbers(c)) == 6, chunks[-1].end)
    assert numbers(more) == list(range(2, 8))
    assert sum(g.count for chunk in more for g in chunk.guessed) >= 3, "the records before offset 5"
    mock.send("gone", 0, [record(8)])
    last = read(partition(mock, "gone"), lambda c: bool(numbers(c)), more[-1].end)
    assert (numbers(last), [g for chunk in last for g in chunk.guessed]) == ([8], [])


FAULTS = [
    ({"topic": "no-such-topic"}, "topic", "no-such-topic", "Unknown topic or partition"),
    ({"brokers": ["127.0.0.1:1"]}, "brokers", "127.0.0.1:1", "Connection refused"),
    ({"brokers": ["no-such-host.invalid:9092"]}, "brokers", "no-such-host.invalid:9092", "resolve"),
]


@pytest.mark.parametrize(("options", "field", "value", "reason"), FAULTS, ids=lambda each: str(each)[:30])
def test_what_cannot_be_read_is_a_failure_with_field_value_and_reason(
    broker: KafkaBroker, options: dict[str, Any], field: str, value: object, reason: str
) -> None:
    with pytest.raises(SourceFailed) as failed:
        read(partition(broker, **{"topic": "present", **options}), lambda c: True)
    assert (failed.value.fault.field, failed.value.fault.value) == (field, value)
    assert reason in failed.value.fault.reason and str(value) in str(failed.value)
    with pytest.raises(InvalidConfig) as refused:
        check(broker, **{"topic": "present", **options})
    assert (refused.value.field, refused.value.value) == (field, value)
    assert reason in refused.value.reason


@pytest.mark.parametrize(
    "options",
    [
        {"topic": "a b"},
        {"username": "u"},
        {"format": "csv"},
        {"properties": {"group.id": "x"}},
        {"format": "regex"},
        {"brokers": []},
        {"unknown": 1},
    ],
)
def test_options_that_cannot_be_right_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        KafkaConfig.model_validate({"brokers": ["127.0.0.1:1"], "topic": "t", **options})
