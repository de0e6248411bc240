"""The threads of the job are supervised: a failure of one is stated, and ends the process."""

from __future__ import annotations

import queue
import threading
from unittest.mock import MagicMock

import pytest

from center.job.job import Job
from edgewater.runtime.tasks import Tasks
from tests.center.job.conftest import World

WITHIN_S = 60.0
WORK = {
    "leadership": "leadership.Leadership.step",
    "deadlines": "ledger_writer.DeadlineLoop.run",
    "function-rates": "function_rates.FunctionRatePlanner.run",
    "warm-up": "job.Job._warm_up",
    "stop": "merge_loop.MergeLoop.wake",
}


@pytest.mark.parametrize("name", WORK)
def test_a_thread_of_the_job_that_fails_is_stated_and_ends_the_process(
    world: World, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    stop, ends = threading.Event(), queue.SimpleQueue[str]()

    def end() -> None:
        ends.put("".join(job.problems()))
        stop.set()

    def start(*_: object) -> MagicMock:
        if name == "stop":
            stop.set()  # its thread begins to work now
        spark = MagicMock()
        spark.sparkContext._gateway = None
        return spark

    monkeypatch.setattr(f"center.job.{WORK[name]}", lambda *_: 1 / 0)
    monkeypatch.setattr("center.job.job.start_session", start)
    job = Job(world.config, Tasks(end), clock=world.clock)
    job.run(stop)
    assert f"task {name} has failed" in ends.get(timeout=WITHIN_S)
