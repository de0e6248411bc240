"""The frame index: which frames the center has, in which order, and at which location of the log.

Each function runs inside a transaction of the catalog. Two row locks keep it consistent with any number of gateways (on
SQLite the transaction itself is the lock). Under the incarnation's row, a frame is checked against all frames
acknowledged before it. Under the query's row, positions become visible in order and without gaps, whichever transaction
commits first, and no frame is indexed in a segment that retention drops (a segment holds one query's frames). Locks of
both kinds are taken in sorted order, incarnations first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, Row, and_, delete, exists, insert, or_, select, tuple_, update

from center.catalog import schema as t
from center.storage.frame_log import FrameEntry, FrameLocation
from edgewater.errors import StorageError
from edgewater.streams import EdgeId
from edgewater.wire import QueryRef

_CHUNK = 200
"""Identities per SELECT: below the least number of bound parameters that a database takes."""


class IndexOutcome(StrEnum):
    """The outcome of indexing a frame.

    The first four are acknowledged. `DISCARDED`: the query is unknown or deleted. `REFUSED`: the edge does not
    contribute to the query. The last two are not acknowledged, nor are later frames of the same incarnation.
    `CONFLICT`: the index holds the identity with another checksum (raises an alarm). `OUT_OF_SEQUENCE`: an earlier
    frame is missing, the frame's bytes are not in the log although its query is live, or its incarnation never sent a
    Hello.
    """

    NEW = "new"
    DUPLICATE = "duplicate"
    DISCARDED = "discarded"
    REFUSED = "refused"
    CONFLICT = "conflict"
    OUT_OF_SEQUENCE = "out-of-sequence"

    @property
    def acknowledged(self) -> bool:
        return self not in (IndexOutcome.CONFLICT, IndexOutcome.OUT_OF_SEQUENCE)


class SegmentDropped(StorageError):
    """A frame was appended to a segment that retention has dropped meanwhile: append it to a new one."""


@dataclass(frozen=True, slots=True)
class UnindexedFrame:
    """A frame that has arrived.

    Attributes:
        location: in the log, durable; None if the frame was not written, because it is a re-delivery or its query is
            unknown or deleted, or because it is refused.
        plain_bytes: of the body before compression.
        work: the job's work with it, as a number of slices.
        refused: its edge does not contribute to its query.
    """

    query: QueryRef
    edge: EdgeId
    incarnation: str
    seq: int
    crc32c: int
    wire_bytes: int
    received_at_ms: int
    location: FrameLocation | None
    plain_bytes: int = 0
    work: int = 0
    refused: bool = False


def query_key(query: QueryRef) -> str:
    """A query's key where a string is needed, such as in offsets: ``name@version``."""
    return f"{query.name}@{query.version}"


def query_from_key(key: str) -> QueryRef:
    """Parses a `query_key`. Raises StorageError."""
    name, _, version = key.rpartition("@")
    if not name or not version.isdigit():
        raise StorageError(f"{key!r} is not a query's key: a name, @ and a version were expected")
    return QueryRef(name, int(version))


@dataclass(slots=True)
class _Progress:
    """An incarnation while a batch is indexed.

    Attributes:
        awaited: the next expected seq; `began_at`: its value before the batch.
        stopped: a frame was not acknowledged; later ones are not either.
        crcs: checksums of indexed frames by seq, as far as the batch needs them.
    """

    awaited: int
    began_at: int
    stopped: bool = False
    crcs: dict[int, int] = field(default_factory=dict)


def index_frames(connection: Connection, batch: Sequence[UnindexedFrame]) -> list[IndexOutcome]:
    """Checks the frames of any number of edges in order and indexes the new ones."""
    progress = _lock_incarnations(connection, batch)
    _load_checksums(connection, batch, progress)
    positions = _lock_positions(connection, {f.query for f in batch})
    # Under the queries' locks, which `drop_frames` takes too: before them, a segment might still be dropped.
    _check_segments(connection, batch)
    began_at = dict(positions)
    outcomes = []
    rows: list[dict[str, Any]] = []
    for frame in batch:
        incarnation = progress[frame.edge, frame.incarnation]
        outcome = _outcome(frame, incarnation, live=frame.query in positions)
        outcomes.append(outcome)
        if outcome is IndexOutcome.NEW:
            positions[frame.query] += 1
            rows.append(_row(frame, positions[frame.query]))
    if rows:
        connection.execute(insert(t.frames), rows)
    for query, position in positions.items():
        if position != began_at[query]:
            connection.execute(update(t.queries).where(_is_query(query)).values(last_position=position))
    for (edge, name), incarnation in progress.items():
        if incarnation.awaited != incarnation.began_at:
            row = and_(t.incarnations.c.edge == edge, t.incarnations.c.incarnation == name)
            connection.execute(update(t.incarnations).where(row).values(awaited_seq=incarnation.awaited))
    return outcomes


