"""The job: reads frames from the log and writes answers to the result store, until stopped.

The result store contains the stream's position, written in the same transaction as the applied frames. Spark's
checkpoint would be a second source of truth. It can be lost, truncated by a power cut, or unreadable to the next Spark
version. So every start of the stream uses a new, empty checkpoint and begins at the store's positions. The stream has
no other state.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from tenacity import RetryCallState, Retrying, retry_if_exception, sleep_using_event, wait_random_exponential

from center.catalog import Catalog, Role, SetAside
from center.job.admission import BatchLimits
from center.job.examination import SUSPECT_DEATHS, Examiner, QueryTrial, killing_frames, why_quarantined
from center.job.frame_source import FORMAT, FrameSource, SourceOptions
from center.job.function_rates import FunctionRatePlanner, FunctionRateThread
from center.job.leadership import LEASE_MS, Leadership
from center.job.ledger_writer import CatalogEvents, DeadlineThread, LedgerWriter
from center.job.metrics import JobMetrics
from center.job.microbatch import BatchProcessor, reason_of
from center.job.pipeline import BatchPipeline
from center.job.store_pair import require_pair
from center.job.warm_up import problem_of_executors, warm_up
from center.ledger import Ledger
from center.results import MAX_ANSWER_BYTES, LeaseLost, ResultStore
from center.spark.java import require_java
from center.spark.spark_session import SessionConfig, start_session
from center.storage.progress import DriverProgress, Track, write_whole
from edgewater.model.errors import StorageError, named
from edgewater.model.registered_query import query_from_key, query_key
from edgewater.runtime.clock import now_ms
from edgewater.runtime.health import health_server
from edgewater.wire import QueryRef

log = logging.getLogger(__name__)

PYTHON_MODULES = ("center.catalog", "center.results", "center.job.warm_up")
"""Modules that the stream's reader and the workers load."""
STOP_POLL_S = 0.2
CHECK_S = 5.0
"""Interval at which the job checks the catalog for waiting frames, and for queries that an operator has resumed."""
READS = "edgewater-reads"
"""The tag of the Spark jobs that read micro-batches."""
DRIVER, LEADS = "driver-", "leads"
"""Prefix of a driver's directory, and the name of a file in it. While the driver's stream may read, the file names the
partition of the queries that the driver leads."""
IDLE = ("Waiting for data to arrive", "Waiting for next trigger")
"""Spark's status of a stream that has read the log up to its end. Before the first read it has another status."""
MAX_RESTART_DELAY_S = 10.0
STARVED = "Python worker failed to connect back"
"""Spark's message when a Python process has not connected within 10 s, a constant in Spark. The machine is starved, or
out of processes. The attempt is repeated, and no frame is to blame."""
STANDBY_DELAY_S = 15.0
"""A driver that starts while another driver leads starts Spark this much later. The leader has just taken over, or is
starting too, and needs the CPU time."""
SUSPICIOUS = 2
"""After this many failures of the stream in a row, or starts of the job without progress, frames are tried one by
one.
"""


@dataclass(frozen=True, slots=True)
class JobConfig:
    """Configuration of the job.

    Attributes:
        catalog_url, results_url: SQLAlchemy URLs.
        log_dir: the frame log that the gateways write.
        work_dir: directory of Spark's checkpoint; may be deleted while the job does not run.
        trigger_ms: least time between the starts of two micro-batches; 0: a batch begins when the previous one has
            ended.
        metrics: ``host:port`` of ``/livez``, ``/readyz`` and ``/metrics``; None: not served.
        margin_ms: how long before the end of a staleness budget the early answer is given.
        lease_ms: how long the leading driver may be silent before another driver takes over.
        drivers: how many drivers lead at the same time, each a partition of the queries.
        max_answer_bytes: size of the slices of one answer.
        progress_dir: directory where each driver notes its work, for the next driver and the supervisor; None: in
            `work_dir`.
    """

    catalog_url: str
    results_url: str
    log_dir: Path
    work_dir: Path
    session: SessionConfig = field(default_factory=SessionConfig)
    limits: BatchLimits = field(default_factory=BatchLimits)
    trigger_ms: int = 0
    keep_frames_ms: int = 0
    retention_every_ms: int = 10_000
    metrics: str | None = None
    margin_ms: int = 200
    lease_ms: int = LEASE_MS
    drivers: int = 1
    progress_dir: Path | None = None
    max_answer_bytes: int = MAX_ANSWER_BYTES
    clock: Callable[[], int] = field(default=now_ms)

    @property
    def plans_ahead(self) -> bool:
        """Whether a micro-batch is planned while the tasks of the previous one run.

        True if executors are on other machines.
        """
        return not self.session.is_local


