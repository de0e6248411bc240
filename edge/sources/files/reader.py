"""One file, read piece by piece; the piece between two positions, read again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from edge.codecs.schema import RecordSchema
from edge.records import Decoded, Reason, Rejection
from edge.sources.files.position import FilePosition


@dataclass(frozen=True, slots=True)
class Piece:
    """The records between two positions in one file."""

    start: FilePosition
    end: FilePosition
    decoded: Decoded
    nbytes: int


class FileReader(Protocol):
    """Reads a file from a position on. Blocking; one thread at a time."""

    @property
    def position(self) -> FilePosition:
        """Where the next piece begins."""

    def next(self, final: bool, arrival_ms: int) -> Piece | None:
        """The next records; None: there are none at the moment.

        Args:
            final: nothing will be added to the file, so its last line is whole as it is.

        Raises:
            InvalidRecord: the file as a whole does not fit the stream.
        """

    def again(self, start: FilePosition | None, end: FilePosition) -> Piece:
        """The piece that lies between two positions; `start` None: the file's beginning.

        Raises:
            StorageError: the file no longer has it.
        """

    def has_shrunk(self) -> bool:
        """Whether the file is shorter than what has been read of it."""

    def close(self) -> None: ...


OpenReader = Callable[[str, FilePosition | None], FileReader]
"""Opens the file at a path, at its beginning or at a position in that very file."""


def statement(position: FilePosition, note: Rejection, schema: RecordSchema, *, ended: bool) -> Piece:
    """A piece without records that says something about the file as a whole."""
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


def gone(at: FilePosition, schema: RecordSchema) -> Piece:
    """Says that a file vanished before its end had been seen."""
    message = (
        f"the file is gone (inode {at.inode}); what it may have held behind byte {at.offset} is not counted; "
        "expected: rotated files stay in their folder until they have been read"
    )
    return statement(at, Rejection(Reason.FILE_GONE, 1, at.file, message), schema, ended=True)
