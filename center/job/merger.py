"""`Merger`: runs the tasks of a plan. The production's runs them on Spark; a simulation has one in its process."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from center.job.loop_core import Fault, Lane
from center.job.merge import Effort, Part, PartOutcome, warm_task

STARVED = "Python worker failed to connect back"
"""Spark's message when a Python process has not connected within `WORKER_TIMEOUT_S`. The machine is starved, or out of
processes. The attempt is repeated, and no frame is to blame."""
WARM_ROUNDS = 2
Task = Callable[[Iterator[tuple[str, Part, Effort]]], Iterator[PartOutcome]]
COSTLY = Effort(300.0, is_background=True)
EFFORTS = {Lane.LIGHT: Effort(60.0), Lane.SUSPECT: Effort(20.0), Lane.HEAVY: COSTLY, Lane.ANSWER: COSTLY}
"""A second is usual, and 10 s for a heavy query. A task that takes more is ended, as if its frames had killed it."""

log = logging.getLogger(__name__)


class TasksFailed(Exception):
    """The tasks of a plan have not returned.

    Attributes:
        fault: whether the frames may be to blame.
    """

    def __init__(self, fault: Fault, reason: str) -> None:
        super().__init__(reason)
        self.fault = fault


class SparkLost(Exception):
    """The Spark context is lost; only a new process can start another."""


class Merger(Protocol):
    """Runs tasks. Results come in any order, possibly after `cancel`. The futures raise TasksFailed or SparkLost."""

    def submit(
        self, number: int, parts: Sequence[Part], lane: Lane, description: str, prefix: str
    ) -> Future[list[PartOutcome]]:
        """Merges each part by a task (`MergeTask.merge`), and returns the outcomes in any order.

        Args:
            prefix: of the names of segments.
        """

    def probe(self) -> Future[None]:
        """Runs a task without frames."""

    def cancel(self, number: int) -> None:
        """Ends the tasks of a plan, if they run."""

    def close(self) -> None:
        """Cancels all tasks. Their futures end when the tasks do."""


class SparkMerger:
    """Each plan is a Spark job: `sc.parallelize(parts).mapPartitions(…).collect()`.

    Measured on two busy cores, a plan of one small frame: median 27–33 ms and 34 ms of CPU. A stream of Spark took 89
    ms of the JVM's CPU for it, `mapInArrow` 70 ms.

    Args:
        context: the Spark context.
        task: makes the outcomes of parts, as `MergeTask`.
        cores: number of tasks that run at the same time.
        reason_of: the text of an exception of Spark.
    """

    def __init__(self, context: Any, task: Task, cores: int, reason_of: Callable[[BaseException], str]) -> None:
        self._context, self._task, self._cores, self._reason_of = context, task, cores, reason_of
        # A plan waits for the plans of its lane. PySpark has a thread of the JVM for each of these threads.
        self._lanes = {lane: ThreadPoolExecutor(1, f"spark-{lane}") for lane in Lane}
        self._probes = ThreadPoolExecutor(1, "spark-probe")

    def submit(
        self, number: int, parts: Sequence[Part], lane: Lane, description: str, prefix: str
    ) -> Future[list[PartOutcome]]:
        inputs = [(prefix, part, EFFORTS[lane]) for part in parts]
        return self._lanes[lane].submit(self._run, _tag(number), inputs, lane, description)

    def probe(self) -> Future[None]:
        return self._probes.submit(self._warm, 1)

    def warm(self) -> None:
        """Runs tasks without frames on every core, so that workers have loaded their code. Raises as the futures."""
        for _ in range(WARM_ROUNDS):
            self._warm(self._cores)

    def keep_warm(self) -> None:
        """Starts tasks as `warm`: Spark ends a worker that is idle for a minute. Their failure is ignored."""
        self._probes.submit(self._warm, self._cores)

    def require_jvm(self) -> None:
        """Raises SparkLost if the JVM has ended."""
        process = getattr(self._context._gateway, "proc", None)
        if process is not None and process.poll() is not None:
            raise SparkLost(f"the JVM has ended with code {process.returncode}")

    def cancel(self, number: int) -> None:
        with contextlib.suppress(PySparkException, Py4JError, OSError):
            self._context.cancelJobsWithTag(_tag(number))

    def close(self) -> None:
        with contextlib.suppress(PySparkException, Py4JError, OSError):
            self._context.cancelAllJobs()
        for threads in (*self._lanes.values(), self._probes):
            threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, tag: str, parts: list[tuple[str, Part, Effort]], lane: Lane, description: str) -> list[PartOutcome]:
        with self._stating_failures():
            self._context.addJobTag(tag)
            self._context.setLocalProperty("spark.scheduler.pool", lane)  # pools share the cores equally
            try:
                self._context.setJobDescription(description)
                rdd = self._context.parallelize(parts, len(parts))
                outcomes: list[PartOutcome] = rdd.mapPartitions(self._task).collect()
            finally:
                self._context.removeJobTag(tag)
        return outcomes

    def _warm(self, tasks: int) -> None:
        with self._stating_failures():
            self._context.setJobDescription("tasks without frames")
            self._context.parallelize(range(tasks), tasks).mapPartitions(warm_task).collect()

    @contextlib.contextmanager
    def _stating_failures(self) -> Iterator[None]:
        try:
            yield
        except (PySparkException, Py4JError, OSError) as exc:
            if self._is_lost():
                raise SparkLost(self._reason_of(exc)) from None
            fault = Fault.SYSTEM if STARVED in str(exc) or isinstance(exc, OSError) else Fault.FRAMES
            raise TasksFailed(fault, self._reason_of(exc)) from None

    def _is_lost(self) -> bool:
        try:
            return bool(self._context._jsc.sc().isStopped())
        except (Py4JError, OSError, AttributeError):
            return True


def _tag(number: int) -> str:
    return f"edgewater-plan-{number}"
