"""`AnswerReader`: reads the stored answers. Any process may use it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, TypeVar

from prometheus_client import Counter
from sqlalchemy import ColumnElement, Engine, FromClause, Row, Select, case, func, null, select

from center.results import schema as t
from center.results.late_records import late_by_window, late_from_json
from center.results.writes import TRIMMED, read_counter
from center.storage.database import read_transaction
from edgewater.answers import UNKNOWN, Cause, Deviation, Facts, Phase
from edgewater.answers.statement import Contract
from edgewater.answers.stored import facts_from_json
from edgewater.answers.uniting import with_late
from edgewater.answers.work import spend
from edgewater.base.errors import InvalidInput, InvalidRequest, NotFound, StorageError, UnsupportedVersion
from edgewater.base.streams import MAX_TIME_MS
from edgewater.model.registered_query import query_from_key, query_key
from edgewater.model.replies import Shipped
from edgewater.wire import QueryRef

UNREADABLE = Counter(
    "edgewater_unreadable_answers", "Reads of stored answers that were damaged, or whose data could not be evaluated.",
    registry=None,
)  # fmt: skip
"""Of this process. `CenterCollector` shows it."""
MAX_NEWEST = 10_000
"""If more answers than this are new, `AnswerReader.newest_answers` does not name their queries."""

log = logging.getLogger(__name__)
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """A stored answer. It never changes.

    Attributes:
        answer_id: increases with each answer of any query, in the order in which answers become visible.
        synopsis: the window's merged `GroupedAggregate` as bytes; None: no edge had data.
        data_of: the revision whose data the answer has; 0: the answer has its own data. Otherwise it is a correction,
            and its facts differ by late records.
        data_id: the id of the answer whose data it has, if it is a correction.
        of_windows: of a union of several windows, what their contracts state together.
        is_newer: whether a newer release has written it in a format that this release cannot read.
    """

    answer_id: int
    query: QueryRef
    window_start_ms: int
    window_end_ms: int
    revision: int
    phase: Phase
    answered_at_ms: int
    staleness_ms: int
    facts: Facts
    synopsis: bytes | None = field(repr=False)
    data_of: int = 0
    data_id: int = 0
    of_windows: Contract | None = None
    is_newer: bool = False

    def unreadable(self, why: str) -> AnswerRecord:
        """Returns the answer without data, and with facts that say so. Counts and logs it.

        Called where its facts or its data cannot be read or evaluated, so that the answer costs only itself.
        """
        UNREADABLE.inc()
        where = f"query {query_key(self.query)}, window at {self.window_start_ms}, revision {self.revision}"
        log.error("%s: %s", where, why, exc_info=True)
        unreadable = Deviation(Cause.UNREADABLE, reason=why, lacks=UNKNOWN)
        facts = replace(self.facts, deviations=(*self.facts.deviations, unreadable))
        return replace(self, facts=facts, synopsis=None)


def as_far_as_readable(make: Callable[[AnswerRecord], R], record: AnswerRecord) -> R:
    """Returns what `make` makes of an answer. If its merged data raise an error, it is made without data and says so.

    So the other windows of a page, and the other queries of a live stream, do not depend on it. An InvalidInput of the
    request is raised as it is.
    """
    try:
        return make(record)
    except InvalidInput:
        raise
    except Exception as exc:
        what = f"the merged data of the window cannot be evaluated ({type(exc).__name__}); see the center's log"
        return make(record.unreadable(what))


@dataclass(frozen=True, slots=True)
class NewestAnswers:
    """The newest answers.

    Attributes:
        answer_id: of any query; 0: there is none.
        by_query: the id of the newest answer of each query with an answer after the given id; None: there are too many.
    """

    answer_id: int
    by_query: Mapping[QueryRef, int] | None = None


@dataclass(frozen=True, slots=True)
class AnswerChanges:
    """The newest revisions of windows that have changed.

    Attributes:
        records: by ascending id.
        skipped: per answer id, the number of earlier revisions among the answers that were read.
        read: number of answers that were read.
    """

    records: list[AnswerRecord]
    skipped: Mapping[int, int]
    read: int


class AnswerReader:
    """Reads answers. Each method is one transaction, blocks, and is thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def engine(self) -> Engine:
        """The database, for stores that share it."""
        return self._engine

    # Lists omit sessions that were merged into other sessions: their windows are empty and have no data. A read by its
    # start returns such a session; its last revision names the session with its records.

    # `min_phase` omits windows whose newest answer has not reached a phase.

    def latest(self, ref: QueryRef, min_phase: Phase = Phase.EARLY, until_ms: int = MAX_TIME_MS) -> AnswerRecord | None:
        """Returns the newest revision of the query's last window that starts before a time."""
        newest = _in_range(_newest_revisions(ref, min_phase), None, until_ms)
        newest = newest.order_by(t.answers.c.window_start_ms.desc()).limit(1)
        return next(iter(self._newest(newest)), None)

    def last(self, ref: QueryRef, count: int) -> int | None:
        """Returns the start of the earliest of the query's last `count` windows; None: no window has an answer."""
        newest = _newest_revisions(ref).order_by(t.answers.c.window_start_ms.desc()).limit(count).subquery()
        return self._number(select(func.min(newest.c.window_start_ms)))

    def windows(
        self,
        ref: QueryRef,
        start_ms: int | None,
        end_ms: int | None,
        limit: int,
        cursor: str | None = None,
        min_phase: Phase = Phase.EARLY,
        max_bytes: int | None = None,
    ) -> tuple[list[AnswerRecord], str | None]:
        """Returns the newest revision of each window that starts in [start_ms, end_ms), ascending.

        Args:
            cursor: the cursor of the previous page.
            max_bytes: limit of the synopses of a page. The first answer that reaches it is the last one of the page.

        Returns:
            At most `limit` answers, and the cursor of the next page; None: there is none.

        Raises:
            InvalidRequest: `cursor` is not a cursor.
        """
        starts = t.answers.c.window_start_ms
        newest = _in_range(_newest_revisions(ref, min_phase), start_ms, end_ms)
        if cursor is not None:
            newest = newest.where(starts > read_cursor(cursor))
        sizes = _of(newest.order_by(starts).limit(limit + 1), t.answers.c.answer_id, func.length(_SYNOPSIS))
        with read_transaction(self._engine) as connection:
            found = connection.execute(sizes).all()
            totals = accumulate(size or 0 for _, size in found)
            full = (n for n, size in enumerate(totals, 1) if max_bytes is not None and size >= max_bytes)
            chosen = [answer_id for answer_id, _ in found[: next(full, limit)]]
            rows = _rows().where(t.answers.c.answer_id.in_(chosen)).order_by(starts)
            records = [_record(row) for row in connection.execute(rows).all()]
        _spend(records)
        return records, None if len(chosen) == len(found) else str(records[-1].window_start_ms)

    def last_windows(
        self, ref: QueryRef, start_ms: int | None, end_ms: int | None, limit: int
    ) -> tuple[list[AnswerRecord], bool]:
        """Returns the last windows that start in [start_ms, end_ms), ascending, without their synopses.

        It also returns whether the range has earlier windows.
        """
        newest = _in_range(_newest_revisions(ref), start_ms, end_ms)
        last = newest.order_by(t.answers.c.window_start_ms.desc()).limit(limit + 1)
        records = self._newest(last, with_data=False)
        return records[-limit:], len(records) > limit

    def at(self, ref: QueryRef, time_ms: int, min_phase: Phase = Phase.EARLY) -> list[AnswerRecord]:
        """Returns the newest revision of each window that contains the event time, ascending."""
        starts, ends = t.answers.c.window_start_ms, t.answers.c.window_end_ms
        begun = _newest_revisions(ref, min_phase).where(starts <= time_ms)
        # Windows of a query have one size or do not overlap. So the last window that starts by then bounds the starts
        # of the windows that contain `time_ms`.
        last = begun.with_only_columns(func.max(ends) - starts).order_by(starts.desc()).limit(1)
        records = self._newest(begun.where(starts > time_ms - last.scalar_subquery()))
        return [r for r in records if r.window_end_ms > time_ms]

    def answer(self, ref: QueryRef, window_start_ms: int, revision: int) -> AnswerRecord:
        """Returns a revision of a window. Raises NotFound."""
        records = self._answers(_rows().where(_is_of(ref, window_start_ms), t.answers.c.revision == revision))
        if not records:
            raise NotFound(f"query {query_key(ref)}: no revision {revision} of the window at {window_start_ms} ms")
        return records[0]

    def revisions(self, ref: QueryRef, window_start_ms: int) -> list[int]:
        """Returns the revisions of a window, ascending; empty if it has no answer."""
        rows = select(t.answers.c.revision).where(_is_of(ref, window_start_ms))
        with read_transaction(self._engine) as connection:
            return list(connection.execute(rows.order_by(t.answers.c.revision)).scalars())

    def changes_after(
        self, answer_id: int, limit: int, query: QueryRef | None = None, *, max_bytes: int | None = None
    ) -> AnswerChanges:
        """Reads the first `limit` answers with an id above `answer_id`, of one query or of all queries.

        Returns the newest revision among them for each of their windows. The data of earlier revisions are not read.

        Args:
            max_bytes: limit of the bytes of the returned synopses. The first answer that reaches it is the last one.
        """
        a = t.answers.c
        page = select(a.answer_id, a.query, a.window_start_ms).where(a.answer_id > answer_id)
        if query is not None:
            page = page.where(a.query == query_key(query))
        part = page.order_by(a.answer_id).limit(limit).subquery()
        each = select(func.max(part.c.answer_id), func.count()).group_by(part.c.query, part.c.window_start_ms)
        with read_transaction(self._engine) as connection:
            counts = {row[0]: row[1] for row in connection.execute(each)}
            if max_bytes is not None and counts:
                sizes = _rows(a.answer_id, func.coalesce(func.length(_SYNOPSIS), 0))
                sizes = sizes.where(a.answer_id.in_(list(counts))).order_by(a.answer_id)
                ids, lengths = zip(*connection.execute(sizes), strict=True)
                last = next((i for i, size in zip(ids, accumulate(lengths), strict=True) if size >= max_bytes), ids[-1])
                counts = {i: count for i, count in counts.items() if i <= last}
            rows = _rows().where(a.answer_id.in_(list(counts))).order_by(a.answer_id)
            records = [_record(row) for row in connection.execute(rows).all()]
        _spend(records)
        return AnswerChanges(records, {i: count - 1 for i, count in counts.items()}, sum(counts.values()))

    def last_answer_id(self) -> int:
        """Returns the id of the newest answer; 0: there is none."""
        with read_transaction(self._engine) as connection:
            return read_counter(connection, "answer")

    def newest_answers(self, after: int) -> NewestAnswers:
        """Returns the id of the newest answer, and the queries with answers after the id `after`, if they are few."""
        a = t.answers.c
        with read_transaction(self._engine) as connection:
            newest = read_counter(connection, "answer")
            if not 0 < newest - after <= MAX_NEWEST:
                return NewestAnswers(newest)
            each = select(a.query, func.max(a.answer_id)).where(a.answer_id > after).group_by(a.query)
            return NewestAnswers(newest, {query_from_key(key): last for key, last in connection.execute(each)})

    def newest_of(self, queries: Iterable[QueryRef]) -> tuple[int, dict[QueryRef, int]]:
        """Returns the id of the newest answer, and the id of the newest answer of each of these queries."""
        a, found = t.answers.c, dict[QueryRef, int]()
        with read_transaction(self._engine) as connection:
            for ref in queries:
                last = connection.execute(select(func.max(a.answer_id)).where(a.query == query_key(ref))).scalar_one()
                if last is not None:
                    found[ref] = last
            return read_counter(connection, "answer"), found

    def lag(self, query: QueryRef, answer_id: int, through: int) -> tuple[int, int, int | None]:
        """Returns, of the answers of a query with a greater id: their number, the number up to the id `through`, and
        the wall time, ms, of the first; None: there is none.
        """
        a = t.answers.c
        further = (a.query == query_key(query)) & (a.answer_id > answer_id)
        counts = func.count(), func.count(case((a.answer_id <= through, 1))), func.min(a.answered_at_ms)
        with read_transaction(self._engine) as connection:
            number, of_past, first_ms = connection.execute(select(*counts).where(further)).one()
        return number, of_past, first_ms

    def answered_at_after(self, answer_id: int) -> int | None:
        """Returns the wall time, ms, of the first answer with a greater id; None: there is none."""
        a = t.answers.c
        return self._number(select(a.answered_at_ms).where(a.answer_id > answer_id).order_by(a.answer_id).limit(1))

    def first_answer_from(self, start_ms: int) -> int | None:
        """Returns the least id of an answer to a window that starts at a time or later; None: there is none."""
        return self._number(select(func.min(t.answers.c.answer_id)).where(t.answers.c.window_start_ms >= start_ms))

    def trimmed(self) -> int:
        """Returns the greatest id of an answer that was deleted because of its age; 0: none was deleted."""
        with read_transaction(self._engine) as connection:
            return read_counter(connection, TRIMMED)

    def empty_windows(self, ref: QueryRef, windows: Sequence[tuple[int, int]]) -> set[tuple[int, int]]:
        """Returns which of these windows have no answer and are empty.

        A window is empty if all expected edges have closed it with all their records, and no record came since.

        Args:
            windows: start and end of each window, ascending by start.
        """
        if not windows:
            return set()
        queries, starts = t.ledger_queries.c, t.answers.c.window_start_ms
        with read_transaction(self._engine) as connection:
            row = connection.execute(
                select(queries.empty_from_ms, queries.empty_through_ms).where(queries.query == query_key(ref))
            ).one_or_none()
            # Answers of earlier windows may have been deleted because of their age.
            mine = t.answers.c.query == query_key(ref)
            start, last = connection.execute(select(func.min(starts), func.max(starts)).where(mine)).one()
            if row is None or start is None:
                return set()
            begin, through = max(row.empty_from_ms, start), row.empty_through_ms
            if through == MAX_TIME_MS:  # a stream that has ended is closed for all time, but an edge may still join
                through = last
            answered = select(starts).distinct().where(mine, starts >= windows[0][0], starts <= windows[-1][0])
            known = set(connection.execute(answered).scalars())
            closed = [w for w in windows if begin <= w[0] and w[1] <= through and w[0] not in known]
            late = late_by_window(connection, query_key(ref), closed) if closed else {}
        return {window for window in closed if window[0] not in late}

    def shipped(self, ref: QueryRef) -> dict[str, Shipped]:
        """Returns what is applied of each edge."""
        rows = select(t.shipped.c.edge, t.shipped.c.frames, t.shipped.c.wire_bytes)
        rows = rows.where(t.shipped.c.query == query_key(ref)).order_by(t.shipped.c.edge)
        with read_transaction(self._engine) as connection:
            return {edge: {"frames": n, "wire_bytes": size} for edge, n, size in connection.execute(rows)}

    def late_records(self, ref: QueryRef | None = None) -> dict[tuple[QueryRef, str, str], int]:
        """Returns, by query, edge and reason, the number of records that came after their windows were final."""
        rows = select(t.late_records)
        if ref is not None:
            rows = rows.where(t.late_records.c.query == query_key(ref))
        with read_transaction(self._engine) as connection:
            return {(query_from_key(r.query), r.edge, r.reason): r.records for r in connection.execute(rows)}

    def _newest(self, newest: Any, *, with_data: bool = True) -> list[AnswerRecord]:
        """Returns the answers that `newest` selects (`_newest_revisions`)."""
        return self._answers(_of(newest, *(() if with_data else (*_HEAD, null().label("synopsis")))))

    def _number(self, statement: Select[Any]) -> int | None:
        with read_transaction(self._engine) as connection:
            number: int | None = connection.execute(statement).scalar_one_or_none()
        return number

    def _answers(self, rows: Any) -> list[AnswerRecord]:
        with read_transaction(self._engine) as connection:
            records = [_record(row) for row in connection.execute(rows).all()]
        _spend(records)
        return records


