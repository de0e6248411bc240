"""A query with `since` reads the records of a topic again that were delivered before the query was registered."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge.records import Chunk, Position
from edge.sources.kafka_client import KafkaConfig, KafkaConsumer
from edgewater.model.streams import MIN_TIME_MS
from tests.edge.agent_process import AgentProcess, counted, lines
from tests.edge.sources.kafka_broker import Broker
from tests.edge.sources.test_kafka import AT_MS, numbers, partition, record
from tests.edge.test_agent_backfill import answers, register, stop, unread


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path) as made:
        yield made


@pytest.mark.slow
def test_the_records_of_all_partitions_count_once_in_a_later_query_through_a_kill(
    broker: Broker, tmp_path: Path
) -> None:
    broker.create("t", 3)
    agent = AgentProcess(tmp_path, [{"kafka": {"brokers": [broker.address], "topic": "t"}}], checkpoint="100ms")
    try:
        for number in range(3):
            broker.send("t", number, lines(8_000 * number, 8_000).encode().splitlines())
        agent.start()
        agent.until(lambda: agent.records() == 24_000)
        agent.kill()
        register(agent)
        agent.start()
        agent.until(lambda: unread(agent) < 24_000)
        agent.kill()
        broker.send("t", 1, lines(24_000, 10).encode().splitlines())
        agent.start()
        agent.until(lambda: agent.records() == 24_010 and unread(agent) == 0)
        stop(agent)
        found = answers(agent)
        assert counted(found["n"]) == counted(found["again"]) == 24_010
        assert not any(body.losses for body in found["again"])
    finally:
        agent.close()


@pytest.mark.nightly  # test_kafka.py has offsets that are gone, test_backfill_recovery.py the statement to the query
@pytest.mark.slow
def test_records_that_the_broker_no_longer_has_are_stated_to_the_query(broker: Broker, tmp_path: Path) -> None:
    broker.create("t", 1)
    agent = AgentProcess(tmp_path, [{"kafka": {"brokers": [broker.address], "topic": "t"}}], checkpoint="100ms")
    try:
        broker.send("t", 0, lines(0, 500).encode().splitlines())
        agent.start()
        agent.until(lambda: agent.records() == 500)
        stop(agent)
        register(agent)
        broker.kill()
        broker.start()
        broker.create("t", 1)  # anew, without records
        agent.start()
        agent.until(lambda: unread(agent) == 0)
        stop(agent)
        found = answers(agent)
        assert counted(found["n"]) == 500 and counted(found.get("again", [])) == 0
        assert sum(loss.records or 0 for body in found["again"] for loss in body.losses) == 500
    finally:
        agent.close()


def backfilled(broker: Broker, position: Position | None, until: int, since_ms: int, **options: str) -> list[Chunk]:
    async def collect() -> list[Chunk]:
        async with asyncio.timeout(60):
            source = partition(broker, "since", **options)
            return [chunk async for chunk in source.backfill(position, {"offset": until}, since_ms)]

    return asyncio.run(collect())


def test_a_backfill_ends_at_its_position_and_goes_on_at_any_other(broker: Broker) -> None:
    broker.create("since", 1)
    broker.send("since", 0, [record(n) for n in range(10)])
    chunks = backfilled(broker, None, 7, MIN_TIME_MS)
    assert (numbers(chunks), chunks[-1].end, chunks[-1].keep) == (list(range(7)), {"offset": 7}, True)
    assert numbers(backfilled(broker, {"offset": 4}, 7, MIN_TIME_MS)) == [4, 5, 6]
    assert backfilled(broker, {"offset": 7}, 7, MIN_TIME_MS) == []
    assert numbers(backfilled(broker, None, 100, MIN_TIME_MS)) == list(range(10))


def test_the_broker_is_asked_for_the_first_offset_by_time_where_timestamps_bound_event_times(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No broker here finds offsets by time: tansu answers with the oldest offset. So its answer is replaced."""
    asked: list[int] = []

    def offset_at(_: KafkaConsumer, partition: int, time_ms: int) -> int:
        asked.append(time_ms)
        return 3

    broker.create("since", 1)
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
