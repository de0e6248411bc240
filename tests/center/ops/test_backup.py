"""Backups of a center that is at work, their restoration, and stores that are not of one moment."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from center.catalog import Catalog, SessionStart
from center.config import CenterConfig
from center.ops import backup
from center.ops.backup import restore_backup, take_backup
from center.ops.supervisor import exclusive_lock
from center.results import ResultStore
from center.results.store_pair import require_pair
from center.sinks import SinkStore
from center.storage.delta_segments import Delta
from edgewater.__main__ import main
from edgewater.answers import Cause
from edgewater.base.errors import InvalidConfig, InvalidInput, StorageError
from edgewater.wire import QueryRef
from tests.cells import at_night
from tests.center.catalog_world import JFK, acked_through, begin_session, frame, hello, spec
from tests.center.job.conftest import World
from tests.center.job.plans import Plans
from tests.center.postgres import PostgresServer
from tests.center.results_world import answers_after
from tests.refusals import refused


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    (tmp_path / "data").mkdir()
    with contextlib.closing(World(tmp_path / "data")) as world:
        require_pair(world.catalog, world.store, 7)
        yield world


@pytest.fixture
def job(world: World) -> Iterator[Plans]:
    with contextlib.closing(Plans(world, keep_frames_ms=0)) as job:
        yield job


def config(directory: Path, database: str | None = None) -> CenterConfig:
    urls = {} if database is None else {"catalog_url": database, "results_url": database}
    return CenterConfig.model_validate({"data_dir": directory, **urls})


def silent(_: str) -> None: ...


def command(name: str, directory: Path, *arguments: object) -> Result:
    return CliRunner().invoke(main, ["center", name, "--data-dir", str(directory), *map(str, arguments)])


def given(store: ResultStore, ref: QueryRef) -> dict[tuple[int, int], tuple[str, Any]]:
    """All answers by window and revision."""
    return {
        (record.window_start_ms, record.revision): (record.phase.value, record.synopsis)
        for record in answers_after(store, 0, 10_000)
        if record.query == ref
    }


def pair(directory: Path) -> contextlib.ExitStack:
    """Opens the stores of a directory and compares them, as a start does."""
    stack = contextlib.ExitStack()
    catalog = stack.enter_context(contextlib.closing(Catalog(f"sqlite:///{directory}/catalog.db")))
    results = stack.enter_context(contextlib.closing(ResultStore(f"sqlite:///{directory}/results.db")))
    try:
        require_pair(catalog, results, 8)
    except InvalidConfig:
        stack.close()
        raise
    return stack


def copy_store(world: World, name: str, target: Path) -> None:
    """As an operator copies it, by the file's name, with its log."""
    target.mkdir(exist_ok=True)
    for path in world.path.glob(f"{name}*"):
        shutil.copy(path, target / path.name)


def put_store(source: Path, name: str, directory: Path) -> None:
    for path in directory.glob(f"{name}*"):
        path.unlink()
    for path in source.glob(f"{name}*"):
        shutil.copy(path, directory / path.name)


def restored_world(path: Path, world: World, database: str | None = None) -> World:
    """The restored center, to whose edges the same frames may be told."""
    again = World(path, database=database)
    again.truth, again.next_seq, again.now = world.truth, dict(world.next_seq), world.now
    for edge, seq in again.next_seq.items():
        record = again.catalog.edges.get(edge)
        start = SessionStart(edge, "i1", {}, record.streams, oldest_seq=seq, next_seq=seq, now_ms=again.now)
        begin_session(again.catalog, start)
    return again


@pytest.fixture(params=["sqlite", "postgresql"])
def shared_database(request: pytest.FixtureRequest) -> Callable[[], str | None]:
    """Makes a database for both stores of a center; None: SQLite, a file each."""
    if request.param == "sqlite":
        return lambda: None
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_database


@pytest.mark.slow
def test_a_backup_taken_while_frames_are_indexed_and_applied_is_of_one_moment_and_goes_to_either_database(
    tmp_path: Path, postgres: PostgresServer, shared_database: Callable[[], str | None]
) -> None:
    (tmp_path / "data").mkdir()
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(contextlib.closing(World(tmp_path / "data", database=shared_database())))
        world.segments.inline_bytes = 0
        require_pair(world.catalog, world.store, 7)
        job = stack.enter_context(contextlib.closing(Plans(world, keep_frames_ms=0)))
        SinkStore(world.store.engine).define("lake", {"kind": "lake"})
        world.catalog.alarms.add("before", "", JFK, 1)
        _take_and_restore(tmp_path, world, job, [None, postgres.new_database()])


