"""Assignments: the queries that each edge answers, its share of error budgets and its sampling rates. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import pyarrow as pa

from center.budgets import Grant, MembersChanged
from center.catalog import DeclaredStream, EdgeRecord, RegisteredQuery, contributes, expected_edges
from center.sampling import SamplingRequirement, is_expensive
from edgewater.query import QuerySpec
from edgewater.streams import LIVE, MAX_TIME_MS, EdgeId, StreamClock
from edgewater.wire import QueryRef
from edgewater.wire import uplink_pb2 as pb

MAX_CLOCK_LEAD_MS = 10_000
"""Wall time by which an edge's clock may be ahead of the center's."""


@dataclass(frozen=True, slots=True)
class EdgeAssignment:
    """The control messages that assign work to one edge."""

    queries: pb.Queries
    budgets: tuple[pb.Budget, ...]
    sampling: tuple[SamplingRequirement, ...] = ()


@dataclass(frozen=True, slots=True)
class QueryAssignment:
    """A live query, the edges expected to answer it, the retired edges, and its stream's clock."""

    query: RegisteredQuery
    expected: tuple[EdgeId, ...]
    retired: tuple[EdgeRecord, ...] = ()
    clock: StreamClock = LIVE

    @classmethod
    def of(cls, query: RegisteredQuery, edges: Sequence[EdgeRecord]) -> QueryAssignment:
        retired = tuple(e for e in edges if e.retired)
        retired_ids = {e.edge for e in retired}
        serving = [s for e in edges for s in e.streams if s.answers(query.spec) and not e.retired]
        expected = tuple(e for e in expected_edges(query.spec, edges) if e not in retired_ids)
        return cls(query, expected, retired, serving[0].clock if serving else LIVE)

    def members(self, now_ms: int) -> MembersChanged:
        """The edges that share the query's error budget.

        A retired edge can have closed the slices that its clock has passed or, in a stream that runs ahead of its
        clock, the slices up to the watermark of its last heartbeat.
        """
        window, stream = self.query.spec.window, self.query.spec.stream
        horizon_ms = self.horizon_ms(now_ms)
        retired = {}
        for edge in self.retired:
            watermark_ms = edge.watermarks.get(stream, horizon_ms)
            ahead = horizon_ms < watermark_ms < MAX_TIME_MS
            retired[edge.edge] = window.slice_start(watermark_ms) + window.slice_ms if ahead else horizon_ms
        return MembersChanged(frozenset(self.expected), retired)

    def horizon_ms(self, now_ms: int) -> int:
        """The first slice that is ahead of every edge's clock."""
        window = self.query.spec.window
        return window.slice_start(self.clock.to_event_ms(now_ms + MAX_CLOCK_LEAD_MS)) + window.slice_ms


class Admission(Enum):
    """What a plan says about the frames of an edge for a query."""

    KEPT = "kept"
    UNKNOWN_QUERY = "unknown-query"
    """The query is not registered, or is deleted: the frames are acknowledged and discarded."""
    NOT_EXPECTED = "not-expected"
    """The edge does not contribute to the query: the frames are acknowledged and refused."""


@dataclass(frozen=True, slots=True)
class AssignmentPlan:
    """The live queries and the edges as of one version of the catalog.

    Attributes:
        declared: by stream, the columns that the center declares.
        columns: by stream, those or, without any, the columns of its edges, but for retired ones; the catalog keeps
            their types equal.
    """

    version: int
    queries: tuple[QueryAssignment, ...]
    edges: Mapping[EdgeId, EdgeRecord] = field(default_factory=dict)
    specs: Mapping[QueryRef, QuerySpec] = field(default_factory=dict)
    columns: Mapping[str, Mapping[str, pa.DataType]] = field(default_factory=dict)
    declared: Mapping[str, DeclaredStream] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        version: int,
        queries: Sequence[RegisteredQuery],
        edges: Sequence[EdgeRecord],
        declared: Mapping[str, DeclaredStream] | None = None,
    ) -> AssignmentPlan:
        columns: dict[str, dict[str, pa.DataType]] = {}
        declared = declared or {}
        for stream in (s for e in edges if not e.retired for s in e.streams):
            columns.setdefault(stream.name, {}).update(stream.columns)
        return cls(
            version,
            tuple(QueryAssignment.of(q, edges) for q in queries),
            {e.edge: e for e in edges},
            {q.ref: q.spec for q in queries},
            columns | {name: stream.types for name, stream in declared.items()},
            declared,
        )

    def is_retired(self, edge: EdgeId) -> bool:
        return edge in self.edges and self.edges[edge].retired

    def admission(self, edge: EdgeId, query: QueryRef) -> Admission:
        """Whether frames of the edge count in the query, as of this version of the catalog."""
        if query not in self.specs:
            return Admission.UNKNOWN_QUERY
        known = edge in self.edges and contributes(self.specs[query], self.edges[edge])
        return Admission.KEPT if known else Admission.NOT_EXPECTED

    def assignment(self, edge: EdgeId, budgets: BudgetSnapshot) -> EdgeAssignment:
        """The assignment of `edge`: the queries that expect it, its budgets and its sampling rates."""
        queries = [q.query for q in self.queries if edge in q.expected]
        message = pb.Queries(
            version=self.version,
            queries=[
                pb.Query(name=q.ref.name, version=q.ref.version, spec=json.dumps(q.spec.to_mapping())) for q in queries
            ],
        )
        sampling = tuple(
            SamplingRequirement(q.ref, budgets.sampling_rates.get(q.ref, {}).get(edge, 1.0), is_expensive(q.spec))
            for q in queries
            if q.spec.accuracy is not None
        )
        return EdgeAssignment(
            message, tuple(b for q in queries if (b := budgets.message(q, edge)) is not None), sampling
        )


@dataclass(frozen=True, slots=True)
class BudgetSnapshot:
    """What the catalog holds about budgets.

    Attributes:
        grants: by query and edge, the last grant.
        processing_delay_ms: by query, the center's processing delay.
        sampling_rates: by query and edge, the fraction of records that the accuracy needs processed.
    """

    grants: Mapping[QueryRef, Mapping[EdgeId, Grant]] = field(default_factory=dict)
    processing_delay_ms: Mapping[QueryRef, int] = field(default_factory=dict)
    sampling_rates: Mapping[QueryRef, Mapping[EdgeId, float]] = field(default_factory=dict)

    def message(self, query: RegisteredQuery, edge: EdgeId) -> pb.Budget | None:
        """The budget message of one query to one edge; None if there is none yet."""
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
