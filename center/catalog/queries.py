"""Queries, and what edges report about them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from sqlalchemy import ColumnElement, Connection, Row, delete, exists, insert, or_, select, update

from center.catalog import query_rows
from center.catalog import schema as t
from center.catalog.alarms import end_alarms_about
from center.catalog.edge_rows import select_edges
from center.catalog.query_borders import choose_border, event_now_ms, is_served
from center.catalog.streams import Streams
from center.catalog.table_rows import require_deliverable, resolved
from center.catalog.transactions import Transactions, count_rows, increment_version, read_counter
from center.storage.database import upsert
from edgewater.base.errors import Conflict, InvalidQuery, NotFound, PreconditionFailed
from edgewater.base.streams import MAX_TIME_MS, MIN_TIME_MS, EdgeId
from edgewater.base.timestamps import rfc3339
from edgewater.model.edge_records import EdgeRecord, QueryStatusRecord
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import RegisteredQuery
from edgewater.model.window_range import WindowRange
from edgewater.wire import QueryRef


@dataclass(frozen=True, slots=True)
class Change:
    """The request to give a live query another version.

    Attributes:
        at_ms: the border, as in `choose_border`.
        expected: the newest version that a client has read; 0: there was no version; None: any version.
        answered_ms: start of the last window that has an answer.
    """

    at_ms: int | None = None
    expected: int | None = None
    answered_ms: int = MIN_TIME_MS


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
        lasts_ms: int | None = None,
        change: Change | None = None,
        before_new: Callable[[], None] = lambda: None,
    ) -> tuple[RegisteredQuery, bool]:
        """Registers a query.

        A query that has ended by itself keeps its answers. The next query of the same name has the windows after its
        end.

        Args:
            seed: for a new query, if the spec has none.
            lasts_ms: event time after which the query ends, unless its spec has `until`.
            change: gives a live query of that name another version; None: a live query of that name is a conflict.
            before_new: called within the transaction if no equal query is live. If it raises an exception, the query is
                not registered, and the exception is passed on.

        Returns:
            The query, and whether it was created. An equal live query is returned with the seed that it has.

        Raises:
            Conflict: another query is live under that name and `change` is None, or there are `MAX_QUERIES` or
                `MAX_VERSIONS`. PreconditionFailed: the live version is not the version that the change expects.
            InvalidQuery: the query does not fit the stream's declared columns. Without declared columns: it does not
                fit the stream of an edge; the error names the edge. Or a record costs the query too much, or the query
                ends in the past.
            InvalidRequest: the change begins in the past.
        """
        with self._transactions.locked() as connection:
            return self.register_in(
                connection, spec, now_ms, seed, lasts_ms=lasts_ms, change=change, before_new=before_new
            )

    def register_in(
        self,
        connection: Connection,
        spec: QuerySpec,
        now_ms: int,
        seed: int | None = None,
        *,
        lasts_ms: int | None = None,
        change: Change | None = None,
        before_new: Callable[[], None] = lambda: None,
    ) -> tuple[RegisteredQuery, bool]:
        """Registers a query as `register` does, inside a locked transaction."""
        spec = resolved(connection, spec)
        rows = _rows_of(connection, spec.name)
        newest = _newest(rows)
        _require_expected(spec.name, newest, change)
        if newest is not None and newest.is_running and _asks_for(spec, newest, lasts_ms):
            return newest, False
        before_new()
        if newest is not None and newest.is_running and change is None:
            raise _conflict(newest, spec)
        spec.window.require_affordable()
        _require_room(connection, spec, rows, now_ms)
        require_deliverable(connection, spec)
        edges = select_edges(connection)
        if not self._fits_declared(connection, spec):
            query_rows.require_fit_at_edges(spec, edges)
        windows = _windows(spec, newest, change, edges, now_ms, lasts_ms)
        version = max([r.version for r in rows], default=0)
        version = max(version, read_counter(connection, query_rows.FORGOTTEN)) + 1
        if newest is not None and windows.from_ms < newest.windows.until_ms:
            connection.execute(update(t.queries).where(t.is_of(t.queries, newest.ref)).values(until_ms=windows.from_ms))
        spec = replace(spec if spec.seed is not None else spec.with_seed(seed), until_ms=None)
        row = {"name": spec.name, "version": version, "spec": spec.to_mapping(), "registered_at_ms": now_ms}
        connection.execute(insert(t.queries).values(**row, **asdict(windows), last_position=0))
        increment_version(connection)
        return RegisteredQuery(QueryRef(spec.name, version), spec, now_ms, None, windows), True

    def try_register(
        self, spec: QuerySpec, now_ms: int, *, lasts_ms: int | None = None, change: Change | None = None
    ) -> tuple[RegisteredQuery | None, WindowRange, InvalidQuery | None]:
        """Says what `register` would do, without registering.

        Returns:
            The equal live query, if there is one. The windows of the live query or of the new version. The error if the
            stream of an edge does not fit.

        Raises:
            Conflict, InvalidQuery, InvalidRequest: like `register`, except that a misfit at an edge is returned.
        """
        with self._transactions.read() as connection:
            newest = _newest(_rows_of(connection, spec.name))
            _require_expected(spec.name, newest, change)
            live = newest if newest is not None and newest.is_running else None
            if live is not None and not _asks_for(spec, live, lasts_ms):
                if change is None:
                    raise _conflict(live, spec)
                live = None
            edges = select_edges(connection)
            windows = live.windows if live is not None else _windows(spec, newest, change, edges, now_ms, lasts_ms)
            spec.window.require_affordable()
            if self._fits_declared(connection, spec):
                return live, windows, None
            try:
                query_rows.require_fit_at_edges(spec, edges)
            except InvalidQuery as exc:
                return live, windows, exc
        return live, windows, None

    def _fits_declared(self, connection: Connection, spec: QuerySpec) -> bool:
        """Whether the stream's columns are declared. Raises InvalidQuery if the query does not fit them."""
        declared = self._streams.select(connection).get(spec.stream)
        if declared is None:
            return False
        query_rows.require_fit(spec, declared.types, f"by the columns of stream {spec.stream} at the center")
        return True

    def end(self, ref: QueryRef, now_ms: int) -> None:
        """Marks a version as ended: edges remove it. Its answers stay."""
        c = t.queries.c
        this = t.is_of(t.queries, ref) & c.deleted_at_ms.is_(None) & (c.ended_at_ms == 0)
        with self._transactions.locked() as connection:
            if connection.execute(update(t.queries).where(this).values(ended_at_ms=now_ms)).rowcount:
                increment_version(connection)

    def expire(self, before_ms: int, now_ms: int) -> None:
        """Deletes the versions that ended before a wall time, unless an earlier version of the query still exists.

        Called when their answers are too old to be kept.
        """
        c = t.queries.c
        ended = (c.ended_at_ms > 0) & (c.ended_at_ms < before_ms)
        earlier = t.queries.alias()
        is_left = exists().where(
            earlier.c.name == c.name,
            earlier.c.version < c.version,
            earlier.c.deleted_at_ms.is_(None),
            or_(earlier.c.ended_at_ms == 0, earlier.c.ended_at_ms >= before_ms),
        )
        old = c.deleted_at_ms.is_(None) & ended & ~is_left
        with self._transactions.read() as connection:
            if connection.execute(select(c.name).where(old).limit(1)).first() is None:
                return
        with self._transactions.locked() as connection:
            refs = connection.execute(select(c.name, c.version).where(old)).all()
            for name, version in refs:
                _mark_deleted(connection, (c.name == name) & (c.version == version), now_ms)
            increment_version(connection)

    def delete(self, name: str, now_ms: int) -> None:
        """Deletes all versions of a query. Its frames stay until retention drops them. Raises NotFound."""
        with self._transactions.locked() as connection:
            if not _mark_deleted(connection, t.queries.c.name == name, now_ms):
                raise NotFound(f"query {name} is not registered")
            increment_version(connection)

    def get(self, name: str) -> RegisteredQuery:
        """The newest version of a query. Raises NotFound."""
        return self.versions(name, 1)[-1]

    def versions(self, name: str, most: int | None = None) -> list[RegisteredQuery]:
        """Returns the versions of a query that have, or may have, answers, ascending. Raises NotFound.

        Args:
            most: the largest number of versions to return. The newest versions are returned. None: all versions.
        """
        rows = select(t.queries).where(t.queries.c.name == name, t.queries.c.deleted_at_ms.is_(None))
        with self._transactions.read() as connection:
            newest_first = connection.execute(rows.order_by(t.queries.c.version.desc()).limit(most)).all()
        if not newest_first:
            raise NotFound(f"query {name} is not registered")
        return [query_rows.query_from_row(row) for row in reversed(newest_first)]

    def newest(self) -> list[RegisteredQuery]:
        """The newest version of each query that is not deleted, by name."""
        return list({query.ref.name: query for query in self.all()}.values())

    def all(self, *, deleted: bool = False) -> list[RegisteredQuery]:
        """All versions of the queries by name and version, with `deleted` also deleted queries.

        Queries that cannot be read here are left out (`query_rows.readable`).
        """
        rows = select(t.queries).order_by(t.queries.c.name, t.queries.c.version)
        if not deleted:
            rows = rows.where(t.queries.c.deleted_at_ms.is_(None))
        with self._transactions.read() as connection:
            return [query for row in connection.execute(rows) if (query := query_rows.readable(row)) is not None]

    def running(self) -> dict[QueryRef, bool]:
        """All versions of the queries that are not deleted, and whether they have not ended. Queries that cannot be
        read here are among them.
        """
        c = t.queries.c
        rows = select(c.name, c.version, c.ended_at_ms).where(c.deleted_at_ms.is_(None))
        with self._transactions.read() as connection:
            return {QueryRef(name, version): ended == 0 for name, version, ended in connection.execute(rows)}

    def record_statuses(self, statuses: Iterable[QueryStatusRecord]) -> None:
        """Records whether edges run queries, in one transaction. Statuses of queries that are not live are ignored.

        An edge repeats its statuses in each session; without a change nothing is written.
        """
        with self._transactions.read() as connection:
            statuses = _changed_statuses(connection, list(statuses))
        if not statuses:
            return
        with self._transactions.locked() as connection:
            live = query_rows.live_refs(connection)
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
        rows = select(t.statuses).where(t.is_of(t.statuses, ref)).order_by(t.statuses.c.edge)
        with self._transactions.read() as connection:
            return {
                EdgeId(r.edge): QueryStatusRecord(ref, EdgeId(r.edge), r.accepted, r.code, r.message)
                for r in connection.execute(rows)
            }


