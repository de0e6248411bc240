"""Streams whose columns the configuration or an admin declares. Edges do not decide the columns of such a stream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa
from sqlalchemy import Connection, delete, select

from center.catalog import schema as t
from center.catalog.query_rows import live_queries
from center.catalog.transactions import Transactions, increment_version
from center.config import ColumnEntry
from center.storage.database import upsert
from edgewater.base.errors import Conflict, InvalidQuery, NotFound, ProtocolError
from edgewater.base.streams import COLUMN_TYPES, EdgeId, type_name
from edgewater.model.edge_records import StreamRecord

_SHOWN = 20  # limit: length of a message
"""Maximum number of columns that a message names."""


@dataclass(frozen=True, slots=True)
class DeclaredStream:
    """The columns that a stream's edges may have. If an edge lacks a column, it refuses the queries that need it."""

    name: str
    columns: Mapping[str, ColumnEntry]
    source: Literal["configuration", "admin"]

    @property
    def types(self) -> dict[str, pa.DataType]:
        return {name: COLUMN_TYPES[column.type] for name, column in self.columns.items()}

    def difference(self, edge: EdgeId, stream: StreamRecord) -> str:
        """Describes the first column of an edge that differs, with the expected type; empty: no column differs."""
        for column, kind in stream.columns.items():
            right = self.columns.get(column)
            if right is not None and COLUMN_TYPES[right.type] == kind:
                continue
            actual = f"column {self.name}.{column} is {type_name(kind)} at edge {edge}"
            if right is None:
                names = ", ".join(list(self.columns)[:_SHOWN]) + (", …" if len(self.columns) > _SHOWN else "")
                return f"{actual}; expected only the columns {names}, {self._where}"
            return f"{actual}; expected {right.type}, {self._where}"
        return ""

    @property
    def _where(self) -> str:
        if self.source == "configuration":
            return f"by streams.{self.name}.columns in the center's configuration"
        return f"as an admin of the center has set, PUT /v1/streams/{self.name}/columns"


class Streams:
    """The streams whose columns are declared.

    Args:
        configured: the columns that the configuration declares, by stream. They replace the columns of an admin.
    """

    def __init__(self, transactions: Transactions, configured: Mapping[str, Mapping[str, ColumnEntry]]) -> None:
        self._transactions = transactions
        self._configured = configured

    def declared(self) -> dict[str, DeclaredStream]:
        """The streams whose columns the configuration or an admin declares, by name."""
        with self._transactions.read() as connection:
            return self.select(connection)

    def select(self, connection: Connection) -> dict[str, DeclaredStream]:
        """Returns the same as `declared`, within a transaction."""
        rows = connection.execute(select(t.stream_columns)).all()
        by_admin = {r.stream: {n: ColumnEntry(type=k, description=d) for n, k, d in r.columns} for r in rows}
        return {
            **{name: DeclaredStream(name, columns, "admin") for name, columns in by_admin.items()},
            **{name: DeclaredStream(name, columns, "configuration") for name, columns in self._configured.items()},
        }

    def declare(self, stream: str, columns: Mapping[str, ColumnEntry]) -> None:
        """Declares the columns that a stream's edges may have. The sessions of edges with other columns end.

        Raises:
            Conflict: the configuration declares them, or a live query does not fit them.
        """
        self._require_not_configured(stream)
        declared = DeclaredStream(stream, columns, "admin")
        rows = [[name, column.type, column.description] for name, column in columns.items()]
        with self._transactions.locked() as connection:
            for query in live_queries(connection):
                if query.spec.stream != stream:
                    continue
                try:
                    query.spec.bind(declared.types)
                except InvalidQuery as exc:
                    raise Conflict(
                        f"stream {stream}: the live query {query.ref.name} does not fit these columns ({exc.message});"
                        " delete it first"
                    ) from exc
            upsert(connection, t.stream_columns, [{"stream": stream, "columns": rows}])
            increment_version(connection)

    def undeclare(self, stream: str) -> None:
        """Removes a declaration: the stream's edges then decide its columns again.

        Raises:
            Conflict: the configuration declares them.
            NotFound: no admin has declared them.
        """
        self._require_not_configured(stream)
        with self._transactions.locked() as connection:
            row = t.stream_columns.c.stream == stream
            if connection.execute(delete(t.stream_columns).where(row)).rowcount == 0:
                raise NotFound(f"no admin has declared columns of stream {stream}")
            increment_version(connection)

    def _require_not_configured(self, stream: str) -> None:
        if stream in self._configured:
            raise Conflict(f"stream {stream}: its columns are in the center's configuration, streams.{stream}.columns")


def require_declared(declared: Mapping[str, DeclaredStream], edge: EdgeId, streams: Iterable[StreamRecord]) -> None:
    """Checks the streams of an edge that have declared columns. Raises ProtocolError if the edge's columns differ."""
    for stream in streams:
        difference = declared[stream.name].difference(edge, stream) if stream.name in declared else ""
        if difference:
            raise ProtocolError(f"Hello: {difference}")
