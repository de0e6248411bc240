"""Rows of queries, and whether a query fits its stream; each function runs inside a transaction of the catalog."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import pyarrow as pa
from sqlalchemy import Connection, Row, delete, exists, func, or_, select

from center.catalog import schema as t
from center.catalog.transactions import read_counter
from center.storage.database import upsert
from edgewater.base.errors import InvalidQuery, StorageError
from edgewater.base.streams import MAX_TIME_MS, MIN_TIME_MS
from edgewater.model.edge_records import EdgeRecord
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import RegisteredQuery
from edgewater.model.window_range import ALL_WINDOWS, WindowRange
from edgewater.wire import QueryRef

log = logging.getLogger(__name__)

MAX_QUERIES = 10_000
"""Maximum number of versions of queries that are not deleted, or were deleted less than `FORGET_AFTER_MS` ago, or still
have frames."""
MAX_VERSIONS = 1_000
"""Maximum number of versions of one query that are not deleted."""
FORGET_AFTER_MS = 86_400_000  # limit: rows of deleted queries
"""Time after which the rows of a deleted query may be removed: by then the job has dropped the query's state."""
FORGOTTEN = "forgotten"
"""The counter of the highest version of a query that was forgotten."""
TABLES_FORGOTTEN = "tables-forgotten"
"""The counter of the highest version of a table that was deleted."""
OLDER = "older"
"""The counter with the wall time at which the catalog was last known to be older than what edges have."""


def live_refs(connection: Connection) -> set[QueryRef]:
    """Returns the queries that have not been deleted, in all their versions."""
    q = t.queries.c
    rows = connection.execute(select(q.name, q.version).where(q.deleted_at_ms.is_(None)))
    return {QueryRef(name, version) for name, version in rows}


def live_queries(connection: Connection) -> list[RegisteredQuery]:
    """Returns the queries that edges answer, without queries that cannot be read here (`readable`)."""
    c = t.queries.c
    rows = connection.execute(select(t.queries).where(c.deleted_at_ms.is_(None), c.ended_at_ms == 0))
    return [query for row in rows if (query := readable(row)) is not None]


def forget_ended(connection: Connection, before_ms: int) -> None:
    """Deletes the rows of queries that were deleted before a time and have no frames left.

    No later query gets one of their version numbers, under any name: edges may still have frames of them.
    """
    c = t.queries.c
    has_frames = (
        exists().where(table.c.name == c.name, table.c.version == c.version) for table in (t.frames, t.quarantine)
    )
    ended = (c.deleted_at_ms < before_ms) & ~or_(*has_frames)
    version = connection.execute(select(func.max(c.version)).where(ended)).scalar_one()
    if version is None:
        return
    remember_versions(connection, [int(version)])
    connection.execute(delete(t.queries).where(ended))


def remember_versions(connection: Connection, versions: Iterable[int]) -> None:
    """Reserves version numbers: no query that is registered later gets one of them."""
    raise_counter(connection, FORGOTTEN, max(versions, default=0))


def note_older(connection: Connection, now_ms: int) -> None:
    """Records that the catalog is older than what edges have: both stores were replaced by copies.

    New answers get revisions above `now_ms`, because readers may have lower ones (`ResultStore.begin_after_restore`).
    Later queries and tables get versions above `now_ms` in seconds, because edges may have lower ones.
    """
    raise_counter(connection, OLDER, now_ms)
    remember_versions(connection, [now_ms // 1000])
    raise_counter(connection, TABLES_FORGOTTEN, now_ms // 1000)


def raise_counter(connection: Connection, name: str, value: int) -> None:
    """Sets a counter to a value, unless it is greater already."""
    upsert(connection, t.counters, [{"name": name, "value": max(value, read_counter(connection, name))}])


def readable(row: Row[Any]) -> RegisteredQuery | None:
    """Reads a row; None: the query cannot be read here, because it has a function whose package is not installed.

    An unreadable query is logged once and left out, so that it does not block other queries.
    """
    try:
        return query_from_row(row)
    except StorageError as exc:
        _log_once(exc.message)
        return None


@lru_cache(maxsize=MAX_QUERIES)
def _log_once(message: str) -> None:
    log.error("%s; the query is ignored until it can be read", message)


def query_from_row(row: Row[Any]) -> RegisteredQuery:
    try:
        spec = _read_spec(json.dumps(row.spec))
    except InvalidQuery as exc:
        raise StorageError(f"query {row.name}@{row.version} in the catalog cannot be read here: {exc.message}") from exc
    windows = ALL_WINDOWS
    if (row.from_ms, row.until_ms) != (MIN_TIME_MS, MAX_TIME_MS):
        windows = WindowRange(row.from_ms, row.until_ms)
    ref, ended_at_ms = QueryRef(row.name, row.version), row.ended_at_ms or None
    return RegisteredQuery(ref, spec, row.registered_at_ms, row.deleted_at_ms, windows, ended_at_ms)


@lru_cache(maxsize=MAX_QUERIES)
def _read_spec(mapping: str) -> QuerySpec:
    """Reads a spec. The result is cached: to parse SQL takes a millisecond, and after each change of a query every
    process reads all queries."""
    return QuerySpec.from_mapping(json.loads(mapping))


def require_fit_at_edges(spec: QuerySpec, edges: Iterable[EdgeRecord]) -> None:
    """Binds the spec to the stream of each expected edge. Raises InvalidQuery if it does not fit."""
    for edge in edges:
        stream = edge.stream(spec.stream)
        if stream is None or edge.retired or (spec.edges is not None and edge.edge not in spec.edges):
            continue
        require_fit(spec, stream.columns, f"at edge {edge.edge}")


def require_fit(spec: QuerySpec, columns: Mapping[str, pa.DataType], where: str) -> None:
    try:
        for bound in spec.bind(columns).measures:
            if bound.argument is not None:
                bound.measure.require_no_condition(bound.argument.type)
    except InvalidQuery as exc:
        where += f", {exc.reason}" if exc.reason else ""
        raise InvalidQuery(exc.field, exc.value, exc.accepted, where) from exc
