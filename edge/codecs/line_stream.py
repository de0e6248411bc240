"""Lines that arrive once, from a pipe or in the body of a request."""

from __future__ import annotations

from edge.codecs.csv_codec import read_header
from edge.codecs.formats import TextFormat
from edge.codecs.framing import Block, BlockReader, Bytes
from edge.codecs.line_decoder import LineDecoder
from edge.codecs.schema import RecordSchema
from edge.records import BLOCK_BYTES, Decoded, Reason, Rejection, shorten

BOM = b"\xef\xbb\xbf"


def too_long(block: Block, schema: RecordSchema) -> Decoded:
    """What becomes of a line that is longer than a block."""
    message = f"a line of {block.length} bytes; expected at most {BLOCK_BYTES}"
    return Decoded(schema.empty(), (Rejection(Reason.TOO_LONG, 1, shorten(block.data), message),))


def cut_header(block: Block, text: TextFormat) -> tuple[tuple[str, ...], Block]:
    """The names in the first line of a block, and the lines below it."""
    line, newline, rest = block.data.partition(b"\n")
    below = Block(rest, block.length - len(line) - len(newline))
    return read_header(line, text.dialect), below


class LineStream:
    """Decodes the lines of a byte stream from its beginning.

    Args:
        where: what is read, for messages.
    """

    def __init__(self, source: Bytes, text: TextFormat, where: str) -> None:
        self._text = text
        self._where = where
        self._blocks = BlockReader(source)
        self._at_start = True
        self._decoder: LineDecoder | None = None if text.needs_header else text.decoder(text.header, where)

    def next(self, final: bool, arrival_ms: int) -> tuple[Decoded, int] | None:
        """The records of the next block and its bytes; None: there is none at the moment.

        Args:
            final: the stream has ended, so the last line is whole without its newline.

        Raises:
            InvalidRecord: the header lacks a declared column.
        """
        block = self._blocks.next(final)
        if block is None:
            return None
        nbytes = block.length
        if self._at_start:
            self._at_start = False
            block = Block(block.data.removeprefix(BOM), block.length, block.too_long)
        if self._decoder is None:
            header, block = cut_header(block, self._text)
            self._decoder = self._text.decoder(header, self._where)
        if block.too_long:
            return too_long(block, self._text.schema), nbytes
        return self._decoder.decode(block.data, arrival_ms), nbytes
