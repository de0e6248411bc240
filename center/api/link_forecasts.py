"""What a query takes of the links of its edges, and whether its values are in time: `forecast` in replies."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from center.api.services import Services
from edgewater.base.streams import EdgeId
from edgewater.base.timestamps import rfc3339
from edgewater.model.edge_records import EdgeRecord, expected_edges
from edgewater.model.link_forecast import LinkRecord, Load, Verdict, divide, together, verdict
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import RegisteredQuery
from edgewater.model.replies import EdgeForecast, LinkForecast
from edgewater.wire import QueryRef


@dataclass(frozen=True, slots=True)
class _Known:
    """What the center knows when it forecasts.

    Attributes:
        queries: the running queries.
        links: what edges state.
        shares: the bytes per second of edges that share a link.
        delays_ms: the center's processing delay, by query.
    """

    queries: Collection[RegisteredQuery]
    links: Mapping[EdgeId, LinkRecord]
    shares: Mapping[EdgeId, float]
    delays_ms: Mapping[QueryRef, int]
    now_ms: int


def link_forecast(
    center: Services, spec: QuerySpec, ref: QueryRef | None, edges: Mapping[EdgeId, EdgeRecord], since_ms: int
) -> LinkForecast:
    """Returns the forecast of a query.

    Args:
        ref: the query; None: it is not registered.
        edges: all edges.
        since_ms: wall time from which the query is known.
    """
    expected, now_ms, catalog = expected_edges(spec, edges.values()), center.now_ms(), center.catalog
    queries = [q for q in catalog.queries.all() if q.is_running]
    links = catalog.links.of(expected)
    sharing = catalog.links.sharing({r.link for r in links.values() if r.link}, now_ms)
    known = _Known(queries, links, divide(sharing), catalog.budgets.processing_delays(), now_ms)
    by_edge = [_of_edge(edge, edges.get(edge), spec, ref, known, since_ms) for edge in expected]
    sizes = [e["bytes_per_window"] for e in by_edge if e["bytes_per_window"] is not None]
    result = together([e["in_time"] for e in by_edge])
    unknown = [e["since"] for e in by_edge if e["since"] is not None]
    return {
        "in_time": result,
        "since": min(unknown, default=rfc3339(since_ms)) if result == "unknown" else None,
        "bytes_per_window": sum(sizes) if sizes else None,
        "edges": by_edge,
    }


def _of_edge(
    edge: EdgeId, record: EdgeRecord | None, spec: QuerySpec, ref: QueryRef | None, known: _Known, since_ms: int
) -> EdgeForecast:
    link = known.links.get(edge, LinkRecord(edge))
    taken = link.loads.get(ref) if ref is not None else None
    share = known.shares.get(edge, 0.0)
    low, high = (min(rate, share) if share else rate for rate in (link.low_bytes_s, link.high_bytes_s))
    result: Verdict = "unknown"
    unknown_ms, load = max(since_ms, link.stated_at_ms), None
    if record is None or not record.reachable(known.now_ms):
        unknown_ms = since_ms if record is None else max(record.last_seen_ms, since_ms)
    else:
        load = _load(spec, ref, taken or (0.0, 0.0), record, known)
        others = {
            q.ref: link.loads.get(q.ref)
            for q in known.queries
            if q.ref != ref and edge in expected_edges(q.spec, [record])
        }
        loads = [_load(q.spec, q.ref, each, record, known) for q in known.queries if (each := others.get(q.ref))]
        result = verdict(load, [load, *loads], low, high)
        if result == "yes" and (taken is None or None in others.values()):
            result = "unknown"
    return {
        "edge": edge,
        "in_time": result,
        "since": rfc3339(unknown_ms) if result == "unknown" else None,
        "bytes_per_window": None if taken is None else round(taken[0]),
        "omitted_bytes": None if taken is None else round(taken[1]),
        "link_share": load.bytes_s / low if taken is not None and load is not None and low else None,
        "least_bytes_s": low or None,
        "most_bytes_s": high or None,
        "stated_at": rfc3339(link.stated_at_ms) if link.stated_at_ms else None,
        "age_ms": known.now_ms - link.stated_at_ms if link.stated_at_ms else None,
    }


def _load(spec: QuerySpec, ref: QueryRef | None, taken: tuple[float, float], record: EdgeRecord, known: _Known) -> Load:
    stream = record.stream(spec.stream)
    delay_ms = record.rtt_ms / 2.0 + (known.delays_ms.get(ref, 0) if ref is not None else 0)
    return Load.of(spec, taken, delay_ms, stream.clock.speed if stream is not None else 1.0)
