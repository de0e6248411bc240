"""Alarms of the center.

A hostile client may raise alarms with ever new messages, because messages name frames and records. So each source, an
edge or a query, has a limit of stored alarms and a share of the listed alarms. Alarms of one source do not displace
alarms of another source.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, case, delete, func, insert, or_, select, update

from center.catalog import schema as t
from center.catalog.transactions import Transactions
from edgewater.base.streams import EdgeId
from edgewater.model.registered_query import query_key
from edgewater.wire import QueryRef

MAX_MESSAGES = 20
"""Maximum number of alarms of one kind, edge and query that differ only in their messages."""
MAX_OF_EDGE = 100
"""Maximum number of alarms of one kind about one edge, over all queries."""
MAX_OF_CENTER = 2_000
"""Maximum number of alarms of one kind that are about no edge, over all queries."""
MAX_LISTED = 1_000
"""Maximum number of alarms that one call reads."""


@dataclass(frozen=True, slots=True)
class AlarmRecord:
    """An event that must not happen, or a state that lasts. A repetition increases `times`, but adds no alarm.

    `times` may include older messages of the same kind, edge and query: see `add_alarm`.

    Attributes:
        query: key of the query that the alarm is about; empty: it is about no query.
    """

    kind: str
    edge: EdgeId
    message: str
    first_at_ms: int
    last_at_ms: int
    times: int
    query: str = ""


class Alarms:
    """The alarms in the catalog."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    def add(self, kind: str, message: str, edge: EdgeId, now_ms: int, query: str = "") -> None:
        """Adds an alarm, or counts a repetition. The number of alarms per source is bounded: see `add_alarm`.

        Args:
            edge: the edge that the alarm is about; empty: it is about no edge.
            query: key of the query that the alarm is about; empty: it is about no query.
        """
        with self._transactions.locked() as connection:
            add_alarm(connection, kind, message, edge, now_ms, query)

    def end(self, kind: str, edge: EdgeId, query: str = "", about: str = "") -> None:
        """Removes the alarms of a state that has ended. The log has them.

        Args:
            about: the beginning of the alarms' messages.
        """
        with self._transactions.locked() as connection:
            end_alarms(connection, kind, edge, query, about)

    def latest(self, limit: int = MAX_LISTED, query: str | None = None) -> list[AlarmRecord]:
        """The latest alarms, the newest first.

        If there are more than `limit`, each source has an equal share of them. A source is an edge, or, for alarms
        about no edge, a query and kind.

        Args:
            query: key of the query whose alarms are read; None: all alarms.
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
        with self._transactions.read() as connection:
            newest_first = sorted(connection.execute(listed), key=lambda r: (r.last_at_ms, r.id), reverse=True)
        return [
            AlarmRecord(r.kind, EdgeId(r.edge), r.message, r.first_at_ms, r.last_at_ms, r.times, r.query)
            for r in newest_first
        ]


def end_alarms(connection: Connection, kind: str, edge: EdgeId, query: str = "", about: str = "") -> None:
    """Removes the alarms of a state that has ended, within a transaction: see `Alarms.end`."""
    c = t.alarms.c
    ended = (c.kind == kind) & (c.edge == edge) & (c.query == query) & c.message.startswith(about, autoescape=True)
    connection.execute(delete(t.alarms).where(ended))


def end_alarms_about(connection: Connection, gone: EdgeId | QueryRef) -> None:
    """Removes all alarms about an edge that is retired, or about a query that is deleted, within a transaction."""
    c = t.alarms.c
    about = c.query == query_key(gone) if isinstance(gone, QueryRef) else c.edge == gone
    connection.execute(delete(t.alarms).where(about))


def _is_gone(connection: Connection, edge: EdgeId, query: str) -> bool:
    """Returns whether the edge is retired or the query is deleted. A process may notice it later."""
    name, _, version = query.rpartition("@")
    gone: list[ColumnElement[bool]] = [select(t.edges.c.edge).where(t.edges.c.edge == edge, t.edges.c.retired).exists()]
    if version.isdecimal():
        q = t.queries.c
        this = (q.name == name) & (q.version == int(version)) & q.deleted_at_ms.is_not(None)
        gone.append(select(q.name).where(this).exists())
    return bool(connection.execute(select(or_(*gone))).scalar())


def add_alarm(connection: Connection, kind: str, message: str, edge: EdgeId, now_ms: int, query: str = "") -> None:
    """Adds an alarm within a transaction, or counts it if it is a repetition. Adds none about a retired edge or a
    deleted query.

    Beyond `MAX_MESSAGES`, the message replaces the message of the least recent alarm, whose count continues. Beyond
    `MAX_OF_EDGE`, the alarm replaces the least recent alarm of the query with the most alarms.
    """
    if (edge or query) and _is_gone(connection, edge, query):
        return
    c = t.alarms.c
    of_edge = (c.kind == kind) & (c.edge == edge)
    alike = of_edge & (c.query == query)
    again = update(t.alarms).values(last_at_ms=now_ms, times=c.times + 1)
    if connection.execute(again.where(alike, c.message == message)).rowcount:
        return
    by_query = select(c.query, func.count()).where(of_edge).group_by(c.query)
    counts: dict[str, int] = dict(connection.execute(by_query).all())
    if counts.get(query, 0) >= MAX_MESSAGES:
        oldest = select(c.id).where(alike).order_by(c.last_at_ms, c.id).limit(1).scalar_subquery()
        connection.execute(again.where(c.id == oldest).values(message=message))
        return
    values = {"edge": edge, "query": query, "message": message, "first_at_ms": now_ms, "last_at_ms": now_ms, "times": 1}
    if sum(counts.values()) < (MAX_OF_EDGE if edge else MAX_OF_CENTER):
        connection.execute(insert(t.alarms).values(kind=kind, **values))
        return
    largest = max(counts.values())
    of_largest = of_edge & c.query.in_([other for other, count in counts.items() if count == largest])
    oldest = select(c.id).where(of_largest).order_by(c.last_at_ms, c.id).limit(1).scalar_subquery()
    connection.execute(update(t.alarms).where(c.id == oldest).values(**values))