def _rows_of(connection: Connection, name: str) -> Sequence[Row[tuple[object, ...]]]:
    return connection.execute(select(t.queries).where(t.queries.c.name == name)).all()


def _newest(rows: Iterable[Row[tuple[object, ...]]]) -> RegisteredQuery | None:
    left = [row for row in rows if row.deleted_at_ms is None]
    return query_rows.query_from_row(max(left, key=lambda row: int(row.version))) if left else None


def _require_expected(name: str, newest: RegisteredQuery | None, change: Change | None) -> None:
    if change is None or change.expected is None:
        return
    version = newest.ref.version if newest is not None else 0
    if version != change.expected:
        now = f"version {version} is the newest now" if version else "it is not registered now"
        raise PreconditionFailed(
            f"query {name}: {now}, not version {change.expected}; read it again, and change what you read"
        )


def _asks_for(spec: QuerySpec, live: RegisteredQuery, lasts_ms: int | None) -> bool:
    """Whether a registration asks for the live query. With `lasts_ms`, the end of the query is not compared."""
    wanted = replace(spec, until_ms=None) if lasts_ms is not None and spec.until_ms is None else spec
    return wanted.asks_for(live.spec if wanted is not spec else live.asked)


def _windows(
    spec: QuerySpec,
    newest: RegisteredQuery | None,
    change: Change | None,
    edges: Sequence[EdgeRecord],
    now_ms: int,
    lasts_ms: int | None,
) -> WindowRange:
    """Returns the windows of a new version."""
    from_ms, until_ms, event_ms = MIN_TIME_MS, MAX_TIME_MS, event_now_ms(spec, edges, now_ms)
    if newest is not None and newest.is_running:
        assert change is not None, "a live query is changed, or it is a conflict"
        from_ms = choose_border(newest, spec, change.at_ms, edges, now_ms, change.answered_ms)
    elif newest is not None:
        from_ms = newest.windows.until_ms
    if spec.until_ms is not None:
        until_ms, read_from_ms = spec.until_ms, spec.since_ms
        if read_from_ms is None:
            # The clock of a stream is its edges': before an edge has connected, a replay may be at any time.
            read_from_ms = event_ms if is_served(spec, edges) else MIN_TIME_MS
        if until_ms <= max(read_from_ms, from_ms):
            raise InvalidQuery("until", rfc3339(until_ms), f"a time after {rfc3339(max(read_from_ms, from_ms))}")
    elif lasts_ms is not None:
        until_ms = max(event_ms, from_ms) + lasts_ms
    return WindowRange(from_ms, until_ms)