def run_job(config: JobConfig, stop: threading.Event) -> None:
    """Runs until `stop` is set.

    Raises:
        InvalidConfig: Java is missing or too old, or catalog and result store are not a pair (`require_pair`).
        StorageError: catalog or store cannot be opened.
        PySparkException, Py4JError: the Spark context is lost; only a new process can start another.
    """
    Job(config).run(stop)


class Job:
    """One run of the job; other threads may read `problem` and `metrics`.

    Any number of drivers may run over one result store. One driver leads, or one per partition of the queries: it
    applies frames and gives answers. The other drivers are warm standbys. They have a Spark session and Python workers
    that have already run.
    """

    def __init__(self, config: JobConfig) -> None:
        require_java(os.environ)
        self._config = config
        self.metrics = JobMetrics()
        self._catalog = Catalog(config.catalog_url)
        self._store = ResultStore(config.results_url, config.max_answer_bytes)
        require_pair(self._catalog, self._store, secrets.randbits(62) | 1)
        ledger = Ledger(margin_ms=config.margin_ms)
        self._progress = DriverProgress(config.progress_dir or config.work_dir / "progress")
        self._writer = LedgerWriter(
            ledger,
            self._store,
            CatalogEvents(self._catalog, lambda: self._store.partition),
            self.metrics,
            now_ms=config.clock,
            monotonic=time.monotonic,
            progress=self._progress,
        )
        self.processor = BatchProcessor(
            self._writer,
            self._catalog,
            self.metrics,
            config.log_dir,
            now_ms=config.clock,
            monotonic=time.monotonic,
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
        leads = self.leadership.leads
        self._deadlines = DeadlineThread(self._writer, self.metrics, self._stopping, leads)
        planner = FunctionRatePlanner(self._writer, self._store, self._catalog, self.metrics, self._progress)
        self._functions = FunctionRateThread(planner, self._stopping, leads)
        self._stream_problem, self._executors_problem = "Spark is starting", ""
        self._warm = threading.Event()
        self._failed_attempts = 0
        self._terms, self._term_began_s, self._applied_before, self._is_read = 0, time.monotonic(), 0, False
        self._leads_file: Path | None = None
        # Protects the leads file: a term begins in another thread than the thread that reads it.
        self._reading = threading.Lock()
        self._suspects: dict[QueryRef, int] = {}
        self._released_at_s = self._waiting_at_s = 0.0
        self._are_waiting = False
        self._applied_at_check = -1

    @property
    def role(self) -> Role:
        return "leader" if self.leadership.leads.is_set() else "standby"

    def problem(self) -> str:
        """Why this driver cannot do its work; empty: it can. The work of a standby is to be warm.

        The leader is without problem when the stream has applied a batch, or when no frame remains to be applied.
        """
        if self.role == "standby":
            return self.leadership.problem or self._executors_problem or self._stream_problem
        unread = "" if self._is_read else "the frames are not read yet"
        others = self.processor.problem or self._deadlines.problem or self.leadership.problem
        return self._executors_problem or self._stream_problem or unread or others

    def _missing(self) -> list[str]:
        problem = self.problem()
        return [problem] if problem else []

    def _state(self) -> dict[str, str | None]:
        return {"role": self.role, "leader": self.leadership.leader or None}

    def _begin_term(self) -> None:
        self._term_began_s, self._applied_before, self._is_read = time.monotonic(), self.processor.applied, False
        self.processor.begin_term()
        self._writer.begin_term()
        self.count_start()
        self._set_aside_suspects()
        with self._reading:
            self._terms += 1
            if self._leads_file is not None:
                self._leads_file.unlink(missing_ok=True)  # it may name another partition, which this driver led earlier
                if self._failed_attempts < SUSPICIOUS and not self._suspects:
                    write_whole(self._leads_file, str(self._store.partition))

    def _follow_leadership(self, leads_file: Path) -> None:
        """Lets the stream read if this driver leads, after suspicious frames were tried. Otherwise parks the stream."""
        term, leads = self._terms, self.leadership.leads.is_set()
        if leads and not leads_file.exists():
            self.try_suspects()
            if self._failed_attempts >= SUSPICIOUS:
                self.quarantine_killing_frames()
        with self._reading:
            if not self.leadership.leads.is_set():
                leads_file.unlink(missing_ok=True)
            elif leads and term == self._terms and not leads_file.exists():
                write_whole(leads_file, str(self._store.partition))

    def run(self, stop: threading.Event) -> None:
        """As `run_job`. The leading driver meets deadlines from the first moment, also while Spark starts."""
        began_s = time.monotonic()
        with contextlib.ExitStack() as stack:
            if self._config.metrics is not None:
                address = stack.enter_context(
                    health_server(
                        self.metrics.registry, self._missing, self._config.metrics, "spark.metrics", self._state
                    )
                )
                log.info("metrics are served at http://%s/metrics", address)
            self._leads_file = stack.enter_context(own_directory(self._config.work_dir)) / LEADS
            stack.callback(self._close)
            self._progress.step(Track.MAIN)
            self.leadership.start()
            self._deadlines.start()
            self._functions.start()
            self._leave_cpu_to_leader(stop)
            if stop.is_set():
                return
            spark = start_session(self._config.session, PYTHON_MODULES)
            stack.callback(_quietly, spark.stop)
            spark.dataSource.register(FrameSource)
            log.info("Spark %s runs after %.1f s", spark.version, time.monotonic() - began_s)
            # Spark starts the stream's own Python processes meanwhile.
            threading.Thread(target=self._warm_up, args=(spark, began_s), name="warm-up", daemon=True).start()
            self._keep_streaming(spark, stop, self._leads_file)
            self._hand_over()  # before Spark's end, which takes seconds

    def _leave_cpu_to_leader(self, stop: threading.Event) -> None:
        """Returns when this driver leads, when no other driver is alive, or after `STANDBY_DELAY_S`."""
        began_s, leadership = time.monotonic(), self.leadership
        while not leadership.leads.wait(STOP_POLL_S) and not stop.is_set():
            self._progress.step(Track.MAIN)
            waited_s = time.monotonic() - began_s
            # A renewal shows that the owner is alive. It comes after a third of the lease at the latest.
            if waited_s > (STANDBY_DELAY_S if leadership.sees_leader else self._config.lease_ms / 2000):
                return

    def _warm_up(self, spark: Any, began_s: float) -> None:
        try:
            if not self._config.session.is_local:
                self._await_executors(spark)
            warm_up(spark, self._config.session.cores)
            log.info("Spark's workers are warm after %.1f s", time.monotonic() - began_s)
        except (PySparkException, Py4JError, OSError) as exc:
            log.warning("Spark's workers are not warmed up: %s", reason_of(exc))
        finally:
            self._warm.set()

    def _await_executors(self, spark: Any) -> None:
        """Returns when executors can do the job's work, or the job stops. Until then the job is not ready."""
        while not self._stopping.is_set():
            try:
                problem = problem_of_executors(spark, self._config.session.cores)
            except PySparkException as exc:
                problem = f"the executors run no Python task: {reason_of(exc)}"
            if problem != self._executors_problem:
                self._executors_problem = problem
                log.log(logging.CRITICAL if problem else logging.INFO, "%s", problem or "executors are as expected")
            if not problem:
                return
            self._stopping.wait(CHECK_S)

    def _keep_streaming(self, spark: Any, stop: threading.Event, leads_file: Path) -> None:
        """Restarts the stream whenever it fails, until `stop` is set or the Spark context is lost."""
        context = spark.sparkContext
        pipeline = BatchPipeline(
            self.processor,
            before_read=partial(context.addJobTag, READS),
            cancel=partial(_quietly, partial(context.cancelJobsWithTag, READS)),
            plans_ahead=self._config.plans_ahead,
            overlaps=lambda: self._failed_attempts == 0,
        )
        attempts = Retrying(
            retry=retry_if_exception(lambda exc: not stop.is_set() and _is_stream_failure(exc, spark)),
            wait=wait_random_exponential(multiplier=0.2, max=MAX_RESTART_DELAY_S),
            sleep=sleep_using_event(stop),
            before_sleep=self._failed,
            reraise=True,
        )
        try:
            attempts(self._stream, spark, pipeline, stop, leads_file)
        except Exception as exc:
            if stop.is_set():
                return
            log.critical("the Spark context is lost: %s", reason_of(exc))
            raise
        finally:
            pipeline.close()

    def _stream(self, spark: Any, pipeline: BatchPipeline, stop: threading.Event, leads_file: Path) -> None:
        if stop.is_set():
            return
        # A power of two: if no frame is to blame, the trials become rarer and rarer.
        if self._failed_attempts >= SUSPICIOUS and self._failed_attempts & (self._failed_attempts - 1) == 0:
            leads_file.unlink(missing_ok=True)
        self._follow_leadership(leads_file)
        self._applied_before = self.processor.applied
        self._progress.step(Track.MAIN)
        pipeline.begin()
        read_in_term = 0
        query = start_stream(spark, self._config, pipeline, leads_file)
        try:
            while not stop.is_set():
                if query.awaitTermination(STOP_POLL_S) and not stop.is_set():
                    raise StreamStopped("the stream stopped without a request")
                if pipeline.failure is not None:
                    raise StreamStopped(f"a batch has failed: {named(pipeline.failure)}")
                self._check_progress()
                self._follow_leadership(leads_file)
                if self._release_queries():
                    raise StreamStopped("a query that was set aside is retried")
                if leads_file.exists():
                    read_in_term = read_in_term or self._terms
                    if read_in_term != self._terms:
                        raise StreamStopped("this driver leads again: the frames that it had left out are read again")
                self._observe(query)
        finally:
            pipeline.end()
            _quietly(query.stop)

    def _observe(self, query: Any) -> None:
        """Notes progress of the stream: it reads frames, or is warm."""
        leads = self.leadership.leads.is_set()
        if not self._warm.is_set() or not (self._stream_problem or (leads and not self._is_read)):
            return
        if not leads and query.status["message"] in IDLE:
            self._stream_problem = ""
            log.info("this standby is warm")
        elif leads and (self.processor.applied > self._applied_before or self._is_done(query)):
            self._stream_problem, self._is_read, self.processor.problem = "", True, ""
            self._failed_attempts = 0
            self._store.reset_starts()
            self.metrics.start_seconds.set(time.monotonic() - self._term_began_s)
            log.info("the stream is read")

    def count_start(self) -> None:
        """Counts a start without progress as a failed attempt: a frame may have ended this process."""
        try:
            self._failed_attempts = self._store.count_start() - 1
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
                self.processor.quarantine(entry, death)
        except (StorageError, LeaseLost) as exc:
            log.warning("the pending frames cannot be tried: %s", exc)

    def _set_aside_suspects(self) -> None:
        """Counts the deaths of drivers, and leaves out the queries that may have caused them before the stream reads.

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
            self.processor.leave_out(query_key(ref), SetAside.PAUSED)
        for ref, query in quarantined.items():
            log.error("query %s is quarantined: %s", query_key(ref), query.reason)
            self.processor.leave_out(query_key(ref), SetAside.QUARANTINED)

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
                    self.processor.leave_out(key, SetAside.QUARANTINED)
                else:
                    self.processor.release(key)

    def _release_queries(self) -> bool:
        """Releases queries that an operator retries; returns whether there are any."""
        mine = {query_from_key(key) for key in self.processor.set_aside} - self._suspects.keys()
        if not mine or time.monotonic() - self._released_at_s < CHECK_S:
            return False
        self._released_at_s = time.monotonic()
        try:
            set_aside = self._catalog.quarantine.queries().keys()
            known = {query.ref: query for query in self._catalog.queries.all(deleted=True)}
        except StorageError:
            return False
        ended = (mine - set_aside) & known.keys()
        for ref in ended:
            self.processor.release(query_key(ref))
        return any(known[ref].deleted_at_ms is None for ref in ended)

    def _check_progress(self) -> None:
        """Notes a step of the main track.

        If frames wait, it does so only if frames were applied since the last call.
        """
        if self.processor.applied != self._applied_at_check or not self._frames_wait():
            self._applied_at_check = self.processor.applied
            self._progress.step(Track.MAIN)

    def _frames_wait(self) -> bool:
        """Returns whether frames wait for this driver. False if the database cannot be read."""
        if time.monotonic() - self._waiting_at_s >= CHECK_S:
            self._waiting_at_s = time.monotonic()
            try:
                self._catalog.version()
                self._are_waiting = self.leadership.leads.is_set() and not self.has_applied_all()
            except StorageError:
                self._are_waiting = False
        return self._are_waiting

    def _is_done(self, query: Any) -> bool:
        """Returns whether the stream waits and all frames are applied.

        Spark's status is not enough: a stream also waits if it cannot reach the catalog, or between two attempts at a
        failing batch.
        """
        return query.status["message"] in IDLE and self.has_applied_all()

    def has_applied_all(self) -> bool:
        """Whether every indexed frame is applied, except frames of queries that are set aside."""
        try:
            last, consumed = self._catalog.frames.last_positions(), self._writer.consumed()
        except StorageError:
            return False
        set_aside, partition = self.processor.set_aside, self._store.partition
        return all(
            position <= consumed.get(key, 0) or key in set_aside for key, position in last.items() if key in partition
        )

    def _failed(self, attempt: RetryCallState) -> None:
        exc = attempt.outcome.exception() if attempt.outcome else None
        reason = reason_of(self.processor.failure or exc)
        self.processor.failure = None
        if self.processor.applied > self._applied_before:
            self._failed_attempts = 0
        if STARVED not in reason:
            self._failed_attempts += 1
        self._stream_problem = f"the stream failed and is restarted: {reason}"
        self.metrics.failures.labels("stream").inc()
        log.error("%s", self._stream_problem)

    def _hand_over(self) -> None:
        self._stopping.set()
        self._writer.close()
        self.leadership.close()

    def _close(self) -> None:
        self._hand_over()
        for thread in (self._deadlines, self._functions):
            if thread.is_alive():
                thread.join()
        self._store.close()
        self._catalog.close()
        self._progress.close()


class StreamStopped(Exception):
    """The stream ended without a request of this process."""


def start_stream(
    spark: Any, config: JobConfig, process: Callable[[Any, int], None], leads_file: Path | None = None
) -> Any:
    """Starts the streaming query at the result store's positions. Register `FrameSource` before.

    Args:
        leads_file: in the driver's own directory. The stream reads the frames of the partition that the file names.
            None: the stream always reads the frames of all queries.
    """
    options = SourceOptions(
        catalog_url=config.catalog_url,
        results_url=config.results_url,
        log_dir=str(config.log_dir),
        leads=str(leads_file or ""),
        limits=config.limits,
        parallelism=config.session.cores,
        plans_ahead=config.plans_ahead,
        keep_frames_ms=config.keep_frames_ms,
        retention_every_ms=config.retention_every_ms,
    )
    stream = spark.readStream.format(FORMAT).options(**options.to_options()).load()
    writer = stream.writeStream.queryName("edgewater").foreachBatch(process)
    writer = writer.option(
        "checkpointLocation", str(new_checkpoint(leads_file.parent if leads_file else config.work_dir))
    )
    return writer.trigger(processingTime=f"{config.trigger_ms} milliseconds").start()


@contextlib.contextmanager
def own_directory(work_dir: Path) -> Iterator[Path]:
    """Makes a directory under `work_dir` for this driver. Directories of drivers that have ended are deleted."""
    work_dir.mkdir(parents=True, exist_ok=True)
    for other in work_dir.glob(f"{DRIVER}*"):
        with contextlib.suppress(OSError), (other / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(other, ignore_errors=True)
    unlocked = Path(tempfile.mkdtemp(dir=work_dir))
    # It gets a driver's name only when it is locked: an unlocked one would be deleted by another starting driver.
    with (unlocked / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        directory = unlocked.rename(work_dir / f"{DRIVER}{unlocked.name}")
        yield directory
        shutil.rmtree(directory, ignore_errors=True)


def new_checkpoint(work_dir: Path) -> Path:
    """Returns an empty directory under `work_dir`. Directories of earlier starts are deleted."""
    parent = work_dir / "checkpoints"
    if parent.exists():
        shutil.rmtree(parent, ignore_errors=True)
    parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(dir=parent))


def _is_stream_failure(exc: BaseException, spark: Any) -> bool:
    """Returns whether a new stream on the same JVM may succeed."""
    try:
        raised = isinstance(exc, PySparkException | Py4JJavaError | StreamStopped)
        return raised and not spark.sparkContext._jsc.sc().isStopped()
    except (Py4JError, OSError):
        return False


def _quietly(stop: Callable[[], None]) -> None:
    """Calls a function that stops or cancels something in Spark, and logs its failure: the JVM may be gone."""
    try:
        stop()
    except (PySparkException, Py4JError, OSError) as exc:
        log.warning("while stopping: %s", reason_of(exc))
