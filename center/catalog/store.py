"""The catalog: queries and their versions, edges, budgets, and the index of the frame log.

The common state of gateways, job and API, in one database that any number of processes and threads use concurrently.
Every method is one transaction and blocks: call it off the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, bindparam, delete, insert, select, update

from center.catalog import alarm_rows, budget_rows, delay_rows, frame_index, input_rows, quarantine, suspensions
from center.catalog import schema as t
from center.catalog.budget_rows import ComputeBudgetUpdate
from center.catalog.delay_rows import QueryDelayRecord
from center.catalog.edge_rows import (
    count_rows,
    increment_version,
    lock_catalog,
    record_lost_state,
    select_changed,
    select_edges,
    select_incarnation,
)
from center.catalog.edges import (
    AlarmRecord,
    EdgeRecord,
    HeartbeatRecord,
    QueryStatusRecord,
    StateDigest,
    StreamRecord,
)
from center.catalog.frame_index import IndexOutcome, LastPositions, UnindexedFrame, query_from_key, query_key
from center.catalog.input_rows import InputRecord
from center.catalog.quarantine import QuarantinedFrame
from center.catalog.query_rows import (
    FORGET_AFTER_MS,
    FORGOTTEN,
    MAX_QUERIES,
    RegisteredQuery,
    counter,
    forget_ended,
    live_queries,
    query_from_row,
    readable,
    remember_versions,
    require_fit,
    require_fit_at_edges,
)
from center.catalog.session_rows import SessionBatch, SessionStart
from center.catalog.stream_rows import DeclaredStream, delete_columns, select_declared, write_columns
from center.catalog.suspensions import SuspendedQuery
from center.config import ColumnEntry
from center.edge_access import UNLIMITED, EdgeAccess
from center.storage.database import (
    open_engine,
    read_transaction,
    require_store_format,
    schema_transaction,
    upsert,
    write_transaction,
)
from center.storage.frame_log import FrameEntry
from center.storage.lineage import Lineage, raise_mark, read_lineage, write_lineage
from edgewater.model.errors import Conflict, EdgewaterError, InvalidQuery, NotFound
from edgewater.model.query import QuerySpec
from edgewater.model.streams import EdgeId
from edgewater.wire import QueryRef

FORMAT = 1
"""The format of the tables and of the frame log. Increment it with each change after which an older release cannot read
new data, or this release cannot read old data."""


class Catalog:
    """Opens the catalog and creates missing tables.

    Args:
        url: SQLAlchemy URL, ``sqlite:////path/to/catalog.db`` or ``postgresql+psycopg://…``.
        columns: those of the streams that have them in the configuration.

    Raises:
        InvalidConfig: not a URL of SQLite or PostgreSQL.
        StorageError: the database cannot be used. Every method raises it too.
        IncompatibleState: another release wrote the catalog in another format.
    """

    def __init__(self, url: str, columns: Mapping[str, Mapping[str, ColumnEntry]] | None = None) -> None:
        self._configured = columns or {}
        self._engine = open_engine(url)
        with schema_transaction(self._engine, t.metadata) as connection:
            rows = select(t.counters.c.name, t.counters.c.value)
            counters: dict[str, int] = dict(connection.execute(rows).all())
            require_store_format(connection, "catalog", FORMAT, is_new=not counters)
            for name in ("catalog", "budgets"):
                if name not in counters:
                    connection.execute(insert(t.counters).values(name=name, value=0))

    def close(self) -> None:
        self._engine.dispose()

    # Queries

    def register(
        self, spec: QuerySpec, now_ms: int, seed: int | None = None, *, replaces: bool = False
    ) -> RegisteredQuery:
        """Registers a query; registering an equal one again returns the live one, with the seed that it has.

        Args:
            seed: for a new query, if the spec has none.
            replaces: another live query of that name is deleted in the same transaction, so that it stays if the new
                one is refused.

        Raises:
            Conflict: another query is live under that name and not replaced, or there are `MAX_QUERIES`.
            InvalidQuery: it does not fit the stream's declared columns or, without any, the stream as an edge serves
                it; names the edge. Or a record of it costs too much.
        """
        with write_transaction(self._engine) as connection:
            lock_catalog(connection)
            rows = connection.execute(select(t.queries).where(t.queries.c.name == spec.name)).all()
            if (live := _live_one(rows, spec, replaces)) is not None:
                return live
            spec.window.require_affordable()
            if count_rows(connection, t.queries) >= MAX_QUERIES:
                forget_ended(connection, now_ms - FORGET_AFTER_MS)
            if count_rows(connection, t.queries) >= MAX_QUERIES:
                raise Conflict(
                    f"query {spec.name}: {MAX_QUERIES} queries are registered or were deleted within a day, which is"
                    " the limit"
                )
            if not self._fits_declared(connection, spec):
                require_fit_at_edges(spec, select_edges(connection))
            version = max([r.version for r in rows], default=0)
            version = max(version, counter(connection, FORGOTTEN)) + 1
            _end_live(connection, spec.name, now_ms)
            spec = spec if spec.seed is not None else spec.with_seed(seed)
            row = {"name": spec.name, "version": version, "spec": spec.to_mapping(), "registered_at_ms": now_ms}
            connection.execute(insert(t.queries).values(**row, last_position=0))
            increment_version(connection)
        return RegisteredQuery(QueryRef(spec.name, version), spec, now_ms, None)

    def try_register(
        self, spec: QuerySpec, *, replaces: bool = False
    ) -> tuple[RegisteredQuery | None, InvalidQuery | None]:
        """What `register` would find, without registering: the equal live query, and why an edge's stream does not fit.

        Raises:
            Conflict, InvalidQuery: as `register`, but for what the edges serve.
        """
        with read_transaction(self._engine) as connection:
            rows = connection.execute(select(t.queries).where(t.queries.c.name == spec.name)).all()
            live = _live_one(rows, spec, replaces)
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
        declared = select_declared(connection, self._configured).get(spec.stream)
        if declared is None:
            return False
        require_fit(spec, declared.types, f"by the columns of stream {spec.stream} at the center")
        return True

    def delete(self, name: str, now_ms: int) -> None:
        """Deletes the live query of that name. Its frames stay until retention drops them. Raises NotFound."""
        with write_transaction(self._engine) as connection:
            lock_catalog(connection)
            if not _end_live(connection, name, now_ms):
                raise NotFound(f"query {name} is not registered")
            increment_version(connection)

    def query(self, name: str) -> RegisteredQuery:
        """The live query of that name. Raises NotFound."""
        live = select(t.queries).where(t.queries.c.name == name, t.queries.c.deleted_at_ms.is_(None))
        with read_transaction(self._engine) as connection:
            row = connection.execute(live).first()
        if row is None:
            raise NotFound(f"query {name} is not registered")
        return query_from_row(row)

    def queries(self, *, deleted: bool = False) -> list[RegisteredQuery]:
        """The live queries by name and version, with `deleted` also the deleted ones.

        A query that cannot be read here (a function whose package is not installed) is logged and left out, so that it
        does not block the others.
        """
        rows = select(t.queries).order_by(t.queries.c.name, t.queries.c.version)
        if not deleted:
            rows = rows.where(t.queries.c.deleted_at_ms.is_(None))
        with read_transaction(self._engine) as connection:
            read = [readable(row) for row in connection.execute(rows)]
        return [query for query in read if query is not None]

    def version(self) -> int:
        """A number that increases with every change of queries and edges that assignments depend on. Cheap to poll.

        That is: a query registered or deleted; an edge that is new, retired, or serves other streams; a stream with
        other columns.
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

    def budget_state(self, ref: QueryRef) -> Any:
        """The state of a query's budget as JSON; None: it has none yet."""
        with read_transaction(self._engine) as connection:
            return budget_rows.read_state(connection, ref)

    def budget_states(self, after: int) -> dict[QueryRef, Any]:
        """The states whose grants have changed since `budgets_version` was `after`."""
        with read_transaction(self._engine) as connection:
            return budget_rows.read_states(connection, after)

    def record_processing_delays(self, delays_ms: Mapping[QueryRef, int], now_ms: int) -> None:
        """Stores the processing delays of queries at the center: from a frame's arrival to answers with its values."""
        with write_transaction(self._engine) as connection:
            budget_rows.write_processing_delays(connection, delays_ms, now_ms)

    def processing_delays(self) -> dict[QueryRef, int]:
        """The stored processing delays, ms."""
        with read_transaction(self._engine) as connection:
            return budget_rows.read_processing_delays(connection)

    def record_query_delays(self, records: Iterable[QueryDelayRecord]) -> None:
        """Stores how queries stand at edges, in one transaction; those of queries that are not live are ignored."""
        with write_transaction(self._engine) as connection:
            lock_catalog(connection)
            delay_rows.write_delays(connection, records)

    def record_inputs(self, inputs: Mapping[EdgeId, Sequence[InputRecord]], now_ms: int) -> None:
        """Stores which files edges read, in one transaction; raises alarms about files that are read twice."""
        with write_transaction(self._engine) as connection:
            lock_catalog(connection)  # if two edges read one file, the second report must see the first
            input_rows.write_inputs(connection, inputs, now_ms)

    def query_delays(self) -> dict[QueryRef, list[QueryDelayRecord]]:
        """How live queries stand at the edges that schedule them."""
        with read_transaction(self._engine) as connection:
            return delay_rows.read_delays(connection)

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
        state: StateDigest | None = None,
    ) -> int | None:
        """Records the start of a session; returns the highest durable seq of this incarnation, or None.

        An alarm is added, and `EdgeRecord.state_lost_at_ms` set, if frames are lost on both sides (the center's state
        is older than what it acknowledged), or if another incarnation of the edge was in use: what that one had
        accepted and not shipped is unknown. If two incarnations take turns, the alarm says that two agents have one id.

        Args:
            oldest_seq, next_seq: frames that the edge still holds are ``oldest_seq … next_seq - 1``.
            session: names the session, for `end_sessions`.
            access: what the edge may serve; it holds for the streams that it has ceased to serve, too.
            state: the state that the edge runs on; None: it does not say.

        Raises:
            Retired: it stays retired until it is reinstated.
            OutdatedState: the edge runs on a copy or an older version of the state that the center knows. Also adds an
                alarm and sets `EdgeRecord.state_lost_at_ms`.
            ProtocolError: a column differs from the declared one or, where none is declared, from that of another edge
                that serves the stream, so that their partials would not merge. Also adds an alarm.
            LimitExceeded: see `edge_rows.forget_incarnations`; also adds an alarm.
        """
        start = SessionStart(
            edge, incarnation, labels, streams, oldest_seq, next_seq, now_ms, session, access,
            state=state or StateDigest(),
        )  # fmt: skip
        (outcome,) = self.begin_sessions([start])
        if isinstance(outcome, EdgewaterError):
            raise outcome
        return outcome

    def begin_sessions(self, starts: Sequence[SessionStart]) -> list[int | EdgewaterError | None]:
        """As `begin_session`, of different edges in one transaction; an error is returned in its place."""
        with write_transaction(self._engine) as connection:
            lock_catalog(connection)
            return SessionBatch(connection, starts, select_declared(connection, self._configured)).begin()

    def record_heartbeats(self, records: Iterable[HeartbeatRecord]) -> None:
        """Records heartbeats of any number of edges in one transaction; unknown edges are ignored."""
        with write_transaction(self._engine) as connection:
            # Sorted, or two gateways that each hold a row lock could deadlock.
            rows = [{"this": r.edge, **r.to_row()} for r in sorted(records, key=lambda r: r.edge)]
            if rows:
                connection.execute(update(t.edges).where(t.edges.c.edge == bindparam("this")), rows)

    def record_silence(
        self,
        gateway: str,
        heard: Mapping[EdgeId, tuple[bool, int]],
        *,
        silence_ms: int,
        now_ms: int,
    ) -> None:
        """Records a gateway's sign of life, and which of its edges have fallen silent or have come back.

        Args:
            heard: of those edges, whether the gateway hears from it again, and when it has heard from it last.
            silence_ms: every other edge of the gateway has been heard from within that time.
        """
        c = t.edges.c
        # Not `in_`: its list of parameters cannot be expanded in a statement that is executed for many rows.
        of_edge = (c.edge == bindparam("this")) & ((c.gateway == "") | (c.gateway == bindparam("by")))
        with write_transaction(self._engine) as connection:
            rows = [
                {"this": edge, "by": gateway, "gateway": gateway if again else "", "last_seen_ms": at_ms}
                for edge, (again, at_ms) in sorted(heard.items())
            ]
            if rows:
                connection.execute(update(t.edges).where(of_edge), rows)
            beat = {"gateway": gateway, "beat_at_ms": now_ms, "silence_ms": silence_ms}
            upsert(connection, t.gateways, [beat])

    # Backups

    def lineage(self) -> Lineage:
        """Returns the number of the center and the mark in the catalog."""
        with read_transaction(self._engine) as connection:
            return read_lineage(connection, t.counters)

    def raise_mark(self, mark: int) -> None:
        with write_transaction(self._engine) as connection:
            raise_mark(connection, t.counters, mark)

    def set_lineage(self, lineage: Lineage) -> None:
        with write_transaction(self._engine) as connection:
            write_lineage(connection, t.counters, lineage)

    def state_losses(self, lineage: Lineage, consumed: Mapping[str, int], now_ms: int) -> None:
        """Records that catalog and result store are of different moments: records that any edge has sent may be
        missing.

        Args:
            consumed: by query key, the position of the last frame that the result store has applied. No later frame
                gets that position.
        """
        refs = {query_from_key(key): position for key, position in consumed.items()}
        with write_transaction(self._engine) as connection:
            lock_catalog(connection)
            write_lineage(connection, t.counters, lineage)
            c = t.queries.c
            for ref, position in refs.items():
                behind = (c.name == ref.name) & (c.version == ref.version) & (c.last_position < position)
                connection.execute(update(t.queries).where(behind).values(last_position=position))
            remember_versions(connection, (ref.version for ref in refs))
            for edge in connection.execute(select(t.edges.c.edge)).scalars().all():
                record_lost_state(connection, EdgeId(edge), now_ms)
            message = (
                "the catalog and the results were not of one moment, and an operator has let the center go on with"
                " them: windows that had begun and were not final may lack records of any edge, or count some twice"
            )
            alarm_rows.add(connection, "stores-differ", message, EdgeId(""), now_ms)

    def forget_gateways(self) -> None:
        """Deletes the signs of life of gateways that are not the last one of any edge."""
        in_use = select(t.edges.c.gateway).distinct()
        with write_transaction(self._engine) as connection:
            connection.execute(delete(t.gateways).where(t.gateways.c.gateway.not_in(in_use)))

    def end_sessions(self, ends: Mapping[EdgeId, tuple[str, int]]) -> None:
        """Records the ends of sessions, by edge the session's name and the time. An edge with a newer one keeps it."""
        c = t.edges.c
        this = (c.edge == bindparam("this")) & (c.session == bindparam("ended"))
        rows = [{"this": edge, "ended": name, "last_seen_ms": at_ms} for edge, (name, at_ms) in sorted(ends.items())]
        if rows:
            with write_transaction(self._engine) as connection:
                connection.execute(update(t.edges).where(this).values(connected=False), rows)

    def retire(self, edge: EdgeId) -> None:
        """Declares an edge gone for good: answers no longer wait for it, and it has no session. Raises NotFound."""
        self._set_retired(edge, True)

    def reinstate(self, edge: EdgeId) -> None:
        """Takes a retirement back: queries expect the edge again. Raises NotFound."""
        self._set_retired(edge, False)

    def _set_retired(self, edge: EdgeId, retired: bool) -> None:
        with write_transaction(self._engine) as connection:
            lock_catalog(connection)
            row = update(t.edges).where(t.edges.c.edge == edge).values(retired=retired)
            if connection.execute(row).rowcount == 0:
                raise NotFound(f"edge {edge} has never connected")
            increment_version(connection)

    def edges(self, known: Mapping[EdgeId, EdgeRecord] | None = None) -> list[EdgeRecord]:
        """All edges that ever sent a Hello, by id.

        Args:
            known: records to use again, for those who need no progress: an edge that is not retired and whose streams
                have not changed since is not read.
        """
        with read_transaction(self._engine) as connection:
            return select_changed(connection, known) if known else select_edges(connection)

    def edge(self, edge: EdgeId | str) -> EdgeRecord:
        """Raises NotFound."""
        with read_transaction(self._engine) as connection:
            found = select_edges(connection, [edge])
        if not found:
            raise NotFound(f"edge {edge} has never connected")
        return found[0]

    # Streams

    def declared_streams(self) -> dict[str, DeclaredStream]:
        """The streams whose columns the configuration or an admin declares, by name."""
        with read_transaction(self._engine) as connection:
            return select_declared(connection, self._configured)

    def declare_columns(self, stream: str, columns: Mapping[str, ColumnEntry]) -> None:
        """Declares the columns that a stream's edges may have; the sessions of edges that differ end.

        Raises:
            Conflict: the configuration declares them, or a live query does not fit them.
        """
        with write_transaction(self._engine) as connection:
            lock_catalog(connection)
            self._require_not_configured(stream)
            write_columns(connection, stream, columns)
            types = select_declared(connection, self._configured)[stream].types
            live = select(t.queries).where(t.queries.c.deleted_at_ms.is_(None))
            queries = [q for row in connection.execute(live) if (q := readable(row)) is not None]
            for query in (q for q in queries if q.spec.stream == stream):
                try:
                    query.spec.bind(types)
                except InvalidQuery as exc:
                    raise Conflict(
                        f"stream {stream}: the live query {query.ref.name} does not fit these columns ({exc.message});"
                        " delete it first"
                    ) from exc
            increment_version(connection)

    def undeclare_columns(self, stream: str) -> None:
        """Lets a stream's edges decide its columns again.

        Raises:
            Conflict: the configuration declares them.
            NotFound: nobody does.
        """
        with write_transaction(self._engine) as connection:
            lock_catalog(connection)
            self._require_not_configured(stream)
            if not delete_columns(connection, stream):
                raise NotFound(f"nobody has declared columns of stream {stream}")
            increment_version(connection)

    def _require_not_configured(self, stream: str) -> None:
        if stream in self._configured:
            raise Conflict(f"stream {stream}: its columns are in the center's configuration, streams.{stream}.columns")

    def record_query_status(self, edge: EdgeId, ref: QueryRef, accepted: bool, code: str, message: str) -> None:
        """As `record_query_statuses`, of one."""
        self.record_query_statuses([QueryStatusRecord(ref, edge, accepted, code, message)])

    def record_query_statuses(self, statuses: Iterable[QueryStatusRecord]) -> None:
        """Records whether edges run queries, replacing their last statuses, in one transaction; those of queries that
        are not live are ignored.

        An edge repeats its statuses in each session; without a change nothing is written.
        """
        with read_transaction(self._engine) as connection:
            statuses = _changed_statuses(connection, list(statuses))
        if not statuses:
            return
        with write_transaction(self._engine) as connection:
            lock_catalog(connection)
            live = live_queries(connection)
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

        """
        if not frames:
            return []
        with write_transaction(self._engine) as connection:
            return frame_index.index_frames(connection, frames)

    def oldest_frames(self, after: Mapping[str, int]) -> dict[str, int]:
        """By query key, when the frame at the position behind the given one came, in ms, if it is indexed."""
        with read_transaction(self._engine) as connection:
            return frame_index.oldest_frames(connection, after)

    def last_positions(self) -> dict[str, int]:
        """Last position by query key, sorted, of live queries and of deleted ones that still have frames."""
        with read_transaction(self._engine) as connection:
            return frame_index.last_positions(connection)

    def last_positions_since(self, known: LastPositions | None) -> LastPositions:
        """As `last_positions`; `known` itself, which costs little, if nothing has changed since it was read."""
        with read_transaction(self._engine) as connection:
            return frame_index.last_positions_since(connection, known)

    def frames(self, key: str, after: int, through: int) -> list[FrameEntry]:
        """A query's frames at positions ``after + 1 … through``, ascending."""
        with read_transaction(self._engine) as connection:
            return frame_index.select_entries(connection, {key: (after, through)})[key]

    def frames_of(self, ranges: Mapping[str, tuple[int, int]]) -> dict[str, list[FrameEntry]]:
        """As `frames`, of many queries from one state of the index: by key, after and through."""
        with read_transaction(self._engine) as connection:
            return frame_index.select_entries(connection, ranges)

    def lagging_queries(self, before_ms: int) -> frozenset[QueryRef]:
        """The queries with an indexed frame that arrived before this time."""
        with read_transaction(self._engine) as connection:
            return frame_index.lagging_queries(connection, before_ms)

    def drop_frames(self, through: Mapping[str, int]) -> list[str]:
        """Retention: drops the index up to a position per query key.

        Returns:
            The segments without indexed frames; remove them from the log, then call `forget_segments`.
        """
        with write_transaction(self._engine) as connection:
            lock_catalog(connection)
            return frame_index.drop_frames(connection, through)

    def removable_segments(self, segments: Sequence[str], queries: Callable[[str], Collection[str]]) -> list[str]:
        """Those of `segments` that have no indexed frame and never will; they may be removed from the log.

        Args:
            queries: the keys of the queries that a segment holds frames of.
        """
        with read_transaction(self._engine) as connection:
            return frame_index.removable_segments(connection, segments, queries)

    def forget_segments(self, segments: Sequence[str]) -> None:
        """Takes segments that were removed from the log off the list of those to remove."""
        with write_transaction(self._engine) as connection:
            frame_index.forget_segments(connection, segments)

    # Frames that the job could not apply

    def quarantine(self, entry: FrameEntry, reason: str, now_ms: int) -> list[str]:
        """Sets a frame aside, with an alarm; a repetition changes nothing.

        Returns:
            The segments of older quarantined frames that had to go (`quarantine.MAX_PER_EDGE`), and of `entry` if it
            is a copy that is not needed; remove them from the log.
        """
        key = query_key(entry.query)
        with write_transaction(self._engine) as connection:
            lock_catalog(connection)
            if quarantine.is_listed(connection, entry):
                return frame_index.without_frames(connection, [entry.segment])
            unused = quarantine.add(connection, entry, reason, now_ms)
            message = f"query {key}, frame {entry.position} (seq {entry.seq} of {entry.incarnation}): {reason}"
            alarm_rows.add(connection, "frame-quarantined", message, entry.edge, now_ms, key)
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
            lock_catalog(connection)
            return quarantine.drop(connection, key, position)

    # Queries of which the job died

    def add_death(self, ref: QueryRef, now_ms: int) -> int:
        """Counts that the job died while it worked on a query; returns how often it has, recently."""
        with write_transaction(self._engine) as connection:
            return suspensions.add_death(connection, ref, now_ms)

    def suspend_query(self, ref: QueryRef, reason: str, now_ms: int) -> None:
        """Sets a query aside, with an alarm; `add_death` has been called for it."""
        with write_transaction(self._engine) as connection:
            lock_catalog(connection)
            suspensions.suspend(connection, ref, reason, now_ms)

    def resume_query(self, name: str) -> None:
        """Lets the job try a query again that was set aside. Raises NotFound."""
        with write_transaction(self._engine) as connection:
            suspensions.resume(connection, name)

    def suspended_queries(self) -> dict[QueryRef, SuspendedQuery]:
        """The live queries that are set aside."""
        with read_transaction(self._engine) as connection:
            return suspensions.suspended(connection)

    # Alarms

    def add_alarm(self, kind: str, message: str, edge: EdgeId, now_ms: int, query: str = "") -> None:
        """Adds an alarm, or counts it if it is a repetition; of each source a bounded number: see `alarm_rows.add`.

        Args:
            query: key of the query that it is about; empty: of none.
        """
        with write_transaction(self._engine) as connection:
            lock_catalog(connection)
            alarm_rows.add(connection, kind, message, edge, now_ms, query)

    def alarms(self, limit: int = alarm_rows.MAX_LISTED, query: str | None = None) -> list[AlarmRecord]:
        """The latest alarms, of a query or of all, newest first; each source has a share: see `alarm_rows.latest`."""
        with read_transaction(self._engine) as connection:
            return alarm_rows.latest(connection, limit, query)


