"""`Ledger` is a deterministic state machine, without I/O, that decides which windows are answered and when.

Events carry the time. `ResultStore` calls the ledger inside `Ledger.transaction`. It writes the changes of the ledger
and the answers in one database transaction. If the ledger or the database transaction fails, the ledger is loaded again
from the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from center.budgets.processing_delay import AnswerMargin
from center.early import SamplingPlan
from center.ledger import events
from center.ledger.answer_work import EventWork
from center.ledger.early_answers import EarlyAnswerBook
from center.ledger.late_history import LateHistory
from center.ledger.session_windows import SessionWindowBook
from center.ledger.state import QueryState, StateEntry
from center.ledger.stored_state import QueryChanges, unpack_state
from center.ledger.time_windows import TimeWindowBook
from center.ledger.window_book import WindowBook
from edgewater.base.errors import NotFound, StorageError
from edgewater.base.streams import MIN_TIME_MS, EdgeId
from edgewater.model.edge_records import EdgeRecord
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import RegisteredQuery, query_key
from edgewater.model.windows import SessionWindow
from edgewater.wire import QueryRef

AT_ONCE_MS = 0  # format: a time in the past
"""A deadline that is in the past on any clock."""


class Ledger:
    """The windows of all queries.

    Args:
        margin: how much earlier than the end of its staleness budget an early answer is emitted; None: a new one.

    Attributes:
        margin: the same. Who writes the answers tells it how long that took.
        on_query: called before a query is advanced.
    """

    def __init__(self, margin: AnswerMargin | None = None) -> None:
        self.margin = margin or AnswerMargin()
        self.on_query: Callable[[QueryRef], None] = lambda _: None
        self._books: dict[QueryRef, WindowBook] = {}
        self._deleted: dict[str, int] = {}
        self._edges: tuple[EdgeRecord, ...] | None = None
        self._listed: frozenset[EdgeId] = frozenset()
        # Queries whose windows may be due without a new frame. The next TimeAdvanced examines these queries.
        self._pending: set[QueryRef] = set()
        # By query, the wall time in ms until which `TimeAdvanced` does not advance the query. It is not stored.
        self._paused_until_ms: dict[QueryRef, int] = {}
        self._transaction: LedgerTransaction | None = None
        self._is_stale = False
        self.revisions_after = 0
        self._ahead_ms = 0

    def handle(self, event: events.LedgerEvent) -> list[events.Emission]:
        """Applies an event, and returns the answers to write now, ordered by query and window.

        Raises:
            NotFound: a frame's query was never registered. No frame is applied, because the frames of this query would
                be lost. Frames of a deleted query are ignored.
            QueryFailed: a query failed while `TimeAdvanced` was applied (see `pause`).
        """
        assert not self._is_stale, "a transaction has failed: load the ledger first"
        match event:
            case events.QueryRegistered(query):
                self._register(query)
            case events.QueryDeleted(ref):
                self._delete(ref)
            case events.EdgesChanged(edges):
                self._change_edges(edges)
            case events.FramesMerged(frames, now_ms):
                return self._apply_frames(frames, now_ms)
            case events.SlicesRefused(ref, slice_starts):
                if not self.is_deleted(ref):
                    self._touch(ref).refuse(slice_starts)
            case events.ClockStepped(by_ms):
                self._ahead_ms = max(0, self._ahead_ms + by_ms)
                for book in self._books.values():
                    book.ahead_ms = self._ahead_ms
            case events.TimeAdvanced(now_ms):
                return self._advance_time(now_ms)
        return []

    def next_deadline(self) -> int | None:
        """Returns the wall time in ms of the next `TimeAdvanced` that is needed; None if none is needed.

        `AT_ONCE_MS` means that it is needed now.
        """
        if self._is_stale or not self._pending <= self._paused_until_ms.keys():
            return AT_ONCE_MS
        until = [due_ms for ref, due_ms in self._paused_until_ms.items() if ref in self._books]
        deadlines = (q.deadline() for ref, q in self._books.items() if ref not in self._paused_until_ms)
        return min((due_ms for due_ms in (*until, *deadlines) if due_ms is not None), default=None)

    def pause(self, ref: QueryRef, until_ms: int) -> None:
        """Stops `TimeAdvanced` for a query until a wall time, because the query has failed in this event."""
        self._paused_until_ms[ref] = until_ms

    def weigh(self, ref: QueryRef, size: int, slices: int | None = None) -> None:
        """Updates the expected size of a query's slices (`AnswerWork.weigh`). An unknown query is ignored."""
        if ref in self._books:
            self._books[ref].work.weigh(size, slices)

    def note_costly(self, ref: QueryRef) -> None:
        """Notes that tasks merge the answers to a query (`AnswerWork.is_costly`), until its state is loaded again."""
        if ref in self._books:
            self._books[ref].work.is_costly = True

    def open_windows(self, ref: QueryRef) -> int:
        """Returns the number of windows of a query that are not final."""
        return len(self.book(ref).windows)

    def book(self, ref: QueryRef) -> WindowBook:
        """Returns the windows of a query, for reading only.

        Raises:
            NotFound: the query is not in the ledger.
        """
        if ref not in self._books:
            raise NotFound(f"query {query_key(ref)} is not in the ledger")
        return self._books[ref]

    def queries(self) -> list[QueryRef]:
        return list(self._books)

    def is_deleted(self, ref: QueryRef) -> bool:
        return ref.version <= self._deleted.get(ref.name, 0)

    def wall_ms(self, ref: QueryRef, event_ms: int) -> int:
        """Converts an event time of the query's stream to wall time.

        Raises:
            NotFound: the query is not in the ledger.
        """
        return self.book(ref).state.running_clock.to_wall_ms(event_ms)

    def sealed_before(self, ref: QueryRef) -> int:
        """Returns an event time in ms. Slices that start before it belong only to final windows, and accept no more
        data.
        """
        book = self._books.get(ref)
        return book.sealed_before() if book else MIN_TIME_MS

    def takes(self, ref: QueryRef, slice_start_ms: int) -> bool:
        """Returns whether a slice belongs to a window of this version of a query that is not final.

        The result is false for a deleted query.
        """
        book = self._books.get(ref)
        return book is not None and book.takes(slice_start_ms) and slice_start_ms >= book.sealed_before()

    def ended(self, now_ms: int) -> list[QueryRef]:
        """Returns the queries that have an end and whose windows all have their final answers."""
        return [ref for ref, book in self._books.items() if book.has_ended or book.is_abandoned(now_ms)]

    def states_late(self, ref: QueryRef) -> bool:
        """Returns whether records of a query came too late, were rejected or were guessed, so that its answers may have
        to state this.
        """
        state = self.book(ref).state
        return state.after_final > 0 or state.rejected > 0

    def after_final(self, ref: QueryRef) -> int:
        """Returns the number of records so far that came for a window of the query when the window was final."""
        return self.book(ref).state.after_final

    def exceeding_delays(self) -> dict[QueryRef, Mapping[str, int]]:
        """Returns the numbers of records that came later than the declared delays, by query and edge."""
        early = {ref: q.estimator for ref, q in self._books.items() if isinstance(q, EarlyAnswerBook)}
        return {ref: estimator.observed.exceeding for ref, estimator in early.items() if estimator.observed.exceeding}

    def needed_plans(self) -> dict[QueryRef, dict[EdgeId, SamplingPlan]]:
        """Returns, per query with an accuracy and per edge, the sampling that the contract needs."""
        return {ref: q.needed_plans() for ref, q in self._books.items() if isinstance(q, EarlyAnswerBook)}

    def sampled_functions(self) -> dict[QueryRef, tuple[QuerySpec, tuple[EdgeId, ...]]]:
        """Returns the queries whose accuracy is for a function of a sample, with the expected edges of each query."""
        states = {ref: q.state for ref, q in self._books.items()}
        return {
            ref: (state.query.spec, tuple(state.expected))
            for ref, state in states.items()
            if state.query.spec.accuracy is not None and state.query.spec.accuracy.kind is None
        }

    def restore(self, ref: QueryRef, snapshot: bytes) -> None:
        """Sets the state of a query from a snapshot. The query may be new.

        Raises:
            StorageError: the bytes are not a snapshot, or are a snapshot of another query.
            UnsupportedVersion: the snapshot has a newer format.
        """
        assert self._transaction is None, "restore is not part of a transaction"
        state, entries, edges = unpack_state(snapshot)
        if state.query.ref != ref:
            raise StorageError(f"the state of {query_key(state.query.ref)} was stored for query {query_key(ref)}")
        book = self._new_book(state, entries)
        book.stored = edges
        if self._edges is not None:
            book.edges_changed(self._edges)
        book.work.forget()
        self._books[ref] = book
        self._pending.add(ref)

    def _new_book(self, state: QueryState, entries: Iterable[tuple[str, int, StateEntry]]) -> WindowBook:
        book = _book_of(state, entries, self.margin)
        book.revisions_after, book.ahead_ms = self.revisions_after, self._ahead_ms
        return book

    def load(self, snapshots: Mapping[QueryRef, bytes | None], revisions_after: int = 0) -> None:
        """Replaces the state of all queries, for example after a failed transaction. The list of edges stays.

        Args:
            snapshots: by query; None if the query is deleted.
            revisions_after: new answers get higher revisions than this one, because readers may have answers that the
                store lacks.

        Raises:
            StorageError, UnsupportedVersion: see `restore`.
        """
        self._is_stale, self.revisions_after = True, revisions_after
        self._books, self._deleted, self._pending = {}, {}, set()
        for ref, snapshot in snapshots.items():
            if snapshot is None:
                self._delete(ref)
            else:
                self.restore(ref, snapshot)
        self._is_stale = False

    def load_again(self, snapshots: Mapping[QueryRef, bytes | None]) -> None:
        """Replaces the state of the queries that a failed transaction has touched.

        Args:
            snapshots: as in `load`. None also stands for a query that is not stored: the transaction has added it.
        """
        for ref, snapshot in snapshots.items():
            if snapshot is None:
                del self._books[ref]
                self._pending.discard(ref)
            else:
                self.restore(ref, snapshot)
        self._is_stale = False

    @contextmanager
    def transaction(self) -> Iterator[LedgerTransaction]:
        """Records the changes of events. After an exception, the ledger must be loaded before it accepts
        another event.
        """
        assert self._transaction is None, "transactions do not nest"
        edges = self._edges, self._listed
        self._transaction = transaction = LedgerTransaction(self._books, self._deleted)
        try:
            yield transaction
        except BaseException:
            self._edges, self._listed = edges
            self._is_stale = True
            raise
        finally:
            self._transaction = None

    def _touch(self, ref: QueryRef) -> WindowBook:
        """Returns the query's book. Called before the book changes."""
        book = self.book(ref)
        if self._transaction is not None and ref not in self._transaction.touched:
            self._transaction.touched[ref] = book
            book.begin()
        return book

    def _register(self, query: RegisteredQuery) -> None:
        if self.is_deleted(query.ref):
            return
        if (known := self._books.get(query.ref)) is not None:
            if known.state.query.windows != query.windows:
                self._touch(query.ref).set_windows(query.windows)
                self._pending.add(query.ref)
            return
        older = [q for q in self._books if q.name == query.ref.name and q.version < query.ref.version]
        history = LateHistory()
        if older:
            before = self._books[max(older, key=lambda q: q.version)].state
            history = before.late_history.of_next_version(before.query.spec, query.spec)
        state = QueryState(query, (), (), None, {}, {}, MIN_TIME_MS, None, 0, late_history=history)
        book = self._books[query.ref] = self._new_book(state, ())
        self._touch(query.ref).edges_changed(self._edges or ())
        if isinstance(book, EarlyAnswerBook):
            book.inherit_delays(q for q in self._books.values() if isinstance(q, EarlyAnswerBook))

    def _delete(self, ref: QueryRef) -> None:
        if self.is_deleted(ref):
            return
        for older in [q for q in self._books if q.name == ref.name and q.version <= ref.version]:
            self._touch(older)
            del self._books[older]
            self._pending.discard(older)
        self._deleted[ref.name] = ref.version

    def _change_edges(self, edges: tuple[EdgeRecord, ...]) -> None:
        previous, self._edges = self._edges, edges
        self._listed = frozenset(e.edge for e in edges)
        # Every heartbeat changes a record. Only the membership and the streams matter here, and they change rarely.
        if previous is not None and _membership(previous) == _membership(edges):
            return
        for ref, book in self._books.items():
            if not book.has_ended:
                self._touch(ref).edges_changed(edges)
                self._pending.add(ref)

    def _apply_frames(self, frames: tuple[events.FrameSummary, ...], now_ms: int) -> list[events.Emission]:
        by_query: dict[QueryRef, list[events.FrameSummary]] = {}
        for frame in frames:
            if not self.is_deleted(frame.query):
                by_query.setdefault(frame.query, []).append(frame)
        for ref in by_query:
            if ref not in self._books:
                raise NotFound(f"a frame arrived for query {query_key(ref)}, which is not registered")
        emissions, work = [], EventWork()
        for ref, reported in by_query.items():
            self.on_query(ref)
            book = self._touch(ref)
            listed = self._listed if self._edges is not None else {*book.state.expected, *book.state.retired}
            work.grant(book.work)
            if book.work.is_costly:
                book.work.max_answers = 0
            answers = book.report(reported, {f.edge for f in reported} - listed, now_ms)
            work.spend(book.work, len(answers))
            emissions += answers
            self._note_backlog(ref, book)
        return emissions

    def _advance_time(self, now_ms: int) -> list[events.Emission]:
        self._paused_until_ms = {ref: until_ms for ref, until_ms in self._paused_until_ms.items() if until_ms > now_ms}
        emissions, work = [], EventWork()
        for ref, book in self._books.items():
            if ref in self._paused_until_ms:
                continue
            try:
                due_ms = book.deadline()
                if ref in self._pending or (due_ms is not None and due_ms <= now_ms):
                    self.on_query(ref)
                    work.grant(book.work)
                    answers = self._touch(ref).emit_due(now_ms)
                    work.spend(book.work, len(answers))
                    emissions += answers
                    self._note_backlog(ref, book)
            except Exception as exc:
                raise events.QueryFailed(ref) from exc
        return emissions

    def _note_backlog(self, ref: QueryRef, book: WindowBook) -> None:
        """Makes the next `TimeAdvanced` examine a query if the event could not give all answers to it (`MAX_WORK`)."""
        if book.has_backlog:
            self._pending.add(ref)
        else:
            self._pending.discard(ref)


