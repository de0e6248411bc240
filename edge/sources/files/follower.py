"""Follows the files that match a pattern through appends, rotation and truncation.

A file is identified by its inode and its content, not by its name. Rotation renames a file and creates a new one with
the old name. The new file is read from its beginning. The renamed file is read through its open handle until no process
writes to it.

A copy of a file, compressed or not, is not read again. If the file was truncated or deleted before its end was read,
reading continues in the copy.

If a file no longer contains the bytes that were read from it, it was truncated or overwritten (``copytruncate``). It is
then read from its beginning. Its last bytes before that may not have been read, so a loss is stated.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from edge.codecs import CODECS, HEAD_BYTES, TAIL_BYTES, RecordSchema
from edge.records import Decoded, Rejection, RejectionReason
from edge.sources.files.fingerprint import (
    current_path,
    files_named_after,
    find_copy,
    has_writer,
    identifies_content,
    inode_of,
    matching_files,
    path_of_inode,
)
from edge.sources.files.position import FilePosition
from edge.sources.files.reader import FileReader, OpenReader, Piece, file_gone_piece
from edgewater.model.errors import InvalidConfig
from edgewater.wire import LossReason

MAX_FOLLOWED_FILES = 1000
MAX_LEAVING_FILES = 100
"""The largest number of open files that no longer match the pattern. Beyond it, the files without new records for the
longest time are closed.
"""
MIN_RELEASED_FILES = 4
"""The positions of at least this many files that left the pattern are remembered, or of as many as are followed. They
are needed if the files are copied or grow. Each position of a source contains them.
"""
MAX_PIECES_PER_VISIT = 16
LEAVING_QUIET_MS = 500
"""A writer may append to a renamed file for a moment. The file may be closed only after this long without new bytes."""
ROTATE_WAIT_MS = 60_000
PARTIAL_COPY_MS = 5_000
"""A file that begins like another file may be a copy in progress, unless it has not changed for this long."""


Stamp = tuple[int, int]
"""The size and modification time (ns) of a file."""


@dataclass(slots=True)
class FollowedFile:
    """The state of one followed file.

    Attributes:
        position: the position after all returned records.
        reader: the open reader; None once the file has ended.
        leaving: whether the file no longer matches the pattern or was deleted.
        quiet_since_ms: wall time since which reads have returned nothing; None if the last read returned records.
        visited: number of pieces read in this round.
        stamp: the stamp when the file ended, to detect later changes; None if unknown.
        damaged: whether the file was unreadable and gave no records.
        unlinked: whether the deletion of the file has been reported.
        expired: whether the file must be closed, because too many files are leaving.
    """

    position: FilePosition
    reader: FileReader | None
    leaving: bool = False
    quiet_since_ms: int | None = None
    visited: int = 0
    stamp: Stamp | None = None
    damaged: bool = False
    unlinked: bool = False
    expired: bool = False


class FollowedFiles:
    """All files of one pattern. Methods block, and one thread may use them at a time. `FileSource` describes the
    arguments.
    """

    def __init__(
        self,
        pattern: str,
        open_reader: OpenReader,
        schema: RecordSchema,
        requires_complete: Callable[[str], bool],
        rotate_wait_ms: int = ROTATE_WAIT_MS,
    ) -> None:
        self._pattern = pattern
        self._open = open_reader
        self._schema = schema
        self._requires_complete = requires_complete
        self._rotate_wait_ms = rotate_wait_ms
        self._files: dict[int, FollowedFile] = {}
        # Positions of files that have left the pattern, by inode. If a position has not ended, its file was not found.
        self._released: dict[int, FilePosition] = {}
        # Paths by inode. Each file was created under a followed name and renamed out of the pattern before the next
        # round, so no round has listed it.
        self._missed: dict[int, str] = {}
        self._settling: dict[int, Stamp] = {}
        self._undecided: dict[int, tuple[Stamp, int]] = {}

    def resume(self, at: FilePosition | None) -> list[Piece]:
        """Opens the files of a position. Returns pieces that report deleted and truncated files."""
        positions = [] if at is None else [replace(at, others=()), *at.others]
        for position in positions:
            if position.ended:
                self._resume_ended(position)
        pieces = [piece for position in positions if not position.ended for piece in self._resume(position)]
        known = {position.inode for position in positions}
        self._missed = {inode: path for inode, path in self._missed.items() if inode not in known}
        return [self._with_other_positions(piece) for piece in pieces]

    def _resume_ended(self, position: FilePosition) -> None:
        path = path_of_inode(position)
        if path is None:
            self._release(position)
            return
        damaged, stamp = _is_at_beginning(position), _stamp(path)
        changed = damaged or (stamp is not None and position.size not in (0, stamp[0]))
        self._files[position.inode] = FollowedFile(position, None, stamp=None if changed else stamp, damaged=damaged)

    def _resume(self, position: FilePosition) -> Iterator[Piece]:
        path = path_of_inode(position)
        if path is not None and self._contains(path, position):
            self._files[position.inode] = FollowedFile(position, self._open(path, position))
            if path != position.file:
                self._missed |= files_named_after(position.file, path)
            return
        copy = self._continue_in_copy(position)
        if path == position.file:
            yield self._restart(position, path, copy)
        elif copy is None:
            self._release(position)
            yield file_gone_piece(position, self._schema)

    def _contains(self, path: str, position: FilePosition) -> bool:
        return contains(self._open, path, position)

    def _continue_in_copy(self, position: FilePosition) -> str | None:
        """Continues in a copy of a file that was deleted or overwritten. Returns the copy's path; None if there is no
        copy.
        """
        copy = find_copy(position, self._contains)
        inode = None if copy is None else inode_of(copy)
        if copy is None or inode is None or (inode in self._files and self._files[inode].reader is not None):
            return None
        moved = replace(position, file=copy, inode=inode, note=None)
        self._files[inode] = FollowedFile(moved, self._open(copy, moved))
        return copy

    def refresh(self, now_ms: int) -> list[Piece]:
        """Lists the matching files and opens new ones. Returns pieces that report deleted and overwritten files.

        Call it once per round.

        Raises:
            InvalidConfig: more than `MAX_FOLLOWED_FILES` files match.
        """
        listed = {inode: path for path in matching_files(self._pattern) if (inode := inode_of(path)) is not None}
        if len(listed) > MAX_FOLLOWED_FILES:
            accepted = f"a pattern that matches at most {MAX_FOLLOWED_FILES} files when it is followed"
            raise InvalidConfig("file.path", self._pattern, accepted, f"{len(listed)} files match")
        for inode, file in self._files.items():
            if file.reader is not None and not file.leaving and inode not in listed:
                self._find_missed(file.position.file, file.reader)
        self._missed = {inode: path for inode, path in self._missed.items() if inode_of(path) == inode}
        missed = {inode: path for inode, path in self._missed.items() if inode not in listed}
        listed |= missed
        pieces: list[Piece] = []
        for inode, file in list(self._files.items()):
            file.visited = 0
            file.leaving = inode not in listed or inode in missed
            if file.reader is None:
                pieces += self._refresh_ended(inode, file, listed.get(inode))
            elif file.reader.was_overwritten():
                pieces.append(self._restart_overwritten(inode, file, file.reader))
            elif not file.unlinked and os.fstat(file.reader.fileno()).st_nlink == 0:
                file.unlinked = True
                pieces.append(self._input_gone(file.position))
        self._expire()
        for position in [p for p in self._released.values() if p.inode not in listed]:
            self._reopen_grown(position)
        for inode, path in listed.items():
            if inode not in self._files:
                self._open_new(inode, path, now_ms)
        for file in (self._files[inode] for inode in missed if inode in self._files):
            file.leaving = True  # it is read before the file that has the name now, because that file has newer records
        self._undecided = {inode: since for inode, since in self._undecided.items() if inode in listed}
        return [self._with_other_positions(piece) for piece in pieces]

    def _find_missed(self, name: str, reader: FileReader) -> None:
        """Looks for files that were created under `name` and renamed since the last round, after the reader's file was
        renamed.
        """
        path = current_path(reader.fileno())
        if path is not None and path != name:
            found = files_named_after(name, path)
            self._missed |= {inode: p for inode, p in found.items() if inode not in self._files | self._released}

    def _input_gone(self, position: FilePosition) -> Piece:
        end = replace(position, note=None)
        return Piece(position, end, Decoded(self._schema.empty()), 0, input_gone=True)

    def _expire(self) -> None:
        leaving = [file for file in self._files.values() if file.leaving and file.reader is not None]
        leaving.sort(key=lambda file: math.inf if file.quiet_since_ms is None else file.quiet_since_ms)
        for file in leaving[: max(0, len(leaving) - MAX_LEAVING_FILES)]:
            file.expired = True

    # Ended files

    def _refresh_ended(self, inode: int, file: FollowedFile, path: str | None) -> Iterator[Piece]:
        if path is None:
            del self._files[inode]
            self._release(file.position)
            if not file.unlinked and inode_of(file.position.file) != inode:
                yield self._input_gone(file.position)
            return
        stamp = _stamp(path)
        if stamp is None or stamp == file.stamp or not self._is_settled(inode, path):
            return
        if not file.damaged and self._contains(path, file.position):
            file.stamp = stamp
            if stamp[0] != file.position.size:
                self._reopen(file.position, path)
        elif inode_of(path) == inode:
            del self._files[inode]  # the inode was reused, or a damaged file has changed and is read again

    def _release(self, position: FilePosition) -> None:
        self._released.pop(position.inode, None)
        self._released[position.inode] = replace(position, note=None, others=())
        while len(self._released) > max(MIN_RELEASED_FILES, len(self._files)):
            del self._released[next(iter(self._released))]

    def _reopen_grown(self, position: FilePosition) -> None:
        """Reopens a file that has left the pattern, if the file has grown or appeared again."""
        stamp = _stamp(position.file)
        if stamp is None or (position.ended and stamp[0] == position.size) or inode_of(position.file) != position.inode:
            return
        if self._contains(position.file, position):
            del self._released[position.inode]
            self._reopen(position, position.file)

    def _reopen(self, position: FilePosition, path: str) -> None:
        again = replace(position, file=path, ended=False, size=0)
        self._files[position.inode] = FollowedFile(again, self._open(path, again))

    # New files

    def _open_new(self, inode: int, path: str, now_ms: int) -> None:
        try:
            released = self._released.get(inode)
            if released is not None and self._contains(path, released):
                del self._released[inode]
                self._reopen(released, path)
            elif self._is_settled(inode, path):
                self._open_settled(inode, path, now_ms)
        except FileNotFoundError:
            pass  # the file was deleted after it was listed

    def _open_settled(self, inode: int, path: str, now_ms: int) -> None:
        stamp = _stamp(path)
        if stamp is not None and self._open_copy(inode, path, stamp):
            return
        if stamp is None or not self._is_undecided(inode, path, stamp, now_ms):
            reader = self._open(path, None)
            self._files[reader.position.inode] = FollowedFile(reader.position, reader)

    def _open_copy(self, inode: int, path: str, stamp: Stamp) -> bool:
        """Returns whether a new file is taken for a copy of a known file, because it begins with the bytes that were
        read from it.

        If the known file is open and can be read to its end, the copy is not read. If the known file is closed, reading
        continues in the copy.
        """
        open_files = [f for f in self._files.values() if f.reader is not None and identifies_content(f.position)]
        closed = [file.position for file in self._files.values() if file.reader is None]
        closed = [p for p in [*closed, *self._released.values()] if identifies_content(p)]
        if not open_files and not closed:
            return False
        reader = self._open(path, None)
        try:
            for file in [f for f in open_files if reader.contains(f.position)]:
                assert file.reader is not None
                if file.reader.was_overwritten():
                    return True  # the next round continues in the copy
                size, last = reader.end()
                if last and os.pread(file.reader.fileno(), len(last), size - len(last)) == last:
                    end = replace(file.position, file=path, inode=inode, ended=True, size=stamp[0], note=None)
                    self._files[inode] = FollowedFile(end, None, stamp=stamp)
                    return True
            original = next((position for position in closed if reader.contains(position)), None)
        finally:
            reader.close()
        if original is not None:
            self._reopen(replace(original, inode=inode), path)
        return original is not None

    def _is_undecided(self, inode: int, path: str, stamp: Stamp, now_ms: int) -> bool:
        """Returns whether a new file may be an incomplete copy of a known file."""
        if self._requires_complete(path) or not any(
            _begins_with(file, path, stamp[0]) for file in self._files.values()
        ):
            return False
        before, since_ms = self._undecided.get(inode, (stamp, now_ms))
        self._undecided[inode] = stamp, since_ms if before == stamp else now_ms
        return before != stamp or now_ms - since_ms < PARTIAL_COPY_MS

    def _is_settled(self, inode: int, path: str) -> bool:
        """Returns whether a file may be opened. A file that must be complete has to be unchanged for a round."""
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

    # Files that were overwritten

    def _restart_overwritten(self, inode: int, file: FollowedFile, reader: FileReader) -> Piece:
        path = current_path(reader.fileno()) or file.position.file
        reader.close()
        del self._files[inode]
        return self._restart(file.position, path, self._continue_in_copy(file.position))

    def _restart(self, position: FilePosition, path: str, copy: str | None) -> Piece:
        """Opens an overwritten file at its beginning. Returns the piece that reports the loss."""
        try:
            reader = self._open(path, None)
        except FileNotFoundError:
            return file_gone_piece(position, self._schema)
        rest = f"read from its copy {copy}" if copy is not None else "not counted"
        message = (
            f"the file was truncated or replaced; it is read from its beginning, and unread records after "
            f"byte {position.offset} are {rest}; expected: rotation by renaming"
        )
        note = Rejection(RejectionReason.FILE_TRUNCATED, 1, position.file, message)
        self._files[reader.position.inode] = FollowedFile(reader.position, reader)
        # A loss is stated even with a copy: bytes written between the copying and the truncation are in neither file.
        losses = (LossReason.FILE_TRUNCATED,)
        end = replace(reader.position, note=note)
        return Piece(position, end, Decoded(self._schema.empty(), (note,)), 0, losses, input_gone=True)

    # Reading

    def readable(self) -> list[FollowedFile]:
        """Returns the files that have not ended: first the leaving files by the time of their last write, then the
        others by name.
        """
        files = [(file, file.reader) for file in self._files.values() if file.reader is not None]

        def order(entry: tuple[FollowedFile, FileReader]) -> tuple[bool, int, str]:
            file, reader = entry
            return not file.leaving, os.fstat(reader.fileno()).st_mtime_ns if file.leaving else 0, file.position.file

        return [file for file, _ in sorted(files, key=order)]

    def has_open_record(self) -> bool:
        """Returns whether there are lines that wait for the end of their record."""
        return any(file.reader is not None and file.reader.is_open for file in self._files.values())

    def next(self, file: FollowedFile, now_ms: int) -> Piece | None:
        """Returns the file's next records; None if the caller shall continue with the next file.

        Raises:
            InvalidRecord: as `FileReader.next`.
        """
        if file.reader is None or file.visited >= MAX_PIECES_PER_VISIT:
            return None
        final = self._requires_complete(file.position.file) or self._has_ended(file, file.reader, now_ms)
        piece = file.reader.next(final, now_ms)
        if piece is not None:
            file.quiet_since_ms = None
            file.visited += 1
            if piece.end.ended:
                # A file that gave no records may be incomplete. It is read again when it changes.
                file.damaged = _is_at_beginning(piece.start)
                losses = () if file.damaged else piece.losses
                piece = replace(piece, end=self._close(file, file.reader, piece.end), losses=losses)
        elif final and not file.reader.was_overwritten():
            piece = self._end(file, file.reader)
        else:
            if file.quiet_since_ms is None:
                file.quiet_since_ms = now_ms
            return None
        file.position = piece.end
        return self._with_other_positions(replace(piece, input_gone=file.unlinked))

    def _has_ended(self, file: FollowedFile, reader: FileReader, now_ms: int) -> bool:
        """Returns whether no more bytes are expected in a file that has left the pattern."""
        quiet_ms = 0 if file.quiet_since_ms is None else now_ms - file.quiet_since_ms
        if not file.leaving or quiet_ms < LEAVING_QUIET_MS:
            return False
        return quiet_ms >= self._rotate_wait_ms or file.expired or has_writer(reader.fileno()) is False

    def _end(self, file: FollowedFile, reader: FileReader) -> Piece:
        """Closes the file. Returns an empty piece whose position marks the file as ended."""
        # A renamed file can be opened again if it grows. A deleted file cannot be opened again once it is closed.
        is_lost = file.unlinked and has_writer(reader.fileno()) is True
        losses = (LossReason.FILE_GONE,) if is_lost else ()
        end = self._close(file, reader, replace(file.position, ended=True))
        return Piece(file.position, end, Decoded(self._schema.empty()), 0, losses)

    def _close(self, file: FollowedFile, reader: FileReader, end: FilePosition) -> FilePosition:
        """Closes the file. Returns `end` with the file's current path and size."""
        status, path = os.fstat(reader.fileno()), current_path(reader.fileno())
        reader.close()
        file.reader = None
        file.stamp = status.st_size, status.st_mtime_ns
        return replace(end, file=end.file if path is None or not file.leaving else path, size=status.st_size)

    def _with_other_positions(self, piece: Piece) -> Piece:
        inode = piece.end.inode
        others = [replace(f.position, note=None) for i, f in self._files.items() if i != inode]
        others += [p for i, p in self._released.items() if i != inode and p.ended]
        return replace(piece, end=replace(piece.end, others=tuple(others)))

    def close(self) -> None:
        for file in self._files.values():
            if file.reader is not None:
                file.reader.close()


