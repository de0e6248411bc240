"""Rows of an SQLite table as records: an example of a source that a package provides.

Programs insert rows; the source reads them in the order of their row ids. It never changes the table.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from typing import Any

import pyarrow as pa
from pydantic import Field

from edge.codecs import convert
from edge.config import Model
from edge.records import Chunk, Position, Source
from edge.source_kinds import KeptSource, SourceContext
from edgewater.base.streams import Delivery

ROWS = 5_000
POLL_S = 0.5


class SqliteConfig(Model):
    """The options below ``sqlite:``."""

    path: str = Field(min_length=1)
    table: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")


class SqliteSource(KeptSource):
    """Reads the rows of one table. The position is the id of the last row that was read."""

    delivery = Delivery.EXACTLY_ONCE

    def __init__(self, options: SqliteConfig, context: SourceContext) -> None:
        self.stream = context.stream
        self.name = f"{context.stream}:sqlite:{options.path}:{options.table}"
        self._options, self._context = options, context

    async def chunks(self, position: Position | None) -> AsyncIterator[Chunk]:
        last = 0 if position is None else int(position["rowid"])
        while True:
            rows = await asyncio.to_thread(self._rows, last)
            if not rows:
                with self._context.idle(self.name):
                    await self._context.sleep(POLL_S)
                continue
            last = rows[-1][0]
            yield await asyncio.to_thread(self._chunk, rows)

    @property
    def _columns(self) -> dict[str, pa.DataType]:
        return self._context.schema.textual

    def _rows(self, after: int) -> list[tuple[Any, ...]]:
        columns = ", ".join(f'"{name}"' for name in self._columns)
        statement = f"SELECT rowid, {columns} FROM {self._options.table} WHERE rowid > ? ORDER BY rowid LIMIT {ROWS}"
        with closing(sqlite3.connect(f"file:{self._options.path}?mode=ro", uri=True)) as connection:
            return connection.execute(statement, (after,)).fetchall()

    def _chunk(self, rows: Sequence[tuple[Any, ...]]) -> Chunk:
        values = list(zip(*rows, strict=True))[1:]
        arrays = [pa.array(column, kind) for column, kind in zip(values, self._columns.values(), strict=True)]
        batch = pa.RecordBatch.from_arrays(arrays, list(self._columns))
        decoded = convert(batch, self._context.schema, self._context.now_ms())
        end = {"rowid": rows[-1][0]}
        return Chunk(self.name, decoded.batch, None, end, decoded.rejected, batch.nbytes, keep=True)


class Sqlite:
    """The kind ``sqlite``."""

    name = "sqlite"
    config = SqliteConfig

    def sources(self, options: SqliteConfig, context: SourceContext) -> Sequence[Source]:
        return [SqliteSource(options, context)]


KIND = Sqlite()