def _outcome(frame: UnindexedFrame, incarnation: _Progress, *, live: bool) -> IndexOutcome:
    if incarnation.stopped:
        return IndexOutcome.OUT_OF_SEQUENCE
    if frame.seq < incarnation.awaited:
        # Frames that retention or a deletion removed from the index cannot be compared any more.
        if incarnation.crcs.get(frame.seq, frame.crc32c) == frame.crc32c:
            return IndexOutcome.DUPLICATE
        incarnation.stopped = True
        return IndexOutcome.CONFLICT
    if frame.seq > incarnation.awaited or (live and frame.location is None and not frame.refused):
        incarnation.stopped = True
        return IndexOutcome.OUT_OF_SEQUENCE
    incarnation.awaited += 1
    if not live:
        return IndexOutcome.DISCARDED
    if frame.refused:
        return IndexOutcome.REFUSED
    incarnation.crcs[frame.seq] = frame.crc32c
    return IndexOutcome.NEW


def _check_segments(connection: Connection, batch: Sequence[UnindexedFrame]) -> None:
    segments = sorted({f.location.segment for f in batch if f.location is not None})
    for begin in range(0, len(segments), _CHUNK):
        chunk = t.dropped_segments.c.segment.in_(segments[begin : begin + _CHUNK])
        for (segment,) in connection.execute(select(t.dropped_segments.c.segment).where(chunk)):
            raise SegmentDropped(f"segment {segment} has been dropped by retention")


def _lock_incarnations(connection: Connection, batch: Sequence[UnindexedFrame]) -> dict[tuple[EdgeId, str], _Progress]:
    table = t.incarnations.c
    progress = {}
    for edge, incarnation in sorted({(f.edge, f.incarnation) for f in batch}):
        row = select(table.awaited_seq).where(table.edge == edge, table.incarnation == incarnation)
        found = connection.execute(row.with_for_update()).first()
        # A catalog restored from a backup does not know it. Refusing makes the edge send a Hello again.
        progress[edge, incarnation] = _Progress(found[0], found[0]) if found else _Progress(0, 0, stopped=True)
    return progress


def _load_checksums(
    connection: Connection, batch: Sequence[UnindexedFrame], progress: Mapping[tuple[EdgeId, str], _Progress]
) -> None:
    redelivered = [(f.edge, f.incarnation, f.seq) for f in batch if f.seq < progress[f.edge, f.incarnation].awaited]
    table = t.frames.c
    for begin in range(0, len(redelivered), _CHUNK):
        identity = tuple_(table.edge, table.incarnation, table.seq).in_(redelivered[begin : begin + _CHUNK])
        rows = connection.execute(select(table.edge, table.incarnation, table.seq, table.crc32c).where(identity))
        for edge, incarnation, seq, crc32c in rows:
            progress[edge, incarnation].crcs[seq] = crc32c


def _lock_positions(connection: Connection, refs: set[QueryRef]) -> dict[QueryRef, int]:
    """The last position of each live query among `refs`."""
    positions = {}
    table = t.queries.c
    for ref in sorted(refs, key=query_key):
        row = select(table.last_position).where(_is_query(ref), table.deleted_at_ms.is_(None))
        found = connection.execute(row.with_for_update()).first()
        if found is not None:
            positions[ref] = int(found[0])
    return positions


def _is_query(ref: QueryRef) -> Any:
    return and_(t.queries.c.name == ref.name, t.queries.c.version == ref.version)


