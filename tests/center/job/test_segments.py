"""Large results: written by tasks, visible by the transaction that names them, and swept."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import pytest
from sqlalchemy import event

from center.job.delta_sweep import DeltaSweep
from center.job.merge_loop import MergeLoop
from center.results import ResultStore
from center.results.writes import MAX_SIDE_BY_SIDE
from center.storage import delta_segments
from center.storage.delta_segments import Delta, DeltaSegments
from center.storage.query_partition import ALL_QUERIES, QueryPartition
from edgewater.answers import Cause
from edgewater.model.query import QuerySpec
from edgewater.wire import QueryRef
from tests.center.job.conftest import World, spec
from tests.center.job.in_process_merger import InProcessMerger
from tests.center.job.plans import Failing, Plans
from tests.insides import engine_of

OWN = ALL_QUERIES.directory


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with closing(World(tmp_path)) as world:
        world.segments.inline_bytes = 0
        yield world


def names(world: World) -> set[str]:
    return {file.name for file in world.segments.files()}


def swept(world: World, job: Plans) -> set[str]:
    """The segments that are left after another sweep."""
    world.now += 1
    job.run()
    return names(world)


@pytest.mark.nightly
@pytest.mark.parametrize("is_sliding", [False, True])
@pytest.mark.parametrize("costly_ms", [0.0, 100.0])
def test_answers_from_segments_equal_the_truth_and_leave_nothing(
    world: World, is_sliding: bool, costly_ms: float
) -> None:
    changed = {"window": {"sliding": "2m", "every": "1m"}} if is_sliding else {}
    query = QuerySpec.from_mapping(spec("a").to_mapping() | changed)
    ref = world.catalog.queries.register(query, world.now)[0].ref
    job = Plans(world, costly_ms=costly_ms)
    for _ in range(2 * MAX_SIDE_BY_SIDE):
        world.ship_records(world.edges[0], ref, 0, ["/a", "/b"])
        job.run()
    assert {file.partition for file in world.segments.files()} == {OWN}
    with closing(sqlite3.connect(world.path / "results.db")) as connection:
        stored = connection.execute("SELECT segment, length(synopsis) FROM deltas").fetchall()
    assert {size for _, size in stored} == {0} and {name for name, _ in stored} == swept(world, job)
    world.end(ref)
    job.run()
    assert job.applier.set_aside == {}
    if not is_sliding:
        assert world.answers() == world.truth
    assert swept(world, job) == set()


@pytest.mark.parametrize("fault", ["missing", "damaged"])
@pytest.mark.parametrize("costly_ms", [0.0, 100.0])
def test_a_segment_that_is_lost_costs_its_query_only_the_records_in_it(
    world: World, fault: str, costly_ms: float
) -> None:
    evil, honest = world.register("evil", "honest")
    job = Plans(world, costly_ms=costly_ms)
    for ref in (evil, honest):
        for urls in (["/a"], ["/b", "/c"]):
            world.ship_records(world.edges[0], ref, 0, urls)
            job.run()
    with closing(sqlite3.connect(world.path / "results.db")) as connection:
        name, at = connection.execute("SELECT segment, segment_offset FROM deltas WHERE query = 'evil@1'").fetchone()
    path = world.segments.root / name
    if fault == "missing":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[at + 5] ^= 1
        path.write_bytes(data)
    for ref in (evil, honest):
        world.end(ref)
    job.run()
    answers = world.answers()
    assert {key: size for key, size in answers.items() if key[0] == honest} == {
        key: size for key, size in world.truth.items() if key[0] == honest
    }
    assert sum(answers.values()) == 5, "only the record in the segment is missing"
    record = world.store.latest(evil)
    assert record is not None and "partial-refused" in {loss.reason for loss in record.facts.by_cause(Cause.INPUT_LOST)}
    (alarm,) = world.catalog.alarms.latest(query="evil@1")
    assert alarm.kind == "partial-refused" and str(path) in alarm.message


def test_segments_that_cannot_be_read_at_the_moment_lose_nothing(world: World, ref: QueryRef) -> None:
    job = Plans(world)
    world.ship_records(world.edges[0], ref, 0, ["/a"])
    job.run()
    away = world.path / "unmounted"
    world.segments.root.rename(away)
    world.end(ref)
    with pytest.raises(Failing, match="cannot be read"):
        job.run()
    away.rename(world.segments.root)
    job.run()
    assert world.answers() == world.truth


def test_a_driver_that_ends_between_write_and_commit_leaves_what_the_next_one_sweeps(
    world: World, monkeypatch: pytest.MonkeyPatch, ref: QueryRef
) -> None:
    job = Plans(world)
    world.ship_records(world.edges[0], ref, 0, ["/a"])

    def die(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MergeLoop, "_apply", die)
        with pytest.raises(KeyboardInterrupt):
            job.run()
    orphans = names(world)
    assert len(orphans) == 1
    job.restart()
    job.run()
    assert len(names(world)) == 1 and names(world).isdisjoint(orphans)
    world.end(ref)
    job.run()
    assert world.answers() == world.truth


def test_a_leader_sweeps_what_nobody_can_name_any_more(world: World) -> None:
    store = ResultStore(world.results_url, segments=world.segments)
    for owner in ("old", "new"):
        assert store.take_lease(owner, store.lease(), 1000, world.now)
    own = f"{OWN}/{store.epoch}"
    swept, kept = [f"{OWN}/1/7", f"{own}/6", f"{QueryPartition(1, 3).directory}/9/1"], [f"{own}/7", f"{OWN}/3/7"]
    for prefix in (*swept, *kept):
        world.segments.place(prefix, [Delta("a@1", 0, b"data")])
    world.segments.root.joinpath(own, "6-partly").write_bytes(b"")
    sweep = DeltaSweep(world.shared(store), every_ms=10, most_bytes=8)
    for n in range(2):  # a zombie writes after a sweep
        sweep.run(world.now + 100 * n, lambda plan: plan == 7)
        assert {name.rpartition("-")[0] for name in names(world)} == set(kept)
        world.segments.place(f"{OWN}/1/7", [Delta("a@1", 0, b"data")])
    sweep.run(world.now + 1_000, lambda plan: plan == 7)
    assert not sweep.is_full, "two results of four bytes"
    world.segments.place(f"{own}/7", [Delta("a@1", 0, b"data")])
    sweep.run(world.now + 1_001, lambda plan: plan == 7)
    assert not sweep.is_full, "it runs at intervals"
    sweep.run(world.now + 2_000, lambda plan: plan == 7)
    assert sweep.is_full
    sweep.run(world.now + 2_000, lambda _: False)
    assert not sweep.is_full and {name.rpartition("-")[0] for name in names(world)} == {kept[1]}
    store.close()


def test_above_the_most_unapplied_bytes_nothing_is_planned(world: World) -> None:
    first, second = world.register("first", "second")
    world.segments.place(f"{OWN}/1/7", [Delta("a@1", 0, b"of a newer leader")])
    job = Plans(world, most_unapplied_bytes=1)
    world.ship_records(world.edges[0], first, 0, ["/a"])
    with pytest.raises(Failing, match="are not applied; expected at most"):  # by the look after the first sweep
        job.run()
    world.ship_records(world.edges[0], second, 0, ["/b"])
    with pytest.raises(Failing):
        job.run()
    assert world.store.consumed() == {"first@1": 1} and job.applier.set_aside == {}
    world.segments.remove([file for file in world.segments.files() if file.epoch == 1])
    for ref in (first, second):
        world.end(ref)
    job.run()
    assert world.answers() == world.truth


def test_a_full_disk_pauses_planning_and_sets_nothing_aside(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    evil, honest = world.register("evil", "honest")
    job = Plans(world)
    for ref in (evil, honest):
        world.ship_records(world.edges[0], ref, 0, ["/a"])
        world.end(ref)

    def full(*_: Any) -> NoReturn:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(delta_segments, "write_file", full)
        for _ in range(4):
            with pytest.raises(Failing, match="No space left on device"):
                job.run()
    assert job.applier.set_aside == {} and world.catalog.quarantine.frames() == []
    job.run()
    assert world.answers() == world.truth


@pytest.mark.parametrize("costly_ms", [0.0, 100.0])
def test_tasks_that_are_run_twice_write_twice_and_count_once(world: World, costly_ms: float) -> None:
    """As repeated and speculative tasks, which the settings of a session may permit."""

    class Twice(InProcessMerger):
        def submit(self, *args: Any, **options: Any) -> Any:
            super().submit(*args, **options)
            return super().submit(*args, **options)

    a, b = world.register("a", "b")
    job = Plans(world, merger=Twice(world.task), costly_ms=costly_ms)
    for page in ("/a", "/b", "/c"):
        for ref in (a, b):
            world.ship_records(world.edges[0], ref, 0, [page])
        job.run()
        named = job.store.named_segments()[0]
        assert named and swept(world, job) == named, "the other attempts are not needed"
    for ref in (a, b):
        world.end(ref)
    job.run()
    assert world.answers() == world.truth and swept(world, job) == set()


def test_a_disk_that_is_full_at_the_driver_applies_nothing_and_sets_nothing_aside(tmp_path: Path) -> None:
    with closing(World(tmp_path)) as world:
        evil, honest = world.register("evil", "honest")
        job = Plans(world)
        for ref in (evil, honest):
            world.ship_records(world.edges[0], ref, 0, [f"/{n}" * 500 for n in range(50)])
            world.end(ref)

        def no_more_pages(connection: Any, _: object) -> None:
            (pages,) = connection.execute("PRAGMA page_count").fetchone()
            connection.execute(f"PRAGMA max_page_count = {pages}")

        engine = engine_of(job.store)
        event.listen(engine, "connect", no_more_pages)
        engine.dispose()
        for _ in range(4):
            with pytest.raises(Failing, match="full"):
                job.run()
        assert world.answers() == {} and world.store.consumed() == {}
        assert job.applier.set_aside == {} and world.catalog.quarantine.frames() == []
        event.remove(engine, "connect", no_more_pages)
        engine.dispose()
        job.run()
        assert world.answers() == world.truth


def test_the_segments_of_a_deleted_query_go(world: World, ref: QueryRef) -> None:
    job = Plans(world)
    world.ship_records(world.edges[0], ref, 0, ["/a"])
    job.run()
    assert names(world)
    world.catalog.queries.delete("a", world.now)
    job.writer.advance()
    assert swept(world, job) == set()


def test_large_deltas_that_the_database_of_0_3_has_are_merged_with_new_ones(world: World, ref: QueryRef) -> None:
    world.segments.inline_bytes = 1 << 20
    job = Plans(world, costly_ms=0.0)
    world.ship_records(world.edges[0], ref, 0, ["/a"])
    job.run()
    job.close()
    with closing(sqlite3.connect(world.path / "results.db")) as connection:
        connection.execute("DROP INDEX deltas_by_segment")
        for name in ("segment", "segment_offset", "segment_bytes", "segment_crc32c"):
            connection.execute(f"ALTER TABLE deltas DROP COLUMN {name}")
    world.segments.inline_bytes = 0
    job._open()
    world.ship_records(world.edges[0], ref, 0, ["/a", "/b"])
    world.end(ref)
    job.run()
    assert world.answers() == world.truth


def test_a_process_without_a_directory_of_segments_says_so(world: World) -> None:
    (placed,) = world.segments.place("1-of-1/1/1", [Delta("a@1", 0, b"data")])
    assert world.segments.read(placed.data) == b"data"
    with pytest.raises(Exception, match="no directory of segments"):
        DeltaSegments(None).read(placed.data)
