"""Standard input: lines from another program, until it ends. What was read cannot be read again."""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import AsyncIterator, Callable

from edge.sources.base import Chunk, Position, split_rows
from edge.sources.decoders import TextFormat
from edge.sources.line_stream import LineStream
from edgewater.errors import StorageError

WAIT_S = 0.25


class _Pipe:
    """The bytes that lie ready in a pipe, a terminal or a file."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.ended = False

    def wait(self, timeout_s: float) -> bool:
        return bool(select.select([self._fd], [], [], timeout_s)[0])

    def read(self, size: int) -> bytes:
        if self.ended or not self.wait(0):
            return b""
        data = os.read(self._fd, size)
        self.ended = not data
        return data


class StdinSource:
    """A `Source` of what comes in on a file descriptor.

    A read from a pipe can block for ever and a thread that does cannot be cancelled, so the thread
    only ever waits for `WAIT_S`.
    """

    replayable = False

    def __init__(self, name: str, stream: str, text: TextFormat, *, now_ms: Callable[[], int], fd: int = 0) -> None:
        self.name = name
        self.stream = stream
        self._text = text
        self._now_ms = now_ms
        self._fd = fd

    async def chunks(self, position: Position | None) -> AsyncIterator[Chunk]:
        pipe = _Pipe(self._fd)
        lines = LineStream(pipe, self._text, self.name)

        def step() -> list[Chunk]:
            if not pipe.wait(WAIT_S):
                return []
            got = lines.next(False, self._now_ms())
            if got is None and pipe.ended:
                got = lines.next(True, self._now_ms())
            if got is None:
                return []
            decoded, nbytes = got
            return split_rows(Chunk(self.name, decoded.batch, None, None, decoded.rejected, nbytes))

        while True:
            chunks = await asyncio.to_thread(step)
            for chunk in chunks:
                yield chunk
            if not chunks and pipe.ended:
                return

    def reread(self, start: Position | None, end: Position) -> Chunk:
        raise StorageError(f"{self.name}: what came in on standard input cannot be read again")
