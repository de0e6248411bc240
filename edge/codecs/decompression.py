"""Reads a file from any decompressed offset, and recovers the readable part of a damaged file."""

from __future__ import annotations

import gzip
import os
import weakref
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import pyarrow as pa

from edge.records import BLOCK_BYTES, RejectionReason

CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
HEAD_BYTES = 256  # limit: what is read to know a format
TAIL_BYTES = 1024  # limit: what is read to know the end of a file
"""The number of last read bytes that are compared, to detect whether a file has changed before the offset."""


Digest = tuple[int, int]
"""CRC-32C and CRC-32 of bytes. Both can be extended, so that a digest of all bytes before an offset goes on after a
restart.
"""
NO_BYTES: Digest = (0, 0)  # format: no range
_DAMAGED = OSError, EOFError, zlib.error
"""What a decompressor raises: of Arrow, or of the gzip module."""


def extended(digest: Digest, data: bytes) -> Digest:
    """Returns the digest of the bytes of `digest` and of `data`."""
    return google_crc32c.extend(digest[0], data), zlib.crc32(data, digest[1])


def codec_of(path: str, compression: str) -> str | None:
    """Returns Arrow's name of the codec; None if the file is not compressed.

    Args:
        compression: auto (by the file's extension), none, gzip, zstd or bz2.
    """
    if compression == "auto":
        return CODECS.get(Path(path).suffix)
    return None if compression == "none" else compression


@dataclass(frozen=True, slots=True)
class Damage:
    """The offset and the reason of a failed decompression."""

    reason: RejectionReason
    compressed_offset: int
    message: str


class _Handle:
    """The file object that Arrow requires. It never closes the descriptor, because `OpenFile` owns the descriptor."""

    closed = False

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self, size: int) -> bytes:
        return os.read(self._fd, size)

    def close(self) -> None:
        pass


class OpenFile:
    """An open file, which stays readable when it is renamed or deleted.

    It is not thread-safe, and raises OSError as files do. It is closed by `close`, or with the last reference to it.

    Attributes:
        offset: decompressed offset of the next byte that `read` returns.
        tail: the bytes before `offset`, at most `TAIL_BYTES`.
        overwritten: whether the bytes before `offset` have changed since they were read. If so, `read` returns no
            bytes.
        damage: set once reading has reached a place after which nothing can be decompressed.
    """

    def __init__(self, path: str, codec: str | None) -> None:
        self.path = path
        self.codec = codec
        self.offset = 0
        self.tail = b""
        self.overwritten = False
        self.damage: Damage | None = None
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self._fd)
        self._stream: Any = self._open_stream()

    def _open_stream(self) -> Any:
        handle: Any = _Handle(self._fd)
        if self.codec is None:
            return handle
        os.lseek(self._fd, 0, os.SEEK_SET)
        if self.codec == "gzip":
            return gzip.GzipFile(fileobj=handle, mode="rb")  # Arrow takes zeros after a member for damage
        return pa.CompressedInputStream(pa.PythonFile(handle, "r"), self.codec)

    def fileno(self) -> int:
        return self._fd

    @property
    def identity(self) -> tuple[int, int]:
        """The device and the inode of the file."""
        status = os.fstat(self._fd)
        return status.st_dev, status.st_ino

    @property
    def size(self) -> int:
        """The size on disk in bytes, which is the compressed size."""
        return os.fstat(self._fd).st_size

    def head(self, length: int = HEAD_BYTES) -> tuple[int, int]:
        """Returns (n, CRC32C of the first n bytes on disk), where n is at most `length`."""
        start = os.pread(self._fd, length, 0)
        return len(start), google_crc32c.value(start)

    def seek(self, offset: int) -> None:
        """Moves to a decompressed offset. To move backwards in a compressed file, it decompresses from the
        beginning.
        """
        if self.codec is None:
            begin = max(0, offset - TAIL_BYTES)
            self.offset, self.tail = offset, os.pread(self._fd, offset - begin, begin)
            return
        if offset < self.offset:
            self._stream, self.offset, self.damage, self.tail = self._open_stream(), 0, None, b""
        while self.offset < offset and self.read(min(BLOCK_BYTES, offset - self.offset)):
            pass

    def seek_end(self) -> None:
        """Moves to the current end of the readable data."""
        if self.codec is None:
            self.seek(self.size)
        while self.read(BLOCK_BYTES):
            pass

    def read(self, size: int) -> bytes:
        """Returns at most `size` bytes; b"" at the end, or where the file is damaged (see `damage`)."""
        if self.damage is not None or self.overwritten:
            return b""
        if self.codec is None:
            return self._advance(self._read_plain(size))
        try:
            return self._advance(self._stream.read(size))
        except _DAMAGED as exc:
            return self._advance(self._recover(size, exc))

    def _read_plain(self, size: int) -> bytes:
        """Reads the next bytes together with the bytes before them.

        This detects a file that was overwritten, or truncated and then extended.
        """
        known = len(self.tail)
        data = os.pread(self._fd, known + size, self.offset - known)
        self.overwritten = data[:known] != self.tail
        return b"" if self.overwritten else data[known:]

    def _advance(self, data: bytes) -> bytes:
        self.offset += len(data)
        self.tail = data[-TAIL_BYTES:] if len(data) >= TAIL_BYTES else (self.tail + data)[-TAIL_BYTES:]
        return data

    def was_overwritten(self) -> bool:
        """Returns whether the bytes before `offset` have changed since they were read; always False for a compressed
        file.
        """
        if self.codec is None and not self.overwritten:
            self._read_plain(0)
        return self.overwritten

    def _recover(self, size: int, error: Exception) -> bytes:
        """Returns the bytes before the damage. It reads again in small steps, because a failed read returns
        nothing.
        """
        good = b""
        for step in (4096, 1):
            self._stream = self._open_stream()
            at = 0
            while at < self.offset + len(good):
                at += len(self._stream.read(min(BLOCK_BYTES, self.offset + len(good) - at)))
            try:
                while len(good) < size and (piece := self._stream.read(min(step, size - len(good)))):
                    good += piece
            except _DAMAGED:
                continue
        truncated = isinstance(error, EOFError) or "truncated" in str(error).lower()
        self.damage = Damage(
            RejectionReason.TRUNCATED if truncated else RejectionReason.CORRUPT,
            os.lseek(self._fd, 0, os.SEEK_CUR),
            str(error),
        )
        return good
