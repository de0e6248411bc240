"""Quarantined frames as an operator lists, shows, retries and drops them, while the job goes on."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from center.catalog import SetAside, quarantine
from center.ledger.window_book import WindowBook
from center.results.late_records import late_by_window
from center.storage.frame_log import FrameLog
from edgewater.__main__ import main
from edgewater.answers import Cause, LateRecords
from edgewater.base.errors import Conflict, NotFound
from edgewater.wire import FrameBody, Partial, QueryRef, SliceClose
from tests.center.job.conftest import World, synopsis
from tests.center.job.plans import Plans
from tests.insides import engine_of

FAR = 1 << 40


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with contextlib.closing(World(tmp_path)) as world:
        yield world


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """A world on each database."""
    server = request.getfixturevalue("postgres") if request.param == "postgresql" else None
    with contextlib.closing(World(tmp_path, database=server and server.new_database())) as world:
        yield world


def command(world: World, *args: str) -> Any:
    where = ("catalog_url", world.catalog_url), ("results_url", world.results_url), ("log_dir", str(world.log_dir))
    options = [part for key, value in where for part in ("--set", f"{key}={value}")]
    options += ["--set", f"api.audit={world.log_dir}.audit"]
    result = CliRunner().invoke(main, ["center", "quarantine", *args[:1], *options, "--json", *args[1:]])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def fail_on_seven(patch: pytest.MonkeyPatch) -> None:
    """The ledger cannot take a close of seven records."""
    report = WindowBook.report

    def faulty(self: WindowBook, summaries: Any, *rest: Any) -> Any:
        summaries = list(summaries)
        if any(close.observed == 7 for f in summaries for close in f.closes):
            raise ValueError("odd")
        return report(self, summaries, *rest)

    patch.setattr(WindowBook, "report", faulty)


def poison(world: World, ref: QueryRef, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ships a frame that the ledger cannot take, and runs the job on it until retention has passed."""
    close = (SliceClose(0, 7, 0),)
    world.ship(world.edges[0], ref, FrameBody(0, (Partial(0, synopsis(["/odd"] * 7, [1] * 7)),), close))
    with monkeypatch.context() as patch:
        fail_on_seven(patch)
        job = Plans(world, keep_frames_ms=0)
        job.run()
        world.ship_records(world.edges[1], ref, 0, ["/later"])
        job.run()
        job.close()


