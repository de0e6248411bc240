"""Rows of how queries stand at edges that schedule them; each function runs inside a transaction of the catalog."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import Connection, select

from center.catalog import schema as t
from center.catalog.query_rows import live_queries
from center.storage.database import upsert
from edgewater.model.streams import EdgeId
from edgewater.wire import QueryRef


@dataclass(frozen=True, slots=True)
class QueryDelayRecord:
    """How a query stands at an edge, as the edge reports it.

    Attributes:
        mean_ms: mean delay of the watermark that sweeps a window, from the window's end; 0: unknown.
        latest_ms: the delay that 95 % of them do not exceed; 0: unknown.
        queued_ms: estimated processing time of the queued records.
        late_ms: time since the first watermark came that the query has not processed; 0: there is none.
        refused: values of the report that no edge can mean; they count as 0.
        reported_at_ms: by the center's clock.
    """

    query: QueryRef
    edge: EdgeId
    mean_ms: float
    latest_ms: float
    queued_ms: float
    late_ms: float
    refused: int
    reported_at_ms: int


def write_delays(connection: Connection, records: Iterable[QueryDelayRecord]) -> None:
    """Replaces the last reports; those of queries that are not live are ignored."""
    live = live_queries(connection)
    rows = [
        {
            "name": r.query.name,
            "version": r.query.version,
            "edge": r.edge,
            "mean_ms": r.mean_ms,
            "latest_ms": r.latest_ms,
            "queued_ms": r.queued_ms,
            "late_ms": r.late_ms,
            "refused": r.refused,
            "reported_at_ms": r.reported_at_ms,
        }
        for r in records
        if r.query in live
    ]
    if rows:
        upsert(connection, t.query_delays, rows)


def read_delays(connection: Connection) -> dict[QueryRef, list[QueryDelayRecord]]:
    """The last reports of live queries, by edge."""
    q, d = t.queries.c, t.query_delays.c
    live = (q.name == d.name) & (q.version == d.version) & q.deleted_at_ms.is_(None)
    found: dict[QueryRef, list[QueryDelayRecord]] = {}
    for r in connection.execute(select(t.query_delays).join(t.queries, live).order_by(d.edge)):
        ref = QueryRef(r.name, r.version)
        found.setdefault(ref, []).append(
            QueryDelayRecord(
                ref, EdgeId(r.edge), r.mean_ms, r.latest_ms, r.queued_ms, r.late_ms, r.refused, r.reported_at_ms
            )
        )
    return found
