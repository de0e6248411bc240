"""Merged partials of slices (deltas), and the files that contain the large ones.

A task writes its large results to one file, a segment, under a name that no other attempt can have:
``<partition>/<epoch>/<plan>-<random>``. It returns their ranges. A result becomes visible when a transaction of the
result store names its range. So a task that is repeated, or that goes on after another driver has taken over, changes
nothing. Segments are in a directory of their own, which drivers and executors write. Gateways do not use it.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import google_crc32c

from center.storage.segment_files import is_lost, make_directory, sync_directory, write_file
from edgewater.base.errors import CorruptSynopsis, StorageError
from edgewater.synopses.encoding import codec
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

INLINE_BYTES = 256 << 10  # limit: bytes of a task's result that pass the driver
"""The only threshold. The results of a task, and the merge of a slice in the driver's transaction, are passed on and
stored in the database up to this size. Larger results are in segments. A file costs two syncs of a disk, which are more
than these bytes cost the driver."""


@dataclass(frozen=True, slots=True)
class SegmentRange:
    """The place of a delta in a segment.

    Attributes:
        segment: name of the file, relative to the directory of segments.
        offset, size: in bytes.
        crc32c: of these bytes.
        shape: as `shape_of`, if a task has just merged it.
    """

    segment: str
    offset: int
    size: int
    crc32c: int
    shape: str = field(default="", compare=False, repr=False)


Data: TypeAlias = bytes | SegmentRange
"""A delta: its bytes, or where they are."""


@dataclass(frozen=True, slots=True)
class Delta:
    """The merge of partials of one (query, slice).

    Attributes:
        query: the query's key.
        position: the position of its frame; None: it has partials of several frames.
    """

    query: str
    slice_start_ms: int
    data: Data = field(repr=False)
    position: int | None = field(default=None, compare=False)

    @property
    def size(self) -> int:
        return self.data.size if isinstance(self.data, SegmentRange) else len(self.data)


@dataclass(frozen=True, slots=True, order=True)
class SliceSpan:
    """The slices of a query that start in [from_ms, to_ms)."""

    key: str
    from_ms: int
    to_ms: int


@dataclass(frozen=True, slots=True)
class SpanPart:
    """The stored deltas of a span, for a task that merges them.

    Attributes:
        ids: of each delta in the store.
        data: in the same order.
        most_bytes: the largest merge that is wanted.
    """

    span: SliceSpan
    ids: tuple[int, ...]
    data: tuple[Data, ...] = field(repr=False)
    most_bytes: int


@dataclass(frozen=True, slots=True)
class SpanMerge:
    """The merge of a span's deltas by a task.

    Attributes:
        ids: of all deltas in the store.
        data: None: it has more bytes than are wanted, or no delta is left.
        size: its bytes.
        refused: deltas that cannot be read, or do not merge with the others, by their ids, with the reasons.
    """

    span: SliceSpan
    ids: tuple[int, ...]
    data: Data | None = field(repr=False)
    size: int
    refused: tuple[tuple[int, str], ...] = ()


class SegmentFile(NamedTuple):
    """A segment on disk. `plan` is the number of the plan whose task has written it."""

    name: str
    partition: str
    epoch: int
    plan: int
    size: int


class DeltaSegments:
    """The directory of segments. Any number of processes read and write.

    Args:
        root: the directory, which is created with the first segment; None: this process has none.
        inline_bytes: the most bytes of results that are not written to a segment.
    """

    def __init__(self, root: Path | None, inline_bytes: int = INLINE_BYTES) -> None:
        self._root, self.inline_bytes = root, inline_bytes

    @property
    def root(self) -> Path:
        if self._root is None:
            raise StorageError("a delta is in a segment, and this process was given no directory of segments")
        return self._root

    def place(self, prefix: str, deltas: Sequence[Delta]) -> list[Delta]:
        """Writes the large ones of a task's deltas to one segment, durably. Returns all deltas, in their order.

        The bytes of a query decide: the queries with the fewest bytes stay inline.

        Args:
            prefix: of the segment's name: ``<partition>/<epoch>/<plan>``.

        Raises:
            StorageError: the segment cannot be written, for example because the disk is full. Nothing is left of it.
        """
        sizes = Counter[str]()
        for delta in deltas:
            sizes[delta.query] += 0 if isinstance(delta.data, SegmentRange) else delta.size
        left, large = self.inline_bytes, set[str]()
        for query, size in sorted(sizes.items(), key=lambda item: item[1]):
            left -= size
            if left < 0:
                large.add(query)
        wanted = [d.data for d in deltas if d.query in large and isinstance(d.data, bytes)]
        ranges = self._write(prefix, wanted) if wanted else iter(())
        return [replace(d, data=next(ranges)) if d.query in large and isinstance(d.data, bytes) else d for d in deltas]

    def _write(self, prefix: str, partials: Sequence[bytes]) -> Iterator[SegmentRange]:
        name = f"{prefix}-{uuid.uuid4().hex}"
        path = self.root / name
        try:
            make_directory(path.parent)
            write_file(path, partials)
            sync_directory(path.parent)
        except OSError as exc:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            raise StorageError(f"{path}: cannot be written: {exc.strerror or exc}") from exc
        ranges, offset = list[SegmentRange](), 0
        for data in partials:
            ranges.append(SegmentRange(name, offset, len(data), google_crc32c.value(data)))
            offset += len(data)
        return iter(ranges)

    def read(self, data: Data) -> bytes:
        """Returns the bytes of a delta.

        Raises:
            CorruptSynopsis: the segment is lost or damaged. The error names the file.
            StorageError: the segments cannot be read at the moment.
        """
        if isinstance(data, bytes):
            return data
        path = self.root / data.segment
        try:
            with path.open("rb", buffering=0) as file:
                found = os.pread(file.fileno(), data.size, data.offset)
        except OSError as exc:
            if is_lost(exc, self.root):
                raise CorruptSynopsis(f"{path}: the segment is missing") from exc
            raise StorageError(f"{path}: cannot be read: {exc.strerror or exc}") from exc
        if len(found) < data.size or google_crc32c.value(found) != data.crc32c:
            raise CorruptSynopsis(f"{path}, {data.size} bytes at {data.offset}: they are incomplete or damaged")
        return found

    def files(self) -> list[SegmentFile]:
        """Returns the segments of all drivers, also incomplete ones. Raises StorageError."""
        if self._root is None:
            return []
        found = list[SegmentFile]()
        try:
            for path in self._root.glob("*/*/*-*"):
                partition, epoch, file = path.relative_to(self._root).parts
                with contextlib.suppress(FileNotFoundError, ValueError):  # another driver deletes, too
                    plan, size = int(file.partition("-")[0]), path.stat().st_size
                    found.append(SegmentFile(f"{partition}/{epoch}/{file}", partition, int(epoch), plan, size))
        except OSError as exc:
            raise StorageError(f"{self._root}: cannot be listed: {exc.strerror or exc}") from exc
        return found

    def remove(self, segments: Sequence[SegmentFile]) -> None:
        """Deletes segments, and their directories if these are then empty. Raises StorageError."""
        try:
            for segment in segments:
                (self.root / segment.name).unlink(missing_ok=True)
        except OSError as exc:
            raise StorageError(f"{self.root}: a segment cannot be deleted: {exc.strerror or exc}") from exc
        for directory in {(self.root / segment.name).parent for segment in segments}:
            with contextlib.suppress(OSError):  # not empty, or a task has just created it
                directory.rmdir()


def shape_of(partial: bytes) -> str:
    """Returns kinds, parameters and seeds of a partial as JSON. Partials merge only if these are equal.

    Raises SynopsisError.
    """

    def shape(message: SynopsisMessage) -> list[Any]:
        return [message.kind, message.parameters, message.seed, [shape(part) for part in message.parts]]

    return json.dumps(shape(codec.unseal(partial)), separators=(",", ":"))