@pytest.mark.slow
def test_a_quarantined_frame_is_listed_shown_and_dropped_with_its_bytes(
    either: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = either
    (ref,) = world.register("a")
    poison(world, ref, monkeypatch)
    (listed,) = command(world, "ls")["frames"]
    assert (listed["query"], listed["position"], listed["edge"], listed["reason"]) == (
        "a@1", 1, str(world.edges[0]), "ValueError: odd",
    )  # fmt: skip
    assert world.catalog.frames.entries("a@1", 0, 1) == [], "retention has passed"
    assert (world.log_dir / listed["segment"]).exists()
    assert world.catalog.frames.removable_segments([listed["segment"]], FrameLog(world.log_dir).queries) == []

    shown = command(world, "show", "a@1", "1")["contents"]
    assert (shown["through_ms"], shown["closes"], shown["closed_records"]) == (0, 1, 7)

    assert command(world, "drop", "a@1", "1") == {"query": "a@1", "position": 1}
    assert not (world.log_dir / listed["segment"]).exists()
    assert command(world, "ls") == {"frames": [], "queries": []}
    with pytest.raises(NotFound):
        world.catalog.quarantine.drop_frame("a@1", 1)
    (line,) = map(json.loads, Path(f"{world.log_dir}.audit").read_text().splitlines())
    assert (line["action"], line["target"], line["outcome"]) == ("drop_frame", "/v1/quarantine/a@1/1", "done")
    assert line["principal"] == f"cli:{pwd.getpwuid(os.getuid()).pw_name}"


def test_queries_that_are_set_aside_are_listed_and_retried(world: World) -> None:
    (ref,) = world.register("a")
    assert command(world, "ls")["queries"] == []
    world.catalog.quarantine.count_death(ref, 5)
    world.catalog.quarantine.set_query_aside(ref, SetAside.QUARANTINED, "the job died", 7)
    (listed,) = command(world, "ls")["queries"]
    assert (listed["query"], listed["state"], listed["deaths"]) == ("a@1", "quarantined", 1)
    assert command(world, "retry", "a") == {"query": "a"}
    assert world.catalog.quarantine.queries() == {}
    line = json.loads(Path(f"{world.log_dir}.audit").read_text())
    assert (line["action"], line["target"], line["outcome"]) == ("retry_query", "/v1/queries/a", "done")


def test_a_frame_that_is_retried_counts_once_as_new_data(either: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world = either
    (ref,) = world.register("a")
    poison(world, ref, monkeypatch)
    assert command(world, "retry", "a@1", "1") == {"query": "a@1", "position": 3}
    job = Plans(world, keep_frames_ms=0)
    world.end(ref)
    job.run()
    world.truth[ref, 0, "/odd"] += 7
    assert world.answers() == world.truth
    (record,) = world.store.windows(ref, 0, 1, 10)[0]
    assert record.facts.by_cause(Cause.INPUT_LOST), "that it was lost has been said"
    assert record.facts.observed == 8
    assert world.catalog.quarantine.frames() == []
    with pytest.raises(NotFound):
        world.catalog.quarantine.retry_frame("a@1", 1)
    job.close()


def test_an_older_close_of_a_retried_frame_replaces_no_newer_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    (ref,) = world.register("a")
    poison(world, ref, monkeypatch)
    newer = FrameBody(0, (Partial(0, synopsis(["/odd"], [1])),), (SliceClose(0, 8, 0),))
    world.ship(world.edges[0], ref, newer)
    world.catalog.quarantine.retry_frame("a@1", 1)
    job = Plans(world)
    world.end(ref)
    job.run()
    (record,) = world.store.windows(ref, 0, 1, 10)[0]
    assert record.facts.observed == 9
    job.close()


@pytest.mark.nightly
def test_one_of_many_frames_is_found_by_halving_and_can_be_given_up(
    either: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others of its batch count, and so does the other query."""
    world = either
    one, other = world.register("a", "b")
    for window in range(2):
        for ref in (one, other):
            world.ship_window(ref, window)
    close = (SliceClose(2000, 7, 0),)
    world.ship(world.edges[1], one, FrameBody(2000, (Partial(2000, synopsis(["/odd"] * 7, [1] * 7)),), close))
    world.ship_window(one, 3)
    with monkeypatch.context() as patch:
        fail_on_seven(patch)
        job = Plans(world)
        job.run()
        for ref in (one, other):
            world.end(ref)
        job.run()
        assert job.loop.core.problem == ""
        job.close()
    assert world.answers() == world.truth
    (listed,) = command(world, "ls")["frames"]
    assert (listed["edge"], listed["position"]) == (str(world.edges[1]), 13)
    assert [a.kind for a in world.catalog.alarms.latest() if a.kind == "frame-quarantined"] == ["frame-quarantined"]
    command(world, "drop", "a@1", "13")
    assert command(world, "ls") == {"frames": [], "queries": []}


@pytest.mark.slow
def test_what_a_retried_frame_has_for_final_windows_is_counted_on_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (ref,) = world.register("a")
    poison(world, ref, monkeypatch)
    job = Plans(world)
    world.end(ref)
    job.run()
    before = world.answers()
    command(world, "retry", "a@1", "1")
    job.run()
    assert world.answers() == before
    with engine_of(world.store).connect() as connection:
        assert late_by_window(connection, "a@1", [(0, 1000)]) == {0: {"after-final": LateRecords(7)}}
    job.close()


def test_a_retried_frame_that_fails_again_is_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    (ref,) = world.register("a")
    poison(world, ref, monkeypatch)
    world.catalog.quarantine.retry_frame("a@1", 1)
    fail_on_seven(monkeypatch)
    job = Plans(world)
    job.run()
    assert [f.entry.position for f in world.catalog.quarantine.frames()] == [3]
    assert not job.applier.set_aside
    job.close()


def test_a_frame_that_has_not_been_passed_or_whose_query_is_deleted_is_not_retried(
    world: World, tmp_path: Path
) -> None:
    (ref,) = world.register("a")
    world.ship_records(world.edges[0], ref, 0, ["/a"])
    (entry,) = world.catalog.frames.entries("a@1", 0, 1)
    world.catalog.quarantine.add_frame(entry, "odd", 1)
    failed = CliRunner().invoke(
        main,
        ["center", "quarantine", "retry", "--set", f"catalog_url={world.catalog_url}", "--set",
         f"results_url={world.results_url}", "--set", f"api.audit={tmp_path}/audit", "a@1", "1"],
    )  # fmt: skip
    assert json.loads((tmp_path / "audit").read_text())["outcome"] == "failed"
    assert failed.exit_code != 0 and "has not passed frame 1" in failed.output
    world.catalog.queries.delete("a", world.now)
    with pytest.raises(Conflict):
        world.catalog.quarantine.retry_frame("a@1", 1)


def test_one_edge_keeps_a_bounded_number_of_frames(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "MAX_PER_EDGE", 3)
    (ref,) = world.register("a")
    for edge in (world.edges[1], *[world.edges[0]] * 5):
        world.ship_records(edge, ref, 0, ["/a"])
    for entry in world.catalog.frames.entries("a@1", 0, FAR):
        world.catalog.quarantine.add_frame(entry, "odd", entry.position)
        world.catalog.quarantine.add_frame(entry, "odd", entry.position)
    assert [f.entry.position for f in world.catalog.quarantine.frames()] == [6, 5, 4, 1]
    assert sum(a.times for a in world.catalog.alarms.latest()) == 6


def test_a_directory_without_a_center_is_named_and_not_created(tmp_path: Path) -> None:
    """It was said that no frame was in quarantine, and a catalog was made."""
    result = CliRunner().invoke(main, ["center", "quarantine", "ls", "--data-dir", str(tmp_path / "typo")])
    assert result.exit_code == 2
    assert f"data_dir: '{tmp_path / 'typo'}' is not accepted" in result.output
    assert not (tmp_path / "typo").exists()
