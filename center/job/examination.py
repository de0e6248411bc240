"""Tries frames and queries in a separate process, which they may kill: by memory, time or a fault of native code."""

from __future__ import annotations

import multiprocessing
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Self

from center.catalog import Catalog
from center.job.admission import BatchLimits
from center.job.batch_applier import to_batch
from center.job.merge import SkipKind, Skipped, SlicePartial, is_for_memory, merge_partials, read_frames
from center.ledger import EdgesChanged, Ledger
from center.results import ResultStore
from center.storage.frame_log import FrameEntry, FrameLog
from center.storage.query_partition import ALL_QUERIES, QueryPartition
from edgewater.model.errors import StorageError
from edgewater.model.registered_query import query_key
from edgewater.synopses import GroupedAggregate

TIMEOUT_S = 20.0
"""How long reading and merging one frame may take; tens of milliseconds are usual. Time in which the process waits for
a core does not count: on a starved machine no frame is at fault."""
START_TIMEOUT_S = 60.0
MEMORY_BYTES = 4 << 30
"""Address space that a frame may take, in addition to the process's own when it starts."""
SUSPECT_DEATHS = 2
"""A query is tried if the job died this often while it worked on the query, within an hour of each other."""
MAX_DEATHS = 5
"""A query is quarantined after this many deaths, whatever the trial says. The cause may exist only in the job."""
TRIES = 2
"""Attempts per frame: a frame that kills a process also kills the next process. A process may die for other reasons."""


@dataclass(frozen=True, slots=True)
class PartialTrial:
    """The properties of a partial, as far as it can be read.

    Attributes:
        problem: why it cannot be used; empty: it can.
    """

    slice_start_ms: int
    size: int
    records: int | None = None
    groups: int | None = None
    measures: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of a process that read and merged a frame.

    Attributes:
        death: how the process ended; empty: it lives.
        problem: why the frame cannot be read; empty: it can.
    """

    death: str = ""
    problem: str = ""
    partials: tuple[PartialTrial, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class QueryTrial:
    """A query to try: the process does the job's next steps with a copy of the query.

    Attributes:
        frames: how many of its next frames are applied.
    """

    catalog_url: str
    results_url: str
    key: str
    now_ms: int
    frames: int


class Examiner:
    """Tries frames and queries one after the other, in one process until one of them kills it. A context manager.

    Raises:
        StorageError: by `try_frame` and `try_query`: the process cannot be started, or the log or a database cannot be
            used. It says nothing about the frame or the query.
    """

    def __init__(self, log_dir: str | Path, timeout_s: float = TIMEOUT_S) -> None:
        self._log_dir, self._timeout_s = str(log_dir), timeout_s
        self._process: SpawnProcess | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._end()

    def try_frame(self, entry: FrameEntry) -> Trial:
        """Reads and merges a frame as executors and driver do."""
        return self._try(entry)

    def try_query(self, query: QueryTrial) -> Trial:
        """Advances a query by time, and by its next frames, as the driver does."""
        return self._try(query)

    def _try(self, subject: FrameEntry | QueryTrial) -> Trial:
        trial = Trial()
        for _ in range(TRIES):
            trial = self._once(subject)
            if not trial.death:
                break
        return trial

    def _once(self, subject: FrameEntry | QueryTrial) -> Trial:
        if self._process is None:
            self._start()
        try:
            self._pipe.send(subject)
            if not self._answers_in_time():
                self._end()
                return Trial(f"it takes longer than {self._timeout_s:g} s")
            answer = self._pipe.recv()
        except (EOFError, OSError):
            return Trial(f"the process that read it was ended by {self._end()}")
        if isinstance(answer, StorageError):
            raise answer
        assert isinstance(answer, Trial)
        return answer

    def _answers_in_time(self) -> bool:
        assert self._process is not None
        began_s, waited_s = time.monotonic(), _waited_s(self._process.pid)
        left_s = self._timeout_s
        while left_s > 0:
            if self._pipe.poll(left_s):
                return True
            took_s = time.monotonic() - began_s
            left_s = self._timeout_s - took_s + min(_waited_s(self._process.pid) - waited_s, took_s)
        return False

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._log_dir), name="examiner", daemon=True)
        self._process.start()
        theirs.close()
        try:
            if self._pipe.poll(START_TIMEOUT_S) and self._pipe.recv() == Trial():
                return
        except (EOFError, OSError):
            pass
        raise StorageError(f"the process that tries frames cannot be started: {self._end()}")

    def _end(self) -> str:
        """Ends the process; returns how it had ended."""
        process, self._process = self._process, None
        if process is None:
            return "nothing"
        process.join(0.2)
        code = process.exitcode
        process.kill()
        process.join()
        process.close()
        self._pipe.close()
        return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"


def _waited_s(pid: int | None) -> float:
    """Returns how long a process has waited for a core since it began, in seconds; 0 if the kernel does not state
    it.
    """
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def killing_frames(
    catalog: Catalog,
    consumed: Mapping[str, int],
    log_dir: str | Path,
    limits: BatchLimits,
    partition: QueryPartition = ALL_QUERIES,
) -> Iterator[tuple[FrameEntry, str]]:
    """Tries the frames that the next batches of a partition's queries read.

    Yields the frames that kill the process that reads them, each with the way in which it died.

    Raises:
        StorageError: it says nothing about the frames.
    """
    listed = catalog.quarantine.frame_reasons()
    pending = (
        entry
        for key, last in catalog.frames.last_positions().items()
        if key in partition and last > (after := consumed.get(key, 0))
        for entry in catalog.frames.entries(key, after, min(last, after + limits.frames_per_query))
        if (key, entry.position) not in listed
    )
    with Examiner(log_dir) as examiner:
        for entry in islice(pending, limits.frames):
            if death := examiner.try_frame(entry).death:
                yield entry, death


def why_quarantined(examiner: Examiner, trial: QueryTrial, deaths: int) -> str:
    """Returns why a query has to be quarantined, or an empty text.

    Args:
        deaths: how often the job died while it worked on the query.

    Raises:
        StorageError: it says nothing about the query.
    """
    if deaths < SUSPECT_DEATHS:
        return ""
    died = f"the job died {deaths} times while it worked on it"
    if death := examiner.try_query(trial).death:
        return f"{died}, and so did a process that tried its next answers: {death}"
    return f"{died}; a process that tried its next answers lived" if deaths >= MAX_DEATHS else ""


def _serve(pipe: Connection, log_dir: str) -> None:
    """The process: sends an empty trial when it is ready, and then one trial per entry."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    has_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (has_bytes + MEMORY_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pipe.send(Trial())
    log = FrameLog(log_dir)
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            return
        try:
            is_query = isinstance(asked, QueryTrial)
            pipe.send(_try_query(log, Path(log_dir), asked) if is_query else _try(log, Path(log_dir), asked))
        except StorageError as exc:
            pipe.send(exc)


