"""What each edge is to answer, and its shares of the error budgets. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from center.catalog import EdgeRecord, RegisteredQuery, expected_edges
from edgewater.query import ErrorBudget, QuerySpec
from edgewater.streams import EdgeId
from edgewater.wire import uplink_pb2 as pb


@dataclass(frozen=True, slots=True)
class Orders:
    """The messages that tell one edge what to do."""

    queries: pb.Queries
    budgets: tuple[pb.Budget, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """The live queries, and the edges expected to answer each, as of one version of the catalog."""

    version: int
    queries: tuple[tuple[RegisteredQuery, tuple[EdgeId, ...]], ...]

    @classmethod
    def of(cls, version: int, queries: Sequence[RegisteredQuery], edges: Sequence[EdgeRecord]) -> Plan:
        return cls(version, tuple((q, tuple(expected_edges(q.spec, edges))) for q in queries))

    def orders(self, edge: EdgeId) -> Orders:
        """What `edge` is to be told: the queries that expect it, and its shares of their budgets."""
        mine = [(q, expected) for q, expected in self.queries if edge in expected]
        queries = pb.Queries(
            version=self.version,
            queries=[
                pb.Query(name=q.ref.name, version=q.ref.version, spec=json.dumps(q.spec.to_mapping())) for q, _ in mine
            ],
        )
        budgets = tuple(
            pb.Budget(query=q.ref.name, query_version=q.ref.version, shares=shares(q.spec, len(expected)))
            for q, expected in mine
            if isinstance(q.spec.budget, ErrorBudget)
        )
        return Orders(queries, budgets)


def shares(spec: QuerySpec, edges: int) -> dict[str, float]:
    """Each edge's share per measure of an error budget E over `edges` edges.

    Errors of sums add up over edges: E / n each, so that the shares sum to E. The error of an extremum
    is the largest of any edge's: each may have E.
    """
    if not isinstance(spec.budget, ErrorBudget):
        return {}
    error = {m.name: m.function.error for m in spec.measures}
    return {name: limit if error[name] == "extremum" else limit / edges for name, limit in spec.budget.limits}
