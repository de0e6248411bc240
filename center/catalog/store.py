"""The catalog: queries and their versions, edges, budgets, and the index of the frame log.

The common state of gateways, job and API, in one database that any number of processes and threads use concurrently.
Every method is one transaction and blocks: call it off the event loop.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Row, delete, exists, func, insert, or_, select, update

from center.catalog import budget_rows, frame_index, quarantine
from center.catalog import schema as t
from center.catalog.budget_rows import ComputeBudgetUpdate
from center.catalog.edge_rows import (
    count_rows,
    incarnation_in_use,
    increment_version,
    lock_catalog,
    record_lost_state,
    select_edges,
    select_incarnation,
    upsert_edge,
    upsert_incarnation,
)
from center.catalog.edges import (
    AlarmRecord,
    EdgeRecord,
    HeartbeatRecord,
    QueryStatusRecord,
    StreamRecord,
    require_consistent_schema,
)
from center.catalog.frame_index import IndexOutcome, UnindexedFrame, query_key
from center.catalog.quarantine import QuarantinedFrame
from center.edge_access import UNLIMITED, EdgeAccess
from center.storage.database import open_engine, read_transaction, schema_transaction, write_transaction
from center.storage.frame_log import FrameEntry
from edgewater.errors import Conflict, InvalidQuery, NotFound, ProtocolError, StorageError
from edgewater.query import QuerySpec
from edgewater.streams import EdgeId
from edgewater.wire import QueryRef

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
MAX_QUERIES = 10_000
"""Queries that are live, or were deleted less than `FORGET_AFTER_MS` ago, or have frames that are kept."""
FORGET_AFTER_MS = 86_400_000
"""Time after which a deleted query may be forgotten: the job has dropped its state by then."""
FORGOTTEN = "forgotten"
"""The counter of the highest version of a query that was forgotten."""
MAX_MESSAGES = 20
"""Alarms of one kind at one edge that are distinguished by their message."""
MAX_ALARMS = 1_000
"""Alarms that one call reads."""


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
    """Opens the catalog and creates missing tables.

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
            for name, value in (("schema", SCHEMA_VERSION), ("catalog", 0), ("budgets", 0)):
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
        """Registers a query; registering an equal one again returns the live one.

        Raises:
            Conflict: another query is live under that name, or there are `MAX_QUERIES`.
            InvalidQuery: it does not fit the stream as an edge serves it; names the edge. Or a record of it costs too
                much.
        """
        mapping = spec.to_mapping()
        with write_transaction(self._engine) as connection:
            lock_catalog(connection)
            rows = connection.execute(select(t.queries).where(t.queries.c.name == spec.name)).all()
            for live in (_query_from_row(r) for r in rows if r.deleted_at_ms is None):
                if live.spec == spec:
                    return live
                raise Conflict(
                    f"query {spec.name}: another one is registered under this name, as version {live.ref.version};"
                    " delete it first or take another name"
                )
            spec.window.require_affordable()
            if count_rows(connection, t.queries) >= MAX_QUERIES:
                _forget_ended(connection, now_ms - FORGET_AFTER_MS)
            if count_rows(connection, t.queries) >= MAX_QUERIES:
                raise Conflict(
                    f"query {spec.name}: {MAX_QUERIES} queries are registered or were deleted within a day, which is"
                    " the limit"
                )
            _check_columns(spec, select_edges(connection))
            version = max([r.version for r in rows], default=0)
            version = max(version, _counter(connection, FORGOTTEN)) + 1
            row = {"name": spec.name, "version": version, "spec": mapping, "registered_at_ms": now_ms}
            connection.execute(insert(t.queries).values(**row, last_position=0))
            increment_version(connection)
        return RegisteredQuery(QueryRef(spec.name, version), spec, now_ms, None)

    def delete(self, name: str, now_ms: int) -> None:
        """Deletes the live query of that name. Its frames stay until retention drops them. Raises NotFound."""
        with write_transaction(self._engine) as connection:
            lock_catalog(connection)
            live = (t.queries.c.name == name) & t.queries.c.deleted_at_ms.is_(None)
            if connection.execute(update(t.queries).where(live).values(deleted_at_ms=now_ms)).rowcount == 0:
                raise NotFound(f"query {name} is not registered")
            connection.execute(delete(t.statuses).where(t.statuses.c.name == name))
            increment_version(connection)

    def query(self, name: str) -> RegisteredQuery:
        """The live query of that name. Raises NotFound."""
        live = select(t.queries).where(t.queries.c.name == name, t.queries.c.deleted_at_ms.is_(None))
        with read_transaction(self._engine) as connection:
            row = connection.execute(live).first()
        if row is None:
            raise NotFound(f"query {name} is not registered")
        return _query_from_row(row)

    def queries(self, *, deleted: bool = False) -> list[RegisteredQuery]:
        """The live queries by name and version, with `deleted` also the deleted ones.

        A query that cannot be read here (a function whose package is not installed) is logged and left out, so that it
        does not block the others.
        """
        rows = select(t.queries).order_by(t.queries.c.name, t.queries.c.version)
        if not deleted:
            rows = rows.where(t.queries.c.deleted_at_ms.is_(None))
        with read_transaction(self._engine) as connection:
            read = [_readable(row) for row in connection.execute(rows)]
        return [query for query in read if query is not None]

    def version(self) -> int:
        """A number that increases with every change of queries and edges that assignments depend on. Cheap to poll.

        That is: a query registered or deleted; an edge that is new, retired, or serves other streams.
        """
        with read_transaction(self._engine) as connection:
            return int(
                connection.execute(select(t.counters.c.value).where(t.counters.c.name == "catalog")).scalar_one()
            )

    # Budgets

    def budgets_version(self) -> int:
        """A number that increases with every change of grants, processing delays or sampling rates. Cheap to poll."""
        with read_transaction(self._engine) as connection:
            return budget_rows.read_version(connection)

    def update_budget(self, ref: QueryRef, compute: ComputeBudgetUpdate, now_ms: int) -> tuple[Any, bool]:
        """Updates a budget's state by `compute` in one transaction; returns its result, and whether it was written."""
        with write_transaction(self._engine) as connection:
            return budget_rows.update_state(connection, ref, compute, now_ms)

    def budget_states(self, after: int) -> dict[QueryRef, Any]:
        """The states whose grants have changed since `budgets_version` was `after`."""
        with read_transaction(self._engine) as connection:
            return budget_rows.read_states(connection, after)

    def record_processing_delay(self, ref: QueryRef, delay_ms: int, now_ms: int) -> None:
        """Stores a query's processing delay at the center: from a frame's arrival to answers with its values."""
        with write_transaction(self._engine) as connection:
            budget_rows.write_processing_delay(connection, ref, delay_ms, now_ms)

    def processing_delays(self) -> dict[QueryRef, int]:
        """The stored processing delays, ms."""
        with read_transaction(self._engine) as connection:
            return budget_rows.read_processing_delays(connection)

    def record_sampling_rates(self, ref: QueryRef, rates: Mapping[EdgeId, float]) -> None:
        """Stores, by edge, the fraction of records that the query's accuracy needs processed."""
        with write_transaction(self._engine) as connection:
            budget_rows.write_sampling_rates(connection, ref, rates)

    def sampling_rates(self) -> dict[QueryRef, dict[EdgeId, float]]:
        """The stored sampling rates."""
        with read_transaction(self._engine) as connection:
            return budget_rows.read_sampling_rates(connection)

    # Edges

    def begin_session(
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
        access: EdgeAccess = UNLIMITED,
    ) -> int | None:
        """Records the start of a session; returns the highest durable seq of this incarnation, or None.

        A retired edge is no longer retired. An alarm is added, and `EdgeRecord.state_lost_at_ms` set, if frames are
        lost on both sides (the center's state is older than what it acknowledged), or if another incarnation of the
        edge was in use: what that one had accepted and not shipped is unknown. If two incarnations take turns, the
        alarm says that two agents have one id.

        Args:
            oldest_seq, next_seq: frames that the edge still holds are ``oldest_seq … next_seq - 1``.
            session: names the session, for `end_session`.
            access: what the edge may serve; it holds for the streams that it has ceased to serve, too.

        Raises:
            ProtocolError: the center has more frames of this incarnation than the edge has built: the edge runs from an
                old copy of its state (also adds an alarm). Or a column has another type than at another edge that
                serves the stream, so that their partials would not merge.
        """
        with write_transaction(self._engine) as connection:
            lock_catalog(connection)
            # Under the lock: the second of two concurrent first Hellos must see the first.
            require_consistent_schema(edge, streams, select_edges(connection))
            known = select_incarnation(connection, edge, incarnation, locked=True)
            first, awaited = known or (oldest_seq, oldest_seq)
            behind = next_seq < awaited
            if behind:
                message = (
                    f"edge {edge}: incarnation {incarnation} is about to build frame {next_seq}, but the center has"
                    f" its frames up to {awaited - 1}; its state is older than what it sent: give it a new incarnation"
                )
                _alarm(connection, "edge-state-behind", message, edge, now_ms)
            else:
                if oldest_seq > awaited:
                    lost = f"edge {edge}: frames {awaited} to {oldest_seq - 1} of incarnation {incarnation} are lost"
                    _alarm(connection, "frames-lost", lost, edge, now_ms)
                    record_lost_state(connection, edge, now_ms)
                    awaited = oldest_seq
                previous = incarnation_in_use(connection, edge)
                if previous is not None and previous != incarnation:
                    _alarm(connection, *_state_lost(edge, incarnation, previous, known is not None), edge, now_ms)
                    record_lost_state(connection, edge, now_ms)
                upsert_incarnation(connection, edge, incarnation, first, awaited)
                upsert_edge(connection, edge, incarnation, labels, streams, now_ms, session, access)
        if behind:
            raise ProtocolError(message)
        return awaited - 1 if awaited > first else None

    def record_heartbeats(self, records: Iterable[HeartbeatRecord]) -> None:
        """Records heartbeats of any number of edges in one transaction; unknown edges are ignored."""
        with write_transaction(self._engine) as connection:
            # Sorted, or two gateways that each hold a row lock could deadlock.
            for record in sorted(records, key=lambda r: r.edge):
                connection.execute(update(t.edges).where(t.edges.c.edge == record.edge).values(**record.to_row()))

    def end_session(self, edge: EdgeId, now_ms: int, session: str | None = None) -> None:
        """Records the end of a session, unless a newer one than `session` has begun."""
        row = t.edges.c.edge == edge
        if session is not None:
            row &= t.edges.c.session == session
        with write_transaction(self._engine) as connection:
            connection.execute(update(t.edges).where(row).values(connected=False, last_seen_ms=now_ms))

    def retire(self, edge: EdgeId) -> None:
        """Declares an edge gone for good: answers no longer wait for it. Raises NotFound."""
        with write_transaction(self._engine) as connection:
            lock_catalog(connection)
            retired = update(t.edges).where(t.edges.c.edge == edge).values(retired=True)
            if connection.execute(retired).rowcount == 0:
                raise NotFound(f"edge {edge} has never connected")
            increment_version(connection)

    def edges(self) -> list[EdgeRecord]:
        """All edges that ever sent a Hello, by id."""
        with read_transaction(self._engine) as connection:
            return select_edges(connection)

    def edge(self, edge: EdgeId | str) -> EdgeRecord:
        """Raises NotFound."""
        with read_transaction(self._engine) as connection:
            found = select_edges(connection, edge)
        if not found:
            raise NotFound(f"edge {edge} has never connected")
        return found[0]

    def record_query_status(self, edge: EdgeId, ref: QueryRef, accepted: bool, code: str, message: str) -> None:
        """As `record_query_statuses`, of one."""
        self.record_query_statuses([QueryStatusRecord(ref, edge, accepted, code, message)])

    def record_query_statuses(self, statuses: Iterable[QueryStatusRecord]) -> None:
        """Records whether edges run queries, replacing their last statuses, in one transaction; those of queries that
        are not live are ignored."""
        c, q = t.statuses.c, t.queries.c
        with write_transaction(self._engine) as connection:
            lock_catalog(connection)
            rows = connection.execute(select(q.name, q.version).where(q.deleted_at_ms.is_(None)))
            live = {QueryRef(name, version) for name, version in rows}
            for status in (s for s in statuses if s.query in live):
                key = {"name": status.query.name, "version": status.query.version, "edge": status.edge}
                values = {"accepted": status.accepted, "code": status.code[:64], "message": status.message[:4_000]}
                row = (c.name == key["name"]) & (c.version == key["version"]) & (c.edge == key["edge"])
                if connection.execute(update(t.statuses).where(row).values(**values)).rowcount == 0:
                    connection.execute(insert(t.statuses).values(**key, **values))

    def query_statuses(self, ref: QueryRef) -> dict[EdgeId, QueryStatusRecord]:
        """The status of a query by edge, for the edges that have reported one."""
        c = t.statuses.c
        rows = select(t.statuses).where(c.name == ref.name, c.version == ref.version).order_by(c.edge)
        with read_transaction(self._engine) as connection:
            return {
                EdgeId(r.edge): QueryStatusRecord(ref, EdgeId(r.edge), r.accepted, r.code, r.message)
                for r in connection.execute(rows)
            }

    # Frames

    def acked_through(self, edge: EdgeId, incarnation: str) -> int | None:
        """The highest seq up to which all frames are durable; None if there is none."""
        with read_transaction(self._engine) as connection:
            first, awaited = select_incarnation(connection, edge, incarnation) or (0, 0)
        return awaited - 1 if awaited > first else None

    def index(self, frames: Sequence[UnindexedFrame]) -> list[IndexOutcome]:
        """Indexes frames in one transaction and returns each one's outcome, in the order of `frames`.

        Once it returns, frames whose outcome is `acknowledged` may be acknowledged. A frame up to `acked_through` is a
        re-delivery, the frame right above it is new, any other is out of sequence. New frames get the query's next
        positions, which become visible in order.

        Raises:
            SegmentDropped: nothing was indexed; append the frames to a new segment and call again.
        """
        if not frames:
            return []
        with write_transaction(self._engine) as connection:
            return frame_index.index_frames(connection, frames)

    def last_positions(self) -> dict[str, int]:
        """Last position by query key, sorted, of live queries and of deleted ones that still have frames."""
        with read_transaction(self._engine) as connection:
            return frame_index.last_positions(connection)

    def frames(self, key: str, after: int, through: int) -> list[FrameEntry]:
        """A query's frames at positions ``after + 1 … through``, ascending."""
        with read_transaction(self._engine) as connection:
            return frame_index.select_entries(connection, key, after, through)

    def drop_frames(self, through: Mapping[str, int]) -> list[str]:
        """Retention: drops the index up to a position per query key.

        Returns:
            The segments without indexed frames; remove them from the log. No frame will be indexed in them, even if a
            gateway still has one open.
        """
        with write_transaction(self._engine) as connection:
            return frame_index.drop_frames(connection, through)

    def removable_segments(self, segments: Sequence[str]) -> list[str]:
        """Those of `segments` that have no indexed frame and never will; they may be removed from the log."""
        with read_transaction(self._engine) as connection:
            return frame_index.removable_segments(connection, segments)

    # Frames that the job could not apply

    def quarantine(self, entry: FrameEntry, reason: str, now_ms: int) -> list[str]:
        """Sets a frame aside, with an alarm; a repetition changes nothing.

        Returns:
            The segments of older quarantined frames that had to go (`quarantine.MAX_PER_EDGE`); remove them from the
            log.
        """
        key = query_key(entry.query)
        with write_transaction(self._engine) as connection:
            lock_catalog(connection)
            if quarantine.is_listed(connection, entry):
                return []
            unused = quarantine.add(connection, entry, reason, now_ms)
            message = f"query {key}, frame {entry.position} (seq {entry.seq} of {entry.incarnation}): {reason}"
            _alarm(connection, "frame-quarantined", message, entry.edge, now_ms)
        return unused

    def quarantined(self) -> list[QuarantinedFrame]:
        """The frames that were set aside, the newest first."""
        with read_transaction(self._engine) as connection:
            return quarantine.select_frames(connection)

    def quarantine_reasons(self) -> dict[tuple[str, int], str]:
        """Why frames were set aside, by query key and position."""
        with read_transaction(self._engine) as connection:
            return quarantine.select_reasons(connection)

    def quarantined_frame(self, key: str, position: int) -> QuarantinedFrame:
        """Raises NotFound."""
        with read_transaction(self._engine) as connection:
            return quarantine.select_frame(connection, key, position)

    def retry_quarantined(self, key: str, position: int) -> int:
        """Gives a frame that was set aside, and that the job has applied as a loss, the query's next position, at which
        the job applies it as new data; returns that position.

        Raises:
            NotFound: it is not in quarantine.
            Conflict: its query is deleted.
        """
        with write_transaction(self._engine) as connection:
            return quarantine.retry(connection, key, position)

    def drop_quarantined(self, key: str, position: int) -> str | None:
        """Gives up a frame that was set aside; returns the segment to remove from the log, if it is unused now.

        Raises:
            NotFound: it is not in quarantine.
        """
        with write_transaction(self._engine) as connection:
            return quarantine.drop(connection, key, position)

    # Alarms

    def add_alarm(self, kind: str, message: str, edge: EdgeId, now_ms: int) -> None:
        """Adds an alarm, or counts it if it is a repetition.

        Beyond `MAX_MESSAGES` alarms of one kind at one edge, the message replaces that of the alarm least recently
        raised, and continues its count.
        """
        with write_transaction(self._engine) as connection:
            lock_catalog(connection)
            _alarm(connection, kind, message, edge, now_ms)

    def alarms(self, limit: int = MAX_ALARMS) -> list[AlarmRecord]:
        """The latest alarms, newest first."""
        rows = select(t.alarms).order_by(t.alarms.c.last_at_ms.desc(), t.alarms.c.id.desc()).limit(limit)
        with read_transaction(self._engine) as connection:
            return [
                AlarmRecord(r.kind, EdgeId(r.edge), r.message, r.first_at_ms, r.last_at_ms, r.times)
                for r in connection.execute(rows)
            ]


