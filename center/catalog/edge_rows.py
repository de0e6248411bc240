"""Rows of edges and incarnations; each function runs inside a transaction of the catalog."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Table, Text, cast, delete, func, insert, select, update

from center.catalog import schema as t
from center.catalog.edges import (
    NO_PROGRESS,
    EdgeRecord,
    StreamRecord,
    edge_from_row,
    streams_from_json,
    streams_to_json,
)
from center.edge_access import EdgeAccess
from edgewater.errors import Conflict, LimitExceeded, ProtocolError
from edgewater.streams import EdgeId

MAX_EDGES = 100_000
MAX_INCARNATIONS = 500
"""Incarnations of one edge that are remembered."""
REMEMBER_MS = 86_400_000
Refusal = tuple[str, ProtocolError]
"""An alarm's kind, and the error whose message it has."""
FIRST_SEQ = 1
"""The first frame of an incarnation."""
MAX_FORMER_STREAMS = 64
"""Streams that are kept of each edge after it has ceased to serve them."""


def lock_catalog(connection: Connection) -> None:
    """Serialises changes of queries and edges: the counter's row on PostgreSQL, on SQLite the transaction."""
    connection.execute(select(t.counters.c.value).where(t.counters.c.name == "catalog").with_for_update()).all()


def increment_version(connection: Connection) -> None:
    connection.execute(update(t.counters).where(t.counters.c.name == "catalog").values(value=t.counters.c.value + 1))


def count_rows(connection: Connection, table: Table) -> int:
    return int(connection.execute(select(func.count()).select_from(table)).scalar_one())


def select_edges(connection: Connection, edge: str | None = None) -> list[EdgeRecord]:
    """All edges by id, or only `edge`."""
    counts = select(t.incarnations.c.edge, func.count()).group_by(t.incarnations.c.edge)
    lost = select(t.lost_states.c.edge, t.lost_states.c.lost_at_ms)
    rows = select(t.edges).order_by(t.edges.c.edge)
    if edge is not None:
        counts = counts.where(t.incarnations.c.edge == edge)
        lost = lost.where(t.lost_states.c.edge == edge)
        rows = rows.where(t.edges.c.edge == edge)
    incarnations: dict[str, int] = dict(connection.execute(counts).all())
    lost_at_ms: dict[str, int] = dict(connection.execute(lost).all())
    return [edge_from_row(r, incarnations.get(r.edge, 0), lost_at_ms.get(r.edge)) for r in connection.execute(rows)]


def select_shapes(connection: Connection, but: EdgeId) -> list[tuple[EdgeId, tuple[StreamRecord, ...]]]:
    """The distinct lists of streams that edges serve, each with the first of these edges by id; without the edge `but`
    and retired ones."""
    streams = cast(t.edges.c.streams, Text)
    first = func.min(t.edges.c.edge)
    others = select(first, streams).where(t.edges.c.edge != but, t.edges.c.retired.is_(False))
    rows = connection.execute(others.group_by(streams).order_by(first))
    return [
        (EdgeId(edge), streams_from_json(s for s in json.loads(served) if not s.get("former"))) for edge, served in rows
    ]


def incarnation_in_use(connection: Connection, edge: EdgeId) -> str | None:
    """The incarnation of the edge's last session; None: it has never connected."""
    return connection.execute(select(t.edges.c.incarnation).where(t.edges.c.edge == edge)).scalar_one_or_none()


def record_lost_state(connection: Connection, edge: EdgeId, now_ms: int) -> None:
    """Records that what the edge had accepted until now and not shipped is unknown."""
    row = t.lost_states.c.edge == edge
    if connection.execute(update(t.lost_states).where(row).values(lost_at_ms=now_ms)).rowcount == 0:
        connection.execute(insert(t.lost_states).values(edge=edge, lost_at_ms=now_ms))
    increment_version(connection)


def select_incarnation(
    connection: Connection, edge: EdgeId, incarnation: str, *, locked: bool = False
) -> tuple[int, int] | None:
    """(first seq, next expected seq) of an incarnation. While it is locked, none of its frames is indexed."""
    c = t.incarnations.c
    progress = select(c.first_seq, c.awaited_seq).where(c.edge == edge, c.incarnation == incarnation)
    row = connection.execute(progress.with_for_update() if locked else progress).first()
    return None if row is None else (int(row[0]), int(row[1]))


def upsert_incarnation(
    connection: Connection, edge: EdgeId, incarnation: str, first: int, awaited: int, now_ms: int
) -> None:
    c = t.incarnations.c
    row = (c.edge == edge) & (c.incarnation == incarnation)
    values = {"awaited_seq": awaited, "hello_at_ms": now_ms}
    if connection.execute(update(t.incarnations).where(row).values(**values)).rowcount == 0:
        values |= {"first_seq": first}
        connection.execute(insert(t.incarnations).values(edge=edge, incarnation=incarnation, **values))


