"""Assignments: the queries that each edge answers, its share of error budgets and its sampling rates. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum

import pyarrow as pa

from center.budgets import Grant
from center.catalog import DeclaredStream
from center.early import SamplingPlan, SamplingRequirement, is_expensive
from edgewater.base.streams import LIVE, MAX_TIME_MS, MIN_TIME_MS, EdgeId, StreamClock
from edgewater.model.edge_records import EdgeRecord, contributes
from edgewater.model.lookups import digest_of, pack_rows
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import RegisteredQuery
from edgewater.model.window_range import ALL_WINDOWS, WindowRange
from edgewater.wire import QueryRef
from edgewater.wire import uplink_pb2 as pb

MAX_CLOCK_LEAD_MS = 10_000
"""The largest accepted lead of an edge's clock over the center's clock, in ms."""


@dataclass(frozen=True, slots=True)
class AssignedQueries:
    """The queries that an edge answers. Edges that answer the same queries share one instance.

    Attributes:
        message: the `pb.Queries` message. Nobody may change it.
        tables: by digest, the `pb.Table` message of each table of these queries. Nobody may change it.
        budgeted: the queries with an error budget or a staleness budget.
        sampled: the queries with an accuracy, and whether each is expensive.
    """

    refs: frozenset[QueryRef]
    message: pb.ToEdge
    tables: Mapping[int, pb.ToEdge]
    budgeted: tuple[RegisteredQuery, ...]
    sampled: tuple[tuple[QueryRef, bool], ...]


@dataclass(frozen=True, slots=True)
class EdgeAssignment:
    """The control messages that assign work to one edge."""

    queries: AssignedQueries
    budgets: tuple[pb.Budget, ...]
    sampling: tuple[SamplingRequirement, ...] = ()


@dataclass(frozen=True, slots=True)
class QueryAssignment:
    """A live query, the edges expected to answer it, the retired edges, and its stream's clock."""

    query: RegisteredQuery
    expected: frozenset[EdgeId]
    retired: tuple[EdgeRecord, ...] = ()
    clock: StreamClock = LIVE

    def closed_by_retired(self, now_ms: int) -> dict[EdgeId, int]:
        """Returns, by retired edge, the start of the first slice that the edge cannot have closed.

        A retired edge can have closed the slices that its clock has passed. If the stream runs ahead of the clock, it
        can have closed the slices up to the watermark of its last heartbeat.
        """
        window, stream = self.query.spec.window, self.query.spec.stream
        horizon_ms = self.horizon_ms(now_ms)
        retired = {}
        for edge in self.retired:
            watermark_ms = edge.watermarks.get(stream, horizon_ms)
            ahead = horizon_ms < watermark_ms < MAX_TIME_MS
            retired[edge.edge] = window.next_slice(watermark_ms) if ahead else horizon_ms
        return retired

    def horizon_ms(self, now_ms: int) -> int:
        """The first slice that is ahead of every edge's clock."""
        window = self.query.spec.window
        return window.next_slice(self.clock.to_event_ms(now_ms + MAX_CLOCK_LEAD_MS))


class FrameAdmission(Enum):
    """Whether the center takes the frames of an edge for a query."""

    KEPT = "kept"
    UNKNOWN_QUERY = "unknown-query"
    """The query is not registered, or is deleted: the frames are acknowledged and discarded."""
    NOT_EXPECTED = "not-expected"
    """The edge does not contribute to the query: the frames are acknowledged and refused."""


_Served = tuple[tuple[str, tuple[str, ...] | None], ...]
"""The names of an edge's streams, each with the queries that the edge may answer. Edges with equal values answer the
same queries."""


@dataclass(slots=True)
class _Alike:
    """Edges that are not retired and answer the same queries, unless a query names its edges.

    Attributes:
        first: the first of these edges by id. Its streams are the streams of all of them; columns and clocks may
            differ.
        queries: indices of the queries.
    """

    first: EdgeRecord
    edges: list[EdgeId] = field(default_factory=list)
    queries: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _QueryMessage:
    """A query as edges get it, and its tables by digest."""

    query: pb.Query
    tables: Mapping[int, pb.ToEdge]


