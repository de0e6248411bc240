"""What the catalog knows of edges that a gateway hears from: changes at once, heartbeats some at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from center.catalog import Catalog, SessionStart
from center.ingest.metrics import GatewayMetrics
from center.ingest.status_writer import StatusWriter
from edgewater.base.errors import StorageError
from edgewater.base.streams import EdgeId
from edgewater.model.edge_records import EdgeRecord, HeartbeatRecord
from tests.center.catalog_world import FLIGHTS, JFK, LGA, spec


class Heard:
    """A gateway's status writer over a real catalog, and its clock."""

    def __init__(self, catalog: Catalog, now_ms: int = 0) -> None:
        self.catalog, self.now_ms = catalog, now_ms
        self.writer = StatusWriter(catalog, GatewayMetrics(), 1.0, lambda: self.now_ms)

    def begin(self, edges: Sequence[EdgeId]) -> None:
        starts = [
            SessionStart(e, "i", {}, (FLIGHTS,), 0, 0, self.now_ms, self.writer.gateway, gateway=self.writer.gateway)
            for e in edges
        ]
        assert set(self.catalog.edges.begin_sessions(starts)) == {None}
        for edge in edges:
            self.writer.session_began(edge, self.now_ms)

    def beat(self, edge: EdgeId, every_ms: int = 0) -> None:
        beat = HeartbeatRecord(edge, {"flights": self.now_ms}, {}, {}, 0, 0.0, 0.0, 0.0, self.now_ms)
        self.writer.heartbeat(beat, every_ms)

    def at(self, now_ms: int, *edges: EdgeId, every_ms: int = 0) -> None:
        """The writer's next turn, before which the edges send heartbeats."""
        self.now_ms = now_ms
        for edge in edges:
            self.beat(edge, every_ms)
        asyncio.run(self.writer.flush())

    def edge(self, edge: EdgeId = JFK) -> EdgeRecord:
        return self.catalog.edges.get(edge)


@pytest.fixture
def gateway(catalog: Catalog) -> Heard:
    catalog.queries.register(spec(), 1)
    return Heard(catalog)


