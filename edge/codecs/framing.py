"""Splits a stream of bytes into blocks of complete records: lines, or records of CSV with line breaks in quotes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from edge.codecs.decompression import Digest, extended
from edge.records import BLOCK_BYTES

OPEN_RECORD_MS = 60_000  # limit: the wait for the end of a record
"""A record with an open quote waits this long for its end. Then its lines are a block. A program that writes through a
buffer may write the end much later.
"""


class ByteStream(Protocol):
    """The input of a `BlockReader`: a file, a pipe or a body."""

    def read(self, size: int) -> bytes:
        """Returns at most `size` bytes; b"" if there are no more at the moment."""


@dataclass(frozen=True, slots=True)
class Block:
    """Complete lines, or one line that is longer than a block.

    Attributes:
        data: the lines; if `too_long`, the beginning of the line.
        length: the number of bytes of the stream that the block covers.
        too_long: whether the block is one line that exceeds the size limit.
    """

    data: bytes
    length: int
    too_long: bool = False


def lines_end(data: bytes, is_full: bool = False) -> int:
    """Returns the offset after the last line; 0 if there is no whole line."""
    return data.rfind(b"\n") + 1


class BlockReader:
    """Reads blocks in order, and buffers at most the bytes of two blocks.

    Args:
        records_end: returns the offset after the last record in some bytes; 0 if there is no whole record. The second
            argument says whether no more bytes fit.

    Attributes:
        digest: the digest of all bytes before the next block; None if it is not known.
    """

    def __init__(
        self,
        source: ByteStream,
        records_end: Callable[[bytes, bool], int] = lines_end,
        block_bytes: int = BLOCK_BYTES,
        *,
        digest: Digest | None = None,
    ) -> None:
        self.digest = digest
        self._source = source
        self._records_end = records_end
        self._block_bytes = block_bytes
        self._held = b""
        self._skipped = 0
        self._skipped_start = b""
        self._open_since_ms: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether there are lines that wait for the end of their record."""
        return self._open_since_ms is not None

    def next(self, final: bool, now_ms: int = 0) -> Block | None:
        """Returns the next block; None if there is none at the moment.

        Args:
            final: whether the stream has ended, so that the last line may lack its newline.
            now_ms: the wall time.
        """
        if self._skipped:
            return self._skip(final)
        while len(self._held) < self._block_bytes:
            more = self._source.read(self._block_bytes - len(self._held))
            if not more:
                return self._rest(final, now_ms)
            self._held += more
        cut = self._records_end(self._held, True)
        if cut == 0:
            self._digest(self._held)
            self._skipped, self._skipped_start, self._held = len(self._held), self._held[:1024], b""
            return self._skip(final)
        return self._take(cut)

    def _take(self, length: int) -> Block:
        data, self._held, self._open_since_ms = self._held[:length], self._held[length:], None
        self._digest(data)
        return Block(data, length)

    def _digest(self, data: bytes) -> None:
        if self.digest is not None:
            self.digest = extended(self.digest, data)

    def _rest(self, final: bool, now_ms: int) -> Block | None:
        cut = len(self._held) if final else self._records_end(self._held, False)
        if not cut and (lines := lines_end(self._held)):
            self._open_since_ms = now_ms if self._open_since_ms is None else self._open_since_ms
            cut = lines if now_ms - self._open_since_ms >= OPEN_RECORD_MS else 0
        return self._take(cut) if cut else None

    def _skip(self, final: bool) -> Block | None:
        """Skips the rest of a line that is too long, without buffering it."""
        while True:
            more = self._source.read(self._block_bytes)
            if not more and not final:
                return None
            end = more.find(b"\n") + 1
            self._skipped += end or len(more)
            self._digest(more[: end or len(more)])
            if end or not more:
                self._held = more[end:] if end else b""
                block = Block(self._skipped_start, self._skipped, too_long=True)
                self._skipped, self._skipped_start = 0, b""
                return block
