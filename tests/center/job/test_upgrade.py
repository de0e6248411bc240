"""What a job finds that 0.3 has left."""

from __future__ import annotations

import fcntl
from pathlib import Path

from center.job.job import remove_old_state


def test_directories_of_drivers_that_have_ended_are_deleted_and_those_of_running_ones_are_not(tmp_path: Path) -> None:
    for name in ("driver-dead", "driver-alive"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
    with (tmp_path / "driver-alive" / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remove_old_state(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["driver-alive"]
    remove_old_state(tmp_path)
    assert not list(tmp_path.iterdir())
