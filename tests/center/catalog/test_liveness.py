"""Liveness through the catalog's database."""

import threading
from collections.abc import Iterator

import pytest

from center.catalog import Catalog, ComponentHeartbeat, ComponentRegistry, HeartbeatThread, Role, component_status
from center.catalog.liveness import EXPIRE_AFTER_MS, STALE_AFTER_MS
from edgewater.base.errors import StorageError


@pytest.fixture
def registry(url: str) -> Iterator[ComponentRegistry]:
    registry = ComponentRegistry(url)
    yield registry
    registry.close()


def beat(component: str, at: int, *, instance: str = "host:1", problem: str = "") -> ComponentHeartbeat:
    return ComponentHeartbeat(component, instance, "127.0.0.1:1", 0, at, problem)  # type: ignore[arg-type]


def test_a_beat_replaces_the_one_before_of_the_same_process(registry: ComponentRegistry) -> None:
    registry.record(beat("gateway", 1000))
    registry.record(beat("gateway", 2000))
    assert registry.heartbeats() == [beat("gateway", 2000)]


def test_two_processes_and_the_catalog_share_one_database(url: str, registry: ComponentRegistry) -> None:
    Catalog(url).close()
    other = ComponentRegistry(url)
    other.record(beat("gateway", 1000))
    other.close()
    assert registry.heartbeats() == [beat("gateway", 1000)]


def test_a_process_that_signs_off_is_gone_and_the_dead_are_dropped_in_time(registry: ComponentRegistry) -> None:
    registry.record(beat("job", 1000))
    registry.remove("job", "host:1")
    assert registry.heartbeats() == []
    registry.record(beat("job", 1000))
    registry.record(beat("job", 2000 + EXPIRE_AFTER_MS, instance="host:2"))
    assert [h.instance for h in registry.heartbeats()] == ["host:2"]


def test_a_component_is_ready_while_any_of_its_processes_has_a_heartbeat_without_a_problem() -> None:
    beats = [beat("gateway", 10_000, problem="disk full"), beat("gateway", 9_000, instance="b")]
    assert component_status("gateway", beats, 10_000).ready
    assert component_status("gateway", beats, 9_000 + STALE_AFTER_MS + 1).reason == "disk full"
    assert component_status("gateway", beats, 10_000 + 60_000).reason == "no heartbeat for 60 s"
    assert component_status("job", beats, 10_000).reason == "has not started"


def test_a_process_beats_from_its_start_and_signs_off_at_its_end(registry: ComponentRegistry) -> None:
    asked = threading.Semaphore(0)

    def problem() -> str:
        asked.release()
        return ""

    with HeartbeatThread(registry, "job", "host:1", now_ms=lambda: 5, problem=problem, interval_s=0.001):
        for _ in range(3):  # the third question comes after two beats were written
            assert asked.acquire(timeout=60)
        assert registry.heartbeats() == [ComponentHeartbeat("job", "host:1", "", 5, 5)]
    assert registry.heartbeats() == []


def test_a_new_problem_is_known_before_the_next_heartbeat_is_due(
    registry: ComponentRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    written: list[tuple[str, int]] = []
    both = threading.Event()

    def problem() -> str:
        asked.append("the disk is full" if len(asked) >= 2 else "")
        return asked[-1]

    def record(beat: ComponentHeartbeat) -> None:
        written.append((beat.problem, len(asked)))
        if len(written) == 2:
            both.set()

    monkeypatch.setattr(registry, "record", record)
    with HeartbeatThread(registry, "job", "host:1", now_ms=lambda: 5, problem=problem, interval_s=1):
        assert both.wait(timeout=60)
    # Without a look in between the second heartbeat would have been the second question.
    assert written[:2] == [("", 1), ("the disk is full", 4)]


def test_of_several_drivers_the_one_that_leads_decides_readiness_and_warm_standbys_are_counted() -> None:
    def driver(instance: str, role: Role, problem: str = "", at: int = 10_000) -> ComponentHeartbeat:
        return ComponentHeartbeat("job", instance, "", 0, at, problem, role)

    pair = [driver("a:1", "leader"), driver("b:1", "standby"), driver("c:1", "standby", "Spark is starting")]
    status = component_status("job", pair, 10_000)
    assert (status.ready, status.leader, status.standbys, status.instances) == (True, "a:1", 1, 3)
    failing = component_status("job", [driver("a:1", "leader", "the stream failed"), pair[1]], 10_000)
    assert (failing.ready, failing.reason, failing.standbys) == (False, "the stream failed", 1)
    alone = component_status("job", [driver("a:1", "leader", at=0), pair[1]], 10_000)
    assert (alone.ready, alone.leader, alone.standbys) == (False, "", 1)
    assert "no driver leads" in alone.reason


def test_a_job_of_several_drivers_is_ready_when_each_partition_has_one() -> None:
    def driver(instance: str, role: Role, problem: str = "", at: int = 10_000) -> ComponentHeartbeat:
        return ComponentHeartbeat("job", instance, "", 0, at, problem, role, needed=2)

    both = [driver("a:1", "leader"), driver("b:1", "leader")]
    assert component_status("job", both, 10_000).ready
    assert component_status("job", both, 10_000).leader == "a:1, b:1"
    # One has died a moment ago, and the standby has taken over.
    after = component_status("job", [driver("a:1", "leader", at=9_000), *both[1:], driver("c:1", "leader")], 10_000)
    assert (after.ready, after.leader) == (True, "b:1, c:1")

    one = component_status("job", [both[0], driver("b:1", "standby")], 10_000)
    assert (one.ready, one.reason, one.leader, one.standbys) == (False, "1 of 2 drivers lead", "a:1", 1)
    failing = component_status("job", [both[0], driver("b:1", "leader", "the stream failed")], 10_000)
    assert (failing.ready, failing.reason) == (False, "the stream failed")


def test_an_outage_of_the_database_is_logged_once(
    registry: ComponentRegistry, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = threading.Semaphore(0)

    def away(_: object) -> None:
        failures.release()
        raise StorageError("away")

    monkeypatch.setattr("center.catalog.liveness.write_transaction", away)
    with HeartbeatThread(registry, "job", "host:1", now_ms=lambda: 5, interval_s=0.001):
        for _ in range(5):
            assert failures.acquire(timeout=20)
    assert [record.getMessage() for record in caplog.records].count("job: no heartbeat: away") == 1
