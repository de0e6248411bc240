"""Every kind of sink keeps the contract of `center.sinks.testing`, on its real system."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from center.sinks import SinkContext, SinkQuery, read_definition
from center.sinks.testing import CASES, HOUR, QUERY, REF, SCHEMA, Subject, answer
from edgewater.base.errors import StorageError
from tests.center.sinks.systems import SYSTEMS


@pytest.mark.slow
@pytest.mark.product
@pytest.mark.filterwarnings("ignore::DeprecationWarning:pyiceberg.*", "ignore::UserWarning:pyiceberg.*")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("kind", SYSTEMS)
def test_the_sink_keeps_the_contract(
    kind: str, case: Callable[[Subject], None], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    case(SYSTEMS[kind](request, tmp_path))


def test_a_full_disk_leaves_no_part_of_a_file_and_parts_of_a_killed_process_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    sink = read_definition("files", {"kind": "parquet", "path": str(tmp_path)}).make(SinkContext("files", 1))
    sink.open([SinkQuery(REF, QUERY, SCHEMA)])
    sink.write([answer(1, 0, {"a": 1})], {REF: 1})
    (day,) = tmp_path.glob("kit_v3/day=*")
    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        with pytest.raises(StorageError):
            sink.write([answer(2, HOUR, {"a": 1})], {REF: 2})
    assert [path.name for path in day.iterdir()] == ["answers-1-1.parquet"]
    (day / ".answers-7-9.parquet.part").touch()
    sink.open([SinkQuery(REF, QUERY, SCHEMA)])
    sink.write([answer(2, HOUR, {"a": 1})], {REF: 2})
    assert sorted(path.name for path in day.iterdir()) == ["answers-1-1.parquet", "answers-2-2.parquet"]
