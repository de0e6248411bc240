"""The journal: an append-only log of records on disk that survives a crash at any byte.

A segment is ``EWJ1`` followed by records, each ``length | CRC32C | kind | payload``. Records are appended in memory and
made durable together (`sync`), so that waiters share the cost of an fsync. Reading ends at a torn tail, which is then
truncated. A complete record with a wrong checksum is counted and skipped. Reading continues after it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import google_crc32c

from edgewater.base.errors import StorageError

MAGIC = b"EWJ1"
_RECORD = struct.Struct("<IIB")
MAX_RECORD_BYTES = 256 << 20  # limit: memory that a damaged length takes


@dataclass(frozen=True, slots=True)
class Record:
    kind: int
    payload: bytes


@dataclass(slots=True)
class Scan:
    """The result of reading a segment.

    Attributes:
        records: the valid records.
        good_bytes: length of the segment up to the end of the last complete record.
        damaged: offsets of the records with a wrong checksum.
        torn_bytes: number of bytes after `good_bytes`, which are no complete record.
    """

    records: list[Record] = field(default_factory=list)
    good_bytes: int = 0
    damaged: list[int] = field(default_factory=list)
    torn_bytes: int = 0


def encode(record: Record) -> bytes:
    body = bytes([record.kind]) + record.payload
    return _RECORD.pack(len(record.payload), google_crc32c.value(body), record.kind) + record.payload


def scan(data: bytes) -> Scan:
    """Reads the bytes of a segment. It raises no exception for any damage."""
    if data[: len(MAGIC)] != MAGIC:
        if MAGIC.startswith(data[: len(MAGIC)]) or not data.strip(b"\0"):
            return Scan(torn_bytes=len(data))  # a crash interrupted its creation, so nothing has depended on it
        return Scan(good_bytes=len(data), damaged=[0])
    result, at = Scan(), len(MAGIC)
    for at, end, record in _records(data):
        if record is None:
            result.damaged.append(at)
        else:
            result.records.append(record)
        result.good_bytes = end
    result.good_bytes = max(result.good_bytes, len(MAGIC))
    # A damaged last record counts as torn. It was not written completely, so nothing has depended on it.
    if result.damaged and result.good_bytes == _end_of(data, result.damaged[-1]):
        result.good_bytes = result.damaged.pop()
    result.torn_bytes = len(data) - result.good_bytes
    return result


def _records(data: bytes) -> Iterator[tuple[int, int, Record | None]]:
    at = len(MAGIC)
    while at + _RECORD.size <= len(data):
        length, checksum, kind = _RECORD.unpack_from(data, at)
        end = at + _RECORD.size + length
        if length > MAX_RECORD_BYTES or end > len(data):
            return
        payload = data[at + _RECORD.size : end]
        valid = google_crc32c.value(bytes([kind]) + payload) == checksum
        yield at, end, Record(kind, payload) if valid else None
        at = end


def _end_of(data: bytes, at: int) -> int:
    length, _, _ = _RECORD.unpack_from(data, at)
    return at + _RECORD.size + int(length)


class Segment:
    """One journal file, open for appending.

    Raises:
        StorageError: the file cannot be opened. `sync` raises it if writing failed. The records stay in memory then,
            and the next `sync` continues after the last durable byte.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._buffer = bytearray()
        try:
            fresh = not path.exists() or path.stat().st_size < len(MAGIC)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            self._durable = 0 if fresh else path.stat().st_size
        except OSError as exc:
            raise StorageError(f"the journal {path} cannot be opened: {exc.strerror}") from exc
        if fresh:
            self._buffer += MAGIC

    def append(self, record: Record) -> None:
        """Appends a record. Raises StorageError if it exceeds `MAX_RECORD_BYTES`."""
        if len(record.payload) > MAX_RECORD_BYTES:
            raise StorageError(f"a record of {len(record.payload)} bytes; the limit is {MAX_RECORD_BYTES}")
        self._buffer += encode(record)

    @property
    def unsynced_bytes(self) -> int:
        return len(self._buffer)

    @property
    def nbytes(self) -> int:
        return self._durable + len(self._buffer)

    def sync(self) -> None:
        """Makes all records durable that were appended before the call.

        It may run in another thread than `append`. Records that are appended in the meantime are left for the next
        call.
        """
        chunk = bytes(self._buffer)
        if not chunk:
            return
        try:
            written = 0
            while written < len(chunk):
                written += os.pwrite(self._file, memoryview(chunk)[written:], self._durable + written)
            os.fsync(self._file)
        except OSError as exc:
            raise StorageError(f"the journal {self.path} cannot be written: {exc.strerror}") from exc
        self._durable += len(chunk)
        del self._buffer[: len(chunk)]

    def truncate(self, size: int) -> None:
        """Truncates the segment, to remove a torn tail."""
        os.ftruncate(self._file, size)
        os.fsync(self._file)
        self._durable = size

    def close(self) -> None:
        os.close(self._file)


def write_durably(path: Path, data: bytes) -> None:
    """Replaces a file atomically. After a crash, the file has either the old or the new bytes.

    Raises:
        StorageError: writing failed. The old file stays.
    """
    partial = path.with_suffix(path.suffix + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync_directory(path.parent)
    except OSError as exc:
        raise StorageError(f"{path} cannot be written: {exc.strerror}") from exc


def sync_directory(path: Path) -> None:
    """Makes the creation, renaming and removal of files in a directory durable."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
