"""Files of lines: NDJSON and CSV, plain or compressed."""

from __future__ import annotations

from dataclasses import replace

from edge.codecs.decompression import HEAD_BYTES, Input
from edge.codecs.formats import TextFormat
from edge.codecs.framing import Block, BlockReader, Bytes
from edge.codecs.line_decoder import LineDecoder
from edge.codecs.line_stream import BOM, cut_header, too_long
from edge.records import Decoded, Reason, Rejection
from edge.sources.files.position import FilePosition
from edge.sources.files.reader import Piece, statement
from edgewater.errors import StorageError


class _Limited:
    """The next `size` bytes of a source."""

    def __init__(self, source: Bytes, size: int) -> None:
        self._source = source
        self._left = size

    def read(self, size: int) -> bytes:
        data = self._source.read(min(size, self._left))
        self._left -= len(data)
        return data


class TextReader:
    """A `FileReader` for lines."""

    def __init__(self, path: str, codec: str | None, text: TextFormat, position: FilePosition | None) -> None:
        self._input = Input(path, codec)
        self._text = text
        self._decoders: dict[tuple[str, ...] | None, LineDecoder] = {}
        if position is None:
            position = FilePosition(path, self._input.inode, self._input.head(), header=text.header)
        self.position = replace(position, file=path, note=None, others=())
        if not position.ended:
            self._input.seek(position.offset)
        self._blocks = BlockReader(self._input)
        self._kept: tuple[tuple[int, int, int], Decoded] | None = None

    def next(self, final: bool, arrival_ms: int) -> Piece | None:
        if self.position.ended:
            return None
        if self.position.row:
            return self._finish_block()
        while True:
            # Not final at first: behind damage, the end of what can be read is not the end of a line.
            block = self._blocks.next(final=False)
            if block is None and self._input.damage is not None:
                return self._report_damage()
            if block is None and final:
                block = self._blocks.next(final=True)
            if block is None:
                return None
            block = self._without_header(block)
            if block.length:
                return self._piece(block, arrival_ms)

    def _piece(self, block: Block, arrival_ms: int) -> Piece:
        start = self.position
        if start.head[0] < HEAD_BYTES:  # it had been shorter when it was opened
            start = replace(start, head=self._input.head())
        self.position = start.behind_block(block.length, arrival_ms)
        return Piece(start, self.position, self._decode(block, start, arrival_ms), block.length)

    def _without_header(self, block: Block) -> Block:
        """Takes the header off the first block of a CSV file, and moves the position behind it."""
        if self.position.header is not None or not self._text.needs_header:
            return block
        header, rest = cut_header(block, self._text)
        offset = self.position.offset + block.length - rest.length
        self.position = replace(self.position, offset=offset, header=header)
        self._decoder(header)
        return rest

    def _finish_block(self) -> Piece:
        """The rest of a block that was left midway: the same bytes, judged at the same time."""
        start = self.position
        rest = self._again(start.offset, start.block, start)
        self._kept = None
        self.position = start.behind_block(start.block, start.arrival_ms)
        self._input.seek(self.position.offset)
        self._blocks = BlockReader(self._input)
        return Piece(start, self.position, Decoded(rest.batch.slice(start.row)), start.block)

    def again(self, start: FilePosition | None, end: FilePosition) -> Piece:
        begin = start or replace(end, offset=0, row=0, block=0, header=self._text.header, note=None, ended=False)
        if end.note is not None:
            return Piece(begin, end, Decoded(self._text.schema.empty(), (end.note,)), 0)
        offset = end.offset if end.row else begin.offset
        length = end.block if end.row else end.offset - begin.offset
        decoded = self._again(offset, length, end)
        taken = slice(begin.row, end.row or None)
        rejected = () if begin.row else decoded.rejected
        return Piece(begin, end, Decoded(decoded.batch[taken], rejected), length)

    def _again(self, offset: int, length: int, judged: FilePosition) -> Decoded:
        """The block at `offset`, with the header and the arrival time of `judged`.

        The last one is kept: a paced replay leaves many positions inside one block.
        """
        key = (offset, length, judged.arrival_ms)
        if self._kept is None or self._kept[0] != key:
            self._input.seek(offset)
            block = BlockReader(_Limited(self._input, length)).next(final=True)
            if block is None or block.length != length:
                raise StorageError(f"{judged.file}: bytes {offset} to {offset + length} have been read and are gone")
            if offset == 0 and self._text.needs_header:
                block = cut_header(block, self._text)[1]
            self._kept = key, self._decode(block, replace(judged, offset=offset), judged.arrival_ms)
        return self._kept[1]

    def _decode(self, block: Block, position: FilePosition, arrival_ms: int) -> Decoded:
        if block.too_long:
            return too_long(block, self._text.schema)
        data = block.data.removeprefix(BOM) if position.offset == 0 else block.data
        return self._decoder(position.header).decode(data, arrival_ms)

    def _decoder(self, header: tuple[str, ...] | None) -> LineDecoder:
        if header not in self._decoders:
            self._decoders[header] = self._text.decoder(header, self.position.file)
        return self._decoders[header]

    def _report_damage(self) -> Piece:
        damage = self._input.damage
        assert damage is not None
        what = "ends before its data is complete" if damage.reason == Reason.TRUNCATED else "is damaged"
        note = Rejection(
            damage.reason,
            1,
            f"{self.position.file}: byte {damage.compressed_offset}",
            f"the compressed file {what} ({damage.message}); the records before that byte are counted, "
            "those behind it cannot be read; expected a whole file",
        )
        piece = statement(self.position, note, self._text.schema, ended=True)
        self.position = piece.end
        return piece

    def has_shrunk(self) -> bool:
        return self._input.codec is None and self._input.size < self._input.offset

    def close(self) -> None:
        self._input.close()
