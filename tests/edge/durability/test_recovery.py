"""Crash the core and its journal at every position: the final answers are the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from edge.durability import DurableCore, journal
from edge.durability.event_records import PULL
from edgewater.base.errors import StorageError
from tests.cells import at_night
from tests.edge.hard_state import hard_state
from tests.edge.recovery_world import BUDGETED, EXACT, SHARE, Center, World, flights, truth

pytestmark = pytest.mark.slow

DATA = flights(300, seed=1)


def check(center: Center) -> None:
    answers = center.answers()
    exact = {k: v for k, v in answers.items() if k[0] == "exact"}
    assert exact == truth(DATA, EXACT)
    withheld = {k: v for k, v in answers.items() if k[0] == "budgeted"}
    for key, groups in truth(DATA, BUDGETED).items():
        for group, values in groups.items():
            sent = withheld.get(key, {}).get(group, {"miles": 0.0})["miles"]
            assert 0 <= values["miles"] - sent <= SHARE


def script(world: World, steps: int) -> None:
    """The first `steps` steps of a run with checkpoints, pulls and acknowledgements mixed."""
    world.configure()
    actions = [
        lambda: world.ingest(25),
        world.pull,
        world.ship,
        lambda: world.ingest(17),
        world.edge.checkpoint,
        world.pull,
        world.edge.sync,
        lambda: world.ingest(31),
        world.pull,
        world.pull,
    ]
    for step in range(steps):
        actions[step % len(actions)]()


def test_an_undisturbed_run_gives_the_truth(tmp_path: Path) -> None:
    center = Center()
    World(tmp_path, DATA, center).finish()
    check(center)
    for query in ("exact", "budgeted"):
        bodies = [frame.unpack() for frame in center.frames.values() if frame.query.name == query]
        early = [p for body in bodies for p in body.partials if p.slice_start_ms + 10_000 > body.through_ms]
        assert early, "entries leave before their slice closes"


@pytest.mark.parametrize("steps", [*range(0, 40, 4), *at_night(*range(1, 40, 2), *range(2, 40, 4))])
def test_a_crash_after_any_step_changes_no_answer(tmp_path: Path, steps: int) -> None:
    center = Center()
    script(World(tmp_path, DATA, center), steps)  # what was not synced dies with the process
    World(tmp_path, DATA, center).finish()
    check(center)


@pytest.mark.parametrize("every", [251, pytest.param(11, marks=pytest.mark.full)])
def test_a_journal_cut_at_any_byte_before_anything_was_shipped_changes_no_answer(tmp_path: Path, every: int) -> None:
    origin = tmp_path / "origin"
    world = World(origin, DATA, Center())
    world.configure()
    for _ in range(3):
        world.ingest(40)
        world.pull()
    world.edge.sync()
    journal = max(origin.glob("journal-*.log"))
    for cut in range(4, journal.stat().st_size, every):
        copy = tmp_path / f"cut{cut}"
        shutil.copytree(origin, copy)
        with (copy / journal.name).open("rb+") as file:
            file.truncate(cut)
        center = Center()
        World(copy, DATA, center).finish()
        check(center)
        shutil.rmtree(copy)


def test_crashing_again_and_again_during_recovery_changes_no_answer(tmp_path: Path) -> None:
    center = Center()
    for steps in (3, 11, 2, 7, 19, 1):
        script(World(tmp_path, DATA, center), steps)
    World(tmp_path, DATA, center).finish()
    check(center)


def test_recovery_restores_the_identical_state(tmp_path: Path) -> None:

    world = World(tmp_path, DATA, Center())
    script(world, 29)
    world.edge.sync()
    again = World(tmp_path, DATA, Center())
    assert hard_state(again.edge.core) == hard_state(world.edge.core)
    assert again.edge.state.positions == world.edge.state.positions


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(tmp_path: Path) -> None:
    center = Center()
    script(World(tmp_path, DATA, center), 25)
    newest = max(tmp_path.glob("checkpoint-*.ckpt"), key=lambda p: int(p.stem.split("-")[1]))
    data = bytearray(newest.read_bytes())
    data[-1] ^= 0xFF
    newest.write_bytes(data)
    recovered = World(tmp_path, DATA, center)
    assert recovered.edge.damaged_records == 1
    recovered.finish()
    check(center)


def test_a_directory_whose_checkpoints_are_all_damaged_is_refused(tmp_path: Path) -> None:
    script(World(tmp_path, DATA, Center()), 25)
    for path in tmp_path.glob("checkpoint-*.ckpt"):
        path.write_bytes(b"\0" * 40)
    with pytest.raises(StorageError):
        World(tmp_path, DATA, Center())


def test_a_changed_source_is_detected_in_the_replay(tmp_path: Path) -> None:
    center = Center()
    world = World(tmp_path, DATA, center)
    world.configure()
    world.ingest(120)
    world.pull()
    world.edge.sync()
    with pytest.raises(StorageError):
        World(tmp_path, flights(300, seed=2), center)


def test_a_frame_lost_with_a_damaged_record_is_detected(tmp_path: Path) -> None:
    """Going on without it would send its groups again under other numbers."""
    world = World(tmp_path, DATA, Center())
    world.configure()
    for _ in range(4):
        world.ingest(40)
        world.pull()
    world.edge.sync()
    path = tmp_path / "journal-0.log"
    data = bytearray(path.read_bytes())
    first = next(r for r in journal.scan(bytes(data)).records if r.kind == PULL and b"platform" in r.payload)
    data[data.index(first.payload)] ^= 1
    path.write_bytes(data)
    with pytest.raises(StorageError):
        World(tmp_path, DATA, Center())


def test_an_incarnation_survives_restarts(tmp_path: Path) -> None:
    World(tmp_path, DATA, Center())
    edge: DurableCore = World(tmp_path, DATA, Center()).edge
    assert edge.incarnation == "first"
