"""Rows of edges and incarnations; each function runs inside a transaction of the catalog."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Row, Select, Text, cast, delete, func, select, update

from center.catalog import schema as t
from center.catalog.transactions import increment_version
from center.edge_access import EdgeAccess
from center.storage.database import upsert
from edgewater.base.errors import LimitExceeded, ProtocolError
from edgewater.base.streams import COLUMN_TYPES, Delivery, EdgeId, StreamClock, type_name
from edgewater.model.edge_records import EdgeRecord, HeartbeatRecord, StreamRecord

MAX_EDGES = 100_000  # limit: rows of the catalog
MAX_INCARNATIONS = 500
"""Maximum number of incarnations of one edge that the catalog remembers."""
REMEMBER_MS = 86_400_000  # limit: rows of edges that never came back
NO_PROGRESS: dict[str, Any] = {"watermarks": {}, "records": {}, "drops": {}, "rejected": {}, "null_columns": {}}
"""Progress of an incarnation that has not sent a heartbeat yet."""
_LINK = ("backlog_bytes", "bandwidth_bytes_s", "rtt_ms", "clock_offset_ms")
_SAME = ("incarnation", "labels", "first_seen_ms", "connected", "retired", *_LINK)
"""Columns of edges with the names of the members of `EdgeRecord`."""
Refusal = tuple[str, ProtocolError]
"""The kind of an alarm, and the error that has the message of the alarm."""
MAX_NAMED = 500
"""Maximum number of edges in one SQL statement. With more edges, it takes less time to read all edges."""
FIRST_SEQ = 1  # format: of frames
"""The first frame of an incarnation."""
MAX_FORMER_STREAMS = 64
"""Maximum number of former streams of one edge that the catalog remembers after the edge has stopped serving them."""


def streams_to_json(streams: Iterable[StreamRecord]) -> list[dict[str, Any]]:
    return [
        {
            "name": s.name,
            "columns": [[n, type_name(t)] for n, t in s.columns.items()],
            "clock": asdict(s.clock),
            **({"deliveries": list(s.deliveries)} if s.deliveries else {}),
            **({} if s.queries is None else {"queries": list(s.queries)}),
            **({"constants": dict(s.constants)} if s.constants else {}),
        }
        for s in streams
    ]


def streams_from_json(streams: Iterable[Mapping[str, Any]]) -> tuple[StreamRecord, ...]:
    return tuple(
        StreamRecord(
            s["name"],
            {n: COLUMN_TYPES[t] for n, t in s["columns"]},
            StreamClock(**s["clock"]),
            tuple(map(Delivery, s.get("deliveries", ()))),
            tuple(s["queries"]) if "queries" in s else None,
            s.get("constants", {}),
        )
        for s in streams
    )


def heartbeat_to_row(heartbeat: HeartbeatRecord) -> dict[str, Any]:
    progress: dict[str, Any] = {name: dict(getattr(heartbeat, name)) for name in NO_PROGRESS}
    progress["release"] = heartbeat.release
    progress["durable"] = {"incarnation": heartbeat.incarnation, "records": dict(heartbeat.durable)}
    return {
        "progress": progress,
        "backlog_bytes": heartbeat.backlog_bytes,
        "bandwidth_bytes_s": heartbeat.bandwidth_bytes_s,
        "rtt_ms": heartbeat.rtt_ms,
        "clock_offset_ms": heartbeat.clock_offset_ms,
        "last_seen_ms": heartbeat.seen_at_ms,
    }


def edge_from_row(
    row: Row[Any],
    streams: tuple[tuple[StreamRecord, ...], tuple[StreamRecord, ...]],
    incarnations: int,
    state_lost_at_ms: int | None,
    gateways: Mapping[str, tuple[int, int]],
) -> EdgeRecord:
    """Returns a row of the table `edges` as a record.

    Args:
        streams: the streams that the edge serves, and the streams that it served before.
        gateways: by gateway, the wall time of its last report (`Edges.record_silence`), and the silence of an edge that
            this report would have recorded.
    """
    heard_by_ms, silence_ms = gateways.get(row.gateway, (None, 0)) if row.connected else (None, 0)
    heard_from_ms = row.last_seen_ms if heard_by_ms is None else heard_by_ms - silence_ms
    progress = {name: row.progress.get(name, none) for name, none in {**NO_PROGRESS, "release": ""}.items()}
    return EdgeRecord(
        edge=EdgeId(row.edge),
        streams=streams[0],
        former_streams=streams[1],
        last_seen_ms=max(row.last_seen_ms, heard_from_ms),
        heard_by_ms=heard_by_ms,
        incarnations=incarnations,
        state_lost_at_ms=state_lost_at_ms,
        **{name: getattr(row, name) for name in _SAME},
        **progress,
    )


def select_edges(connection: Connection, only: Collection[str] | None = None) -> list[EdgeRecord]:
    """Returns all edges by id, or only the edges in `only`."""
    counts = select(t.incarnations.c.edge, func.count()).group_by(t.incarnations.c.edge)
    lost = select(t.lost_states.c.edge, t.lost_states.c.lost_at_ms)
    columns = [c for c in t.edges.c if c is not t.edges.c.streams]
    rows: Select[Any] = select(*columns, cast(t.edges.c.streams, Text).label("streams")).order_by(t.edges.c.edge)
    if only is not None:
        counts = counts.where(t.incarnations.c.edge.in_(only))
        lost = lost.where(t.lost_states.c.edge.in_(only))
        rows = rows.where(t.edges.c.edge.in_(only))
    incarnations: dict[str, int] = dict(connection.execute(counts).all())
    lost_at_ms: dict[str, int] = dict(connection.execute(lost).all())
    gateways = {r.gateway: (r.beat_at_ms, r.silence_ms) for r in connection.execute(select(t.gateways))}
    return [
        edge_from_row(r, served_streams(r.streams), incarnations.get(r.edge, 0), lost_at_ms.get(r.edge), gateways)
        for r in connection.execute(rows)
    ]


def select_changed(connection: Connection, known: Mapping[EdgeId, EdgeRecord]) -> list[EdgeRecord]:
    """Returns all edges by id. It reuses a record of `known` if the edge is not retired and has the same streams."""
    streams = cast(t.edges.c.streams, Text).label("streams")
    rows = connection.execute(select(t.edges.c.edge, t.edges.c.retired, streams).order_by(t.edges.c.edge)).all()
    same = {}
    for row in rows:
        record = None if row.retired else known.get(row.edge)
        if record and not record.retired and (record.streams, record.former_streams) == served_streams(row.streams):
            same[row.edge] = record
    changed = [row.edge for row in rows if row.edge not in same]
    if len(changed) > MAX_NAMED:
        return select_edges(connection)
    read = {record.edge: record for record in select_edges(connection, changed)} if changed else {}
    return [same.get(row.edge) or read[row.edge] for row in rows]


def select_shapes(connection: Connection) -> dict[str, set[EdgeId]]:
    """Returns the distinct lists of streams that edges serve (`served_streams`), without retired edges.

    Each list comes with one or two of the edges that serve it.
    """
    streams = cast(t.edges.c.streams, Text)
    shapes = select(streams, func.min(t.edges.c.edge), func.max(t.edges.c.edge)).where(t.edges.c.retired.is_(False))
    rows = connection.execute(shapes.group_by(streams).order_by(func.min(t.edges.c.edge)))
    return {served: {EdgeId(first), EdgeId(last)} for served, first, last in rows}


@lru_cache(maxsize=4096)
def served_streams(streams: str) -> tuple[tuple[StreamRecord, ...], tuple[StreamRecord, ...]]:
    """Reads the column `streams`: the streams that an edge serves, and the streams that it served before.

    Edges with equal streams share one value, so do not change it.
    """
    listed = json.loads(streams)
    now, former = ([s for s in listed if bool(s.get("former")) is past] for past in (False, True))
    return streams_from_json(now), streams_from_json(former)


def incarnation_in_use(connection: Connection, edge: EdgeId) -> str | None:
    """Returns the incarnation of the edge's last session; None: the edge has never connected."""
    return connection.execute(select(t.edges.c.incarnation).where(t.edges.c.edge == edge)).scalar_one_or_none()


