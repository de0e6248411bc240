"""The interface of readers of one file, and the pieces that they return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from edge.codecs import RecordSchema
from edge.records import Decoded, Rejection, RejectionReason
from edge.sources.files.position import FilePosition
from edgewater.wire import LossReason


@dataclass(frozen=True, slots=True)
class Piece:
    """The records between two positions in one file; `nbytes` is the size of their input, decompressed.

    `losses` and `input_gone` are as in `edge.records.Chunk`.
    """

    start: FilePosition
    end: FilePosition
    decoded: Decoded
    nbytes: int
    losses: tuple[LossReason, ...] = ()
    input_gone: bool = False


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
            InputGone: the file no longer contains it.
        """

    def contains(self, position: FilePosition) -> bool:
        """Returns whether the file begins with what was read of a file up to a position, by its fingerprints.

        Afterwards the reader can only be asked again, or closed.
        """

    def end(self) -> tuple[int, bytes]:
        """Returns the decompressed size of the file, and its last bytes. Afterwards as `contains`."""

    def was_overwritten(self) -> bool:
        """Returns whether the file no longer has what was read from it."""

    def fileno(self) -> int:
        """Returns the open descriptor."""

    def close(self) -> None: ...


OpenReader = Callable[[str, FilePosition | None], FileReader]
"""Opens the file at a path, at its beginning or at a position in the same file."""


def note_piece(
    position: FilePosition,
    note: Rejection,
    schema: RecordSchema,
    *,
    ended: bool,
    losses: tuple[LossReason, ...] = (),
) -> Piece:
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
        tail=position.tail,
    )
    return Piece(position, end, Decoded(schema.empty(), (note,)), 0, losses)


def file_gone_piece(position: FilePosition, schema: RecordSchema) -> Piece:
    """Returns the piece that reports that a file was deleted before its end had been read."""
    message = (
        f"the file is gone (inode {position.inode}); records after byte {position.offset} are not counted; "
        "expected: rotated files stay in their directory until they have been read"
    )
    note = Rejection(RejectionReason.FILE_GONE, 1, position.file, message)
    return note_piece(position, note, schema, ended=True, losses=(LossReason.FILE_GONE,))
