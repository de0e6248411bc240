"""The job as a process of its own, killed in every way."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from center.storage.frame_log import FrameLog
from edgewater.model.registered_query import query_key
from edgewater.wire import FrameBody, Partial
from tests.center.job.plans import install_deadly

PROGRAM = Path(__file__).with_name("job_program.py")
WITHIN_S = 300
FOR_EVER_MS = 36_525 * 86_400_000

pytestmark = [pytest.mark.spark, pytest.mark.slow]


class JobProcess:
    """The job, and what it says."""

    def __init__(self, path: Path, frames: int, keep_frames_ms: int, cwd: Path | None) -> None:
        command = [sys.executable, str(PROGRAM), str(path), str(frames), str(keep_frames_ms)]
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(path / "plugins"), *filter(None, sys.path)])}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env, cwd=cwd
        )
        self.said: list[str] = []
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def wait_for(self, text: str) -> str:
        while text not in (line := self._lines.get(timeout=WITHIN_S)):
            assert line, f"ended before it said {text!r}: {''.join(self.said)}"
            self.said.append(line)
        return line

    def family(self) -> list[psutil.Process]:
        """All processes below it: the JVM, Spark's Python daemon and workers."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def jvm(self) -> psutil.Process:
        for process in self.family():
            with suppress(psutil.NoSuchProcess):  # one that lives only shortly has ended
                if process.name() == "java":
                    return process
        raise AssertionError("there is no JVM below the job")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(WITHIN_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def running(path: Path, frames: int = 4096, keep_frames_ms: int = 0, cwd: Path | None = None) -> Iterator[JobProcess]:
    job = JobProcess(path, frames, keep_frames_ms, cwd)
    try:
        yield job
    finally:
        job.close()


def test_killed_drivers_and_jvms_and_a_log_that_fails_lose_nothing_and_count_nothing_twice(world: Any) -> None:
    refs, deadly = world.register("a", "b"), install_deadly(world.path / "plugins")
    world.ship_windows(refs, 6)

    with running(world.path, frames=5) as job:
        for _ in range(3):
            job.wait_for("applied after")
        family = job.family()
        assert job.jvm() in family
        job.process.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(family, timeout=WITHIN_S)
        assert not alive, "the JVM ends with its driver"
    assert 0 < sum(world.store.consumed().values()) < sum(world.catalog.frames.last_positions().values())

    with running(world.path, frames=5) as job:
        for _ in range(2):
            job.wait_for("applied after")
        job.jvm().kill()
        assert job.process.wait(WITHIN_S) != 0, "a job without Spark ends, to be started again"

    with running(world.path, keep_frames_ms=FOR_EVER_MS) as job:
        until_all_is_consumed(world, job)
        assert_a_log_that_fails_is_read_again(world, job, refs)
        assert_a_frame_that_kills_workers_is_set_aside(world, job, refs[0], deadly)
        family = job.family()
        world.end(*refs)
        until_all_is_consumed(world, job)
        job.process.send_signal(signal.SIGTERM)
        job.wait_for("stopped")
        assert job.process.wait(WITHIN_S) == 0
        _, alive = psutil.wait_procs(family, timeout=WITHIN_S)
        assert not alive
    assert world.answers() == world.truth
    assert world.observed() == world.records


@pytest.mark.nightly
def test_directories_named_as_our_packages_where_the_job_was_started_do_not_stand_for_them(
    world: Any, tmp_path: Path
) -> None:
    for name in ("center", "edge", "edgewater", "pyarrow"):
        (tmp_path / "cwd" / name).mkdir(parents=True)
        (tmp_path / "cwd" / name / "__init__.py").write_text("raise RuntimeError('not the installed package')")
    (ref,) = world.register("a")
    world.ship_window(ref, 0)
    world.end(ref)

    with running(world.path, cwd=tmp_path / "cwd") as job:
        until_all_is_consumed(world, job)
        job.jvm().kill()
        assert job.process.wait(WITHIN_S) != 0, "a job without Spark ends, also if it has nothing to do"

    assert world.answers() == world.truth
    assert not any("failed" in line or "not warmed up" in line for line in job.said)


def assert_a_log_that_fails_is_read_again(world: Any, job: JobProcess, refs: list[Any]) -> None:
    away = world.path / "unmounted"
    world.log_dir.rename(away)
    world.log = FrameLog(away)
    for ref in refs:
        world.ship_window(ref, 6)
    world.log = FrameLog(world.log_dir)
    for _ in range(2):
        assert "cannot be read" in job.wait_for("is not merged")
    away.rename(world.log_dir)
    until_all_is_consumed(world, job)


def assert_a_frame_that_kills_workers_is_set_aside(world: Any, job: JobProcess, ref: Any, deadly: bytes) -> None:
    evil = world.edges[0]
    world.ship(evil, ref, FrameBody(7_000, (Partial(7_000, deadly),)))
    job.wait_for("is not merged")
    line = job.wait_for("is in quarantine")
    assert f"query {query_key(ref)}" in line and "Python worker exited" in line
    (frame,) = world.catalog.quarantine.frames()
    assert (frame.key, frame.entry.edge) == (query_key(ref), evil)
    world.ship_records(world.edges[1], ref, 7, ["/a"])
    until_all_is_consumed(world, job)


def until_all_is_consumed(world: Any, job: JobProcess) -> None:
    while not world.all_consumed():
        job.wait_for("applied after")