def _take_and_restore(tmp_path: Path, world: World, job: Plans, targets: list[str | None]) -> None:
    (ref,) = world.register("q")
    stop, shipped = threading.Event(), threading.Semaphore(0)

    def ship() -> None:
        window = 0
        while not stop.is_set():
            world.ship_window(ref, window)
            window += 1
            shipped.release()

    shipping = threading.Thread(target=ship)
    shipping.start()
    try:
        for number in range(len(targets)):
            for _ in range(3):
                assert shipped.acquire(timeout=60)
            job.run_one()
            reports: list[str] = []
            info = take_backup(config(world.path, world.database), tmp_path / f"b{number}", world.clock, reports.append)
            assert info.size and reports
            job.run_one()
    finally:
        stop.set()
        shipping.join()
    for number, database in enumerate(targets):
        target = tmp_path / f"r{number}"
        restore_backup(config(target, database), tmp_path / f"b{number}", world.clock, silent)
        with (
            contextlib.closing(World(target, database=database)) as again,
            contextlib.closing(Plans(again)) as restored,
        ):
            require_pair(again.catalog, again.store, 8)
            assert [each.name for each in SinkStore(again.store.engine).statuses()] == ["lake"]
            again.catalog.alarms.add("after", "", JFK, 1)  # its number is new
            for edge in again.edges:
                acked = acked_through(again.catalog, edge, "i1")
                again.next_seq[edge] = 0 if acked is None else acked + 1
            again.end(ref)  # as if the edges had sent nothing since
            restored.run()
            assert again.all_consumed(), "each frame that was not applied is in the log"
            assert restored.counted("skipped_rows", reason="lost") == 0
            assert {a.kind for a in again.catalog.alarms.latest()} == {"before", "after"}
            answers = again.answers()
            last = max((start for _, start, _ in answers), default=0)  # the backup may have only a part of it
            assert all(world.truth[key] == value for key, value in answers.items() if key[1] < last)
            assert last > 0
    assert not list(world.log_dir.glob(".backup*"))


@pytest.mark.nightly
def test_answers_after_a_restoration_never_have_a_revision_that_was_given(
    tmp_path: Path, world: World, job: Plans
) -> None:
    (ref,) = world.register("q")
    world.ship_window(ref, 0)
    job.run()
    take_backup(config(world.path), tmp_path / "b", world.clock, silent)
    for edge in world.edges[:2]:
        world.ship_records(edge, ref, 1, ["/a"])
    world.ship_window(ref, 1)
    world.end(ref)
    job.run()
    before = given(world.store, ref)
    last = world.store.last_answer_id()
    for attempt in range(2):  # the same backup, twice
        world.now += 60_000
        target = tmp_path / f"r{attempt}"
        restore_backup(config(target), tmp_path / "b", world.clock, silent)
        with contextlib.closing(restored_world(target, world)) as again, contextlib.closing(Plans(again)) as job:
            again.ship_records(world.edges[0], ref, 1, ["/other"])
            again.end(ref)
            job.run()
            after = given(again.store, ref)
            assert {key: after[key] for key in after.keys() & before.keys()}.items() <= before.items()
            assert any(window == 1000 and revision > max(r for _, r in before) for window, revision in after)
            assert again.store.last_answer_id() > last
            before |= after


