"""The frame log: every frame that the center has acknowledged, in segments of one group commit each.

A segment is ``magic · version (u8) · length (u32) · CRC32C (u32) · table · records``, little endian. The table is JSON:
per record its query's key, edge, incarnation, seq, offset behind the table, and length. It tells whose frames a segment
holds that the catalog does not know; readers find records by the catalog's index.

A record is ``length (u32) · CRC32C (u32) · version (u8) · payload``. The checksum covers the version and the payload:
the edge's id, its incarnation and the frame's wire message.
"""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
from google.protobuf.message import DecodeError

from center.storage.segment_files import SegmentDirectory, SegmentStore
from edgewater.model.errors import ProtocolError, StorageError
from edgewater.model.streams import EdgeId
from edgewater.wire import Frame, QueryRef
from edgewater.wire import uplink_pb2 as pb

VERSION = 1
"""Of a record."""
SEGMENT_VERSION = 1
_MAGIC = b"EWLG"
_SEGMENT_HEADER = struct.Struct("<4sBII")
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
        through_ms: event time up to which its edge has answered the query with it.
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
    through_ms: int = 0


class FrameLog:
    """Frames on disk, appended by one thread at a time and read by any number of processes.

    Args:
        segments: the store of its segments, or the path of a `SegmentDirectory`.
    """

    def __init__(self, segments: SegmentStore | str | Path) -> None:
        self._segments = SegmentDirectory(segments) if isinstance(segments, str | Path) else segments

    def append(self, frames: Sequence[StoredFrame]) -> list[FrameLocation]:
        """Writes frames, of any queries, as one segment; returns their locations in the order of `frames`, durable.

        Raises:
            OSError: of the disk; nothing is kept.
        """
        keys = [_key(f.frame.query) for f in frames]
        # The records of a query follow each other: a task reads them at once.
        order = sorted(range(len(frames)), key=keys.__getitem__)
        records = [encode_record(frames[i]) for i in order]
        offsets, offset = list[int](), 0
        for record in records:
            offsets.append(offset)
            offset += len(record)
        sections = [
            (keys[i], frames[i].edge, frames[i].incarnation, frames[i].frame.seq, at, len(record))
            for i, at, record in zip(order, offsets, records, strict=True)
        ]
        head = _head(sections)
        segment = self._segments.append([head, *records])
        located = {
            i: FrameLocation(segment, len(head) + at, len(record))
            for i, at, record in zip(order, offsets, records, strict=True)
        }
        return [located[i] for i in range(len(frames))]

    def copy(self, entry: FrameEntry) -> FrameLocation:
        """Copies a record, whatever its bytes are, to a segment of its own. Raises StorageError, OSError."""
        (record,) = self.fetch([FrameLocation(entry.segment, entry.offset, entry.length)])
        if isinstance(record, OSError):
            raise StorageError(f"frame log {entry.segment}: cannot be read: {record}") from record
        head = _head([(_key(entry.query), entry.edge, entry.incarnation, entry.seq, 0, len(record))])
        return FrameLocation(self._segments.append([head, record]), len(head), len(record))

    def fetch(self, locations: Sequence[FrameLocation]) -> list[bytes | OSError]:
        """The bytes of records, or why they cannot be read; each segment is opened once. Raises StorageError."""
        by_segment: defaultdict[str, list[int]] = defaultdict(list)
        for i, location in enumerate(locations):
            by_segment[location.segment].append(i)
        found: dict[int, bytes | OSError] = {}
        for segment, numbers in by_segment.items():
            ranges = [(locations[i].offset, locations[i].length) for i in numbers]
            try:
                found |= zip(numbers, self._segments.read_ranges(segment, ranges), strict=True)
            except OSError as exc:
                found |= dict.fromkeys(numbers, exc)
        return [found[i] for i in range(len(locations))]

    def read(self, segment: str, offset: int, length: int) -> StoredFrame:
        """Reads the frame at a location. Raises StorageError for a missing, torn or damaged record."""
        location = FrameLocation(segment, offset, length)
        return decode_fetched(location, self.fetch([location])[0])

    def segments(self) -> list[str]:
        """All segments, of all writers, sorted. Raises StorageError."""
        try:
            return self._segments.names()
        except OSError as exc:
            raise StorageError(f"frame log: cannot be listed: {exc}") from exc

    def queries(self, segment: str) -> set[str]:
        """The keys of the queries that a segment holds frames of. Raises StorageError: it cannot be read."""
        try:
            (header,) = self._segments.read_ranges(segment, [(0, _SEGMENT_HEADER.size)])
            magic, version, length, checksum = _SEGMENT_HEADER.unpack(header)
            if (magic, version) != (_MAGIC, SEGMENT_VERSION):
                raise StorageError(
                    f"frame log {segment}: a segment {magic!r} of version {version}; this release reads {_MAGIC!r} of"
                    f" version {SEGMENT_VERSION}"
                )
            (table,) = self._segments.read_ranges(segment, [(_SEGMENT_HEADER.size, length)])
            if google_crc32c.value(table) != checksum:
                raise StorageError(f"frame log {segment}: the table's CRC32C is wrong")
            return {key for key, *_ in json.loads(table)}
        except (OSError, struct.error, ValueError) as exc:
            raise StorageError(f"frame log {segment}: its table cannot be read: {exc}") from exc

    def remove(self, segment: str) -> None:
        """Deletes a segment that the catalog has dropped; a missing one is ignored. Raises StorageError."""
        try:
            self._segments.delete(segment)
        except OSError as exc:
            raise StorageError(f"frame log {segment}: cannot be removed: {exc}") from exc

    def remove_partial(self) -> None:
        """Deletes what commits that a crash has cut have left. Raises StorageError."""
        try:
            self._segments.delete_partial()
        except OSError as exc:
            raise StorageError(f"frame log: partial segments cannot be removed: {exc}") from exc


def decode_fetched(location: FrameLocation, record: bytes | OSError) -> StoredFrame:
    """The frame of fetched bytes. Raises StorageError for a missing, torn or damaged record."""
    where = f"{location.segment} at {location.offset}"
    if isinstance(record, OSError):
        raise StorageError(f"frame log {where}: cannot be read: {record}") from record
    if len(record) != location.length:
        raise StorageError(f"frame log {where}: {len(record)} bytes, the index says {location.length}")
    return decode_record(record, where)


def _head(sections: Sequence[tuple[str, str, str, int, int, int]]) -> bytes:
    table = json.dumps(sections).encode()
    return _SEGMENT_HEADER.pack(_MAGIC, SEGMENT_VERSION, len(table), google_crc32c.value(table)) + table


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


def _key(query: QueryRef) -> str:
    return f"{query.name}@{query.version}"
