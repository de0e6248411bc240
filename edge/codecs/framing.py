"""Splits a stream of bytes into blocks of complete lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from edge.codecs.decompression import Digest, extended
from edge.records import BLOCK_BYTES


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


class BlockReader:
    """Reads blocks in order, and buffers at most the bytes of two blocks.

    Attributes:
        digest: the digest of all bytes before the next block; None if it is not known.
    """

    def __init__(self, source: ByteStream, block_bytes: int = BLOCK_BYTES, *, digest: Digest | None = None) -> None:
        self.digest = digest
        self._source = source
        self._block_bytes = block_bytes
        self._held = b""
        self._skipped = 0
        self._skipped_start = b""

    def next(self, final: bool) -> Block | None:
        """Returns the next block; None if there is none at the moment.

        Args:
            final: whether the stream has ended, so that the last line may lack its newline.
        """
        if self._skipped:
            return self._skip(final)
        while len(self._held) < self._block_bytes:
            more = self._source.read(self._block_bytes - len(self._held))
            if not more:
                return self._rest(final)
            self._held += more
        cut = self._held.rfind(b"\n") + 1
        if cut == 0:
            self._digest(self._held)
            self._skipped, self._skipped_start, self._held = len(self._held), self._held[:1024], b""
            return self._skip(final)
        return self._take(cut)

    def _take(self, length: int) -> Block:
        data, self._held = self._held[:length], self._held[length:]
        self._digest(data)
        return Block(data, length)

    def _digest(self, data: bytes) -> None:
        if self.digest is not None:
            self.digest = extended(self.digest, data)

    def _rest(self, final: bool) -> Block | None:
        cut = len(self._held) if final else self._held.rfind(b"\n") + 1
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
