"""Queries, and what edges report about them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict

from sqlalchemy import Connection, Row, delete, insert, select, update

from center.catalog import schema as t
from center.catalog.edge_rows import select_edges
from center.catalog.query_rows import (
    FORGET_AFTER_MS,
    FORGOTTEN,
    MAX_QUERIES,
    forget_ended,
    live_refs,
    query_from_row,
    readable,
    require_fit,
    require_fit_at_edges,
)
from center.catalog.streams import Streams
from center.catalog.transactions import Transactions, count_rows, increment_version, read_counter
from center.storage.database import upsert
from edgewater.model.edge_records import QueryDelayRecord, QueryStatusRecord
from edgewater.model.errors import Conflict, InvalidQuery, NotFound
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import RegisteredQuery
from edgewater.model.streams import EdgeId
from edgewater.wire import QueryRef


class Queries:
    """The queries in the catalog: their registration, and the last reports of edges about them."""

    def __init__(self, transactions: Transactions, streams: Streams) -> None:
        self._transactions = transactions
        self._streams = streams

    def register(
        self,
        spec: QuerySpec,
        now_ms: int,
        seed: int | None = None,
        *,
        replaces: bool = False,
        before_new: Callable[[], None] = lambda: None,
    ) -> tuple[RegisteredQuery, bool]:
        """Registers a query.

        Args:
            seed: for a new query, if the spec has none.
            replaces: another live query of that name is deleted in the same transaction. It stays if the new query is
                refused.
            before_new: called within the transaction if no equal query is live. An exception of it prevents the
                registration, and is passed on.

        Returns:
            The query, and whether it was created. An equal live query is returned with the seed that it has.

        Raises:
            Conflict: another query is live under that name and not replaced, or there are `MAX_QUERIES`.
            InvalidQuery: the query does not fit the stream's declared columns. Without declared columns: it does not
                fit the stream as an edge serves it; the error names the edge. Or one record of it costs too much.
        """
        with self._transactions.locked() as connection:
            rows = _rows_of(connection, spec.name)
            live = _live(rows)
            if live is not None and spec.asks_for(live.spec):
                return live, False
            before_new()
            if live is not None and not replaces:
                raise _conflict(live, spec)
            spec.window.require_affordable()
            _require_room(connection, spec, now_ms)
            if not self._fits_declared(connection, spec):
                require_fit_at_edges(spec, select_edges(connection))
            version = max([r.version for r in rows], default=0)
            version = max(version, read_counter(connection, FORGOTTEN)) + 1
            _end_live(connection, spec.name, now_ms)
            spec = spec if spec.seed is not None else spec.with_seed(seed)
            row = {"name": spec.name, "version": version, "spec": spec.to_mapping(), "registered_at_ms": now_ms}
            connection.execute(insert(t.queries).values(**row, last_position=0))
            increment_version(connection)
        return RegisteredQuery(QueryRef(spec.name, version), spec, now_ms, None), True

    def try_register(
        self, spec: QuerySpec, *, replaces: bool = False
    ) -> tuple[RegisteredQuery | None, InvalidQuery | None]:
        """Says what `register` would do, without registering.

        Returns:
            The equal live query, if there is one, and the error if the stream of an edge does not fit.

        Raises:
            Conflict, InvalidQuery: as `register`, except for streams that edges serve.
        """
        with self._transactions.read() as connection:
            live = _live(_rows_of(connection, spec.name))
            if live is not None and not spec.asks_for(live.spec):
                if not replaces:
                    raise _conflict(live, spec)
                live = None
            spec.window.require_affordable()
            if self._fits_declared(connection, spec):
                return live, None
            try:
                require_fit_at_edges(spec, select_edges(connection))
            except InvalidQuery as exc:
                return live, exc
        return live, None

    def _fits_declared(self, connection: Connection, spec: QuerySpec) -> bool:
        """Whether the stream's columns are declared. Raises InvalidQuery if the query does not fit them."""
        declared = self._streams.select(connection).get(spec.stream)
        if declared is None:
            return False
        require_fit(spec, declared.types, f"by the columns of stream {spec.stream} at the center")
        return True

    def delete(self, name: str, now_ms: int) -> None:
        """Deletes the live query of that name. Its frames stay until retention drops them. Raises NotFound."""
        with self._transactions.locked() as connection:
            if not _end_live(connection, name, now_ms):
                raise NotFound(f"query {name} is not registered")
            increment_version(connection)

    def get(self, name: str) -> RegisteredQuery:
        """The live query of that name. Raises NotFound."""
        live = select(t.queries).where(t.queries.c.name == name, t.queries.c.deleted_at_ms.is_(None))
        with self._transactions.read() as connection:
            row = connection.execute(live).first()
        if row is None:
            raise NotFound(f"query {name} is not registered")
        return query_from_row(row)

    def all(self, *, deleted: bool = False) -> list[RegisteredQuery]:
        """The live queries by name and version, with `deleted` also the deleted ones.

        Queries that cannot be read here are left out (`query_rows.readable`).
        """
        rows = select(t.queries).order_by(t.queries.c.name, t.queries.c.version)
        if not deleted:
            rows = rows.where(t.queries.c.deleted_at_ms.is_(None))
        with self._transactions.read() as connection:
            return [query for row in connection.execute(rows) if (query := readable(row)) is not None]

    def record_statuses(self, statuses: Iterable[QueryStatusRecord]) -> None:
        """Records whether edges run queries, in one transaction. Statuses of queries that are not live are ignored.

        An edge repeats its statuses in each session; without a change nothing is written.
        """
        with self._transactions.read() as connection:
            statuses = _changed_statuses(connection, list(statuses))
        if not statuses:
            return
        with self._transactions.locked() as connection:
            live = live_refs(connection)
            rows = [
                {
                    "name": status.query.name,
                    "version": status.query.version,
                    "edge": status.edge,
                    "accepted": status.accepted,
                    "code": status.code[:64],
                    "message": status.message[:4_000],
                }
                for status in statuses
                if status.query in live
            ]
            upsert(connection, t.statuses, rows)

    def statuses(self, ref: QueryRef) -> dict[EdgeId, QueryStatusRecord]:
        """The status of a query by edge, for the edges that have reported one."""
        c = t.statuses.c
        rows = select(t.statuses).where(c.name == ref.name, c.version == ref.version).order_by(c.edge)
        with self._transactions.read() as connection:
            return {
                EdgeId(r.edge): QueryStatusRecord(ref, EdgeId(r.edge), r.accepted, r.code, r.message)
                for r in connection.execute(rows)
            }

    def record_delays(self, records: Iterable[QueryDelayRecord]) -> None:
        """Replaces the last reports of edges about the delays of queries, in one transaction.

        Reports about queries that are not live are ignored.
        """
        with self._transactions.locked() as connection:
            live = live_refs(connection)
            rows = []
            for record in records:
                if record.query in live:
                    values = asdict(record)
                    rows.append({**values.pop("query"), **values})
            upsert(connection, t.query_delays, rows)

    def delays(self) -> dict[QueryRef, list[QueryDelayRecord]]:
        """The last reports about the delays of live queries, by query, in the order of the edges."""
        q, d = t.queries.c, t.query_delays.c
        live = (q.name == d.name) & (q.version == d.version) & q.deleted_at_ms.is_(None)
        rows = select(t.query_delays).join(t.queries, live).order_by(d.edge)
        delays: dict[QueryRef, list[QueryDelayRecord]] = {}
        with self._transactions.read() as connection:
            for row in connection.execute(rows):
                values = dict(row._mapping)
                ref = QueryRef(values.pop("name"), values.pop("version"))
                delays.setdefault(ref, []).append(QueryDelayRecord(ref, **values))
        return delays


