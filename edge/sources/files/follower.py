"""The files that are followed: which there are, how far each has been read, which are on their way out.

A file is its inode, not its name. Rotation renames a file and puts a new one in its place: the old
one is read to its end by the handle that is still open, then let go; the new one is read from its
beginning. A file of the same inode that is shorter than what has been read of it was cut
(``copytruncate``): it is read from its beginning, and that something may be lost is said.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from edge.codecs.decompression import CODECS
from edge.codecs.schema import RecordSchema
from edge.records import Decoded, Reason, Rejection
from edge.sources.files.fingerprint import has_head, inode_of, locate, matching_files
from edge.sources.files.position import FilePosition
from edge.sources.files.reader import FileReader, OpenReader, Piece, gone
from edgewater.errors import InvalidConfig

MAX_FOLLOWED_FILES = 1000
MAX_PIECES_PER_VISIT = 16
LEAVING_QUIET_MS = 500
"""A writer may hold on to a renamed file for a moment; its end is its end when it was quiet for so long."""


Stamp = tuple[int, int]
"""A file's size and time of change."""


@dataclass(slots=True)
class FollowedFile:
    """A file and how it stands.

    Attributes:
        position: behind all that has been given away.
        reader: None once the file has ended for good.
        leaving: it has been renamed out of the pattern or deleted.
        quiet_since_ms: since when no visit has found anything (wall); None: the last one did.
        visited: pieces taken in this round.
        stamp: of a file that has ended: what told it from a changed one. None: not known.
        damaged: it could not be read, and nothing was given of it.
    """

    position: FilePosition
    reader: FileReader | None
    leaving: bool = False
    quiet_since_ms: int | None = None
    visited: int = 0
    stamp: Stamp | None = None
    damaged: bool = False


