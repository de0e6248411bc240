"""The state directory under disk errors, a second process and damaged files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from edge.durability import journal, load_identity, lock_state_dir
from edgewater.base.errors import IncompatibleState, StorageError
from edgewater.runtime.state_release import RELEASE
from edgewater.synopses.encoding.state import State
from tests.edge.recovery_world import EXACT, Center, World, flights, truth

DATA = flights(120, seed=3)


def whole(center: Center) -> bool:
    return {k: v for k, v in center.answers().items() if k[0] == "exact"} == truth(DATA, EXACT)


def test_a_checkpoint_that_fails_after_its_file_was_written_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    center = Center()
    world = World(tmp_path, DATA, center)
    world.configure()
    world.ingest(25)

    def refuses(path: Path) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(journal, "sync_directory", refuses)
        with pytest.raises(StorageError):
            world.edge.checkpoint()
    world.ingest(25)
    world.edge.sync()
    recovered = World(tmp_path, DATA, center)
    assert recovered.row == 50
    recovered.finish()
    assert whole(center)


def test_a_damaged_first_checkpoint_is_replayed_from_the_beginning(tmp_path: Path) -> None:
    center = Center()
    world = World(tmp_path, DATA, center)
    world.configure()
    world.ingest(25)
    world.edge.checkpoint()
    world.ingest(25)
    world.edge.sync()
    (tmp_path / "checkpoint-1.ckpt").write_bytes(b"\0" * 40)
    recovered = World(tmp_path, DATA, center)
    assert (recovered.row, recovered.edge.damaged_records) == (50, 1)
    recovered.finish()
    assert whole(center)


def test_a_state_directory_is_locked_by_one_process(tmp_path: Path) -> None:
    with lock_state_dir(tmp_path), pytest.raises(StorageError), lock_state_dir(tmp_path):
        pass
    with lock_state_dir(tmp_path):
        pass


@pytest.mark.parametrize("text", ["", "{", "[]", '{"incarnation": 7}'])
def test_a_damaged_identity_is_refused_with_a_remedy(tmp_path: Path, text: str) -> None:
    (tmp_path / "identity.json").write_text(text)
    with pytest.raises(StorageError):
        load_identity(tmp_path, lambda: {"incarnation": "new"})


def test_a_state_directory_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for use in (
        lambda: load_identity(tmp_path / "file" / "x", dict),
        lambda: lock_state_dir(tmp_path / "file").__enter__(),
    ):
        with pytest.raises(StorageError):
            use()


def written(directory: Path) -> dict[str, Any]:
    return dict(json.loads((directory / "identity.json").read_text()))


def as_written_by(directory: Path, **changed: Any) -> None:
    identity = {k: v for k, v in (written(directory) | changed).items() if v is not None}
    (directory / "identity.json").write_text(json.dumps(identity))


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state directory with a checkpoint and a journal."""
    world = World(tmp_path / "state", DATA, Center())
    world.configure()
    world.ingest(25)
    world.edge.checkpoint()
    world.ingest(25)
    world.edge.sync()
    world.edge.close()
    return tmp_path / "state"


def test_a_new_state_records_the_release_that_writes_it(state: Path) -> None:
    assert written(state)["release"] == RELEASE


@pytest.mark.parametrize(
    ("changed", "names"),
    [({"format": 99, "release": "9.8.7"}, "9.8.7"), ({"format": None, "release": None}, "no format")],
)
def test_a_state_of_another_format_is_refused_with_its_release_and_left_as_it_is(
    state: Path, changed: dict[str, Any], names: str
) -> None:
    as_written_by(state, **changed)
    (state / "journal-1.log").write_bytes(b"EWJ9" + bytes(range(200)))
    before = contents(state)

    with pytest.raises(IncompatibleState) as caught:
        World(state, DATA, Center())

    assert names in str(caught.value) and RELEASE in str(caught.value)
    assert contents(state) == before


def test_a_state_of_the_same_format_is_read_and_records_the_release_that_goes_on(state: Path) -> None:
    as_written_by(state, release="9.8.7")
    center = Center()
    recovered = World(state, DATA, center)
    assert recovered.row == 50
    assert written(state)["release"] == RELEASE
    recovered.finish()
    assert whole(center)


def test_a_whole_checkpoint_that_cannot_be_restored_is_not_called_damaged(state: Path) -> None:
    as_written_by(state, release="9.8.7")
    path = state / "checkpoint-1.ckpt"
    checkpoint = State.unpack(path.read_bytes(), "edge-checkpoint")
    numbers = {name: value for name, value in checkpoint.numbers.items() if name != "function_failures"}
    path.write_bytes(State(numbers, checkpoint.arrays).pack("edge-checkpoint"))

    with pytest.raises(IncompatibleState):
        World(state, DATA, Center())

    assert written(state)["release"] == "9.8.7"


@pytest.mark.nightly
def test_an_agent_on_a_state_of_another_release_ends_and_names_it(state: Path) -> None:
    as_written_by(state, format=99, release="9.8.7", clocks={})
    document = {
        "edge": "a",
        "center": {"address": "127.0.0.1:1"},
        "state_dir": str(state),
        "streams": {
            "s": {
                "columns": {"x": "int64"},
                "time": {"column": "at", "unit": "ms"},
                "sources": [{"stdin": {"format": "ndjson"}}],
            }
        },
    }
    config = state.with_name("edge.yaml")
    config.write_text(yaml.safe_dump(document))
    command = [sys.executable, "-m", "edgewater", "edge", "run", str(config)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "9.8.7" in done.stderr and "Traceback" not in done.stderr


def test_a_record_above_the_size_limit_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MAX_RECORD_BYTES", 10)
    segment = journal.Segment(tmp_path / "journal-0.log")
    with pytest.raises(StorageError):
        segment.append(journal.Record(1, bytes(11)))
    segment.close()
