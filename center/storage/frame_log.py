"""The frame log: every frame that the center has acknowledged, in segments. Each group commit writes one segment.

A segment is ``magic · version (u8) · length (u32) · CRC32C (u32) · table · records``, little endian. The table is JSON.
Per record it has the query's key, edge, incarnation, seq, offset after the table, and length. If the catalog does not
know a segment, the table tells whose frames the segment has. Readers find records by the catalog's index.

A record is ``length (u32) · CRC32C (u32) · version (u8) · payload``. The checksum covers the version and the payload.
The payload is ``query's key · edge · incarnation`` as texts, ``seq (u64) · codec (u8) · data's bytes (u32) · partials
(u32)``, ``slice (i64) · bytes (u32)`` per partial, and the data. The data are the synopses one after another,
compressed if this saves bytes. The other contents of a frame are in the index (`center.storage.frame_facts`).
"""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
import pyarrow as pa

from center.storage.segment_files import SegmentDirectory
from edgewater.base.errors import StorageError
from edgewater.base.streams import EdgeId
from edgewater.guard.frame_work import BYTES_PER_UNIT
from edgewater.model.registered_query import query_from_key, query_key
from edgewater.wire import Partial, QueryRef

VERSION = 1  # format: of records
"""The version of the record format."""
SEGMENT_VERSION = 1  # format: of segments
_MAGIC = b"EWLG"
_SEGMENT_HEADER = struct.Struct("<4sBII")
_HEADER = struct.Struct("<IIB")
_TEXT = struct.Struct("<H")
_BODY = struct.Struct("<QBII")
_PARTIAL = struct.Struct("<qI")
_PLAIN, _LZ4 = 0, 1  # format: of records
"""Codecs of the data. LZ4 takes a third of the CPU time of zstd, and a fifth more bytes."""
_CODEC = "lz4_raw"
_LEAST_COMPRESSED_BYTES = 256
"""The fewest bytes of data that are compressed. Compression hardly reduces smaller data."""


@dataclass(frozen=True, slots=True)
class StoredFrame:
    """The partials of a frame, with its identity."""

    query: QueryRef
    edge: EdgeId
    incarnation: str
    seq: int
    partials: tuple[Partial, ...]


@dataclass(frozen=True, slots=True)
class FrameLocation:
    """The location of a record in the log.

    Attributes:
        segment: relative path of the record's segment, with ``/``.
        offset, length: in bytes.
    """

    segment: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class FrameEntry:
    """An indexed frame: its identity and its location.

    Attributes:
        position: number of the frame in its query, from 1, without gaps.
        crc32c: CRC32C of the frame's body as the body was delivered.
        plain_bytes: bytes of the body before compression, or of the frame on the wire if that is more.
        work: the job's work for the frame: the number of slices for which it has partials or closes.
        through_ms: event time up to which the frame's edge has answered the query, this frame included.
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

    @property
    def size(self) -> int:
        """The bytes of the frame before compression, or the bytes that make as much work, if they are more."""
        return max(self.length, self.plain_bytes, self.work * BYTES_PER_UNIT)


class FrameLog:
    """Frames on disk. One thread at a time appends frames, and any number of processes read.

    Args:
        segments: the log's segments, or the path of their directory.
    """

    def __init__(self, segments: SegmentDirectory | str | Path) -> None:
        self._segments = SegmentDirectory(segments) if isinstance(segments, str | Path) else segments

    def append(self, frames: Sequence[StoredFrame]) -> list[FrameLocation]:
        """Writes frames, of any queries, as one segment. The frames are durable when the method returns.

        Returns:
            The locations of the frames, in the order of `frames`.

        Raises:
            OSError: the disk failed; no frame is stored.
        """
        keys = [query_key(f.query) for f in frames]
        # The records of a query are adjacent, because a task reads them together.
        order = sorted(range(len(frames)), key=keys.__getitem__)
        records = [encode_record(frames[i]) for i in order]
        offsets, offset = list[int](), 0
        for record in records:
            offsets.append(offset)
            offset += len(record)
        sections = [
            (keys[i], frames[i].edge, frames[i].incarnation, frames[i].seq, at, len(record))
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
        """Copies the bytes of a record to a segment of its own. The bytes are not checked.

        Raises:
            StorageError: the record cannot be read.
            OSError: the segment cannot be written.
        """
        (record,) = self.fetch([FrameLocation(entry.segment, entry.offset, entry.length)])
        if isinstance(record, OSError):
            raise StorageError(f"frame log {entry.segment}: cannot be read: {record}") from record
        head = _head([(query_key(entry.query), entry.edge, entry.incarnation, entry.seq, 0, len(record))])
        return FrameLocation(self._segments.append([head, record]), len(head), len(record))

    def fetch(self, locations: Sequence[FrameLocation]) -> list[bytes | OSError]:
        """Returns the bytes of each record, or the error if they cannot be read. Each segment is opened once.

        Raises:
            StorageError: a location names no segment of this log.
        """
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

    def segments(self) -> list[str]:
        """Returns the names of all segments, of all writers, sorted.

        Raises:
            StorageError: the segments cannot be listed.
        """
        try:
            return self._segments.names()
        except OSError as exc:
            raise StorageError(f"frame log: cannot be listed: {exc}") from exc

    def queries(self, segment: str) -> set[str]:
        """Returns the keys of the queries whose frames are in a segment.

        Raises:
            StorageError: the segment cannot be read.
        """
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
        """Deletes a segment that the catalog has dropped. A missing segment is ignored.

        Raises:
            StorageError: the segment cannot be deleted.
        """
        try:
            self._segments.delete(segment)
        except OSError as exc:
            raise StorageError(f"frame log {segment}: cannot be removed: {exc}") from exc

    def remove_partial(self) -> None:
        """Deletes the incomplete segments of commits that a crash interrupted.

        Raises:
            StorageError: an incomplete segment cannot be deleted.
        """
        try:
            self._segments.delete_partial()
        except OSError as exc:
            raise StorageError(f"frame log: partial segments cannot be removed: {exc}") from exc


def decode_fetched(location: FrameLocation, record: bytes | OSError) -> StoredFrame:
    """Decodes a record that `FrameLog.fetch` returned.

    Raises:
        StorageError: the record is missing, incomplete or damaged.
    """
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
    """Encodes a frame as a record, with the record's header."""
    data = b"".join([p.synopsis for p in stored.partials])
    codec, kept = _compressed(data)
    payload = b"".join(
        (
            *map(_encoded_text, (query_key(stored.query), stored.edge, stored.incarnation)),
            _BODY.pack(stored.seq, codec, len(data), len(stored.partials)),
            *[_PARTIAL.pack(p.slice_start_ms, len(p.synopsis)) for p in stored.partials],
            kept,
        )
    )
    return _HEADER.pack(len(payload), _checksum(VERSION, payload), VERSION) + payload


