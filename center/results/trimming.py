"""Dropping answers that have stood for long enough. Runs inside the caller's transaction.

Windows become final in the order of their starts, so where one is final, nothing that begins before it will be
answered again: neither a window, nor a session that has become part of another, which never gets a final answer
of its own. A final answer that is old enough takes along all answers of its query that begin no later.
"""

from __future__ import annotations

from sqlalchemy import Connection, delete, exists, or_, select

from center.ledger.ledger import Phase
from center.results import schema as t

MAX_WINDOWS = 200
"""Final windows, and answers of one deleted query, that one transaction drops: the job waits for it."""


def drop_answers(connection: Connection, before_ms: int) -> int:
    """Drops some of the answers that were given before a wall time; how many. 0: there are none left."""
    a = t.answers.c
    old = select(a.query, a.window_start_ms).where(a.phase == Phase.FINAL.value, a.given_at_ms < before_ms)
    last: dict[str, int] = {}
    for key, start in connection.execute(old.order_by(a.given_at_ms).limit(MAX_WINDOWS)):
        last[key] = max(start, last.get(key, start))
    dropped = 0
    for key, start in last.items():
        dropped += connection.execute(delete(t.answers).where(a.query == key, a.window_start_ms <= start)).rowcount
    return dropped + _drop_deleted(connection, before_ms)


def _drop_deleted(connection: Connection, before_ms: int) -> int:
    """A deleted query's windows never become final; they go once its last answer is old enough."""
    a, head = t.answers.c, t.heads.c
    left = or_(exists().where(a.query == head.query), exists().where(t.shipped.c.query == head.query))
    dropped = 0
    for key in connection.execute(select(head.query).where(head.state.is_(None), left)).scalars().all():
        mine = select(a.answer_id).where(a.query == key)
        newest = select(a.given_at_ms).where(a.query == key).order_by(a.answer_id.desc()).limit(1)
        given_at_ms = connection.execute(newest).scalar_one_or_none()
        if given_at_ms is None:
            connection.execute(delete(t.shipped).where(t.shipped.c.query == key))
        elif given_at_ms < before_ms:
            first = mine.order_by(a.answer_id).limit(MAX_WINDOWS)
            dropped += connection.execute(delete(t.answers).where(a.answer_id.in_(first))).rowcount
    return dropped