def _row(frame: UnindexedFrame, position: int) -> dict[str, Any]:
    assert frame.location is not None, "a frame without a location is never NEW"
    return {
        "name": frame.query.name,
        "version": frame.query.version,
        "position": position,
        "edge": frame.edge,
        "incarnation": frame.incarnation,
        "seq": frame.seq,
        "crc32c": frame.crc32c,
        "segment": frame.location.segment,
        "offset": frame.location.offset,
        "length": frame.location.length,
        "wire_bytes": frame.wire_bytes,
        "received_at_ms": frame.received_at_ms,
        "plain_bytes": max(frame.plain_bytes, frame.wire_bytes),
        "work": frame.work,
    }


def last_positions(connection: Connection) -> dict[str, int]:
    """Last position by key, sorted by key, of live queries and of deleted ones that still have frames."""
    table = t.queries.c
    has_frames = exists().where(t.frames.c.name == table.name, t.frames.c.version == table.version)
    rows = select(table.name, table.version, table.last_position).where(or_(table.deleted_at_ms.is_(None), has_frames))
    found = {query_key(QueryRef(name, version)): last for name, version, last in connection.execute(rows)}
    return dict(sorted(found.items()))


def select_entries(connection: Connection, key: str, after: int, through: int) -> list[FrameEntry]:
    ref, table = query_from_key(key), t.frames.c
    rows = (
        select(t.frames)
        .where(table.name == ref.name, table.version == ref.version, table.position > after, table.position <= through)
        .order_by(table.position)
    )
    return [entry_of(row) for row in connection.execute(rows)]


def entry_of(row: Row[Any]) -> FrameEntry:
    """The entry of a row with the columns of the table ``frames``."""
    return FrameEntry(
        query=QueryRef(row.name, row.version),
        position=row.position,
        edge=EdgeId(row.edge),
        incarnation=row.incarnation,
        seq=row.seq,
        crc32c=row.crc32c,
        segment=row.segment,
        offset=row.offset,
        length=row.length,
        wire_bytes=row.wire_bytes,
        received_at_ms=row.received_at_ms,
        plain_bytes=max(row.plain_bytes, row.wire_bytes),
        work=row.work,
    )


def removable_segments(connection: Connection, segments: Sequence[str]) -> list[str]:
    """Those of `segments` without an index row now or later: dropped ones, and unindexed ones of deleted queries.

    Unindexed segments of live queries stay: a catalog restored from a backup does not know their frames.
    """
    c, table = t.queries.c, t.frames.c
    ended = select(c.name, c.version).where(c.deleted_at_ms.is_not(None))
    # Read first: once a query is deleted, no frame of it is indexed any more.
    deleted = {query_key(QueryRef(name, version)) for name, version in connection.execute(ended)}
    removable = []
    for begin in range(0, len(segments), _CHUNK):
        chunk = segments[begin : begin + _CHUNK]
        segment = t.dropped_segments.c.segment
        dropped = set(connection.execute(select(segment).where(segment.in_(chunk))).scalars())
        indexed = {
            segment
            for column in (table.segment, t.quarantine.c.segment)
            for segment in connection.execute(select(column).where(column.in_(chunk)).distinct()).scalars()
        }
        removable += [s for s in chunk if s in dropped or (s.partition("/")[0] in deleted and s not in indexed)]
    return removable


def drop_frames(connection: Connection, through: Mapping[str, int]) -> list[str]:
    """Deletes rows up to a position per key; returns the segments without index rows now, sorted.

    Segments with a quarantined frame stay (`quarantine.drop`).
    """
    table = t.frames.c
    touched: set[str] = set()
    for key in sorted(through):
        ref = query_from_key(key)
        connection.execute(select(t.queries.c.name).where(_is_query(ref)).with_for_update()).all()
        old = and_(table.name == ref.name, table.version == ref.version, table.position <= through[key])
        touched.update(connection.execute(select(table.segment).where(old).distinct()).scalars())
        connection.execute(delete(t.frames).where(old))
    tables = (table, t.quarantine.c)
    unused = [
        segment
        for segment in sorted(touched)
        if not any(connection.execute(select(c.segment).where(c.segment == segment).limit(1)).first() for c in tables)
    ]
    if unused:
        connection.execute(insert(t.dropped_segments), [{"segment": s} for s in unused])
    return unused
