"""`Ledger`: a deterministic state machine, without I/O, that decides which windows are answered and when.

Events carry the time. `ResultStore` drives the ledger inside `Ledger.transaction` and writes what changed in the
database transaction of the answers. If either fails, the ledger is loaded again from the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from center.ledger.early_answers import EarlyAnswerLedger
from center.ledger.events import (
    EdgesChanged,
    Emission,
    FramesMerged,
    FrameSummary,
    LateSlice,
    LedgerEvent,
    QueryDeleted,
    QueryFailed,
    QueryRegistered,
    SlicesRefused,
    TimeAdvanced,
)
from center.ledger.session_windows import SessionWindowLedger
from center.ledger.state import QueryState, StateEntry
from center.ledger.stored_state import EntryRow, pack_state, unpack_state
from center.ledger.time_windows import TimeWindowLedger
from center.ledger.window_book import EventWork, QueryLedger
from edgewater.model.edge_records import EdgeRecord
from edgewater.model.errors import NotFound, StorageError
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import RegisteredQuery, query_key
from edgewater.model.streams import MIN_TIME_MS, EdgeId
from edgewater.model.windows import SessionWindow
from edgewater.wire import QueryRef

AT_ONCE_MS = 0
"""A deadline that has passed on any clock."""


@dataclass(frozen=True, slots=True)
class QueryChanges:
    """The changes of one query's state in a transaction, for the store to write.

    Attributes:
        state: `QueryState` as JSON, of its edges the first part; None: the query is deleted, with all its entries.
        entries: (kind, start, JSON, or None for a removed entry).
        late: numbers of records that came for windows when these were final.
        open_from_ms: before the transaction, slices that start from then on belonged to windows that were not final.
    """

    ref: QueryRef
    state: str | None
    entries: tuple[EntryRow, ...] = ()
    late: Mapping[LateSlice, int] = field(default_factory=dict)
    open_from_ms: int = MIN_TIME_MS


class Ledger:
    """The windows of all queries.

    Args:
        margin_ms: time that writing an answer takes: an early answer is emitted this long before the staleness budget
            ends, but never earlier than half of the budget.

    Attributes:
        on_query: called before a query is advanced.
    """

    def __init__(self, *, margin_ms: int = 200) -> None:
        self._margin_ms = margin_ms
        self.on_query: Callable[[QueryRef], None] = lambda _: None
        self._queries: dict[QueryRef, QueryLedger] = {}
        self._deleted: dict[str, int] = {}
        self._edges: tuple[EdgeRecord, ...] | None = None
        self._listed: frozenset[EdgeId] = frozenset()
        # Queries whose windows may be due although no frame will arrive: the next TimeAdvanced examines them.
        self._pending: set[QueryRef] = set()
        # Wall time, ms, until which time alone does not advance them. Not part of the state that is stored.
        self._suspended: dict[QueryRef, int] = {}
        self._transaction: LedgerTransaction | None = None
        self._is_stale = False
        self._revisions_after = 0

    def handle(self, event: LedgerEvent) -> list[Emission]:
        """Applies an event and returns the answers to write now, ordered by query and window.

        Raises:
            NotFound: a frame's query was never registered. Nothing is applied, since the frame would be lost. Frames
                of a deleted query are ignored.
            QueryFailed: the state of a query cannot take the event `TimeAdvanced`: see `suspend`.
        """
        assert not self._is_stale, "a transaction has failed: load the ledger first"
        match event:
            case QueryRegistered(query):
                self._register(query)
            case QueryDeleted(ref):
                self._delete(ref)
            case EdgesChanged(edges):
                self._change_edges(edges)
            case FramesMerged(frames, now_ms):
                return self._apply_frames(frames, now_ms)
            case SlicesRefused(ref, slice_starts):
                if not self.is_deleted(ref):
                    self._touch(ref).refuse(slice_starts)
            case TimeAdvanced(now_ms):
                return self._advance_time(now_ms)
        return []

    def next_deadline(self) -> int | None:
        """Wall time, ms, of the next `TimeAdvanced` that is needed (`AT_ONCE_MS`: now), or None."""
        if self._is_stale or not self._pending <= self._suspended.keys():
            return AT_ONCE_MS
        until = [due_ms for ref, due_ms in self._suspended.items() if ref in self._queries]
        deadlines = (q.deadline() for ref, q in self._queries.items() if ref not in self._suspended)
        return min((due_ms for due_ms in (*until, *deadlines) if due_ms is not None), default=None)

    def suspend(self, ref: QueryRef, until_ms: int) -> None:
        """Emits nothing of a query by time alone before a wall time, as its state cannot take the time."""
        self._suspended[ref] = until_ms

    def weigh(self, ref: QueryRef, size: int, slices: int | None = None) -> None:
        """As `QueryLedger.weigh`: what the query's answers cost from now on. Not part of the state that is stored."""
        if ref in self._queries:
            self._queries[ref].weigh(size, slices)

    def open_windows(self, ref: QueryRef) -> int:
        """Number of windows of a query that are not final."""
        return self._query(ref).open_windows

    def has_waiting_changes(self, ref: QueryRef) -> bool:
        """Whether windows of a query have changed since their newest answer, and wait for the time of the next one."""
        return self._query(ref).has_waiting_changes

    def queries(self) -> list[QueryRef]:
        return list(self._queries)

    def is_deleted(self, ref: QueryRef) -> bool:
        return ref.version <= self._deleted.get(ref.name, 0)

    def wall_ms(self, ref: QueryRef, event_ms: int) -> int:
        """Converts an event time of the query's stream to wall time. Raises NotFound."""
        return self._query(ref).state.running_clock.to_wall_ms(event_ms)

    def sealed_before(self, ref: QueryRef) -> int:
        """Event time, ms: slices that start before it belong to final windows only and accept no more data."""
        ledger = self._queries.get(ref)
        return ledger.sealed_before() if ledger else MIN_TIME_MS

    def states_late(self, ref: QueryRef) -> bool:
        """Whether answers of a query may have to state records that came too late, or that sources rejected."""
        state = self._query(ref).state
        return state.after_final > 0 or state.rejected > 0

    def after_final(self, ref: QueryRef) -> int:
        """Number of records so far that came for windows of the query when these were final."""
        return self._query(ref).state.after_final

    def exceeding_delays(self) -> dict[QueryRef, Mapping[str, int]]:
        """The number of records that came later than the declared delays, by query and edge, where there are any."""
        early = {ref: q.estimator for ref, q in self._queries.items() if isinstance(q, EarlyAnswerLedger)}
        return {ref: estimator.exceeding for ref, estimator in early.items() if estimator.exceeding}

    def needed_rates(self) -> dict[QueryRef, dict[EdgeId, float]]:
        """Per query with an accuracy and per edge, the sampling rate that the contract needs."""
        return {ref: q.needed_rates() for ref, q in self._queries.items() if isinstance(q, EarlyAnswerLedger)}

    def sampled_functions(self) -> dict[QueryRef, tuple[QuerySpec, tuple[EdgeId, ...]]]:
        """The queries whose accuracy is about a function of a sample, with the edges that each expects."""
        states = {ref: q.state for ref, q in self._queries.items()}
        return {
            ref: (state.query.spec, tuple(state.expected))
            for ref, state in states.items()
            if state.query.spec.accuracy is not None and state.query.spec.accuracy.kind is None
        }

    def snapshot(self, ref: QueryRef) -> bytes:
        """The whole state of a query. Raises NotFound."""
        ledger = self._query(ref)
        return pack_state(ledger.state_json(), ((k, start, text) for k, start, text in ledger.all_entries() if text))

    def restore(self, ref: QueryRef, snapshot: bytes) -> None:
        """Sets a query, known or not, to the state of a snapshot.

        Raises:
            StorageError: not a snapshot, or one of another query.
            UnsupportedVersion: the snapshot has a newer format.
        """
        assert self._transaction is None, "restore is not part of a transaction"
        state, entries, edges = unpack_state(snapshot)
        if state.query.ref != ref:
            raise StorageError(f"the state of {query_key(state.query.ref)} was found for query {query_key(ref)}")
        ledger = self._ledger_of(state, entries)
        ledger.restored(edges)
        if self._edges is not None:
            ledger.edges_changed(self._edges)
        ledger.forget_weight()
        self._queries[ref] = ledger
        self._pending.add(ref)

    def _ledger_of(self, state: QueryState, entries: Iterable[tuple[str, int, StateEntry]]) -> QueryLedger:
        ledger = _ledger_of(state, entries, self._margin_ms)
        ledger.revisions_after = self._revisions_after
        return ledger

    def load(self, snapshots: Mapping[QueryRef, bytes | None], revisions_after: int = 0) -> None:
        """Replaces the state of all queries, as after a failed transaction; the list of edges is kept.

        Args:
            snapshots: by query; None: the query is deleted.
            revisions_after: no answer gets a revision up to this one: the store may be older than answers that were
                given.

        Raises:
            StorageError, UnsupportedVersion: as `restore`.
        """
        self._is_stale, self._revisions_after = True, revisions_after
        self._queries, self._deleted, self._pending = {}, {}, set()
        for ref, snapshot in snapshots.items():
            if snapshot is None:
                self._delete(ref)
            else:
                self.restore(ref, snapshot)
        self._is_stale = False

    @contextmanager
    def transaction(self) -> Iterator[LedgerTransaction]:
        """Records what events change. After an exception the ledger takes no event until it is loaded again."""
        assert self._transaction is None, "transactions do not nest"
        edges = self._edges, self._listed
        self._transaction = transaction = LedgerTransaction(self._queries, self._deleted)
        try:
            yield transaction
        except BaseException:
            self._edges, self._listed = edges
            self._is_stale = True
            raise
        finally:
            self._transaction = None

    def _query(self, ref: QueryRef) -> QueryLedger:
        if ref not in self._queries:
            raise NotFound(f"query {query_key(ref)} is not in the ledger")
        return self._queries[ref]

    def _touch(self, ref: QueryRef) -> QueryLedger:
        """The query's ledger, about to change."""
        ledger = self._query(ref)
        if self._transaction is not None and ref not in self._transaction.touched:
            self._transaction.touched[ref] = ledger
            ledger.begin()
        return ledger

    def _register(self, query: RegisteredQuery) -> None:
        if query.ref in self._queries or self.is_deleted(query.ref):
            return
        state = QueryState(query, (), (), None, {}, {}, MIN_TIME_MS, None, 0)
        ledger = self._queries[query.ref] = self._ledger_of(state, ())
        self._touch(query.ref).edges_changed(self._edges or ())
        if isinstance(ledger, EarlyAnswerLedger):
            ledger.inherit_delays(q for q in self._queries.values() if isinstance(q, EarlyAnswerLedger))

    def _delete(self, ref: QueryRef) -> None:
        if self.is_deleted(ref):
            return
        for older in [q for q in self._queries if q.name == ref.name and q.version <= ref.version]:
            self._touch(older)
            del self._queries[older]
            self._pending.discard(older)
        self._deleted[ref.name] = ref.version

    def _change_edges(self, edges: tuple[EdgeRecord, ...]) -> None:
        previous, self._edges = self._edges, edges
        self._listed = frozenset(e.edge for e in edges)
        # Every heartbeat changes a record; membership and streams, which matter here, change rarely.
        if previous is not None and _membership(previous) == _membership(edges):
            return
        for ref in self._queries:
            self._touch(ref).edges_changed(edges)
            self._pending.add(ref)

    def _apply_frames(self, frames: tuple[FrameSummary, ...], now_ms: int) -> list[Emission]:
        by_query: dict[QueryRef, list[FrameSummary]] = {}
        for frame in frames:
            if not self.is_deleted(frame.query):
                by_query.setdefault(frame.query, []).append(frame)
        for ref in by_query:
            if ref not in self._queries:
                raise NotFound(f"a frame arrived for query {query_key(ref)}, which is not registered")
        emissions, work = [], EventWork()
        for ref, reported in by_query.items():
            self.on_query(ref)
            ledger = self._touch(ref)
            listed = self._listed if self._edges is not None else {*ledger.state.expected, *ledger.state.retired}
            work.grant(ledger)
            given = ledger.report(reported, {f.edge for f in reported} - listed, now_ms)
            work.spend(ledger, len(given))
            emissions += given
            self._note_backlog(ref, ledger)
        return emissions

    def _advance_time(self, now_ms: int) -> list[Emission]:
        self._suspended = {ref: until_ms for ref, until_ms in self._suspended.items() if until_ms > now_ms}
        emissions, work = [], EventWork()
        for ref, ledger in self._queries.items():
            if ref in self._suspended:
                continue
            try:
                due_ms = ledger.deadline()
                if ref in self._pending or (due_ms is not None and due_ms <= now_ms):
                    self.on_query(ref)
                    work.grant(ledger)
                    given = self._touch(ref).emit_due(now_ms)
                    work.spend(ledger, len(given))
                    emissions += given
                    self._note_backlog(ref, ledger)
            except Exception as exc:
                raise QueryFailed(ref) from exc
        return emissions

    def _note_backlog(self, ref: QueryRef, ledger: QueryLedger) -> None:
        """A query with more to answer than one event does (`MAX_WORK`) is due at once."""
        if ledger.has_backlog:
            self._pending.add(ref)
        else:
            self._pending.discard(ref)


