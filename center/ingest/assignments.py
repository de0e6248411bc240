"""What each edge is to answer, and its part of the budgets. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from center.budgets.allocation import Grant, MembersChanged
from center.catalog.store import EdgeRecord, RegisteredQuery, expected_edges
from center.sampling.policy import SamplingRequirement, is_expensive
from edgewater.query import ErrorBudget, QuerySpec, StalenessBudget
from edgewater.streams import LIVE, MAX_TIME_MS, EdgeId, StreamClock
from edgewater.wire import uplink_pb2 as pb
from edgewater.wire.frames import QueryRef

MAX_CLOCK_LEAD_MS = 10_000
"""Wall time by which an edge's clock may be ahead of the center's."""


@dataclass(frozen=True, slots=True)
class EdgeAssignment:
    """The messages that tell one edge what to do."""

    queries: pb.Queries
    budgets: tuple[pb.Budget, ...]
    sampling: tuple[SamplingRequirement, ...] = ()


@dataclass(frozen=True, slots=True)
class QueryAssignment:
    """A live query, the edges expected to answer it, and those that did and are retired."""

    query: RegisteredQuery
    expected: tuple[EdgeId, ...]
    retired: tuple[EdgeRecord, ...] = ()
    clock: StreamClock = LIVE

    @classmethod
    def of(cls, query: RegisteredQuery, edges: Sequence[EdgeRecord]) -> QueryAssignment:
        gone = tuple(e for e in edges if e.retired)
        ids = {e.edge for e in gone}
        serving = [s for e in edges if (s := e.stream(query.spec.stream)) is not None and not e.retired]
        expected = tuple(e for e in expected_edges(query.spec, edges) if e not in ids)
        return cls(query, expected, gone, serving[0].clock if serving else LIVE)

    def members(self, now_ms: int) -> MembersChanged:
        """Who shares the query's budget. A retired edge can have closed what its clock had passed, or,
        in a stream that runs ahead of its clock, what its last heartbeat said."""
        window, stream = self.query.spec.window, self.query.spec.stream
        today = self.horizon_ms(now_ms)
        gone = {}
        for edge in self.retired:
            said = edge.watermarks.get(stream, today)
            ahead = today < said < MAX_TIME_MS
            gone[edge.edge] = window.slice_start(said) + window.slice_ms if ahead else today
        return MembersChanged(frozenset(self.expected), gone)

    def horizon_ms(self, now_ms: int) -> int:
        """The first slice that lies ahead of every edge's clock."""
        window = self.query.spec.window
        return window.slice_start(self.clock.to_event_ms(now_ms + MAX_CLOCK_LEAD_MS)) + window.slice_ms


@dataclass(frozen=True, slots=True)
class AssignmentPlan:
    """The live queries as of one version of the catalog."""

    version: int
    queries: tuple[QueryAssignment, ...]

    @classmethod
    def of(cls, version: int, queries: Sequence[RegisteredQuery], edges: Sequence[EdgeRecord]) -> AssignmentPlan:
        return cls(version, tuple(QueryAssignment.of(q, edges) for q in queries))

    def orders(self, edge: EdgeId, budgets: BudgetSnapshot) -> EdgeAssignment:
        """What `edge` is to be told: the queries that expect it, and its part of their budgets."""
        mine = [p.query for p in self.queries if edge in p.expected]
        queries = pb.Queries(
            version=self.version,
            queries=[
                pb.Query(name=q.ref.name, version=q.ref.version, spec=json.dumps(q.spec.to_mapping())) for q in mine
            ],
        )
        parts = (budgets.of(q, edge) for q in mine)
        observed = tuple(
            SamplingRequirement(q.ref, budgets.rates.get(q.ref, {}).get(edge, 1.0), is_expensive(q.spec))
            for q in mine
            if q.spec.accuracy is not None
        )
        return EdgeAssignment(queries, tuple(part for part in parts if part is not None), observed)


@dataclass(frozen=True, slots=True)
class BudgetSnapshot:
    """What is known of budgets: the words to edges per query, how long the center itself takes, and by query
    and edge what part of records an accuracy needs."""

    words: Mapping[QueryRef, Mapping[EdgeId, Grant]] = field(default_factory=dict)
    center_ms: Mapping[QueryRef, int] = field(default_factory=dict)
    rates: Mapping[QueryRef, Mapping[EdgeId, float]] = field(default_factory=dict)

    def of(self, query: RegisteredQuery, edge: EdgeId) -> pb.Budget | None:
        """One edge's part of one query's budget; None: there is nothing to say."""
        ref = query.ref
        if isinstance(query.spec.budget, StalenessBudget):
            takes_ms = self.center_ms.get(ref)
            return pb.Budget(query=ref.name, query_version=ref.version, center_ms=takes_ms) if takes_ms else None
        word = self.words.get(ref, {}).get(edge)
        if word is None:
            return None
        return pb.Budget(
            query=ref.name, query_version=ref.version, shares=word.shares, version=word.version, from_ms=word.from_ms
        )


def limits(spec: QuerySpec) -> tuple[dict[str, float], dict[str, float]]:
    """An error budget per measure: those that edges divide, and those that every edge may use whole.

    Errors of sums add up over edges. The error of an extremum is the largest of any edge's, and relative
    errors do not add up either: Σ e·|vᵢ| ≤ e·|Σ vᵢ| as long as the vᵢ have one sign.
    """
    if not isinstance(spec.budget, ErrorBudget):
        return {}, {}
    error = {m.name: m.function.error for m in spec.measures}
    divided = {name: limit for name, limit in spec.budget.limits if error[name] != "extremum"}
    return divided, {name: limit for name, limit in spec.budget.limits if name not in divided}
