"""Reads a file source again, from its beginning up to a position, as far as the files still exist.

A source may have followed several files at the same time, with records of the same hours or of different days. The next
block always comes from the file whose last block has the oldest records. So the event times of all files advance
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from edge.codecs.decompression import NO_BYTES
from edge.records import InputGone, Position
from edge.sources.files.position import FilePosition
from edge.sources.files.reader import FileReader, OpenReader, Piece, with_guesses
from edgewater.base.streams import MIN_TIME_MS, TIME_COLUMN


@dataclass(slots=True)
class BackfillFile:
    """A file that is read up to a position.

    Attributes:
        path: the file's path; None once the file has been read up to `limit`, or if the file is gone.
        limit: the position at which reading ends, without the positions of other files; None if the whole file is read.
        position: the position after the last piece; None if nothing has been read.
        reached_ms: the newest event time of the last piece.
    """

    path: str | None
    limit: FilePosition | None
    position: FilePosition | None = None
    reached_ms: int = MIN_TIME_MS
    reader: FileReader | None = None


class BackfillReader:
    """Reads files up to their positions. Its methods block, and one thread may use it at a time.

    Args:
        files: the files. Their order must depend on their positions only.
        in_order: true to read one file after another, false to read all files in turns.
    """

    def __init__(self, files: Sequence[BackfillFile], open_reader: OpenReader, *, in_order: bool) -> None:
        self._files = list(files)
        self._open = open_reader
        self._in_order = in_order
        self._current = 0

    def resume(self, position: Position) -> None:
        """Continues after a position that was joined with the `progress` of another reader of the same files."""
        at = replace(FilePosition.from_state(position), others=())
        if self._in_order:
            found = [n for n, file in enumerate(self._files) if file.path == at.file]
            first = (
                found[-1]
                if found
                else next(
                    (n for n, file in enumerate(self._files) if file.path is not None and file.path > at.file),
                    len(self._files) - 1,
                )
            )
            for file in self._files[:first]:
                file.path = None
            if found:
                self._files[first].position = at
            return
        state: dict[str, Any] = position["backfill"]
        for file, read in zip(self._files, state["files"], strict=True):
            file.position = None if read is None else FilePosition.from_state(read)
        self._files[state["file"]].position = at

    def progress(self) -> Position:
        """Returns what `resume` needs in addition to a position: the positions of all files; {} if they are read in
        order.
        """
        if self._in_order:
            return {}
        read = [None if file.position is None else file.position.to_state() for file in self._files]
        return {"backfill": {"file": self._current, "files": read}}

    def next(self, now_ms: int) -> Piece | None:
        """Returns the next records; None if no more records can be read.

        Raises:
            InvalidRecord: a file does not match the stream.
        """
        while unread := [n for n, file in enumerate(self._files) if file.path is not None]:
            self._current = unread[0] if self._in_order else min(unread, key=lambda n: self._files[n].reached_ms)
            file = self._files[self._current]
            piece = self._next_of(file, now_ms)
            if piece is None:
                self._end(file)
                continue
            if file.limit is not None:
                of = file.limit
                end = replace(piece.end, alike=of.alike, left_out=of.left_out, again=of.again)
                piece = with_guesses(replace(piece, end=end))
            times = piece.decoded.batch.column(TIME_COLUMN).to_numpy()
            file.reached_ms = int(times.max(initial=file.reached_ms))
            file.position = piece.end
            return piece
        return None

    def _next_of(self, file: BackfillFile, now_ms: int) -> Piece | None:
        assert file.path is not None
        limit = file.limit
        try:
            if file.reader is None:
                file.reader = self._open(file.path, file.position or _beginning(limit))
            if limit is None:
                return self._undamaged(file.reader.next(True, now_ms))
            if file.reader.position.offset < limit.offset:
                piece = self._undamaged(file.reader.next(True, now_ms))
                if piece is None or piece.end.offset <= limit.offset:
                    return piece
                if piece.start.offset < limit.offset:
                    return self._reread(file, piece.start, replace(limit, row=0, block=0))
            read = file.position.row if file.position is not None and file.position.offset == limit.offset else 0
            if read < limit.row:
                return self._reread(file, replace(limit, row=read, block=limit.block if read else 0), limit)
        except (InputGone, FileNotFoundError):
            pass  # the file has changed; the counts lack the records that the file no longer has
        return None

    def _undamaged(self, piece: Piece | None) -> Piece | None:
        """Returns the piece; None if the piece reports that the rest of the file cannot be read."""
        return None if piece is None or piece.end.note is not None else piece

    def _reread(self, file: BackfillFile, start: FilePosition, end: FilePosition) -> Piece:
        """Returns the records between two positions. `end` may be inside a block of the file's reader."""
        assert file.reader is not None and file.path is not None
        piece = file.reader.reread(start, end)
        file.reader.close()
        file.reader = self._open(file.path, end)
        return piece

    def _end(self, file: BackfillFile) -> None:
        file.path = None
        if file.reader is not None:
            file.reader.close()
            file.reader = None

    def close(self) -> None:
        for file in self._files:
            self._end(file)


def _beginning(limit: FilePosition | None) -> FilePosition | None:
    """Returns the beginning of a file whose first records may not count; None for any other file."""
    if limit is None or not limit.alike:
        return None
    return replace(limit, offset=0, row=0, block=0, header=None, digest=NO_BYTES, tail=(0, 0), note=None, others=())
