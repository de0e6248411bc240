"""`DurableCore`: an `EdgeCore` whose state survives a crash at any moment.

Every event is journaled before the core handles it, but a pull behind it, with the frame that it built. A frame may
leave, and a pushing client may be told "accepted", only after `sync`. Recovery restores the newest checkpoint and
applies the journal behind it in order. Frames that the center may have come out of the journal as they were built, and
what left with them is taken out of the state again by their groups' keys: neither which groups a policy chooses nor how
a body is compressed is worked out anew, so another library or processor sends the same frames.

The state itself is worked out anew, from the records. It is compared with what left: a frame that would have another
body now is a source's file that was changed, or a user's function that is not pure, and recovery refuses it. On another
platform (`platform_id`) it may also be the last bit of a logarithm. Then the edge goes on, says so, and counts them.

Files in the state directory: ``identity.json``; ``checkpoint-N.ckpt``, the state before
``journal-N.log``; ``journal-N.log``.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
from numpy.lib.introspect import opt_func_info

from edge.core.core import EdgeCore
from edge.core.events import (
    Acked,
    BudgetSet,
    Configured,
    Dropped,
    Effect,
    Event,
    FrameBuilt,
    FrameDiverged,
    FunctionFailed,
    Ingested,
    Pull,
    Pulled,
    SamplingSet,
    SourceEnded,
    SourcesOpened,
    Tick,
)
from edge.durability import checkpoint as state
from edge.durability import journal
from edge.durability.journal import Record, Segment
from edgewater.errors import StorageError
from edgewater.query import QuerySpec
from edgewater.wire import uplink_pb2 as pb
from edgewater.wire.frames import Frame, QueryRef, SamplingReason

log = logging.getLogger(__name__)

Position = dict[str, Any]
Reread = Callable[[str, Position | None, Position], pa.RecordBatch]
"""(source, start, end) -> the batch that was read between two positions."""

# Kinds of journal records. Numbers are never reused.
CONFIGURED, SOURCES_OPENED, RANGE, PAYLOAD, SOURCE_ENDED, TICK, PULL, ACKED, BUDGET, SAMPLING = range(1, 11)
KIND_NAMES = {
    CONFIGURED: "configured", SOURCES_OPENED: "sources-opened", RANGE: "range", PAYLOAD: "payload",
    SOURCE_ENDED: "source-ended", TICK: "tick", PULL: "pull", ACKED: "acked", BUDGET: "budget", SAMPLING: "sampling",
}  # fmt: skip


@cache
def platform_id() -> int:
    """A number for all that the last bit of a value may hang on: releases, the C library, and what of the processor
    NumPy and Arrow use."""
    releases = version("edgewater"), np.__version__, pa.__version__, platform.python_version()
    machine = platform.machine(), platform.libc_ver(), pa.runtime_info().simd_level, opt_func_info()
    return int(google_crc32c.value(repr((releases, machine)).encode()))


def load_identity(directory: Path, fresh: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What stays the same for as long as a state directory lives; `fresh` makes it for a new one.

    Raises:
        StorageError: the directory cannot be used, or what is in it is damaged.
    """
    path = directory / "identity.json"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            journal.write_durably(path, json.dumps(fresh()).encode())
        identity = json.loads(path.read_text())
        if not isinstance(identity.get("incarnation"), str):
            raise ValueError("it names no incarnation")
    except OSError as exc:
        raise StorageError(f"state_dir {directory} cannot be used: {exc.strerror or exc}") from exc
    except (ValueError, AttributeError) as exc:
        raise StorageError(
            f"{path} is damaged ({exc}). Restore it from a copy, or remove {directory} to begin anew: what its "
            "sources delivered before is then counted again"
        ) from exc
    return dict(identity)


