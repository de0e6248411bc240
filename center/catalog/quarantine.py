"""Frames that the job could not apply, which wait for an operator's decision. Functions within a catalog transaction.

A quarantined frame is applied as a stated loss, as a damaged one, and its bytes stay in the frame log, in a segment of
their own: retention keeps a segment as long as a quarantined frame lies in it. `retry` gives the frame the query's next
position, at which the job reads it as new data; it then is in the index again, and no longer here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, and_, delete, insert, select, update

from center.catalog import schema as t
from center.catalog.frame_index import drop_segments, entry_of, query_key
from center.storage.frame_log import FrameEntry
from edgewater.model.errors import Conflict, NotFound
from edgewater.wire import QueryRef

MAX_PER_EDGE = 100
"""Quarantined frames of one query and edge; beyond, the oldest one is dropped. They bound the disk that they occupy."""
MAX_REASON = 2_000


@dataclass(frozen=True, slots=True)
class QuarantinedFrame:
    """A frame that was set aside, with the reason and the wall time."""

    entry: FrameEntry
    reason: str
    quarantined_at_ms: int

    @property
    def key(self) -> str:
        """The key of the frame's query."""
        return query_key(self.entry.query)


def is_listed(connection: Connection, entry: FrameEntry) -> bool:
    return connection.execute(select(t.quarantine).where(_is_frame(entry.query, entry.position))).first() is not None


def add(connection: Connection, entry: FrameEntry, reason: str, now_ms: int) -> list[str]:
    """Lists a frame; returns the segments that are unused now (`drop`)."""
    values = asdict(entry)
    ref = values.pop("query")
    row = {**values, **ref, "reason": reason[:MAX_REASON], "quarantined_at_ms": now_ms}
    connection.execute(insert(t.quarantine).values(**row))
    c = t.quarantine.c
    of_edge = and_(c.name == entry.query.name, c.version == entry.query.version, c.edge == entry.edge)
    listed = connection.execute(select(c.position).where(of_edge).order_by(c.position.desc())).scalars().all()
    unused = [drop(connection, query_key(entry.query), position) for position in listed[MAX_PER_EDGE:]]
    return [segment for segment in unused if segment is not None]


def select_frames(connection: Connection) -> list[QuarantinedFrame]:
    """The quarantined frames, the newest first."""
    rows = select(t.quarantine).order_by(t.quarantine.c.quarantined_at_ms.desc(), t.quarantine.c.position.desc())
    return [_frame(row) for row in connection.execute(rows)]


def select_reasons(connection: Connection) -> dict[tuple[str, int], str]:
    """The reasons by query key and position."""
    c = t.quarantine.c
    rows = connection.execute(select(c.name, c.version, c.position, c.reason))
    return {(query_key(QueryRef(name, version)), position): reason for name, version, position, reason in rows}


def select_frame(connection: Connection, key: str, position: int) -> QuarantinedFrame:
    """Raises NotFound."""
    name, _, version = key.rpartition("@")
    row = None
    if version.isdecimal() and int(version) < 1 << 63:
        row = connection.execute(select(t.quarantine).where(_is_frame(QueryRef(name, int(version)), position))).first()
    if row is None:
        raise NotFound(f"no frame of query {key[:200]} at position {position} is in quarantine")
    return _frame(row)


def retry(connection: Connection, key: str, position: int) -> int:
    """Gives a quarantined frame the query's next position and takes it off the list; returns the position.

    Raises:
        NotFound: it is not listed.
        Conflict: its query is deleted.
    """
    found = select_frame(connection, key, position)
    ref = found.entry.query
    live = and_(t.queries.c.name == ref.name, t.queries.c.version == ref.version, t.queries.c.deleted_at_ms.is_(None))
    last = connection.execute(select(t.queries.c.last_position).where(live).with_for_update()).scalar_one_or_none()
    if last is None:
        raise Conflict(f"query {key} is deleted: nothing can be applied to it; drop the frame")
    values = asdict(found.entry) | {"position": last + 1}
    c, (edge, incarnation, seq) = t.frames.c, (found.entry.edge, found.entry.incarnation, found.entry.seq)
    connection.execute(delete(t.frames).where(c.edge == edge, c.incarnation == incarnation, c.seq == seq))
    connection.execute(insert(t.frames).values(**values.pop("query"), **values))
    connection.execute(update(t.queries).where(live).values(last_position=last + 1))
    connection.execute(delete(t.quarantine).where(_is_frame(ref, position)))
    return int(last) + 1


def drop(connection: Connection, key: str, position: int) -> str | None:
    """Takes a frame off the list for good; returns its segment if nothing else is in use there.

    The caller holds the catalog's lock.

    Raises:
        NotFound: it is not listed.
    """
    entry = select_frame(connection, key, position).entry
    ref, segment = entry.query, entry.segment
    # The lock under which `retry` indexes the frame.
    connection.execute(select(t.queries.c.name).where(t.queries.c.name == ref.name).with_for_update()).all()
    connection.execute(delete(t.quarantine).where(_is_frame(ref, position)))
    return segment if drop_segments(connection, [segment]) else None


def _is_frame(ref: QueryRef, position: int) -> Any:
    c = t.quarantine.c
    return and_(c.name == ref.name, c.version == ref.version, c.position == position)


def _frame(row: Any) -> QuarantinedFrame:
    return QuarantinedFrame(entry_of(row), row.reason, row.quarantined_at_ms)
