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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from center.catalog import Catalog, Role, SetAside
from center.job.admission import BatchLimits
from center.job.batch_applier import BatchApplier, reason_of
from center.job.examination import SUSPECT_DEATHS, Examiner, QueryTrial, killing_frames, why_quarantined
from center.job.frame_retention import FrameRetention
from center.job.function_rates import FunctionRatePlanner
from center.job.leadership import LEASE_MS, Leadership
from center.job.ledger_writer import CatalogEvents, Deadlines, LedgerWriter
from center.job.loop_core import Released, Woken
from center.job.merge import MergeTask
from center.job.merge_loop import MergeLoop
from center.job.merger import Merger, SparkLost, SparkMerger, TasksFailed
from center.job.metrics import JobMetrics
from center.job.planner import FramePlanner
from center.job.store_pair import require_pair
from center.job.warm_up import problem_of_executors
from center.ledger import Ledger
from center.results import MAX_ANSWER_BYTES, LeaseLost, ResultStore
from center.spark.java import require_java
from center.spark.spark_session import SessionConfig, start_session
from center.storage.frame_log import FrameLog
from center.storage.progress import DriverProgress, Track
from center.storage.wake import POLL_S, Channel, PollPace, Topic, Waker
from edgewater.model.errors import StorageError
from edgewater.model.registered_query import query_from_key, query_key
from edgewater.runtime.clock import now_ms
from edgewater.runtime.health import health_server
from edgewater.runtime.tasks import Tasks
from edgewater.wire import QueryRef

log = logging.getLogger(__name__)

STOP_POLL_S = 0.2
CHECK_S = 5.0
"""Interval at which the job checks the catalog for queries that an operator has resumed."""
WARM_EVERY_S = 30.0
"""Spark ends a Python worker that is idle for a minute. Its successor would take a second."""
STANDBY_DELAY_S = 15.0
"""A driver that starts while another driver leads starts Spark this much later. The leader has just taken over, or is
starting too, and needs the CPU time."""
SUSPICIOUS = 2
"""After this many starts of the job without progress, frames are tried one by one."""


@dataclass(frozen=True, slots=True)
class JobConfig:
    """Configuration of the job.

    Attributes:
        catalog_url, results_url: SQLAlchemy URLs.
        log_dir: the frame log that the gateways write.
        work_dir: directory of the job's own files; may be deleted while the job does not run.
        wakes: how gateways wake drivers, and drivers wake APIs; None: they do not.
        metrics: ``host:port`` of ``/livez``, ``/readyz`` and ``/metrics``; None: not served.
        margin_ms: how long before the end of a staleness budget the early answer is given.
        lease_ms: how long the leading driver may be silent before another driver takes over.
        drivers: how many drivers lead at the same time, each a partition of the queries.
        max_answer_bytes: size of one answer.
        progress_dir: directory where each driver notes its work, for the next driver and the supervisor; None: in
            `work_dir`.
    """

    catalog_url: str
    results_url: str
    log_dir: Path
    work_dir: Path
    session: SessionConfig = field(default_factory=SessionConfig)
    limits: BatchLimits = field(default_factory=BatchLimits)
    wakes: Channel | None = None
    keep_frames_ms: int = 0
    retention_every_ms: int = 10_000
    metrics: str | None = None
    margin_ms: int = 200
    lease_ms: int = LEASE_MS
    drivers: int = 1
    progress_dir: Path | None = None
    max_answer_bytes: int = MAX_ANSWER_BYTES
    clock: Callable[[], int] = field(default=now_ms)


def run_job(config: JobConfig, stop: threading.Event) -> None:
    """Runs until `stop` is set.

    Raises:
        InvalidConfig: Java is missing or too old, or catalog and result store are not a pair (`require_pair`).
        StorageError: catalog or store cannot be opened.
        PySparkException, Py4JError: the Spark context is lost; only a new process can start another.
    """
    Job(config).run(stop)