@pytest.mark.slow
@pytest.mark.parametrize("shared_database", ["sqlite", *at_night("postgresql")], indirect=True)
def test_a_restored_center_goes_on_writing_with_numbers_that_were_never_given(
    tmp_path: Path, world: World, job: Plans, shared_database: Callable[[], str | None]
) -> None:
    (ref,) = world.register("q")
    for window in range(40):
        world.ship_records(world.edges[0], ref, window, ["/a"])  # the windows stay open, and the store keeps their data
    job.run()
    sinks = SinkStore(world.store.engine)
    sinks.define("lake", {"kind": "lake"})
    world.catalog.alarms.add("before", "", JFK, 1)
    take_backup(config(world.path), tmp_path / "b", world.clock, silent)
    epoch = max(sinks.take("lake", owner, 1, 0) or 0 for owner in ("one", "two", "three"))
    (lost,) = world.register("lost")
    world.now += 60_000
    database, target = shared_database(), tmp_path / "r"
    restore_backup(config(target, database), tmp_path / "b", world.clock, silent)
    with (
        contextlib.closing(restored_world(target, world, database)) as again,
        contextlib.closing(Plans(again, keep_frames_ms=0)) as restored,
    ):
        again.ship_records(world.edges[1], ref, 1, ["/b"])
        restored.run()
        again.end(ref)
        restored.run()
        assert again.all_consumed() and again.answers() == world.truth
        assert again.catalog.quarantine.frames() == []
        again.catalog.alarms.add("after", "", JFK, 2)
        assert {alarm.kind for alarm in again.catalog.alarms.latest()} == {"before", "after"}
        taken = SinkStore(again.store.engine).take("lake", "one", again.now, 0)
        assert taken is not None and taken > epoch
        (other,) = again.register("lost")
        assert other.version > lost.version


@pytest.mark.nightly
def test_a_catalog_or_results_of_an_older_moment_are_refused_until_they_are_reconciled(
    tmp_path: Path, world: World, job: Plans
) -> None:
    (ref,) = world.register("q")
    world.ship_window(ref, 0)
    job.run()
    world.now += 60_000
    for name in ("catalog.db", "results.db"):
        copy_store(world, name, tmp_path / "old")
    for window in (1, 2, 3):
        world.ship_window(ref, window)
        job.run()
    applied = world.store.consumed()
    job.close()
    world.close()
    for name, field in (("catalog.db", "catalog_url"), ("results.db", "results_url")):
        directory = tmp_path / f"with-old-{name}"
        shutil.copytree(world.path, directory)
        put_store(tmp_path / "old", name, directory)
        with pytest.raises(InvalidConfig) as caught:
            pair(directory)
        assert caught.value.field == field
        checks = json.loads(command("check", directory, "--json").stdout)["checks"]
        (stores,) = [c for c in checks if c["name"] == "stores"]
        assert not stores["ok"] and "reconcile" in stores["message"]
        with exclusive_lock(directory):
            assert command("reconcile", directory).exit_code != 0, "the center runs"
        assert command("reconcile", directory).exit_code == 0
        pair(directory).close()
        with contextlib.closing(Catalog(f"sqlite:///{directory}/catalog.db")) as catalog:
            assert all(catalog.frames.last_positions()[key] >= position for key, position in applied.items())
            assert {e.edge for e in catalog.edges.all() if e.state_lost_at_ms is None} == set()
            assert {a.kind for a in catalog.alarms.latest()} == {"stores-differ"}
        with contextlib.ExitStack() as stack:
            again = stack.enter_context(contextlib.closing(restored_world(directory, world)))
            after = stack.enter_context(contextlib.closing(Plans(again, keep_frames_ms=0)))
            before = given(again.store, ref)
            again.ship_window(ref, 4)
            after.run()
            answers = {r.window_start_ms: r for r in answers_after(again.store, 0, 100)}
            new = given(again.store, ref).keys() - before.keys()
            assert new and min(revision for _, revision in new) > 1_000
            lacking = answers[max(start for start, _ in new)].facts
            assert set(lacking.edges_by(Cause.LOST_STATE)) == set(world.edges)


def test_older_copies_of_both_stores_are_recognised_by_what_an_edge_knows(
    tmp_path: Path, world: World, job: Plans
) -> None:
    (ref,) = world.register("q")
    world.ship_window(ref, 0)
    job.run()
    for name in ("catalog.db", "results.db"):
        copy_store(world, name, tmp_path / "old")
    world.ship_window(ref, 1)
    world.ship_records(world.edges[0], ref, 2, ["/a"])
    job.run()
    before = given(world.store, ref)
    last = world.store.last_answer_id()
    job.close()
    world.close()
    for name in ("catalog.db", "results.db"):
        put_store(tmp_path / "old", name, world.path)
    pair(world.path).close()  # nothing in the stores says that they are old
    world.now += 60_000
    with contextlib.closing(restored_world(world.path, world)) as again, contextlib.closing(Plans(again)) as job:
        assert {a.kind for a in again.catalog.alarms.latest()} == {"frames-lost"}
        for edge in again.edges:
            again.ship_records(edge, ref, 1, ["/other"])
        again.end(ref)
        job.run()
        after = given(again.store, ref)
        assert {key: after[key] for key in after.keys() & before.keys()}.items() <= before.items()
        assert any(window == 1000 and revision >= again.now for window, revision in after)
        assert again.store.last_answer_id() > last
        newest = {r.window_start_ms: r for r in answers_after(again.store, 0, 100)}
        assert set(newest[1000].facts.edges_by(Cause.LOST_STATE)) == set(again.edges)
        numbers = again.store.last_answer_id()
        job.restart()
        job.writer.advance()
        assert again.store.last_answer_id() == numbers, "a proof counts once"