_data = t.answers.alias("data")
_SYNOPSIS = func.coalesce(_data.c.synopsis, t.answers.c.synopsis)
_HEAD = [
    *(c for c in t.answers.c if c.name not in ("quality", "synopsis")),
    func.coalesce(_data.c.quality, t.answers.c.quality).label("quality"),
    func.coalesce(_data.c.revision, 0).label("data_revision"),
]


def _rows(*columns: Any, source: FromClause = t.answers) -> Select[Any]:
    """Selects answers; corrections with the facts and the data of the answers that they name."""
    chosen = columns or (*_HEAD, _SYNOPSIS.label("synopsis"))
    return select(*chosen).select_from(source.outerjoin(_data, _data.c.answer_id == t.answers.c.data_of))


def _of(newest: Any, *columns: Any) -> Select[Any]:
    """Selects the answers that `newest` selects (`_newest_revisions`)."""
    chosen = newest.subquery()
    here = (
        (t.answers.c.query == chosen.c.query)  # with the key itself, SQLite would read all answers of the query
        & (t.answers.c.window_start_ms == chosen.c.window_start_ms)
        & (t.answers.c.revision == chosen.c.revision)
    )
    return _rows(*columns, source=chosen.join(t.answers, here)).order_by(t.answers.c.window_start_ms)


