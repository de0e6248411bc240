"""The job: merges the frames of the log on Spark and writes answers to the result store, until stopped.

The result store contains the positions of the applied frames, written in the same transaction as their answers. The job
has no other state: a driver that begins to lead begins at the store's positions. Spark only runs tasks.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from center.catalog import Catalog, Role, SetAside
from center.config import CenterConfig
from center.job.admission import BatchLimits
from center.job.batch_applier import BatchApplier, reason_of
from center.job.delta_sweep import DeltaSweep
from center.job.frame_retention import FrameRetention
from center.job.function_rates import FunctionRatePlanner
from center.job.job_parts import JobParts
from center.job.leadership import Leadership
from center.job.ledger_writer import DeadlineLoop, LedgerWriter
from center.job.loop_core import Released, Woken
from center.job.merge import MergeTask
from center.job.merge_loop import MergeLoop
from center.job.merger import Merger, SparkLost, SparkMerger, TasksFailed
from center.job.metrics import JobMetrics
from center.job.planner import FramePlanner
from center.job.warm_up import problem_of_executors
from center.ledger import Ledger
from center.results import LeaseLost, ResultStore
from center.results.store_pair import require_pair
from center.spark.java import require_java
from center.spark.spark_session import SessionConfig, start_session
from center.storage.delta_segments import DeltaSegments
from center.storage.frame_log import FrameLog
from center.storage.progress import DriverProgress, Track
from center.storage.wake import POLL_S, PollPace, Topic, Waker, channel_of
from edgewater.base.errors import StorageError
from edgewater.model.registered_query import query_from_key, query_key
from edgewater.runtime.clock import now_ms
from edgewater.runtime.tasks import Tasks

log = logging.getLogger(__name__)

STOP_POLL_S = 0.2  # limit: time of a stop
CHECK_S = 5.0  # limit: reads of the catalog
"""Interval at which the job checks the catalog for queries that an operator has resumed."""
WARM_EVERY_S = 30.0  # derived: half of the minute after which Spark ends a worker
"""Spark ends a Python worker that is idle for a minute. Its successor would take a second."""
MAX_DEATHS = 3  # limit: two may be chance, and each costs a start.
"""A query is quarantined if drivers died this often while they worked on it, within an hour of each other."""
STANDBY_DELAY_S = 15.0
"""A driver that starts while another driver leads starts Spark this much later. The leader has just taken over, or is
starting too, and needs the CPU time."""


class Job:
    """One run of the job; other threads may read `problems` and `metrics`.

    Any number of drivers may run over one result store. One driver leads, or one per partition of the queries: it
    applies frames and gives answers. The other drivers are warm standbys. They have a Spark session and Python workers
    that have already run.

    Args:
        tasks: has the threads of the job.
        session: of Spark; None: as the configuration says.
        clock: wall clock, ms.

    Raises:
        InvalidConfig: Java is missing or too old, or catalog and result store are not a pair (`require_pair`).
        StorageError: catalog or store cannot be opened.
    """

    def __init__(
        self,
        config: CenterConfig,
        tasks: Tasks | None = None,
        *,
        session: SessionConfig | None = None,
        limits: BatchLimits = BatchLimits(),  # noqa: B008
        clock: Callable[[], int] = now_ms,
    ) -> None:
        require_java(os.environ)
        spark = config.spark
        self._config, self._limits, self._clock = config, limits, clock
        self._session = session or SessionConfig(spark.master, driver_memory=spark.driver_memory, conf=spark.conf)
        self._wakes = channel_of(config.catalog_url)
        self.metrics, self._tasks = JobMetrics(), tasks or Tasks()
        self.metrics.registry.register(self._tasks.failures)
        self._catalog = Catalog(config.catalog_url)
        self._segments = DeltaSegments(config.deltas_dir)
        self._store = ResultStore(config.results_url, spark.max_answer_bytes, segments=self._segments)
        require_pair(self._catalog, self._store, secrets.randbits(62) | 1)
        self._progress = DriverProgress(config.progress_dir)
        self._answers = Waker(self._wakes, Topic.ANSWERS)
        self._shared = shared = JobParts(self._catalog, self._store, self.metrics, clock, self._progress)
        self._writer = LedgerWriter(Ledger(), shared, monotonic=time.monotonic, answered=self._answers.wake)
        self.applier = BatchApplier(self._writer, shared, config.log_dir)
        self._stopping = threading.Event()
        self.leadership = Leadership(
            shared, monotonic=time.monotonic, began=self._begin_term, lease_ms=spark.lease_ms, drivers=spark.drivers
        )
        self.metrics.drivers.set(spark.drivers)
        self._deadlines = DeadlineLoop(self._writer, self.metrics, self._stopping, self.leadership.leads)
        self._functions = FunctionRatePlanner(self._writer, shared)
        self._threads: list[threading.Thread] = []
        self._spark_problem, self._executors_problem = "Spark is starting", ""
        self._is_read = False
        self._terms, self._term_read, self._term_began_s = 0, 0, time.monotonic()
        self._loop: MergeLoop | None = None
        self._released_at_s = self._warm_at_s = 0.0
        self._applied_at_check = -1

    @property
    def role(self) -> Role:
        return "leader" if self.leadership.leads.is_set() else "standby"

    def problem(self) -> str:
        """Why this driver cannot do its work; empty: it can. The work of a standby is to be warm.

        The leader is without problem when it has applied a plan, or when no frame remains to be applied.
        """
        if self.role == "standby" or self._loop is None:
            return self.leadership.problem or self._executors_problem or self._spark_problem
        core = self._loop.core
        unread = "" if core.is_caught_up else "the frames are not read yet"
        not_applied = f"frames are not applied: {core.problem}" if core.problem else ""
        others = not_applied or self._deadlines.problem or self.leadership.problem
        return self._executors_problem or self._spark_problem or others or unread

    def problems(self) -> list[str]:
        """Returns which threads have failed, and `problem`."""
        return [*self._tasks.missing(), *filter(None, [self.problem()])]

    def state(self) -> dict[str, str | None]:
        """Returns the role of this driver, and which drivers lead."""
        return {"role": self.role, "leader": self.leadership.leader or None}

    def _begin_term(self) -> None:
        """Called by the thread of the leadership."""
        self._term_began_s, self._is_read = time.monotonic(), False
        self.applier.begin_term()
        self._writer.begin_term()
        self._set_aside_deadly()
        self._terms += 1
        if self._loop is not None:
            self._loop.wake()

    def _follow_leadership(self, loop: MergeLoop) -> None:
        """Lets the loop begin a term if this driver leads, or end it."""
        term = self._terms if self.leadership.leads.is_set() else 0
        if term == self._term_read:
            return
        if term:
            loop.begin_term()
        else:
            loop.end_term()
        self._term_read = term

    def run(self, stop: threading.Event) -> None:
        """Runs until `stop` is set. The leading driver meets deadlines from the first moment, also while Spark starts.

        Raises:
            PySparkException, Py4JError: the Spark context is lost; only a new process can start another.
        """
        began_s = time.monotonic()
        with contextlib.ExitStack() as stack:
            remove_old_state(self._config.work_dir)
            stack.callback(self._close)
            self._progress.step(Track.MAIN)
            self.leadership.start(self._tasks)
            leads = self.leadership.leads
            self._threads = [
                self._tasks.thread("deadlines", self._deadlines.run),
                self._tasks.thread("function-rates", lambda: self._functions.run(self._stopping, leads)),
            ]
            self._leave_cpu_to_leader(stop)
            if stop.is_set():
                return
            spark = start_session(self._session)
            stack.callback(_quietly, spark.stop)
            log.info("Spark %s runs after %.1f s", spark.version, time.monotonic() - began_s)
            cores = self._session.cores
            task = MergeTask(self._config.log_dir, self._segments)
            merger = SparkMerger(spark.sparkContext, task, cores, reason_of)
            stack.callback(merger.close)
            self._tasks.thread("warm-up", lambda: self._warm_up(spark, merger, began_s))
            self._loop = loop = self.loop_over(merger)
            self._keep_merging(loop, merger, stop)
            self._hand_over()  # before Spark's end, which takes seconds

    def loop_over(self, merger: Merger) -> MergeLoop:
        """Returns the loop of this driver."""
        config, store = self._config, self._store
        retention = FrameRetention(self._shared, FrameLog(config.log_dir), keep_ms=config.retention.frames_ms)
        planner = FramePlanner(
            self._catalog, self._writer.consumed, self._limits, time.monotonic, partition=lambda: store.partition
        )

        def drop_applied() -> None:
            retention.run(self._clock(), store.partition)

        sweep = DeltaSweep(self._shared)
        loop = MergeLoop(planner, self.applier, merger, self._session.cores, drop_applied, sweep, now_ms=self._clock)
        self._writer.on_awaited = loop.want_answers
        return loop

    def _leave_cpu_to_leader(self, stop: threading.Event) -> None:
        """Returns when this driver leads, when no other driver is alive, or after `STANDBY_DELAY_S`."""
        began_s, leadership = time.monotonic(), self.leadership
        while not leadership.leads.wait(STOP_POLL_S) and not stop.is_set():
            self._progress.step(Track.MAIN)
            waited_s = time.monotonic() - began_s
            # A renewal shows that the owner is alive. It comes after a third of the lease at the latest.
            if waited_s > (STANDBY_DELAY_S if leadership.sees_leader else self._config.spark.lease_ms / 2000):
                return

    def _warm_up(self, spark: Any, merger: SparkMerger, began_s: float) -> None:
        try:
            if not self._session.is_local:
                self._await_executors(spark)
            merger.warm()
            log.info("Spark's workers are warm after %.1f s", time.monotonic() - began_s)
        except (TasksFailed, SparkLost, PySparkException, Py4JError, OSError) as exc:
            log.warning("Spark's workers are not warmed up: %s", reason_of(exc))
        finally:
            self._warm_at_s = time.monotonic()
            self._spark_problem = ""

    def _await_executors(self, spark: Any) -> None:
        """Returns when executors can do the job's work, or the job stops. Until then the job is not ready."""
        while not self._stopping.is_set():
            try:
                problem = problem_of_executors(spark, self._session.cores)
            except (PySparkException, Py4JError) as exc:
                problem = f"the executors run no Python task: {reason_of(exc)}"
            if problem != self._executors_problem:
                self._executors_problem = problem
                log.log(logging.CRITICAL if problem else logging.INFO, "%s", problem or "executors are as expected")
            if not problem:
                return
            self._stopping.wait(CHECK_S)

    def _keep_merging(self, loop: MergeLoop, merger: SparkMerger, stop: threading.Event) -> None:
        """Runs the loop until `stop` is set. Raises SparkLost."""
        pace, planned = PollPace(), 0

        def heard(has_frames: bool) -> None:
            pace.heard(time.monotonic(), has_news=has_frames)
            if has_frames:
                loop.wake()

        def wake_to_stop() -> None:
            stop.wait()
            loop.wake()

        self._tasks.thread("stop", wake_to_stop)
        with self._wakes.listen(Topic.FRAMES, heard, self._tasks):
            while not stop.is_set():
                self._check_progress(loop)
                leads = self.leadership.leads.is_set()
                if leads:
                    self._answers.beat()
                try:
                    merger.require_jvm()
                    self._follow_leadership(loop)
                    self.release_queries(loop)
                    if not loop.turn(pace.interval_s(time.monotonic()) if leads else POLL_S):
                        loop.handle(Woken())
                except LeaseLost:
                    loop.end_term()
                    self._term_read = 0
                    stop.wait(STOP_POLL_S)  # until `leads` is cleared, too
                except SparkLost as exc:
                    log.critical("the Spark context is lost: %s", exc)
                    raise
                if loop.planned != planned:
                    planned = loop.planned
                    pace.found(time.monotonic())
                self._observe(loop, merger)

    def _observe(self, loop: MergeLoop, merger: SparkMerger) -> None:
        if self._warm_at_s and time.monotonic() - self._warm_at_s > WARM_EVERY_S:
            self._warm_at_s = time.monotonic()
            merger.keep_warm()
        if not self._is_read and loop.core.is_caught_up and not self._spark_problem:
            self._is_read = True
            self.metrics.start_seconds.set(time.monotonic() - self._term_began_s)
            log.info("the frames are read")

    def _set_aside_deadly(self) -> None:
        """Counts the deaths of drivers, and leaves out the queries that may have caused `MAX_DEATHS` of them.

        Never raises: without a database no frame is applied either.
        """
        now_ms, partition, quarantine = self._clock(), self._store.partition, self._catalog.quarantine
        try:
            live = {query.key: query.ref for query in self._catalog.queries.all()}
            for ref in [live[key] for key in self._progress.take_left(partition) if key in live]:
                deaths = quarantine.count_death(ref, now_ms)
                reason = f"the job died {deaths} times while it worked on it"
                log.warning("query %s: %s", query_key(ref), reason)
                if deaths >= MAX_DEATHS:
                    quarantine.set_query_aside(ref, SetAside.QUARANTINED, reason, now_ms)
            mine = {ref: s for ref, s in quarantine.queries().items() if query_key(ref) in partition}
            quarantine.end_pauses([ref for ref, s in mine.items() if s.state is SetAside.PAUSED])
        except StorageError as exc:
            log.warning("drivers may have died because of some queries, and these queries cannot be set aside: %s", exc)
            return
        for ref, query in mine.items():
            if query.state is SetAside.QUARANTINED:
                log.error("query %s is quarantined: %s", query_key(ref), query.reason)
                self.applier.leave_out(query_key(ref), SetAside.QUARANTINED)

    def release_queries(self, loop: MergeLoop) -> None:
        """Releases queries that an operator retries."""
        mine = {query_from_key(key) for key in self.applier.set_aside}
        if not mine or time.monotonic() - self._released_at_s < CHECK_S:
            return
        self._released_at_s = time.monotonic()
        try:
            set_aside = self._catalog.quarantine.queries().keys()
            known = {query.ref for query in self._catalog.queries.all(deleted=True)}
        except StorageError:
            return
        for ref in (mine - set_aside) & known:
            self.applier.release(query_key(ref))
            loop.handle(Released(query_key(ref)))

    def _check_progress(self, loop: MergeLoop) -> None:
        """Notes a step of the main track. While plans are merged, it does so only if plans were applied meanwhile."""
        if loop.applied != self._applied_at_check or not loop.core.is_busy:
            self._applied_at_check = loop.applied
            self._progress.step(Track.MAIN)

    def _hand_over(self) -> None:
        self._stopping.set()
        self._writer.close()
        self.leadership.close()

    def _close(self) -> None:
        self._hand_over()
        for thread in self._threads:
            thread.join()
        self._store.close()
        self._catalog.close()
        self._progress.close()


def remove_old_state(work_dir: Path) -> None:
    """Deletes the directories that drivers of releases up to 0.3 have left. A driver that runs has locked its own."""
    for left in work_dir.glob("driver-*"):
        with contextlib.suppress(OSError), (left / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)


def _quietly(stop: Callable[[], None]) -> None:
    """Calls a function that stops or cancels something in Spark, and logs its failure: the JVM may be gone."""
    try:
        stop()
    except (PySparkException, Py4JError, OSError) as exc:
        log.warning("while stopping: %s", reason_of(exc))
