"""The load of the queries, for an operator whose center is short of CPU."""

from __future__ import annotations

from fastapi import APIRouter

from center.api.access import IN_TURN, READS, Caller
from center.api.load_models import Load, QueryLoad
from center.api.services import Center
from edgewater.model.edge_records import expected_edges

router = APIRouter(prefix="/v1", tags=["load"])


@router.get("/load", dependencies=[READS, IN_TURN], summary="The load of the queries, the least slack first")
def load(center: Center, caller: Caller) -> Load:
    """Lists, for each query that the caller may read: its slack, its unapplied frames, and the cost of an answer."""
    catalog, now_ms = center.catalog, center.now_ms()
    consumed, last = center.results.consumed(), catalog.frames.last_positions()
    queries = [q for q in catalog.queries.all() if q.is_running and caller.may("reader", q.ref.name)]
    pending = {q.key: (consumed.get(q.key, 0), last.get(q.key, 0)) for q in queries}
    oldest = catalog.frames.oldest({key: after for key, (after, through) in pending.items() if through > after})
    costs, edges = catalog.budgets.processing_delays(), catalog.edges.all()
    known = {e.edge: e for e in edges}
    set_aside = {ref: query.state for ref, query in catalog.quarantine.queries().items()}
    loads = [
        QueryLoad.of(
            query,
            frames=max(0, pending[query.key][1] - pending[query.key][0]),
            oldest_at_ms=oldest.get(query.key),
            cost_ms=costs.get(query.ref),
            edges=[known[e] for e in expected_edges(query.spec, edges) if e in known],
            set_aside=set_aside.get(query.ref),
            now_ms=now_ms,
        )
        for query in queries
    ]
    return Load(queries=sorted(loads, key=QueryLoad.by_slack))
