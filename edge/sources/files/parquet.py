"""Parquet files: row groups in order, in batches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import google_crc32c
import pyarrow as pa

from edge.codecs.columnar import check_schema, convert, needed_columns
from edge.codecs.decompression import HEAD_BYTES
from edge.codecs.schema import RecordSchema
from edge.records import MAX_CHUNK_ROWS, Decoded, Reason, Rejection
from edge.sources.files.position import FilePosition
from edge.sources.files.reader import Piece, statement
from edgewater.errors import StorageError


class ParquetReader:
    """A `FileReader` for Parquet. Positions count rows, good and bad, from the file's beginning."""

    def __init__(self, path: str, schema: RecordSchema, position: FilePosition | None) -> None:
        self._schema = schema
        self._file: Any = pa.OSFile(path)
        if position is None:
            head = os.pread(self._file.fileno(), HEAD_BYTES, 0)
            inode = os.fstat(self._file.fileno()).st_ino
            position = FilePosition(path, inode, (len(head), google_crc32c.value(head)))
        self.position = replace(position, file=path, note=None, others=())
        self._parquet: Any = None
        self._rows: Iterator[pa.RecordBatch] = iter(())
        self._rows_at = -1
        self._kept: tuple[tuple[int, int, int], Decoded] | None = None

    def _open(self) -> Any:
        """The open file; raises pa.ArrowInvalid unless it is whole, InvalidRecord if it does not fit."""
        if self._parquet is None:
            import pyarrow.parquet  # large; only edges that read Parquet pay for it

            parquet = pyarrow.parquet.ParquetFile(self._file)
            check_schema(parquet.schema_arrow, self._schema, self.position.file)
            self._parquet = parquet
        return self._parquet

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
        judged_at = start.arrival_ms if start.row else arrival_ms
        decoded = convert(batch, self._schema, judged_at)
        if start.row:
            decoded = Decoded(decoded.batch.slice(start.row))
        self.position = start.behind_block(batch.num_rows, judged_at)
        return Piece(start, self.position, decoded, batch.nbytes)

    def _batch_at(self, row: int) -> pa.RecordBatch | None:
        """The rows from `row` to the next border: of a row group, or of `MAX_CHUNK_ROWS` in it."""
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

    def again(self, start: FilePosition | None, end: FilePosition) -> Piece:
        begin = start or replace(end, offset=0, row=0, block=0, note=None, ended=False)
        if end.note is not None:
            return Piece(begin, end, Decoded(self._schema.empty(), (end.note,)), 0)
        offset = end.offset if end.row else begin.offset
        length = end.block if end.row else end.offset - begin.offset
        decoded = self._again(offset, length, end)
        batch = decoded.batch[begin.row : end.row or None]
        return Piece(begin, end, Decoded(batch, () if begin.row else decoded.rejected), batch.nbytes)

    def _again(self, offset: int, length: int, judged: FilePosition) -> Decoded:
        """The rows at `offset`; the last are kept, as a paced replay leaves many positions inside them."""
        key = (offset, length, judged.arrival_ms)
        if self._kept is None or self._kept[0] != key:
            try:
                batch = self._batch_at(offset)
            except (pa.ArrowInvalid, OSError) as exc:
                raise StorageError(f"{judged.file}: rows from {offset} on cannot be read again: {exc}") from exc
            if batch is None or batch.num_rows < length:
                raise StorageError(f"{judged.file}: rows {offset} to {offset + length} have been read and are gone")
            self._kept = key, convert(batch.slice(0, length), self._schema, judged.arrival_ms)
        return self._kept[1]

    def _report_damage(self, error: str) -> Piece:
        note = Rejection(
            Reason.CORRUPT,
            1,
            f"{self.position.file}: row {self.position.offset}",
            f"not a whole Parquet file ({error}); the rows before are counted, the others cannot be read",
        )
        piece = statement(self.position, note, self._schema, ended=True)
        self.position = piece.end
        return piece

    def has_shrunk(self) -> bool:
        return False

    def close(self) -> None:
        self._file.close()
