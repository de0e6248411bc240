"""The frame log: segment files per query that hold every frame the center has acknowledged.

A record is ``length (u32) · CRC32C (u32) · version (u8) · payload``, little endian. The checksum covers the version
and the payload: the edge's id, its incarnation and the frame's wire message.

Only records that the catalog's index points to count. A torn record at the end of a segment was never indexed, so it is
never read; and each writer names its segments uniquely, so a dead writer's segment is never appended to. Resuming such
segments was rejected: it would save a few small files, and cost a scan, a truncation and a lock among gateways.
"""

from __future__ import annotations

import os
import struct
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import google_crc32c
from google.protobuf.message import DecodeError

from edgewater.errors import ProtocolError, StorageError
from edgewater.measure import NAME
from edgewater.streams import EdgeId
from edgewater.wire import Frame, QueryRef
from edgewater.wire import uplink_pb2 as pb

VERSION = 1
SEGMENT_BYTES = 64 << 20
MAX_OPEN_SEGMENTS = 256
_HEADER = struct.Struct("<IIB")
_TEXT = struct.Struct("<H")


@dataclass(frozen=True, slots=True)
class StoredFrame:
    """A frame with the identity of its sender."""

    edge: EdgeId
    incarnation: str
    frame: Frame


@dataclass(frozen=True, slots=True)
class FrameLocation:
    """Location of a record: its segment (relative path in the log, with ``/``), offset and length in bytes."""

    segment: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class FrameEntry:
    """An indexed frame: its identity and its location. `position` counts a query's frames from 1, without gaps.

    Attributes:
        crc32c: of the frame as it was delivered. The one in the log has another if the gateway refused parts of it.
        plain_bytes: of its body before compression, or of the frame on the wire if that is longer.
        work: the job's work with it, as a number of slices that it has partials or closes of.
    """

    query: QueryRef
    position: int
    edge: EdgeId
    incarnation: str
    seq: int
    crc32c: int
    segment: str
    offset: int
    length: int
    wire_bytes: int
    received_at_ms: int
    plain_bytes: int = 0
    work: int = 0


@dataclass(slots=True)
class _OpenSegment:
    """A segment that this process writes. `written`, `synced`: bytes."""

    name: str
    path: Path
    file: BinaryIO
    written: int = 0
    synced: int = 0


