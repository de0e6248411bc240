"""Tables that queries look up columns in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import pyarrow as pa
from sqlalchemy import Connection, delete, insert, select

from center.catalog import schema as t
from center.catalog.queries import Change, Queries
from center.catalog.query_rows import TABLES_FORGOTTEN, live_queries, raise_counter
from center.catalog.table_rows import MAX_TABLES, TableRecord, newest_tables, resolved, users_of
from center.catalog.transactions import Transactions, increment_version, read_counter
from edgewater.base.errors import Conflict, InvalidQuery, InvalidRequest, NotFound
from edgewater.base.streams import MIN_TIME_MS, type_name
from edgewater.model.lookups import decode_rows, encode_rows
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import RegisteredQuery


class Tables:
    """The tables of the catalog. Versions that no running query uses, except the newest, are deleted."""

    def __init__(self, transactions: Transactions, queries: Queries) -> None:
        self._transactions = transactions
        self._queries = queries
        self._rows: dict[tuple[str, int], str] = {}

    def put(
        self,
        name: str,
        key: str,
        table: pa.Table,
        now_ms: int,
        at_ms: int | None = None,
        answered_ms: Mapping[str, int] | None = None,
    ) -> tuple[TableRecord, bool]:
        """Stores a table, and gives each running query that uses it a new version. Equal rows change nothing.

        Args:
            table: the rows; each has a key of its own.
            at_ms: as in `Change`.
            answered_ms: as in `Change`, by query.

        Returns:
            The newest version with the queries that use it, and whether it is new.

        Raises:
            InvalidRequest: a query that uses the table would not fit it, or the border is past.
            Conflict: there are `MAX_TABLES`, or the queries cannot have another version.
        """
        types, rows = {field.name: type_name(field.type) for field in table.schema}, encode_rows(table)
        with self._transactions.locked() as connection:
            known = newest_tables(connection)
            old = known.get(name)
            if old is None and len(known) >= MAX_TABLES:
                raise Conflict(f"table {name}: there are {MAX_TABLES} tables, which is the limit; delete one")
            c = t.lookup_tables.c
            if old is not None and (old.key, old.types) == (key, types):
                stored = select(c.rows).where(c.name == name, c.version == old.version)
                if connection.execute(stored).scalar_one() == rows:
                    return _with_users(old, users_of(connection, name)), False
            version = max(old.version if old is not None else 0, read_counter(connection, TABLES_FORGOTTEN)) + 1
            new = TableRecord(name, version, key, types, table.num_rows, now_ms)
            row = {"name": name, "version": version, "key": key, "columns": list(types.items()), "rows": rows}
            connection.execute(insert(t.lookup_tables).values(**row, row_count=table.num_rows, updated_at_ms=now_ms))
            running = sorted(live_queries(connection), key=lambda query: query.ref.version)
            for query in {query.ref.name: query for query in running}.values():
                if any(lookup.table == name for lookup in query.spec.lookups):
                    change = Change(at_ms, answered_ms=(answered_ms or {}).get(query.ref.name, MIN_TIME_MS))
                    self._follow(connection, query, name, now_ms, change)
            users = users_of(connection, name)
            used = {each.version for spec in users for each in spec.lookups if each.table == name} | {version}
            connection.execute(delete(t.lookup_tables).where(c.name == name, c.version.not_in(used)))
            increment_version(connection)
            return _with_users(new, users), True

    def _follow(self, connection: Connection, query: RegisteredQuery, name: str, now_ms: int, change: Change) -> None:
        """Gives a query a version with the newest version of a table, unless the query ends before the border."""
        lookups = tuple(replace(each, version=0) if each.table == name else each for each in query.spec.lookups)
        spec = replace(query.asked, lookups=lookups)
        try:
            self._queries.register_in(connection, spec, now_ms, change=change)
        except InvalidQuery as exc:
            if exc.field == "until":
                return
            accepted = f"a table that fits query {query.ref.name}, which uses it"
            raise InvalidRequest("table", name, accepted, f"{exc.field}: {exc.reason or exc.accepted}") from exc

    def all(self) -> list[TableRecord]:
        """The newest version of each table, by name."""
        with self._transactions.read() as connection:
            specs = [query.spec for query in live_queries(connection)]
            return [_with_users(table, specs) for table in newest_tables(connection).values()]

    def get(self, name: str) -> tuple[TableRecord, pa.Table]:
        """The newest version of a table, and its rows. Raises NotFound."""
        with self._transactions.read() as connection:
            table = newest_tables(connection, name).get(name)
            if table is None:
                raise NotFound(f"table {name} is not registered")
            table = _with_users(table, users_of(connection, name))
        return table, decode_rows(self._read(name, table.version))

    def delete(self, name: str) -> None:
        """Deletes all versions of a table. Raises NotFound; Conflict: a running query uses it."""
        with self._transactions.locked() as connection:
            table = newest_tables(connection, name).get(name)
            if table is None:
                raise NotFound(f"table {name} is not registered")
            if users := sorted({spec.name for spec in users_of(connection, name)}):
                raise Conflict(f"table {name}: running queries use it: {', '.join(users)}; delete them first")
            connection.execute(delete(t.lookup_tables).where(t.lookup_tables.c.name == name))
            raise_counter(connection, TABLES_FORGOTTEN, table.version)

    def resolved(self, spec: QuerySpec) -> QuerySpec:
        """Returns the query with the newest versions of its tables. Raises InvalidQuery."""
        if not spec.lookups:
            return spec
        with self._transactions.read() as connection:
            return resolved(connection, spec)

    def with_rows(self, queries: Iterable[RegisteredQuery]) -> list[RegisteredQuery]:
        """Returns the queries as edges get them: the lookups of running queries have the rows."""
        return [self._with_rows(query) if query.is_running and query.spec.lookups else query for query in queries]

    def _with_rows(self, query: RegisteredQuery) -> RegisteredQuery:
        lookups = tuple(replace(each, rows=self._read(each.table, each.version)) for each in query.spec.lookups)
        return replace(query, spec=replace(query.spec, lookups=lookups))

    def _read(self, name: str, version: int) -> str:
        """Returns the rows of a version, which never change; empty if they are deleted."""
        if (name, version) not in self._rows:
            c = t.lookup_tables.c
            wanted = select(c.rows).where(c.name == name, c.version == version)
            with self._transactions.read() as connection:
                rows = connection.execute(wanted).scalar_one_or_none() or ""
            if len(self._rows) >= MAX_TABLES:
                self._rows = {}
            self._rows = {**self._rows, (name, version): rows}
        return self._rows[name, version]


def _with_users(table: TableRecord, specs: Iterable[QuerySpec]) -> TableRecord:
    users = {spec.name for spec in specs if any(lookup.table == table.name for lookup in spec.lookups)}
    return replace(table, queries=tuple(sorted(users)))
