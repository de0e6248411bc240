"""Liveness through the catalog's database."""

import threading
from collections.abc import Iterator

import pytest

from center.catalog.liveness import FORGET_MS, FRESH_MS, Beating, Heartbeat, PartRegistry, part_status
from center.catalog.store import Catalog


@pytest.fixture
def registry(url: str) -> Iterator[PartRegistry]:
    registry = PartRegistry(url)
    yield registry
    registry.close()


def beat(part: str, at: int, *, instance: str = "host:1", problem: str = "") -> Heartbeat:
    return Heartbeat(part, instance, "127.0.0.1:1", 0, at, problem)  # type: ignore[arg-type]


def test_a_beat_replaces_the_one_before_of_the_same_process(registry: PartRegistry) -> None:
    registry.beat(beat("gateway", 1000))
    registry.beat(beat("gateway", 2000))
    assert registry.parts() == [beat("gateway", 2000)]


def test_two_processes_and_the_catalog_share_one_database(url: str, registry: PartRegistry) -> None:
    Catalog(url).close()
    other = PartRegistry(url)
    other.beat(beat("gateway", 1000))
    other.close()
    assert registry.parts() == [beat("gateway", 1000)]


def test_a_process_that_signs_off_is_gone_and_the_dead_are_dropped_in_time(registry: PartRegistry) -> None:
    registry.beat(beat("job", 1000))
    registry.leave("job", "host:1")
    assert registry.parts() == []
    registry.beat(beat("job", 1000))
    registry.beat(beat("job", 2000 + FORGET_MS, instance="host:2"))
    assert [h.instance for h in registry.parts()] == ["host:2"]


def test_a_part_is_ready_while_any_of_its_processes_beats_without_a_problem() -> None:
    beats = [beat("gateway", 10_000, problem="disk full"), beat("gateway", 9_000, instance="b")]
    assert part_status("gateway", beats, 10_000).ready
    assert part_status("gateway", beats, 9_000 + FRESH_MS + 1).reason == "disk full"
    assert part_status("gateway", beats, 10_000 + 60_000).reason == "no heartbeat for 60 s"
    assert part_status("job", beats, 10_000).reason == "has not started"


def test_a_process_beats_from_its_start_and_signs_off_at_its_end(registry: PartRegistry) -> None:
    asked = threading.Semaphore(0)

    def problem() -> str:
        asked.release()
        return ""

    with Beating(registry, "job", "host:1", now_ms=lambda: 5, problem=problem, interval_s=0.001):
        for _ in range(3):  # the third question comes after two beats were written
            assert asked.acquire(timeout=10)
        assert registry.parts() == [Heartbeat("job", "host:1", "", 5, 5)]
    assert registry.parts() == []