class Followed:
    """All files of one pattern. Blocking; one thread at a time."""

    def __init__(
        self, pattern: str, open_reader: OpenReader, schema: RecordSchema, whole: Callable[[str], bool]
    ) -> None:
        self._pattern = pattern
        self._open = open_reader
        self._schema = schema
        self._whole = whole
        self._files: dict[int, FollowedFile] = {}
        self._settling: dict[int, Stamp] = {}

    def resume(self, at: FilePosition | None) -> list[Piece]:
        """Opens the files of a position; says which are gone or have been cut."""
        pieces = []
        for position in () if at is None else (replace(at, others=()), *at.others):
            path = locate(position, by_content=False)
            if position.ended:
                if path is not None:
                    damaged = _gave_nothing(position)
                    stamp = None if damaged else _stamp(path)
                    self._files[position.inode] = FollowedFile(position, None, stamp=stamp, damaged=damaged)
            elif path is not None:
                self._files[position.inode] = FollowedFile(position, self._open(path, position))
            elif inode_of(position.file) == position.inode:
                pieces.append(self._begin_again(position))
            else:
                pieces.append(gone(position, self._schema))
        return [self._among_others(piece) for piece in pieces]

    def refresh(self) -> list[Piece]:
        """Looks which files there are now. Call it once a round.

        Raises:
            InvalidConfig: more than `MAX_FOLLOWED_FILES` match.
        """
        listed = {inode: path for path in matching_files(self._pattern) if (inode := inode_of(path)) is not None}
        if len(listed) > MAX_FOLLOWED_FILES:
            accepted = f"a pattern that matches at most {MAX_FOLLOWED_FILES} files when it is followed"
            raise InvalidConfig("file.path", self._pattern, accepted, f"{len(listed)} files match")
        pieces = []
        for inode, file in list(self._files.items()):
            file.visited = 0
            file.leaving = inode not in listed
            if file.reader is None:
                if file.leaving or self._is_another(file, inode, listed[inode]):
                    del self._files[inode]
            elif file.reader is not None and file.reader.has_shrunk():
                file.reader.close()
                pieces.append(self._among_others(self._begin_again(file.position)))
        for inode, path in listed.items():
            if inode not in self._files:
                self._begin(inode, path)
        return pieces

    def _is_another(self, ended: FollowedFile, inode: int, path: str) -> bool:
        """Whether what is there now has to be read: an inode is given away again, and a file that
        could not be read may since have been written to its end. Of a file that is being written to nobody knows."""
        stamp = _stamp(path)
        if stamp is None or stamp == ended.stamp:
            return False
        seen, self._settling[inode] = self._settling.get(inode), stamp
        if seen != stamp:
            return False
        is_same = has_head(path, ended.position.head)
        if not is_same and inode_of(path) != inode:
            return False  # gone in between
        del self._settling[inode]
        ended.stamp = stamp
        return ended.damaged or not is_same

    def _begin(self, inode: int, path: str) -> None:
        try:
            if self._is_settled(inode, path):
                reader = self._open(path, None)
                self._files[reader.position.inode] = FollowedFile(reader.position, reader)
        except FileNotFoundError:
            pass  # gone since it was listed

    def _is_settled(self, inode: int, path: str) -> bool:
        """Whether a new file may be opened: one that is only readable as a whole has to stand still first."""
        if not self._whole(path):
            return True
        stamp = _stamp(path)
        if stamp is None:
            return False
        seen, self._settling[inode] = self._settling.get(inode), stamp
        if seen != self._settling[inode]:
            return False
        del self._settling[inode]
        return True

    def _begin_again(self, position: FilePosition) -> Piece:
        """The piece that says that a file has been cut; the file is opened at its beginning."""
        reader = self._open(position.file, None)
        message = (
            f"the file has been cut or replaced; it is read from its beginning, and what it may have held behind "
            f"byte {position.offset} is not counted; expected: rotation by renaming"
        )
        note = Rejection(Reason.FILE_TRUNCATED, 1, position.file, message)
        end = replace(reader.position, note=note)
        self._files[position.inode] = FollowedFile(reader.position, reader)
        return Piece(position, end, Decoded(self._schema.empty(), (note,)), 0)

    def readable(self) -> list[FollowedFile]:
        """Those on their way out first, then by name."""
        files = [file for file in self._files.values() if file.reader is not None]
        return sorted(files, key=lambda file: (not file.leaving, file.position.file))

    def next(self, file: FollowedFile, now_ms: int) -> Piece | None:
        """The file's next records; None: go on to the next file.

        Raises:
            InvalidRecord: as `FileReader.next`.
        """
        if file.reader is None or file.visited >= MAX_PIECES_PER_VISIT:
            return None
        whole = self._whole(file.position.file)
        quiet_ms = 0 if file.quiet_since_ms is None else now_ms - file.quiet_since_ms
        final = whole or (file.leaving and quiet_ms >= LEAVING_QUIET_MS)
        piece = file.reader.next(final, now_ms)
        if piece is not None:
            file.quiet_since_ms = None
            file.visited += 1
            if piece.end.ended:
                file.damaged = _gave_nothing(piece.start)
                self._close(file)
        elif final:
            piece = self._end(file)
        else:
            if file.quiet_since_ms is None:
                file.quiet_since_ms = now_ms
            return None
        file.position = piece.end
        return self._among_others(piece)

    def _end(self, file: FollowedFile) -> Piece:
        """An empty piece whose position says that the file is done: nobody will look for it again."""
        self._close(file)
        return Piece(file.position, replace(file.position, ended=True), Decoded(self._schema.empty()), 0)

    def _close(self, file: FollowedFile) -> None:
        assert file.reader is not None
        file.reader.close()
        file.reader = None
        file.stamp = _stamp(file.position.file)

    def _among_others(self, piece: Piece) -> Piece:
        others = tuple(replace(f.position, note=None) for i, f in self._files.items() if i != piece.end.inode)
        return replace(piece, end=replace(piece.end, others=others))

    def close(self) -> None:
        for file in self._files.values():
            if file.reader is not None:
                file.reader.close()


def _stamp(path: str) -> Stamp | None:
    try:
        stat = Path(path).stat()
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns


def _gave_nothing(position: FilePosition) -> bool:
    return position.offset == 0 and position.row == 0


def whole_by_name(path: str) -> bool:
    """Whether a file can only be read once it is complete, as far as its name tells."""
    return Path(path).suffix in CODECS or path.endswith(".parquet")
