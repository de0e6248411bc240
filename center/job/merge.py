"""The tasks. A task of a plan reads a part of the plan's frames from the log, and merges their partials by (query,
slice). A task of an answer merges stored partials to one.

Tasks run on the executors, which need only the frame log. Here this module must not import SQLAlchemy. The driver knows
which frames a part has, and reads their other statements from the frame index. So a task returns merged partials, and
says which frames and partials cannot be used.

A task returns its failures as values. An exception of a task would reach the driver as a text of the JVM, like the
death of a worker. So only a dead or silent worker is a failure of Spark.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

import pyarrow as pa

from center.spark.workers import settle
from center.storage.frame_log import FrameEntry, FrameLocation, FrameLog, decode_fetched
from center.storage.slice_spans import SpanMerge, SpilledSpan
from edgewater.model.errors import StorageError, SynopsisError
from edgewater.synopses import CountStack, GroupedAggregate, merge_what_fits

MAX_REASON_BYTES = 2_000
READ_BYTES = 64 << 20
"""Bytes of stored partials that a task merges at a time."""
WARM_PARTIALS = 64

Frame = tuple[str, FrameEntry]
"""A frame of the index, with the key of its query."""


class SkipKind(StrEnum):
    """Why a frame or a partial cannot be used. DAMAGED: the frame cannot be read. REFUSED: a partial of it cannot be
    merged. QUARANTINED: the frame was set aside, because it could not be applied.
    """

    DAMAGED = "frame-damaged"
    REFUSED = "partial-refused"
    QUARANTINED = "frame-quarantined"


@dataclass(frozen=True, slots=True)
class Skipped:
    """A frame that cannot be used, or a refused partial of it."""

    key: str
    position: int
    kind: SkipKind
    reason: str
    slice_start_ms: int = 0


@dataclass(frozen=True, slots=True)
class SlicePartial:
    """A partial of a query's slice, or a merge of several.

    Attributes:
        position: of its frame; None: it is a merge.
    """

    key: str
    slice_start_ms: int
    synopsis: bytes = field(repr=False)
    position: int | None


@dataclass(frozen=True, slots=True)
class PartMerged:
    """The task has read and merged its frames. Damaged frames and refused partials are among `skipped`."""

    partials: tuple[SlicePartial, ...] = ()
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True, slots=True)
class StorageFailed:
    """The log cannot be read at the moment. This says nothing about the frames: skipping them would lose them."""

    reason: str


@dataclass(frozen=True, slots=True)
class TooLargeHere:
    """The memory of the task does not suffice. Fewer frames, or the same frames alone, may fit."""

    reason: str


Part = Sequence[Frame] | SpilledSpan
"""What a task merges."""
PartOutcome = PartMerged | SpanMerge | StorageFailed | TooLargeHere


def merge_part(log_dir: str, part: Part) -> PartOutcome:
    """Reads and merges frames, ordered by position within a query, or stored partials. Never raises for a fault of
    storage or data.
    """
    directory = Path(log_dir)
    try:
        if isinstance(part, SpilledSpan):
            return _merge_span(directory, part)
        partials, damaged = read_frames(FrameLog(directory), directory, part)
        merged, refused = merge_partials(partials)
    except StorageError as exc:
        return StorageFailed(as_reason(f"{exc.code}: {exc}"))
    except MemoryError as exc:
        return TooLargeHere(as_reason(f"MemoryError: {exc}"))
    return PartMerged(tuple(merged), (*damaged, *refused))


class MergeTask:
    """`merge_part` as a function for `RDD.mapPartitions`; the elements are parts."""

    def __init__(self, log_dir: str) -> None:
        self._log_dir = log_dir

    def __call__(self, parts: Iterator[Part]) -> Iterator[PartOutcome]:
        settle()
        for part in parts:  # all of its input, else Spark does not reuse the worker
            yield merge_part(self._log_dir, part)


def _merge_span(log_dir: Path, part: SpilledSpan) -> SpanMerge:
    """Merges the partials of a span in groups of `READ_BYTES`. Raises StorageError, MemoryError."""
    merged: bytes | None = None
    group: list[bytes] = []
    try:
        for partial in part.read(log_dir):
            group.append(partial)
            if sum(map(len, group)) > READ_BYTES:
                merged = GroupedAggregate.merge_bytes(group)
                group = [merged]
        merged = group[0] if len(group) == 1 else GroupedAggregate.merge_bytes(group)
        refused: dict[int, Exception] = {}
    except StorageError:
        raise
    except Exception as exc:
        if is_for_memory(exc):
            raise MemoryError(str(exc)) from exc
        merged, refused = merge_what_fits(list(part.read(log_dir)))
        refused = refused or {len(part.sizes) - 1: exc}  # in another order they merge
    size = len(merged or b"")
    reasons = tuple((n, as_reason(f"{type(exc).__name__}: {exc}")) for n, exc in refused.items())
    return SpanMerge(part.span, merged if size <= part.most_bytes else None, size, reasons)


def warm_task(numbers: Iterator[int]) -> list[int]:
    """Merges generated partials, so that a worker has loaded and run the code of a plan."""
    done = list(numbers)
    aggregate = GroupedAggregate({"key": pa.string()}, {"n": CountStack()})
    aggregate.update([pa.array(["a", "b"])], {"n": None}, 2)
    merge_partials(SlicePartial("", 0, aggregate.to_bytes(), n) for n in range(WARM_PARTIALS))
    settle()
    return done


def read_frames(log: FrameLog, log_dir: Path, frames: Sequence[Frame]) -> tuple[list[SlicePartial], list[Skipped]]:
    """Returns the partials of frames, and the frames that are damaged.

    Raises:
        StorageError: the storage failed, not a frame.
    """
    locations = [FrameLocation(entry.segment, entry.offset, entry.length) for _, entry in frames]
    partials: list[SlicePartial] = []
    damaged: list[Skipped] = []
    for (key, entry), location, record in zip(frames, locations, log.fetch(locations), strict=True):
        try:
            stored = decode_fetched(location, record)
            identity = (stored.query, stored.edge, stored.incarnation, stored.seq)
            if identity != (entry.query, entry.edge, entry.incarnation, entry.seq):
                raise StorageError(f"the log holds frame {identity}, the index says {entry}")
        except StorageError as exc:
            if isinstance(exc.__cause__, OSError) and not _is_lost(exc.__cause__, log_dir):
                raise
            damaged.append(Skipped(key, entry.position, SkipKind.DAMAGED, as_reason(str(exc))))
            continue
        partials += (SlicePartial(key, p.slice_start_ms, p.synopsis, entry.position) for p in stored.partials)
    return partials, damaged


def _is_lost(error: OSError, log_dir: Path) -> bool:
    """Returns whether a missing file is lost: the log has other files.

    If the log is empty, a volume is probably not mounted.
    """
    return isinstance(error, FileNotFoundError) and log_dir.is_dir() and any(log_dir.iterdir())


def merge_partials(partials: Iterable[SlicePartial]) -> tuple[list[SlicePartial], list[Skipped]]:
    """Merges partials to one per (query, slice), and returns the partials that cannot be read. Pure.

    An exception of a partial affects only that partial: foreign bytes may trigger any fault of the decoders. If some
    partials merge with each other but not with the rest, both remain: the store decides which of them fit the query.

    Raises:
        MemoryError: the memory does not suffice. This says nothing about the partials.
    """
    by_slice: defaultdict[tuple[str, int], list[SlicePartial]] = defaultdict(list)
    for partial in partials:
        by_slice[partial.key, partial.slice_start_ms].append(partial)
    merged: list[SlicePartial] = []
    refused: list[Skipped] = []
    for same in by_slice.values():
        try:
            merged.append(_merged(same, GroupedAggregate.merge_bytes([p.synopsis for p in same])))
        except Exception as exc:
            if is_for_memory(exc):
                raise MemoryError(str(exc)) from exc
            _merge_what_fits(same, merged, refused)
    return merged, refused


def _merge_what_fits(partials: list[SlicePartial], merged: list[SlicePartial], refused: list[Skipped]) -> None:
    while partials:
        synopsis, left_out = merge_what_fits([p.synopsis for p in partials])
        if short := next((exc for exc in left_out.values() if is_for_memory(exc)), None):
            raise MemoryError(str(short)) from short
        if synopsis is None:
            refused += (_refused(partials[number], exc) for number, exc in left_out.items())
            return
        merged.append(_merged([p for number, p in enumerate(partials) if number not in left_out], synopsis))
        partials = [partials[number] for number in left_out]


def _merged(partials: Sequence[SlicePartial], synopsis: bytes) -> SlicePartial:
    position = partials[0].position if len(partials) == 1 else None
    return replace(partials[0], synopsis=synopsis, position=position)


def _refused(partial: SlicePartial, exc: Exception) -> Skipped:
    assert partial.position is not None, "what a task has read is of one frame"
    code = exc.code if isinstance(exc, SynopsisError) else type(exc).__name__
    reason = as_reason(f"{code}: {exc}")
    return Skipped(partial.key, partial.position, SkipKind.REFUSED, reason, partial.slice_start_ms)


def as_reason(text: str) -> str:
    """Returns a text that every database stores, of at most `MAX_REASON_BYTES` bytes: foreign bytes may be quoted."""
    return text.encode(errors="backslashreplace")[:MAX_REASON_BYTES].decode(errors="ignore")


def is_for_memory(exc: BaseException | None) -> bool:
    """Returns whether an exception says that the memory does not suffice: decoders turn it into errors of their own."""
    return exc is not None and (isinstance(exc, MemoryError) or is_for_memory(exc.__cause__ or exc.__context__))