class Job:
    """One run of the job; other threads may read `problems` and `metrics`.

    Any number of drivers may run over one result store. One driver leads, or one per partition of the queries: it
    applies frames and gives answers. The other drivers are warm standbys. They have a Spark session and Python workers
    that have already run.

    Args:
        tasks: has the threads of the job.
    """

    def __init__(self, config: JobConfig, tasks: Tasks | None = None) -> None:
        require_java(os.environ)
        self._config = config
        self.metrics, self._tasks = JobMetrics(), tasks or Tasks()
        self.metrics.registry.register(self._tasks.failures)
        self._catalog = Catalog(config.catalog_url)
        self._store = ResultStore(config.results_url, config.max_answer_bytes)
        require_pair(self._catalog, self._store, secrets.randbits(62) | 1)
        ledger = Ledger(margin_ms=config.margin_ms)
        self._progress = DriverProgress(config.progress_dir or config.work_dir / "progress")
        self._answers = Waker(config.wakes, Topic.ANSWERS)
        self._writer = LedgerWriter(
            ledger,
            self._store,
            CatalogEvents(self._catalog, lambda: self._store.partition),
            self.metrics,
            now_ms=config.clock,
            monotonic=time.monotonic,
            progress=self._progress,
            answered=self._answers.wake,
        )
        self.applier = BatchApplier(
            self._writer,
            self._catalog,
            self.metrics,
            config.log_dir,
            now_ms=config.clock,
            margin_ms=config.margin_ms,
        )
        self._stopping = threading.Event()
        self.leadership = Leadership(
            self._store,
            self.metrics,
            now_ms=config.clock,
            monotonic=time.monotonic,
            began=self._begin_term,
            lease_ms=config.lease_ms,
            drivers=config.drivers,
        )
        self.metrics.drivers.set(config.drivers)
        self._deadlines = Deadlines(self._writer, self.metrics, self._stopping, self.leadership.leads)
        self._functions = FunctionRatePlanner(self._writer, self._store, self._catalog, self.metrics, self._progress)
        self._threads: list[threading.Thread] = []
        self._spark_problem, self._executors_problem = "Spark is starting", ""
        self._failed_starts = 0
        self._terms, self._term_read, self._term_began_s = 0, 0, time.monotonic()
        self._loop: MergeLoop | None = None
        self._suspects: dict[QueryRef, int] = {}
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

    def _state(self) -> dict[str, str | None]:
        return {"role": self.role, "leader": self.leadership.leader or None}

    def _begin_term(self) -> None:
        """Called by the thread of the leadership."""
        self._term_began_s = time.monotonic()
        self.applier.begin_term()
        self._writer.begin_term()
        self.count_start()
        self._set_aside_suspects()
        self._terms += 1
        if self._loop is not None:
            self._loop.wake()

    def _follow_leadership(self, loop: MergeLoop) -> None:
        """Lets the loop begin a term if this driver leads, after suspicious frames were tried, or end it."""
        term = self._terms if self.leadership.leads.is_set() else 0
        if term == self._term_read:
            return
        if term:
            self.try_suspects()
            if self._failed_starts >= SUSPICIOUS:
                self.quarantine_killing_frames()
            loop.begin_term()
        else:
            loop.end_term()
        self._term_read = term

    def run(self, stop: threading.Event) -> None:
        """As `run_job`. The leading driver meets deadlines from the first moment, also while Spark starts."""
        began_s = time.monotonic()
        with contextlib.ExitStack() as stack:
            if self._config.metrics is not None:
                served = self.metrics.registry, self.problems, self._config.metrics, "spark.metrics", self._state
                address = stack.enter_context(health_server(*served, self._tasks))
                log.info("metrics are served at http://%s/metrics", address)
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
            spark = start_session(self._config.session)
            stack.callback(_quietly, spark.stop)
            log.info("Spark %s runs after %.1f s", spark.version, time.monotonic() - began_s)
            cores = self._config.session.cores
            merger = SparkMerger(spark.sparkContext, MergeTask(str(self._config.log_dir.resolve())), cores, reason_of)
            stack.callback(merger.close)
            self._tasks.thread("warm-up", lambda: self._warm_up(spark, merger, began_s))
            self._loop = loop = self.loop_over(merger)
            self._keep_merging(loop, merger, stop)
            self._hand_over()  # before Spark's end, which takes seconds

    def loop_over(self, merger: Merger) -> MergeLoop:
        """Returns the loop of this driver."""
        config, catalog, store = self._config, self._catalog, self._store
        retention = FrameRetention(
            catalog, store, FrameLog(config.log_dir), keep_ms=config.keep_frames_ms, every_ms=config.retention_every_ms
        )
        planner = FramePlanner(
            catalog, self._writer.consumed, config.limits, time.monotonic, partition=lambda: store.partition
        )

        def sweep() -> None:
            retention.run(config.clock(), store.partition)

        loop = MergeLoop(planner, self.applier, merger, config.session.cores, sweep, now_ms=config.clock)
        self._writer.on_awaited = loop.want_answers
        return loop

    def _leave_cpu_to_leader(self, stop: threading.Event) -> None:
        """Returns when this driver leads, when no other driver is alive, or after `STANDBY_DELAY_S`."""
        began_s, leadership = time.monotonic(), self.leadership
        while not leadership.leads.wait(STOP_POLL_S) and not stop.is_set():
            self._progress.step(Track.MAIN)
            waited_s = time.monotonic() - began_s
            # A renewal shows that the owner is alive. It comes after a third of the lease at the latest.
            if waited_s > (STANDBY_DELAY_S if leadership.sees_leader else self._config.lease_ms / 2000):
                return

    def _warm_up(self, spark: Any, merger: SparkMerger, began_s: float) -> None:
        try:
            if not self._config.session.is_local:
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
                problem = problem_of_executors(spark, self._config.session.cores)
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
        wakes, pace, planned = self._config.wakes, PollPace(), 0

        def heard(has_frames: bool) -> None:
            pace.heard(time.monotonic(), has_news=has_frames)
            if has_frames:
                loop.wake()

        def wake_to_stop() -> None:
            stop.wait()
            loop.wake()

        self._tasks.thread("stop", wake_to_stop)
        with contextlib.nullcontext() if wakes is None else wakes.listen(Topic.FRAMES, heard, self._tasks):
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
        if self._failed_starts >= 0 and loop.core.is_caught_up and not self._spark_problem:
            self._failed_starts = -1
            with contextlib.suppress(StorageError):
                self._store.reset_starts()
            self.metrics.start_seconds.set(time.monotonic() - self._term_began_s)
            log.info("the frames are read")

    def count_start(self) -> None:
        """Counts a start without progress as a failed attempt: a frame may have ended this process."""
        try:
            self._failed_starts = self._store.count_start() - 1
        except StorageError as exc:
            log.warning("the start is not counted: %s", exc)

    def quarantine_killing_frames(self) -> None:
        """Sets aside the pending frames that kill a process that reads them.

        Never raises; the next call tries again.
        """
        try:
            for entry, death in killing_frames(
                self._catalog,
                self._writer.consumed(),
                self._config.log_dir,
                self._config.limits,
                self._store.partition,
            ):
                self._progress.step(Track.MAIN)
                self.applier.quarantine(entry, death)
        except (StorageError, LeaseLost) as exc:
            log.warning("the pending frames cannot be tried: %s", exc)

    def _set_aside_suspects(self) -> None:
        """Counts the deaths of drivers, and leaves out the queries that may have caused them before the loop reads.

        These are quarantined queries, and suspects, which are tried first. Never raises: without a database no frame is
        applied either.
        """
        now_ms, partition, quarantine = self._config.clock(), self._store.partition, self._catalog.quarantine
        try:
            live = {query.key: query.ref for query in self._catalog.queries.all()}
            left = [live[key] for key in self._progress.take_left(partition) if key in live]
            deaths = {ref: quarantine.count_death(ref, now_ms) for ref in left}
            mine = {ref: s for ref, s in quarantine.queries().items() if query_key(ref) in partition}
            quarantine.end_pauses([ref for ref, s in mine.items() if s.state is SetAside.PAUSED])
        except StorageError as exc:
            log.warning("drivers may have died because of some queries, and these queries cannot be set aside: %s", exc)
            return
        for ref, count in deaths.items():
            log.warning("a driver died %d times while it worked on query %s", count, query_key(ref))
        quarantined = {ref: s for ref, s in mine.items() if s.state is SetAside.QUARANTINED}
        self._suspects = {
            ref: n
            for ref, n in deaths.items()
            if n >= SUSPECT_DEATHS and ref not in quarantined and query_key(ref) in partition
        }
        for ref in self._suspects:
            self.applier.leave_out(query_key(ref), SetAside.PAUSED)
        for ref, query in quarantined.items():
            log.error("query %s is quarantined: %s", query_key(ref), query.reason)
            self.applier.leave_out(query_key(ref), SetAside.QUARANTINED)

    def try_suspects(self) -> None:
        """Quarantines the suspects that kill a process which does their next steps. Releases the other suspects."""
        config, now_ms = self._config, self._config.clock()
        with Examiner(config.log_dir) as examiner:
            while self._suspects:
                ref, deaths = self._suspects.popitem()
                key = query_key(ref)
                trial = QueryTrial(config.catalog_url, config.results_url, key, now_ms, config.limits.frames_per_query)
                reason = ""
                try:
                    if reason := why_quarantined(examiner, trial, deaths):
                        self._writer.require_lease(key)
                        self._catalog.quarantine.set_query_aside(ref, SetAside.QUARANTINED, reason, now_ms)
                except (StorageError, LeaseLost) as exc:
                    log.warning("query %s cannot be tried, or set aside for good: %s", key, exc)
                self._progress.step(Track.MAIN)
                if reason:
                    log.error("query %s is quarantined: %s", key, reason)
                    self.applier.leave_out(key, SetAside.QUARANTINED)
                else:
                    self.applier.release(key)

    def release_queries(self, loop: MergeLoop) -> None:
        """Releases queries that an operator retries."""
        mine = {query_from_key(key) for key in self.applier.set_aside} - self._suspects.keys()
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
