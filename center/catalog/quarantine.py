"""Frames and queries that the job sets aside, so that it continues with all other queries.

A quarantined frame could not be applied. The job applies it as a stated loss. Its bytes stay in the frame log, in a
separate segment, which retention does not remove. A retry gives the frame the query's next position, at which the job
reads it as new data. The frame is then in the index again, and no longer in quarantine.

A query that is set aside is paused or quarantined: see `SetAside`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, and_, delete, func, insert, literal, select, update

from center.catalog import schema as t
from center.catalog.alarms import add_alarm, end_alarms
from center.catalog.frame_index import drop_segments, entry_of, without_frames
from center.catalog.transactions import Transactions
from center.storage.database import upsert
from center.storage.frame_log import FrameEntry
from edgewater.base.errors import Conflict, NotFound
from edgewater.base.streams import EdgeId
from edgewater.model.registered_query import query_key
from edgewater.wire import QueryRef

MAX_PER_EDGE = 100
"""Maximum number of quarantined frames of one query and edge. Beyond it, the oldest frame is dropped, to limit the disk
space."""
MAX_REASON = 2_000
"""Characters of a stored reason: a limit of what readers receive."""
FORGET_MS = 3_600_000  # limit: how long a death counts against a query
"""If this time has passed since the job last died at a query, the count of deaths begins anew."""


@dataclass(frozen=True, slots=True)
class QuarantinedRecord:
    """A frame that was set aside, with its facts (`center.storage.frame_facts`), the reason and the wall time."""

    entry: FrameEntry
    facts: bytes = field(repr=False)
    reason: str
    quarantined_at_ms: int

    @property
    def key(self) -> str:
        """The key of the frame's query."""
        return query_key(self.entry.query)


class SetAside(StrEnum):
    """The state of a query that the job has set aside.

    The job applies no frames of the query and gives no answers to it. Its frames stay in the log, and other queries
    continue. `PAUSED`: its frames cannot be applied. The job tries them again when a driver begins to lead, or when an
    operator retries the query. `QUARANTINED`: the job died while it worked on the query. It stays quarantined until an
    operator retries it.
    """

    PAUSED = "paused"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class SetAsideRecord:
    """A query that the job has set aside.

    Attributes:
        deaths: how often the job died while it worked on the query.
        since_ms: wall time at which it was set aside.
    """

    query: QueryRef
    state: SetAside
    reason: str
    deaths: int
    since_ms: int