@contextlib.contextmanager
def sole_user(directory: Path) -> Iterator[None]:
    """Holds the state directory's lock, so that two edges never share a journal. Raises StorageError."""
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
        directory: where state is kept; created if missing.
        make_core: builds an empty core.
        reread: reads a range of a replayable source again.
        incarnation: identity for a state that is new; an existing state keeps its own.

    Attributes:
        drops: records not counted in a query, by reason.
        function_failures: calls of users' functions that failed, by function.
        damaged_records: records and checkpoints that recovery passed over.
        diverged: numbers of frames that recovery would have built with other bodies; they leave as they were built.
    """

    def __init__(self, directory: Path, make_core: Callable[[], EdgeCore], reread: Reread, incarnation: str) -> None:
        self.directory = directory
        self.positions: dict[str, Position] = {}
        self.drops: dict[str, int] = {}
        self.function_failures: dict[str, int] = {}
        self._said: set[tuple[str, str]] = set()
        self.damaged_records = 0
        self.diverged: list[int] = []
        self._make_core = make_core
        self._reread = reread
        self.incarnation = str(load_identity(directory, lambda: {"incarnation": incarnation})["incarnation"])
        self.core = make_core()
        self._number = 0
        self._segment = self._recover()

    def handle(self, event: Event) -> list[Effect]:
        """Journals an event and applies it. For ingested batches see the two methods below."""
        if not isinstance(event, Pull):
            self._segment.append(_encode(event))
            return self._apply(event)
        effects = self._apply(event)
        built = next((e for e in effects if isinstance(e, FrameBuilt)), None)
        self._segment.append(_pull_record(event, built))
        return effects

    def ingest_range(self, event: Ingested, start: Position | None, end: Position) -> list[Effect]:
        """A batch of a replayable source: the journal keeps only where it stands."""
        self._segment.append(_range_record(event, start, end))
        self.positions[event.source] = end
        return self._apply(event)

    def ingest_payload(self, event: Ingested) -> list[Effect]:
        """A pushed batch: the journal keeps its records."""
        self._segment.append(_payload_record(event))
        return self._apply(event)

    def _apply(self, event: Event) -> list[Effect]:
        effects = self.core.handle(event)
        for effect in effects:
            if isinstance(effect, Dropped):
                self.drops[effect.reason] = self.drops.get(effect.reason, 0) + effect.count
            elif isinstance(effect, FunctionFailed):
                self._note_failed(effect)
        return effects

    def _note_failed(self, effect: FunctionFailed) -> None:
        """Counts them; each function's reasons are logged once, for a broken one fails in every batch."""
        name, failed = effect.function, self.function_failures
        failed[name] = failed.get(name, 0) + effect.calls
        if (name, effect.reason) not in self._said:
            self._said.add((name, effect.reason))
            log.error("function %s failed in query %s, its values are null: %s", name, effect.query.name, effect.detail)

    def sync(self) -> None:
        """Makes everything handled before the call durable. Raises StorageError; may be repeated."""
        self._segment.sync()

    @property
    def unsynced_bytes(self) -> int:
        return self._segment.unsynced_bytes

    @property
    def journal_bytes(self) -> int:
        return self._segment.nbytes

    def checkpoint(self) -> None:
        """Writes the state down and begins a new journal; the old ones are removed.

        Raises:
            StorageError: the disk refuses; the old checkpoint and journal stay in force.
        """
        self._segment.sync()
        document = {"positions": self.positions, "drops": self.drops, "function_failures": self.function_failures}
        body = json.dumps(document).encode()
        data = len(body).to_bytes(4, "little") + body + state.snapshot(self.core)
        number = self._number + 1
        path = self.directory / f"checkpoint-{number}.ckpt"
        try:
            journal.write_durably(path, google_crc32c.value(data).to_bytes(4, "little") + data)
            segment = self._open(number)
        except StorageError:
            # It may be there all the same, and would hide what the journal in force takes in from here on.
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                journal.sync_directory(self.directory)
            raise
        self._segment.close()
        self._segment, self._number = segment, number
        for path, old in self._files():
            if old < number - 1:  # one generation is kept, in case the new checkpoint goes bad on disk
                path.unlink(missing_ok=True)
        journal.sync_directory(self.directory)

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
        if self.diverged:
            log.error(
                "the journal in %s was written by another release, library or processor, and %d frames, the first of "
                "them %d, would have other bodies here. They leave as they were built. What has not left yet is worked "
                "out here; if a source's file was changed meanwhile, too, its records may be wrong",
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
            log.warning("journal %s: a torn tail of %d bytes is cut", path, found.torn_bytes)
            segment = Segment(path)
            segment.truncate(found.good_bytes)
            segment.close()
        if found.damaged:
            self.damaged_records += len(found.damaged)
            log.error("journal %s: damaged records at %s are passed over", path, found.damaged)
        return found.records

    def _restore_checkpoint(self, numbers: list[int]) -> int:
        """The number of the newest sound checkpoint, restored; 0 where the journal begins with the state.

        Raises:
            StorageError: there are checkpoints, none is sound, and the first journal is gone. Starting over
                would count the sources' records a second time, so that is for an operator to decide.
        """
        for number in reversed(numbers):
            data = (self.directory / f"checkpoint-{number}.ckpt").read_bytes()
            if google_crc32c.value(data[4:]) != int.from_bytes(data[:4], "little"):
                log.error("checkpoint %d is damaged and passed over", number)
                self.damaged_records += 1
                continue
            length = int.from_bytes(data[4:8], "little")
            document = json.loads(data[8 : 8 + length])
            self.positions, self.drops = document["positions"], document["drops"]
            self.function_failures = document["function_failures"]
            state.restore(self.core, data[8 + length :])
            return number
        if numbers and not (self.directory / "journal-0.log").exists():
            raise StorageError(
                f"{self.directory}: no checkpoint of {numbers} is sound. Restore the directory from a copy, or "
                "remove it to begin anew: what its sources delivered before is then counted again"
            )
        return 0

    def _replay(self, records: list[Record]) -> None:
        for record in records:
            if record.kind == PULL:
                self._replay_pull(*_read_pull(record))
                continue
            event = self._decode(record)
            if event is not None:
                self._apply(event)

    def _replay_pull(self, event: Pulled, written_on: int) -> None:
        if event.built is not None and event.built.frame.seq != self.core.next_seq:
            raise StorageError(
                f"{self.directory}: the journal has frame {event.built.frame.seq} where {self.core.next_seq} is "
                "expected: a damaged record was passed over. Restore the directory from a copy, or remove it to begin "
                "anew: what its sources delivered before is then counted again"
            )
        for effect in self._apply(event):
            if isinstance(effect, FrameDiverged):
                if written_on == platform_id():
                    raise StorageError(
                        f"{self.directory}: replaying the journal gave another frame than was written ({effect.seq}); "
                        "a source's file or a user's function was changed"
                    )
                self.diverged.append(effect.seq)

    def _decode(self, record: Record) -> Event | None:
        if record.kind == RANGE:
            head = json.loads(record.payload)
            batch = self._reread(head["source"], head["start"], head["end"])
            self.positions[head["source"]] = head["end"]
            return Ingested(head["stream"], head["source"], batch, head["arrival_ms"])
        if record.kind == PAYLOAD:
            return _payload_event(record.payload)
        try:
            return _decode_plain(record.kind, json.loads(record.payload))
        except KeyError:
            log.error("journal record of kind %d is unknown to this release", record.kind)
            self.damaged_records += 1
            return None


def _json(kind: int, document: Mapping[str, Any]) -> Record:
    return Record(kind, json.dumps(document, separators=(",", ":")).encode())


def _encode(event: Event) -> Record:
    match event:
        case Configured(queries):
            return _json(CONFIGURED, {"queries": [[r.name, r.version, s.to_mapping()] for r, s in queries]})
        case SourcesOpened(sources):
            return _json(SOURCES_OPENED, {"sources": sources})
        case SourceEnded(stream, source):
            return _json(SOURCE_ENDED, {"stream": stream, "source": source})
        case Tick(now_ms, unread):
            return _json(TICK, {"now_ms": now_ms, **({"unread": unread} if unread else {})})
        case Acked(through):
            return _json(ACKED, {"through": through})
        case BudgetSet(ref, shares, version, from_ms):
            word = {"shares": dict(shares), "version": version, "from_ms": from_ms}
            return _json(BUDGET, {"query": [ref.name, ref.version], **word})
        case SamplingSet(ref, rate, offset, reason):
            word = {"rate": rate, "clock_offset_ms": offset, **({"reason": int(reason)} if reason else {})}
            return _json(SAMPLING, {"query": [ref.name, ref.version], **word})
        case Pull() | Pulled():
            raise TypeError("a pull is journaled with what it built")
        case Ingested():
            raise TypeError("ingest_range or ingest_payload journal a batch")


def _decode_plain(kind: int, given: dict[str, Any]) -> Event:
    readers: dict[int, Callable[[], Event]] = {
        CONFIGURED: lambda: Configured(
            tuple((QueryRef(n, v), QuerySpec.from_mapping(spec)) for n, v, spec in given["queries"])
        ),
        SOURCES_OPENED: lambda: SourcesOpened(tuple((s, n) for s, n in given["sources"])),
        SOURCE_ENDED: lambda: SourceEnded(given["stream"], given["source"]),
        TICK: lambda: Tick(given["now_ms"], tuple(given.get("unread", ()))),
        ACKED: lambda: Acked(given["through"]),
        BUDGET: lambda: BudgetSet(QueryRef(*given["query"]), given["shares"], given["version"], given["from_ms"]),
        SAMPLING: lambda: SamplingSet(
            QueryRef(*given["query"]),
            given["rate"],
            given["clock_offset_ms"],
            SamplingReason.from_number(given.get("reason", 0)),
        ),
    }
    return readers[kind]()


def _range_record(event: Ingested, start: Position | None, end: Position) -> Record:
    head = {"stream": event.stream, "source": event.source, "arrival_ms": event.arrival_ms}
    return _json(RANGE, {**head, "start": start, "end": end})


def _payload_record(event: Ingested) -> Record:
    head = json.dumps({"stream": event.stream, "source": event.source, "arrival_ms": event.arrival_ms}).encode()
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, event.batch.schema, options=options) as writer:
        writer.write_batch(event.batch)
    return Record(PAYLOAD, len(head).to_bytes(4, "little") + head + sink.getvalue().to_pybytes())


