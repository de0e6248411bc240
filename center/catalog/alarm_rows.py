"""Alarms. Functions within a catalog transaction.

Their messages name frames and records, so their number is without bound, and whoever raises them may be hostile. Each
source, an edge or a query, has a share of what is held, and of what is listed: none displaces those of the others.
"""

from __future__ import annotations

from sqlalchemy import Connection, case, func, insert, select, update

from center.catalog import schema as t
from center.catalog.edges import AlarmRecord
from edgewater.model.streams import EdgeId

MAX_MESSAGES = 20
"""Alarms of one kind, edge and query that are distinguished by their message."""
MAX_OF_EDGE = 100
"""Alarms of one kind at one edge, over all queries."""
MAX_OF_CENTER = 2_000
"""Alarms of one kind that are about no edge, over all queries."""
MAX_LISTED = 1_000
"""Alarms that one call reads."""


def add(connection: Connection, kind: str, message: str, edge: EdgeId, now_ms: int, query: str = "") -> None:
    """Adds an alarm, or counts it if it is a repetition.

    Beyond `MAX_MESSAGES`, the message replaces that of the alarm least recently raised, and continues its count. Beyond
    `MAX_OF_EDGE`, it takes the place of the least recent alarm of the query that has the most.
    """
    c = t.alarms.c
    of_edge = (c.kind == kind) & (c.edge == edge)
    alike = of_edge & (c.query == query)
    again = update(t.alarms).values(last_at_ms=now_ms, times=c.times + 1)
    if connection.execute(again.where(alike, c.message == message)).rowcount:
        return
    by_query = select(c.query, func.count()).where(of_edge).group_by(c.query)
    held: dict[str, int] = dict(connection.execute(by_query).all())
    if held.get(query, 0) >= MAX_MESSAGES:
        oldest = select(c.id).where(alike).order_by(c.last_at_ms, c.id).limit(1).scalar_subquery()
        connection.execute(again.where(c.id == oldest).values(message=message))
        return
    values = {"edge": edge, "query": query, "message": message, "first_at_ms": now_ms, "last_at_ms": now_ms, "times": 1}
    if sum(held.values()) < (MAX_OF_EDGE if edge else MAX_OF_CENTER):
        connection.execute(insert(t.alarms).values(kind=kind, **values))
        return
    most = max(held.values())
    of_largest = of_edge & c.query.in_([other for other, count in held.items() if count == most])
    oldest = select(c.id).where(of_largest).order_by(c.last_at_ms, c.id).limit(1).scalar_subquery()
    connection.execute(update(t.alarms).where(c.id == oldest).values(**values))


def latest(connection: Connection, limit: int, query: str | None = None) -> list[AlarmRecord]:
    """The latest alarms of a query or (None) of all, the newest first.

    If there are more than `limit`, each source has an equal share of them: each edge, and each query and kind of those
    that are about no edge.
    """
    c = t.alarms.c
    of_center = c.edge == ""
    source = (c.edge, case((of_center, c.query), else_=""), case((of_center, c.kind), else_=""))
    rank = func.row_number().over(partition_by=source, order_by=(c.last_at_ms.desc(), c.id.desc()))
    rows = select(t.alarms, rank.label("rank"))
    if query is not None:
        rows = rows.where(c.query == query)
    ranked = rows.subquery()
    listed = select(ranked).order_by(ranked.c.rank, ranked.c.last_at_ms.desc(), ranked.c.id.desc()).limit(limit)
    found = sorted(connection.execute(listed), key=lambda r: (r.last_at_ms, r.id), reverse=True)
    return [
        AlarmRecord(r.kind, EdgeId(r.edge), r.message, r.first_at_ms, r.last_at_ms, r.times, r.query) for r in found
    ]