def _compressed(data: bytes) -> tuple[int, bytes]:
    """Returns the codec, and the data encoded with it."""
    if len(data) >= _LEAST_COMPRESSED_BYTES:
        compressed: bytes = pa.compress(data, codec=_CODEC, asbytes=True)
        if len(compressed) < len(data):
            return _LZ4, compressed
    return _PLAIN, data


def decode_record(record: bytes, where: str) -> StoredFrame:
    """Decodes one whole record.

    Args:
        where: location of the record, for error messages.

    Raises:
        StorageError: the record is incomplete or damaged.
    """
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
        return _decode_payload(payload)
    except (UnicodeDecodeError, struct.error, ValueError) as exc:
        raise StorageError(f"frame log {where}: the checksum is right but the record is not a frame: {exc}") from exc


def _decode_payload(payload: bytes) -> StoredFrame:
    key, at = _text(payload, 0)
    edge, at = _text(payload, at)
    incarnation, at = _text(payload, at)
    seq, codec, size, count = _BODY.unpack_from(payload, at)
    begin, end = at + _BODY.size, at + _BODY.size + count * _PARTIAL.size
    parts = list(_PARTIAL.iter_unpack(payload[begin:end]))
    data = payload[end:]
    if codec == _LZ4:
        try:
            data = pa.decompress(data, decompressed_size=size, codec=_CODEC, asbytes=True)
        except OSError as exc:  # Arrow raises OSError for damaged bytes
            raise ValueError(str(exc)) from exc
    elif codec != _PLAIN:
        raise ValueError(f"codec {codec}; expected {_PLAIN} or {_LZ4}")
    if not (len(parts) == count and len(data) == size == sum(length for _, length in parts)):
        raise ValueError(f"{len(data)} bytes of {len(parts)} partials; expected {size} bytes of {count}")
    partials, at = list[Partial](), 0
    for start_ms, length in parts:
        partials.append(Partial(start_ms, data[at : at + length]))
        at += length
    return StoredFrame(query_from_key(key), EdgeId(edge), incarnation, seq, tuple(partials))


def _encoded_text(text: str) -> bytes:
    encoded = text.encode()
    return _TEXT.pack(len(encoded)) + encoded


def _text(payload: bytes, at: int) -> tuple[str, int]:
    """Returns the text at a position, and the position after the text."""
    (length,) = _TEXT.unpack_from(payload, at)
    begin = at + _TEXT.size
    return payload[begin : begin + length].decode(), begin + length


def _checksum(version: int, payload: bytes) -> int:
    return int(google_crc32c.extend(google_crc32c.value(bytes((version,))), payload))
