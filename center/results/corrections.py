"""Corrections: final answers that are given again because records came late.

A correction is a row of `answers` with the next revision of its window. It has the facts and the data of the answer
that it names, and its own numbers of late records. So whatever has read an answer, its revision states what it stated.

Ranges of windows wait in the table `corrections`, which the transaction of the late records writes. So a kill loses no
correction. The first correction of a window follows at once. The wait before the next one begins with `WAIT_MS` and
doubles each time, because a record whose time cannot be read may count in every window of the store. A week of such
records makes 14 rows of a window. With a wait of one minute they would be 10,080.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, case, delete, func, insert, literal, select

from center.ledger import AT_ONCE_MS
from center.results import schema as t
from center.results.late_records import await_corrections, late_by_window, late_to_json
from center.results.writes import TRIMMED, insert_answers
from center.storage.query_partition import QueryPartition
from edgewater.answers import Phase

WAIT_MS = 60_000
"""The least time between two corrections of a window."""
MAX_CORRECTED = 200
"""Maximum windows that one transaction examines. The job waits meanwhile."""


def await_all_corrections(connection: Connection) -> None:
    """Lets all windows with late records wait for a correction.

    Called once in a store of a release that added late records to final answers when they were read.
    """
    c, a = t.late_slices.c, t.answers.c
    longest = select(a.query, func.max(a.window_end_ms - a.window_start_ms).label("ms")).group_by(a.query).subquery()
    spans = select(
        c.query, func.min(c.slice_start_ms) - func.max(longest.c.ms), func.max(c.slice_end_ms), literal(AT_ONCE_MS)
    )
    waiting = spans.join_from(t.late_slices, longest, longest.c.query == c.query).group_by(c.query)
    connection.execute(insert(t.corrections).from_select(["query", "from_ms", "to_ms", "due_ms"], waiting))


def lock_corrected(connection: Connection) -> None:
    """Locks out `write_corrections` and the deletion of old answers until the transaction ends.

    Otherwise a correction could name an answer that another transaction deletes.
    """
    connection.execute(select(t.counters.c.value).where(t.counters.c.name == TRIMMED).with_for_update())


def next_correction(connection: Connection, partition: QueryPartition) -> int | None:
    """Returns the wall time, ms, from which windows of a partition wait for a correction; None: none waits."""
    return min(_waiting(connection, partition).values(), default=None)


def _waiting(connection: Connection, partition: QueryPartition) -> dict[str, int]:
    """Returns the keys of the queries with windows that wait, and the first wall time, ms, of each."""
    c = t.corrections.c
    each = connection.execute(select(c.query, func.min(c.due_ms)).group_by(c.query))
    return {key: due_ms for key, due_ms in each if key in partition}


def write_corrections(connection: Connection, partition: QueryPartition, now_ms: int, revisions_after: int) -> int:
    """Writes corrections of at most `MAX_CORRECTED` windows. Returns their number.

    Args:
        revisions_after: as in `Ledger.load`.
    """
    lock_corrected(connection)
    c, left, rows = t.corrections.c, MAX_CORRECTED, list[dict[str, Any]]()
    examined = set[tuple[str, int]]()  # ranges may overlap
    keys = [key for key, due_ms in _waiting(connection, partition).items() if due_ms <= now_ms][:MAX_CORRECTED]
    due = select(t.corrections).where(c.query.in_(keys), c.due_ms <= now_ms).order_by(c.due_ms, c.query, c.from_ms)
    for waiting in connection.execute(due.limit(MAX_CORRECTED)).all():
        key, windows = waiting.query, _newest(connection, waiting, left)
        this = (c.query == key) & (c.from_ms == waiting.from_ms) & (c.to_ms == waiting.to_ms)
        connection.execute(delete(t.corrections).where(this))
        if len(windows) == left:
            await_corrections(connection, key, [(windows[-1].window_start_ms + 1, waiting.to_ms)], now_ms)
        new = [w for w in windows if (key, w.window_start_ms) not in examined]
        examined.update((key, w.window_start_ms) for w in new)
        rows += _corrected(connection, key, new, now_ms, revisions_after)
        left -= len(windows)
        if not left:
            break
    if rows:
        insert_answers(connection, rows)
    return len(rows)


def _newest(connection: Connection, waiting: Row[Any], limit: int) -> list[Row[Any]]:
    """Returns the newest answers of the first windows in a range, and the number of corrections of each window."""
    a = t.answers.c
    within = (a.query == waiting.query) & (a.window_start_ms >= waiting.from_ms) & (a.window_start_ms < waiting.to_ms)
    corrected = func.count(case((a.data_of > 0, 1))).label("corrected")
    newest = select(a.window_start_ms, func.max(a.revision).label("revision"), corrected).where(within)
    chosen = newest.group_by(a.window_start_ms).order_by(a.window_start_ms).limit(limit).subquery()
    here = (a.window_start_ms == chosen.c.window_start_ms) & (a.revision == chosen.c.revision)
    head = [c for c in t.answers.c if c.name not in ("quality", "synopsis")]
    rows = select(*head, chosen.c.corrected).join_from(t.answers, chosen, here).where(a.query == waiting.query)
    return list(connection.execute(rows.order_by(a.window_start_ms)))


def _corrected(
    connection: Connection, key: str, windows: list[Row[Any]], now_ms: int, revisions_after: int
) -> list[dict[str, Any]]:
    """Returns the corrections that may be given now. The other windows that need one wait."""
    final = [w for w in windows if w.phase == Phase.FINAL.value and w.window_end_ms > w.window_start_ms]
    late = late_by_window(connection, key, [(w.window_start_ms, w.window_end_ms) for w in final]) if final else {}
    rests, rows = dict[int, int](), list[dict[str, Any]]()
    for w in final:
        text = late_to_json(late.get(w.window_start_ms, {}))
        if text in ("", w.late):
            continue
        if w.corrected:
            wait_ms, since_ms = WAIT_MS << (w.corrected - 1), abs(now_ms - w.answered_at_ms)
            if since_ms < wait_ms:
                rests[w.window_start_ms] = now_ms + wait_ms - since_ms
                continue
        kept = {name: getattr(w, name) for name in ("window_start_ms", "window_end_ms", "phase", "staleness_ms")}
        revision, data_of = max(w.revision, revisions_after) + 1, w.data_of or w.answer_id
        own = {"revision": revision, "answered_at_ms": now_ms, "quality": "", "late": text, "data_of": data_of}
        rows.append({**kept, **own, "query": key})
    if rests:
        await_corrections(connection, key, [(min(rests), max(rests) + 1)], min(rests.values()))
    return rows
