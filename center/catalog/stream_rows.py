"""The columns of streams that the configuration or an admin declares: what edges say of them decides nothing then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa
from sqlalchemy import Connection, delete, select

from center.catalog import schema as t
from center.catalog.edges import StreamRecord
from center.config import ColumnEntry
from center.storage.database import upsert
from edgewater.model.errors import ProtocolError
from edgewater.model.streams import COLUMN_TYPES, EdgeId, type_name

_SHOWN = 20
"""Columns that a message names."""


@dataclass(frozen=True, slots=True)
class DeclaredStream:
    """The columns that a stream's edges may have. An edge may lack some: it then refuses the queries that need them."""

    name: str
    columns: Mapping[str, ColumnEntry]
    source: Literal["configuration", "admin"]

    @property
    def types(self) -> dict[str, pa.DataType]:
        return {name: COLUMN_TYPES[column.type] for name, column in self.columns.items()}

    def difference(self, edge: EdgeId, stream: StreamRecord) -> str:
        """The first column of an edge that differs, its type and what is right; empty: none does."""
        for column, kind in stream.columns.items():
            right = self.columns.get(column)
            if right is not None and COLUMN_TYPES[right.type] == kind:
                continue
            what = f"column {self.name}.{column} is {type_name(kind)} at edge {edge}"
            if right is None:
                names = ", ".join(list(self.columns)[:_SHOWN]) + (", …" if len(self.columns) > _SHOWN else "")
                return f"{what}; expected only the columns {names}, {self._where}"
            return f"{what}; expected {right.type}, {self._where}"
        return ""

    @property
    def _where(self) -> str:
        if self.source == "configuration":
            return f"by streams.{self.name}.columns in the center's configuration"
        return f"as an admin of the center has set, PUT /v1/streams/{self.name}/columns"


def select_declared(
    connection: Connection, configured: Mapping[str, Mapping[str, ColumnEntry]]
) -> dict[str, DeclaredStream]:
    """By stream; the configuration goes before what an admin has set."""
    rows = connection.execute(select(t.stream_columns)).all()
    declared = {r.stream: {n: ColumnEntry(type=k, description=d) for n, k, d in r.columns} for r in rows}
    return {
        **{name: DeclaredStream(name, columns, "admin") for name, columns in declared.items()},
        **{name: DeclaredStream(name, columns, "configuration") for name, columns in configured.items()},
    }


def require_declared(declared: Mapping[str, DeclaredStream], edge: EdgeId, streams: Iterable[StreamRecord]) -> None:
    """Checks those of an edge's streams that have declared columns. Raises ProtocolError if its columns differ."""
    for stream in streams:
        difference = declared[stream.name].difference(edge, stream) if stream.name in declared else ""
        if difference:
            raise ProtocolError(f"Hello: {difference}")


def write_columns(connection: Connection, stream: str, columns: Mapping[str, ColumnEntry]) -> None:
    rows = [[name, column.type, column.description] for name, column in columns.items()]
    upsert(connection, t.stream_columns, [{"stream": stream, "columns": rows}])


def delete_columns(connection: Connection, stream: str) -> bool:
    """Returns whether there were any."""
    return connection.execute(delete(t.stream_columns).where(t.stream_columns.c.stream == stream)).rowcount > 0
