"""Finds the known files with which a new file begins."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from edge.codecs.decompression import HEAD_BYTES, TAIL_BYTES
from edge.records import BLOCK_BYTES
from edge.sources.files.fingerprint import has_digest, identifies_content
from edge.sources.files.position import FilePosition
from edge.sources.files.reader import FileReader

Stamp = tuple[int, int]
"""The size and modification time (ns) of a file."""
Known = tuple[FilePosition, FileReader | None]
"""The position in a known file, and its reader; None if the file has ended or has left the pattern."""


@dataclass(frozen=True, slots=True)
class Alike:
    """The comparison of a new file with the known files.

    Attributes:
        seen_ms: wall time at which the new file was seen first.
        stamp: the stamp of the new file at the comparison.
        known: the positions of the known files whose read bytes are the beginning of the new file. The position of an
            open file may be at its end instead.
        until: the decompressed size of the new file if an open known file begins with all of it. 0: no file does.
            Negative: the new file is too short for a decision. -1: it is empty.
        like: the position of the known file of `until`.
    """

    seen_ms: int
    stamp: Stamp
    known: tuple[FilePosition, ...]
    until: int
    like: FilePosition | None

    @classmethod
    def of(
        cls, path: str, stamp: Stamp, seen_ms: int, new: FileReader, files: Sequence[Known], *, plain: bool
    ) -> Alike:
        """Compares a new file. Reads all of it only if its first and last bytes are equal to a known file's.

        Args:
            new: a reader of the new file. Afterwards only its `close` may be called.
            files: the known files.
            plain: whether the new file is neither compressed nor Parquet.
        """
        known, until, like = list[FilePosition](), 0, None
        for position, _ in files:
            is_candidate = has_digest(position) or identifies_content(position)
            is_candidate &= position.file == path or position.alike < position.offset
            if is_candidate and new.contains(position, any_head=position.file == path and not plain):
                known.append(position)
        size, is_empty = stamp[0], plain and not stamp[0] and any(reader is not None for _, reader in files)
        for position, reader in files:
            if reader is None:
                continue
            on_disk, length = os.fstat(reader.fileno()).st_size, 0
            if not plain and on_disk == size and _begin_alike(reader, new, size):
                length = new.end()[0]
            elif not plain and position in known:
                length = _length_within(reader, new)
            elif plain and size < HEAD_BYTES:
                length = size if size <= on_disk and _begin_alike(reader, new, size) else 0
            elif plain and position.head == new.position.head:
                common = min(size, on_disk)
                if _begin_alike(reader, new, common):
                    length = size if common == size else 0
                    known += [replace(position, offset=common)] if not length and position not in known else []
            until, like = (length, position) if length > until else (until, like)
        if size < HEAD_BYTES and (until or is_empty):
            until, like = -max(1, until), None
        return cls(seen_ms, stamp, tuple(known), until, like)


def same_bytes(one: FileReader, other: FileReader, begin: int, end: int) -> bool:
    """Returns whether two files have the same bytes on disk from an offset to another one."""
    for at in range(begin, end, BLOCK_BYTES):
        length = min(BLOCK_BYTES, end - at)
        if os.pread(one.fileno(), length, at) != os.pread(other.fileno(), length, at):
            return False
    return True


def _begin_alike(one: FileReader, other: FileReader, size: int) -> bool:
    """Returns whether two files begin with the same `size` bytes."""
    # The ends come first, because most other files differ there.
    ends = (0, min(HEAD_BYTES, size)), (max(0, size - TAIL_BYTES), size), (0, size)
    return all(same_bytes(one, other, begin, end) for begin, end in ends)


def _length_within(known: FileReader, new: FileReader) -> int:
    """Returns the length of a new compressed file if a known file has its last bytes at the same place; otherwise 0."""
    length, last = new.end()
    return length if last and os.pread(known.fileno(), len(last), length - len(last)) == last else 0