class Quarantine:
    """The quarantined frames and queries in the catalog."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    def add_frame(self, entry: FrameEntry, reason: str, now_ms: int) -> list[str]:
        """Sets a frame aside, with an alarm. A repetition changes nothing.

        Returns:
            The segments to remove from the log: segments of older quarantined frames beyond `MAX_PER_EDGE`, and the
            segment of `entry` if it is an unneeded copy.
        """
        key = query_key(entry.query)
        values, frames = asdict(entry), t.frames
        indexed = t.is_of(frames, entry.query) & (frames.c.position == entry.position)
        facts = func.coalesce(select(frames.c.facts).where(indexed).scalar_subquery(), b"")
        row = {**values.pop("query"), **values, "reason": reason[:MAX_REASON], "quarantined_at_ms": now_ms}
        c = t.quarantine.c
        of_edge = t.is_of(t.quarantine, entry.query) & (c.edge == entry.edge)
        with self._transactions.locked() as connection:
            if connection.execute(select(t.quarantine).where(_is_frame(entry.query, entry.position))).first():
                return without_frames(connection, [entry.segment])
            connection.execute(insert(t.quarantine).values(**row, facts=facts))
            listed = connection.execute(select(c.position).where(of_edge).order_by(c.position.desc())).scalars().all()
            unused = [_drop(connection, key, position) for position in listed[MAX_PER_EDGE:]]
            message = f"query {key}, frame {entry.position} (seq {entry.seq} of {entry.incarnation}): {reason}"
            add_alarm(connection, "frame-quarantined", message, entry.edge, now_ms, key)
        return [segment for segment in unused if segment is not None]

    def frames(self) -> list[QuarantinedRecord]:
        """The quarantined frames, the newest first."""
        rows = select(t.quarantine).order_by(t.quarantine.c.quarantined_at_ms.desc(), t.quarantine.c.position.desc())
        with self._transactions.read() as connection:
            return [_frame(row) for row in connection.execute(rows)]

    def frame_reasons(self) -> dict[tuple[str, int], str]:
        """Why frames were set aside, by query key and position."""
        c = t.quarantine.c
        rows = select(c.name, c.version, c.position, c.reason)
        with self._transactions.read() as connection:
            return {
                (query_key(QueryRef(name, version)), position): reason
                for name, version, position, reason in connection.execute(rows)
            }

    def frame(self, key: str, position: int) -> QuarantinedRecord:
        """The quarantined frame of a query at a position. Raises NotFound."""
        with self._transactions.read() as connection:
            return _select_frame(connection, key, position)

    def retry_frame(self, key: str, position: int) -> int:
        """Gives a quarantined frame the query's next position, and takes it out of quarantine.

        The job has applied the frame as a loss. At the new position it applies the frame as new data.

        Returns:
            The new position.

        Raises:
            NotFound: the frame is not in quarantine.
            Conflict: its query is deleted.
        """
        queries, frames = t.queries, t.frames.c
        with self._transactions.write() as connection:
            entry = _select_frame(connection, key, position).entry
            live = t.is_of(queries, entry.query) & queries.c.deleted_at_ms.is_(None)
            last = connection.execute(select(queries.c.last_position).where(live).with_for_update()).scalar()
            if last is None:
                raise Conflict(f"query {key} is deleted: nothing can be applied to it; drop the frame")
            columns = {c.name: t.quarantine.c[c.name] for c in t.frames.c} | {"position": literal(last + 1)}
            moved = select(*columns.values()).where(_is_frame(entry.query, position))
            same = and_(frames.edge == entry.edge, frames.incarnation == entry.incarnation, frames.seq == entry.seq)
            connection.execute(delete(t.frames).where(same))
            connection.execute(insert(t.frames).from_select(list(columns), moved))
            connection.execute(update(queries).where(live).values(last_position=last + 1))
            connection.execute(delete(t.quarantine).where(_is_frame(entry.query, position)))
        return int(last) + 1

    def drop_frame(self, key: str, position: int) -> str | None:
        """Deletes a quarantined frame. Returns the segment to remove from the log, if no other frame uses it.

        Raises:
            NotFound: the frame is not in quarantine.
        """
        with self._transactions.locked() as connection:
            return _drop(connection, key, position)

    def count_death(self, ref: QueryRef, now_ms: int) -> int:
        """Counts that the job died while it worked on a query.

        Returns:
            How often it has died at this query, without a pause of `FORGET_MS` in between.
        """
        table = t.set_aside_queries
        with self._transactions.write() as connection:
            row = connection.execute(select(table.c.deaths, table.c.died_at_ms).where(t.is_of(table, ref))).first()
            deaths = 1 if row is None or row.died_at_ms < now_ms - FORGET_MS else row.deaths + 1
            upsert(connection, table, [{**asdict(ref), "deaths": deaths, "died_at_ms": now_ms}])
        return int(deaths)

    def set_query_aside(self, ref: QueryRef, state: SetAside, reason: str, now_ms: int) -> None:
        """Records that the job has set a query aside, with the alarm ``query-paused`` or ``query-quarantined``."""
        reason, key = reason[:MAX_REASON], query_key(ref)
        with self._transactions.locked() as connection:
            row = {**asdict(ref), "state": state, "reason": reason, "since_ms": now_ms}
            upsert(connection, t.set_aside_queries, [row])
            message = f"query {key} is {state}; the other queries go on: {reason}"
            add_alarm(connection, f"query-{state}", message, EdgeId(""), now_ms, key)

    def end_pauses(self, refs: Collection[QueryRef]) -> None:
        """Records that the job tries paused queries again. Quarantined queries stay."""
        with self._transactions.write() as connection:
            for ref in refs:
                paused = t.is_of(t.set_aside_queries, ref) & (t.set_aside_queries.c.state == SetAside.PAUSED)
                connection.execute(update(t.set_aside_queries).where(paused).values(state=""))
                end_alarms(connection, f"query-{SetAside.PAUSED}", EdgeId(""), query_key(ref))

    def retry_query(self, name: str) -> None:
        """Lets the job retry a query that is set aside. Raises NotFound."""
        c = t.set_aside_queries.c
        with self._transactions.write() as connection:
            set_aside = (c.name == name) & (c.state != "")
            rows = connection.execute(select(c.version, c.state).where(set_aside)).all()
            if not rows:
                raise NotFound(f"query {name[:200]} is neither paused nor quarantined")
            connection.execute(delete(t.set_aside_queries).where(set_aside))
            for row in rows:
                end_alarms(connection, f"query-{row.state}", EdgeId(""), query_key(QueryRef(name, row.version)))

    def queries(self) -> dict[QueryRef, SetAsideRecord]:
        """The live queries that are set aside, in the order of their names."""
        c, q = t.set_aside_queries.c, t.queries.c
        live = and_(q.name == c.name, q.version == c.version, q.deleted_at_ms.is_(None))
        rows = select(t.set_aside_queries).join(t.queries, live).where(c.state != "").order_by(c.name)
        with self._transactions.read() as connection:
            refs = [(QueryRef(r.name, r.version), r) for r in connection.execute(rows)]
        return {ref: SetAsideRecord(ref, SetAside(r.state), r.reason, r.deaths, r.since_ms) for ref, r in refs}


def _select_frame(connection: Connection, key: str, position: int) -> QuarantinedRecord:
    """Raises NotFound."""
    name, _, version = key.rpartition("@")
    row = None
    if version.isdecimal() and int(version) < 1 << 63:
        row = connection.execute(select(t.quarantine).where(_is_frame(QueryRef(name, int(version)), position))).first()
    if row is None:
        raise NotFound(f"no frame of query {key[:200]} at position {position} is in quarantine")
    return _frame(row)


def _drop(connection: Connection, key: str, position: int) -> str | None:
    """Deletes a frame from quarantine. Returns its segment if no other frame uses the segment.

    The caller has the catalog's lock.

    Raises:
        NotFound: the frame is not in quarantine.
    """
    entry = _select_frame(connection, key, position).entry
    ref, segment = entry.query, entry.segment
    # The lock under which `retry_frame` indexes the frame.
    connection.execute(select(t.queries.c.name).where(t.queries.c.name == ref.name).with_for_update()).all()
    connection.execute(delete(t.quarantine).where(_is_frame(ref, position)))
    return segment if drop_segments(connection, [segment]) else None


def _is_frame(ref: QueryRef, position: int) -> Any:
    return and_(t.is_of(t.quarantine, ref), t.quarantine.c.position == position)


def _frame(row: Any) -> QuarantinedRecord:
    return QuarantinedRecord(entry_of(row), row.facts, row.reason, row.quarantined_at_ms)