@dataclass(frozen=True, slots=True)
class AssignmentPlan:
    """The live queries and the edges of one version of the catalog.

    Attributes:
        queries: the queries that edges answer.
        specs: these queries, and ended queries, because frames of ended queries may still come.
        declared: by stream, the columns that the center declares.
        columns: by stream, the declared columns. If none are declared, the columns of its edges that are not retired;
            the catalog ensures that their types are equal.
    """

    version: int
    queries: tuple[QueryAssignment, ...]
    edges: Mapping[EdgeId, EdgeRecord] = field(default_factory=dict)
    specs: Mapping[QueryRef, QuerySpec] = field(default_factory=dict)
    columns: Mapping[str, Mapping[str, pa.DataType]] = field(default_factory=dict)
    declared: Mapping[str, DeclaredStream] = field(default_factory=dict)
    _messages: Mapping[tuple[QueryRef, WindowRange], _QueryMessage] = field(default_factory=dict)
    _alike: Mapping[_Served, _Alike] = field(default_factory=dict)
    _naming: Mapping[EdgeId, Sequence[int]] = field(default_factory=dict)
    _lists: dict[tuple[int, ...], AssignedQueries] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        version: int,
        queries: Sequence[RegisteredQuery],
        edges: Sequence[EdgeRecord],
        declared: Mapping[str, DeclaredStream] | None = None,
        previous: AssignmentPlan | None = None,
    ) -> AssignmentPlan:
        """Builds a plan from the edges, ordered by id, and the queries that are not deleted.

        It reuses the messages that `previous` has serialised.
        """
        columns: dict[str, dict[str, pa.DataType]] = {}
        specs = {q.ref: q.spec for q in queries}
        queries = [q for q in queries if q.is_running]
        declared, alike = declared or {}, dict[_Served, _Alike]()
        for edge in edges:
            if not edge.retired:
                alike.setdefault(_served(edge), _Alike(edge)).edges.append(edge.edge)
        seen = set[int]()
        for edge in edges:
            if not edge.retired and id(edge.streams) not in seen:  # most edges share one value
                seen.add(id(edge.streams))
                for stream in edge.streams:
                    columns.setdefault(stream.name, {}).update(stream.columns)
        retired, groups = tuple(e for e in edges if e.retired), list(alike.values())
        retired_ids = {e.edge for e in retired}
        expected: dict[tuple[int, ...], frozenset[EdgeId]] = {}
        naming: dict[EdgeId, list[int]] = {}
        assigned = []
        for index, query in enumerate(queries):
            spec = query.spec
            answering = tuple(n for n, g in enumerate(groups) if any(s.answers(spec) for s in g.first.streams))
            if spec.edges is not None:
                members = frozenset(EdgeId(e) for e in spec.edges) - retired_ids
                for member in members:
                    naming.setdefault(member, []).append(index)
            else:
                if answering not in expected:
                    expected[answering] = frozenset(e for n in answering for e in groups[n].edges)
                members = expected[answering]
                for n in answering:
                    groups[n].queries.append(index)
            first = min((groups[n].first for n in answering), key=lambda e: e.edge, default=None)
            clock = next(s.clock for s in first.streams if s.answers(spec)) if first is not None else LIVE
            assigned.append(QueryAssignment(query, members, retired, clock))
        known = previous._messages if previous is not None else {}
        return cls(
            version,
            tuple(assigned),
            {e.edge: e for e in edges},
            specs,
            columns | {name: stream.types for name, stream in declared.items()},
            declared,
            {(q.ref, q.windows): known.get((q.ref, q.windows)) or _message(q) for q in queries},
            alike,
            naming,
        )

    def is_retired(self, edge: EdgeId) -> bool:
        return edge in self.edges and self.edges[edge].retired

    def admission(self, edge: EdgeId, query: QueryRef) -> FrameAdmission:
        """Returns whether frames of the edge count in the query, by this version of the catalog."""
        if query not in self.specs:
            return FrameAdmission.UNKNOWN_QUERY
        known = edge in self.edges and contributes(self.specs[query], self.edges[edge])
        return FrameAdmission.KEPT if known else FrameAdmission.NOT_EXPECTED

    def assignment(self, edge: EdgeId, budgets: BudgetSnapshot) -> EdgeAssignment:
        """The assignment of `edge`: the queries that expect it, its budgets and its sampling rates."""
        queries = self._queries_of(edge)
        sampling = tuple(
            SamplingRequirement(ref, plan.rate, expensive, plan.records)
            for ref, expensive in queries.sampled
            for plan in (budgets.sampling.get(ref, {}).get(edge, SamplingPlan()),)
        )
        messages = (budgets.message(q, edge) for q in queries.budgeted)
        return EdgeAssignment(queries, tuple(m for m in messages if m is not None), sampling)

    def _queries_of(self, edge: EdgeId) -> AssignedQueries:
        known = self.edges.get(edge)
        alike = self._alike.get(_served(known)) if known is not None and not known.retired else None
        indices = tuple(sorted((*(alike.queries if alike is not None else ()), *self._naming.get(edge, ()))))
        if indices not in self._lists:
            queries = [self.queries[index].query for index in indices]
            messages = [self._messages[q.ref, q.windows] for q in queries]
            tables = {digest: table for m in messages for digest, table in m.tables.items()}
            self._lists[indices] = AssignedQueries(
                frozenset(q.ref for q in queries),
                pb.ToEdge(queries=pb.Queries(version=self.version, queries=[m.query for m in messages])),
                tables,
                tuple(q for q in queries if q.spec.error_budget is not None or q.spec.staleness_budget is not None),
                tuple((q.ref, is_expensive(q.spec)) for q in queries if q.spec.accuracy is not None),
            )
        return self._lists[indices]


