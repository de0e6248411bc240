"""`DurableCore`: an `EdgeCore` whose state survives a crash at any moment.

Every event is journaled before the core handles it, except a pull, which is journaled afterwards with the frame that it
built. A frame may be sent, and a push may be acknowledged, only after `sync`. Recovery restores the newest checkpoint
and replays the journal after it in order. Frames are taken from the journal as they were built, and the values that
they carry are removed from the state by the keys of their groups. Neither the selection of groups nor the compression
of a body is computed again, so a recovered edge sends the same frames with any version of a library and on any
processor.

The state itself is computed again from the records, and compared with the recorded frames. If a frame would have
another body now, a source's file was changed, or a user-defined function is not deterministic, and recovery fails. On
another platform (`platform_id`) the cause may also be the last bit of a logarithm; the edge then logs and counts the
frames, and continues.

Files in the state directory: ``identity.json``; ``checkpoint-N.ckpt``, the state before ``journal-N.log``;
``journal-N.log``; ``quota.json`` (`edge.durability.quota_file`); ``edge.lock``.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
from numpy.lib.introspect import opt_func_info

from edge.core import (
    Acked,
    BackfillEnded,
    BackfillIngested,
    BudgetSet,
    Configured,
    Dropped,
    EdgeCore,
    Effect,
    Event,
    FrameBuilt,
    FrameDiverged,
    FunctionFailed,
    Ingested,
    InputLost,
    MemoryAction,
    MemoryLimited,
    MemoryLimits,
    PullEvent,
    PullReplayed,
    Ran,
    SamplingSet,
    SourceEnded,
    SourcesOpened,
    TickEvent,
    batch_from_bytes,
    batch_to_bytes,
    next_limit,
)
from edge.durability import journal
from edge.durability.journal import Record, Segment
from edge.durability.pushes import CountedPushes
from edge.records import InputGone, Position, PushId, RejectedRecords
from edge.series import SeriesMemory, SeriesUpdate
from edgewater.model.errors import CorruptSynopsis, IncompatibleState, StorageError, SynopsisError
from edgewater.model.query import QuerySpec
from edgewater.model.streams import TIME_COLUMN
from edgewater.runtime.state_release import RELEASE, require_format
from edgewater.synopses.encoding.state import State
from edgewater.wire import Frame, LossReason, QueryRef, SamplingReason
from edgewater.wire import uplink_pb2 as pb

log = logging.getLogger(__name__)

Reread = Callable[[str, Position | None, Position], pa.RecordBatch]
"""(source, start, end) -> the batch that was read between two positions."""

_CHECKPOINT = "edge-checkpoint"
_SERIES = "series:"
"""Begins the names of the parts of a checkpoint with the series of a source."""
STATE_FORMAT = 1
"""The format of checkpoints and journals. Increment it with each change after which an older release cannot read new
data, or this release cannot read old data."""
_COUNTED_AGAIN = "records that its sources have delivered are then counted again"
# Kinds of journal records. Numbers are never reused.
CONFIGURED, SOURCES_OPENED, RANGE, PAYLOAD, SOURCE_ENDED, TICK, PULL, ACKED, BUDGET, SAMPLING, LOST = range(1, 12)
BACKFILL, BACKFILL_ENDED, MEMORY_LIMITED, RAN, RUN = range(12, 17)
KIND_NAMES = {
    CONFIGURED: "configured", SOURCES_OPENED: "sources-opened", RANGE: "range", PAYLOAD: "payload",
    SOURCE_ENDED: "source-ended", TICK: "tick", PULL: "pull", ACKED: "acked", BUDGET: "budget", SAMPLING: "sampling",
    LOST: "lost", BACKFILL: "backfill", BACKFILL_ENDED: "backfill-ended", MEMORY_LIMITED: "memory-limited",
    RAN: "ran", RUN: "run",
}  # fmt: skip


_encode_json = json.JSONEncoder(separators=(",", ":")).encode  # `json.dumps` would make an encoder for each record
MAX_RUNS = 64
"""The newest processes on a state that are remembered. A center whose catalog is older than all of them treats the
state as a copy."""
RUNS_PER_LIMIT = 16
"""The memory of all queries is checked after so many runs of single ones."""
_LIMITED = {
    MemoryAction.SUSPEND: "its open windows take no more records",
    MemoryAction.DISCARD: "what its open windows have not sent is dropped",
    MemoryAction.FORGET: "the older half of its closed windows takes no more late records",
}


@dataclass(frozen=True, slots=True)
class BackfillRange:
    """What the backfill of a query has to read of a source.

    Attributes:
        until: the source's position when the query was registered; None: it had none.
        position: after the last record that was read; None: none was.
    """

    until: Position | None
    position: Position | None = None


@cache
def platform_id() -> int:
    """Returns a hash of everything on which the last bit of a value may depend: releases, the C library, and the
    processor features that NumPy and Arrow use."""
    releases = RELEASE, np.__version__, pa.__version__, platform.python_version()
    machine = platform.machine(), platform.libc_ver(), pa.runtime_info().simd_level, opt_func_info()
    return int(google_crc32c.value(repr((releases, machine)).encode()))


def load_identity(directory: Path, fresh: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Loads the identity of a state directory, which never changes; `fresh` creates that of a new directory.

    The file also has the format of the state, and the last release that wrote it.

    Raises:
        StorageError: the directory cannot be used, or the identity is damaged.
        IncompatibleState: the state has another format.
    """
    path = directory / "identity.json"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _write_identity(directory, fresh() | {"format": STATE_FORMAT})
        identity = json.loads(path.read_text())
        if not isinstance(identity.get("incarnation"), str):
            raise ValueError("it has no incarnation")
        written = None if "format" not in identity else (int(identity["format"]), str(identity.get("release")))
    except OSError as exc:
        raise StorageError(f"state_dir {directory} cannot be used: {exc.strerror or exc}") from exc
    except (ValueError, AttributeError) as exc:
        raise StorageError(
            f"{path} is damaged ({exc}). Restore it from a copy, or remove {directory} to start over: {_COUNTED_AGAIN}"
        ) from exc
    require_format(
        f"state_dir {directory}", written, STATE_FORMAT, f"remove the directory to start over: {_COUNTED_AGAIN}"
    )
    return dict(identity)


