"""Standard input: lines from another program, until it ends. What was read cannot be read again."""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import AsyncIterator, Awaitable, Callable

from edge.codecs.formats import TextFormat
from edge.codecs.line_stream import LineStream
from edge.records import DRAINED_BYTES, GRAIN_S, Chunk, Position, split_rows
from edge.utilization import Mark, unmarked
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

    Args:
        sleep: waits a moment where a little comes again and again, so that it is read together.
        waiting: marks when the source waits for input.
    """

    replayable = False

    def __init__(
        self,
        name: str,
        stream: str,
        text: TextFormat,
        *,
        now_ms: Callable[[], int],
        fd: int = 0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        waiting: Mark = unmarked,
    ) -> None:
        self.name = name
        self.stream = stream
        self._text = text
        self._now_ms = now_ms
        self._fd = fd
        self._sleep = sleep
        self._waiting = waiting

    async def chunks(self, position: Position | None) -> AsyncIterator[Chunk]:
        pipe = _Pipe(self._fd)
        lines = LineStream(pipe, self._text, self.name)

        def step() -> list[Chunk]:
            got = lines.next(False, self._now_ms())
            if got is None and pipe.ended:
                got = lines.next(True, self._now_ms())
            if got is None:
                return []
            decoded, nbytes = got
            return split_rows(Chunk(self.name, decoded.batch, None, None, decoded.rejected, nbytes))

        little = False
        while True:
            if not pipe.wait(0):
                with self._waiting(self.name):
                    while not await asyncio.to_thread(pipe.wait, WAIT_S):
                        little = False
            chunks = await asyncio.to_thread(step)
            for chunk in chunks:
                yield chunk
            if not chunks and pipe.ended:
                return
            before, little = little, 0 < sum(c.nbytes for c in chunks) < DRAINED_BYTES
            if before and little and not pipe.ended:
                with self._waiting(self.name):
                    await self._sleep(GRAIN_S)

    def reread(self, start: Position | None, end: Position) -> Chunk:
        raise StorageError(f"{self.name}: what came in on standard input cannot be read again")