def test_stores_of_two_centers_are_refused(tmp_path: Path, world: World) -> None:
    other = tmp_path / "other"
    other.mkdir()
    pair(other).close()
    world.close()
    put_store(other, "results.db", world.path)
    with refused(InvalidConfig, "results_url"):
        pair(world.path)


def test_a_store_that_was_removed_beside_one_in_use_is_refused(tmp_path: Path, world: World, job: Plans) -> None:
    (ref,) = world.register("q")
    world.ship_window(ref, 0)
    job.run()
    job.close()
    world.close()
    for name in ("catalog.db", "results.db"):
        directory = tmp_path / f"without-{name}"
        shutil.copytree(world.path, directory)
        for path in directory.glob(f"{name}*"):
            path.unlink()
        with refused(InvalidConfig, "catalog_url" if name == "catalog.db" else "results_url"):
            pair(directory)


def test_what_is_wrong_with_a_backup_or_its_place_is_said(tmp_path: Path, world: World) -> None:
    world.register("q")
    target = tmp_path / "b"
    taken = command("backup", world.path, target, "--json")
    assert taken.exit_code == 0 and "catalog.db" in json.loads(taken.stdout)["sizes"]
    cases: list[tuple[str, tuple[Any, ...], str]] = [
        ("backup", (world.path, target), "it is not empty"),
        ("backup", (tmp_path / "nothing", tmp_path / "b2"), "a center that has run"),
        ("backup", (world.path, tmp_path / "b2", "--set", "catalog_url=postgresql+psycopg://u:pw@h/d"), "one database"),
        ("restore", (world.path, target), "exists already"),
        ("restore", (tmp_path / "new", tmp_path / "nothing"), "cannot be read"),
    ]
    for name, arguments, message in cases:
        result = command(name, *arguments)
        text = f"{result.output}{result.exception}"
        assert result.exit_code != 0 and message in text and "pw" not in text.replace("pwd", ""), text
    assert not (tmp_path / "b2").exists()
    with exclusive_lock(tmp_path / "new"), pytest.raises(StorageError):
        restore_backup(config(tmp_path / "new"), target, world.clock, silent)
    manifest = json.loads((target / "backup.json").read_text())
    outside = tmp_path / "outside.frames"
    outside.write_bytes(b"secret")
    (target / "log" / "commits").mkdir(parents=True, exist_ok=True)
    (target / "log" / "commits" / "link.frames").symlink_to(outside)
    for name in (
        *("log/../../outside.frames", "../outside.frames", str(outside), "log/commits/../../../outside.frames"),
        *("log/commits/link.frames", "log", "log/commits/..", "log//outside.frames", "./catalog.db", "x\0y"),
    ):
        altered = {**manifest, "sizes": {**manifest["sizes"], name: 6}}
        (target / "backup.json").write_text(json.dumps(altered))
        with pytest.raises(InvalidInput):
            restore_backup(config(tmp_path / "new"), target, world.clock, silent)
    for sizes in ({}, [], {"catalog.db": manifest["sizes"]["catalog.db"]}, {**manifest["sizes"], "catalog.db": "?"}):
        (target / "backup.json").write_text(json.dumps({**manifest, "sizes": sizes}))
        with pytest.raises(InvalidInput):
            restore_backup(config(tmp_path / "new"), target, world.clock, silent)
    (target / "backup.json").write_text(json.dumps(manifest))
    (target / "results.db").write_bytes(b"")
    with refused(InvalidInput, "DIRECTORY"):
        restore_backup(config(tmp_path / "new"), target, world.clock, silent)


