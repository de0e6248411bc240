"""Rows of tables, and the tables of a query; each function runs inside a transaction of the catalog."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sqlalchemy import Connection, func, select

from center.catalog import schema as t
from center.catalog.query_rows import live_queries
from edgewater.base.errors import Conflict, InvalidQuery, did_you_mean
from edgewater.model.lookups import TableLookup
from edgewater.model.query import QuerySpec

MAX_TABLES = 200  # limit: rows that a list of tables has
MAX_DELIVERED_BYTES = 4 << 20
"""The largest size of the compressed rows of all running queries. An edge gets its queries in one message, and accepts
16 MiB."""


@dataclass(frozen=True, slots=True)
class TableRecord:
    """A version of a table, without its rows.

    Attributes:
        types: the columns of the table and their types, in order.
        key: the column that tells the rows apart.
        queries: names of the running queries that use the table, in any version.
    """

    name: str
    version: int
    key: str
    types: dict[str, str]
    rows: int
    updated_at_ms: int
    queries: tuple[str, ...] = ()


def newest_tables(connection: Connection, name: str | None = None) -> dict[str, TableRecord]:
    """Returns the newest version of each table, or of one table, by name."""
    c = t.lookup_tables.c
    wanted = select(c.name, c.version, c.key, c.columns, c.row_count, c.updated_at_ms).order_by(c.name, c.version)
    if name is not None:
        wanted = wanted.where(c.name == name)
    return {
        r.name: TableRecord(r.name, r.version, r.key, dict(r.columns), r.row_count, r.updated_at_ms)
        for r in connection.execute(wanted)
    }


def users_of(connection: Connection, name: str) -> list[QuerySpec]:
    """Returns the running versions of queries that use a table."""
    return [q.spec for q in live_queries(connection) if any(lookup.table == name for lookup in q.spec.lookups)]


def resolved(connection: Connection, spec: QuerySpec) -> QuerySpec:
    """Returns the query with the newest versions of its tables. Raises InvalidQuery."""
    return replace(spec, lookups=tuple(_resolved(connection, lookup) for lookup in spec.lookups))


def _resolved(connection: Connection, lookup: TableLookup) -> TableLookup:
    if lookup.rows:
        raise InvalidQuery(f"lookup.{lookup.table}.rows", "…", "no rows: the center adds them")
    table = newest_tables(connection, lookup.table).get(lookup.table)
    if table is None:
        known = newest_tables(connection)
        reason = f"unknown table{did_you_mean(lookup.table, known)}; PUT /v1/tables/{lookup.table} makes it"
        accepted = f"one of the tables {', '.join(known)}" if known else "a table of this center, which has none"
        raise InvalidQuery("lookup", lookup.table, accepted, reason)
    return lookup.resolved(table.key, table.types, table.version)


def require_deliverable(connection: Connection, spec: QuerySpec) -> None:
    """Raises Conflict if the rows of all running queries and of this one are too many for a message to an edge."""
    if not spec.lookups:
        return
    c = t.lookup_tables.c
    sizes = {(n, v): size for n, v, size in connection.execute(select(c.name, c.version, func.length(c.rows)))}
    used = [*(query.spec for query in live_queries(connection)), spec]
    total = sum(sizes.get((lookup.table, lookup.version), 0) for each in used for lookup in each.lookups)
    if total > MAX_DELIVERED_BYTES:
        raise Conflict(
            f"query {spec.name}: the compressed tables of all running versions of queries would have {total} bytes,"
            f" at most {MAX_DELIVERED_BYTES}; delete a query, make a table smaller, or wait until earlier versions"
            " have ended"
        )
