from __future__ import annotations

import json
import threading
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from center.job.frame_retention import FrameRetention
from center.job.ledger_writer import DeadlineLoop, LedgerWriter
from center.job.metrics import JobMetrics
from center.ledger import Emission, Ledger
from edgewater.answers import Phase
from edgewater.base.errors import InvalidConfig, StorageError
from edgewater.model.query import QuerySpec
from edgewater.runtime.health import health_server
from edgewater.runtime.tasks import Tasks
from edgewater.wire import QueryRef
from tests.query_specs import query_spec
from tests.refusals import refused

WITHIN_S = 60


def staleness_spec(name: str) -> QuerySpec:
    return query_spec(name=name, stream="downloads", measures={"bytes": "sum(bytes)"}, budget={"staleness": "2s"})


def test_an_answer_that_is_due_needs_no_data(world: Any, writer: LedgerWriter) -> None:
    ref = world.catalog.queries.register(staleness_spec("q"), world.now)[0].ref
    writer.advance()
    world.now += 10_000

    emissions = writer.advance()

    assert emissions
    assert {e.phase for e in emissions} == {Phase.EARLY}
    assert world.store.latest(ref) is not None


def test_answers_that_take_long_to_write_are_given_earlier(world: Any, writer: LedgerWriter) -> None:
    world.catalog.queries.register(staleness_spec("q"), world.now)
    writer.advance()
    begun = writer.margin.ms
    write = world.store.tick

    def slow(*arguments: Any) -> list[Emission]:
        emissions: list[Emission] = write(*arguments)
        world.now += 700
        return emissions

    world.store.tick = slow
    for _ in range(5):
        world.now += 1_000
        writer.advance()

    assert writer.margin.ms >= 700 > begun


def test_the_catalogs_news_are_taken_in_once(world: Any, writer: LedgerWriter) -> None:
    world.register("a")
    version, events = writer.pending()
    assert len(events) == 2, "the edges, and the query"
    assert writer.pending() == (version, events), "not told yet"

    writer.advance()

    assert writer.pending() == (version, [])
    world.catalog.queries.delete("a", world.now)
    world.register("a")
    assert [type(e).__name__ for e in writer.pending()[1]] == ["EdgesChanged", "QueryDeleted", "QueryRegistered"]


def test_a_query_registered_just_before_its_first_frame_is_known_in_time(world: Any, writer: LedgerWriter) -> None:
    writer.advance()
    (ref,) = world.register("a")
    world.ship_window(ref, 0)

    writer.apply([], [], {"a@1": world.positions_of(ref)})

    assert world.all_consumed()


def test_a_closed_writer_writes_no_more(world: Any, writer: LedgerWriter, ref: QueryRef) -> None:
    writer.close()

    with pytest.raises(StorageError):
        writer.apply([], [], {"a@1": 1})
    assert ref not in world.store.consumed()


def test_deadlines_are_kept_by_a_thread_that_survives_failures(world: Any, writer: LedgerWriter) -> None:
    failed, turned = threading.Event(), threading.Event()

    class Flaky:
        def advance(self) -> None:
            if not failed.is_set():
                failed.set()
                raise StorageError("the disk is full")
            writer.advance()
            turned.set()

        def wait(self) -> None:
            writer.wait()

    stop, leads = threading.Event(), threading.Event()
    leads.set()
    deadlines = DeadlineLoop(Flaky(), JobMetrics(), stop, leads)  # type: ignore[arg-type]
    thread = Tasks().thread("deadlines", deadlines.run)

    assert turned.wait(WITHIN_S)
    stop.set()
    writer.close()
    thread.join(WITHIN_S)
    assert not thread.is_alive()


def test_metrics_liveness_and_readiness_are_served() -> None:
    metrics, missing = JobMetrics(), list[str]()
    metrics.batches.inc()
    with health_server(metrics.registry, lambda: missing, "127.0.0.1:0", "spark.metrics") as address:
        base = f"http://{address}"
        with urlopen(f"{base}/metrics", timeout=WITHIN_S) as response:
            assert b"edgewater_job_batches_total 1.0" in response.read()
        with urlopen(f"{base}/livez", timeout=WITHIN_S) as response:
            assert response.read() == b"ok\n"
        with urlopen(f"{base}/readyz", timeout=WITHIN_S) as response:
            assert json.load(response) == {"ready": True, "missing": []}
        missing.append("the stream failed")
        for path, status in (("/readyz", 503), ("/other", 404)):
            with pytest.raises(HTTPError) as caught:
                urlopen(f"{base}{path}", timeout=WITHIN_S)
            assert caught.value.code == status
            caught.value.close()


def test_a_taken_address_is_refused_by_its_key() -> None:
    registry = JobMetrics().registry
    with (
        health_server(registry, list, "127.0.0.1:0", "spark.metrics") as address,
        refused(InvalidConfig, "spark.metrics"),
        health_server(registry, list, address, "spark.metrics"),
    ):
        pass


def test_retention_drops_what_the_store_holds_and_nothing_else(world: Any, writer: LedgerWriter, ref: QueryRef) -> None:
    world.ship_window(ref, 0)
    retention = FrameRetention(world.shared(), world.log, every_ms=1_000)

    assert retention.run(0) == []
    writer.apply([], [], {"a@1": 4})
    assert retention.run(999) == [], "not yet again"
    retention.run(1_000)

    assert [e.position for e in world.catalog.frames.entries("a@1", 0, 99)] == [5, 6]


def test_retention_keeps_frames_for_as_long_as_asked(world: Any, writer: LedgerWriter, ref: QueryRef) -> None:
    for window in range(3):
        world.ship_window(ref, window)
        world.now += 10_000
    writer.apply([], [], {"a@1": 18})
    retention = FrameRetention(world.shared(), world.log, keep_ms=15_000, every_ms=0)

    retention.run(world.now)

    assert [e.position for e in world.catalog.frames.entries("a@1", 0, 99)] == list(range(13, 19))


@pytest.mark.parametrize("by_ms", [3_600_000, -3_600_000])
def test_a_clock_that_is_set_answers_no_window_without_records(world: Any, by_ms: int) -> None:
    steady_s = 0.0

    def pass_s(seconds: float) -> list[Emission]:
        nonlocal steady_s
        given: list[Emission] = []
        for _ in range(round(seconds * 10)):
            world.now, steady_s = world.now + 100, steady_s + 0.1
            given += writer.advance()
        return given

    writer = LedgerWriter(Ledger(), world.shared(), monotonic=lambda: steady_s)
    world.catalog.queries.register(staleness_spec("q"), world.now)
    assert len(pass_s(10)) in (7, 8), "a window a second, two seconds after its end"
    world.now += by_ms
    stepped = pass_s(10)
    assert len(stepped) <= 10
    world.now -= by_ms
    assert len(pass_s(10)) <= 20, "set right again"
    starts = [e.window_start_ms for e in stepped]
    assert len(set(starts)) == len(starts)
    writer.close()
