"""Standard input: lines from another program, until it ends.

Standard input cannot be read again, so a record counts at most once. If the process ends, records in the pipe and
records that are not synced yet are lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
from collections.abc import AsyncIterator

from edge.codecs.formats import TextFormat
from edge.codecs.line_stream import LineStream
from edge.records import COALESCE_S, SHORT_READ_BYTES, Chunk, Position, UnrepeatableSource, split_rows
from edge.source_kinds import SourceContext
from edgewater.base.errors import InvalidRecord
from edgewater.base.streams import Delivery

WAIT_S = 0.25  # limit: how late the end of the process is noticed


class _Pipe:
    """A non-blocking `ByteStream` over a file descriptor: a pipe, a terminal or a file."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._poll = select.poll()  # unlike select.select, it accepts descriptors of any number
        self._poll.register(fd, select.POLLIN)
        self.ended = False

    def wait(self, timeout_s: float) -> bool:
        return bool(self._poll.poll(timeout_s * 1000))

    def read(self, size: int) -> bytes:
        if self.ended or not self.wait(0):
            return b""
        data = os.read(self._fd, size)
        self.ended = not data
        return data


class StdinSource(UnrepeatableSource):
    """A `Source` that reads lines from a file descriptor.

    A read from a pipe can block forever, and a blocked thread cannot be cancelled. So the thread never waits longer
    than `WAIT_S`. Between consecutive short reads, it sleeps, so that their input is decoded together.
    """

    gone = "standard input cannot be read again"
    delivery = Delivery.AT_MOST_ONCE

    def __init__(self, name: str, text: TextFormat, context: SourceContext, fd: int = 0) -> None:
        self.name, self.stream = name, context.stream
        self._text, self._context, self._fd = text, context, fd
        self._fault: InvalidRecord | None = None

    async def chunks(self, position: Position | None) -> AsyncIterator[Chunk]:
        if self._fault is not None:  # the header cannot be read again, so the lines after it cannot be read, either
            raise self._fault.with_traceback(None)
        pipe = _Pipe(self._fd)
        lines = LineStream(pipe, self._text, self.name)

        def read_chunks() -> list[Chunk]:
            block = lines.next(False, self._context.now_ms())
            if block is None and pipe.ended:
                block = lines.next(True, self._context.now_ms())
            if block is None:
                return []
            decoded, nbytes = block
            return split_rows(
                Chunk(self.name, decoded.batch, None, None, decoded.rejected, nbytes, guessed=decoded.guessed)
            )

        short, waited_s = False, COALESCE_S
        while True:
            if not pipe.wait(0):
                with self._context.idle(self.name) if not lines.is_open else contextlib.nullcontext():
                    short &= await asyncio.to_thread(pipe.wait, WAIT_S)
            try:
                chunks = await asyncio.to_thread(read_chunks)
            except InvalidRecord as exc:
                self._fault = exc
                raise
            for chunk in chunks:
                yield chunk
            if not chunks and pipe.ended:
                return
            nbytes = sum(chunk.nbytes for chunk in chunks)
            was_short, short = short, 0 < nbytes < SHORT_READ_BYTES
            if was_short and short and not pipe.ended:
                # A full pipe would stop the other program, so it is at most half full after the wait.
                most_s = waited_s * SHORT_READ_BYTES / (2 * nbytes)
                waited_s = max(min(self._context.coalesce_s(self.stream, self.name), most_s), COALESCE_S)
                await self._context.wait(self.name, waited_s)
