"""The planner, and the frames that tasks read, without Spark."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from center.catalog import LastPositions, frame_index
from center.job.admission import BatchLimits
from center.job.coalescing import MANY_QUERIES
from center.job.loop_core import Look, Looked, Run, positions_of
from center.job.merge import Frame, PartMerged, SkipKind, StorageFailed
from center.job.planner import HEAVY_BYTES, FramePlanner, divide
from center.storage.frame_log import FrameEntry
from center.storage.query_partition import ALL_QUERIES, QueryPartition
from edgewater.base.streams import EdgeId
from edgewater.guard.frame_work import BYTES_PER_UNIT
from edgewater.model.registered_query import query_key
from edgewater.wire import FrameBody, QueryRef

NOTHING: frozenset[str] = frozenset()


class Planning:
    """A planner over a world, whose clock goes on when the planner asks to be called again."""

    def __init__(
        self,
        world: Any,
        limits: BatchLimits = BatchLimits(),  # noqa: B008
        heavy_bytes: int = HEAVY_BYTES,
    ) -> None:
        self.now_s, self.partition = 0.0, ALL_QUERIES
        self.planner = FramePlanner(
            world.catalog, world.store.consumed, limits, lambda: self.now_s, partition=lambda: self.partition,
            heavy_bytes=heavy_bytes,
        )  # fmt: skip

    def look(self, after: dict[str, int] | None = None, without: frozenset[str] = NOTHING) -> Looked:
        while (looked := self.planner.look(Look(after, without))).again_s is not None:
            self.now_s = looked.again_s
        return looked

    def run(self, after: dict[str, int] | None = None, without: frozenset[str] = NOTHING) -> Run | None:
        return self.look(after, without).run


@pytest.fixture
def planning(world: Any) -> Planning:
    return Planning(world)


def positions(run: Run | None) -> dict[str, list[int]]:
    assert run is not None
    spans = positions_of(run.frames)
    return {key: [n for a, t in each for n in range(a + 1, t + 1)] for key, each in spans.items()}


def frames_of_world(world: Any) -> list[Frame]:
    last = world.catalog.frames.last_positions()
    return [(key, entry) for key, end in last.items() for entry in world.catalog.frames.entries(key, 0, end)]


@pytest.mark.slow
def test_all_frames_are_planned_once_in_plans_of_any_size(world: Any) -> None:
    refs = world.register("b", "a")
    world.ship_windows(refs, 3)
    planning, after, planned = Planning(world, BatchLimits(frames=5)), dict[str, int](), list[Frame]()
    while (run := planning.run(after)) is not None:
        assert len(run.frames) <= 5 and all(after.get(key, 0) == at for key, at in run.after.items())
        planned += run.frames
        after |= run.through
    assert after == world.catalog.frames.last_positions()
    every = Run(tuple(sorted(planned, key=lambda frame: (frame[0], frame[1].position))), {}, after)
    assert positions(every) == {"a@1": list(range(1, 19)), "b@1": list(range(1, 19))}


def test_without_positions_those_of_the_result_store_count(world: Any, planning: Planning, ref: QueryRef) -> None:
    world.ship_window(ref, 0)
    looked = planning.look()
    assert (looked.applied, positions(looked.run)) == ({}, {"a@1": [1, 2, 3, 4, 5, 6]})
    assert planning.look({"a@1": 4}).applied is None
    assert positions(planning.run({"a@1": 4})) == {"a@1": [5, 6]}


def test_queries_that_are_left_out_are_not_planned(world: Any, planning: Planning) -> None:
    for ref in world.register("a", "b"):
        world.ship_window(ref, 0)
    assert positions(planning.run({}, frozenset({"a@1"}))).keys() == {"b@1"}
    assert planning.run({}, frozenset({"a@1", "b@1"})) is None
    assert positions(planning.run({})).keys() == {"a@1", "b@1"}


def test_positions_that_the_index_does_not_have_are_planned_without_frames(world: Any, planning: Planning) -> None:
    (ref,) = world.register("a")
    world.ship_window(ref, 0)
    world.catalog.frames.drop({"a@1": 6})
    run = planning.run()
    assert run == Run((), {"a@1": 0}, {"a@1": 6})


def test_a_plan_waits_a_moment_for_an_edge_that_spoke_before_and_then_goes_on_without(
    world: Any, planning: Planning, ref: QueryRef
) -> None:
    world.ship_window(ref, 0)
    first = planning.run({})
    assert first is not None
    world.ship(world.edges[0], ref, FrameBody(5))
    at_s = planning.now_s
    assert planning.run(dict(first.through)).through == world.catalog.frames.last_positions()  # type: ignore[union-attr]
    assert planning.now_s > at_s


@pytest.mark.slow
def test_the_next_group_commit_of_many_queries_that_close_together_is_in_the_same_plan(
    world: Any, planning: Planning, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = world.register(*(f"q{n:02}" for n in range(MANY_QUERIES + 8)))
    commits, polled = [refs[:MANY_QUERIES], refs[MANY_QUERIES:]], world.catalog.frames.last_positions_since

    def next_commit(known: LastPositions | None) -> LastPositions:
        for ref in commits.pop(0) if commits else ():
            world.ship(world.edges[0], ref, FrameBody(5))
        return polled(known)  # type: ignore[no-any-return]

    monkeypatch.setattr(world.catalog.frames, "last_positions_since", next_commit)
    assert len(positions(planning.run({}))) == len(refs)


@pytest.mark.slow
def test_the_first_frame_of_queries_that_close_together_waits_for_the_others(
    world: Any, planning: Planning, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway commits the first frame after a pause at once, and wakes the driver."""
    refs = world.register(*(f"q{n:02}" for n in range(MANY_QUERIES + 8)))
    for ref in refs:
        world.ship(world.edges[0], ref, FrameBody(5))
    after = dict(planning.run({}).through)  # type: ignore[union-attr]
    commits, polled = [refs[:1], refs[1:]], world.catalog.frames.last_positions_since

    def next_commit(known: LastPositions | None) -> LastPositions:
        for ref in commits.pop(0) if commits else ():
            world.ship(world.edges[0], ref, FrameBody(6))
        return polled(known)  # type: ignore[no-any-return]

    monkeypatch.setattr(world.catalog.frames, "last_positions_since", next_commit)
    planning.now_s += 1.0
    assert len(positions(planning.run(after))) == len(refs)


