"""Adds columns of a file to the records of a stream, by the value of a key column (a *lookup*).

The journal has the joined records. So a record keeps its added values after a restart, even if the file has changed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from edge.codecs.columnar import is_text
from edge.codecs.csv_codec import CsvDialect
from edge.codecs.event_time import cast_or_null
from edge.codecs.formats import TextFormat
from edge.codecs.line_stream import LineStream
from edge.codecs.messages import ColumnsSchema
from edge.codecs.schema import EventTime
from edge.config import LookupConfig, StreamConfig
from edge.records import Chunk, Position, Rejection, RejectionReason, Rejections, Source
from edgewater.base.errors import InvalidConfig, InvalidRecord, StorageError
from edgewater.base.streams import COLUMN_TYPES, TIME_COLUMN, type_name
from edgewater.model import arithmetic
from edgewater.model.lookups import LookupTable
from edgewater.runtime.configuration import FileWatch

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 256 << 20  # limit: memory of a table
MAX_ROWS = 5_000_000  # limit: memory of a table
RETRY_S = 5.0  # limit: attempts to load a file
"""The time, in seconds, between two looks at a file that was never loaded, or is being changed."""


class FileTable(LookupTable):
    """The rows of a lookup file, by key.

    Args:
        keys, columns: as in `LookupTable`.
        rejected: the rows of the file that are left out.
    """

    def __init__(self, keys: pa.Array, columns: Mapping[str, pa.Array], rejected: tuple[Rejection, ...] = ()) -> None:
        super().__init__(keys, columns)
        self.rejected = rejected


def load_table(config: LookupConfig, key_type: pa.DataType) -> FileTable:
    """Reads a lookup file. Blocks. Leaves out the rows that cannot be read, and the rows without a key of their own.

    Args:
        key_type: the type of the stream's key column.

    Raises:
        InvalidConfig: the file cannot be read, lacks a column, or has no row that can be used.
    """
    types = {config.file_key: key_type, **{name: COLUMN_TYPES[kind] for name, kind in config.columns.items()}}
    rejections = Rejections()
    try:
        if (size := Path(config.file).stat().st_size) > MAX_FILE_BYTES:
            raise InvalidConfig(
                "file", config.file, f"a file of at most {MAX_FILE_BYTES >> 20} MiB", f"it has {size} bytes"
            )
        table = _read(config, types, rejections)
        if table.num_rows > MAX_ROWS:
            raise InvalidConfig("file", config.file, f"at most {MAX_ROWS} rows", f"it has {table.num_rows}")
        table = _with_own_keys(table, config.file_key, rejections)
        if rejections.count and not table.num_rows:
            raise ValueError(f"no row can be used: {rejections.as_tuple()[0].message}")
        columns = {name: table.column(name).combine_chunks() for name in types}
        return FileTable(columns.pop(config.file_key), columns, rejections.as_tuple())
    except (OSError, pa.ArrowException, ValueError, InvalidRecord) as exc:
        reason = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
        raise InvalidConfig("file", config.file, f"a {config.format} file with {_described(types)}", reason) from exc


def _described(types: Mapping[str, pa.DataType]) -> str:
    return "the columns " + ", ".join(f"{name} ({type_name(kind)})" for name, kind in types.items())


def _read(config: LookupConfig, types: Mapping[str, pa.DataType], rejections: Rejections) -> pa.Table:
    """Returns the rows whose values have the right types. An empty text in CSV is null."""
    if config.format == "parquet":
        import pyarrow.parquet

        return _cast(pyarrow.parquet.read_table(config.file, columns=list(types), partitioning=None), types, rejections)
    text = TextFormat(config.format, ColumnsSchema(types, EventTime("")), CsvDialect(nulls=("",)))
    with Path(config.file).open("rb") as file:
        lines = LineStream(file, text, config.file)
        tables = list(iter(lambda: lines.table(rejections), None))
    if not tables:
        raise ValueError("it is empty")
    return pa.concat_tables(tables)


def _cast(table: pa.Table, types: Mapping[str, pa.DataType], rejections: Rejections) -> pa.Table:
    columns, keep = {}, np.ones(table.num_rows, np.bool_)
    for name, kind in types.items():
        given = table.column(name).combine_chunks()
        columns[name] = arithmetic.cast(given, kind) if is_text(given.type) else cast_or_null(given, kind)
        bad = pc.and_(given.is_valid(), columns[name].is_null()).to_numpy(zero_copy_only=False)
        message = f"{name}: not a value of the type {type_name(kind)}"
        rejections.add(RejectionReason.WRONG_TYPE, "", message, int((bad & keep).sum()))
        keep &= ~bad
    return pa.table(columns).filter(pa.array(keep))


def _with_own_keys(table: pa.Table, key: str, rejections: Rejections) -> pa.Table:
    """Returns the rows with a key that no other row has. It is not known which of two rows with one key is right."""
    keys = table.column(key).combine_chunks().dictionary_encode()
    codes = keys.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    counts = np.append(np.bincount(codes[codes >= 0], minlength=len(keys.dictionary)), 0)
    for bad, message in ((codes < 0, "no key"), (counts[codes] > 1, "a key that several rows have")):
        example = str(keys[int(np.argmax(bad))]) if bad.any() else ""
        rejections.add(RejectionReason.MALFORMED, example, f"{message}; expected a key of its own", int(bad.sum()))
    return table.filter(pa.array(counts[codes] == 1))


class Lookup:
    """One lookup of a stream, with the loaded version of its file.

    Attributes:
        failure: why the newest version of the file could not be loaded; None if it is loaded.
        unmatched: the number of records so far whose key was not null and was in no row.
        loaded_ms: wall time when the loaded version was read; None if no version is loaded yet.
    """

    def __init__(self, stream: str, config: LookupConfig, key_type: pa.DataType, now_ms: Callable[[], int]) -> None:
        self.stream, self.config = stream, config
        self.failure: str | None = None
        self.unmatched = 0
        self.loaded_ms: int | None = None
        self._key_type, self._now_ms = key_type, now_ms
        self._table: FileTable | None = None
        self._watch = FileWatch(Path(config.file))

    @property
    def name(self) -> str:
        return f"{self.stream}:{self.config.file}"

    @property
    def rows(self) -> int:
        return 0 if self._table is None else len(self._table)

    @property
    def rejected_rows(self) -> int:
        """The number of rows of the loaded version that are left out."""
        return 0 if self._table is None else sum(each.count for each in self._table.rejected)

    def refresh(self) -> bool:
        """Loads the file if it has changed and is complete. If loading fails, the loaded version stays in use. Blocks.

        Returns:
            Whether the file is being changed, so that it should be looked at again soon.
        """
        is_missing = self._table is None or self.failure is not None
        try:
            table = self._watch.read(lambda: load_table(self.config, self._key_type), again=is_missing)
        except InvalidConfig as exc:
            message = str(exc)
            if message != self.failure:
                kept = "no version is loaded" if self._table is None else "the version before stays in use"
                log.error("stream %s: lookup %s: %s; %s", self.stream, self.config.file, message, kept)
            self.failure = message
            return False
        if table is None:
            return not self._watch.is_settled
        for each in table.rejected:
            what = f"{each.reason}: {each.message}, such as {each.example!r}"
            log.warning("stream %s: lookup %s: %d rows left out, %s", self.stream, self.config.file, each.count, what)
        if self.loaded_ms is not None:
            log.info("stream %s: lookup %s: a new version with %d rows", self.stream, self.config.file, len(table))
        self._table, self.failure, self.loaded_ms = table, None, self._now_ms()
        return False

    def columns_for(self, keys: pa.Array) -> dict[str, pa.Array]:
        """Returns the columns to add for the keys of some records. Raises StorageError if no version is loaded."""
        table = self._table
        if table is None:
            raise StorageError(f"lookup {self.config.file}: {self.failure or 'not loaded yet'}")
        rows = table.rows_of(keys)
        self.unmatched += int(rows.null_count - keys.null_count)
        return table.take(rows)


class StreamLookups:
    """The lookups of a stream in the order of the configuration. The key of a lookup may be a column of an earlier
    lookup.
    """

    def __init__(self, lookups: Sequence[Lookup], columns: Sequence[str]) -> None:
        self.lookups = tuple(lookups)
        self._columns = tuple(columns)

    def join(self, batch: pa.RecordBatch, *, needs_all: bool = True) -> pa.RecordBatch:
        """Returns the records with the added columns; null where no row has the key.

        Args:
            needs_all: raise StorageError if a file has never been loaded. Otherwise its columns are null.
        """
        arrays = {name: batch.column(name) for name in batch.schema.names}
        for lookup in self.lookups:
            if needs_all or lookup.loaded_ms is not None:
                arrays.update(lookup.columns_for(arrays[lookup.config.stream_key]))
            else:
                types = {name: COLUMN_TYPES[kind] for name, kind in lookup.config.columns.items()}
                arrays |= {name: pa.nulls(batch.num_rows, kind) for name, kind in types.items()}
        return pa.RecordBatch.from_pydict({name: arrays[name] for name in (*self._columns, TIME_COLUMN)})

    def joined(self, chunk: Chunk) -> Chunk:
        """Returns a chunk with joined records, which the journal stores. Raises StorageError if a file has never been
        loaded.
        """
        return replace(chunk, batch=self.join(chunk.batch), keep=chunk.keep or chunk.end is not None)

    async def run(self) -> None:
        """Loads changed files again, until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for lookup in self.lookups:
                tasks.create_task(self._refresh(lookup))

    async def _refresh(self, lookup: Lookup) -> None:
        refresh_s, is_changing = lookup.config.refresh_ms / 1000, False
        while True:
            is_soon = is_changing or lookup.loaded_ms is None
            await asyncio.sleep(min(refresh_s, RETRY_S) if is_soon else refresh_s)
            is_changing = await asyncio.to_thread(lookup.refresh)