def _counter(connection: Connection, name: str) -> int:
    value = select(t.counters.c.value).where(t.counters.c.name == name)
    return int(connection.execute(value).scalar_one_or_none() or 0)


def _forget_ended(connection: Connection, before_ms: int) -> None:
    """Deletes the rows of queries that were deleted before a time and have no frames left.

    No later query gets a version of theirs, under any name: edges may still have frames of them.
    """
    c = t.queries.c
    kept = (exists().where(table.c.name == c.name, table.c.version == c.version) for table in (t.frames, t.quarantine))
    ended = (c.deleted_at_ms < before_ms) & ~or_(*kept)
    version = connection.execute(select(func.max(c.version)).where(ended)).scalar_one()
    if version is None:
        return
    version = max(int(version), _counter(connection, FORGOTTEN))
    counter = t.counters.c.name == FORGOTTEN
    if connection.execute(update(t.counters).where(counter).values(value=version)).rowcount == 0:
        connection.execute(insert(t.counters).values(name=FORGOTTEN, value=version))
    connection.execute(delete(t.queries).where(ended))


def _readable(row: Row[Any]) -> RegisteredQuery | None:
    try:
        return _query_from_row(row)
    except StorageError as exc:
        _log_once(exc.message)
        return None


@lru_cache(maxsize=MAX_QUERIES)
def _log_once(message: str) -> None:
    logger.error("%s; the query is ignored until it can be read", message)


