"""The catalog: queries and their versions, edges, and the index of the frame log.

The one place where gateways, the job and the API agree, as one database that any number of processes
and threads use at once. Every method is one transaction and blocks: call it off the event loop.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Row, delete, func, insert, select, update

from center.catalog import budget_rows as share_rows
from center.catalog import schema as t
from center.catalog.budget_rows import ComputeBudgetUpdate
from center.catalog.edge_rows import bump, count, describe, edge_rows, greet, incarnation_row, lock
from center.catalog.edges import (
    AlarmRecord,
    EdgeRecord,
    HeartbeatRecord,
    QueryStatusRecord,
    StreamRecord,
    expected_edges,
    require_consistent_schema,
)
from center.catalog.frame_index import (
    FrameEntry,
    IndexOutcome,
    SegmentDropped,
    UnindexedFrame,
    entries,
    forget,
    index_frames,
    last_positions,
    query_from_key,
    query_key,
    spent,
)
from center.storage.database import open_engine, read_transaction, schema_transaction, write_transaction
from edgewater.errors import Conflict, InvalidQuery, NotFound, ProtocolError, StorageError
from edgewater.query import QuerySpec
from edgewater.streams import EdgeId
from edgewater.wire.frames import QueryRef

__all__ = [
    "AlarmRecord",
    "Catalog",
    "EdgeRecord",
    "FrameEntry",
    "HeartbeatRecord",
    "IndexOutcome",
    "QueryStatusRecord",
    "RegisteredQuery",
    "SegmentDropped",
    "StreamRecord",
    "UnindexedFrame",
    "expected_edges",
    "query_from_key",
    "query_key",
]

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
MAX_QUERIES = 10_000
MAX_MESSAGES = 20
"""Alarms of one kind at one edge that are told apart by their message."""
MAX_ALARMS = 1_000
"""Alarms that are read at once."""


@dataclass(frozen=True, slots=True)
class RegisteredQuery:
    """A query with the version that registration gave it."""

    ref: QueryRef
    spec: QuerySpec
    registered_at_ms: int
    deleted_at_ms: int | None

    @property
    def key(self) -> str:
        return query_key(self.ref)


class Catalog:
    """Opens the catalog, making its tables if they are not there.

    Args:
        url: SQLAlchemy URL, ``sqlite:////path/to/catalog.db`` or ``postgresql+psycopg://…``.

    Raises:
        InvalidConfig: not a URL of SQLite or PostgreSQL.
        StorageError: the database cannot be used, or belongs to a newer release. So does every method.
    """

    def __init__(self, url: str) -> None:
        self._engine = open_engine(url)
        with schema_transaction(self._engine, t.metadata) as connection:
            rows = select(t.counters.c.name, t.counters.c.value)
            counters: dict[str, int] = dict(connection.execute(rows).all())
            for name, value in (("schema", SCHEMA_VERSION), ("catalog", 0), ("shares", 0)):
                if name not in counters:
                    connection.execute(insert(t.counters).values(name=name, value=value))
            if counters.get("schema", SCHEMA_VERSION) > SCHEMA_VERSION:
                raise StorageError(
                    f"catalog of schema {counters['schema']}, this release reads up to {SCHEMA_VERSION}: upgrade it"
                )

    def close(self) -> None:
        self._engine.dispose()

    # Queries

    def register(self, spec: QuerySpec, now_ms: int) -> RegisteredQuery:
        """Registers a query; the same one again is the one that is there.

        Raises:
            Conflict: another query lives under that name.
            InvalidQuery: it does not fit the stream as an edge serves it; names the edge.
        """
        mapping = spec.to_mapping()
        with write_transaction(self._engine) as connection:
            lock(connection)
            rows = connection.execute(select(t.queries).where(t.queries.c.name == spec.name)).all()
            for live in (_query_from_row(r) for r in rows if r.deleted_at_ms is None):
                if live.spec == spec:
                    return live
                raise Conflict(
                    f"query {spec.name}: another one is registered under this name, as version {live.ref.version};"
                    " delete it first or take another name"
                )
            if count(connection, t.queries) >= MAX_QUERIES:
                raise Conflict(f"query {spec.name}: {MAX_QUERIES} queries have been registered, which is the limit")
            _check_columns(spec, edge_rows(connection))
            version = max((r.version for r in rows), default=0) + 1
            row = {"name": spec.name, "version": version, "spec": mapping, "registered_at_ms": now_ms}
            connection.execute(insert(t.queries).values(**row, last_position=0))
            bump(connection)
        return RegisteredQuery(QueryRef(spec.name, version), spec, now_ms, None)

    def delete(self, name: str, now_ms: int) -> None:
        """Ends the live query of that name. Frames it has stay until they are forgotten. Raises NotFound."""
        with write_transaction(self._engine) as connection:
            lock(connection)
            live = (t.queries.c.name == name) & t.queries.c.deleted_at_ms.is_(None)
            if connection.execute(update(t.queries).where(live).values(deleted_at_ms=now_ms)).rowcount == 0:
                raise NotFound(f"query {name} is not registered")
            connection.execute(delete(t.statuses).where(t.statuses.c.name == name))
            bump(connection)

    def query(self, name: str) -> RegisteredQuery:
        """The live query of that name. Raises NotFound."""
        live = select(t.queries).where(t.queries.c.name == name, t.queries.c.deleted_at_ms.is_(None))
        with read_transaction(self._engine) as connection:
            row = connection.execute(live).first()
        if row is None:
            raise NotFound(f"query {name} is not registered")
        return _query_from_row(row)

    def queries(self, *, deleted: bool = False) -> list[RegisteredQuery]:
        """The live queries, and the deleted ones too if asked; by name and version.

        One that this release cannot read (a function whose package is not installed here) is left out and
        told in the log: the others must not wait for it.
        """
        rows = select(t.queries).order_by(t.queries.c.name, t.queries.c.version)
        if not deleted:
            rows = rows.where(t.queries.c.deleted_at_ms.is_(None))
        with read_transaction(self._engine) as connection:
            read = [_readable(row) for row in connection.execute(rows)]
        return [query for query in read if query is not None]

    def version(self) -> int:
        """A number that rises with whatever changes what an edge is asked or how a budget is shared:
        a query registered or deleted, an edge new, retired or with other streams. Cheap to poll."""
        with read_transaction(self._engine) as connection:
            return int(
                connection.execute(select(t.counters.c.value).where(t.counters.c.name == "catalog")).scalar_one()
            )

    # Shares of budgets

    def budgets_version(self) -> int:
        """A number that rises with every change of what edges are told of their budgets. Cheap to poll."""
        with read_transaction(self._engine) as connection:
            return share_rows.version(connection)

    def update_budget(self, ref: QueryRef, change: ComputeBudgetUpdate, now_ms: int) -> tuple[Any, bool]:
        """Lets `change` alter a query's share book in one transaction; its result, and whether it was written."""
        with write_transaction(self._engine) as connection:
            return share_rows.change(connection, ref, change, now_ms)

    def budget_states(self, after: int) -> dict[QueryRef, Any]:
        """The books of which the words have changed since `budgets_version` was `after`."""
        with read_transaction(self._engine) as connection:
            return share_rows.books(connection, after)

    def record_processing_delay(self, ref: QueryRef, center_ms: int, now_ms: int) -> None:
        """How long the center takes, from a frame's arrival until its values are answered with."""
        with write_transaction(self._engine) as connection:
            share_rows.record_processing_delay(connection, ref, center_ms, now_ms)

    def processing_delays(self) -> dict[QueryRef, int]:
        """What `record_processing_delay` was told last, in ms."""
        with read_transaction(self._engine) as connection:
            return share_rows.processing_delays(connection)

    def record_sampling_rates(self, ref: QueryRef, rates: Mapping[EdgeId, float]) -> None:
        """By edge, the part of its records that the query's accuracy needs processed."""
        with write_transaction(self._engine) as connection:
            share_rows.record_sampling_rates(connection, ref, rates)

    def sampling_rates(self) -> dict[QueryRef, dict[EdgeId, float]]:
        """What `record_sampling_rates` was told last."""
        with read_transaction(self._engine) as connection:
            return share_rows.sampling_rates(connection)

    # Edges

    def hello(
        self,
        edge: EdgeId,
        incarnation: str,
        *,
        labels: Mapping[str, str],
        streams: Sequence[StreamRecord],
        oldest_seq: int,
        next_seq: int,
        now_ms: int,
        session: str = "",
    ) -> int | None:
        """Notes a session's beginning; the highest seq of this incarnation that is durable, or None.

        An edge that had been retired is one of the others again. An alarm is raised if frames are gone
        that neither side has (the center's state is older than what it acknowledged).

        Args:
            oldest_seq, next_seq: frames that the edge still holds are ``oldest_seq … next_seq - 1``.
            session: names the session, for `disconnected`.

        Raises:
            ProtocolError: the center has more frames of this incarnation than the edge ever made: the
                edge's state is a copy from the past. It raises an alarm too. Or a column has another type
                than at an edge that serves the same stream: their partials would not merge.
        """
        with write_transaction(self._engine) as connection:
            lock(connection)
            # Under the lock: of two first Hellos at once, the second has to see the first.
            require_consistent_schema(edge, streams, edge_rows(connection))
            first, awaited = incarnation_row(connection, edge, incarnation, locked=True) or (oldest_seq, oldest_seq)
            behind = next_seq < awaited
            if behind:
                message = (
                    f"edge {edge}: incarnation {incarnation} is about to make frame {next_seq}, but the center has"
                    f" its frames up to {awaited - 1}; its state is older than what it sent: give it a new incarnation"
                )
                _alarm(connection, "edge-state-behind", message, edge, now_ms)
            else:
                if oldest_seq > awaited:
                    lost = f"edge {edge}: frames {awaited} to {oldest_seq - 1} of incarnation {incarnation} are lost"
                    _alarm(connection, "frames-lost", lost, edge, now_ms)
                    awaited = oldest_seq
                greet(connection, edge, incarnation, first, awaited)
                describe(connection, edge, incarnation, labels, streams, now_ms, session)
        if behind:
            raise ProtocolError(message)
        return awaited - 1 if awaited > first else None

    def heartbeats(self, records: Iterable[HeartbeatRecord]) -> None:
        """Notes heartbeats of any number of edges in one transaction; unknown edges are passed over."""
        with write_transaction(self._engine) as connection:
            # Sorted, or two gateways that each hold a row would wait for the other's.
            for record in sorted(records, key=lambda r: r.edge):
                connection.execute(update(t.edges).where(t.edges.c.edge == record.edge).values(**record.to_row()))

    def disconnected(self, edge: EdgeId, now_ms: int, session: str | None = None) -> None:
        """Notes a session's end, unless a newer one than `session` has begun."""
        row = t.edges.c.edge == edge
        if session is not None:
            row &= t.edges.c.session == session
        with write_transaction(self._engine) as connection:
            connection.execute(update(t.edges).where(row).values(connected=False, last_seen_ms=now_ms))

    def retire(self, edge: EdgeId) -> None:
        """Declares an edge gone for good: answers no longer wait for it. Raises NotFound."""
        with write_transaction(self._engine) as connection:
            lock(connection)
            retired = update(t.edges).where(t.edges.c.edge == edge).values(retired=True)
            if connection.execute(retired).rowcount == 0:
                raise NotFound(f"edge {edge} has never connected")
            bump(connection)

    def edges(self) -> list[EdgeRecord]:
        """All edges that ever said Hello, by id."""
        with read_transaction(self._engine) as connection:
            return edge_rows(connection)

    def edge(self, edge: EdgeId | str) -> EdgeRecord:
        """Raises NotFound."""
        with read_transaction(self._engine) as connection:
            found = edge_rows(connection, edge)
        if not found:
            raise NotFound(f"edge {edge} has never connected")
        return found[0]

    def query_status(self, edge: EdgeId, ref: QueryRef, accepted: bool, code: str, message: str) -> None:
        """Notes whether an edge runs a live query, replacing what it said before; of others nothing is noted."""
        c = t.statuses.c
        row = (c.name == ref.name) & (c.version == ref.version) & (c.edge == edge)
        values: dict[str, Any] = {"accepted": accepted, "code": code[:64], "message": message[:4_000]}
        with write_transaction(self._engine) as connection:
            lock(connection)
            q = t.queries.c
            live = (q.name == ref.name) & (q.version == ref.version) & q.deleted_at_ms.is_(None)
            if connection.execute(select(q.name).where(live)).first() is None:
                return
            if connection.execute(update(t.statuses).where(row).values(**values)).rowcount == 0:
                values |= {"name": ref.name, "version": ref.version, "edge": edge}
                connection.execute(insert(t.statuses).values(**values))

    def statuses(self, ref: QueryRef) -> dict[EdgeId, QueryStatusRecord]:
        """What each edge has said of a query; an edge that has not is not in it."""
        c = t.statuses.c
        rows = select(t.statuses).where(c.name == ref.name, c.version == ref.version).order_by(c.edge)
        with read_transaction(self._engine) as connection:
            return {
                EdgeId(r.edge): QueryStatusRecord(ref, EdgeId(r.edge), r.accepted, r.code, r.message)
                for r in connection.execute(rows)
            }

    # Frames

    def acked_through(self, edge: EdgeId, incarnation: str) -> int | None:
        """The highest seq that is durable, all before it being so too; None if none is."""
        with read_transaction(self._engine) as connection:
            first, awaited = incarnation_row(connection, edge, incarnation) or (0, 0)
        return awaited - 1 if awaited > first else None

    def index(self, frames: Sequence[UnindexedFrame]) -> list[IndexOutcome]:
        """Indexes frames in one transaction and says of each what became of it, in the order given.

        Once it returns, what is `acknowledged` may be acknowledged. A frame below `acked_through` is a
        re-delivery, a frame right above it is new, any other is refused. New frames get the query's
        next positions, which become visible in order.

        Raises:
            SegmentDropped: append the frames to a new segment and come again; nothing was indexed.
        """
        if not frames:
            return []
        with write_transaction(self._engine) as connection:
            return index_frames(connection, frames)

    def positions(self) -> dict[str, int]:
        """Last position by query key, sorted: live queries, and deleted ones that still have frames."""
        with read_transaction(self._engine) as connection:
            return last_positions(connection)

    def frames(self, key: str, after: int, through: int) -> list[FrameEntry]:
        """A query's frames at positions ``after + 1 … through``, ascending."""
        with read_transaction(self._engine) as connection:
            return entries(connection, key, after, through)

    def drop_frames(self, through: Mapping[str, int]) -> list[str]:
        """Retention: drops the index up to a position per query key.

        Returns:
            The segments that nothing points to any more; remove them from the log. No frame will be
            indexed in them, even if a gateway still has one open.
        """
        with write_transaction(self._engine) as connection:
            return forget(connection, through)

    def removable_segments(self, segments: Sequence[str]) -> list[str]:
        """Of these segments of the log, those that no frame stands in or ever will; they may be removed."""
        with read_transaction(self._engine) as connection:
            return spent(connection, segments)

    # Alarms

    def add_alarm(self, kind: str, message: str, edge: EdgeId, now_ms: int) -> None:
        """Records something that must not happen; the same again is counted, not added.

        Beyond `MAX_MESSAGES` of one kind at one edge, the message takes the place, and goes on with the count,
        of the one that came last the longest ago.
        """
        with write_transaction(self._engine) as connection:
            lock(connection)
            _alarm(connection, kind, message, edge, now_ms)

    def alarms(self, limit: int = MAX_ALARMS) -> list[AlarmRecord]:
        """The latest alarms, the latest first."""
        rows = select(t.alarms).order_by(t.alarms.c.last_at_ms.desc(), t.alarms.c.id.desc()).limit(limit)
        with read_transaction(self._engine) as connection:
            return [
                AlarmRecord(r.kind, EdgeId(r.edge), r.message, r.first_at_ms, r.last_at_ms, r.times)
                for r in connection.execute(rows)
            ]