def _newest_revisions(ref: QueryRef, min_phase: Phase = Phase.EARLY) -> Select[Any]:
    """Selects query, start and revision of the newest answer of each window, without windows that are empty now.

    A window's phase never moves back. So if the newest answer has not reached `min_phase`, no answer has.
    """
    answers = t.answers.c
    not_empty = case((answers.window_end_ms > answers.window_start_ms, answers.revision))
    key, revision = func.max(answers.query).label("query"), func.max(answers.revision).label("revision")
    newest = select(key, answers.window_start_ms, revision)
    newest = newest.where(answers.query == query_key(ref)).group_by(answers.window_start_ms)
    if min_phase is not Phase.EARLY:
        newest = newest.where(answers.phase.in_([p.value for p in Phase if p.rank >= min_phase.rank]))
    return newest.having(func.max(answers.revision) == func.max(not_empty))


def _is_of(ref: QueryRef, window_start_ms: int) -> ColumnElement[bool]:
    return (t.answers.c.query == query_key(ref)) & (t.answers.c.window_start_ms == window_start_ms)


def _in_range(rows: Select[Any], start_ms: int | None, end_ms: int | None) -> Select[Any]:
    """Restricts rows to windows that start in [start_ms, end_ms)."""
    starts = t.answers.c.window_start_ms
    if start_ms is not None:
        rows = rows.where(starts >= start_ms)
    return rows if end_ms is None else rows.where(starts < end_ms)