def forget_incarnations(connection: Connection, edge: EdgeId, now_ms: int) -> Refusal | None:
    """Makes room for a new incarnation of an edge that has had `MAX_INCARNATIONS`.

    Deletes incarnations without an indexed frame, and those that have not connected for `REMEMBER_MS`, except the last
    one. Frames of the latter must not count twice: `require_new` recognises such an incarnation.

    Returns:
        The refusal of a further incarnation, if too many have sent frames within that time.
    """
    c = t.incarnations.c
    of_edge = select(func.count()).where(c.edge == edge)
    if connection.execute(of_edge).scalar_one() < MAX_INCARNATIONS:
        return None
    unused = (c.awaited_seq == c.first_seq) | (c.hello_at_ms < now_ms - REMEMBER_MS)
    last = incarnation_in_use(connection, edge)
    old = (c.edge == edge) & (c.incarnation != last) & unused
    used = connection.execute(select(func.count()).where(old, c.awaited_seq != c.first_seq)).scalar_one()
    connection.execute(delete(t.incarnations).where(old))
    if used:
        this = t.edges.c.edge == edge
        connection.execute(update(t.edges).where(this).values(forgotten=t.edges.c.forgotten + used))
    count = connection.execute(of_edge).scalar_one()
    if count < MAX_INCARNATIONS:
        return None
    message = (
        f"edge {edge}: {count} incarnations have sent frames within {REMEMBER_MS // 3_600_000} h, which is the limit;"
        " expected one as long as the edge's state directory exists: keep it from one start to the next"
    )
    return "too-many-incarnations", LimitExceeded(message, "incarnations")


def require_new(connection: Connection, edge: EdgeId, incarnation: str, oldest_seq: int) -> Refusal | None:
    """Refuses an unknown incarnation that has had acknowledgements, of an edge of which some were forgotten: the center
    may have the frames that it would send again, because their acknowledgement was lost.

    One that has never had an acknowledgement sends all frames from its first one on, as a new one does.
    """
    forgotten = connection.execute(select(t.edges.c.forgotten).where(t.edges.c.edge == edge)).scalar_one_or_none()
    if not forgotten or oldest_seq <= FIRST_SEQ:
        return None
    return "incarnation-forgotten", ProtocolError(
        f"edge {edge}: incarnation {incarnation} has frames from {oldest_seq} on, and the center no longer knows which"
        " of them it has: give the edge a new state directory, so that none counts twice"
    )


def upsert_edge(
    connection: Connection,
    edge: EdgeId,
    incarnation: str,
    labels: Mapping[str, str],
    streams: Sequence[StreamRecord],
    now_ms: int,
    session: str,
    access: EdgeAccess,
) -> None:
    """Writes an edge's row from its Hello. A new incarnation resets what heartbeats report."""
    values: dict[str, Any] = {
        "incarnation": incarnation,
        "labels": dict(labels),
        "streams": streams_to_json(streams),
        "last_seen_ms": now_ms,
        "connected": True,
        "session": session,
    }
    reset = {"progress": NO_PROGRESS, "backlog_bytes": 0}
    this = t.edges.c.edge == edge
    known = connection.execute(select(t.edges).where(this)).first()
    if known is None:
        if count_rows(connection, t.edges) >= MAX_EDGES:
            raise Conflict(f"edge {edge}: {MAX_EDGES} edges are known, which is the limit")
        link = {"bandwidth_bytes_s": 0.0, "rtt_ms": 0.0, "clock_offset_ms": 0.0}
        row = {"edge": edge, "first_seen_ms": now_ms, "retired": False, **values, **reset, **link}
        connection.execute(insert(t.edges).values(**row))
    else:
        if known.incarnation != incarnation:
            values |= reset
        values["streams"] += _former(known.streams, {s.name for s in streams}, access)
        connection.execute(update(t.edges).where(this).values(**values))
    if known is None or known.streams != values["streams"]:
        increment_version(connection)


def _former(streams: Sequence[Mapping[str, Any]], served: set[str], access: EdgeAccess) -> list[dict[str, Any]]:
    """The streams in the catalog that an edge no longer serves and still might, without their columns; the
    ones given up last first."""
    given_up = (s for s in streams if s["name"] not in served and access.may_serve(s["name"]))
    latest = sorted(given_up, key=lambda s: bool(s.get("former")))[:MAX_FORMER_STREAMS]
    queries = {} if access.queries is None else {"queries": list(access.queries)}
    return [
        {**{k: v for k, v in s.items() if k != "queries"}, "columns": [], "former": True, **queries} for s in latest
    ]
