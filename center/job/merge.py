"""The tasks. A task of a plan reads a part of the plan's frames from the log, and merges their partials by (query,
slice). A task of an answer merges stored partials to one.

Tasks run on the executors, which need only the frame log and the directory of segments. So this module must not import
SQLAlchemy. The driver knows which frames a part has, and reads their other statements from the frame index. So a task
returns merged partials, and says which frames and partials cannot be used. Large results do not pass the driver: the
task writes them to a segment, and returns where they are (`DeltaSegments.place`).

A task returns its failures as values. An exception of a task would reach the driver as a text of the JVM, like the
death of a worker. So only a dead or silent worker is a failure of Spark.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from center.spark.workers import cpu_limit, in_background, settle
from center.storage.delta_segments import Delta, DeltaSegments, SegmentRange, SpanMerge, SpanPart, shape_of
from center.storage.frame_log import FrameEntry, FrameLocation, FrameLog, decode_fetched
from center.storage.segment_files import is_lost
from edgewater.base.errors import CorruptSynopsis, StorageError, SynopsisError
from edgewater.synopses import CountStack, GroupedAggregate, merge_what_fits

MAX_REASON_BYTES = 2_000  # limit: length of a message
READ_BYTES = 64 << 20  # limit: memory of a task
"""Bytes of stored deltas that a task merges at a time."""
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
    """A partial of a query's slice, from the frame at a position."""

    key: str
    slice_start_ms: int
    synopsis: bytes = field(repr=False)
    position: int


