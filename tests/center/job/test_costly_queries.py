"""Queries of which answering costs the job too much: in small steps, or set aside, while the others are answered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from center.catalog import SetAside
from center.job.ledger_writer import FOR_EVER_MS
from center.ledger import Emission, QueryTooLarge, answer_work
from center.results import store, writes
from edgewater.model.query import QuerySpec
from edgewater.wire import QueryRef
from tests.center.gateway_world import synopsis
from tests.center.job.conftest import WINDOW_MS, World, spec
from tests.center.job.plans import Plans

MANY = [f"/{i:05d}" for i in range(200)]
"""URLs of a slice of more than 1 KB."""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with closing(World(tmp_path)) as world:
        yield world


def ship_windows(world: World, ref: QueryRef, windows: int, urls: list[str]) -> None:
    """Windows of one edge, which are due at once when all edges have ended."""
    for window in range(windows):
        world.ship_records(world.edges[0], ref, window, urls)


def assert_only_evil_is_set_aside(world: World, job: Plans, evil: QueryRef, why: str) -> None:
    assert job.applier.set_aside == {"evil@1": SetAside.PAUSED}
    paused = world.catalog.quarantine.queries()[evil]
    assert (paused.state, why in paused.reason) == (SetAside.PAUSED, True)
    (alarm,) = world.catalog.alarms.latest(query="evil@1")
    assert (alarm.kind, why in alarm.message) == ("query-paused", True)
    assert world.store.consumed().get("evil@1", 0) < world.positions_of(evil), "its frames are kept"
    assert world.catalog.quarantine.frames() == [], "no frame is to blame"
    for key in [key for key in world.truth if key[0] == evil]:
        del world.truth[key]
    assert world.answers() == world.truth and world.truth


def test_an_answer_that_is_too_large_costs_only_its_query_which_goes_on_with_a_larger_maximum(world: World) -> None:
    evil, honest = world.register("evil", "honest")
    job = Plans(world)
    job.store._max_answer_bytes = 1_000
    ship_windows(world, evil, 1, MANY)
    ship_windows(world, honest, 3, ["/a", "/b"])
    for ref in (evil, honest):
        world.end(ref)
    truth = world.truth.copy()
    job.run()
    assert_only_evil_is_set_aside(world, job, evil, "expected at most spark.max_answer")
    job.restart()
    job.run()
    world.truth.update({key: count for key, count in truth.items() if key[0] == evil})
    assert world.answers() == world.truth, "the default is enough"


@pytest.mark.parametrize(("module", "name", "most", "why"), [
    (writes, "MAX_ANSWER_CPU_S", -1.0, "of CPU time"), (store, "MAX_OPEN_WINDOWS", 3, "windows are not final"),
])  # fmt: skip
@pytest.mark.slow
def test_slow_answers_and_too_many_open_windows_cost_only_their_query(
    world: World, monkeypatch: pytest.MonkeyPatch, module: object, name: str, most: float, why: str
) -> None:
    evil, honest = world.register("evil", "honest")
    job = Plans(world)
    ship_windows(world, honest, 2, ["/a"])
    world.end(honest)
    job.run()
    ship_windows(world, evil, 5, ["/a"])
    if module is writes:
        job.run()
        ship_windows(world, evil, 5, ["/a"])  # the answers are merges
        world.end(evil)
    monkeypatch.setattr(module, name, most)
    job.run()
    assert_only_evil_is_set_aside(world, job, evil, why)


def test_of_thousands_of_slices_a_few_tell_that_the_answer_takes_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    evil, merged, whole = QueryRef("evil", 1), list[int](), writes._merged
    deltas = [writes.Delta("evil@1", n, synopsis(b"/a")) for n in range(33)]
    monkeypatch.setattr(writes, "PROBED", 2)
    monkeypatch.setattr(writes, "_merged", lambda found: merged.append(len(found)) or whole(found))
    assert writes._window(evil, deltas, writes.MAX_ANSWER_BYTES) == whole(deltas)
    assert merged == [2, 33]
    monkeypatch.setattr(writes, "MAX_ANSWER_CPU_S", -1.0)
    with pytest.raises(QueryTooLarge, match="of CPU time"):
        writes._window(evil, deltas, writes.MAX_ANSWER_BYTES)
    assert merged == [2, 33, 2]


@pytest.mark.slow
def test_a_query_that_time_finds_too_large_is_not_tried_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    budgeted = spec("evil").to_mapping() | {"budget": {"staleness": "1s"}}
    evil = world.catalog.queries.register(QuerySpec.from_mapping(budgeted), world.now)[0].ref
    (honest,) = world.register("honest")
    job = Plans(world)
    for _ in range(2):
        world.ship_records(world.edges[0], evil, world.now // WINDOW_MS, ["/a"])
        job.run()
    world.now += 60_000
    with monkeypatch.context() as patch:
        patch.setattr(writes, "MAX_ANSWER_CPU_S", -1.0)
        job.writer.advance()
    assert job.ledger._paused_until_ms == {evil: FOR_EVER_MS}
    (alarm,) = world.catalog.alarms.latest(query="evil@1")
    assert alarm.kind == "query-failing" and "until the job starts again" in alarm.message
    ship_windows(world, honest, 1, ["/a"])
    world.end(honest)
    job.run()
    assert {ref for ref, *_ in world.answers()} == {honest}
    job.restart()
    job.run()
    assert world.store.windows(evil, None, None, 10)[0], "it is tried again"


@pytest.mark.slow
def test_many_large_windows_that_are_due_at_once_are_answered_in_several_steps(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_work, "BYTES_PER_WORK", 15)
    large, small = world.register("large", "small")
    job = Plans(world)
    for ref, urls in ((large, MANY), (small, ["/a"])):
        for window in range(20):
            world.ship_records(world.edges[0], ref, window, urls)
        world.end(ref)
    steps: list[dict[QueryRef, int]] = []
    written = writes.write_answers

    def count(connection: object, ledger: object, emissions: list[Emission], *more: object) -> None:
        steps.append({ref: sum(e.query == ref for e in emissions) for ref in (large, small)})
        written(connection, ledger, emissions, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "write_answers", count)
    job.run()
    assert world.answers() == world.truth
    assert max(step[small] for step in steps) == 20, "small ones at once"
    assert max(step[large] for step in steps) < 20
    job.restart()
    assert all(job.ledger.book(ref).work.answer_bytes is None for ref in (large, small))
