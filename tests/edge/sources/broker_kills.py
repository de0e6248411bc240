"""Kills of a real agent and a real broker (kill -9), and what they do to the number of records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from edge.core.events import SourceEnded
from edgewater.model.query import QuerySpec
from edgewater.synopses import GroupedAggregate
from tests.brokers import KafkaBroker, MqttBroker
from tests.edge.agent_process import COUNT, AgentProcess, lines, pull
from tests.edge.sources.object_store import ObjectStore

BY_RECORD = QuerySpec.from_mapping({**COUNT.to_mapping(), "group_by": ["x"]})


@dataclass(frozen=True, slots=True)
class KillCounts:
    """What became of the records.

    Attributes:
        kills: of the agent, or of the broker.
        counted: different records that were counted.
        twice: records that were counted more than once.
        losses: losses that the agent has stated.
    """

    source: str
    killed: str
    kills: int
    sent: int
    counted: int
    twice: int
    losses: int


def kafka_kills(directory: Path, killed: str, kills: int, records: int) -> KillCounts:
    """Kills the agent or the broker while a topic of two partitions is read, whose data survive the broker.

    Args:
        killed: ``agent`` or ``broker``.
        records: sent before each kill.
    """

    def send(data: Sequence[bytes]) -> None:
        for partition in range(2):
            broker.send("t", partition, data[partition::2])

    with ObjectStore() as store, KafkaBroker(directory, store=store.environ) as broker:
        broker.create("t", partitions=2)
        entry = {"kafka": {"brokers": [broker.address], "topic": "t"}}
        return _run(directory, "kafka", entry, broker, send, killed, kills, records)


def mqtt_kills(directory: Path, killed: str, kills: int, records: int) -> KillCounts:
    """Kills the agent or the broker, which writes each change to its file, while a topic is read."""
    with MqttBroker(directory) as broker:
        entry = {"mqtt": {"broker": broker.address, "topics": ["t"], "client_id": "edge-1"}}
        send, started = partial(broker.send, "t"), partial(broker.wait_for_session, "edge-1")
        return _run(directory, "mqtt", entry, broker, send, killed, kills, records, started)


def _run(
    directory: Path,
    name: str,
    entry: dict[str, Any],
    broker: Any,
    send: Callable[[Sequence[bytes]], object],
    killed: str,
    kills: int,
    records: int,
    started: Callable[[], object] = lambda: None,
) -> KillCounts:
    agent, sent = AgentProcess(directory, [entry], query=BY_RECORD), 0
    try:
        agent.start()
        started()
        for kill in range(kills + 1):
            send(lines(sent, records).encode().splitlines())
            sent += records
            if kill == kills:
                break
            seen = sent - records + records * (kill % 5) // 5
            agent.until(lambda seen=seen: agent.records() > seen)  # type: ignore[misc]
            victim = agent if killed == "agent" else broker
            victim.kill()
            victim.start()
        agent.settle(sent)
    finally:
        agent.close()
    counted, different, losses = _counted(agent)
    return KillCounts(name, killed, kills, sent, different, counted - different, losses)


def _counted(agent: AgentProcess) -> tuple[int, int, int]:
    """Returns the counted records, the different records among them, and the number of stated losses."""
    with agent.state() as opened:
        for source in opened.sources:
            opened.durable.handle(SourceEnded(source.stream, source.name))
        bodies = pull(opened)
    partials = [GroupedAggregate.from_bytes(p.synopsis) for body in bodies for p in body.partials]
    values = [value for partial in partials for value in partial.query("n").value.tolist()]
    return int(sum(values)), len(values), len({loss for body in bodies for loss in body.losses})
