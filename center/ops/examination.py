"""Tries frames in a separate process, which they may kill: by memory, time or a fault of native code."""

from __future__ import annotations

import multiprocessing
import resource
import signal
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from center.job.merge import SlicePartial, is_for_memory, merge_partials, read_frames
from center.storage.frame_log import FrameEntry, FrameLog
from edgewater.base.errors import StorageError
from edgewater.model.registered_query import query_key
from edgewater.synopses import GroupedAggregate

TIMEOUT_S = 20.0  # limit: time of a frame that hangs
"""How long reading and merging one frame may take; tens of milliseconds are usual."""
START_TIMEOUT_S = 60.0  # limit: the wait for a child that hangs
MEMORY_BYTES = 4 << 30  # limit: memory of a frame
"""Address space that a frame may take, in addition to the process's own when it starts."""


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


def examine(log_dir: Path, entry: FrameEntry, timeout_s: float = TIMEOUT_S) -> Trial:
    """Reads and merges a frame as tasks do, in a process of its own.

    Raises:
        StorageError: the process cannot be started, or the log cannot be read. It says nothing about the frame.
    """
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, log_dir, entry), name="examiner", daemon=True)
    process.start()
    theirs.close()
    is_ready = False
    try:
        is_ready = pipe.poll(START_TIMEOUT_S) and pipe.recv() == Trial()
        if is_ready and not pipe.poll(timeout_s):
            return Trial(f"it takes longer than {timeout_s:g} s")
        answer = pipe.recv() if is_ready else None
    except EOFError:
        answer = None
    finally:
        process.join(0.2)
        code = process.exitcode
        process.kill()
        process.join()
        pipe.close()
    if isinstance(answer, StorageError):
        raise answer
    if isinstance(answer, Trial):
        return answer
    end = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
    if not is_ready:
        raise StorageError(f"the process that reads frames cannot be started: {end}")
    return Trial(f"the process that read it was ended by {end}")


def _serve(pipe: Connection, log_dir: Path, entry: FrameEntry) -> None:
    """The process: sends an empty trial when it is ready, and then the trial of the frame."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    has_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (has_bytes + MEMORY_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pipe.send(Trial())
    try:
        pipe.send(_try(FrameLog(log_dir), log_dir, entry))
    except StorageError as exc:
        pipe.send(exc)


def _try(log: FrameLog, log_dir: Path, entry: FrameEntry) -> Trial:
    read, damaged = read_frames(log, log_dir, [(query_key(entry.query), entry)])
    partials = tuple(_try_partial(partial) for partial in read)
    death = next((p.problem for p in partials if p.problem.startswith(MemoryError.__name__)), "")
    if not death:
        merge_partials(read)
    return Trial(death, damaged[0].reason if damaged else "", partials)


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
