"""Both mergers, held to the same tests; and the loop on a real Spark, from frames in the log to final answers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from center.job.admission import BatchLimits
from center.job.batch_applier import reason_of
from center.job.loop_core import Fault, Lane
from center.job.merge import Frame, MergeTask, PartMerged, PartOutcome, SkipKind, StorageFailed
from center.job.merger import Merger, SparkMerger, TasksFailed
from center.spark.workers import LOW_PRIORITY
from center.storage.delta_segments import (
    Data,
    Delta,
    DeltaSegments,
    SegmentRange,
    SliceSpan,
    SpanMerge,
    SpanPart,
    shape_of,
)
from edgewater.base.errors import StorageError
from edgewater.synopses import GroupedAggregate
from edgewater.wire import QueryRef
from tests.center.job.conftest import World, synopsis
from tests.center.job.in_process_merger import InProcessMerger
from tests.center.job.plans import Failing, Plans

WITHIN_S = 60
PREFIX = "1-of-1/0/1"


@pytest.fixture(params=[pytest.param("spark", marks=pytest.mark.spark), "in process"])
def merger(request: pytest.FixtureRequest, world: World) -> Iterator[Merger]:
    if request.param == "in process":
        made: Merger = InProcessMerger(world.task)
    else:
        made = SparkMerger(request.getfixturevalue("spark").sparkContext, world.task, 2, reason_of)
    yield made
    made.close()


def frames_of(world: World, *names: str) -> list[Frame]:
    refs = world.register(*names)
    world.ship_windows(refs)
    last = world.catalog.frames.last_positions()
    return [(key, entry) for key, end in last.items() for entry in world.catalog.frames.entries(key, 0, end)]


def total(outcomes: Sequence[object], key: str) -> int:
    merged = [p for o in outcomes if isinstance(o, PartMerged) for p in o.deltas if p.query == key]
    return sum(int(GroupedAggregate.from_bytes(p.data).query("bytes").value.sum()) for p in merged)


def test_each_part_is_merged_by_query_and_slice(world: World, merger: Merger) -> None:
    frames = frames_of(world, "a", "b")
    outcomes = merger.submit(1, [frames[:8], frames[8:]], Lane.LIGHT, "a plan", PREFIX).result(WITHIN_S)
    assert sorted(len(o.deltas) for o in outcomes if isinstance(o, PartMerged)) == [1, 2]
    for ref in {ref for ref, *_ in world.truth}:
        expected = sum(size for at, size in world.truth.items() if at[0] == ref)
        assert total(outcomes, f"{ref.name}@1") == expected


def test_several_plans_run_at_the_same_time(world: World, merger: Merger) -> None:
    frames = frames_of(world, "a", "b")
    plans = [merger.submit(n, [part], lane, "a plan", PREFIX) for n, (part, lane) in enumerate(
        [(frames[:6], Lane.LIGHT), (frames[6:], Lane.SUSPECT)]
    )]  # fmt: skip
    found = [{p.query for o in plan.result(WITHIN_S) if isinstance(o, PartMerged) for p in o.deltas} for plan in plans]
    assert found == [{"a@1"}, {"b@1"}]


def test_damage_and_a_log_that_is_not_there_are_values_and_no_failures(world: World, merger: Merger) -> None:
    frames = frames_of(world, "a")
    damaged = [(key, replace(entry, offset=entry.offset + 1)) for key, entry in frames[:1]]
    (outcome,) = merger.submit(1, [damaged + frames[1:]], Lane.LIGHT, "a plan", PREFIX).result(WITHIN_S)
    assert isinstance(outcome, PartMerged)
    assert [(s.kind, s.position) for s in outcome.skipped] == [(SkipKind.DAMAGED, 1)]
    world.log_dir.rename(world.path / "unmounted")
    (outcome,) = merger.submit(2, [frames], Lane.LIGHT, "a plan", PREFIX).result(WITHIN_S)
    assert isinstance(outcome, StorageFailed)


def test_stored_deltas_are_merged_to_one_or_only_measured_or_refused(world: World, merger: Merger) -> None:
    span, partials = SliceSpan("a@1", 0, 1), [synopsis([f"/{n}"], [n]) for n in range(1, 4)]
    first, *others = DeltaSegments(world.segments.root, inline_bytes=0).place(
        PREFIX, [Delta("a@1", 0, partial) for partial in partials]
    )
    assert isinstance(first.data, SegmentRange)
    lost, damaged = replace(first.data, segment="1-of-1/0/1-lost"), replace(first.data, crc32c=first.data.crc32c ^ 1)
    bad = lost, damaged, b"rubbish"

    def merged(most_bytes: int, *stored: Data) -> SpanMerge:
        part = SpanPart(span, tuple(range(len(stored))), stored, most_bytes)
        (outcome,) = merger.submit(1, [part], Lane.ANSWER, "answers", PREFIX).result(WITHIN_S)
        assert isinstance(outcome, SpanMerge) and outcome.span == span
        return outcome

    placed = [first.data, *(delta.data for delta in others)]
    whole = merged(1 << 20, partials[0], *placed[1:])
    assert whole.data == GroupedAggregate.merge_bytes(partials) and whole.size == len(whole.data)
    assert merged(1, *placed) == SpanMerge(span, (0, 1, 2), None, whole.size)
    part = merged(1 << 20, *bad, *placed)
    assert (part.data, [number for number, _ in part.refused]) == (whole.data, [0, 1, 2])
    reasons = [reason for _, reason in part.refused]
    assert all(str(world.segments.root / data.segment) in reasons[n] for n, data in enumerate((lost, damaged)))
    nothing = merged(1 << 20, *bad)
    assert (nothing.data, [number for number, _ in nothing.refused]) == (None, [0, 1, 2])
    world.segments.root.rename(world.path / "unmounted")
    (outcome,) = merger.submit(2, [SpanPart(span, (1,), (first.data,), 1)], Lane.ANSWER, "answers", PREFIX).result(60)
    assert isinstance(outcome, StorageFailed) and str(world.segments.root) in outcome.reason


def test_large_results_are_written_to_one_segment_of_each_attempt(world: World, merger: Merger) -> None:
    (ref,) = world.register("large")
    for number in range(24):
        world.ship_records(world.edges[0], ref, number % 2, [f"/{'x' * 4_000}{number}-{i}" for i in range(8)])
    large = [("large@1", entry) for entry in world.catalog.frames.entries("large@1", 0, 99)]
    frames = [*large, *frames_of(world, "small")[len(large) :]]

    attempts = [merger.submit(n, [frames], Lane.LIGHT, "a plan", PREFIX).result(WITHIN_S)[0] for n in (1, 2)]

    large_queries = [
        {d.query for d in attempt.deltas if isinstance(d.data, SegmentRange)}
        for attempt in attempts
        if isinstance(attempt, PartMerged)
    ]
    assert large_queries == [{"large@1"}] * 2, "the small query's results are returned"
    assert len(world.segments.files()) == 2, "an attempt never writes to the file of another one"
    for attempt in attempts:
        assert isinstance(attempt, PartMerged)
        mine = [d.data for d in attempt.deltas if isinstance(d.data, SegmentRange)]
        (file,) = [file for file in world.segments.files() if file.name == mine[0].segment]
        assert sum(data.size for data in mine) == file.size and len(mine) == 2
        assert [data.shape for data in mine] == [shape_of(world.segments.read(data)) for data in mine]


def test_a_disk_that_cannot_be_written_fails_the_task_and_blames_no_frame(world: World, merger: Merger) -> None:
    (ref,) = world.register("large")
    for number in range(24):
        world.ship_records(world.edges[0], ref, 0, [f"/{'x' * 4_000}{number}-{i}" for i in range(8)])
    frames = [("large@1", entry) for entry in world.catalog.frames.entries("large@1", 0, 99)]
    world.segments.root.write_text("no directory")
    (outcome,) = merger.submit(1, [frames], Lane.LIGHT, "a plan", PREFIX).result(WITHIN_S)
    assert isinstance(outcome, StorageFailed) and "cannot be written" in outcome.reason


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
        deadly.submit(1, [frames], Lane.LIGHT, "a plan", PREFIX).result(WITHIN_S)
    assert caught.value.fault is Fault.FRAMES and "\n" not in str(caught.value)
    assert deadly.probe().result(WITHIN_S) is None
    deadly.close()


SPINS = """
import resource, time
from center.spark.workers import cpu_limit, in_background