def _end_live(connection: Connection, name: str, now_ms: int) -> bool:
    """Marks the live query of that name as deleted. Returns whether there was one."""
    live = (t.queries.c.name == name) & t.queries.c.deleted_at_ms.is_(None)
    if connection.execute(update(t.queries).where(live).values(deleted_at_ms=now_ms)).rowcount == 0:
        return False
    for table in (t.statuses, t.suspensions):
        connection.execute(delete(table).where(table.c.name == name))
    return True


def _live_one(rows: Sequence[Row[Any]], spec: QuerySpec, replaces: bool = False) -> RegisteredQuery | None:
    """The live query of these rows, if it is equal. Raises Conflict if it is another and not replaced."""
    for live in (query_from_row(r) for r in rows if r.deleted_at_ms is None):
        if spec.asks_for(live.spec):
            return live
        if replaces:
            return None
        registered, wanted = live.spec.to_mapping(seed=spec.seed is not None), spec.to_mapping()
        differing = [key for key in wanted | registered if registered.get(key) != wanted.get(key)]
        raise Conflict(
            f"query {spec.name}: version {live.ref.version} is registered under this name and differs in"
            f" {', '.join(differing)}; take another name to keep its answers, or replace it, which deletes all its"
            f" answers: `edgewater query add --replace`, or DELETE /v1/queries/{spec.name} and then this request again"
        )
    return None


def _changed_statuses(connection: Connection, statuses: Sequence[QueryStatusRecord]) -> list[QueryStatusRecord]:
    """The statuses that differ from the stored ones."""
    by_query: dict[QueryRef, set[EdgeId]] = {}
    for status in statuses:
        by_query.setdefault(status.query, set()).add(status.edge)
    c, held = t.statuses.c, set[QueryStatusRecord]()
    for ref, edges in by_query.items():
        of_query = select(t.statuses).where(c.name == ref.name, c.version == ref.version, c.edge.in_(edges))
        held.update(QueryStatusRecord(ref, r.edge, r.accepted, r.code, r.message) for r in connection.execute(of_query))
    return [s for s in statuses if s not in held]
