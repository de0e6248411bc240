"""Parquet files: row groups in order, read in batches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import google_crc32c
import pyarrow as pa

from edge.codecs.columnar import check_schema, convert, needed_columns
from edge.codecs.decompression import HEAD_BYTES, NO_BYTES, Digest, extended
from edge.codecs.schema import RecordSchema
from edge.records import BLOCK_BYTES, MAX_CHUNK_ROWS, Decoded, InputGone, Rejection, RejectionReason
from edge.sources.files.position import FilePosition
from edge.sources.files.reader import Piece, note_piece
from edgewater.wire import LossReason


class ParquetReader:
    """A `FileReader` for Parquet. A position counts the rows before it, valid and invalid, from the beginning of the
    file. Its digest is the digest of the whole file.
    """

    def __init__(self, path: str, schema: RecordSchema, position: FilePosition | None) -> None:
        self._schema = schema
        self._file: Any = pa.OSFile(path)
        if position is None:
            head = os.pread(self._file.fileno(), HEAD_BYTES, 0)
            status = os.fstat(self._file.fileno())
            position = FilePosition(
                path, status.st_ino, (len(head), google_crc32c.value(head)), device=status.st_dev, digest=None
            )
        self.position = replace(position, file=path, note=None, others=())
        self._parquet: Any = None
        self._rows: Iterator[pa.RecordBatch] = iter(())
        self._rows_at = -1
        self._last_reread: tuple[tuple[int, int, int], Decoded] | None = None

    def _open(self) -> Any:
        """Returns the open file.

        Raises:
            pa.ArrowInvalid: the file is incomplete.
            InvalidRecord: the file's schema does not match.
        """
        if self._parquet is None:
            import pyarrow.parquet  # a large module, so only edges that read Parquet import it

            parquet = pyarrow.parquet.ParquetFile(self._file)
            check_schema(parquet.schema_arrow, self._schema, self.position.file)
            self._parquet = parquet
        return self._parquet

    @property
    def is_open(self) -> bool:
        return False

    def next(self, final: bool, arrival_ms: int) -> Piece | None:
        start = self.position
        if start.ended:
            return None
        try:
            batch = self._batch_at(start.offset)
        except (pa.ArrowInvalid, OSError) as exc:
            return self._report_damage(str(exc))
        if batch is None:
            return None
        if start.row:
            arrival_ms = start.arrival_ms
        decoded = convert(batch, self._schema, arrival_ms)
        if start.row:
            decoded = Decoded(decoded.batch.slice(start.row))
        digest = start.digest if start.offset and start.digest is not None else self._digest()
        self.position = start.after_block(batch.num_rows, arrival_ms, digest=digest)
        return Piece(start, self.position, decoded, batch.nbytes)

    def _batch_at(self, row: int) -> pa.RecordBatch | None:
        """Returns the rows from `row` to the next boundary; None at the end of the file.

        A boundary is the end of a row group, or every `MAX_CHUNK_ROWS` rows within it.
        """
        metadata = self._open().metadata
        if row >= metadata.num_rows:
            return None
        if row != self._rows_at:
            self._rows, self._rows_at = self._from_row_group(row)
        while True:
            batch = next(self._rows)
            self._rows_at += batch.num_rows
            if self._rows_at > row:
                return batch.slice(row - (self._rows_at - batch.num_rows))

    def _from_row_group(self, row: int) -> tuple[Iterator[pa.RecordBatch], int]:
        metadata = self._parquet.metadata
        begin, group = 0, 0
        while begin + metadata.row_group(group).num_rows <= row:
            begin += metadata.row_group(group).num_rows
            group += 1
        return self._iterate(group), begin

    def _iterate(self, first_group: int) -> Iterator[pa.RecordBatch]:
        for group in range(first_group, self._parquet.metadata.num_row_groups):
            yield from self._parquet.iter_batches(
                MAX_CHUNK_ROWS, row_groups=[group], columns=needed_columns(self._schema), use_threads=False
            )

    def reread(self, start: FilePosition | None, end: FilePosition) -> Piece:
        begin = start or replace(end, offset=0, row=0, block=0, note=None, ended=False)
        if end.note is not None:
            return Piece(begin, end, Decoded(self._schema.empty(), (end.note,)), 0)
        offset = end.offset if end.row else begin.offset
        length = end.block if end.row else end.offset - begin.offset
        decoded = self._reread_block(offset, length, end)
        decoded = decoded.part(slice(begin.row, end.row or None))
        return Piece(begin, end, decoded, decoded.batch.nbytes)

    def _reread_block(self, offset: int, length: int, context: FilePosition) -> Decoded:
        """Returns the `length` rows at `offset`, decoded. The last block is cached, because a paced replay ends chunks
        inside blocks.
        """
        key = (offset, length, context.arrival_ms)
        if self._last_reread is None or self._last_reread[0] != key:
            try:
                batch = self._batch_at(offset)
            except (pa.ArrowInvalid, OSError) as exc:
                raise InputGone(f"{context.file}: rows from {offset} on cannot be read again: {exc}") from exc
            if batch is None or batch.num_rows < length:
                raise InputGone(f"{context.file}: rows {offset} to {offset + length}, read before, are gone")
            self._last_reread = key, convert(batch.slice(0, length), self._schema, context.arrival_ms)
        return self._last_reread[1]

    def _report_damage(self, error: str) -> Piece:
        note = Rejection(
            RejectionReason.CORRUPT,
            1,
            f"{self.position.file}: row {self.position.offset}",
            f"not a complete Parquet file ({error}); earlier rows are counted, the rows from here on cannot be read",
        )
        piece = note_piece(self.position, note, self._schema, ended=True, losses=(LossReason.FILE_DAMAGED,))
        self.position = piece.end
        return piece

    def contains(self, position: FilePosition, *, any_head: bool = False) -> bool:
        if position.offset and position.digest is not None:
            return position.digest == self._digest()
        head, status = os.pread(self._file.fileno(), position.head[0], 0), os.fstat(self._file.fileno())
        is_same = (len(head), google_crc32c.value(head)) == position.head
        return is_same and position.is_at((status.st_dev, status.st_ino)) and position.size in (0, self._file.size())

    def _digest(self) -> Digest:
        """Returns the digest of the whole file. Reads all of it."""
        digest, descriptor = NO_BYTES, self._file.fileno()
        for at in range(0, os.fstat(descriptor).st_size, BLOCK_BYTES):
            digest = extended(digest, os.pread(descriptor, BLOCK_BYTES, at))
        return digest

    def end(self) -> tuple[int, bytes]:
        return int(self._file.size()), b""

    def was_overwritten(self) -> bool:
        return False

    def fileno(self) -> int:
        return int(self._file.fileno())

    def close(self) -> None:
        self._file.close()