class FrameLog:
    """Frames on disk, appended by one thread at a time and read by any number of processes.

    Args:
        path: the log's directory; created when the first frame is written.
        segment_bytes: size at which a segment is closed and the next one begun.
        writer: prefix of this writer's segments; unique among all writers, past ones included.
    """

    def __init__(self, path: str | Path, *, segment_bytes: int = SEGMENT_BYTES, writer: str | None = None) -> None:
        self._root = Path(path)
        self._segment_bytes = segment_bytes
        self._writer = writer or uuid.uuid4().hex[:12]
        self._count = 0
        self._open: OrderedDict[str, _OpenSegment] = OrderedDict()
        self._touched: dict[str, _OpenSegment] = {}

    def append(self, frames: Sequence[StoredFrame]) -> list[FrameLocation]:
        """Writes frames; returns their locations, in the order of `frames`. They are durable only after `sync`.

        Raises:
            OSError: of the disk. All records since the last `sync` are discarded and must be appended again.
        """
        locations: list[FrameLocation | None] = [None] * len(frames)
        keys = [_key(f) for f in frames]
        order = sorted(range(len(frames)), key=keys.__getitem__)
        try:
            for key, numbers in groupby(order, key=keys.__getitem__):
                for i, location in self._append_to(key, [(i, encode_record(frames[i])) for i in numbers]):
                    locations[i] = location
        except OSError:
            self._discard_unsynced()
            raise
        return [location for location in locations if location is not None]

    def _append_to(self, key: str, records: Sequence[tuple[int, bytes]]) -> Iterable[tuple[int, FrameLocation]]:
        """Writes records of one query, with one write per segment."""
        begun = 0
        while begun < len(records):
            segment = self._segment(key)
            offset = segment.written
            located = []
            for i, record in records[begun:]:
                if offset > 0 and offset + len(record) > self._segment_bytes:
                    break
                located.append((i, FrameLocation(segment.name, offset, len(record))))
                offset += len(record)
            if not located:
                self._close(key)
                continue
            self._touched[key] = segment
            _write_all(segment.file, b"".join(record for _, record in records[begun : begun + len(located)]))
            segment.written = offset
            begun += len(located)
            yield from located
            if begun < len(records):
                self._close(key)

    def _segment(self, key: str) -> _OpenSegment:
        if key in self._open:
            self._open.move_to_end(key)
            return self._open[key]
        while len(self._open) >= MAX_OPEN_SEGMENTS:
            self._close(next(iter(self._open)))
        self._count += 1
        name = f"{key}/{self._writer}-{self._count:06d}.frames"
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        segment = _OpenSegment(name, path, path.open("xb", buffering=0))
        self._open[key] = segment
        return segment

    def sync(self) -> None:
        """Makes all appended records durable.

        Raises:
            OSError: as `append`. A failed fsync may have dropped pages, so its segment is never written or synced
            again:
                a second fsync would report success falsely.
        """
        try:
            for segment in self._touched.values():
                os.fsync(segment.file.fileno())
                if segment.synced == 0:
                    _sync_directory(segment.path.parent)
                    _sync_directory(self._root)
            for segment in self._touched.values():
                segment.synced = segment.written
            self._touched.clear()
        except OSError:
            self._discard_unsynced()
            raise

    def roll(self) -> None:
        """Closes every open segment; the next append begins new ones."""
        for key in list(self._open):
            self._close(key)

    def close(self) -> None:
        """Syncs and closes. Raises OSError."""
        self.sync()
        self.roll()

    def _close(self, key: str) -> None:
        segment = self._open.pop(key)
        if self._touched.pop(key, None) is not None:
            try:
                os.fsync(segment.file.fileno())
                if segment.synced == 0:
                    _sync_directory(segment.path.parent)
                    _sync_directory(self._root)
                segment.synced = segment.written
            except OSError:
                self._truncate_and_close(segment)
                raise
        segment.file.close()

    def _discard_unsynced(self) -> None:
        """Closes every segment with unsynced bytes and truncates them, so that a full disk regains the space."""
        for key, segment in self._touched.items():
            self._open.pop(key, None)
            self._truncate_and_close(segment)
        self._touched.clear()
        for key, segment in list(self._open.items()):
            if segment.written == 0:
                del self._open[key]
                self._truncate_and_close(segment)

    @staticmethod
    def _truncate_and_close(segment: _OpenSegment) -> None:
        try:
            if segment.synced:
                os.ftruncate(segment.file.fileno(), segment.synced)
            else:
                segment.path.unlink(missing_ok=True)
        except OSError:
            pass  # The tail is not indexed: it only takes space.
        finally:
            segment.file.close()

    def read(self, segment: str, offset: int, length: int) -> StoredFrame:
        """Reads the frame at a location. Raises StorageError for a missing, torn or damaged record."""
        where = f"{segment} at {offset}"
        try:
            with self._path(segment).open("rb") as file:
                record = os.pread(file.fileno(), length, offset)
        except OSError as exc:
            raise StorageError(f"frame log {where}: cannot be read: {exc}") from exc
        if len(record) != length:
            raise StorageError(f"frame log {where}: {len(record)} bytes, the index says {length}")
        return decode_record(record, where)

    def segments(self) -> list[str]:
        """All segments on disk, of all writers, sorted. Raises StorageError."""
        try:
            return sorted(path.relative_to(self._root).as_posix() for path in self._root.glob("*/*.frames"))
        except OSError as exc:
            raise StorageError(f"frame log: cannot be listed: {exc}") from exc

    def remove(self, segment: str) -> None:
        """Deletes a segment that the catalog has dropped; a missing one is ignored. Raises StorageError."""
        try:
            self._path(segment).unlink(missing_ok=True)
        except OSError as exc:
            raise StorageError(f"frame log {segment}: cannot be removed: {exc}") from exc

    def _path(self, segment: str) -> Path:
        parts = PurePosixPath(segment)
        if parts.is_absolute() or ".." in parts.parts or len(parts.parts) != 2:
            raise StorageError(f"frame log: {segment!r} is not a segment of this log")
        return self._root / segment


def encode_record(stored: StoredFrame) -> bytes:
    """Encodes a frame as a record, header included."""
    edge, incarnation = stored.edge.encode(), stored.incarnation.encode()
    message = stored.frame.to_wire().SerializeToString()
    parts = (_TEXT.pack(len(edge)), edge, _TEXT.pack(len(incarnation)), incarnation, message)
    payload = b"".join(parts)
    return _HEADER.pack(len(payload), _checksum(VERSION, payload), VERSION) + payload


def decode_record(record: bytes, where: str) -> StoredFrame:
    """Decodes one whole record. Raises StorageError, naming `where`."""
    if len(record) < _HEADER.size:
        raise StorageError(f"frame log {where}: {len(record)} bytes are not a record")
    length, checksum, version = _HEADER.unpack_from(record)
    payload = record[_HEADER.size :]
    if length != len(payload):
        raise StorageError(f"frame log {where}: the record says {length} bytes, the index {len(payload)}")
    actual = _checksum(version, payload)
    if actual != checksum:
        raise StorageError(f"frame log {where}: CRC32C is {actual:#010x}, the record says {checksum:#010x}")
    if version != VERSION:
        raise StorageError(f"frame log {where}: record of version {version}, this release reads {VERSION}")
    try:
        edge, rest = _text(payload)
        incarnation, rest = _text(rest)
        return StoredFrame(EdgeId(edge), incarnation, Frame.from_wire(pb.Frame.FromString(rest)))
    except (DecodeError, UnicodeDecodeError, struct.error, ProtocolError) as exc:
        raise StorageError(f"frame log {where}: the checksum is right but the record is not a frame: {exc}") from exc


def _text(payload: bytes) -> tuple[str, bytes]:
    (length,) = _TEXT.unpack_from(payload)
    return payload[2 : 2 + length].decode(), payload[2 + length :]


def _checksum(version: int, payload: bytes) -> int:
    return int(google_crc32c.extend(google_crc32c.value(bytes((version,))), payload))


def _key(stored: StoredFrame) -> str:
    query = stored.frame.query
    if not NAME.fullmatch(query.name):  # it becomes the name of a directory
        raise StorageError(f"frame log: {query.name!r} is not a query's name")
    return f"{query.name}@{query.version}"


def _write_all(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