def _served(edge: EdgeRecord) -> _Served:
    return tuple((s.name, s.queries) for s in edge.streams)


def _message(query: RegisteredQuery) -> _QueryMessage:
    borders = asdict(query.windows) if query.windows != ALL_WINDOWS else {}
    borders = {name: at_ms for name, at_ms in borders.items() if MIN_TIME_MS < at_ms < MAX_TIME_MS}
    packed = {lookup.table: pack_rows(lookup.rows) for lookup in query.spec.lookups if lookup.rows}
    digests = {table: digest_of(rows) for table, rows in packed.items()}
    lookups = tuple(replace(lookup, rows="") for lookup in query.spec.lookups)
    spec = json.dumps(replace(query.spec.shipped, lookups=lookups).to_mapping())
    return _QueryMessage(
        pb.Query(name=query.ref.name, version=query.ref.version, spec=spec, tables=digests, **borders),
        {digests[table]: pb.ToEdge(table=pb.Table(rows=rows)) for table, rows in packed.items()},
    )


@dataclass(frozen=True, slots=True)
class BudgetSnapshot:
    """The state of budgets in the catalog.

    Attributes:
        grants: by query and edge, the last grant.
        processing_delay_ms: by query, the center's processing delay.
        sampling: by query and edge, the sample that the accuracy needs.
    """

    grants: Mapping[QueryRef, Mapping[EdgeId, Grant]] = field(default_factory=dict)
    processing_delay_ms: Mapping[QueryRef, int] = field(default_factory=dict)
    sampling: Mapping[QueryRef, Mapping[EdgeId, SamplingPlan]] = field(default_factory=dict)

    def message(self, query: RegisteredQuery, edge: EdgeId) -> pb.Budget | None:
        """Returns the budget message of one query to one edge; None: there is no grant yet."""
        ref = query.ref
        delay_ms = self.processing_delay_ms.get(ref, 0) if query.spec.staleness_budget is not None else 0
        if query.spec.error_budget is None:
            return pb.Budget(query=ref.name, query_version=ref.version, center_ms=delay_ms) if delay_ms else None
        grant = self.grants.get(ref, {}).get(edge)
        if grant is None:
            return None
        return pb.Budget(
            query=ref.name,
            query_version=ref.version,
            shares=grant.shares,
            version=grant.version,
            from_ms=grant.from_ms,
            center_ms=delay_ms,
        )
