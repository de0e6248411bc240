"""The ledger: what each edge has reported, and which windows may be answered now.

A deterministic state machine without I/O: events with the time in them go in, decisions to answer come
out. `ResultStore` drives it inside `Ledger.transaction`, so that memory and database change together
or not at all. The rules for one query are in `query_ledger.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from center.catalog.store import EdgeRecord, RegisteredQuery, query_key
from center.ledger.early_answers import AccuracyLedger
from center.ledger.events import (
    Deleted,
    EdgesChanged,
    Emission,
    FrameFact,
    LedgerEvent,
    Registered,
    Reported,
    Tick,
)
from center.ledger.quality import Phase, Quality
from center.ledger.query import QueryLedger
from center.ledger.session_windows import SessionLedger
from center.ledger.state import Head, Part, PartKind, pack_state, unpack_state
from center.ledger.time_windows import GridLedger
from edgewater.errors import NotFound, StorageError
from edgewater.query import QuerySpec
from edgewater.streams import NEVER_MS, EdgeId
from edgewater.windows import Session
from edgewater.wire.frames import QueryRef

__all__ = [
    "AT_ONCE_MS",
    "Deleted",
    "EdgesChanged",
    "Emission",
    "FrameFact",
    "Ledger",
    "LedgerEvent",
    "LedgerTransaction",
    "Phase",
    "Quality",
    "QueryChanges",
    "Registered",
    "Reported",
    "Tick",
]

AT_ONCE_MS = 0
"""A deadline that has passed whatever the clock says."""


@dataclass(frozen=True, slots=True)
class QueryChanges:
    """What a transaction has changed of one query's state, for the store to write.

    Attributes:
        head: JSON; None: the query is deleted, and all its parts with it.
        parts: (kind, start, JSON or None for one that is gone).
    """

    ref: QueryRef
    head: str | None
    parts: tuple[tuple[PartKind, int, str | None], ...] = ()


class Ledger:
    """The windows of all queries.

    Args:
        margin_ms: how long before a staleness budget runs out the early answer is given: the time it
            takes to write it. At most half of a query's budget is spent so.
    """

    def __init__(self, *, margin_ms: int = 200) -> None:
        self._margin_ms = margin_ms
        self._queries: dict[QueryRef, QueryLedger] = {}
        self._deleted: dict[str, int] = {}
        self._edges: tuple[EdgeRecord, ...] | None = None
        self._listed: frozenset[EdgeId] = frozenset()
        # Queries for which something may have become ripe that no report will bring up.
        self._unsettled: set[QueryRef] = set()
        self._transaction: LedgerTransaction | None = None

    def handle(self, event: LedgerEvent) -> list[Emission]:
        """Takes an event in and returns the answers to give now, by query, by window.

        Raises:
            NotFound: a frame of a query that was never registered here. It would be lost if it were
                passed over, so nothing is taken in. Frames of a deleted query are passed over.
        """
        match event:
            case Registered(query):
                self._register(query)
            case Deleted(ref):
                self._delete(ref)
            case EdgesChanged(edges):
                self._change_edges(edges)
            case Reported(facts, now_ms):
                return self._report(facts, now_ms)
            case Tick(now_ms):
                return self._tick(now_ms)
        return []

    def next_deadline(self) -> int | None:
        """Wall time, ms, at which a Tick is wanted, `AT_ONCE_MS` for at once; None: none is."""
        if self._unsettled:
            return AT_ONCE_MS
        return min((due for q in self._queries.values() if (due := q.deadline()) is not None), default=None)

    def queries(self) -> list[QueryRef]:
        return list(self._queries)

    def is_deleted(self, ref: QueryRef) -> bool:
        return ref.version <= self._deleted.get(ref.name, 0)

    def wall_ms(self, ref: QueryRef, event_ms: int) -> int:
        """Wall time at which the query's stream comes to an event time. Raises NotFound."""
        return self._query(ref).head.running_clock.to_wall_ms(event_ms)

    def sealed_before(self, ref: QueryRef) -> int:
        """Slices that start before it (event ms) are in final windows only; nothing is applied to them."""
        ledger = self._queries.get(ref)
        return ledger.sealed_before() if ledger else NEVER_MS

    def after_final(self, ref: QueryRef) -> int:
        """Records, so far, that came for a window of the query that was final already."""
        return self._query(ref).head.after_final

    def needed_rates(self) -> dict[QueryRef, dict[EdgeId, float]]:
        """Of each query with an accuracy, by edge, the part of its records that has to be processed."""
        return {ref: q.needed_rates() for ref, q in self._queries.items() if isinstance(q, AccuracyLedger)}

    def sampled_functions(self) -> dict[QueryRef, tuple[QuerySpec, tuple[EdgeId, ...]]]:
        """The queries whose accuracy is about a function of a sample, and the edges that each expects."""
        heads = {ref: q.head for ref, q in self._queries.items()}
        return {
            ref: (head.query.spec, tuple(head.expected))
            for ref, head in heads.items()
            if head.query.spec.accuracy is not None and head.query.spec.accuracy.kind is None
        }

    def snapshot(self, ref: QueryRef) -> bytes:
        """All that is remembered of a query. Raises NotFound."""
        ledger = self._query(ref)
        return pack_state(ledger.head.to_json(), ((k, start, v.to_json()) for k, start, v in ledger.all_parts()))

    def restore(self, ref: QueryRef, state: bytes) -> None:
        """Puts a query into the state of a snapshot, whether it was known or not.

        Raises:
            StorageError: not a snapshot, or another query's.
            UnsupportedVersion: of a newer release.
        """
        assert self._transaction is None, "a restore is no part of a transaction"
        head, parts = unpack_state(state)
        if head.query.ref != ref:
            raise StorageError(f"the state of {query_key(head.query.ref)} where that of {query_key(ref)} was expected")
        ledger = _ledger_of(head, parts, self._margin_ms)
        if self._edges is not None:
            ledger.edges_changed(self._edges)
        self._queries[ref] = ledger
        self._unsettled.add(ref)

    @contextmanager
    def transaction(self) -> Iterator[LedgerTransaction]:
        """Events handled inside take effect together: an exception that leaves it undoes them all."""
        assert self._transaction is None, "transactions do not nest"
        before = (dict(self._queries), dict(self._deleted), self._edges, self._listed, set(self._unsettled))
        self._transaction = transaction = LedgerTransaction(self._queries, self._deleted)
        try:
            yield transaction
        except BaseException:
            self._queries, self._deleted, self._edges, self._listed, self._unsettled = before
            for ledger in transaction.touched.values():
                ledger.rollback()
            raise
        else:
            for ledger in transaction.touched.values():
                ledger.commit()
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
        head = Head(query, (), (), None, {}, {}, NEVER_MS, None, 0)
        self._queries[query.ref] = _ledger_of(head, (), self._margin_ms)
        self._touch(query.ref).edges_changed(self._edges or ())

    def _delete(self, ref: QueryRef) -> None:
        if self.is_deleted(ref):
            return
        for older in [q for q in self._queries if q.name == ref.name and q.version <= ref.version]:
            self._touch(older)
            del self._queries[older]
            self._unsettled.discard(older)
        self._deleted[ref.name] = ref.version

    def _change_edges(self, edges: tuple[EdgeRecord, ...]) -> None:
        previous, self._edges = self._edges, edges
        self._listed = frozenset(e.edge for e in edges)
        # Heartbeats change records all the time; who is there and what they serve changes rarely.
        if previous is not None and _standing(previous) == _standing(edges):
            return
        for ref in self._queries:
            self._touch(ref).edges_changed(edges)
            self._unsettled.add(ref)

    def _report(self, facts: tuple[FrameFact, ...], now_ms: int) -> list[Emission]:
        by_query: dict[QueryRef, list[FrameFact]] = {}
        for fact in facts:
            if not self.is_deleted(fact.query):
                by_query.setdefault(fact.query, []).append(fact)
        for ref in by_query:
            if ref not in self._queries:
                raise NotFound(f"a frame of query {query_key(ref)}, which was not registered here before it came")
        emissions = []
        for ref, reported in by_query.items():
            ledger = self._touch(ref)
            listed = self._listed if self._edges is not None else {*ledger.head.expected, *ledger.head.retired}
            emissions += ledger.report(reported, {f.edge for f in reported} - listed, now_ms)
            self._unsettled.discard(ref)
        return emissions

    def _tick(self, now_ms: int) -> list[Emission]:
        emissions = []
        for ref, ledger in self._queries.items():
            due_ms = ledger.deadline()
            if ref in self._unsettled or (due_ms is not None and due_ms <= now_ms):
                emissions += self._touch(ref).settle(now_ms)
        self._unsettled.clear()
        return emissions


