"""Queries of which answering costs the job too much: in small steps, or set aside, while the others are answered."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NoReturn

import pytest
from sqlalchemy import func, select

from center.catalog import SetAside
from center.job.ledger_writer import LedgerWriter
from center.job.loop_core import Fault, Lane
from center.job.merge import Part, PartOutcome
from center.job.merge_loop import MergeLoop
from center.job.merger import TasksFailed
from center.ledger import Emission, answer_work
from center.results import COSTLY_MS, MAX_ANSWER_BYTES, store, writes
from center.results import schema as t
from center.results.writes import MAX_SIDE_BY_SIDE
from edgewater.model.query import QuerySpec
from edgewater.synopses import GroupedAggregate
from edgewater.wire import QueryRef
from tests.center.job.conftest import World, spec
from tests.center.job.in_process_merger import InProcessMerger
from tests.center.job.plans import Failing, Plans
from tests.insides import engine_of

MANY = [f"/{i:05d}" for i in range(200)]
"""URLs of a slice of more than 1 KB."""


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
    job = Plans(world, max_answer_bytes=1_000)
    ship_windows(world, evil, 1, MANY)
    ship_windows(world, honest, 3, ["/a", "/b"])
    for ref in (evil, honest):
        world.end(ref)
    truth = world.truth.copy()
    job.run()
    assert_only_evil_is_set_aside(world, job, evil, "expected at most spark.max_answer_bytes")
    job.max_answer_bytes = MAX_ANSWER_BYTES
    job.restart()
    job.run()
    world.truth.update({key: count for key, count in truth.items() if key[0] == evil})
    assert world.answers() == world.truth, "the default is enough"


@pytest.mark.slow
def test_too_many_open_windows_cost_only_their_query(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    evil, honest = world.register("evil", "honest")
    job = Plans(world)
    ship_windows(world, honest, 2, ["/a"])
    world.end(honest)
    job.run()
    ship_windows(world, evil, 5, ["/a"])
    monkeypatch.setattr(store, "MAX_OPEN_WINDOWS", 3)
    job.run()
    assert_only_evil_is_set_aside(world, job, evil, "windows are not final")


# Answers that tasks merge


def two_batches(world: World, job: Plans, ref: QueryRef, windows: int = 2) -> None:
    """Each window has partials of two batches, so its answer is a merge."""
    for _ in range(2):
        ship_windows(world, ref, windows, ["/a", "/b"])
        job.run()


def sliding(world: World, name: str) -> QueryRef:
    changed = spec(name).to_mapping() | {"window": {"sliding": "2m", "every": "1m"}}
    return world.catalog.queries.register(QuerySpec.from_mapping(changed), world.now)[0].ref


def totals(world: World, ref: QueryRef) -> dict[int, tuple[str, int]]:
    """Phase and total of the newest answer of each window."""
    rows, _ = world.store.windows(ref, None, None, 100)
    return {row.window_start_ms: (row.phase.value, total(row.synopsis)) for row in rows}


def total(synopsis: bytes | None) -> int:
    assert synopsis is not None
    return int(GroupedAggregate.from_bytes(synopsis).query("bytes").value.sum())


@pytest.mark.parametrize("is_sliding", [False, True])
def test_costly_answers_are_merged_by_tasks_and_equal_the_others(world: World, is_sliding: bool) -> None:
    names = ("costly", "cheap")
    costly, cheap = [sliding(world, name) for name in names] if is_sliding else world.register(*names)
    job = Plans(world, costly_ms=0.0)
    for ref in (costly, cheap):
        two_batches(world, job, ref, 3)
        world.end(ref)
        job.run()
        job._costly_ms = COSTLY_MS
        job.restart()
    assert Lane.ANSWER in {lane for lane, _ in job.merger.submitted}
    assert totals(world, costly) == totals(world, cheap)
    assert {phase for phase, _ in totals(world, costly).values()} == {"final"}
    if not is_sliding:
        assert world.answers() == world.truth
    assert world.segments.files() == [], "they are small"


def test_slices_with_too_many_deltas_are_merged_by_tasks_before_the_answer(world: World, ref: QueryRef) -> None:
    job = Plans(world, costly_ms=0.0)
    for _ in range(2 * MAX_SIDE_BY_SIDE):
        ship_windows(world, ref, 1, ["/a"])
        job.run()
        with engine_of(job.store).connect() as connection:
            assert connection.execute(select(func.count()).select_from(t.deltas)).scalar_one() <= MAX_SIDE_BY_SIDE
    world.end(ref)
    job.run()
    assert world.answers() == world.truth


@pytest.mark.parametrize("killed", ["when they are wanted", "when they are merged", "before they are written"])
def test_a_driver_that_is_killed_while_tasks_merge_an_answer_loses_and_falsifies_nothing(
    world: World, killed: str, monkeypatch: pytest.MonkeyPatch, ref: QueryRef
) -> None:
    job = Plans(world, costly_ms=0.0)
    two_batches(world, job, ref)
    world.end(ref)

    def die(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    places = {
        "when they are wanted": (LedgerWriter, "parts"),
        "when they are merged": (MergeLoop, "_give"),
        "before they are written": (writes, "write_answers"),
    }
    with monkeypatch.context() as patch:
        where, name = places[killed]
        if where is writes:
            written = writes.write_answers

            def die_with_merges(*args: Any) -> None:
                written(*args)
                die()

            patch.setattr(where, name, die_with_merges)
        else:
            patch.setattr(where, name, die)
        with pytest.raises(KeyboardInterrupt):
            job.run()
    assert world.answers() == {}, "nothing was decided"
    world.now += 5_000
    job.restart()
    job.run()
    assert world.answers() == world.truth
    rows, _ = world.store.windows(ref, None, None, 10)
    assert {row.answered_at_ms for row in rows} == {world.now}, "the answer states when it was given"


@pytest.mark.parametrize("fault", [Fault.FRAMES, Fault.SYSTEM])
def test_a_merge_of_answers_that_ends_workers_pauses_its_query_and_another_failure_does_not(
    world: World, fault: Fault
) -> None:
    evil, honest = world.register("evil", "honest")

    class Fails(InProcessMerger):
        def submit(self, number: int, parts: Sequence[Part], lane: Lane, *more: str) -> Future[list[PartOutcome]]:
            if lane is not Lane.ANSWER:
                return super().submit(number, parts, lane, *more)
            failed: Future[list[PartOutcome]] = Future()
            failed.set_exception(TasksFailed(fault, "a worker was ended"))
            return failed

    job = Plans(world, costly_ms=0.0, merger=Fails(world.task))
    two_batches(world, job, evil, 1)
    world.end(evil)
    ship_windows(world, honest, 1, ["/a"])
    world.end(honest)
    if fault is Fault.SYSTEM:
        with pytest.raises(Failing):
            for _ in range(10):
                job.run()
        assert job.applier.set_aside == {}
    else:
        for _ in range(3):
            job.run()
        assert job.applier.set_aside == {"evil@1": SetAside.PAUSED}
        assert "answers cannot be merged" in world.catalog.quarantine.queries()[evil].reason
    assert {ref for ref, *_ in world.answers()} <= {honest}


def test_a_costly_answer_above_the_maximum_costs_only_its_query(world: World) -> None:
    evil, honest = world.register("evil", "honest")
    job = Plans(world, costly_ms=0.0, max_answer_bytes=1_000)
    for urls in (MANY[:100], MANY[100:]):
        world.ship_records(world.edges[0], evil, 0, urls)
        job.run()
    ship_windows(world, honest, 1, ["/a"])
    for ref in (evil, honest):
        world.end(ref)
    job.run()
    (alarm,) = world.catalog.alarms.latest(query="evil@1")
    assert alarm.kind == "query-failing" and "spark.max_answer_bytes" in alarm.message
    assert {ref for ref, *_ in world.answers()} == {honest}
    job.max_answer_bytes = MAX_ANSWER_BYTES
    job.restart()
    job.run()
    assert world.answers() == world.truth, "the default is enough"


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

    monkeypatch.setattr(writes, "write_answers", count)
    job.run()
    assert world.answers() == world.truth
    assert max(step[small] for step in steps) == 20, "small ones at once"
    assert max(step[large] for step in steps) < 20
    job.restart()
    assert all(job.ledger.book(ref).work.answer_bytes is None for ref in (large, small))