def _require_room(
    connection: Connection, spec: QuerySpec, rows: Sequence[Row[tuple[object, ...]]], now_ms: int
) -> None:
    if sum(row.deleted_at_ms is None for row in rows) >= query_rows.MAX_VERSIONS:
        raise Conflict(
            f"query {spec.name}: {query_rows.MAX_VERSIONS} versions of it have answers, which is the limit; a version"
            " is forgotten when retention.answers has passed since its end. Take another name, or delete the query"
        )
    if count_rows(connection, t.queries) >= query_rows.MAX_QUERIES:
        query_rows.forget_ended(connection, now_ms - query_rows.FORGET_AFTER_MS)
    if count_rows(connection, t.queries) >= query_rows.MAX_QUERIES:
        raise Conflict(
            f"query {spec.name}: {query_rows.MAX_QUERIES} versions of queries are registered or were deleted within a"
            " day, which is the limit"
        )


def _conflict(live: RegisteredQuery, spec: QuerySpec) -> Conflict:
    registered, wanted = live.asked.to_mapping(seed=spec.seed is not None), spec.to_mapping()
    differing = [key for key in wanted | registered if registered.get(key) != wanted.get(key)]
    return Conflict(
        f"query {spec.name}: version {live.ref.version} is registered under this name and differs in"
        f" {', '.join(differing)}; change it and keep its answers: `edgewater query put`, or"
        f" PUT /v1/queries/{spec.name}; or take another name"
    )