def _write_identity(directory: Path, identity: Mapping[str, Any]) -> None:
    journal.write_durably(directory / "identity.json", json.dumps({**identity, "release": RELEASE}).encode())


@contextlib.contextmanager
def lock_state_dir(directory: Path) -> Iterator[None]:
    """Locks the state directory, so that two edges never share a journal. Raises StorageError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / "edge.lock").open("a")
    except OSError as exc:
        raise StorageError(f"state_dir {directory} cannot be used: {exc.strerror or exc}") from exc
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            raise StorageError(
                f"state_dir {directory} is in use by another `edgewater edge run`; give each edge its own"
            ) from exc
        yield


class DurableCore:
    """The core, its journal and its checkpoints. Synchronous; one caller at a time, except `sync`.

    Args:
        directory: the state directory; created if missing.
        make_core: builds an empty core.
        reread: reads a range of a replayable source again.
        reread_backfill: the same for the ranges of backfills, which lie elsewhere in the same files; None: `reread`.
        incarnation: identity of a new state; an existing state keeps its own.
        now_ms: wall time at which recovery begins: damaged records arrived before.
        memory: bounds of the memory that open slices hold; None: there are none.

    Attributes:
        positions: by source, the position after the last ingested record.
        pushes: the pushed batches that were counted lately.
        series: by source, the last points of the cumulative series that its records were computed from.
        backfills: by query and source, what has to be read.
        drops: numbers of records that were not counted in a query, by reason.
        function_failures: numbers of failed calls of user-defined functions, by function.
        losses: numbers of stated losses of input, by "stream/reason".
        damaged_records: number of journal records and checkpoints that recovery skipped.
        diverged: numbers of the frames that recovery would build with other bodies; they are sent as recorded.
        runs: numbers of the processes that have run on this state, the newest last.
        durable_records: by stream, the records that are durable; at first the records that recovery has found.
        is_damaged: recovery may have lost records, since the center has been told how many there are.
    """

    def __init__(
        self,
        directory: Path,
        make_core: Callable[[], EdgeCore],
        reread: Reread,
        incarnation: str,
        *,
        reread_backfill: Reread | None = None,
        now_ms: int = 0,
        memory: MemoryLimits | None = None,
    ) -> None:
        self.directory = directory
        self.positions: dict[str, Position] = {}
        self.pushes = CountedPushes()
        self.series: dict[str, SeriesMemory] = {}
        self.backfills: dict[QueryRef, dict[str, BackfillRange]] = {}
        self.drops: dict[str, int] = {}
        self.function_failures: dict[str, int] = {}
        self.losses: dict[str, int] = {}
        self._logged: set[tuple[str, str]] = set()
        self.damaged_records = 0
        self.diverged: list[int] = []
        self._make_core = make_core
        self._reread = reread
        self._reread_backfill = reread_backfill or reread
        identity = load_identity(directory, lambda: {"incarnation": incarnation})
        self.incarnation, self._written_by = str(identity["incarnation"]), str(identity["release"])
        self.core = make_core()
        self._number = 0
        self._now_ms = now_ms
        self._runs = 0
        self._sizes: dict[QueryRef, int] = {}
        self._suspends = False
        self._memory = memory
        self.runs: list[int] = []
        self.is_damaged = False
        self._has_lost = False
        self._lost_records: dict[str, tuple[int, str]] = {}
        self._segment = self._recover()
        if self._written_by != RELEASE:
            _write_identity(directory, identity)
        self.durable_records = self._records()
        self.is_damaged |= self._has_lost
        if self._has_lost:
            # The journal cannot be replayed in the same way once more, for example if the input is there again.
            self.checkpoint()
        self._limit_memory()  # the bounds may be lower than before

    def begin_run(self, number: int) -> None:
        """Journals that a process runs on this state from now on. Call it once, and sync before the center is told.

        Args:
            number: a random number from 1 to 2^62 - 1.
        """
        self._segment.append(_json(RUN, {"number": number}))
        self._add_run(number)

    def _add_run(self, number: int) -> None:
        self.runs = [*self.runs, number][-MAX_RUNS:]

    def begin_anew(self, incarnation: str, source: int) -> None:
        """Replaces the state by that of a new incarnation without records, which reads on from the same positions.

        The object must not be used afterwards. A crash on the way leaves the old state, or one that the center refuses
        as it refused the old one.

        Args:
            source: as of `EdgeCore`, for the new incarnation.

        Raises:
            StorageError: the disk cannot be written.
        """
        number, core = self._number + 1, self._make_core()
        core.source = source
        numbers: dict[str, Any] = {
            "positions": self.positions, "backfills": [], "drops": {}, "function_failures": {}, "losses": {},
            "runs": [], "is_damaged": False,
        }  # fmt: skip
        path = self.directory / f"checkpoint-{number}.ckpt"
        # Pushes stay known: a batch that is stated as lost is better than one that counts in both incarnations.
        parts = {"core": core.to_state(), **self._sources_state()}
        journal.write_durably(path, State(numbers, parts).pack(_CHECKPOINT))
        # Only then the incarnation: with the old state it would be taken for one whose records are in no frame yet.
        identity = load_identity(self.directory, dict) | {"incarnation": incarnation}
        _write_identity(self.directory, identity)
        for path, old in self._files():
            if old < number:
                path.unlink(missing_ok=True)
        journal.sync_directory(self.directory)

    def _records(self) -> dict[str, int]:
        return {name: stream.records for name, stream in self.core.streams.items()}

    def handle(self, event: Event) -> list[Effect]:
        """Journals an event and applies it. For batches use `ingest_range` or `ingest_payload`."""
        if not isinstance(event, PullEvent):
            self._segment.append(_encode(event))
            return self._apply(event)
        effects = self._apply(event)
        self._segment.append(_pull_record(event, [e for e in effects if isinstance(e, FrameBuilt)]))
        return effects

    def ingest_range(self, event: Ingested, start: Position | None, end: Position) -> list[Effect]:
        """Ingests a batch of a replayable source; the journal stores only its positions."""
        self._segment.append(_range_record(event, start, end))
        self.positions[event.source] = end
        return self._apply_batch(event)

    def ingest_backfill(
        self, event: BackfillIngested, start: Position | None, end: Position, *, keep: bool = False
    ) -> list[Effect]:
        """Ingests a batch of a query's backfill.

        Args:
            keep: as in `Chunk.keep`. Otherwise the journal stores only the positions.
        """
        self._segment.append(_backfill_record(event, start, end, keep))
        self._set_backfill_position(event.query, event.source, end)
        return self._apply_batch(event)

    def ingest_payload(
        self,
        event: Ingested,
        push: PushId | None = None,
        end: Position | None = None,
        series: SeriesUpdate | None = None,
    ) -> list[Effect]:
        """Ingests a batch of a source that is not replayable; the journal stores its records.

        Args:
            push: identity of a pushed batch, which is remembered with the batch; None: it need not be.
            end: the source's position after the batch; None: the source has no positions.
            series: the last points of the cumulative series that the records were computed from; None: there are none.
        """
        self._segment.append(_payload_record(event, push, end, series))
        self._note_payload(event, push, end, series)
        return self._apply_batch(event)

    def _note_payload(
        self, event: Ingested, push: PushId | None, end: Position | None, series: SeriesUpdate | None
    ) -> None:
        if end is not None:
            self.positions[event.source] = end
        if push is not None:
            self.pushes.add(push, event.arrival_ms, event.batch.num_rows)
        if series is not None:
            self.series.setdefault(event.source, SeriesMemory(series.since_ns)).apply(series)

    def series_of(self, source: str) -> SeriesMemory:
        """Returns the cumulative series of a source. A source without any begins with this process."""
        memory = self.series.get(source)
        return memory if memory is not None else SeriesMemory(self._now_ms * 1_000_000)

    def run(self, event: Ran) -> list[Effect]:
        """Lets queries process records of their queues."""
        self._segment.append(_encode(event))
        effects = self._apply(event)
        self._limit_memory(event.queries)
        return effects

    def _apply_batch(self, event: Ingested | BackfillIngested) -> list[Effect]:
        effects = self._apply(event)
        if not (isinstance(event, Ingested) and event.queued):  # no query has grown by a batch that waits
            self._limit_memory()
        return effects

    def _limit_memory(self, ran: Sequence[QueryRef] | None = None) -> None:
        """Journals and applies what the bounds of open slices' memory require.

        Args:
            ran: the only queries that have grown since the last call; None: all may have.
        """
        core, limits = self.core, self._memory
        if limits is None:
            return
        if ran is None or not all(ref in self._sizes and ref in core.queries for ref in ran):
            self._sizes = {ref: pipeline.nbytes for ref, pipeline in core.queries.items()}
            self._suspends = any(pipeline.full.suspended for pipeline in core.queries.values())
        else:
            self._sizes |= {ref: core.queries[ref].nbytes for ref in ran}
        if not self._suspends and sum(self._sizes.values()) <= limits.query_bytes:
            return
        if ran is not None:
            # All queries are examined, which takes as long as thousands of records of one.
            self._runs += len(ran)
            if self._runs < RUNS_PER_LIMIT and all(self._sizes.get(ref, 0) <= limits.query_bytes for ref in ran):
                return
            self._runs = 0
        while (found := next_limit(core.held_memory(), limits)) is not None:
            self.handle(MemoryLimited(*found))
            self._suspends = True

    def _apply(self, event: Event) -> list[Effect]:
        effects = self.core.handle(event)
        if isinstance(event, Configured | SourcesOpened | BackfillEnded):
            self._update_backfills()
        if isinstance(event, InputLost):
            kind = f"{event.stream}/{event.reason}"
            self.losses[kind] = self.losses.get(kind, 0) + 1
        if isinstance(event, MemoryLimited):
            self._count_limited(event)
        for effect in effects:
            if isinstance(effect, Dropped):
                self.drops[effect.reason] = self.drops.get(effect.reason, 0) + effect.count
            elif isinstance(effect, FunctionFailed):
                self._count_failures(effect)
        return effects

    def _update_backfills(self) -> None:
        """Adds the backfills that have begun, which read up to the current positions, and removes those that ended."""
        running = {ref: p.backfill.unread for ref, p in self.core.queries.items() if p.backfill is not None}
        self.backfills = {
            ref: {s: self.backfills.get(ref, {}).get(s) or BackfillRange(self.positions.get(s)) for s in sources}
            for ref, sources in running.items()
        }

    def _set_backfill_position(self, query: QueryRef, source: str, position: Position) -> None:
        ranges = self.backfills.get(query, {})
        if source in ranges:
            ranges[source] = replace(ranges[source], position=position)

    def _count_limited(self, event: MemoryLimited) -> None:
        """Counts how often a query was stopped. The first time is logged: it may happen in every window."""
        pipeline = self.core.queries.get(event.query)
        if pipeline is None or event.action is MemoryAction.RESUME:
            return
        kind, logged = f"{pipeline.spec.stream}/{LossReason.QUERY_MEMORY}", (event.query.name, event.action)
        self.losses[kind] = self.losses.get(kind, 0) + 1
        if logged not in self._logged:
            self._logged.add(logged)
            log.error(
                "query %s: %s: its windows take more memory than limits.max_query_bytes, or than is left beside other "
                "queries; windows that lack records say so. Use a shorter window, fewer groups or an approximate "
                "function, or raise limits.max_query_bytes and limits.max_pending_bytes",
                event.query.name,
                _LIMITED[event.action],
            )

    def _count_failures(self, effect: FunctionFailed) -> None:
        """Counts failed calls. Each reason of a function is logged once, because it may fail in every batch."""
        name, failed = effect.function, self.function_failures
        failed[name] = failed.get(name, 0) + effect.calls
        if (name, effect.reason) not in self._logged:
            self._logged.add((name, effect.reason))
            log.error("function %s failed in query %s, its values are null: %s", name, effect.query.name, effect.detail)

    def sync(self) -> None:
        """Makes everything handled before the call durable. Raises StorageError; may be repeated."""
        records = self._records()
        self._segment.sync()
        self.durable_records = records

    @property
    def unsynced_bytes(self) -> int:
        return self._segment.unsynced_bytes

    @property
    def journal_bytes(self) -> int:
        return self._segment.nbytes

    def checkpoint(self) -> None:
        """Writes a checkpoint and begins a new journal; removes older ones.

        Raises:
            StorageError: writing failed; the old checkpoint and journal stay in use.
        """
        self.sync()
        counters = {
            "positions": self.positions,
            "backfills": [
                [ref.name, ref.version, source, r.until, r.position]
                for ref, ranges in self.backfills.items()
                for source, r in ranges.items()
            ],
            "drops": self.drops,
            "function_failures": self.function_failures,
            "losses": self.losses,
            "runs": self.runs,
            "is_damaged": self.is_damaged,
        }
        number = self._number + 1
        path = self.directory / f"checkpoint-{number}.ckpt"
        try:
            parts = {"core": self.core.to_state(), **self._sources_state()}
            journal.write_durably(path, State(counters, parts).pack(_CHECKPOINT))
            segment = self._open(number)
        except StorageError:
            # The file may exist all the same. Recovery would restore it and miss later records of the current journal.
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                journal.sync_directory(self.directory)
            raise
        self._segment.close()
        self._segment, self._number = segment, number
        for path, old in self._files():
            if old < number - 1:  # one generation is kept, in case the new checkpoint gets damaged on disk
                path.unlink(missing_ok=True)
        journal.sync_directory(self.directory)

    def _sources_state(self) -> dict[str, bytes]:
        """Returns the parts of a checkpoint that do not belong to the core."""
        series = {_SERIES + source: memory.to_bytes() for source, memory in self.series.items()}
        return {"pushes": self.pushes.to_bytes(), **series}

    def _open(self, number: int) -> Segment:
        return Segment(self.directory / f"journal-{number}.log")

    def _files(self) -> list[tuple[Path, int]]:
        found = []
        for path in self.directory.iterdir():
            match = re.fullmatch(r"(?:checkpoint|journal)-(\d+)\.(?:ckpt|log)", path.name)
            if match:
                found.append((path, int(match[1])))
        return sorted(found, key=lambda f: f[1])

    def close(self) -> None:
        self._segment.close()

    def _recover(self) -> Segment:
        files = self._files()
        start = self._restore_checkpoint([n for p, n in files if p.suffix == ".ckpt"])
        self._number = max([n for _, n in files], default=0)
        for number in range(start, self._number + 1):
            self._replay(self._read(self.directory / f"journal-{number}.log"))
        for source, (count, why) in self._lost_records.items():
            log.error(
                "source %s: %d records that the journal refers to cannot be read again (%s). The edge goes on without "
                "those that have not been sent; the windows that may lack them are not complete",
                source,
                count,
                why,
            )
        if self.diverged:
            log.error(
                "the journal in %s was written by another release, library or processor, and %d frames, the first of "
                "them %d, would have other bodies here. They are sent as recorded. Values that have not been sent are "
                "computed here; if a source's file was also changed, its records may be wrong",
                self.directory,
                len(self.diverged),
                self.diverged[0],
            )
        return self._open(self._number)

    def _read(self, path: Path) -> list[Record]:
        if not path.exists():
            return []
        found = journal.scan(path.read_bytes())
        if found.torn_bytes:
            log.warning("journal %s: a torn tail of %d bytes is truncated", path, found.torn_bytes)
            segment = Segment(path)
            segment.truncate(found.good_bytes)
            segment.close()
        if found.damaged:
            self.damaged_records += len(found.damaged)
            log.error("journal %s: damaged records at %s are skipped", path, found.damaged)
            self._has_lost = True
            for stream in self.core.streams:
                self._apply(InputLost(stream, "journal", LossReason.JOURNAL_DAMAGED, self._now_ms))
        return found.records

    def _restore_checkpoint(self, numbers: list[int]) -> int:
        """Restores the newest valid checkpoint and returns its number; 0 if there has been none.

        Raises:
            StorageError: all checkpoints are damaged, and the first journal is gone. Starting over would count the
                sources' records a second time, so the operator has to decide.
        """
        for number in reversed(numbers):
            data = (self.directory / f"checkpoint-{number}.ckpt").read_bytes()
            try:
                checkpoint = State.unpack(data, _CHECKPOINT)
            except CorruptSynopsis as exc:
                log.error("checkpoint %d is damaged and skipped: %s", number, exc)
                self.damaged_records += 1
                continue
            try:
                self._restore(checkpoint)
            except (SynopsisError, KeyError, TypeError, ValueError) as exc:
                raise IncompatibleState(
                    f"{self.directory}: checkpoint {number} of Edgewater {self._written_by} is whole, and Edgewater "
                    f"{RELEASE} cannot restore it ({type(exc).__name__}: {exc}). Go back to the release that wrote it, "
                    f"or remove the directory to start over: {_COUNTED_AGAIN}"
                ) from exc
            return number
        if numbers and not (self.directory / "journal-0.log").exists():
            raise StorageError(
                f"{self.directory}: all checkpoints {numbers}, of Edgewater {self._written_by}, are damaged. Restore "
                f"the directory from a copy, or remove it to start over: {_COUNTED_AGAIN}"
            )
        return 0

    def _restore(self, checkpoint: State) -> None:
        counters = checkpoint.numbers
        self.positions, self.drops = counters["positions"], counters["drops"]
        self.function_failures, self.losses = counters["function_failures"], counters["losses"]
        self.runs, self.is_damaged = counters["runs"], counters["is_damaged"]
        for *ref, source, until, position in counters["backfills"]:
            self.backfills.setdefault(QueryRef(*ref), {})[source] = BackfillRange(until, position)
        self.pushes = CountedPushes.from_bytes(checkpoint.arrays.get("pushes", b""))
        self.series = {
            name.removeprefix(_SERIES): SeriesMemory.from_bytes(data)
            for name, data in checkpoint.arrays.items()
            if name.startswith(_SERIES)
        }
        self.core.restore(checkpoint.arrays["core"])

    def _replay(self, records: list[Record]) -> None:
        for record in records:
            if record.kind == RUN:
                self._add_run(json.loads(record.payload)["number"])
                continue
            if record.kind == PULL:
                self._replay_pull(*_read_pull(record))
                continue
            event = self._decode(record)
            if event is not None:
                self._apply(event)

    def _replay_pull(self, event: PullReplayed, written_on: int) -> None:
        if event.built and event.built[0].frame.seq != self.core.next_seq:
            raise StorageError(
                f"{self.directory}: the journal has frame {event.built[0].frame.seq} where {self.core.next_seq} is "
                "expected: a damaged record was skipped. Restore the directory from a copy, or remove it to start "
                f"over: {_COUNTED_AGAIN}"
            )
        for effect in self._apply(event):
            if isinstance(effect, FrameDiverged) and not self._has_lost:
                if written_on == platform_id():
                    raise StorageError(
                        f"{self.directory}: replaying the journal gave another frame than the recorded one "
                        f"({effect.seq}); a source's file or a user-defined function was changed"
                    )
                self.diverged.append(effect.seq)

    def _decode(self, record: Record) -> Event | None:
        if record.kind == RANGE:
            return self._reread_range(json.loads(record.payload))
        if record.kind == BACKFILL:
            head, _, batch = record.payload.partition(b"\n")
            return self._reread_backfill_range(json.loads(head), batch)
        if record.kind == PAYLOAD:
            event, push, end, series = _read_payload(record.payload)
            self._note_payload(event, push, end, series)
            return event
        try:
            return _decode_plain(record.kind, json.loads(record.payload))
        except KeyError:
            log.error("journal record of kind %d is unknown to this release", record.kind)
            self.damaged_records += 1
            return None

    def _reread_range(self, head: dict[str, Any]) -> Event:
        """Returns the event of a range of positions; the loss of its records if they cannot be read again."""
        stream, source, arrival_ms = head["stream"], head["source"], head["arrival_ms"]
        self.positions[source] = head["end"]
        rows, (first_ms, last_ms) = head["rows"], head["times"]
        batch, queued = self._reread_or_none(self._reread, head), head.get("queued", False)
        if batch is None and rows != 0:
            to_ms = None if last_ms is None else last_ms + 1
            reason = LossReason.FILE_GONE
            return InputLost(stream, source, reason, arrival_ms, first_ms, to_ms, rows, was_ingested=True)
        batch = self._no_records(stream) if batch is None else batch
        return Ingested(stream, source, batch, arrival_ms, queued, _read_rejected(head))

    def _reread_backfill_range(self, head: dict[str, Any], data: bytes) -> BackfillIngested | None:
        """Returns the event of a range of a backfill, without records if they cannot be read again: the backfill then
        states that it lacks them.

        Args:
            data: the records, if the journal has them; otherwise empty.
        """
        query, source = QueryRef(*head["query"]), head["source"]
        self._set_backfill_position(query, source, head["end"])
        pipeline = self.core.queries.get(query)
        if pipeline is None:
            return None
        batch = batch_from_bytes(data) if data else self._reread_or_none(self._reread_backfill, head)
        batch = self._no_records(pipeline.spec.stream) if batch is None else batch
        return BackfillIngested(query, source, batch, head["arrival_ms"], _read_rejected(head))

    def _reread_or_none(self, reread: Reread, head: dict[str, Any]) -> pa.RecordBatch | None:
        """Returns the records of a range; None if they cannot be read again, which is noted unless there were none."""
        source, rows = head["source"], head["rows"]
        try:
            return reread(source, head["start"], head["end"])
        except InputGone as exc:
            if rows != 0:
                self._has_lost = True
                count, why = self._lost_records.get(source, (0, str(exc)))
                self._lost_records[source] = count + rows, why
            return None

    def _no_records(self, stream: str) -> pa.RecordBatch:
        columns = {**self.core.streams[stream].spec.columns, TIME_COLUMN: pa.int64()}
        return pa.RecordBatch.from_pylist([], schema=pa.schema(list(columns.items())))


def _time_range(batch: pa.RecordBatch) -> tuple[int | None, int | None]:
    """Returns the first and the last event time of a batch, None without rows."""
    if not batch.num_rows:
        return None, None
    times = batch.column(TIME_COLUMN).to_numpy()
    return int(times.min()), int(times.max())


def _json(kind: int, document: Mapping[str, Any]) -> Record:
    return Record(kind, _encode_json(document).encode())


def _encode(event: Event) -> Record:
    match event:
        case Configured(queries):
            return _json(CONFIGURED, {"queries": [[r.name, r.version, s.to_mapping()] for r, s in queries]})
        case SourcesOpened():
            return _json(SOURCES_OPENED, asdict(event))
        case BackfillEnded(ref, source):
            return _json(BACKFILL_ENDED, {"query": [ref.name, ref.version], "source": source})
        case SourceEnded(stream, source):
            return _json(SOURCE_ENDED, {"stream": stream, "source": source})
        case TickEvent(now_ms, unread, empty_ms):
            return _json(TICK, {"now_ms": now_ms, "unread": unread, "empty_ms": dict(empty_ms)})
        case Acked(through):
            return _json(ACKED, {"through": through})
        case BudgetSet(ref, shares, version, from_ms):
            budget = {"shares": dict(shares), "version": version, "from_ms": from_ms}
            return _json(BUDGET, {"query": [ref.name, ref.version], **budget})
        case SamplingSet(ref, rate, offset, reason):
            sampling = {"rate": rate, "clock_offset_ms": offset, "reason": int(reason)}
            return _json(SAMPLING, {"query": [ref.name, ref.version], **sampling})
        case InputLost():
            return _json(LOST, asdict(event))
        case Ran(queries, through):
            return _json(RAN, {"queries": [[r.name, r.version] for r in queries], "through": through})
        case MemoryLimited(ref, action):
            return _json(MEMORY_LIMITED, {"query": [ref.name, ref.version], "action": action})
        case PullEvent() | PullReplayed():
            raise TypeError("a pull is journaled with the frame that it built")
        case Ingested() | BackfillIngested():
            raise TypeError("a batch is journaled by ingest_range, ingest_payload or ingest_backfill")


def _decode_plain(kind: int, fields: dict[str, Any]) -> Event:
    readers: dict[int, Callable[[], Event]] = {
        CONFIGURED: lambda: Configured(
            tuple((QueryRef(n, v), QuerySpec.from_mapping(spec)) for n, v, spec in fields["queries"])
        ),
        SOURCES_OPENED: lambda: SourcesOpened(
            tuple((s, n) for s, n in fields["sources"]),
            tuple(fields["replayable"]),
            fields["max_state_bytes"],
            fields["columns"],
        ),
        BACKFILL_ENDED: lambda: BackfillEnded(QueryRef(*fields["query"]), fields["source"]),
        SOURCE_ENDED: lambda: SourceEnded(fields["stream"], fields["source"]),
        LOST: lambda: InputLost(**fields),
        TICK: lambda: TickEvent(fields["now_ms"], tuple(fields["unread"]), fields["empty_ms"]),
        ACKED: lambda: Acked(fields["through"]),
        BUDGET: lambda: BudgetSet(QueryRef(*fields["query"]), fields["shares"], fields["version"], fields["from_ms"]),
        SAMPLING: lambda: SamplingSet(
            QueryRef(*fields["query"]),
            fields["rate"],
            fields["clock_offset_ms"],
            SamplingReason.from_number(fields["reason"]),
        ),
        RAN: lambda: Ran(tuple(QueryRef(*ref) for ref in fields["queries"]), fields["through"]),
        MEMORY_LIMITED: lambda: MemoryLimited(QueryRef(*fields["query"]), MemoryAction(fields["action"])),
    }
    return readers[kind]()


def _range_record(event: Ingested, start: Position | None, end: Position) -> Record:
    head = {"stream": event.stream, "source": event.source, "arrival_ms": event.arrival_ms}
    # For the statement of a loss, should the range not be there any more when it is needed.
    content = {"rows": event.batch.num_rows, "times": _time_range(event.batch)}
    return _json(RANGE, {**head, **content, "start": start, "end": end, **_queued(event), **_rejected(event)})


def _queued(event: Ingested) -> dict[str, bool]:
    return {"queued": True} if event.queued else {}


def _rejected(event: Ingested | BackfillIngested) -> dict[str, list[Any]]:
    """Returns the rejected records as JSON. They stand in the record of the batch, so that they are counted with it."""
    return {"rejected": [astuple(each) for each in event.rejected]} if event.rejected else {}


def _read_rejected(head: Mapping[str, Any]) -> tuple[RejectedRecords, ...]:
    return tuple(RejectedRecords(*each) for each in head.get("rejected", ()))


def _backfill_record(event: BackfillIngested, start: Position | None, end: Position, keep: bool) -> Record:
    """Encodes a range of a backfill: a line of JSON, and the records if the journal keeps them."""
    head = {"query": [event.query.name, event.query.version], "source": event.source, "arrival_ms": event.arrival_ms}
    rows = event.batch.num_rows
    line = _json(BACKFILL, {**head, "rows": rows, "start": start, "end": end, **_rejected(event)})
    if not keep:
        return line
    return Record(BACKFILL, b"\n".join((line.payload, batch_to_bytes(event.batch, "zstd"))))


def _payload_record(event: Ingested, push: PushId | None, end: Position | None, series: SeriesUpdate | None) -> Record:
    """Encodes a batch: the length of the head in 4 bytes, the head in JSON, the series, and the records."""
    fields = {"stream": event.stream, "source": event.source, "arrival_ms": event.arrival_ms}
    identity = {} if push is None else {"push": push.to_hex()}
    position = {} if end is None else {"end": end}
    totals = b"" if series is None else series.to_bytes()
    length = {"series": len(totals)} if totals else {}
    head = json.dumps({**fields, **_queued(event), **_rejected(event), **identity, **position, **length}).encode()
    return Record(PAYLOAD, len(head).to_bytes(4, "little") + head + totals + batch_to_bytes(event.batch, "zstd"))


def _read_payload(payload: bytes) -> tuple[Ingested, PushId | None, Position | None, SeriesUpdate | None]:
    length = int.from_bytes(payload[:4], "little")
    head = json.loads(payload[4 : 4 + length])
    begin = 4 + length + head.get("series", 0)
    series = SeriesUpdate.from_bytes(payload[4 + length : begin]) if "series" in head else None
    batch = batch_from_bytes(payload[begin:])
    queued = head.get("queued", False)
    event = Ingested(head["stream"], head["source"], batch, head["arrival_ms"], queued, _read_rejected(head))
    return event, PushId.from_hex(head["push"]) if "push" in head else None, head.get("end"), series


def _pull_record(pull: PullEvent, built: Sequence[FrameBuilt]) -> Record:
    """Encodes a pull: a line of JSON, followed by the frames in their wire format if any were built."""
    head: dict[str, Any] = {
        "capacity": pull.capacity_bytes, "drain_windows": dict(pull.drain_windows), "unread": pull.unread,
        "bandwidth_bytes_s": pull.bandwidth_bytes_s, "path_delay_ms": pull.path_delay_ms, "max_frames": pull.max_frames,
        "least_bytes_s": pull.least_bytes_s,
        "processing_ms": [(ref.name, ref.version, ms) for ref, ms in pull.processing_ms.items()],
    }  # fmt: skip
    frames = [b.frame.to_wire().SerializeToString() for b in built]
    if frames:
        parts = [(len(frame), b.closed) for frame, b in zip(frames, built, strict=True)]
        head |= {"frames": parts, "platform": platform_id()}
    return Record(PULL, b"\n".join((_json(PULL, head).payload, b"".join(frames))))


def _read_pull(record: Record) -> tuple[PullReplayed, int]:
    """Returns the pull, and the `platform_id` with which its frames were built; 0: it built none."""
    text, _, data = record.payload.partition(b"\n")
    fields = json.loads(text)
    drain_windows = {s: (now_ms, drained_ms) for s, (now_ms, drained_ms) in fields["drain_windows"].items()}
    link = fields["bandwidth_bytes_s"], fields["path_delay_ms"], tuple(fields["unread"])
    processing_ms = {QueryRef(name, version): ms for name, version, ms in fields["processing_ms"]}
    limits = fields["max_frames"], processing_ms, fields["least_bytes_s"]
    pull = PullEvent(fields["capacity"], drain_windows, *link, *limits)
    parts = fields.get("frames", ())
    built, at = list[FrameBuilt](), 0
    for length, closed in parts:
        frame = Frame.from_wire(pb.Frame.FromString(data[at : at + length]))
        built.append(FrameBuilt(frame, tuple(closed)))
        at += length
    return PullReplayed(pull, tuple(built)), fields.get("platform", 0)
