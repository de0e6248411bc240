"""A `Merger` without Spark: tasks run in this process, at once. `test_mergers.py` holds both to the same tests."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from center.job.loop_core import Fault, Lane
from center.job.merge import MergeTask, Part, PartOutcome, warm_task
from center.job.merger import TasksFailed


class InProcessMerger:
    """Runs tasks when they are submitted, with copies of their frames.

    Args:
        kills: whether a part ends the worker that reads it.
    """

    def __init__(self, task: MergeTask, kills: Callable[[Part], bool] = lambda _: False) -> None:
        self._task, self._kills = task, kills

    def submit(
        self, number: int, parts: Sequence[Part], lane: Lane, description: str, prefix: str
    ) -> Future[list[PartOutcome]]:
        done: Future[list[PartOutcome]] = Future()
        if any(self._kills(part) for part in parts):
            done.set_exception(TasksFailed(Fault.FRAMES, "a worker was ended by SIGSEGV"))
        else:
            done.set_result([self._task.merge(prefix, pickle.loads(pickle.dumps(part))) for part in parts])
        return done

    def probe(self) -> Future[None]:
        warm_task(iter(range(1)))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def cancel(self, number: int) -> None:
        pass

    def close(self) -> None:
        pass