def contains(open_reader: OpenReader, path: str, position: FilePosition) -> bool:
    """Returns whether the file at a path still begins with all bytes before a position; False without a file."""
    try:
        reader = open_reader(path, None)
    except FileNotFoundError:
        return False
    try:
        return reader.contains(position)
    finally:
        reader.close()


def _begins_with(file: FollowedFile, path: str, size: int) -> bool:
    """Returns whether a known file may begin with the file at a path, which is shorter. Compares both ends of the
    shorter file.
    """
    if file.reader is None or not 0 < size <= file.position.offset:
        return size == 0
    descriptor = file.reader.fileno()
    last = max(0, size - TAIL_BYTES)
    with Path(path).open("rb", buffering=0) as other:
        head, _, tail = other.read(min(HEAD_BYTES, size)), other.seek(last), other.read(size - last)
    return os.pread(descriptor, len(head), 0) == head and os.pread(descriptor, len(tail), last) == tail


def _stamp(path: str) -> Stamp | None:
    try:
        stat = Path(path).stat()
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns


def _is_at_beginning(position: FilePosition) -> bool:
    return position.offset == 0 and position.row == 0


def requires_complete_by_name(path: str) -> bool:
    """Returns whether a file can only be read once it is complete, judged by its name."""
    return Path(path).suffix in CODECS or path.endswith(".parquet")
