"""A query with `since` reads the records of a topic again that were delivered before the query was registered."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge.records import Chunk, Position
from edge.sources.kafka_client import KafkaConfig, KafkaConsumer
from edgewater.base.streams import MIN_TIME_MS
from tests.brokers import KafkaBroker
from tests.edge.sources.test_kafka import AT_MS, numbers, partition, record


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[KafkaBroker]:
    with KafkaBroker(tmp_path) as made:
        yield made


def backfilled(
    broker: KafkaBroker, position: Position | None, until: int, since_ms: int, **options: str
) -> list[Chunk]:
    async def collect() -> list[Chunk]:
        async with asyncio.timeout(60):
            source = partition(broker, "since", **options)
            return [chunk async for chunk in source.backfill(position, {"offset": until}, since_ms)]

    return asyncio.run(collect())


def test_a_backfill_ends_at_its_position_and_goes_on_at_any_other(broker: KafkaBroker) -> None:
    broker.create("since")
    broker.send("since", 0, [record(n) for n in range(10)])
    chunks = backfilled(broker, None, 7, MIN_TIME_MS)
    assert (numbers(chunks), chunks[-1].end, chunks[-1].keep) == (list(range(7)), {"offset": 7}, True)
    assert numbers(backfilled(broker, {"offset": 4}, 7, MIN_TIME_MS)) == [4, 5, 6]
    assert backfilled(broker, {"offset": 7}, 7, MIN_TIME_MS) == []
    assert numbers(backfilled(broker, None, 100, MIN_TIME_MS)) == list(range(10))


def test_the_broker_is_asked_for_the_first_offset_by_time_where_timestamps_bound_event_times(
    broker: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No broker here finds offsets by time: tansu answers with the oldest offset. So its answer is replaced."""
    asked: list[int] = []

    def offset_at(_: KafkaConsumer, partition: int, time_ms: int) -> int:
        asked.append(time_ms)
        return 3

    broker.create("since")
    for n in range(5):
        broker.send("since", 0, [record(n)], timestamp=AT_MS + n)
    config = KafkaConfig.model_validate({"brokers": [broker.address], "topic": "since"})
    with contextlib.closing(KafkaConsumer(config)) as consumer:
        assert consumer.offset_at(0, AT_MS + 3) <= 3, "an earlier offset is right too"
    monkeypatch.setattr(KafkaConsumer, "offset_at", offset_at)
    assert numbers(backfilled(broker, None, 5, AT_MS + 3, timestamp="at")) == [3, 4]
    assert asked == [AT_MS + 3]
    # The event time is in the body, and may be any time after the timestamp: `max_skew` has no limit in this schema.
    assert numbers(backfilled(broker, None, 5, AT_MS + 3)) == [0, 1, 2, 3, 4]
    assert asked == [AT_MS + 3]