def _payload_event(payload: bytes) -> Ingested:
    length = int.from_bytes(payload[:4], "little")
    head = json.loads(payload[4 : 4 + length])
    with pa.ipc.open_stream(pa.py_buffer(payload[4 + length :])) as reader:
        batch = reader.read_next_batch()
    return Ingested(head["stream"], head["source"], batch, head["arrival_ms"])


def _pull_record(pull: Pull, built: FrameBuilt | None) -> Record:
    """A line of JSON; behind it the frame as it travels, if there is one."""
    link = {"bandwidth_bytes_s": pull.bandwidth_bytes_s, "way_ms": pull.way_ms, "unread": pull.unread}
    head = {"capacity": pull.capacity_bytes, "open_between": dict(pull.open_between), **link}
    if built is None:
        return _json(PULL, head)
    record = _json(PULL, {**head, "closed": built.closed, "platform": platform_id()})
    return Record(PULL, record.payload + b"\n" + built.frame.to_wire().SerializeToString())


def _read_pull(record: Record) -> tuple[Pulled, int]:
    """The pull, and the platform on which it built its frame."""
    text, _, frame = record.payload.partition(b"\n")
    given = json.loads(text)
    open_between = {s: (after, through) for s, (after, through) in given["open_between"].items()}
    link = given["bandwidth_bytes_s"], given["way_ms"], tuple(given["unread"])
    pull = Pull(given["capacity"], open_between, *link)
    if not frame:
        return Pulled(pull, None), 0
    built = FrameBuilt(Frame.from_wire(pb.Frame.FromString(frame)), tuple(given["closed"]))
    return Pulled(pull, built), given["platform"]