def spins():
    while True:
        pass

before = resource.getrlimit(resource.RLIMIT_CPU)
try:
    in_background(0.1, spins)
except RuntimeError as exc:
    print(exc)
print(in_background(0.1, lambda: time.sleep(0.2) or "waited"))
with cpu_limit(60.0):
    pass
assert resource.getrlimit(resource.RLIMIT_CPU) == before
print("goes on", flush=True)
with cpu_limit(0.1):
    spins()
"""


@pytest.mark.nightly
def test_a_merge_is_ended_by_the_cpu_time_that_it_takes_and_not_by_its_wait() -> None:
    ended = subprocess.run([sys.executable, "-c", SPINS], capture_output=True, text=True, timeout=60 * WITHIN_S)
    refused, waited, goes_on = ended.stdout.splitlines()
    assert "0.1 s of CPU" in refused and (waited, goes_on) == ("waited", "goes on")
    assert ended.returncode == -signal.SIGXCPU


@pytest.mark.spark
def test_tasks_that_hang_are_cancelled_and_others_run_meanwhile(spark: Any, world: World) -> None:
    frames = frames_of(world, "a")

    def hangs(parts: Iterator[Sequence[Frame]]) -> Iterator[PartOutcome]:
        list(parts)
        time.sleep(10 * WITHIN_S)
        return iter(())

    merger = SparkMerger(spark.sparkContext, hangs, 2, reason_of)
    hanging = merger.submit(1, [frames], Lane.SUSPECT, "a plan", PREFIX)
    assert merger.probe().result(WITHIN_S) is None
    assert not hanging.done()
    for _ in range(WITHIN_S):
        merger.cancel(1)  # the job may begin after the first call
        if wait([hanging], 1.0).done:
            break
    with pytest.raises(TasksFailed):
        hanging.result(0)
    merger.close()


@pytest.mark.spark
def test_tasks_of_heavy_queries_and_of_costly_answers_leave_the_cpu_to_others(spark: Any, tmp_path: Path) -> None:
    class Task(MergeTask):
        def merge(self, prefix: str, part: object) -> PartOutcome:
            if part == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            return StorageFailed(str(os.nice(0)))

    merger = SparkMerger(spark.sparkContext, Task(tmp_path, DeltaSegments(None)), 1, reason_of)
    found = dict[Lane, set[int]]()
    for number, lane in enumerate((*Lane, *Lane)):
        (outcome,) = merger.submit(number, [[]], lane, "a plan", PREFIX).result(WITHIN_S)
        assert isinstance(outcome, StorageFailed)
        found.setdefault(lane, set()).add(int(outcome.reason))
    usual = os.nice(0)
    low = min(usual + LOW_PRIORITY, 19)
    assert found == {Lane.LIGHT: {usual}, Lane.HEAVY: {low}, Lane.SUSPECT: {usual}, Lane.ANSWER: {low}}

    with pytest.raises(TasksFailed, match="ended with -9") as caught:
        merger.submit(9, ["dies"], Lane.HEAVY, "a plan", PREFIX).result(WITHIN_S)  # type: ignore[list-item]
    assert caught.value.fault is Fault.FRAMES
    merger.close()


@pytest.mark.spark
def test_the_process_of_a_heavy_merge_ends_with_its_worker(spark: Any, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    class Task(MergeTask):
        def merge(self, prefix: str, part: object) -> PartOutcome:
            with pipe.open("w", buffering=1) as said:
                said.write(f"{os.getppid()}\n")
                time.sleep(10 * WITHIN_S)
            raise AssertionError

    merger = SparkMerger(spark.sparkContext, Task(tmp_path, DeltaSegments(None)), 1, reason_of)
    merging = merger.submit(1, [[]], Lane.HEAVY, "a plan", PREFIX)
    with pipe.open() as said:
        os.kill(int(said.readline()), signal.SIGKILL)
        assert said.read() == "", "the process has ended"
    with pytest.raises(TasksFailed):
        merging.result(WITHIN_S)
    merger.close()


# The loop on a real Spark


@pytest.fixture
def real(spark: Any, shared_world: World) -> Iterator[Plans]:
    plans = Plans(shared_world, merger=SparkMerger(spark.sparkContext, shared_world.task, 2, reason_of))
    yield plans
    plans.close()
    plans.merger.close()


@pytest.mark.nightly
@pytest.mark.spark
def test_final_answers_say_what_the_edges_saw(shared_world: World, real: Plans) -> None:
    world = shared_world
    refs = world.register("a", "b")
    world.ship_windows(refs, 4)
    world.end(*refs)

    real.run()

    assert world.all_consumed()
    assert world.answers() == world.truth
    assert world.observed() == world.records
    assert real.counted("frames") == sum(world.catalog.frames.last_positions().values())


@pytest.mark.spark
def test_a_large_plan_is_merged_by_several_tasks(spark: Any, world: World, ref: QueryRef) -> None:
    for number in range(60):
        world.ship_records(world.edges[0], ref, 0, [f"/{'x' * 4_000}{number}-{i}" for i in range(20)])
    world.end(ref)
    tasks = list[int]()

    class Counted(SparkMerger):
        def submit(self, number: int, parts: Sequence[Sequence[Frame]], *more: Any) -> Any:
            tasks.append(len(parts))
            return super().submit(number, parts, *more)

    plans = Plans(world, merger=Counted(spark.sparkContext, world.task, 2, reason_of))
    plans.run()
    assert max(tasks) == 2
    assert sum(world.answers().values()) == 60 * 20
    plans.merger.close()


# The loop, whatever runs the tasks


@pytest.mark.nightly
def test_a_job_killed_midway_counts_all_once(world: World) -> None:
    refs = world.register("a", "b")
    world.ship_windows(refs, 4)
    plans = Plans(world, limits=BatchLimits(frames=5))
    for _ in range(3):
        plans.run_one()
    assert 0 < sum(world.store.consumed().values()) < sum(world.catalog.frames.last_positions().values())
    plans.restart()
    world.end(*refs)
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


def test_frames_that_were_dropped_and_never_applied_are_told_and_passed(world: World, ref: QueryRef) -> None:
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
    world.ship_windows(refs)
    (victim,) = world.catalog.frames.entries("a@1", 0, 1)
    path = world.log_dir / victim.segment
    data = bytearray(path.read_bytes())
    data[victim.offset + victim.length - 1] ^= 0xFF
    path.write_bytes(data)
    world.end(*refs)

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


@pytest.mark.slow
def test_applied_frames_leave_the_index_and_then_the_disk(world: World, ref: QueryRef) -> None:
    world.ship_windows([ref], 6)
    world.end(ref)
    before = len(list(world.log_dir.rglob("*.frames")))

    Plans(world, keep_frames_ms=0, limits=BatchLimits(frames=4)).run()

    assert world.catalog.frames.entries("a@1", 0, 1 << 40) == []
    assert len(list(world.log_dir.rglob("*.frames"))) < before
    assert world.answers() == world.truth