class LedgerTransaction:
    """The changes since `Ledger.transaction` was entered."""

    def __init__(self, queries: dict[QueryRef, QueryLedger], deleted: dict[str, int]) -> None:
        self._queries = queries
        self._deleted = deleted
        self._deleted_before = dict(deleted)
        self.touched: dict[QueryRef, QueryLedger] = {}

    def changes(self) -> list[QueryChanges]:
        """The changes of each changed query, for the store to write."""
        changes = [
            QueryChanges(QueryRef(name, version), None)
            for name, version in self._deleted.items()
            if self._deleted_before.get(name) != version
        ]
        for ref, ledger in self.touched.items():
            if self._queries.get(ref) is not ledger:
                changes.append(QueryChanges(ref, None))
                continue
            entries = ledger.changed_entries()
            if entries or ledger.state_changed():
                changes.append(
                    QueryChanges(ref, ledger.state_json(), tuple(entries), ledger.late_records(), ledger.open_from_ms)
                )
        return list({c.ref: c for c in changes}.values())


def _ledger_of(state: QueryState, entries: Iterable[tuple[str, int, StateEntry]], margin_ms: int) -> QueryLedger:
    spec = state.query.spec
    if isinstance(spec.window, SessionWindow):
        return SessionWindowLedger(state, entries, margin_ms)
    if spec.accuracy is not None and spec.accuracy.kind is not None:
        return EarlyAnswerLedger(state, entries, margin_ms)
    return TimeWindowLedger(state, entries, margin_ms)


def _membership(edges: tuple[EdgeRecord, ...]) -> list[tuple[object, ...]]:
    return [(e.edge, e.retired, e.streams, e.first_seen_ms, e.state_lost_at_ms) for e in edges]
