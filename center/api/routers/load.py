"""The load of the queries, for an operator whose center is short of CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fastapi import APIRouter

from center.api.access import IN_TURN, READS, Caller
from center.api.measure_models import ApiModel
from center.api.services import Center
from center.catalog import SetAside
from edgewater.base.streams import MAX_TIME_MS
from edgewater.model.edge_records import EdgeRecord, expected_edges
from edgewater.model.registered_query import RegisteredQuery
from edgewater.model.windows import window_ends

router = APIRouter(prefix="/v1", tags=["load"])


class QueryLoad(ApiModel):
    """The load of a query."""

    query: str
    version: int
    slack_ms: float | None
    """Until its next answer becomes late: when the frame that closes a window came, or is expected to come, less now
    and the cost. Negative: it is late. Null: no frame is expected."""
    frames: int
    """Frames in the log that are not applied."""
    late_ms: int
    """Since the oldest of them came; 0: there is none."""
    cost_ms: int | None
    """From a frame's arrival until answers have its values, 95th percentile of a minute in which it had frames. Null:
    not measured yet."""
    set_aside: SetAside | None
    """Its frames are kept, and not applied. Null: they are applied."""

    def by_slack(self) -> tuple[float, str]:
        return math.inf if self.slack_ms is None else self.slack_ms, self.query


class CenterLoad(ApiModel):
    queries: list[QueryLoad]
    """The least slack first."""


@router.get("/load", dependencies=[READS, IN_TURN], summary="The load of the queries, the least slack first")
def load(center: Center, caller: Caller) -> CenterLoad:
    """Lists, for each query that the caller may read: its slack, its unapplied frames, and the cost of an answer."""
    catalog, now_ms = center.catalog, center.now_ms()
    consumed, last = center.results.consumed(), catalog.frames.last_positions()
    queries = [q for q in catalog.queries.all() if q.is_running and caller.may("reader", q.ref.name)]
    pending = {q.key: (consumed.get(q.key, 0), last.get(q.key, 0)) for q in queries}
    oldest = catalog.frames.oldest({key: after for key, (after, through) in pending.items() if through > after})
    costs, edges = catalog.budgets.processing_delays(), catalog.edges.all()
    known = {e.edge: e for e in edges}
    set_aside = {ref: query.state for ref, query in catalog.quarantine.queries().items()}
    loads = []
    for query in queries:
        after, through = pending[query.key]
        oldest_ms, cost_ms = oldest.get(query.key), costs.get(query.ref)
        expected = [known[e] for e in expected_edges(query.spec, edges) if e in known]
        due_ms = _expected_ms(query, expected, now_ms) if oldest_ms is None else float(oldest_ms)
        each = QueryLoad(
            query=query.ref.name,
            version=query.ref.version,
            slack_ms=None if due_ms is None else due_ms - now_ms - (cost_ms or 0),
            frames=max(0, through - after),
            late_ms=0 if oldest_ms is None else max(0, now_ms - oldest_ms),
            cost_ms=cost_ms,
            set_aside=set_aside.get(query.ref),
        )
        loads.append(each)
    return CenterLoad(queries=sorted(loads, key=QueryLoad.by_slack))


def _expected_ms(query: RegisteredQuery, edges: Sequence[EdgeRecord], now_ms: int) -> float | None:
    """Returns the wall time at which the first edge is expected to close the next window; None if no edge will."""
    ends = window_ends(query.spec.window)
    if ends is None:
        return None
    step_ms, offset_ms = ends
    expected = []
    for edge in edges:
        stream = edge.stream(query.spec.stream)
        if edge.retired or stream is None or edge.watermarks.get(stream.name, 0) >= MAX_TIME_MS:
            continue
        at_ms = stream.clock.to_event_ms(now_ms)
        end_ms = offset_ms + ((at_ms - offset_ms) // step_ms + 1) * step_ms
        expected.append(stream.clock.to_wall_ms(end_ms))
    return min(expected, default=None)