class LedgerTransaction:
    """The changes since `Ledger.transaction` began."""

    def __init__(self, queries: dict[QueryRef, WindowBook], deleted: dict[str, int]) -> None:
        self._books = queries
        self._deleted = deleted
        self._deleted_before = dict(deleted)
        self.touched: dict[QueryRef, WindowBook] = {}

    @property
    def has_deleted(self) -> bool:
        return self._deleted != self._deleted_before

    def changes(self) -> list[QueryChanges]:
        """Returns the changes of each changed query, for the store to write."""
        changes = [
            QueryChanges(QueryRef(name, version), None)
            for name, version in self._deleted.items()
            if self._deleted_before.get(name) != version
        ]
        for ref, book in self.touched.items():
            if self._books.get(ref) is not book:
                changes.append(QueryChanges(ref, None))
            elif (changed := book.changes()) is not None:
                changes.append(changed)
        return list({c.ref: c for c in changes}.values())


def _book_of(state: QueryState, entries: Iterable[tuple[str, int, StateEntry]], margin: AnswerMargin) -> WindowBook:
    spec = state.query.spec
    if isinstance(spec.window, SessionWindow):
        return SessionWindowBook(state, entries, margin)
    if spec.accuracy is not None and spec.accuracy.kind is not None:
        return EarlyAnswerBook(state, entries, margin)
    return TimeWindowBook(state, entries, margin)


def _membership(edges: tuple[EdgeRecord, ...]) -> list[tuple[object, ...]]:
    return [(e.edge, e.retired, e.streams, e.first_seen_ms, e.state_lost_at_ms) for e in edges]