@dataclass(frozen=True, slots=True)
class PartMerged:
    """The task has read and merged its frames. Damaged frames and refused partials are among `skipped`."""

    deltas: tuple[Delta, ...] = ()
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True, slots=True)
class StorageFailed:
    """The log cannot be read at the moment, or a segment cannot be read or written. This says nothing about the frames:
    skipping them would lose them.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class TooLargeHere:
    """The memory of the task does not suffice. Fewer frames, or the same frames alone, may fit."""

    reason: str


Part = Sequence[Frame] | SpanPart
"""What a task merges."""
PartOutcome = PartMerged | SpanMerge | StorageFailed | TooLargeHere


class Effort(NamedTuple):
    """What a task may take: CPU time in seconds, and whether it leaves the CPU to others."""

    cpu_s: float
    is_background: bool = False


class MergeTask:
    """The function of the tasks. Called with the elements of an RDD's partition: prefixes of segments, parts, and what
    the merge of each part may take.
    """

    def __init__(self, log_dir: Path, segments: DeltaSegments) -> None:
        self._log_dir, self._segments = log_dir, segments

    def __call__(self, parts: Iterator[tuple[str, Part, Effort]]) -> Iterator[PartOutcome]:
        settle()
        for prefix, part, effort in parts:  # all of its input, else Spark does not reuse the worker
            work = functools.partial(self.merge, prefix, part)
            yield in_background(effort.cpu_s, work) if effort.is_background else cpu_limit(effort.cpu_s)(work)()

    def merge(self, prefix: str, part: Part) -> PartOutcome:
        """Reads and merges frames, ordered by position within a query, or stored deltas. Writes at most one segment.

        Never raises for a fault of storage or data.
        """
        try:
            if isinstance(part, SpanPart):
                return self._merge_span(prefix, part)
            partials, damaged = read_frames(FrameLog(self._log_dir), self._log_dir, part)
            merged, refused = merge_partials(partials)
            placed = map(_with_shape, self._segments.place(prefix, merged), merged)
            return PartMerged(tuple(placed), (*damaged, *refused))
        except StorageError as exc:
            return StorageFailed(as_reason(f"{exc.code}: {exc}"))
        except MemoryError as exc:
            return TooLargeHere(as_reason(f"MemoryError: {exc}"))

    def _merge_span(self, prefix: str, part: SpanPart) -> SpanMerge:
        """Merges the deltas of a span in groups of `READ_BYTES`. Raises StorageError, MemoryError."""
        refused = dict[int, Exception]()
        group: list[bytes] = []
        try:
            for _, data in self._read(part, refused):
                group.append(data)
                if sum(map(len, group)) > READ_BYTES:
                    group = [GroupedAggregate.merge_bytes(group)]
            merged = GroupedAggregate.merge_bytes(group) if group else None
        except StorageError:
            raise
        except Exception as exc:
            if is_for_memory(exc):
                raise MemoryError(str(exc)) from exc
            numbers, read = zip(*self._read(part, refused), strict=True)
            merged, left_out = merge_what_fits(read)
            refused |= {numbers[n]: failure for n, failure in left_out.items()}
            refused = refused or {numbers[-1]: exc}  # in another order they merge
        size = len(merged or b"")
        reasons = tuple((part.ids[n], as_reason(f"{type(exc).__name__}: {exc}")) for n, exc in sorted(refused.items()))
        if merged is None or size > part.most_bytes:
            return SpanMerge(part.span, part.ids, None, size, reasons)
        (delta,) = self._segments.place(prefix, [Delta(part.span.key, part.span.from_ms, merged)])
        return SpanMerge(part.span, part.ids, delta.data, size, reasons)

    def _read(self, part: SpanPart, damaged: dict[int, Exception]) -> Iterator[tuple[int, bytes]]:
        """Yields the deltas with their numbers; adds the others to `damaged`. Raises StorageError."""
        for number, data in enumerate(part.data):
            try:
                yield number, self._segments.read(data)
            except CorruptSynopsis as exc:
                damaged[number] = exc


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
            if isinstance(exc.__cause__, OSError) and not is_lost(exc.__cause__, log_dir):
                raise
            damaged.append(Skipped(key, entry.position, SkipKind.DAMAGED, as_reason(str(exc))))
            continue
        partials += (SlicePartial(key, p.slice_start_ms, p.synopsis, entry.position) for p in stored.partials)
    return partials, damaged


def merge_partials(partials: Iterable[SlicePartial]) -> tuple[list[Delta], list[Skipped]]:
    """Merges partials to one per (query, slice), and returns the partials that cannot be read. Pure.

    An exception of a partial affects only that partial: foreign bytes may trigger any fault of the decoders. If some
    partials merge with each other but not with the rest, both remain: the store decides which of them fit the query.

    Raises:
        MemoryError: the memory does not suffice. This says nothing about the partials.
    """
    by_slice: defaultdict[tuple[str, int], list[SlicePartial]] = defaultdict(list)
    for partial in partials:
        by_slice[partial.key, partial.slice_start_ms].append(partial)
    merged: list[Delta] = []
    refused: list[Skipped] = []
    for same in by_slice.values():
        try:
            merged.append(_merged(same, GroupedAggregate.merge_bytes([p.synopsis for p in same])))
        except Exception as exc:
            if is_for_memory(exc):
                raise MemoryError(str(exc)) from exc
            _merge_what_fits(same, merged, refused)
    return merged, refused


def _merge_what_fits(partials: list[SlicePartial], merged: list[Delta], refused: list[Skipped]) -> None:
    while partials:
        synopsis, left_out = merge_what_fits([p.synopsis for p in partials])
        if short := next((exc for exc in left_out.values() if is_for_memory(exc)), None):
            raise MemoryError(str(short)) from short
        if synopsis is None:
            refused += (_refused(partials[number], exc) for number, exc in left_out.items())
            return
        merged.append(_merged([p for number, p in enumerate(partials) if number not in left_out], synopsis))
        partials = [partials[number] for number in left_out]


def _with_shape(placed: Delta, merged: Delta) -> Delta:
    """Returns a delta that states its shape: of bytes in a segment, the store cannot see it."""
    if not isinstance(placed.data, SegmentRange):
        return placed
    assert isinstance(merged.data, bytes)
    return replace(placed, data=replace(placed.data, shape=shape_of(merged.data)))


def _merged(partials: Sequence[SlicePartial], synopsis: bytes) -> Delta:
    first = partials[0]
    return Delta(first.key, first.slice_start_ms, synopsis, first.position if len(partials) == 1 else None)


def _refused(partial: SlicePartial, exc: Exception) -> Skipped:
    code = exc.code if isinstance(exc, SynopsisError) else type(exc).__name__
    reason = as_reason(f"{code}: {exc}")
    return Skipped(partial.key, partial.position, SkipKind.REFUSED, reason, partial.slice_start_ms)


def as_reason(text: str) -> str:
    """Returns a text that every database stores, of at most `MAX_REASON_BYTES` bytes: foreign bytes may be quoted."""
    return text.encode(errors="backslashreplace")[:MAX_REASON_BYTES].decode(errors="ignore")


def is_for_memory(exc: BaseException | None) -> bool:
    """Returns whether an exception says that the memory does not suffice: decoders turn it into errors of their own."""
    return exc is not None and (isinstance(exc, MemoryError) or is_for_memory(exc.__cause__ or exc.__context__))