@pytest.mark.slow
def test_a_database_without_a_center_has_no_backup_and_one_with_a_center_takes_none(
    tmp_path: Path, world: World, postgres: PostgresServer
) -> None:
    world.register("q")
    database = postgres.new_database()
    (tmp_path / "pods").mkdir()
    with refused(InvalidConfig, "catalog_url"):
        take_backup(config(tmp_path / "pods", database), tmp_path / "b", world.clock, silent)
    take_backup(config(world.path), tmp_path / "b", world.clock, silent)
    restore_backup(config(tmp_path / "pods", database), tmp_path / "b", world.clock, silent)
    for path in (tmp_path / "pods").glob("log/*"):
        shutil.rmtree(path)
    with pytest.raises(InvalidConfig) as caught:
        restore_backup(config(tmp_path / "pods", database), tmp_path / "b", world.clock, silent)
    assert caught.value.field == "catalog_url" and "it has the table" in caught.value.message


def test_large_deltas_are_in_a_backup_also_if_the_center_deletes_them_meanwhile(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (ref,) = world.register("q")
    world.segments.inline_bytes = 0
    with contextlib.closing(Plans(world, keep_frames_ms=0)) as job:
        world.ship_records(JFK, ref, 0, ["/a", "/b"])
        job.run()
        world.segments.place("1-of-1/0/99", [Delta("q@1", 0, b"of no row")])
        copy_store = backup._copy_store

        def go_on(*args: Any) -> None:
            if world.segments.files():
                world.catalog.queries.delete("q", world.now)
                job.writer.advance()
                job.run()
            assert world.segments.files() == []
            copy_store(*args)

        with monkeypatch.context() as patch:
            patch.setattr(backup, "_copy_store", go_on)
            info = take_backup(config(world.path), tmp_path / "b", world.clock, silent)
    assert len([name for name in info.segments if name.startswith("deltas/")]) == 1
    target = tmp_path / "r"
    restore_backup(config(target), tmp_path / "b", world.clock, silent)
    with contextlib.closing(restored_world(target, world)) as again, contextlib.closing(Plans(again)) as restored:
        again.end(ref)
        restored.run()
        assert again.answers() == world.truth and world.truth
    with refused(InvalidInput, "deltas_dir"):
        full = config(tmp_path / "r2").model_copy(update={"given_deltas_dir": target / "log"})
        restore_backup(full, tmp_path / "b", world.clock, silent)


def test_a_segment_that_is_lost_and_a_backup_that_was_killed_do_not_prevent_a_backup(
    tmp_path: Path, world: World
) -> None:
    (ref,) = world.register("q")
    world.ship_window(ref, 0)
    lost, *others = world.log.segments()
    (world.log_dir / lost).unlink()
    left = world.log_dir / ".backup" / "commits" / "left.frames"
    left.parent.mkdir(parents=True)
    left.touch()
    info = take_backup(config(world.path), tmp_path / "b", world.clock, silent)
    assert info.segments == [f"log/{name}" for name in others]
    assert not left.exists()


def test_a_restoration_that_fails_can_be_tried_again(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.register("q")
    take_backup(config(world.path), tmp_path / "b", world.clock, silent)
    copied = backup._copy_segments
    with monkeypatch.context() as failing:

        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        failing.setattr(backup, "_copy_segments", fail)
        with pytest.raises(StorageError):
            restore_backup(config(tmp_path / "new"), tmp_path / "b", world.clock, silent)
    assert backup._copy_segments is copied
    restore_backup(config(tmp_path / "new"), tmp_path / "b", world.clock, silent)
    pair(tmp_path / "new").close()
    assert sorted(p.name for p in (tmp_path / "new").iterdir() if "restored" in p.name) == []


def test_an_edge_that_first_connected_after_the_backup_has_lost_what_it_sent_before(tmp_path: Path) -> None:
    with contextlib.closing(Catalog(f"sqlite:///{tmp_path}/catalog.db")) as catalog:
        ref = catalog.queries.register(spec(), 1)[0].ref
        hello(catalog, oldest_seq=7, next_seq=9)
        assert catalog.edges.get(JFK).state_lost_at_ms is not None
        assert {a.kind for a in catalog.alarms.latest()} == {"frames-lost"}
        assert [o.acknowledged for o in catalog.frames.index([frame(ref, 7)])] == [True]