def _try(log: FrameLog, log_dir: Path, entry: FrameEntry) -> Trial:
    read, damaged = read_frames(log, log_dir, [(query_key(entry.query), entry)])
    partials = tuple(_try_partial(partial) for partial in read)
    death = next((p.problem for p in partials if p.problem.startswith(MemoryError.__name__)), "")
    if not death:
        merge_partials(read)
    return Trial(death, damaged[0].reason if damaged else "", partials)


def _try_query(log: FrameLog, log_dir: Path, asked: QueryTrial) -> Trial:
    """Advances a copy of a query by time, and applies its next frames. An error is no death: the job handles it."""
    problem = ""
    with (
        TemporaryDirectory() as directory,
        closing(Catalog(asked.catalog_url)) as catalog,
        closing(ResultStore(asked.results_url)) as original,
        closing(ResultStore(f"sqlite:///{directory}/trial.db")) as store,
    ):
        original.copy_query(asked.key, store)
        after = store.consumed().get(asked.key, 0)
        listed = catalog.quarantine.frame_reasons()
        entries = [(asked.key, entry) for entry in catalog.frames.entries(asked.key, after, after + asked.frames)]
        read, damaged = read_frames(log, log_dir, [e for e in entries if (e[0], e[1].position) not in listed])
        merged, refused = merge_partials(read)
        skipped = [Skipped(*at, SkipKind.QUARANTINED, reason) for at, reason in listed.items()]
        ledger = Ledger()
        events = (EdgesChanged(tuple(catalog.edges.all())),)
        facts = catalog.frames.facts({asked.key: [(after, after + asked.frames)]})
        positions = [(key, entry.position) for key, entry in entries]
        batch = to_batch(positions, merged, [*damaged, *refused, *(s for s in skipped if s.key == asked.key)], facts)
        steps: tuple[Callable[[], object], ...] = (
            lambda: store.tick(ledger, events, asked.now_ms),
            lambda: store.apply(ledger, batch.deltas, batch.summaries, batch.through, asked.now_ms),
        )
        for step in steps:
            try:
                step()
            except Exception as exc:
                problem = f"{type(exc).__name__}: {str(exc)[:500]}"
                if is_for_memory(exc):
                    return Trial(problem, problem)
    return Trial("", problem)


def _try_partial(partial: SlicePartial) -> PartialTrial:
    at = (partial.slice_start_ms, len(partial.synopsis))
    try:
        aggregate = GroupedAggregate.from_bytes(partial.synopsis)
        GroupedAggregate.merge_bytes([partial.synopsis] * 2)
    except Exception as exc:
        # Decoders turn exceptions of a part into errors of their own.
        kind = MemoryError if is_for_memory(exc) else type(exc)
        return PartialTrial(*at, problem=f"{kind.__name__}: {str(exc)[:500]}")
    return PartialTrial(*at, aggregate.records, len(aggregate), tuple(aggregate.measures))
