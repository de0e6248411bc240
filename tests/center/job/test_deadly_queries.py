"""Merged data that kill the driver: their query is set aside, the others go on, an operator tries it again."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy import delete, insert

from center.catalog import Catalog, SetAside, quarantine, schema
from center.job.job import MAX_DEATHS, Job
from center.job.loop_core import Released
from center.job.merge import MergeTask
from center.results import schema as t
from center.storage.database import write_transaction
from center.storage.delta_segments import DeltaSegments
from center.storage.progress import DriverProgress, Track, progress_path, read_progress
from center.storage.query_partition import QueryPartition
from edgewater.base.errors import NotFound
from edgewater.wire import QueryRef
from tests.center.job.conftest import World
from tests.center.job.in_process_merger import InProcessMerger
from tests.center.job.plans import Plans, deadly, install_deadly
from tests.insides import engine_of


def poison(world: World, ref: QueryRef, does: str = "") -> None:
    """Adds to the merged slices what no worker has to read again, and the driver has to merge."""
    row = {"query": f"{ref.name}@{ref.version}", "slice_start_ms": 0, "synopsis": deadly(does)}
    with write_transaction(engine_of(world.store)) as connection:
        connection.execute(insert(t.deltas).values(**row))


def drive(path: Path, catalog_url: str, results_url: str, now: int) -> None:
    """The job's driver, in a process of its own."""
    with closing(Catalog(catalog_url)) as catalog:
        segments = DeltaSegments(path / "log" / "deltas")
        disk = SimpleNamespace(
            catalog_url=catalog_url, results_url=results_url, log_dir=path / "log", catalog=catalog, clock=lambda: now,
            segments=segments, task=MergeTask(path / "log", segments),
        )  # fmt: skip
        Plans(disk, progress=DriverProgress(path / "progress")).run()


def start(world: World) -> Job:
    """A driver begins to lead."""
    job = Job(world.config, clock=world.clock)
    job._begin_term()
    job._progress.close()
    return job


def die_of(world: World, key: str) -> Job:
    """A start of the job, after a driver that was killed while it worked on a query."""
    dead = DriverProgress(world.path / "progress")
    dead.enter(Track.LEDGER, key)
    dead._release()
    return start(world)


@pytest.mark.slow
def test_a_query_whose_answer_kills_the_driver_is_set_aside_and_the_others_go_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(world.path / "plugins")
    install_deadly(world.path / "plugins")
    evil, honest = world.register("evil", "honest")
    for ref in (evil, honest):
        world.ship_records(world.edges[0], ref, 0, ["/a"])
    Plans(world).run()
    poison(world, evil)
    world.end(evil)
    driver = multiprocessing.get_context("spawn").Process(
        target=drive, args=(world.path, world.catalog_url, world.results_url, world.now)
    )
    driver.start()
    driver.join()
    assert driver.exitcode == -signal.SIGSEGV
    assert driver.pid is not None
    found = read_progress(progress_path(world.path / "progress", driver.pid))
    assert found[Track.LEDGER].query == "evil@1"

    start(world)
    for _ in range(2, MAX_DEATHS):
        assert world.catalog.quarantine.queries() == {}, "it may be chance"
        die_of(world, "evil@1")
    assert world.catalog.quarantine.queries() == {}, "it may be chance"
    job = die_of(world, "evil@1")
    (set_aside,) = world.catalog.quarantine.queries().values()
    assert (set_aside.query, set_aside.state, set_aside.deaths) == (evil, SetAside.QUARANTINED, MAX_DEATHS)
    assert "died 3 times" in set_aside.reason
    (alarm,) = world.catalog.alarms.latest(query="evil@1")
    assert alarm.kind == "query-quarantined"
    assert job.metrics.registry.get_sample_value("edgewater_job_set_aside_queries", {"state": "quarantined"}) == 1
    assert world.store.consumed() == {"evil@1": 1, "honest@1": 1}

    restarted = Plans(world)
    restarted.applier.leave_out("evil@1", SetAside.QUARANTINED)
    world.end(honest)
    restarted.run()
    world.truth.pop((evil, 0, "/a"))
    assert world.answers() == world.truth
    assert world.store.consumed()["evil@1"] == 1, "its frames are kept"


