"""The interface of readers of one file, and the pieces that they return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from edge.codecs import RecordSchema
from edge.records import Decoded, Rejection, RejectionReason
from edge.sources.files.position import FilePosition


@dataclass(frozen=True, slots=True)
class Piece:
    """The records between two positions in one file; `nbytes` is the size of their input, decompressed."""

    start: FilePosition
    end: FilePosition
    decoded: Decoded
    nbytes: int


class FileReader(Protocol):
    """Reads a file from a position on. Blocking; one thread at a time."""

    @property
    def position(self) -> FilePosition:
        """The start of the next piece."""

    def next(self, final: bool, arrival_ms: int) -> Piece | None:
        """Returns the next records; None if there are none at the moment.

        Args:
            arrival_ms: wall time of the read; event times are validated against it.
            final: the file is complete, so its last line is complete without a newline.

        Raises:
            InvalidRecord: the file as a whole does not match the stream.
        """

    def reread(self, start: FilePosition | None, end: FilePosition) -> Piece:
        """Returns the piece between two positions; `start` None: the beginning of the file.

        Raises:
            StorageError: the file no longer contains it.
        """

    def has_shrunk(self) -> bool:
        """Returns whether the file is shorter than the part of it that has been read."""

    def close(self) -> None: ...


OpenReader = Callable[[str, FilePosition | None], FileReader]
"""Opens the file at a path, at its beginning or at a position in the same file."""


def note_piece(position: FilePosition, note: Rejection, schema: RecordSchema, *, ended: bool) -> Piece:
    """Returns a piece without records that reports a rejection of the file as a whole."""
    end = FilePosition(
        position.file,
        position.inode,
        position.head,
        position.offset,
        arrival_ms=position.arrival_ms,
        header=position.header,
        ended=ended,
        note=note,
    )
    return Piece(position, end, Decoded(schema.empty(), (note,)), 0)


def file_gone_piece(position: FilePosition, schema: RecordSchema) -> Piece:
    """Returns the piece that reports that a file was deleted before its end had been read."""
    message = (
        f"the file is gone (inode {position.inode}); records after byte {position.offset} are not counted; "
        "expected: rotated files stay in their directory until they have been read"
    )
    return note_piece(position, Rejection(RejectionReason.FILE_GONE, 1, position.file, message), schema, ended=True)