def record_lost_state(connection: Connection, edge: EdgeId, now_ms: int) -> None:
    """Records that the edge lost its state: it is unknown which records it had accepted and not shipped."""
    upsert(connection, t.lost_states, [{"edge": edge, "lost_at_ms": now_ms}])
    increment_version(connection)


def lock_incarnations(
    connection: Connection, incarnations: set[tuple[EdgeId, str]]
) -> dict[tuple[str, str], tuple[int, int, int]]:
    """Locks the known incarnations among these, and returns (first seq, next expected seq, run) of each.

    No frame of these incarnations is indexed before the transaction ends.
    """
    c = t.incarnations.c
    among = c.edge.in_({edge for edge, _ in incarnations}) & c.incarnation.in_({name for _, name in incarnations})
    # In the order in which `frame_index` takes these locks.
    rows = connection.execute(select(t.incarnations).where(among).order_by(c.edge, c.incarnation).with_for_update())
    return {
        (r.edge, r.incarnation): (r.first_seq, r.awaited_seq, r.run)
        for r in rows
        if (r.edge, r.incarnation) in incarnations
    }


def other_checksum(connection: Connection, edge: EdgeId, incarnation: str, checksums: Mapping[int, int]) -> int | None:
    """Returns the first seq whose indexed frame has another CRC32C than the given one; None: no frame has.

    Args:
        checksums: by seq, the checksums of at most a few hundred frames.
    """
    c = t.frames.c
    frames = select(c.seq, c.crc32c).where(c.edge == edge, c.incarnation == incarnation, c.seq.in_(checksums))
    return min((seq for seq, crc32c in connection.execute(frames) if crc32c != checksums[seq]), default=None)


