"""Follows the files that match a pattern through appends, rotation and truncation.

A file is identified by its device, its inode and its content, not by its name. Rotation renames a file and creates a
new one with the old name. The new file is read from its beginning. The renamed file is read through its open handle
until no process writes to it.

A new file may begin with everything that was read of a known file, compressed or not:

- The known file was replaced at its path, or rotation has compressed or copied it and then deleted or truncated it.
  Then the new file is the known file. It is read from where the known file ended.
- The known file is still there. Then the new file may be a copy of it, or another file, such as the file of a second
  meter that stands still. It is assumed to be a copy. Its records are read, but not counted, and the guess is stated.

If a file no longer contains the bytes that were read from it, it was truncated or overwritten (``copytruncate``). It is
then read from its beginning. Its last bytes before that may not have been read, so a loss is stated. Its records with
event times of the old content may have been counted before. They count again, and the guess is stated. This is also
true of a file that replaces another one and does not begin with its content.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from edge.codecs.decompression import CODECS, HEAD_BYTES
from edge.codecs.schema import RecordSchema
from edge.records import Decoded, Rejection, RejectionReason
from edge.sources.files.alike import Alike, Known, Stamp, same_bytes
from edge.sources.files.fingerprint import (
    current_path,
    files_named_after,
    find_copy,
    has_digest,
    has_writer,
    identity_of,
    is_rotated_name,
    matching_files,
    path_of,
)
from edge.sources.files.position import FileId, FilePosition, Span, united
from edge.sources.files.reader import FileReader, OpenReader, Piece, contains, file_gone_piece, note_piece, with_guesses
from edgewater.base.errors import InvalidConfig, InvalidRecord
from edgewater.base.streams import MIN_TIME_MS, TIME_COLUMN
from edgewater.wire import LossReason

log = logging.getLogger(__name__)

MAX_FOLLOWED_FILES = 1000  # limit: open files
MAX_LEAVING_FILES = 100
"""The largest number of open files that no longer match the pattern. Beyond it, the files without new records for the
longest time are closed.
"""
MIN_RELEASED_FILES = 4
"""The positions of at least this many files that left the pattern are remembered, or of as many as are followed. They
are needed if the files are copied or grow. Each position of a source contains them.
"""
MAX_PIECES_PER_VISIT = 16  # limit: the turn of one file, so that others are read
LEAVING_QUIET_MS = 500  # limit: writes of a process that still has a rotated file
"""A writer may append to a renamed file for a moment. The file may be closed only after this long without new bytes."""
ROTATE_WAIT_MS = 60_000  # default: `rotate_wait`
PARTIAL_COPY_MS = 5_000  # limit: the wait for a copy that is being written
"""A file that begins like another file is not read for this long. The other file may be deleted or truncated soon."""


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
        alike: the offset up to which the file had the same bytes as the file `position.like`; 0 if it was not read
            beyond `position.alike`.
        former: the deleted file that had the same path.
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
    alike: int = 0
    former: FileId | None = None

    @property
    def is_gone(self) -> bool:
        """Whether the file was deleted, or its content overwritten. It may still be open."""
        if self.reader is None:
            return False
        return current_path(self.reader.fileno()) is None or self.reader.was_overwritten()


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
        self._files: dict[FileId, FollowedFile] = {}
        # Positions of files that have left the pattern. If a position has not ended, its file was not found.
        self._released: dict[FileId, FilePosition] = {}
        # Paths of files. Each file was created under a followed name and renamed out of the pattern before the next
        # round, so no round has listed it.
        self._missed: dict[FileId, str] = {}
        self._settling: dict[FileId, Stamp] = {}
        self._undecided: dict[FileId, Alike] = {}
        # By path, the event times of content that is no longer there.
        self._replaced: dict[str, Span] = {}

    def resume(self, at: FilePosition | None) -> list[Piece]:
        """Opens the files of a position. Returns pieces that report deleted and truncated files."""
        positions = [] if at is None else [replace(at, others=()), *at.others]
        for position in positions:
            if position.ended:
                self._resume_ended(position)
        pieces = [piece for position in positions if not position.ended for piece in self._resume(position)]
        self._missed = {each: path for each, path in self._missed.items() if each not in self._files | self._released}
        return [self._with_other_positions(piece) for piece in pieces]

    def _resume_ended(self, position: FilePosition) -> None:
        path = path_of(position)
        identity = None if path is None else identity_of(path)
        if path is None or identity is None:
            self._release(position)
            return
        damaged, stamp = _is_at_beginning(position), _stamp(path)
        read_ns = position.arrival_ms * 1_000_000
        # A file that was written after the last read may have other content of the same size.
        changed = damaged or stamp is None or position.size not in (0, stamp[0]) or stamp[1] > read_ns
        position = self._identified(position, identity)
        self._files[identity] = FollowedFile(position, None, stamp=None if changed else stamp, damaged=damaged)

    def _identified(self, position: FilePosition, identity: FileId) -> FilePosition:
        """Returns a position with the present identity of its file. A position of release 0.3.0 had no device, and no
        event times.
        """
        span = position.span
        if not position.device and not _is_at_beginning(position):
            span = MIN_TIME_MS, self._schema.time.latest_ms(position.arrival_ms) + 1
        return replace(position.moved(position.file, identity), span=span)

    def _resume(self, position: FilePosition) -> Iterator[Piece]:
        path = path_of(position)
        found = path is not None and self._contains(path, position)
        replaced = not found and has_digest(position) and self._contains(position.file, position)
        at = position.file if replaced else path if found else None
        if at is not None and (identity := identity_of(at)) is not None:
            position = self._identified(position, identity)
            reader = self._open(at, position)
            self._files[identity] = FollowedFile(replace(position, digest=reader.position.digest), reader)
            if found and path is not None and path != position.file:
                self._missed |= files_named_after(position.file, path)
            return
        copy = self._continue_in_copy(position)
        if path == position.file:
            yield self._restart(position, path, copy)
        elif copy is None:
            self._release(position)
            yield file_gone_piece(position, self._schema)

    def _contains(self, path: str, position: FilePosition, *, any_head: bool = False) -> bool:
        return contains(self._open, path, position, any_head=any_head)

    def _continue_in_copy(self, position: FilePosition) -> str | None:
        """Continues in a copy of a file that was deleted or overwritten. Returns the copy's path; None if there is no
        copy.
        """
        copy = find_copy(position, self._contains)
        identity = None if copy is None else identity_of(copy)
        if copy is None or identity is None or (identity in self._files and self._files[identity].reader is not None):
            return None
        moved = position.moved(copy, identity)
        self._files[identity] = FollowedFile(moved, self._open(copy, moved))
        return copy

    def refresh(self, now_ms: int) -> list[Piece]:
        """Lists the matching files and opens new ones. Returns pieces that report deleted and overwritten files.

        Call it once per round.

        Raises:
            InvalidConfig: more than `MAX_FOLLOWED_FILES` files match.
        """
        listed = {each: path for path in matching_files(self._pattern) if (each := identity_of(path)) is not None}
        if len(listed) > MAX_FOLLOWED_FILES:
            accepted = f"a pattern that matches at most {MAX_FOLLOWED_FILES} files when it is followed"
            raise InvalidConfig("file.path", self._pattern, accepted, f"{len(listed)} files match")
        for identity, file in self._files.items():
            if file.reader is not None and not file.leaving and identity not in listed:
                self._find_missed(file.position.file, file.reader)
        self._missed = {each: path for each, path in self._missed.items() if identity_of(path) == each}
        missed = {each: path for each, path in self._missed.items() if each not in listed}
        listed |= missed
        pieces: list[Piece] = []
        for identity, file in list(self._files.items()):
            file.visited = 0
            file.leaving = identity not in listed or identity in missed
            if file.reader is None:
                pieces += self._refresh_ended(identity, file, listed.get(identity))
            elif file.reader.was_overwritten():
                pieces.append(self._restart_overwritten(identity, file, file.reader))
            elif not file.unlinked and os.fstat(file.reader.fileno()).st_nlink == 0:
                file.unlinked = True
                pieces.append(self._input_gone(file.position))
        self._expire()
        for position in [p for p in self._released.values() if p.identity not in listed]:
            self._reopen_grown(position)
        for identity, path in listed.items():
            if identity not in self._files:
                pieces += self._open_new(identity, path, now_ms)
        for file in (self._files[each] for each in missed if each in self._files):
            file.leaving = True  # it is read before the file that has the name now, because that file has newer records
        self._undecided = {each: alike for each, alike in self._undecided.items() if each in listed}
        return [self._with_other_positions(piece) for piece in pieces]

    def _find_missed(self, name: str, reader: FileReader) -> None:
        """Looks for files that were created under `name` and renamed since the last round, after the reader's file was
        renamed.
        """
        path = current_path(reader.fileno())
        if path is not None and path != name:
            found = files_named_after(name, path)
            self._missed |= {each: p for each, p in found.items() if each not in self._files | self._released}

    def _input_gone(self, position: FilePosition) -> Piece:
        end = replace(position, note=None)
        return Piece(position, end, Decoded(self._schema.empty()), 0, input_gone=True)

    def _expire(self) -> None:
        leaving = [file for file in self._files.values() if file.leaving and file.reader is not None]
        leaving.sort(key=lambda file: math.inf if file.quiet_since_ms is None else file.quiet_since_ms)
        for file in leaving[: max(0, len(leaving) - MAX_LEAVING_FILES)]:
            file.expired = True

    # Ended files

    def _refresh_ended(self, identity: FileId, file: FollowedFile, path: str | None) -> Iterator[Piece]:
        if path is None:
            del self._files[identity]
            self._release(file.position)
            if not file.unlinked and identity_of(file.position.file) != identity:
                yield self._input_gone(file.position)
            return
        stamp = _stamp(path)
        if stamp is None or stamp == file.stamp or not self._is_settled(identity, path):
            return
        if not file.damaged and self._contains(path, file.position, any_head=True):
            file.stamp = stamp
            if stamp[0] != file.position.size:
                self._reopen(file.position, path)
        elif identity_of(path) == identity:
            del self._files[identity]  # the inode was reused, or a damaged file has changed and is read again
            self._keep_times(file.position)

    def _release(self, position: FilePosition) -> None:
        self._released.pop(position.identity, None)
        self._released[position.identity] = replace(position, note=None, others=())
        while len(self._released) > max(MIN_RELEASED_FILES, len(self._files)):
            self._keep_times(self._released.pop(next(iter(self._released))))

    def _keep_times(self, position: FilePosition) -> None:
        """Keeps the event times of content whose position is forgotten, by the path of the file."""
        span = united(self._replaced.pop(position.file, None), _times(position))
        if span is not None:
            self._replaced[position.file] = span
        while len(self._replaced) > MAX_FOLLOWED_FILES:
            del self._replaced[next(iter(self._replaced))]

    def _reopen_grown(self, position: FilePosition) -> None:
        """Reopens a file that has left the pattern, if the file has grown or appeared again."""
        stamp = _stamp(position.file)
        is_same = stamp is not None and position.is_at(identity_of(position.file))
        if stamp is None or not is_same or (position.ended and stamp[0] == position.size):
            return
        if self._contains(position.file, position):
            del self._released[position.identity]
            self._reopen(position, position.file)

    def _reopen(self, position: FilePosition, path: str) -> None:
        again = replace(position, file=path, ended=False, size=0)
        self._files[position.identity] = FollowedFile(again, self._open(path, again))

    # New files

    def _open_new(self, identity: FileId, path: str, now_ms: int) -> list[Piece]:
        """Opens a new file, unless it has to wait. Returns pieces that report what is lost."""
        try:
            released = self._released.pop(identity, None)
            if released is not None and self._contains(path, released):
                self._reopen(released, path)
                return []
            if released is not None:
                self._keep_times(released)  # the inode was reused
            if self._is_settled(identity, path) and (stamp := _stamp(path)) is not None:
                return self._open_settled(identity, path, stamp, now_ms)
        except FileNotFoundError:
            pass  # the file was deleted after it was listed
        return []

    def _open_settled(self, identity: FileId, path: str, stamp: Stamp, now_ms: int) -> list[Piece]:
        """Opens a new file as what the comparison with the known files says. See the top of this module."""
        alike = self._compared(identity, path, stamp, now_ms)
        replaced = next((p for p in alike.known if p.file == path and self._is_gone(p)), None)
        if replaced is not None:
            self._undecided.pop(identity, None)
            return self._take_over(replaced, path, identity)
        # Shorter beginnings may be equal by chance. They count, and the guess is stated.
        known = [p for p in alike.known if p.offset >= HEAD_BYTES]
        rotated = next((p for p in known if is_rotated_name(path, p.file) and self._is_gone(p)), None)
        if rotated is not None:
            self._undecided.pop(identity, None)
            self._continue_rotated(rotated, path, identity, stamp)
            return []
        # An open file that differs from the new file after its last read byte was not copied.
        closed = [p for p in known if p.file == path or not self._is_open(p)]
        until = max([0, alike.until, *(p.offset for p in closed)])
        if (until or alike.until < 0) and now_ms - alike.seen_ms < PARTIAL_COPY_MS:
            return []
        self._undecided.pop(identity, None)
        former, again = self._former(path, identity)
        reader = self._open(path, None)
        position = replace(reader.position, again=again)
        offset = until or max([-alike.until, *(p.offset for p in alike.known)])
        if offset:
            reader.close()
            like = alike.like.identity if until > 0 and alike.like is not None else None
            position = replace(position, alike=offset, left_out=until > 0, like=like)
            reader = self._open(path, position)
        if until > 0:
            other = [*known, *([] if alike.like is None else [alike.like])][0].file
            message = "%s begins like %s: it is assumed to be a copy, and its first %d bytes are not counted"
            log.warning(message, path, other, until)
        self._files[position.identity] = FollowedFile(position, reader, former=former)
        return []

    def _compared(self, identity: FileId, path: str, stamp: Stamp, now_ms: int) -> Alike:
        """Returns the known files with which a new file begins. Reads the new file, unless it has not changed."""
        before = self._undecided.get(identity)
        files = self._known()
        positions = [position for position, _ in files]
        # A known file that is gone may have been read further since then.
        is_newest = before is not None and all(p in positions or not self._is_gone(p) for p in before.known)
        if before is not None and before.stamp == stamp and is_newest:
            return before
        seen_ms = now_ms if before is None else before.seen_ms
        reader, plain = self._open(path, None), not self._requires_complete(path)
        try:
            self._undecided[identity] = Alike.of(path, stamp, seen_ms, reader, files, plain=plain)
        finally:
            reader.close()
        return self._undecided[identity]

    def _known(self) -> list[Known]:
        open_or_ended = ((file.position, file.reader) for file in self._files.values())
        return [*open_or_ended, *((position, None) for position in self._released.values())]

    def _is_open(self, position: FilePosition) -> bool:
        file = self._files.get(position.identity)
        return file is not None and file.reader is not None

    def _is_gone(self, position: FilePosition) -> bool:
        """Returns whether a known file was deleted, or its content overwritten."""
        file = self._files.get(position.identity)
        if file is not None and file.reader is not None:
            return file.is_gone
        return not position.is_at(identity_of(position.file)) and (file is None or file.leaving)

    def _take_over(self, position: FilePosition, path: str, identity: FileId) -> list[Piece]:
        """Continues in a file that has replaced a known file at its path."""
        known = self._files.get(position.identity)
        self._released.pop(position.identity, None)
        moved = replace((known.position if known else position).moved(path, identity), ended=False, size=0)
        reader = self._open(path, moved)
        pieces = list[Piece]()
        if known is not None:
            if known.reader is not None and self._has_rest(moved, known.reader, reader):
                if has_writer(known.reader.fileno()) is True:
                    pieces.append(Piece(moved, moved, Decoded(self._schema.empty()), 0, (LossReason.FILE_GONE,)))
                known.reader.close()
                known.reader = None
            if known.reader is None:
                del self._files[position.identity]
        self._files[identity] = FollowedFile(moved, reader)
        return pieces

    def _has_rest(self, position: FilePosition, known: FileReader, new: FileReader) -> bool:
        """Returns whether the new file at a path has all unread bytes of the known file that it has replaced."""
        end = os.fstat(known.fileno()).st_size
        return self._requires_complete(position.file) or same_bytes(known, new, position.offset, end)

    def _continue_rotated(self, position: FilePosition, path: str, identity: FileId, stamp: Stamp) -> None:
        """Continues in a copy of a known file that rotation has deleted or truncated."""
        if self._is_open(position):  # the known file is read to its end through its handle
            end = replace(position.moved(path, identity), ended=True, size=stamp[0])
            self._files[identity] = FollowedFile(end, None, stamp=stamp)
            return
        self._released.pop(position.identity, None)
        self._files.pop(position.identity, None)
        self._reopen(position.moved(path, identity), path)

    def _former(self, path: str, identity: FileId) -> tuple[FileId | None, Span | None]:
        """Returns the deleted file that is still open, and the event times of all former content, of this path."""
        gone = [p for p, _ in self._known() if p.file == path and p.identity != identity and self._is_gone(p)]
        former = next((p.identity for p in gone if self._is_open(p)), None)
        return former, united(self._replaced.get(path), *(_times(p) for p in gone))

    def _is_settled(self, identity: FileId, path: str) -> bool:
        """Returns whether a file may be opened. A file that must be complete has to be unchanged for a round."""
        if not self._requires_complete(path):
            return True
        stamp = _stamp(path)
        if stamp is None:
            return False
        if identity in self._undecided and self._undecided[identity].stamp == stamp:
            return True
        seen, self._settling[identity] = self._settling.get(identity), stamp
        if seen != self._settling[identity]:
            return False
        del self._settling[identity]
        return True

    # Files that were overwritten

    def _restart_overwritten(self, identity: FileId, file: FollowedFile, reader: FileReader) -> Piece:
        path = current_path(reader.fileno()) or file.position.file
        reader.close()
        del self._files[identity]
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
        again = united(position.again, _times(position))
        opened = replace(reader.position, again=again)
        self._files[opened.identity] = FollowedFile(opened, reader)
        self._end_comparison(position)
        if copy is None:  # a copy may appear later, or have any name; the old content has no inode now
            self._release(position.moved(position.file, (position.device, -position.inode)))
        # A loss is stated even with a copy: bytes written between the copying and the truncation are in neither file.
        losses = (LossReason.FILE_TRUNCATED,)
        end = replace(opened, note=note)
        return Piece(position, end, Decoded(self._schema.empty(), (note,)), 0, losses, input_gone=True)

    def _end_comparison(self, position: FilePosition) -> None:
        """Ends the comparison of copies with a closed file. They are left out up to the end of this file."""
        for copy in self._files.values():
            if copy.position.like == position.identity and copy.reader is not None:
                at = replace(copy.position, alike=max(copy.position.alike, position.offset), like=None)
                with contextlib.suppress(FileNotFoundError):
                    reader = self._open(at.file, at)
                    copy.reader.close()
                    copy.position, copy.reader = at, reader

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
        """Returns the file's next records; None if the caller shall continue with the next file."""
        if file.reader is None or file.visited >= MAX_PIECES_PER_VISIT:
            return None
        final = self._requires_complete(file.position.file) or self._has_ended(file, file.reader, now_ms)
        losses: tuple[LossReason, ...] = ()
        try:
            piece = file.reader.next(final, now_ms)
        except InvalidRecord as exc:  # the other files go on
            note = Rejection(RejectionReason.MALFORMED, 1, file.position.file, f"the file is not read: {exc}")
            losses = (LossReason.FILE_DAMAGED,)
            piece = note_piece(file.position, note, self._schema, ended=True, losses=losses)
        if piece is not None:
            file.quiet_since_ms = None
            file.visited += 1
            piece = self._with_state(file, file.reader, piece)
            if piece.end.ended:
                # A file that gave no records may be incomplete. It is read again when it changes.
                file.damaged = _is_at_beginning(piece.start)
                losses = losses if file.damaged else piece.losses
                piece = replace(piece, end=self._close(file, file.reader, piece.end), losses=losses)
        elif final and not file.reader.was_overwritten():
            piece = self._end(file, file.reader)
        else:
            if file.quiet_since_ms is None:
                file.quiet_since_ms = now_ms
            return None
        file.position = piece.end
        return self._with_other_positions(replace(piece, input_gone=file.unlinked))

    def _with_state(self, file: FollowedFile, reader: FileReader, piece: Piece) -> Piece:
        """Returns a piece with its guesses, and with an end that has the event times of the file."""
        position, start = file.position, piece.start.offset
        former, like = self._files.get(file.former or (0, 0)), self._files.get(position.like or (0, 0))
        again = position.again if former is None else united(position.again, _times(former.position))
        alike = max(piece.end.alike, file.alike)
        if alike <= start < piece.end.offset and like is not None and like.reader is not None:
            if same_bytes(like.reader, reader, start, piece.end.offset):
                alike = file.alike = piece.end.offset
            else:
                like = None
        times = piece.decoded.batch.column(TIME_COLUMN).to_numpy()
        span = (int(times.min()), int(times.max()) + 1) if len(times) else None
        own = united(position.span, span)
        other = None if like is None else position.like
        end = replace(piece.end, again=again, alike=alike, left_out=position.left_out, like=other, span=own)
        return with_guesses(replace(piece, end=end))

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
        self._end_comparison(end)
        file.stamp = status.st_size, status.st_mtime_ns
        return replace(end, file=end.file if path is None or not file.leaving else path, size=status.st_size)

    def _with_other_positions(self, piece: Piece) -> Piece:
        of = piece.end.identity
        others = [replace(f.position, note=None) for each, f in self._files.items() if each != of]
        others += [p for each, p in self._released.items() if each != of and p.ended]
        return replace(piece, end=replace(piece.end, others=tuple(others)))

    def close(self) -> None:
        for file in self._files.values():
            if file.reader is not None:
                file.reader.close()


def _times(position: FilePosition) -> Span | None:
    """Returns the event times of the records that were counted before a position; None if there are none."""
    return united(position.span, position.again)


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