def open_lookups(name: str, stream: StreamConfig, now_ms: Callable[[], int]) -> StreamLookups:
    """Returns the lookups of a stream, and tries to load their files. Blocks."""
    types = stream.stream_columns
    lookups = [Lookup(name, config, types[config.stream_key], now_ms) for config in stream.lookups]
    for lookup in lookups:
        lookup.refresh()
    return StreamLookups(lookups, list(types))


class JoinedSource:
    """A source that adds the columns of lookups to the records of another source. It passes everything else on
    unchanged.
    """

    def __init__(self, source: Source, lookups: StreamLookups) -> None:
        self._source, self._lookups = source, lookups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    async def chunks(self, position: Position | None) -> AsyncIterator[Chunk]:
        async for chunk in self._source.chunks(position):
            opened = tuple(joined(source, self._lookups) for source in chunk.opens)
            yield replace(self._lookups.joined(chunk), opens=opened)

    async def backfill(self, position: Position | None, until: Position, since_ms: int) -> AsyncGenerator[Chunk]:
        async for chunk in self._source.backfill(position, until, since_ms):
            yield replace(chunk, batch=self._lookups.join(chunk.batch))

    def reread(self, start: Position | None, end: Position) -> Chunk:
        chunk = self._source.reread(start, end)
        return replace(chunk, batch=self._lookups.join(chunk.batch))


def joined(source: Source, lookups: StreamLookups | None) -> Source:
    """Returns a source whose records have the columns of the lookups; the source itself if `lookups` is None."""
    return source if lookups is None else cast(Source, JoinedSource(source, lookups))
