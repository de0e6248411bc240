"""Frames that the job cannot apply cost their own data only, through the production batch path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from center.catalog import SetAside
from center.job import batch_applier, merge
from center.job.loop_core import DEATHS, MAX_CULPRITS, Fault, Lane
from center.job.merge import Skipped, SlicePartial
from center.job.merger import TasksFailed
from center.ledger.window_book import WindowBook
from edgewater.answers import Cause
from edgewater.base.errors import StorageError
from edgewater.model.query import QuerySpec
from edgewater.synopses import GroupedAggregate
from edgewater.synopses.encoding import codec
from edgewater.wire import FrameBody, InputLoss, Partial, QueryRef, SliceClose
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage
from tests.center.job.conftest import COLUMNS, World, synopsis
from tests.center.job.plans import Failing, Plans
from tests.center.kept_frames import read_frame

U64 = (1 << 64) - 1


@pytest.fixture
def job(world: World) -> Iterator[Plans]:
    job = Plans(world)
    yield job
    job.close()


def body(*partials: bytes, through_ms: int = 0, closes: tuple[SliceClose, ...] = ()) -> FrameBody:
    return FrameBody(through_ms, tuple(Partial(0, partial) for partial in partials), closes)


def changed(change: Callable[[SynopsisMessage], None]) -> bytes:
    message = codec.unseal(synopsis(["/evil"], [1_000]))
    change(message)
    return codec.seal(message)


def end(world: World, *refs: QueryRef) -> None:
    world.end(*refs)


def losses(world: World, ref: QueryRef, start_ms: int = 0) -> set[tuple[str, str]]:
    """(edge, reason) of the losses that the final answer to a window states."""
    (record,) = world.store.windows(ref, start_ms, start_ms + 1, 1)[0]
    return {(loss.edge, loss.reason) for loss in record.facts.by_cause(Cause.INPUT_LOST)}


def alarms(world: World) -> set[tuple[str, str]]:
    return {(a.kind, str(a.edge)) for a in world.catalog.alarms.latest()}


# Partials that cannot be read or merged


def nested(message: SynopsisMessage) -> None:
    message.parts[0].parameters = "[" * 100_000


def long_integer(message: SynopsisMessage) -> None:
    message.parts[0].parameters = "9" * 5_000


def huge_dimension(message: SynopsisMessage) -> None:
    array = message.parts[0].arrays[0]
    array.shape[:] = [0, 1 << 62]
    array.data = b""


def table_of_keys(message: SynopsisMessage) -> None:
    message.arrays[0].CopyFrom(codec.encode(np.zeros((2, 2), np.int64)))


@pytest.mark.parametrize("change", [nested, long_integer, huge_dimension, table_of_keys])
@pytest.mark.slow
def test_a_partial_that_no_merge_takes_costs_itself(
    world: World, job: Plans, change: Callable[[SynopsisMessage], None]
) -> None:
    ref, other = world.register("a", "b")
    evil, honest, third = world.edges
    close = (SliceClose(0, 2, 0),)
    world.ship(evil, ref, body(changed(change)))
    world.ship(evil, ref, body(changed(change), through_ms=1000, closes=close))
    world.ship(honest, ref, body(synopsis(["/a"], [1])))
    world.ship_window(other, 0)
    job.run()
    world.ship(honest, ref, body(synopsis(["/b"], [2]), through_ms=1000, closes=close))
    world.ship(third, ref, body(synopsis(["/a"], [4]), through_ms=1000, closes=(SliceClose(0, 1, 0),)))
    end(world, ref, other)
    job.run()

    answers = world.answers()
    assert {url: n for (q, _, url), n in answers.items() if q == ref} == {"/a": 5, "/b": 2}
    assert {at: n for at, n in answers.items() if at[0] == other} == dict(world.truth)
    assert (str(evil), "partial-refused") in losses(world, ref)
    assert "partial-refused" in {kind for kind, _ in alarms(world)}
    assert not job.applier.set_aside and world.catalog.quarantine.frames() == []


MEASURES = {
    "n": "count()", "total": "sum(bytes)", "most": "max(bytes)", "mean": "mean(bytes)", "urls": "distinct(url)",
    "quantiles": "quantiles(bytes)", "kll": "kll(bytes)", "top": "top_k(url, 5)", "counts": "count_min(url)",
    "sample": "reservoir(bytes, 10)",
}  # fmt: skip


def other_rank(message: SynopsisMessage) -> None:
    for array in message.arrays:
        array.shape.append(1)


def negative_dimension(message: SynopsisMessage) -> None:
    message.arrays[0].shape[:] = [(1 << 64) - 1]


def no_data(message: SynopsisMessage) -> None:
    for array in message.arrays:
        array.data = b""


@pytest.mark.slow
def test_no_kind_of_synopsis_takes_more_than_its_own_partial_with_it(world: World, job: Plans) -> None:
    query = {"name": "a", "from": "downloads", "group_by": ["url"], "measures": MEASURES, "window": {"tumbling": "1s"}}
    ref = world.catalog.queries.register(QuerySpec.from_mapping(query), world.now)[0].ref
    bound = QuerySpec.from_mapping(query).bind(COLUMNS)
    types = {m.measure.name: m.argument.type if m.argument else None for m in bound.measures}
    makes = {m.measure.name: m.measure.stack(types[m.measure.name]) for m in bound.measures}
    grouped = GroupedAggregate({"url": pa.string()}, makes)
    urls, sizes = pa.array(["/a", "/b"]), pa.array([1, 2], pa.int64())
    values = {name: None if type_ is None else urls if type_ == pa.string() else sizes for name, type_ in types.items()}
    grouped.update([urls], values, 2, times=np.arange(2), ids=np.arange(2))
    good, evil, honest = grouped.to_bytes(), *world.edges[:2]
    world.ship(honest, ref, body(good))
    bad = 0
    for part in range(len(MEASURES)):
        for change in (other_rank, negative_dimension, no_data, nested_own, long_own):
            message = codec.unseal(good)
            with suppress(IndexError, ValueError):  # a kind without arrays; a dimension that protobuf refuses
                change(message.parts[part])
                world.ship(evil, ref, body(codec.seal(message)))
                bad += 1
    world.ship(honest, ref, body(good))
    end(world, ref)
    job.run()
    assert bad > 4 * len(MEASURES)
    (record,) = world.store.windows(ref, 0, 1, 1)[0]
    assert record.synopsis is not None
    merged = GroupedAggregate.from_bytes(record.synopsis)
    assert dict(zip(merged.rows()[0].to_pylist(), merged.query("n").value, strict=True)) == {"/a": 2, "/b": 2}
    assert losses(world, ref) == {(str(evil), "partial-refused")}
    assert not job.applier.set_aside and world.catalog.quarantine.frames() == []


def nested_own(message: SynopsisMessage) -> None:
    message.parameters = "[" * 100_000


def long_own(message: SynopsisMessage) -> None:
    message.parameters = "9" * 5_000


@pytest.mark.slow
def test_a_frame_of_many_faults_raises_few_alarms_and_few_series(world: World, job: Plans, ref: QueryRef) -> None:
    """Each alarm is a transaction of the driver, for which all queries wait."""
    evil, *_ = world.edges
    bad = tuple(Partial(n * 1000, changed(long_integer)) for n in range(100))
    stated = tuple(InputLoss("file", f"made-up-{n}", 0, 1) for n in range(100))
    world.ship(evil, ref, FrameBody(0, bad, losses=stated))
    job.run()
    assert job.counted("skipped", kind="partial-refused") == 100
    assert job.counted("input_losses", reason="other") == 100
    raised = world.catalog.alarms.latest()
    assert {a.kind for a in raised} == {"partial-refused", "input-lost"}
    assert sum(a.times for a in raised) == 2 * batch_applier.MAX_ALARMS
    assert sum("and 80 more" in a.message for a in raised) == 2


def test_a_query_that_lacks_memory_at_an_edge_has_an_alarm_of_its_own(world: World, job: Plans, ref: QueryRef) -> None:
    stated = tuple(InputLoss("memory", "query-memory", 2_000 * n, 2_000 * n + 1_000) for n in range(30))
    world.ship(world.edges[0], ref, FrameBody(0, losses=stated))
    job.run()
    (alarm,) = world.catalog.alarms.latest()
    assert (alarm.kind, alarm.edge, alarm.times) == ("query-memory", world.edges[0], 1)
    assert alarm.message.startswith(f"query {ref.name}@{ref.version}: edge") and "max_query_bytes" in alarm.message
    assert job.counted("input_losses", reason="query-memory") == 30


def test_partials_that_claim_more_records_than_can_be_counted_stop_nothing(world: World, job: Plans) -> None:
    (ref,) = world.register("a")
    message = codec.unseal(synopsis(["/a"], [1]))
    message.records = U64
    for edge in world.edges:
        world.ship(edge, ref, body(codec.seal(message)))
        job.run()
    world.ship_records(world.edges[0], ref, 1, ["/b"])
    end(world, ref)
    job.run()
    world.truth[ref, 0, "/a"] = 3
    assert world.answers() == world.truth


def test_a_partial_of_another_query_costs_itself_and_the_query_is_not_paused(world: World, job: Plans) -> None:
    (ref,) = world.register("a")
    evil, honest, _ = world.edges
    world.ship_records(honest, ref, 0, ["/a"])
    job.run()
    world.ship_foreign(evil, ref)
    world.ship_records(honest, ref, 1, ["/b"])
    end(world, ref)
    job.run()

    assert world.answers() == world.truth
    assert losses(world, ref) == {(str(evil), "partial-refused")}
    assert losses(world, ref, 1000) == set()
    assert not job.applier.set_aside
    assert job.counted("skipped", kind="partial-refused") == 1


# Frames that the driver cannot apply


def fault_of(monkeypatch: pytest.MonkeyPatch, evil: str, fault: Exception) -> None:
    """The ledger fails on frames of an edge that have closes: a fault that nobody has foreseen."""
    report = WindowBook.report

    def faulty(self: WindowBook, frames: Any, *rest: Any) -> Any:
        frames = list(frames)
        if any(f.edge == evil and f.closes for f in frames):
            raise fault
        return report(self, frames, *rest)

    monkeypatch.setattr(WindowBook, "report", faulty)


@pytest.mark.parametrize("fault", [ValueError("odd"), OverflowError("int too large")])
@pytest.mark.slow
def test_a_frame_that_the_driver_cannot_apply_is_quarantined_and_the_rest_counts(
    world: World, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    ref, other = world.register("a", "b")
    evil, *honest = world.edges
    fault_of(monkeypatch, evil, fault)
    for edge in honest * 3:
        world.ship_records(edge, other, 0, ["/x"])
    for n in range(8):
        world.ship(honest[n % 2], ref, body(synopsis([f"/{n}"], [1])))
    world.ship(evil, ref, body(synopsis(["/evil"], [1]), closes=(SliceClose(0, 1, 0),)))
    world.ship(evil, ref, body(synopsis(["/good"], [1])))
    job = Plans(world, keep_frames_ms=0)
    job.run()
    end(world, ref, other)
    job.run()

    answered = {url for query, _, url in world.answers() if query == ref}
    assert answered == {*(f"/{n}" for n in range(8)), "/good"}
    assert losses(world, ref) == {(str(evil), "frame-damaged")}
    assert losses(world, other) == set()
    (frame,) = world.catalog.quarantine.frames()
    assert (frame.key, frame.entry.position, frame.entry.edge) == ("a@1", 9, evil)
    assert frame.reason == f"{type(fault).__name__}: {fault}"
    assert alarms(world) == {("frame-quarantined", str(evil))}
    assert job.counted("skipped", kind="frame-quarantined") == 1
    stored = read_frame(world.log, frame.entry.segment, frame.entry.offset, frame.entry.length)
    assert stored.partials[0].slice_start_ms == 0, "its bytes are kept"
    job.close()


def test_a_quarantined_frame_is_a_loss_for_a_job_that_has_lost_its_store(
    world: World, monkeypatch: pytest.MonkeyPatch, ref: QueryRef
) -> None:
    evil, *_ = world.edges
    with monkeypatch.context() as patch:
        fault_of(patch, evil, ValueError("odd"))
        world.ship(evil, ref, body(synopsis(["/evil"], [1]), closes=(SliceClose(0, 1, 0),)))
        first = Plans(world)
        first.run()
        first.close()
    world.lose_results()
    end(world, ref)
    again = Plans(world)
    again.run()
    assert world.all_consumed()
    assert len(world.catalog.quarantine.frames()) == 1, "not again"
    assert sum(a.times for a in world.catalog.alarms.latest()) == 1
    again.close()


@pytest.mark.parametrize("fault", [StorageError("no space left"), OSError(28, "no space left")])
def test_a_failure_that_is_not_a_frames_fault_quarantines_nothing(
    world: World, job: Plans, monkeypatch: pytest.MonkeyPatch, fault: Exception, ref: QueryRef
) -> None:
    world.ship_window(ref, 0)
    with monkeypatch.context() as patch:
        fault_of(patch, world.edges[0], fault)
        for _ in range(3):
            with pytest.raises(Failing, match="no space left"):
                job.run()
    assert world.catalog.quarantine.frames() == [] and world.store.consumed() == {}
    job.run()
    assert job.loop.core.problem == ""
    end(world, ref)
    job.run()
    assert world.answers() == world.truth


@pytest.mark.slow
def test_frames_of_several_edges_that_fail_one_after_the_other_are_not_to_blame(
    world: World, job: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref, other = world.register("a", "b")
    report = WindowBook.report

    def broken(self: WindowBook, frames: Any, *rest: Any) -> Any:
        frames = list(frames)
        if self.state.query.ref == ref and any(f.touched for f in frames):
            raise ValueError("the query's own state is broken")
        return report(self, frames, *rest)

    monkeypatch.setattr(WindowBook, "report", broken)
    for window in range(3):
        world.ship_window(ref, window)
        world.ship_window(other, window)
    end(world, other)
    job.run()
    assert len(world.catalog.quarantine.frames()) <= MAX_CULPRITS
    assert job.applier.set_aside == {"a@1": SetAside.PAUSED}
    assert ("query-paused", "") in alarms(world)
    assert {at: n for at, n in world.answers().items() if at[0] == other} == {
        at: n for at, n in world.truth.items() if at[0] == other
    }


@pytest.mark.slow
def test_many_poison_frames_do_not_keep_the_other_queries_waiting(
    world: World, job: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref, other = world.register("a", "b")
    evil, honest, _ = world.edges
    fault_of(monkeypatch, evil, ValueError("odd"))
    for n in range(18):
        world.ship(evil, ref, body(synopsis([f"/{n}"], [1]), closes=(SliceClose(0, n + 1, 0),)))
    world.ship_records(honest, other, 0, ["/a"])
    job.run_one()
    assert world.store.consumed() == {"b@1": world.positions_of(other)}, "of the first plan, what can be applied"
    while world.store.consumed().get("a@1", 0) < 2:
        job.run_one()
    world.ship_records(honest, other, 1, ["/b"])
    for _ in range(3):
        job.run_one()
    assert world.store.consumed()["b@1"] == world.positions_of(other), "the suspects have a lane of their own"
    assert world.store.consumed()["a@1"] < world.positions_of(ref)
    job.run()
    assert world.all_consumed() and len(world.catalog.quarantine.frames()) == 18
    assert not job.applier.set_aside, "one edge cannot pause a query"


# A query whose state cannot take the time


@pytest.mark.slow
def test_a_query_that_time_cannot_advance_does_not_stop_the_others(
    world: World, job: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref, other = world.register("a", "b")
    emit_due = WindowBook.emit_due

    def broken(self: WindowBook, now_ms: int, *dirty: Any) -> Any:
        if self.state.query.ref == ref:
            raise ZeroDivisionError("the query's own state is broken")
        return emit_due(self, now_ms, *dirty)

    monkeypatch.setattr(WindowBook, "emit_due", broken)
    world.ship_window(other, 0)
    end(world, other)
    job.run()
    job.restart()
    job.writer.advance()
    assert {at[0] for at in world.answers()} == {other}
    assert ("query-failing", "") in alarms(world)
    times = sum(a.times for a in world.catalog.alarms.latest())
    job.writer.advance()
    assert sum(a.times for a in world.catalog.alarms.latest()) == times, "not again before its time"
    monkeypatch.setattr(WindowBook, "emit_due", emit_due)
    world.now += 61_000
    world.ship_window(ref, 0)
    end(world, ref)
    job.run()
    job.writer.advance()
    assert world.answers() == world.truth
    assert ("query-failing", "") not in alarms(world), "it works again"


# Frames that kill the process that reads them


@pytest.mark.parametrize("lone", [False, True])
def test_a_frame_that_kills_workers_is_quarantined_and_the_rest_counts(world: World, lone: bool) -> None:
    ref, other = world.register("a", "b")
    evil, honest, _ = world.edges
    if not lone:
        world.ship_records(honest, ref, 0, ["/a"])
    world.ship(evil, ref, body(synopsis(["/evil"], [1]), closes=(SliceClose(0, 1, 0),)))
    if not lone:
        world.ship_records(honest, ref, 0, ["/a", "/b"])
        world.ship_window(other, 0)
    job = Plans(world, kills=lambda part: any(key == "a@1" and entry.edge == evil for key, entry in part))
    job.run()
    (frame,) = world.catalog.quarantine.frames()
    assert (frame.key, frame.entry.edge, frame.reason) == ("a@1", evil, "a worker was ended by SIGSEGV")
    assert world.all_consumed()
    assert job.merger.submitted.count((Lane.SUSPECT, 1)) >= DEATHS
    job = Plans(world)
    end(world, ref, other)
    job.run()
    assert world.answers() == world.truth
    assert lone or losses(world, ref) == {(str(evil), "frame-damaged")}
    assert not job.applier.set_aside


def test_queries_go_on_while_the_frame_that_kills_workers_is_searched(world: World) -> None:
    *others, ref = world.register(*(f"q{n}" for n in range(9)))
    evil, honest, _ = world.edges
    for number in range(8):
        world.ship_records(evil if number == 5 else honest, ref, 0, [f"/{number}"])
    for other in others:
        world.ship_records(honest, other, 0, ["/a"])
    job = Plans(world, kills=lambda part: any(entry.edge == evil for _, entry in part))
    job.run_one()
    for other in others:
        world.ship_records(honest, other, 1, ["/b"])
    while not all(world.store.consumed().get(f"{o.name}@1") == 2 for o in others):
        job.run_one()
    assert not world.all_consumed() and not world.catalog.quarantine.frames()
    job.run()
    (frame,) = world.catalog.quarantine.frames()
    assert (frame.key, frame.entry.position) == ("q8@1", 6)


def test_no_frame_is_blamed_while_workers_die_without_frames_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    (ref,) = world.register("a")
    world.ship_window(ref, 0)
    starved = True
    job = Plans(world, kills=lambda _: starved)
    probe = job.merger.probe

    def dies() -> Future[None]:
        done: Future[None] = Future()
        done.set_exception(TasksFailed(Fault.FRAMES, "killed"))
        return done if starved else probe()

    monkeypatch.setattr(job.merger, "probe", dies)
    for _ in range(3 * DEATHS):
        with pytest.raises(Failing, match="SIGSEGV"):
            job.run()
    starved = False
    end(world, ref)
    job.run()
    assert world.answers() == world.truth
    assert world.catalog.quarantine.frames() == []


def test_frames_that_do_not_fit_into_memory_together_are_merged_in_smaller_plans(
    world: World, job: Plans, monkeypatch: pytest.MonkeyPatch, ref: QueryRef
) -> None:
    world.ship_windows([ref], 3)
    end(world, ref)
    merge_partials = merge.merge_partials

    def short(partials: Sequence[SlicePartial]) -> tuple[list[SlicePartial], list[Skipped]]:
        if len(partials) > 2:
            raise MemoryError
        return merge_partials(partials)

    monkeypatch.setattr(merge, "merge_partials", short)
    job.run()
    assert world.answers() == world.truth
    assert world.catalog.quarantine.frames() == [] and alarms(world) == set()