def test_of_many_heartbeats_the_oldest_are_written_first_and_every_edge_is_reachable(
    gateway: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 3
    monkeypatch.setattr("center.ingest.status_writer.MAX_HEARTBEATS", most)
    edges = [EdgeId(f"e{n:04}") for n in range(2 * most + 1)]
    gateway.begin(edges)
    gateway.at(6_000, *edges)
    written = []
    for second in (6, 7, 8):
        listed = gateway.catalog.edges.all()
        assert all(e.reachable(gateway.now_ms) for e in listed)
        written.append([e.edge for e in listed if e.watermarks])
        gateway.at(second * 1_000 + 1_000, edges[0])
    assert written == [edges[:most], edges[: 2 * most], edges]
    assert gateway.edge(edges[0]).watermarks == {"flights": 9_000}


def test_an_edge_that_falls_silent_is_unreachable_since_it_was_heard_last_and_reachable_when_it_is_back(
    gateway: Heard,
) -> None:
    gateway.begin([JFK, LGA])
    gateway.at(2_000, JFK, LGA)
    for now_ms in range(3_000, 7_001, 1_000):
        gateway.at(now_ms, LGA)
        assert gateway.edge().reachable(now_ms)
    gateway.at(8_000, LGA)
    assert not gateway.edge().reachable(8_000) and gateway.edge().last_seen_ms == 2_000
    assert gateway.edge().connected and gateway.edge(LGA).reachable(8_000)
    gateway.at(9_000, JFK)
    assert gateway.edge().reachable(9_000) and gateway.edge().last_seen_ms == 9_000


def test_frames_are_a_sign_of_life(gateway: Heard) -> None:
    gateway.begin([JFK])
    gateway.at(2_000, JFK)
    for now_ms in range(4_000, 12_001, 4_000):
        gateway.writer.heard(JFK, now_ms)
        gateway.at(now_ms)
        assert gateway.edge().reachable(now_ms)
    gateway.at(18_000)
    assert not gateway.edge().reachable(18_000) and gateway.edge().last_seen_ms == 12_000


def test_edges_that_fall_silent_and_come_back_in_one_interval_are_written_together(gateway: Heard) -> None:
    quiet = EdgeId("quiet")
    gateway.begin([JFK, LGA, quiet])
    gateway.at(2_000, JFK, LGA)
    gateway.at(3_000, quiet, every_ms=20_000)
    for now_ms in (8_000, 20_000):
        gateway.at(now_ms)
        assert [gateway.edge(e).reachable(now_ms) for e in (JFK, LGA, quiet)] == [False, False, True]
    assert [gateway.edge(e).last_seen_ms for e in (JFK, LGA)] == [2_000] * 2
    gateway.at(21_000, JFK, LGA)
    assert all(gateway.edge(e).reachable(21_000) for e in (JFK, LGA, quiet))


def test_what_was_written_before_a_failure_is_not_written_again(
    gateway: Heard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.begin([JFK])
    gateway.writer.alarm("clock-differs", "its clock is wrong", JFK, 0)
    with monkeypatch.context() as failing:

        def fail(*_: object, **__: object) -> None:
            raise StorageError("the disk is full")

        failing.setattr(gateway.catalog.edges, "record_silence", fail)
        for now_ms in (2_000, 3_000, 4_000):
            gateway.at(now_ms, JFK)
    assert sum("the disk is full" in record.getMessage() for record in caplog.records) == 1, "once per outage"
    gateway.at(5_000, JFK)
    (alarm,) = gateway.catalog.alarms.latest()
    assert alarm.times == 1
    assert gateway.edge().watermarks == {"flights": 5_000} and gateway.edge().reachable(5_000)


def test_an_edge_that_is_asked_for_few_heartbeats_is_not_silent_between_two(gateway: Heard) -> None:
    gateway.begin([JFK])
    gateway.at(1_000, JFK, every_ms=10_000)
    for now_ms in range(2_000, 26_001, 1_000):
        gateway.at(now_ms)
        assert gateway.edge().reachable(now_ms)
        assert gateway.edge().last_seen_ms == 1_000
    gateway.at(27_000)
    assert not gateway.edge().reachable(27_000)


def test_the_edges_of_a_gateway_that_has_died_are_unreachable_until_another_one_hears_from_them(gateway: Heard) -> None:
    gateway.begin([JFK])
    gateway.at(1_000, JFK)
    gateway.at(4_000)
    assert gateway.edge().reachable(9_000) and not gateway.edge().reachable(9_001)
    other = Heard(gateway.catalog, 10_000)
    other.begin([JFK])
    other.at(10_000)
    assert gateway.edge().reachable(15_000)
    gateway.at(15_500)  # it was only paused, and calls the edge silent, which is not its own any more
    assert not gateway.edge().reachable(15_500), "the other gateway has not given a sign of life since"
    other.at(15_500, JFK)
    assert gateway.edge().reachable(15_500)
    gateway.catalog.edges.forget_gateways()
    assert gateway.edge().reachable(15_500)


def test_the_ends_of_many_sessions_are_one_transaction_and_end_with_the_last_heartbeat(gateway: Heard) -> None:
    gateway.begin([JFK, LGA])
    gateway.now_ms = 1_200
    gateway.beat(JFK)
    for edge in (JFK, LGA):
        gateway.writer.session_ended(edge, gateway.writer.gateway, 1_500)
    asyncio.run(gateway.writer.flush(all_heartbeats=True))
    assert [(e.connected, e.last_seen_ms) for e in gateway.catalog.edges.all()] == [(False, 1_500)] * 2
    assert gateway.edge().watermarks == {"flights": 1_200}
    assert not gateway.edge().reachable(1_500)


def test_a_state_that_ended_while_no_gateway_ran_leaves_the_alarms(gateway: Heard) -> None:
    gateway.begin([JFK, LGA])
    for edge in (JFK, LGA):
        gateway.catalog.alarms.add("clock-differs", "of an earlier process", edge, 0)
    later = StatusWriter(gateway.catalog, GatewayMetrics(), 0.0, lambda: 0)
    later.end_alarm("clock-differs", JFK)
    later.end_alarm("watermark-ahead", LGA)
    asyncio.run(later.flush())
    assert [(a.kind, a.edge) for a in gateway.catalog.alarms.latest()] == [("clock-differs", LGA)]
