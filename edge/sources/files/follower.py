"""Follows the files that match a pattern through appends, rotation and truncation.

A file is identified by its inode, not by its name. Rotation renames a file and creates a new one under
its name: the old file is read to its end through the open handle, then closed; the new one is read from
its beginning. A file that is shorter than the part of it that has been read was truncated
(``copytruncate``): it is read from its beginning, and the possible loss is reported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from edge.codecs import CODECS, RecordSchema
from edge.records import Decoded, Rejection, RejectionReason
from edge.sources.files.fingerprint import has_head, inode_of, locate, matching_files
from edge.sources.files.position import FilePosition
from edge.sources.files.reader import FileReader, OpenReader, Piece, file_gone_piece
from edgewater.errors import InvalidConfig

MAX_FOLLOWED_FILES = 1000
MAX_PIECES_PER_VISIT = 16
LEAVING_QUIET_MS = 500
"""A writer may append to a renamed file for a moment; the file has ended when nothing was appended for this long."""


Stamp = tuple[int, int]
"""The size and modification time (ns) of a file."""


@dataclass(slots=True)
class FollowedFile:
    """The state of one followed file.

    Attributes:
        position: after all returned records.
        reader: None once the file has ended.
        leaving: whether the file no longer matches the pattern or was deleted.
        quiet_since_ms: wall time since which reads have returned nothing; None if the last one returned records.
        visited: pieces read in this round.
        stamp: of an ended file, its stamp at the end, by which a change is detected; None: unknown.
        damaged: whether the file was unreadable and gave no records.
    """

    position: FilePosition
    reader: FileReader | None
    leaving: bool = False
    quiet_since_ms: int | None = None
    visited: int = 0
    stamp: Stamp | None = None
    damaged: bool = False


class FollowedFiles:
    """All files of one pattern. Blocking; one thread at a time. The arguments are those of `FileSource`."""

    def __init__(
        self, pattern: str, open_reader: OpenReader, schema: RecordSchema, requires_complete: Callable[[str], bool]
    ) -> None:
        self._pattern = pattern
        self._open = open_reader
        self._schema = schema
        self._requires_complete = requires_complete
        self._files: dict[int, FollowedFile] = {}
        self._settling: dict[int, Stamp] = {}

    def resume(self, at: FilePosition | None) -> list[Piece]:
        """Opens the files of a position; returns pieces that report deleted and truncated files."""
        pieces = []
        for position in () if at is None else (replace(at, others=()), *at.others):
            path = locate(position, by_content=False)
            if position.ended:
                if path is not None:
                    damaged = _is_at_beginning(position)
                    stamp = None if damaged else _stamp(path)
                    self._files[position.inode] = FollowedFile(position, None, stamp=stamp, damaged=damaged)
            elif path is not None:
                self._files[position.inode] = FollowedFile(position, self._open(path, position))
            elif inode_of(position.file) == position.inode:
                pieces.append(self._restart(position))
            else:
                pieces.append(file_gone_piece(position, self._schema))
        return [self._with_other_positions(piece) for piece in pieces]

    def refresh(self) -> list[Piece]:
        """Lists the matching files and opens new ones; returns pieces that report truncated files. Call once per round.

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
                pieces.append(self._with_other_positions(self._restart(file.position)))
        for inode, path in listed.items():
            if inode not in self._files:
                self._open_new(inode, path)
        return pieces

    def _is_another(self, ended: FollowedFile, inode: int, path: str) -> bool:
        """Returns whether an ended file has to be read again: its inode may have been reused for another file, or an
        incomplete file may have been completed since. False while the file is still changing."""
        stamp = _stamp(path)
        if stamp is None or stamp == ended.stamp:
            return False
        seen, self._settling[inode] = self._settling.get(inode), stamp
        if seen != stamp:
            return False
        is_same = has_head(path, ended.position.head)
        if not is_same and inode_of(path) != inode:
            return False  # deleted in between
        del self._settling[inode]
        ended.stamp = stamp
        return ended.damaged or not is_same

    def _open_new(self, inode: int, path: str) -> None:
        try:
            if self._is_settled(inode, path):
                reader = self._open(path, None)
                self._files[reader.position.inode] = FollowedFile(reader.position, reader)
        except FileNotFoundError:
            pass  # deleted since it was listed

    def _is_settled(self, inode: int, path: str) -> bool:
        """Returns whether a new file may be opened: one that must be complete has to be unchanged for a round."""
        if not self._requires_complete(path):
            return True
        stamp = _stamp(path)
        if stamp is None:
            return False
        seen, self._settling[inode] = self._settling.get(inode), stamp
        if seen != self._settling[inode]:
            return False
        del self._settling[inode]
        return True

    def _restart(self, position: FilePosition) -> Piece:
        """Opens a truncated file at its beginning; returns the piece that reports the truncation."""
        reader = self._open(position.file, None)
        message = (
            f"the file was truncated or replaced; it is read from its beginning, and unread records after "
            f"byte {position.offset} are not counted; expected: rotation by renaming"
        )
        note = Rejection(RejectionReason.FILE_TRUNCATED, 1, position.file, message)
        end = replace(reader.position, note=note)
        self._files[position.inode] = FollowedFile(reader.position, reader)
        return Piece(position, end, Decoded(self._schema.empty(), (note,)), 0)

    def readable(self) -> list[FollowedFile]:
        """Returns the files that have not ended, leaving files first, then by name."""
        files = [file for file in self._files.values() if file.reader is not None]
        return sorted(files, key=lambda file: (not file.leaving, file.position.file))

    def next(self, file: FollowedFile, now_ms: int) -> Piece | None:
        """Returns the file's next records; None: continue with the next file.

        Raises:
            InvalidRecord: as `FileReader.next`.
        """
        if file.reader is None or file.visited >= MAX_PIECES_PER_VISIT:
            return None
        complete = self._requires_complete(file.position.file)
        quiet_ms = 0 if file.quiet_since_ms is None else now_ms - file.quiet_since_ms
        final = complete or (file.leaving and quiet_ms >= LEAVING_QUIET_MS)
        piece = file.reader.next(final, now_ms)
        if piece is not None:
            file.quiet_since_ms = None
            file.visited += 1
            if piece.end.ended:
                file.damaged = _is_at_beginning(piece.start)
                self._close(file)
        elif final:
            piece = self._end(file)
        else:
            if file.quiet_since_ms is None:
                file.quiet_since_ms = now_ms
            return None
        file.position = piece.end
        return self._with_other_positions(piece)

    def _end(self, file: FollowedFile) -> Piece:
        """Closes the file; returns an empty piece whose position marks the file as ended."""
        self._close(file)
        return Piece(file.position, replace(file.position, ended=True), Decoded(self._schema.empty()), 0)

    def _close(self, file: FollowedFile) -> None:
        assert file.reader is not None
        file.reader.close()
        file.reader = None
        file.stamp = _stamp(file.position.file)

    def _with_other_positions(self, piece: Piece) -> Piece:
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


def _is_at_beginning(position: FilePosition) -> bool:
    return position.offset == 0 and position.row == 0


def requires_complete_by_name(path: str) -> bool:
    """Returns whether a file of this name can only be read once it is complete."""
    return Path(path).suffix in CODECS or path.endswith(".parquet")