def test_a_look_without_news_reads_no_positions(
    world: Any, planning: Planning, monkeypatch: pytest.MonkeyPatch, ref: QueryRef
) -> None:
    world.ship_window(ref, 0)
    at = dict(planning.run({}).through)  # type: ignore[union-attr]
    read, reads = frame_index.select_last_positions, list[int]()

    def counted(connection: Any) -> dict[str, int]:
        reads.append(1)
        return read(connection)

    monkeypatch.setattr(frame_index, "select_last_positions", counted)
    assert [planning.run(at) for _ in range(5)] == [None] * 5
    assert not reads
    world.ship_window(ref, 1)
    assert planning.run(at).through == world.catalog.frames.last_positions()  # type: ignore[union-attr]


def test_a_driver_plans_the_queries_of_its_partition(world: Any, planning: Planning) -> None:
    halves = QueryPartition.all(2)
    refs = world.register(*(next(f"q{n}" for n in range(9) if f"q{n}@1" in half) for half in halves))
    world.ship_windows(refs)
    for half, ref in zip(halves, refs, strict=True):
        planning.partition = half
        assert positions(planning.run({})).keys() == {query_key(ref)}


# What tasks read


def test_a_damaged_frame_costs_itself(world: Any, ref: QueryRef) -> None:
    world.ship_window(ref, 0)
    frames = frames_of_world(world)
    victim = frames[2][1]
    path = world.log_dir / victim.segment
    data = bytearray(path.read_bytes())
    data[victim.offset + victim.length // 2] ^= 0xFF
    path.write_bytes(data)
    frames[4] = "a@1", pointing_at(frames[4][1], frames[5][1])

    merged = world.task.merge("1-of-1/0/1", frames)

    assert isinstance(merged, PartMerged)
    assert [(s.kind, s.position) for s in merged.skipped] == [(SkipKind.DAMAGED, 3), (SkipKind.DAMAGED, 5)]
    assert "CRC32C" in merged.skipped[0].reason and "the index says" in merged.skipped[1].reason
    assert len(merged.deltas) == 1


def pointing_at(entry: FrameEntry, other: FrameEntry) -> FrameEntry:
    """An entry with the place of another frame's record."""
    return replace(entry, segment=other.segment, offset=other.offset, length=other.length)


def test_a_lost_segment_is_damage_but_a_log_that_is_not_there_is_not(world: Any) -> None:
    refs = world.register("a", "b")
    world.ship_windows(refs)
    frames = frames_of_world(world)
    for segment in {entry.segment for key, entry in frames if key == "a@1"}:
        (world.log_dir / segment).unlink()
    lost = world.task.merge("1-of-1/0/1", frames)
    assert isinstance(lost, PartMerged) and {s.key for s in lost.skipped} == {"a@1"}
    world.log_dir.rename(Path(world.path / "unmounted"))
    unmounted = world.task.merge("1-of-1/0/1", frames)
    assert isinstance(unmounted, StorageFailed) and "cannot be read" in unmounted.reason


# Heavy queries


def test_a_query_with_much_work_per_window_is_a_plan_of_its_own_unless_it_is_alone(world: Any) -> None:
    (heavy,) = world.register("heavy")
    for _ in range(6):
        world.ship_records(world.edges[0], heavy, 0, ["/a"])
    sizes = [max(e.plain_bytes, e.work * BYTES_PER_UNIT) for _, e in frames_of_world(world)]
    planning = Planning(world, heavy_bytes=sum(sizes) - 1)
    assert planning.look({}).heavy == () and planning.run({}) is not None, "it has all cores"
    (light, behind) = world.register("light", "behind")
    world.ship_records(world.edges[0], light, 0, ["/a"])
    for window in range(6):  # as much as the heavy query, of many windows
        world.ship_records(world.edges[0], behind, window, ["/a"])
    looked = planning.look({})
    assert [list(run.through) for run in looked.heavy] == [["heavy@1"]]
    assert positions(looked.run).keys() == {"light@1", "behind@1"}
    none = planning.planner.look(Look({}, NOTHING, heavy=0))
    assert none.heavy == () and positions(none.run).keys() == {"light@1", "behind@1"}, "it waits for its turn"


def test_a_heavy_plan_is_limited_too(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    refs = world.register("heavy", "light")
    world.ship_windows(refs)
    monkeypatch.setattr("center.job.planner.HEAVY_PLAN_BYTES", 1)
    planning = Planning(world, heavy_bytes=1)
    assert [dict(run.through) for run in planning.look({}).heavy] == [{"heavy@1": 1}, {"light@1": 1}]


# Parts


def frames_of(*sizes: int) -> list[Frame]:
    ref = QueryRef("a", 1)
    return [("a@1", FrameEntry(ref, i, EdgeId("e"), "i1", i, 0, "s", 0, n, n, 0)) for i, n in enumerate(sizes, 1)]


def test_a_small_plan_is_one_task() -> None:
    assert [len(part) for part in divide(frames_of(*[1000] * 50), 8)] == [50]


def test_a_large_plan_is_cut_into_runs_of_about_equal_bytes() -> None:
    frames = frames_of(*[1 << 20] * 40)

    parts = divide(frames, 4)

    assert [len(part) for part in parts] == [10, 10, 10, 10]
    assert [frame for part in parts for frame in part] == frames


def test_a_plan_is_cut_by_the_work_of_its_frames_however_small_they_are_on_disk() -> None:
    small = frames_of(*[1000] * 8)
    compressed = [(key, replace(entry, plain_bytes=1 << 20)) for key, entry in small]
    costly = [(key, replace(entry, work=2_048)) for key, entry in small]

    for frames in (compressed, costly):
        assert [len(part) for part in divide(frames, 4)] == [2, 2, 2, 2]
