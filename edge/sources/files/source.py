"""The file source: files that match a pattern, read once in name order, or followed forever.

Reading and decoding run in a thread, one piece at a time. The next piece is read when the consumer requests it. So a
slow consumer slows the source, and at most one piece is in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace

from edge.codecs.decompression import NO_BYTES, codec_of
from edge.codecs.formats import TextFormat
from edge.codecs.schema import RecordSchema
from edge.records import COALESCE_S, MAX_CHUNK_ROWS, SHORT_READ_BYTES, Chunk, InputGone, Position, split_rows
from edge.source_kinds import SourceContext
from edge.sources.files.backfill import BackfillFile, BackfillReader
from edge.sources.files.fingerprint import InputFingerprints, identity_of, locate, matching_files
from edge.sources.files.follower import ROTATE_WAIT_MS, FollowedFiles, requires_complete_by_name
from edge.sources.files.parquet import ParquetReader
from edge.sources.files.position import FilePosition
from edge.sources.files.reader import FileReader, OpenReader, Piece, contains, file_gone_piece, note_piece, with_guesses
from edge.sources.files.text import TextReader
from edgewater.base.errors import InvalidConfig, StorageError
from edgewater.base.streams import Delivery

POLL_S = 0.25  # limit: how late new lines are noticed
BACKFILL_ROWS = 2_048  # limit: how long live records wait for a batch of a backfill
"""Records of a chunk of a backfill. It is small, because live sources wait while a chunk is handled."""


def text_opener(text: TextFormat, compression: str = "auto") -> OpenReader:
    """Returns a function that opens files of lines."""
    return lambda path, position: TextReader(path, codec_of(path, compression), text, position)


def parquet_opener(schema: RecordSchema) -> OpenReader:
    """Returns a function that opens Parquet files."""
    return lambda path, position: ParquetReader(path, schema, position)


class FileSource:
    """A `Source` of files.

    Args:
        pattern: a path, or a pattern with ``*``, ``?`` and ``**``.
        open_reader: opens a matching file.
        follow: true to continue with appended lines and new files.
        requires_complete: returns whether the file at a path can only be read once it is complete.
        rotate_wait_ms: how long a file outside the pattern stays open after its last record. It is closed earlier if no
            process has it open for writing.
    """

    replayable = True
    delivery = Delivery.EXACTLY_ONCE

    def __init__(
        self,
        name: str,
        pattern: str,
        open_reader: OpenReader,
        context: SourceContext,
        *,
        follow: bool = False,
        requires_complete: Callable[[str], bool] = requires_complete_by_name,
        poll_s: float = POLL_S,
        rotate_wait_ms: int = ROTATE_WAIT_MS,
    ) -> None:
        self.name, self.stream, self._schema = name, context.stream, context.schema
        self._pattern, self._open, self._context = pattern, open_reader, context
        self._follow, self._requires_complete = follow, requires_complete
        self._poll_s, self._rotate_wait_ms = poll_s, rotate_wait_ms
        self._reread: FileReader | None = None
        self._fingerprints = InputFingerprints()

    def fingerprints(self, position: Position, most: int) -> tuple[int, ...]:
        return self._fingerprints.of(FilePosition.from_state(position), most)

    def chunks(self, position: Position | None) -> AsyncIterator[Chunk]:
        self.close()  # recovery has ended, so nothing is reread
        at = FilePosition.from_state(position) if position is not None else None
        return self._follow_files(at) if self._follow else self._read_once(at)

    async def _read_once(self, at: FilePosition | None) -> AsyncIterator[Chunk]:
        paths = matching_files(self._pattern)
        if at is None and not paths:
            accepted = "a path that matches at least one file, or follow: true to wait for files"
            raise InvalidConfig(f"{self.name}: path", self._pattern, accepted, "no file matches")
        if at is not None:
            found = None if at.ended else await asyncio.to_thread(locate, at, self._contains, by_content=True)
            paths = [path for path in paths if path > at.file and path != found]
            if found is None and not at.ended:
                yield self._chunks(file_gone_piece(at, self._schema))[0]
            elif found is not None:
                async for chunk in self._read_file(found, at):
                    yield chunk
        for path in paths:
            async for chunk in self._read_file(path, None):
                yield chunk

    async def _read_file(self, path: str, at: FilePosition | None) -> AsyncIterator[Chunk]:
        reader = await asyncio.to_thread(self._open, path, at)
        try:
            while (piece := await asyncio.to_thread(reader.next, True, self._context.now_ms())) is not None:
                for chunk in self._chunks(piece):
                    yield chunk
        finally:
            reader.close()

    async def _follow_files(self, at: FilePosition | None) -> AsyncIterator[Chunk]:
        followed = FollowedFiles(self._pattern, self._open, self._schema, self._requires_complete, self._rotate_wait_ms)
        try:
            for change in await asyncio.to_thread(followed.resume, at):
                for chunk in self._chunks(change):
                    yield chunk
            drained, waited_s = False, COALESCE_S
            while True:
                progress, was_drained, drained = False, drained, True
                for change in await asyncio.to_thread(followed.refresh, self._context.now_ms()):
                    for chunk in self._chunks(change):
                        yield chunk
                for file in followed.readable():
                    at_end = True
                    while (piece := await asyncio.to_thread(followed.next, file, self._context.now_ms())) is not None:
                        progress = True
                        for chunk in self._chunks(piece):
                            yield chunk
                        short = 0 < piece.nbytes < SHORT_READ_BYTES * waited_s / COALESCE_S
                        at_end = short and not self._requires_complete(file.position.file)
                        if at_end:
                            break  # the next round reads the next appended lines together
                    drained &= at_end
                if followed.has_open_record():  # its lines have arrived, so the source is not idle
                    await self._context.sleep(self._poll_s)
                elif not progress:
                    await self._context.wait(self.name, self._poll_s)
                elif was_drained and drained:
                    waited_s = self._context.coalesce_s(self.stream, self.name)
                    await self._context.wait(self.name, waited_s)
        finally:
            followed.close()

    def _chunks(self, piece: Piece, rows: int = MAX_CHUNK_ROWS) -> list[Chunk]:
        decoded = piece.decoded
        start, end = piece.start.to_state(), piece.end.to_state()
        losses = piece.losses, piece.input_gone
        counted = decoded.batch, start, end, decoded.rejected, piece.nbytes
        chunk = Chunk(self.name, *counted, *losses, guessed=decoded.guessed)
        return split_rows(chunk, rows)

    def committed(self, position: Position) -> None:
        pass

    async def backfill(self, position: Position | None, until: Position, since_ms: int) -> AsyncGenerator[Chunk]:
        reader = await asyncio.to_thread(self._backfill_reader, position, FilePosition.from_state(until))
        try:
            while (piece := await asyncio.to_thread(reader.next, self._context.now_ms())) is not None:
                progress = reader.progress()
                for chunk in self._chunks(piece, BACKFILL_ROWS):
                    assert chunk.end is not None
                    yield replace(chunk, end=chunk.end | progress)
        finally:
            reader.close()

    def _backfill_reader(self, position: Position | None, until: FilePosition) -> BackfillReader:
        limits = [replace(p, others=(), note=None, ended=False) for p in (until, *until.others)]
        if self._follow:
            files = self._without_copies(limits)
        else:
            last = self._locate(limits[0])
            before = [p for p in matching_files(self._pattern) if p < until.file and p != last]
            files = [*(BackfillFile(p, None) for p in before), BackfillFile(last, limits[0])]
        reader = BackfillReader(files, self._open, in_order=not self._follow)
        if position is not None:
            reader.resume(position)
        return reader

    def _without_copies(self, limits: list[FilePosition]) -> list[BackfillFile]:
        """Returns the files of these positions. In a position of release 0.3.0, a file that is a copy of another one
        has no path, because the copy was not read.
        """
        files = [BackfillFile(None, limit) for limit in limits]
        known: list[tuple[str, FilePosition]] = []
        for file, limit in sorted(zip(files, limits, strict=True), key=lambda f: -f[1].offset):
            path = self._locate(limit)
            if path is not None and not any(
                path == other or (limit.digest is None and at.head == limit.head and self._contains(other, limit))
                for other, at in known
            ):
                file.path = path
                known.append((path, limit))
        return files

    def _locate(self, position: FilePosition) -> str | None:
        return locate(position, self._may_contain, by_content=not self._follow)

    def reread(self, start: Position | None, end: Position) -> Chunk:
        last = FilePosition.from_state(end)
        first = FilePosition.from_state(start) if start is not None else None
        if first is not None and not last.is_at(first.identity) and not first.is_at(last.identity):
            first = None
        if last.note is not None:
            piece = note_piece(first or last, last.note, self._schema, ended=last.ended)
        else:
            piece = with_guesses(self._reread_piece(first, last))
        decoded = piece.decoded
        return Chunk(self.name, decoded.batch, start, end, decoded.rejected, piece.nbytes, guessed=decoded.guessed)

    def _reread_piece(self, first: FilePosition | None, last: FilePosition) -> Piece:
        try:
            return self._reader_for(last).reread(first, last)
        except InputGone:
            self.close()
            return self._reader_for(last).reread(first, last)  # a copy of the file may still have the records

    def _reader_for(self, position: FilePosition) -> FileReader:
        """Returns a reader of the position's file.

        The reader stays open, because recovery reads one piece after the other and a compressed file cannot be seeked.
        """
        reader = self._reread
        known = None if reader is None else reader.position
        if reader is None or known is None or (known.identity, known.head) != (position.identity, position.head):
            try:
                path = locate(position, self._may_contain, by_content=not self._follow)
            except OSError as exc:
                raise StorageError(f"{position.file}: recovery needs to read it again: {exc.strerror}") from exc
            if path is None:
                raise InputGone(f"{position.file}: the file is gone; recovery needs to read it again")
            self.close()
            at = FilePosition(path, position.inode, position.head, ended=True, device=position.device)
            reader = self._reread = self._open(path, at)
        return reader

    def _contains(self, path: str, position: FilePosition) -> bool:
        return contains(self._open, path, position)

    def _may_contain(self, path: str, position: FilePosition) -> bool:
        # A compressed file is not decompressed for this check: `reread` compares the checksum anyway.
        if self._requires_complete(path) and position.is_at(identity_of(path)):
            position = replace(position, offset=0, tail=(0, 0), digest=NO_BYTES)
        return self._contains(path, position)

    def close(self) -> None:
        """Closes the file that `reread` has opened."""
        if self._reread is not None:
            self._reread.close()
            self._reread = None
