"""Kafka and MQTT through kills of the agent and of the broker: what is lost and what counts twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.edge.sources.broker_kills import kafka_kills, mqtt_kills

# test_conformance.py kills agents over both brokers
pytestmark = [pytest.mark.slow, pytest.mark.nightly]
MANY = pytest.param(20, marks=pytest.mark.full)


@pytest.mark.parametrize("kills", [1, MANY])
@pytest.mark.parametrize("killed", ["agent", "broker"])
def test_each_kafka_record_counts_once(tmp_path: Path, killed: str, kills: int) -> None:
    found = kafka_kills(tmp_path, killed, kills, 2_000)
    assert (found.counted, found.twice, found.losses) == (found.sent, 0, 0)


@pytest.mark.parametrize("kills", [1, MANY])
def test_each_mqtt_message_counts_once_through_kills_of_the_agent(tmp_path: Path, kills: int) -> None:
    found = mqtt_kills(tmp_path, "agent", kills, 100)
    assert (found.counted, found.twice, found.losses) == (found.sent, 0, 0)


@pytest.mark.parametrize("kills", [1, MANY])
def test_an_mqtt_broker_that_is_killed_loses_little(tmp_path: Path, kills: int) -> None:
    found = mqtt_kills(tmp_path, "broker", kills, 100)
    assert found.counted >= 0.95 * found.sent