@pytest.mark.slow
def test_a_query_that_is_tried_again_gets_all_its_frames(world: World) -> None:
    evil, honest = world.register("evil", "honest")
    job = Plans(world)
    job.applier.leave_out("evil@1", SetAside.QUARANTINED)
    for ref in (evil, honest):
        world.ship_records(world.edges[0], ref, 0, ["/a"])
        world.end(ref)
    world.now += 10_000
    job.run()
    assert {ref for ref, *_ in world.answers()} == {honest}
    job.applier.release("evil@1")
    job.loop.handle(Released("evil@1"))
    job.run()
    assert world.answers() == world.truth


def test_an_operator_tries_a_query_again_that_was_not_to_blame(world: World, ref: QueryRef) -> None:
    world.ship_records(world.edges[0], ref, 0, ["/a"])
    world.end(ref)
    for _ in range(MAX_DEATHS):
        job = die_of(world, "a@1")
    assert job.applier.set_aside == {"a@1": SetAside.QUARANTINED}
    world.catalog.quarantine.retry_query("a")
    job.release_queries(job.loop_over(InProcessMerger(world.task)))
    assert job.applier.set_aside == {}
    die_of(world, "a@1")
    assert world.catalog.quarantine.queries() == {}, "its deaths are forgotten"
    Plans(world).run()
    assert world.answers() == world.truth
    with pytest.raises(NotFound):
        world.catalog.quarantine.retry_query("a")


def test_deaths_that_are_far_apart_and_deleted_queries_count_for_nothing(world: World) -> None:
    a, b = world.register("a", "b")
    assert [world.catalog.quarantine.count_death(a, at) for at in (0, 1000, quarantine.FORGET_MS + 2000)] == [1, 2, 1]
    world.catalog.quarantine.count_death(b, 0)
    world.catalog.quarantine.set_query_aside(b, SetAside.QUARANTINED, "odd", 1)
    world.catalog.queries.delete("b", 2)
    assert world.catalog.quarantine.queries() == {}
    die_of(world, "b@1")
    die_of(world, "gone@7")
    assert world.catalog.quarantine.queries() == {}
    with write_transaction(engine_of(world.catalog)) as connection:
        assert connection.execute(delete(schema.set_aside_queries)).rowcount == 1


def test_what_a_dead_process_leaves_is_taken_once_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    progress = DriverProgress(tmp_path)
    progress.enter(Track.LEDGER, "a@1")
    progress_path(tmp_path, 1 << 30).write_bytes(progress_path(tmp_path, os.getpid()).read_bytes())
    living = (tmp_path / "1.progress").open("w+b")
    living.write(progress_path(tmp_path, os.getpid()).read_bytes())
    living.flush()
    fcntl.flock(living, fcntl.LOCK_EX)
    assert progress.take_left() == ["a@1"] and progress.take_left() == []
    assert progress_path(tmp_path, os.getpid()).stat().st_mode & 0o777 == 0o600
    living.close()
    assert progress.take_left() == ["a@1"]


def test_what_a_dead_driver_leaves_is_taken_by_the_next_one_of_its_partition(tmp_path: Path) -> None:
    halves = QueryPartition.all(2)
    keys = [next(f"q{n}@1" for n in range(9) if f"q{n}@1" in half) for half in halves]
    progress = DriverProgress(tmp_path)
    for number, key in enumerate(keys):
        progress.enter(Track.LEDGER, key)
        progress_path(tmp_path, (1 << 30) + number).write_bytes(progress_path(tmp_path, os.getpid()).read_bytes())
    progress.step(Track.LEDGER)

    # Both partitions have a new driver at the same time: neither takes what is the other's.
    assert progress.take_left(halves[1]) == [keys[1]]
    assert progress.take_left(halves[1]) == []
    assert progress.take_left(halves[0]) == [keys[0]]


def test_a_file_of_progress_has_its_place_on_the_disk_from_the_beginning(tmp_path: Path) -> None:
    """Otherwise a driver that starts while the disk is full is ended by SIGBUS, without a message."""
    progress = DriverProgress(tmp_path)
    assert progress_path(tmp_path, os.getpid()).stat().st_blocks > 0
    progress.close()


def test_a_process_that_ends_as_it_should_leaves_nothing_and_a_torn_file_says_nothing(tmp_path: Path) -> None:
    progress = DriverProgress(tmp_path)
    progress.enter(Track.FUNCTIONS, "a@1")
    progress.close()
    assert list(tmp_path.iterdir()) == []
    progress_path(tmp_path, 1 << 30).write_bytes(b"torn")
    again = DriverProgress(tmp_path)
    again.enter(Track.LEDGER, "b@1")
    again._release()  # it dies, and its successor has the same process id, as in a container
    assert DriverProgress(tmp_path).take_left() == ["b@1"]
