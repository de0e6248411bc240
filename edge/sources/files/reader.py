"""The interface of readers of one file, and the pieces that they return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from edge.codecs.schema import RecordSchema
from edge.records import Decoded, IntArray, Rejection, RejectionReason, guesses
from edge.sources.files.position import FilePosition
from edgewater.base.streams import MAX_TIME_MS, MIN_TIME_MS, TIME_COLUMN
from edgewater.wire import DropReason, LossReason


@dataclass(frozen=True, slots=True)
class Piece:
    """The records between two positions in one file.

    Attributes:
        nbytes: decompressed size of the records' input.
        losses, input_gone: as in `edge.records.Chunk`.
    """

    start: FilePosition
    end: FilePosition
    decoded: Decoded
    nbytes: int
    losses: tuple[LossReason, ...] = ()
    input_gone: bool = False


class FileReader(Protocol):
    """Reads a file from a position on. Its methods block, and one thread may use it at a time."""

    @property
    def position(self) -> FilePosition:
        """The start of the next piece."""

    @property
    def is_open(self) -> bool:
        """Whether there are lines that wait for the end of their record."""

    def next(self, final: bool, arrival_ms: int) -> Piece | None:
        """Returns the next records; None if there are none at the moment.

        Args:
            final: whether the file is complete, so that its last line may lack a newline.
            arrival_ms: wall time of the read. Event times are validated against it.

        Raises:
            InvalidRecord: the file as a whole does not match the stream.
        """

    def reread(self, start: FilePosition | None, end: FilePosition) -> Piece:
        """Returns the piece between two positions.

        Args:
            start: the first position; None for the beginning of the file.

        Raises:
            InputGone: the file no longer contains the piece.
        """

    def contains(self, position: FilePosition, *, any_head: bool = False) -> bool:
        """Returns whether this file begins with all bytes before a position.

        The digests of all these bytes are compared. If the file is the position's own file, is long and has not ended,
        only its beginning and the bytes just before the position are compared.

        Args:
            any_head: compare the digest even if the first bytes on disk differ, as in a file that is compressed anew.

        Afterwards only `contains`, `end` and `close` may be called.
        """

    def end(self) -> tuple[int, bytes]:
        """Returns the decompressed size of the file, and its last bytes.

        Afterwards only `contains`, `end` and `close` may be called.
        """

    def was_overwritten(self) -> bool:
        """Returns whether the file no longer contains the bytes that were read from it."""

    def fileno(self) -> int:
        """Returns the descriptor of the open file."""

    def close(self) -> None: ...


OpenReader = Callable[[str, FilePosition | None], FileReader]
"""Opens the file at a path. The position is in the same file; None for its beginning."""


def contains(open_reader: OpenReader, path: str, position: FilePosition, *, any_head: bool = False) -> bool:
    """Returns whether the file at a path begins with all bytes before a position (`FileReader.contains`); False without
    a file.
    """
    try:
        reader = open_reader(path, None)
    except FileNotFoundError:
        return False
    try:
        return reader.contains(position, any_head=any_head)
    finally:
        reader.close()


def with_guesses(piece: Piece) -> Piece:
    """Returns a piece with its guesses, and without the records that are not counted. The attributes `alike`,
    `left_out` and `again` of its end decide.
    """
    end, decoded = piece.end, piece.decoded
    times: IntArray = decoded.batch.column(TIME_COLUMN).to_numpy()
    is_alike = piece.start.offset < end.alike
    if is_alike and end.left_out:
        guessed = guesses(DropReason.ASSUMED_COPY, times)
        return replace(piece, decoded=Decoded(decoded.batch.slice(0, 0), guessed=guessed))
    if not is_alike and end.again is None:
        return piece
    begin, until = (MIN_TIME_MS, MAX_TIME_MS) if is_alike or end.again is None else end.again
    guessed = guesses(DropReason.READ_AGAIN, times[(times >= begin) & (times < until)])
    return replace(piece, decoded=replace(decoded, guessed=(*decoded.guessed, *guessed)))


def note_piece(
    position: FilePosition, note: Rejection, schema: RecordSchema, *, ended: bool, losses: tuple[LossReason, ...] = ()
) -> Piece:
    """Returns a piece without records that reports a rejection of the whole file."""
    end = replace(position, block=0, row=0, ended=ended, note=note, others=(), size=0)
    return Piece(position, end, Decoded(schema.empty(), (note,)), 0, losses)


def file_gone_piece(position: FilePosition, schema: RecordSchema) -> Piece:
    """Returns the piece that reports that a file was deleted before it was read to its end."""
    message = (
        f"the file is gone (inode {position.inode}); records after byte {position.offset} are not counted; "
        "expected: rotated files stay in their directory until they have been read"
    )
    note = Rejection(RejectionReason.FILE_GONE, 1, position.file, message)
    return note_piece(position, note, schema, ended=True, losses=(LossReason.FILE_GONE,))
