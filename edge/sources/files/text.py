"""Files of lines: NDJSON and CSV, plain or compressed."""

from __future__ import annotations

import os
from dataclasses import replace

import google_crc32c

from edge.codecs.decompression import HEAD_BYTES, NO_BYTES, TAIL_BYTES, Digest, OpenFile, extended
from edge.codecs.formats import TextFormat
from edge.codecs.framing import Block, ByteStream
from edge.codecs.line_decoder import LineDecoder
from edge.codecs.line_stream import BOM, split_header, too_long
from edge.records import BLOCK_BYTES, Decoded, InputGone, Rejection, RejectionReason
from edge.sources.files.position import FilePosition
from edge.sources.files.reader import Piece, note_piece
from edgewater.wire import LossReason


class _Limited:
    """The next `size` bytes of a byte stream."""

    def __init__(self, source: ByteStream, size: int) -> None:
        self._source = source
        self._left = size

    def read(self, size: int) -> bytes:
        data = self._source.read(min(size, self._left))
        self._left -= len(data)
        return data


class TextReader:
    """A `FileReader` for lines."""

    def __init__(self, path: str, codec: str | None, text: TextFormat, position: FilePosition | None) -> None:
        self._input = OpenFile(path, codec)
        self._text = text
        self._decoders: dict[tuple[str, ...] | None, LineDecoder] = {}
        if position is None:
            device, inode = self._input.identity
            position = FilePosition(path, inode, self._input.head(), device=device)
        if not position.offset:
            position = replace(position, header=text.header)
        self.position = replace(position, file=path, note=None, others=())
        if not position.ended:
            if position.digest is None:  # a position of release 0.3.0
                self.position = position = replace(self.position, digest=self._digest(position.offset))
            self._input.seek(position.offset)
        self._tail = self._input.tail
        # A block ends at `alike`, because the records before this offset may not count.
        left = position.alike - position.offset
        self._is_limited = left > 0
        limited = _Limited(self._input, left) if self._is_limited else self._input
        self._blocks = text.blocks(limited, digest=self.position.digest)
        self._is_overwritten = False
        self._stamp: tuple[int, int] | None = None
        self._last_reread: tuple[tuple[int, int, int], Decoded, Digest | None] | None = None

    def next(self, final: bool, arrival_ms: int) -> Piece | None:
        if self.position.ended:
            return None
        if self.position.row:
            return self._finish_block()
        while True:
            # final=False comes first, because the last readable byte of a damaged file does not end a line.
            block = self._blocks.next(final=False, now_ms=arrival_ms)
            if block is None and self._is_limited and self._input.damage is None:
                self._is_limited = False
                self.position = replace(self.position, alike=self.position.offset)  # it may be in the middle of a line
                self._input.seek(self.position.offset)
                self._blocks = self._text.blocks(self._input, digest=self.position.digest)
                continue
            if block is None and self._input.damage is not None:
                return self._report_damage()
            if block is None and final:
                block = self._blocks.next(final=True)
            if block is None:
                return None
            rest = self._without_header(block)
            if rest.length:
                return self._piece(rest, arrival_ms)

    @property
    def is_open(self) -> bool:
        return self._blocks.is_open

    def _piece(self, block: Block, arrival_ms: int) -> Piece:
        start = self.position
        if start.head[0] < HEAD_BYTES:  # when the file was opened, it was shorter than HEAD_BYTES
            start = replace(start, head=self._input.head())
        tail = self._tail_after(block.data, block.too_long)
        self.position = start.after_block(block.length, arrival_ms, tail, self._blocks.digest)
        return Piece(start, self.position, self._decode(block, start, arrival_ms), block.length)

    def _tail_after(self, data: bytes, too_long: bool = False) -> tuple[int, int]:
        """Returns `FilePosition.tail` after `data` has been read. The tail is unknown after a line that is too long."""
        self._tail = b"" if too_long else (self._tail + data[-TAIL_BYTES:])[-TAIL_BYTES:]
        return len(self._tail), google_crc32c.value(self._tail)

    def _without_header(self, block: Block) -> Block:
        """Removes the header from the first block of a CSV file, and moves the position after it."""
        if self.position.header is not None or not self._text.needs_header:
            return block
        header, rest = split_header(block, self._text)
        read = block.length - rest.length
        offset, tail = self.position.offset + read, self._tail_after(block.data[:read])
        digest = None if self.position.digest is None else extended(self.position.digest, block.data[:read])
        self.position = replace(self.position, offset=offset, header=header, tail=tail, digest=digest)
        self._decoder(header)
        return rest

    def _finish_block(self) -> Piece:
        """Returns the records of a block that were not returned yet, with the arrival time of the returned records."""
        start = self.position
        rest, digest = self._reread_block(start.offset, start.block, start, start.digest)
        self._last_reread = None
        self._input.seek(start.offset + start.block)
        self._tail = b""
        self.position = start.after_block(start.block, start.arrival_ms, self._tail_after(self._input.tail), digest)
        self._blocks = self._text.blocks(self._input, digest=digest)
        return Piece(start, self.position, Decoded(rest.batch.slice(start.row)), start.block)

    def reread(self, start: FilePosition | None, end: FilePosition) -> Piece:
        begin = start or replace(
            end, offset=0, row=0, block=0, header=self._text.header, note=None, ended=False, digest=NO_BYTES
        )
        if end.note is not None:
            return Piece(begin, end, Decoded(self._text.schema.empty(), (end.note,)), 0)
        offset = end.offset if end.row else begin.offset
        length = end.block if end.row else end.offset - begin.offset
        if not length:
            return Piece(begin, end, Decoded(self._text.schema.empty()), 0)
        decoded, digest = self._reread_block(offset, length, end, end.digest if end.row else begin.digest)
        if not end.row and None not in (digest, end.digest) and digest != end.digest:
            raise InputGone(f"{end.file}: bytes {offset} to {offset + length}, read before, were overwritten")
        rows = slice(begin.row, end.row or None)
        return Piece(begin, end, decoded.part(rows), length)

    def _reread_block(
        self, offset: int, length: int, context: FilePosition, before: Digest | None
    ) -> tuple[Decoded, Digest | None]:
        """Returns the block at `offset`, decoded with the header and the arrival time of `context`, and the digest of
        all bytes before its end.

        The last block is cached, because a paced replay has many positions inside one block.
        """
        key = (offset, length, context.arrival_ms)
        if self._last_reread is None or self._last_reread[0] != key:
            self._input.seek(offset)
            where = f"{context.file}: bytes {offset} to {offset + length}, read before,"
            unchanged = not context.row or self._has_tail(context)
            blocks = self._text.blocks(_Limited(self._input, length), digest=before)
            block = blocks.next(final=True)
            if block is None or block.length != length:
                raise InputGone(f"{where} are gone")
            if not unchanged or not (context.row or self._has_tail(context)):
                raise InputGone(f"{where} were overwritten")
            if offset == 0 and self._text.needs_header:
                block = split_header(block, self._text)[1]
            decoded = self._decode(block, replace(context, offset=offset), context.arrival_ms)
            self._last_reread = key, decoded, blocks.digest
        return self._last_reread[1], self._last_reread[2]

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
        what = "ends before its data is complete" if damage.reason == RejectionReason.TRUNCATED else "is damaged"
        note = Rejection(
            damage.reason,
            1,
            f"{self.position.file}: byte {damage.compressed_offset}",
            f"the compressed file {what} ({damage.message}); the records before that byte are counted, "
            "the records after it cannot be read; expected a complete file",
        )
        piece = note_piece(self.position, note, self._text.schema, ended=True, losses=(LossReason.FILE_DAMAGED,))
        self.position = piece.end
        return piece

    def _has_tail(self, position: FilePosition) -> bool:
        """Returns whether the bytes before the input's offset have the checksum of the position's tail; true if that is
        unknown.
        """
        length, checksum = position.tail
        tail = self._input.tail[-length:] if length else b""
        return len(tail) == length and google_crc32c.value(tail) == checksum

    def contains(self, position: FilePosition, *, any_head: bool = False) -> bool:
        if not any_head and not self._has_head(position):
            return False
        is_file = position.is_at(self._input.identity) and not position.ended and position.offset > BLOCK_BYTES
        if self._input.codec is None or is_file or position.digest is None:
            self._input.seek(position.offset)
            if self._input.offset != position.offset or not self._has_tail(position):
                return False
        return is_file or position.digest is None or self._digest(position.offset) == position.digest

    def _digest(self, offset: int) -> Digest | None:
        """Returns the digest of all bytes before an offset; None if the file is shorter. Reads all of them."""
        self._input.seek(0)
        digest = NO_BYTES
        while self._input.offset < offset and (data := self._input.read(min(BLOCK_BYTES, offset - self._input.offset))):
            digest = extended(digest, data)
        return digest if self._input.offset == offset else None

    def _has_head(self, position: FilePosition) -> bool:
        if self._input.head(position.head[0]) == position.head:
            return True
        return self._input.codec is not None and self._decompressed_head(position) == position.head

    def _decompressed_head(self, position: FilePosition) -> tuple[int, int]:
        self._input.seek(0)
        head = b""
        while len(head) < position.head[0] and (more := self._input.read(position.head[0] - len(head))):
            head += more
        return len(head), google_crc32c.value(head)

    def end(self) -> tuple[int, bytes]:
        self._input.seek_end()
        return self._input.offset, self._input.tail

    def was_overwritten(self) -> bool:
        self._is_overwritten = self._is_overwritten or self._input.was_overwritten() or self._was_rewritten()
        return self._is_overwritten

    def _was_rewritten(self) -> bool:
        """Returns whether the content of a short file has changed, although its size has not."""
        status, before = os.fstat(self._input.fileno()), self._stamp
        self._stamp = status.st_size, status.st_mtime_ns
        if (
            before is None
            or before[0] != self._stamp[0]
            or before[1] == self._stamp[1]
            or self._input.codec is not None
        ):
            return False
        read, digest = self.position.offset, self.position.digest
        is_short = digest is not None and read <= BLOCK_BYTES
        return is_short and extended(NO_BYTES, os.pread(self._input.fileno(), read, 0)) != digest

    def fileno(self) -> int:
        return self._input.fileno()

    def close(self) -> None:
        self._input.close()