class LedgerTransaction:
    """What has changed since `Ledger.transaction` was entered."""

    def __init__(self, queries: dict[QueryRef, QueryLedger], deleted: dict[str, int]) -> None:
        self._queries = queries
        self._deleted = deleted
        self._deleted_before = dict(deleted)
        self.touched: dict[QueryRef, QueryLedger] = {}

    def changes(self) -> list[QueryChanges]:
        """What the store has to write, of the queries that changed only."""
        changes = [
            QueryChanges(QueryRef(name, version), None)
            for name, version in self._deleted.items()
            if self._deleted_before.get(name) != version
        ]
        for ref, ledger in self.touched.items():
            if self._queries.get(ref) is not ledger:
                changes.append(QueryChanges(ref, None))
                continue
            parts = [(k, start, v.to_json() if v else None) for k, start, v in ledger.changed_parts()]
            if parts or ledger.head_changed():
                changes.append(QueryChanges(ref, ledger.head.to_json(), tuple(parts)))
        return list({c.ref: c for c in changes}.values())


def _ledger_of(head: Head, parts: Iterable[tuple[PartKind, int, Part]], margin_ms: int) -> QueryLedger:
    spec = head.query.spec
    answered_early = spec.accuracy is not None and spec.accuracy.kind is not None
    kind = SessionLedger if isinstance(spec.window, Session) else AccuracyLedger if answered_early else GridLedger
    return kind(head, parts, margin_ms)


def _standing(edges: tuple[EdgeRecord, ...]) -> list[tuple[object, ...]]:
    return [(e.edge, e.retired, e.streams, e.first_seen_ms) for e in edges]