def _rows_of(connection: Connection, name: str) -> Sequence[Row[tuple[object, ...]]]:
    return connection.execute(select(t.queries).where(t.queries.c.name == name)).all()


def _live(rows: Iterable[Row[tuple[object, ...]]]) -> RegisteredQuery | None:
    return next((query_from_row(r) for r in rows if r.deleted_at_ms is None), None)


def _require_room(connection: Connection, spec: QuerySpec, now_ms: int) -> None:
    if count_rows(connection, t.queries) >= MAX_QUERIES:
        forget_ended(connection, now_ms - FORGET_AFTER_MS)
    if count_rows(connection, t.queries) >= MAX_QUERIES:
        raise Conflict(
            f"query {spec.name}: {MAX_QUERIES} queries are registered or were deleted within a day, which is the limit"
        )


def _conflict(live: RegisteredQuery, spec: QuerySpec) -> Conflict:
    registered, wanted = live.spec.to_mapping(seed=spec.seed is not None), spec.to_mapping()
    differing = [key for key in wanted | registered if registered.get(key) != wanted.get(key)]
    return Conflict(
        f"query {spec.name}: version {live.ref.version} is registered under this name and differs in"
        f" {', '.join(differing)}; take another name to keep its answers, or replace it, which deletes all its"
        f" answers: `edgewater query add --replace`, or DELETE /v1/queries/{spec.name} and then this request again"
    )


def _end_live(connection: Connection, name: str, now_ms: int) -> bool:
    """Marks the live query of that name as deleted. Returns whether there was one."""
    live = (t.queries.c.name == name) & t.queries.c.deleted_at_ms.is_(None)
    if connection.execute(update(t.queries).where(live).values(deleted_at_ms=now_ms)).rowcount == 0:
        return False
    for table in (t.statuses, t.set_aside_queries):
        connection.execute(delete(table).where(table.c.name == name))
    return True


def _changed_statuses(connection: Connection, statuses: Sequence[QueryStatusRecord]) -> list[QueryStatusRecord]:
    """The statuses that differ from the stored ones."""
    by_query: dict[QueryRef, set[EdgeId]] = {}
    for status in statuses:
        by_query.setdefault(status.query, set()).add(status.edge)
    c, stored = t.statuses.c, set[QueryStatusRecord]()
    for ref, edges in by_query.items():
        of_query = select(t.statuses).where(c.name == ref.name, c.version == ref.version, c.edge.in_(edges))
        rows = connection.execute(of_query)
        stored.update(QueryStatusRecord(ref, r.edge, r.accepted, r.code, r.message) for r in rows)
    return [s for s in statuses if s not in stored]