def _query_from_row(row: Row[Any]) -> RegisteredQuery:
    try:
        spec = _read_spec(json.dumps(row.spec))
    except InvalidQuery as exc:
        raise StorageError(f"query {row.name}@{row.version} in the catalog cannot be read here: {exc.message}") from exc
    return RegisteredQuery(QueryRef(row.name, row.version), spec, row.registered_at_ms, row.deleted_at_ms)


@lru_cache(maxsize=MAX_QUERIES)
def _read_spec(mapping: str) -> QuerySpec:
    """Cached: parsing SQL takes a millisecond, and every process reads all queries whenever one changes."""
    return QuerySpec.from_mapping(json.loads(mapping))


def _check_columns(spec: QuerySpec, edges: Iterable[EdgeRecord]) -> None:
    """Binds the spec to its stream as each expected edge serves it."""
    for edge in edges:
        stream = edge.stream(spec.stream)
        if stream is None or edge.retired or (spec.edges is not None and edge.edge not in spec.edges):
            continue
        try:
            spec.bind(stream.columns)
        except InvalidQuery as exc:
            where = f"at edge {edge.edge}" + (f", {exc.reason}" if exc.reason else "")
            raise InvalidQuery(exc.field, exc.value, exc.accepted, where) from exc


def _state_lost(edge: EdgeId, incarnation: str, previous: str, returned: bool) -> tuple[str, str]:
    """The kind and the message of the alarm about an incarnation that takes another one's place.

    Args:
        returned: the center has known the incarnation before.
    """
    if returned:
        pair = " and ".join(sorted((incarnation, previous)))
        return "id-in-use-twice", (
            f"edge {edge}: incarnations {pair} take turns: two agents run under this id, or from copies of one state"
            " directory; give each agent an id and a directory of its own"
        )
    return "state-lost", (
        f"edge {edge}: incarnation {incarnation} has taken the place of {previous} without its state; what {previous}"
        " had accepted and not shipped is in no answer, and windows that were open are not complete"
    )


def _alarm(connection: Connection, kind: str, message: str, edge: EdgeId, now_ms: int) -> None:
    c = t.alarms.c
    alike = (c.kind == kind) & (c.edge == edge)
    again = update(t.alarms).values(last_at_ms=now_ms, times=c.times + 1)
    if connection.execute(again.where(alike, c.message == message)).rowcount:
        return
    if connection.execute(select(func.count()).where(alike)).scalar_one() >= MAX_MESSAGES:
        # Messages name frames, so their number is unbounded. The count continues, so the sum stays right.
        oldest = select(c.id).where(alike).order_by(c.last_at_ms, c.id).limit(1).scalar_subquery()
        connection.execute(again.where(c.id == oldest).values(message=message))
    else:
        values = {"kind": kind, "edge": edge, "message": message, "first_at_ms": now_ms, "last_at_ms": now_ms}
        connection.execute(insert(t.alarms).values(**values, times=1))
