"""The state directory under disk errors, a second process and damaged files."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge.durability import journal, load_identity, lock_state_dir
from edgewater.errors import StorageError
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
        with pytest.raises(StorageError, match="cannot be written"):
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
    with lock_state_dir(tmp_path), pytest.raises(StorageError, match="in use by another"), lock_state_dir(tmp_path):
        pass
    with lock_state_dir(tmp_path):
        pass


@pytest.mark.parametrize("text", ["", "{", "[]", '{"incarnation": 7}'])
def test_a_damaged_identity_is_refused_with_a_remedy(tmp_path: Path, text: str) -> None:
    (tmp_path / "identity.json").write_text(text)
    with pytest.raises(StorageError, match=r"identity\.json is damaged"):
        load_identity(tmp_path, lambda: {"incarnation": "new"})


def test_a_state_directory_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for use in (
        lambda: load_identity(tmp_path / "file" / "x", dict),
        lambda: lock_state_dir(tmp_path / "file").__enter__(),
    ):
        with pytest.raises(StorageError, match=r"state_dir .*file"):
            use()


def test_a_record_above_the_size_limit_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MAX_RECORD_BYTES", 10)
    segment = journal.Segment(tmp_path / "journal-0.log")
    with pytest.raises(StorageError, match="11 bytes"):
        segment.append(journal.Record(1, bytes(11)))
    segment.close()
