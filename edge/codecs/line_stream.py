"""Decodes lines from a byte stream that is read once, such as a pipe or the body of a request."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from edge.codecs.csv_codec import read_header
from edge.codecs.formats import TextFormat
from edge.codecs.framing import Block, ByteStream
from edge.codecs.line_decoder import LineDecoder, unlimited
from edge.codecs.schema import RecordSchema
from edge.records import BLOCK_BYTES, Decoded, Rejection, RejectionReason, Rejections, truncate_example

BOM = b"\xef\xbb\xbf"


def too_long(block: Block, schema: RecordSchema) -> Decoded:
    """Returns the rejection of a line that is longer than a block."""
    message = f"a line of {block.length} bytes; expected at most {BLOCK_BYTES}"
    return Decoded(schema.empty(), (Rejection(RejectionReason.TOO_LONG, 1, truncate_example(block.data), message),))


def split_header(block: Block, text: TextFormat) -> tuple[tuple[str, ...], Block]:
    """Returns the column names in the first line of a block, and a block of the other lines."""
    line, newline, rest = block.data.partition(b"\n")
    below = Block(rest, block.length - len(line) - len(newline))
    return read_header(line, text.dialect), below


class LineStream:
    """Decodes the lines of a byte stream from its beginning.

    Args:
        where: name of the input, for messages.
        check: as in `LineDecoder`.
    """

    def __init__(self, source: ByteStream, text: TextFormat, where: str, check: Callable[[], None] = unlimited) -> None:
        self._text = text
        self._where = where
        self._check = check
        self._blocks = text.blocks(source)
        self._at_start = True
        self._decoder: LineDecoder | None = None if text.needs_header else text.decoder(text.header, where, check)

    @property
    def is_open(self) -> bool:
        """Whether there are lines that wait for the end of their record."""
        return self._blocks.is_open

    def next(self, final: bool, arrival_ms: int) -> tuple[Decoded, int] | None:
        """Returns the records of the next block and its size in bytes; None if there is none at the moment.

        Args:
            final: whether the stream has ended, so that the last line may lack its newline.
            arrival_ms: the time against which event times are validated.

        Raises:
            InvalidRecord: the header lacks a declared column.
        """
        block = self._blocks.next(final, arrival_ms)
        if block is None:
            return None
        nbytes = block.length
        block, decoder = self._without_header(block)
        if block.too_long:
            return too_long(block, self._text.schema), nbytes
        return decoder.decode(block.data, arrival_ms), nbytes

    def table(self, rejections: Rejections) -> pa.Table | None:
        """Returns the next records, without an event time, of a stream that has ended; None after its end.

        Raises:
            InvalidRecord: the header lacks a declared column.
        """
        block = self._blocks.next(True)
        if block is None:
            return None
        block, decoder = self._without_header(block)
        if block.too_long:
            rejections.extend(too_long(block, self._text.schema).rejected)
        return decoder.parse(b"" if block.too_long else block.data, rejections)

    def _without_header(self, block: Block) -> tuple[Block, LineDecoder]:
        if self._at_start:
            self._at_start = False
            block = Block(block.data.removeprefix(BOM), block.length, block.too_long)
        if self._decoder is None:
            header, block = split_header(block, self._text)
            self._decoder = self._text.decoder(header, self._where, self._check)
        return block, self._decoder
