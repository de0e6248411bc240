"""A job that lives and does nothing is found; one that waits for a core, or has nothing to do, is not."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from center.ops.supervisor import ComponentCommand
from center.ops.watchdog import HangWatch, waited_s
from center.storage.progress import DriverProgress, Track
from tests.center.ops.test_supervisor import SLEEPER, python, run, supervise, until


class Watched:
    """A watch of this process, on a clock of its own."""

    def __init__(self, path: Path) -> None:
        self.now_s, self.waits = 0.0, {1: 0.0}
        self.progress = DriverProgress(path)
        self.watch = HangWatch(path, 60.0, monotonic=lambda: self.now_s, waits=lambda _: dict(self.waits))

    def pass_s(self, seconds: int, *steps: Track, waiting: float = 0.0) -> str:
        for _ in range(seconds):
            self.now_s += 1
            self.waits[1] += waiting
            for track in steps:
                self.progress.step(track)
            if reason := self.watch.check(os.getpid()):
                return reason
        return ""


def test_a_track_that_stops_while_the_other_goes_on_is_a_hang(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    assert watched.pass_s(300) == "", "it has not begun"
    assert watched.pass_s(300, Track.MAIN, Track.LEDGER) == ""
    watched.progress.enter(Track.LEDGER, "a@1")
    assert watched.pass_s(60, Track.MAIN) == ""
    assert watched.pass_s(5, Track.MAIN) == "ledger has made no step for 61 s while it works on query a@1"


def test_a_starved_process_is_none(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.pass_s(5, Track.MAIN)
    assert watched.pass_s(3000, waiting=0.99) == ""
    assert watched.pass_s(100).startswith("main has made no step")


def test_a_function_may_take_long_and_a_machine_may_sleep(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.progress.enter(Track.FUNCTIONS, "a@1")
    assert watched.pass_s(300, Track.MAIN) == ""
    watched.now_s += 86_400
    assert watched.pass_s(30) == ""


def test_a_driver_that_does_not_lead_may_rest(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.pass_s(5, Track.MAIN, Track.LEDGER)
    watched.progress.rest(Track.LEDGER)
    assert watched.pass_s(300, Track.MAIN) == ""
    assert HangWatch(tmp_path / "none", 1.0, monotonic=lambda: 0.0).check(1) == "", "or not have begun"


def test_the_kernel_says_how_long_threads_have_waited() -> None:
    assert waited_s(os.getpgid(0)).keys() >= {os.getpid()}


def test_a_process_that_hangs_is_killed_and_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("center.ops.supervisor.WATCH_S", 0.05)
    asked: list[int] = []

    def hangs(pid: int) -> str:
        asked.append(pid)
        return "it has made no step" if len(set(asked)) == 1 else ""

    supervisor = supervise(tmp_path, ComponentCommand("job", python(SLEEPER), hangs))

    async def wait(_: asyncio.Event) -> None:
        await until(lambda: len(set(asked)) == 2)

    run(supervisor, wait)
    assert "job hangs and is killed: it has made no step" in caplog.text
    assert "job was killed by SIGKILL; starting it again" in caplog.text
