"""Corrections: final answers that are given again because records came late.

A correction is a row of `answers` with the next revision of its window. It has the facts and the data of the answer
that it names, and its own numbers of late records. So a revision always states what it stated first.

Ranges of windows wait in the table `corrections`, which the transaction of the late records writes. So a kill loses no
correction. The first correction of a window follows at once. The wait before the next one begins with `WAIT_MS` and
doubles each time, because a record whose time cannot be read may count in every window of the store. A week of such
records makes 14 rows of a window. With a wait of one minute they would be 10,080.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, bindparam, case, delete, func, select, update

from center.results import schema as t
from center.results.late_records import await_corrections, late_by_window, late_to_json
from center.results.writes import TRIMMED, StoredRow, insert_answers
from center.storage.query_partition import QueryPartition
from edgewater.answers import Phase

WAIT_MS = 60_000  # limit: answers of one window
"""The least time between two corrections of a window."""
MAX_CORRECTED = 200
"""Maximum windows that one transaction examines. The job waits meanwhile."""
_SAME = ("query", "window_start_ms", "window_end_ms", "phase", "staleness_ms")


def state_earlier_late_records(connection: Connection) -> None:
    """Lets final answers state the late records that an earlier release added to them whenever they were read.

    Called once in a store of such a release.
    """
    a, c = t.answers.c, t.late_slices.c
    extents = select(c.query, func.min(c.slice_start_ms), func.max(c.slice_end_ms)).group_by(c.query)
    for key, begin, end in connection.execute(extents).all():
        within = (a.window_start_ms < end) & (a.window_end_ms > begin) & (a.window_end_ms > a.window_start_ms)
        columns = select(a.answer_id, a.window_start_ms, a.window_end_ms)
        rows = connection.execute(columns.where(a.query == key, a.phase == Phase.FINAL.value, within)).all()
        late = late_by_window(connection, key, [(start, end) for _, start, end in rows]) if rows else {}
        stated = [{"id": n, "text": late_to_json(late[start])} for n, start, _ in rows if start in late]
        if stated:
            changed = update(t.answers).where(a.answer_id == bindparam("id")).values(late=bindparam("text"))
            connection.execute(changed, stated)


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
    c, left, rows, later = t.corrections.c, MAX_CORRECTED, dict[tuple[str, int], StoredRow](), list[Any]()
    keys = [key for key, due_ms in _waiting(connection, partition).items() if due_ms <= now_ms][:MAX_CORRECTED]
    due = select(t.corrections).where(c.query.in_(keys), c.due_ms <= now_ms).order_by(c.due_ms, c.query, c.from_ms)
    for waiting in connection.execute(due.limit(MAX_CORRECTED)).all():
        key, windows = waiting.query, _newest(connection, waiting, left)
        this = (c.query == key) & (c.from_ms == waiting.from_ms) & (c.to_ms == waiting.to_ms)
        connection.execute(delete(t.corrections).where(this))
        if len(windows) == left:
            later.append((key, (windows[-1].window_start_ms + 1, waiting.to_ms), now_ms))
        corrected, waits_ms = _corrected(connection, key, windows, now_ms, revisions_after)
        rows |= {(key, start): row for start, row in corrected.items()}  # ranges may overlap
        if waits_ms:
            later.append((key, (min(waits_ms), max(waits_ms) + 1), now_ms + min(waits_ms.values())))
        left -= len(windows)
        if not left:
            break
    for key, span, due_ms in later:
        await_corrections(connection, key, [span], due_ms)
    if rows:
        insert_answers(connection, list(rows.values()))
    return len(rows)


def _newest(connection: Connection, waiting: Row[Any], limit: int) -> list[Row[Any]]:
    """Returns the newest answers of the first windows in a range, and the number of corrections of each window."""
    a = t.answers.c
    within = (a.query == waiting.query) & (a.window_start_ms >= waiting.from_ms) & (a.window_start_ms < waiting.to_ms)
    key, revision = func.max(a.query).label("query"), func.max(a.revision).label("revision")
    newest = select(key, a.window_start_ms, revision, func.count(case((a.data_of > 0, 1))).label("corrected"))
    newest = newest.where(within).group_by(a.window_start_ms).order_by(a.window_start_ms)
    chosen = newest.limit(limit).subquery()
    here = (a.query == chosen.c.query) & (a.window_start_ms == chosen.c.window_start_ms)
    head = [c for c in t.answers.c if c.name not in ("quality", "synopsis")]
    rows = select(*head, chosen.c.corrected).join_from(chosen, t.answers, here & (a.revision == chosen.c.revision))
    return list(connection.execute(rows.order_by(a.window_start_ms)))


def _corrected(
    connection: Connection, key: str, windows: list[Row[Any]], now_ms: int, revisions_after: int
) -> tuple[dict[int, StoredRow], dict[int, int]]:
    """Returns, by start of the window, the corrections that may be given now. For each other window that needs a
    correction, it returns the wait in ms.
    """
    final = [w for w in windows if w.phase == Phase.FINAL.value and w.window_end_ms > w.window_start_ms]
    late = late_by_window(connection, key, [(w.window_start_ms, w.window_end_ms) for w in final]) if final else {}
    rows, waits_ms = dict[int, StoredRow](), dict[int, int]()
    for w in final:
        text = late_to_json(late.get(w.window_start_ms, {}))
        if text in ("", w.late):
            continue
        wait_ms = (WAIT_MS << (w.corrected - 1) if w.corrected else 0) - abs(now_ms - w.answered_at_ms)
        if wait_ms > 0:
            waits_ms[w.window_start_ms] = wait_ms
            continue
        same = {name: w._mapping[name] for name in _SAME}
        revision, data_of = max(w.revision, revisions_after) + 1, w.data_of or w.answer_id
        own = {"revision": revision, "answered_at_ms": now_ms, "quality": "", "late": text, "data_of": data_of}
        rows[w.window_start_ms] = same | own
    return rows, waits_ms