def _readable(row: Row[Any]) -> RegisteredQuery | None:
    try:
        return _query_from_row(row)
    except StorageError as exc:
        _tell_once(exc.message)
        return None


@lru_cache(maxsize=MAX_QUERIES)
def _tell_once(message: str) -> None:
    logger.error("%s; it is left out until it can be read", message)


def _query_from_row(row: Row[Any]) -> RegisteredQuery:
    try:
        spec = _read_spec(json.dumps(row.spec))
    except InvalidQuery as exc:
        raise StorageError(f"query {row.name}@{row.version} in the catalog cannot be read here: {exc.message}") from exc
    return RegisteredQuery(QueryRef(row.name, row.version), spec, row.registered_at_ms, row.deleted_at_ms)


@lru_cache(maxsize=MAX_QUERIES)
def _read_spec(mapping: str) -> QuerySpec:
    """Parsing SQL costs a millisecond, and every process reads all queries whenever one changes."""
    return QuerySpec.from_mapping(json.loads(mapping))


def _check_columns(spec: QuerySpec, edges: Iterable[EdgeRecord]) -> None:
    """Binds the spec to its stream as each edge that will answer serves it."""
    for edge in edges:
        stream = edge.stream(spec.stream)
        if stream is None or edge.retired or (spec.edges is not None and edge.edge not in spec.edges):
            continue
        try:
            spec.bind(stream.columns)
        except InvalidQuery as exc:
            where = f"at edge {edge.edge}" + (f", {exc.reason}" if exc.reason else "")
            raise InvalidQuery(exc.field, exc.value, exc.accepted, where) from exc


def _alarm(connection: Connection, kind: str, message: str, edge: EdgeId, now_ms: int) -> None:
    c = t.alarms.c
    alike = (c.kind == kind) & (c.edge == edge)
    again = update(t.alarms).values(last_at_ms=now_ms, times=c.times + 1)
    if connection.execute(again.where(alike, c.message == message)).rowcount:
        return
    if connection.execute(select(func.count()).where(alike)).scalar_one() >= MAX_MESSAGES:
        # Messages name frames, so there is no end of them; the count goes on, so none is lost from the sum.
        oldest = select(c.id).where(alike).order_by(c.last_at_ms, c.id).limit(1).scalar_subquery()
        connection.execute(again.where(c.id == oldest).values(message=message))
    else:
        values = {"kind": kind, "edge": edge, "message": message, "first_at_ms": now_ms, "last_at_ms": now_ms}
        connection.execute(insert(t.alarms).values(**values, times=1))