def forget_incarnations(connection: Connection, edge: EdgeId, now_ms: int) -> Refusal | None:
    """Deletes old incarnations of an edge that has had `MAX_INCARNATIONS`, so that it may have a new one.

    Deletes incarnations without an indexed frame, and incarnations that have not connected for `REMEMBER_MS`, except
    the last one. The edge counts the deleted incarnations with frames, so that `require_new` refuses them later.

    Returns:
        The refusal of a further incarnation, if too many incarnations have sent frames within `REMEMBER_MS`.
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
    """Refuses an unknown incarnation that the catalog may have forgotten, because its frames could count twice.

    It is refused if the catalog has forgotten incarnations of the edge, and if the incarnation has received an
    acknowledgement. Then the center may already have frames that it would send again. An incarnation without an
    acknowledgement sends all its frames, from the first one on.
    """
    forgotten = connection.execute(select(t.edges.c.forgotten).where(t.edges.c.edge == edge)).scalar_one_or_none()
    if not forgotten or oldest_seq <= FIRST_SEQ:
        return None
    return "incarnation-forgotten", ProtocolError(
        f"edge {edge}: incarnation {incarnation} has frames from {oldest_seq} on, and the center no longer knows which"
        " of these frames it has: give the edge a new state directory, so that no frame counts twice"
    )


def former_streams(streams: Sequence[Mapping[str, Any]], served: set[str], access: EdgeAccess) -> list[dict[str, Any]]:
    """Returns the streams that an edge no longer serves and still may serve, without columns, the latest first."""
    given_up = (s for s in streams if s["name"] not in served and access.may_serve(s["name"]))
    latest = sorted(given_up, key=lambda s: bool(s.get("former")))[:MAX_FORMER_STREAMS]
    queries = {} if access.queries is None else {"queries": list(access.queries)}
    return [
        {**{k: v for k, v in s.items() if k != "queries"}, "columns": [], "former": True, **queries} for s in latest
    ]
