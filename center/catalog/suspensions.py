"""Queries of which the job died: how often, and those that are set aside. Functions within a catalog transaction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, and_, delete, select, update

from center.catalog import alarm_rows
from center.catalog import schema as t
from center.storage.database import upsert
from edgewater.model.errors import NotFound
from edgewater.model.streams import EdgeId
from edgewater.wire import QueryRef

ALARM = "query-suspended"
FORGET_MS = 3_600_000
"""Deaths that are so far apart have nothing to do with each other."""
MAX_REASON = 2_000


@dataclass(frozen=True, slots=True)
class SuspendedQuery:
    """A query that the job leaves alone: its frames are kept, and it gets no answers.

    Attributes:
        deaths: how often the job died while it worked on it.
    """

    query: QueryRef
    reason: str
    deaths: int
    suspended_at_ms: int


def add_death(connection: Connection, ref: QueryRef, now_ms: int) -> int:
    """Counts a death of the job; returns how many there were, each within `FORGET_MS` of the next."""
    c = t.suspensions.c
    row = connection.execute(select(c.deaths, c.died_at_ms).where(_is(ref))).first()
    deaths = 1 if row is None or row.died_at_ms < now_ms - FORGET_MS else row.deaths + 1
    key = {"name": ref.name, "version": ref.version}
    upsert(connection, t.suspensions, [{**key, "deaths": deaths, "died_at_ms": now_ms}])
    return int(deaths)


def suspend(connection: Connection, ref: QueryRef, reason: str, now_ms: int) -> None:
    """Sets a query aside of which a death was counted, with an alarm."""
    values = {"reason": reason[:MAX_REASON], "suspended_at_ms": now_ms}
    connection.execute(update(t.suspensions).where(_is(ref)).values(**values))
    key = f"{ref.name}@{ref.version}"
    message = f"query {key} is set aside, the others go on: {reason[:MAX_REASON]}"
    alarm_rows.add(connection, ALARM, message, EdgeId(""), now_ms, key)


def resume(connection: Connection, name: str) -> None:
    """Lets the job try the query of that name again. Raises NotFound: it is not set aside."""
    c = t.suspensions.c
    if connection.execute(delete(t.suspensions).where(c.name == name, c.suspended_at_ms > 0)).rowcount == 0:
        raise NotFound(f"query {name[:200]} is not set aside")


def suspended(connection: Connection) -> dict[QueryRef, SuspendedQuery]:
    """The live queries that are set aside."""
    c, q = t.suspensions.c, t.queries.c
    live = and_(q.name == c.name, q.version == c.version, q.deleted_at_ms.is_(None))
    rows = select(t.suspensions).join(t.queries, live).where(c.suspended_at_ms > 0).order_by(c.name)
    found = [
        SuspendedQuery(QueryRef(r.name, r.version), r.reason, r.deaths, r.suspended_at_ms)
        for r in connection.execute(rows)
    ]
    return {s.query: s for s in found}


def _is(ref: QueryRef) -> Any:
    return and_(t.suspensions.c.name == ref.name, t.suspensions.c.version == ref.version)
