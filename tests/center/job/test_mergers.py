"""Both mergers, held to the same tests; and the loop on a real Spark, from frames in the log to final answers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from dataclasses import replace
from typing import Any

import pytest

from center.job.admission import BatchLimits
from center.job.batch_applier import reason_of
from center.job.loop_core import Fault, Lane
from center.job.merge import Frame, MergeTask, PartMerged, PartOutcome, SkipKind, StorageFailed
from center.job.merger import Merger, SparkMerger, TasksFailed
from center.storage.slice_spans import SliceSpan, SpanMerge, spill
from edgewater.model.errors import StorageError
from edgewater.synopses import GroupedAggregate
from tests.center.job.conftest import World, synopsis
from tests.center.job.in_process_merger import InProcessMerger
from tests.center.job.plans import Failing, Plans

WITHIN_S = 60


@pytest.fixture(params=[pytest.param("spark", marks=pytest.mark.spark), "in process"])
def merger(request: pytest.FixtureRequest, world: World) -> Iterator[Merger]:
    if request.param == "in process":
        made: Merger = InProcessMerger(str(world.log_dir))
    else:
        made = SparkMerger(request.getfixturevalue("spark").sparkContext, MergeTask(str(world.log_dir)), 2, reason_of)
    yield made
    made.close()


def frames_of(world: World, *names: str) -> list[Frame]:
    refs = world.register(*names)
    for ref in refs:
        world.ship_window(ref, 0)
    last = world.catalog.frames.last_positions()
    return [(key, entry) for key, end in last.items() for entry in world.catalog.frames.entries(key, 0, end)]


def total(outcomes: Sequence[object], key: str) -> int:
    merged = [p for o in outcomes if isinstance(o, PartMerged) for p in o.partials if p.key == key]
    return sum(int(GroupedAggregate.from_bytes(p.synopsis).query("bytes").value.sum()) for p in merged)


def test_each_part_is_merged_by_query_and_slice(world: World, merger: Merger) -> None:
    frames = frames_of(world, "a", "b")
    outcomes = merger.submit(1, [frames[:8], frames[8:]], Lane.LIGHT, "a plan").result(WITHIN_S)
    assert sorted(len(o.partials) for o in outcomes if isinstance(o, PartMerged)) == [1, 2]
    for ref in {ref for ref, *_ in world.truth}:
        expected = sum(size for at, size in world.truth.items() if at[0] == ref)
        assert total(outcomes, f"{ref.name}@1") == expected


def test_several_plans_run_at_the_same_time(world: World, merger: Merger) -> None:
    frames = frames_of(world, "a", "b")
    plans = [merger.submit(n, [part], lane, "a plan") for n, (part, lane) in enumerate(
        [(frames[:6], Lane.LIGHT), (frames[6:], Lane.SUSPECT)]
    )]  # fmt: skip
    found = [{p.key for o in plan.result(WITHIN_S) if isinstance(o, PartMerged) for p in o.partials} for plan in plans]
    assert found == [{"a@1"}, {"b@1"}]


def test_damage_and_a_log_that_is_not_there_are_values_and_no_failures(world: World, merger: Merger) -> None:
    frames = frames_of(world, "a")
    damaged = [(key, replace(entry, offset=entry.offset + 1)) for key, entry in frames[:1]]
    (outcome,) = merger.submit(1, [damaged + frames[1:]], Lane.LIGHT, "a plan").result(WITHIN_S)
    assert isinstance(outcome, PartMerged)
    assert [(s.kind, s.position) for s in outcome.skipped] == [(SkipKind.DAMAGED, 1)]
    world.log_dir.rename(world.path / "unmounted")
    (outcome,) = merger.submit(2, [frames], Lane.LIGHT, "a plan").result(WITHIN_S)
    assert isinstance(outcome, StorageFailed)


def test_stored_partials_are_merged_to_one_or_only_measured_or_refused(world: World, merger: Merger) -> None:
    partials = [synopsis([f"/{n}"], [n]) for n in range(1, 4)]
    span = SliceSpan("a@1", 0, 1)

    def merged(most_bytes: int, *stored: bytes) -> SpanMerge:
        part = spill(world.log_dir, span, enumerate(stored, 7), most_bytes)
        assert part.ids == tuple(range(7, 7 + len(stored)))
        (outcome,) = merger.submit(1, [part], Lane.ANSWER, "answers").result(WITHIN_S)
        part.remove(world.log_dir)
        assert isinstance(outcome, SpanMerge) and outcome.span == span
        return outcome

    whole = merged(1 << 20, *partials)
    assert whole.synopsis == GroupedAggregate.merge_bytes(partials) and whole.size == len(whole.synopsis)
    assert merged(1, *partials) == SpanMerge(span, None, whole.size)
    bad = merged(1 << 20, partials[0], b"rubbish", *partials[1:])
    assert (bad.synopsis, [number for number, _ in bad.refused]) == (whole.synopsis, [1])
    part = spill(world.log_dir, span, enumerate(partials), 1 << 20)
    part.remove(world.log_dir)
    (outcome,) = merger.submit(2, [part], Lane.ANSWER, "answers").result(WITHIN_S)
    assert isinstance(outcome, StorageFailed), "the driver writes it again"


def test_a_task_without_frames_works(merger: Merger) -> None:
    assert merger.probe().result(WITHIN_S) is None


@pytest.mark.spark
def test_a_worker_that_ends_fails_its_plan_and_no_later_one(spark: Any, world: World) -> None:
    frames = frames_of(world, "a")

    def dies(parts: Iterator[Sequence[Frame]]) -> Iterator[PartOutcome]:
        list(parts)
        os.kill(os.getpid(), signal.SIGKILL)
        return iter(())

    deadly = SparkMerger(spark.sparkContext, dies, 2, reason_of)
    with pytest.raises(TasksFailed) as caught:
        deadly.submit(1, [frames], Lane.LIGHT, "a plan").result(WITHIN_S)
    assert caught.value.fault is Fault.FRAMES and "\n" not in str(caught.value)
    assert deadly.probe().result(WITHIN_S) is None
    deadly.close()


@pytest.mark.spark
def test_tasks_that_hang_are_cancelled_and_others_run_meanwhile(spark: Any, world: World) -> None:
    frames = frames_of(world, "a")

    def hangs(parts: Iterator[Sequence[Frame]]) -> Iterator[PartOutcome]:
        list(parts)
        time.sleep(10 * WITHIN_S)
        return iter(())

    merger = SparkMerger(spark.sparkContext, hangs, 2, reason_of)
    hanging = merger.submit(1, [frames], Lane.SUSPECT, "a plan")
    assert merger.probe().result(WITHIN_S) is None
    assert not hanging.done()
    for _ in range(WITHIN_S):
        merger.cancel(1)  # the job may begin after the first call
        if wait([hanging], 1.0).done:
            break
    with pytest.raises(TasksFailed):
        hanging.result(0)
    merger.close()


# The loop on a real Spark


@pytest.fixture
def real(spark: Any, shared_world: World) -> Iterator[Plans]:
    task = MergeTask(str(shared_world.log_dir))
    plans = Plans(shared_world, merger=SparkMerger(spark.sparkContext, task, 2, reason_of))
    yield plans
    plans.close()
    plans.merger.close()


@pytest.mark.spark
def test_final_answers_say_what_the_edges_saw(shared_world: World, real: Plans) -> None:
    world = shared_world
    refs = world.register("a", "b")
    for window in range(4):
        for ref in refs:
            world.ship_window(ref, window)
    for ref in refs:
        world.end(ref)

    real.run()

    assert world.all_consumed()
    assert world.answers() == world.truth
    assert world.observed() == world.records
    assert real.counted("frames") == sum(world.catalog.frames.last_positions().values())


@pytest.mark.spark
def test_a_large_plan_is_merged_by_several_tasks(spark: Any, world: World) -> None:
    (ref,) = world.register("a")
    for number in range(60):
        world.ship_records(world.edges[0], ref, 0, [f"/{'x' * 4_000}{number}-{i}" for i in range(20)])
    world.end(ref)
    tasks = list[int]()

    class Counted(SparkMerger):
        def submit(self, number: int, parts: Sequence[Sequence[Frame]], *more: Any) -> Any:
            tasks.append(len(parts))
            return super().submit(number, parts, *more)

    plans = Plans(world, merger=Counted(spark.sparkContext, MergeTask(str(world.log_dir)), 2, reason_of))
    plans.run()
    assert max(tasks) == 2
    assert sum(world.answers().values()) == 60 * 20
    plans.merger.close()


# The loop, whatever runs the tasks


def test_a_job_killed_midway_counts_all_once(world: World) -> None:
    refs = world.register("a", "b")
    for window in range(4):
        for ref in refs:
            world.ship_window(ref, window)
    plans = Plans(world, limits=BatchLimits(frames=5))
    for _ in range(3):
        plans.run_one()
    assert 0 < sum(world.store.consumed().values()) < sum(world.catalog.frames.last_positions().values())
    plans.restart()
    for ref in refs:
        world.end(ref)
    plans.run()

    assert world.answers() == world.truth
    assert world.observed() == world.records


def test_a_crash_after_the_commit_counts_nothing_twice(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    (ref,) = world.register("a")
    world.ship_window(ref, 0)
    plans = Plans(world)
    apply = plans.writer.apply

    def killed(*args: Any) -> Any:
        apply(*args)
        raise StorageError("the connection is lost after the commit")

    with monkeypatch.context() as patch:
        patch.setattr(plans.writer, "apply", killed)
        with pytest.raises(Failing, match="after the commit"):
            plans.run()
    world.end(ref)
    plans.run()

    assert world.answers() == world.truth
    assert world.observed() == world.records


def test_frames_that_were_dropped_and_never_applied_are_told_and_passed(world: World) -> None:
    (ref,) = world.register("a")
    world.ship_window(ref, 0)
    world.catalog.frames.drop({"a@1": 2})
    world.end(ref)

    plans = Plans(world)
    plans.run()

    assert world.all_consumed() and plans.counted("skipped", kind="lost") == 1
    (alarm,) = world.catalog.alarms.latest()
    assert (alarm.kind, alarm.message) == ("frames-lost", "query a@1: frames 1 to 2 were dropped unread")


def test_a_damaged_frame_is_skipped_counted_and_alarmed(world: World) -> None:
    refs = world.register("a", "b")
    for ref in refs:
        world.ship_window(ref, 0)
    (victim,) = world.catalog.frames.entries("a@1", 0, 1)
    path = world.log_dir / victim.segment
    data = bytearray(path.read_bytes())
    data[victim.offset + victim.length - 1] ^= 0xFF
    path.write_bytes(data)
    for ref in refs:
        world.end(ref)

    plans = Plans(world)
    plans.run()

    assert world.all_consumed()
    whole = {at: size for at, size in world.truth.items() if at[0] == refs[1]}
    answers = world.answers()
    assert {at: size for at, size in answers.items() if at[0] == refs[1]} == whole
    assert sum(answers.values()) < sum(world.truth.values())
    assert plans.counted("skipped", kind="frame-damaged") == 1
    (alarm,) = world.catalog.alarms.latest()
    assert alarm.kind == "frame-damaged"
    assert "query a@1, frame 1" in alarm.message


def test_frames_of_a_deleted_query_are_consumed_and_forgotten(world: World) -> None:
    refs = world.register("a", "b")
    for ref in refs:
        world.ship_window(ref, 0)
        world.end(ref)
    world.catalog.queries.delete("a", world.now)

    Plans(world).run()

    assert world.all_consumed()
    assert {ref for ref, *_ in world.answers()} == {refs[1]}


def test_applied_frames_leave_the_index_and_then_the_disk(world: World) -> None:
    (ref,) = world.register("a")
    for window in range(20):
        world.ship_window(ref, window)
    world.end(ref)
    before = len(list(world.log_dir.rglob("*.frames")))

    Plans(world, keep_frames_ms=0, limits=BatchLimits(frames=4)).run()

    assert world.catalog.frames.entries("a@1", 0, 1 << 40) == []
    assert len(list(world.log_dir.rglob("*.frames"))) < before
    assert world.answers() == world.truth