def _mark_deleted(connection: Connection, which: ColumnElement[bool], now_ms: int) -> bool:
    """Marks versions as deleted. Returns whether there were any."""
    rows = select(t.queries.c.name, t.queries.c.version).where(which, t.queries.c.deleted_at_ms.is_(None))
    refs = connection.execute(rows).all()
    for ref in (QueryRef(name, version) for name, version in refs):
        connection.execute(update(t.queries).where(t.is_of(t.queries, ref)).values(deleted_at_ms=now_ms))
        for table in (t.statuses, t.set_aside_queries):
            connection.execute(delete(table).where(t.is_of(table, ref)))
        end_alarms_about(connection, ref)
    return bool(refs)


def _changed_statuses(connection: Connection, statuses: Sequence[QueryStatusRecord]) -> list[QueryStatusRecord]:
    """The statuses that differ from the stored ones."""
    by_query: dict[QueryRef, set[EdgeId]] = {}
    for status in statuses:
        by_query.setdefault(status.query, set()).add(status.edge)
    c, stored = t.statuses.c, set[QueryStatusRecord]()
    for ref, edges in by_query.items():
        of_query = select(t.statuses).where(t.is_of(t.statuses, ref), c.edge.in_(edges))
        rows = connection.execute(of_query)
        stored.update(QueryStatusRecord(ref, r.edge, r.accepted, r.code, r.message) for r in rows)
    return [s for s in statuses if s not in stored]
