"""The file source: files that match a pattern, read once in name order, or followed for ever.

Reading and decoding run in a thread, one piece at a time: the next is read when the consumer asks
for it, so a slow consumer holds the source back and never more than a piece is in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from edge.codecs.decompression import codec_of
from edge.codecs.formats import TextFormat
from edge.codecs.schema import RecordSchema
from edge.records import DRAINED_BYTES, GRAIN_S, Chunk, Position, split_rows
from edge.sources.files.fingerprint import locate, matching_files
from edge.sources.files.follower import Followed, whole_by_name
from edge.sources.files.parquet import ParquetReader
from edge.sources.files.position import FilePosition
from edge.sources.files.reader import FileReader, OpenReader, Piece, gone, statement
from edge.sources.files.text import TextReader
from edgewater.errors import InvalidConfig, StorageError

POLL_S = 0.25


def text_opener(text: TextFormat, compression: str = "auto") -> OpenReader:
    """Opens files of lines."""
    return lambda path, position: TextReader(path, codec_of(path, compression), text, position)


def parquet_opener(schema: RecordSchema) -> OpenReader:
    """Opens Parquet files."""
    return lambda path, position: ParquetReader(path, schema, position)


class FileSource:
    """A `Source` of files.

    Args:
        pattern: a path, or a pattern with ``*``, ``?`` and ``**``.
        open_reader: how a matching file is read.
        follow: go on for ever with lines that are appended and files that appear.
        whole: whether the file at a path can only be read once it is complete.
        now_ms: the wall clock, for arrival times.
        sleep: waits between two looks at followed files.
    """

    replayable = True

    def __init__(
        self,
        name: str,
        stream: str,
        pattern: str,
        schema: RecordSchema,
        open_reader: OpenReader,
        *,
        now_ms: Callable[[], int],
        follow: bool = False,
        whole: Callable[[str], bool] = whole_by_name,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        poll_s: float = POLL_S,
    ) -> None:
        self.name = name
        self.stream = stream
        self._pattern = pattern
        self._schema = schema
        self._open = open_reader
        self._follow = follow
        self._whole = whole
        self._now_ms = now_ms
        self._sleep = sleep
        self._poll_s = poll_s
        self._reread: FileReader | None = None

    def chunks(self, position: Position | None) -> AsyncIterator[Chunk]:
        self.close()  # recovery is over
        at = FilePosition.from_json(position) if position is not None else None
        return self._follow_files(at) if self._follow else self._read_once(at)

    async def _read_once(self, at: FilePosition | None) -> AsyncIterator[Chunk]:
        paths = matching_files(self._pattern)
        if at is None and not paths:
            accepted = "a path that matches at least one file, or follow: true to wait for files"
            raise InvalidConfig(f"{self.name}: path", self._pattern, accepted, "no file matches")
        if at is not None:
            found = None if at.ended else await asyncio.to_thread(locate, at, by_content=True)
            paths = [path for path in paths if path > at.file and path != found]
            if found is None and not at.ended:
                yield self._chunks(gone(at, self._schema))[0]
            elif found is not None:
                async for chunk in self._read_file(found, at):
                    yield chunk
        for path in paths:
            async for chunk in self._read_file(path, None):
                yield chunk

    async def _read_file(self, path: str, at: FilePosition | None) -> AsyncIterator[Chunk]:
        reader = await asyncio.to_thread(self._open, path, at)
        try:
            while (piece := await asyncio.to_thread(reader.next, True, self._now_ms())) is not None:
                for chunk in self._chunks(piece):
                    yield chunk
        finally:
            reader.close()

    async def _follow_files(self, at: FilePosition | None) -> AsyncIterator[Chunk]:
        followed = Followed(self._pattern, self._open, self._schema, self._whole)
        try:
            for change in await asyncio.to_thread(followed.resume, at):
                for chunk in self._chunks(change):
                    yield chunk
            drained = False
            while True:
                progress, before, drained = False, drained, True
                for change in await asyncio.to_thread(followed.refresh):
                    for chunk in self._chunks(change):
                        yield chunk
                for file in followed.readable():
                    at_end = True
                    while (piece := await asyncio.to_thread(followed.next, file, self._now_ms())) is not None:
                        progress = True
                        for chunk in self._chunks(piece):
                            yield chunk
                        at_end = 0 < piece.nbytes < DRAINED_BYTES and not self._whole(file.position.file)
                        if at_end:
                            break  # what is being appended now comes with what is appended next
                    drained &= at_end
                if not progress:
                    await self._sleep(self._poll_s)
                elif before and drained:
                    await self._sleep(GRAIN_S)
        finally:
            followed.close()

    def _chunks(self, piece: Piece) -> list[Chunk]:
        decoded = piece.decoded
        start, end = piece.start.to_json(), piece.end.to_json()
        return split_rows(Chunk(self.name, decoded.batch, start, end, decoded.rejected, piece.nbytes))

    def reread(self, start: Position | None, end: Position) -> Chunk:
        till = FilePosition.from_json(end)
        since = FilePosition.from_json(start) if start is not None else None
        if since is not None and since.inode != till.inode:
            since = None
        if till.note is not None:
            piece = statement(since or till, till.note, self._schema, ended=till.ended)
        else:
            piece = self._reader_for(till).again(since, till)
        decoded = piece.decoded
        return Chunk(self.name, decoded.batch, start, end, decoded.rejected, piece.nbytes)

    def _reader_for(self, position: FilePosition) -> FileReader:
        """Kept open: recovery asks for piece after piece, and a compressed file cannot be sought in."""
        reader = self._reread
        if reader is None or reader.position.inode != position.inode or reader.position.head != position.head:
            path = locate(position, by_content=not self._follow)
            if path is None:
                raise StorageError(f"{position.file}: has been read and is gone; it is needed to recover")
            self.close()
            reader = self._reread = self._open(path, FilePosition(path, position.inode, position.head, ended=True))
        return reader

    def close(self) -> None:
        """Closes what `reread` holds open."""
        if self._reread is not None:
            self._reread.close()
            self._reread = None