def _spend(records: Sequence[AnswerRecord]) -> None:
    """Counts what was read, outside of the transaction: the request may have to wait for its turn."""
    spend(nbytes=sum(len(record.synopsis or b"") for record in records))


def _record(row: Row[Any]) -> AnswerRecord:
    """Returns a stored answer. Facts that are damaged, or of a newer format, cost only their own answer.

    Its data are left out then, because nothing says what they lack.
    """
    # Unpacked, because a row takes long to look up a column by its name.
    answer_id, key, start, end, revision, phase, given, staleness, late, data_id, quality, data_of, synopsis = tuple(
        row
    )
    facts, damage, is_newer = Facts(0, 0, 0.0), "", False
    try:
        facts = with_late(facts_from_json(quality), late_from_json(late))
    except (StorageError, UnsupportedVersion) as exc:
        damage, is_newer = exc.message, isinstance(exc, UnsupportedVersion)
    record = AnswerRecord(
        answer_id, query_from_key(key), start, end, revision, Phase(phase), given, staleness, facts, synopsis, data_of,
        data_id, is_newer=is_newer,
    )  # fmt: skip
    return record.unreadable(damage) if damage else record


def read_cursor(cursor: str) -> int:
    try:
        return int(cursor)
    except ValueError as exc:
        raise InvalidRequest("cursor", cursor, "the next_cursor of an earlier page") from exc
