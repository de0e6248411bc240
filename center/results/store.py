"""`ResultStore`: merged slices, answers, and the position up to which each query's frames were applied.

The process that holds the driver's lease writes; any number of processes read. A micro-batch, the ledger's new state,
the resulting answers and the consumed positions are one transaction. A batch that Spark runs again finds its positions
consumed and changes nothing.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import Connection, Row, Select, case, delete, func, insert, null, select, update

from center.catalog import query_from_key, query_key
from center.ledger import (
    Emission,
    FramesMerged,
    FrameSummary,
    Ledger,
    LedgerEvent,
    LedgerTransaction,
    Phase,
    QueryTooLarge,
    SlicesRefused,
    TimeAdvanced,
    pack_state,
    state_refusal,
    with_late_records,
)
from center.results import lease as leases
from center.results import schema as t
from center.results.lease import Lease
from center.results.writes import (
    MAX_ANSWER_BYTES,
    Delta,
    DeltasRefused,
    RefusedDelta,
    add_deltas,
    add_shipped,
    drop_answers,
    drop_deltas,
    late_by_window,
    misshapen,
    set_consumed,
    split_spent,
    write_answers,
    write_ledger,
)
from center.storage.database import open_engine, read_transaction, schema_transaction, write_transaction
from edgewater.errors import Conflict, InvalidRequest, NotFound, StorageError
from edgewater.wire import QueryRef

SCHEMA_VERSION = 1
MAX_NEWEST = 10_000
"""Answers of which `ResultStore.newest_answers` says the queries."""
MAX_OPEN_WINDOWS = 500_000
"""Windows of a query that are not final, and lie in the job's memory."""


@dataclass(frozen=True, slots=True)
class MergedDelta:
    """The merged partial of one (query, slice, shard) in a batch.

    Attributes:
        position: the frame of its only partial; None: it has partials of several.
    """

    query: QueryRef
    slice_start_ms: int
    shard: int
    synopsis: bytes = field(repr=False)
    position: int | None = None

    def to_row(self) -> Delta:
        return Delta(query_key(self.query), self.slice_start_ms, self.shard, self.synopsis)


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """A stored answer. Immutable, but for `quality`, which states what is known when it is read.

    Attributes:
        answer_id: increases with each answer of any query, in the order in which answers become visible.
        quality: `Quality.to_mapping()`; of a final answer, with the records that have come since (`with_late_records`).
        synopsis: the window's merged `GroupedAggregate` as bytes; None: no edge had data.
    """

    answer_id: int
    query: QueryRef
    window_start_ms: int
    window_end_ms: int
    revision: int
    phase: Phase
    answered_at_ms: int
    staleness_ms: int
    quality: dict[str, Any]
    synopsis: bytes | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class NewestAnswers:
    """The newest answers.

    Attributes:
        answer_id: of any query; 0: there is none.
        by_query: per query with an answer after the one asked about, the id of its newest; None: there are too many.
    """

    answer_id: int
    by_query: Mapping[QueryRef, int] | None = None


class ResultStore:
    """Opens the store and creates its tables if they are missing.

    Every method is one transaction and blocks. Only the job calls `apply`, `tick` and `load_ledger`, from one thread at
    a time; the other methods are thread-safe.

    Args:
        url: SQLAlchemy URL; may be the catalog's.
        max_answer_bytes: size of the slices of one answer.

    Raises:
        InvalidConfig: not a URL of SQLite or PostgreSQL.
        StorageError: the database cannot be used, or has another schema version. Every method raises it too.
    """

    def __init__(self, url: str, max_answer_bytes: int = MAX_ANSWER_BYTES) -> None:
        self._engine = open_engine(url)
        self._max_answer_bytes = max_answer_bytes
        # The step that the ledger in memory corresponds to; None: the ledger must be loaded before it is used.
        self._step: int | None = None
        # Of the lease that this store has taken; 0: of a store that no driver has ever led.
        self._epoch = 0
        self._lease_ms = 0
        self._refused: list[RefusedDelta] = []
        with schema_transaction(self._engine, t.metadata) as connection:
            counters: dict[str, int] = dict(connection.execute(select(t.counters.c.name, t.counters.c.value)).all())
            for name, value in (("schema", SCHEMA_VERSION), ("answer", 0), ("late", 0), ("step", 0), ("starts", 0)):
                if name not in counters:
                    connection.execute(insert(t.counters).values(name=name, value=value))
            leases.create(connection)
            if (version := counters.get("schema", SCHEMA_VERSION)) != SCHEMA_VERSION:
                raise StorageError(f"the result store has schema version {version}, not {SCHEMA_VERSION}")

    def close(self) -> None:
        self._engine.dispose()

    # The driver's lease

    def lease(self) -> Lease:
        """The driver's lease as it is now."""
        with read_transaction(self._engine) as connection:
            return leases.read(connection)

    def take_lease(self, owner: str, seen: Lease, lease_ms: int, now_ms: int) -> bool:
        """Takes the lease for `lease_ms` if it is still as `seen`; the ledger is loaded before it is used next.

        Each `apply` and `tick` that writes, and each `renew_lease`, extends it to `lease_ms` from then on.
        """
        with write_transaction(self._engine) as connection:
            epoch = leases.take(connection, owner, seen, now_ms + lease_ms)
        if epoch is None:
            return False
        self._step, self._epoch, self._lease_ms = None, epoch, lease_ms
        return True

    def renew_lease(self, now_ms: int) -> None:
        """Extends the lease. Raises LeaseLost: another process has taken it."""
        with write_transaction(self._engine) as connection:
            leases.hold(connection, self._epoch, now_ms + self._lease_ms)

    def release_lease(self) -> None:
        """Frees the lease, so that another process need not wait for its end; nothing if it is lost."""
        with write_transaction(self._engine) as connection:
            leases.release(connection, self._epoch)

    # Written by the job

    def consumed(self) -> dict[str, int]:
        """Per query key, the position of the last applied frame; queries without applied frames are absent."""
        with read_transaction(self._engine) as connection:
            return _positions(connection)

    def load_ledger(self, ledger: Ledger) -> None:
        """Replaces the ledger's state by the one of the last committed transaction."""
        queries, entries = t.ledger_queries.c, t.ledger_entries.c
        with read_transaction(self._engine) as connection:
            step = _counter(connection, "step")
            states = connection.execute(select(queries.query, queries.state)).all()
            by_query: defaultdict[str, list[tuple[str, int, str]]] = defaultdict(list)
            columns = select(entries.query, entries.kind, entries.start_ms, entries.state)
            for key, kind, start, text in connection.execute(columns):
                by_query[key].append((kind, start, text))
        ledger.load(
            {query_from_key(key): None if state is None else pack_state(state, by_query[key]) for key, state in states}
        )
        self._step = step

    def apply(
        self,
        ledger: Ledger,
        deltas: Sequence[MergedDelta],
        frames: Sequence[FrameSummary],
        through: Mapping[str, int],
        now_ms: int,
    ) -> list[Emission]:
        """Applies a micro-batch atomically.

        A query whose `through` position is consumed already is skipped, with its deltas and frames.

        Args:
            deltas: the merged partials of exactly these frames.
            through: per query key, the position of the batch's last frame.

        Raises:
            Conflict: some frames of a query were applied before and others were not (exclude what `consumed` names
                before merging), or another job has written to the store. LeaseLost: it has taken the lease.
            NotFound: frames of a query that the ledger does not know: see `Ledger.handle`.
            QueryFailed: an answer of a query cannot be given. QueryTooLarge: it costs too much.
        """
        frames = list(frames)
        while True:
            try:
                return self._apply(ledger, deltas, frames, through, now_ms)
            except DeltasRefused as exc:
                deltas = self._refuse(ledger, exc.refused, deltas, frames, now_ms)

    def _apply(
        self,
        ledger: Ledger,
        deltas: Sequence[MergedDelta],
        frames: list[FrameSummary],
        through: Mapping[str, int],
        now_ms: int,
    ) -> list[Emission]:
        """As `apply`. Raises DeltasRefused: nothing is applied; without them it can be."""
        with self._transaction(ledger) as transaction, write_transaction(self._engine) as connection:
            step = self._begin_step(connection, now_ms)
            new = _not_applied(_positions(connection), through, frames)
            fresh = [f for f in frames if query_key(f.query) in new]
            kept = _applicable(ledger, [d for d in deltas if query_key(d.query) in new], fresh, through)
            refused = misshapen(connection, [d.to_row() for d in kept])
            kept = _without(refused, kept, fresh)
            _weigh(ledger, kept)
            emissions = ledger.handle(FramesMerged(tuple(fresh), now_ms))
            _require_bounded(ledger, {f.query for f in fresh})
            stored, spent = split_spent(ledger, emissions, [d.to_row() for d in kept])
            add_deltas(connection, stored, ledger.on_query)
            write_ledger(connection, transaction.changes())
            write_answers(connection, ledger, emissions, spent, self._max_answer_bytes)
            add_shipped(connection, [f for f in fresh if not ledger.is_deleted(f.query)])
            set_consumed(connection, {key: position for key, position in through.items() if key in new})
        self._step = step
        self._refused += refused
        return emissions

    def tick(self, ledger: Ledger, events: Sequence[LedgerEvent], now_ms: int) -> list[Emission]:
        """Applies events (other than `FramesMerged`) and then ``TimeAdvanced(now_ms)``, atomically.

        Writes to the database only if something changed, so it may be called often.

        Raises:
            Conflict: another job has written to the store. LeaseLost: it has taken the lease.
            QueryFailed: a query cannot be advanced, or an answer of it not be given: see `Ledger.suspend`.
        """
        if any(isinstance(e, FramesMerged) for e in events):
            raise ValueError("frames are applied with their deltas, by ResultStore.apply")
        while True:
            try:
                return self._tick(ledger, [*events, TimeAdvanced(now_ms)], now_ms)
            except DeltasRefused as exc:
                self._refuse(ledger, exc.refused, (), [], now_ms)

    def _tick(self, ledger: Ledger, events: Sequence[LedgerEvent], now_ms: int) -> list[Emission]:
        with self._transaction(ledger) as transaction:
            step = self._step
            emissions = [e for event in events for e in ledger.handle(event)]
            changes = transaction.changes()
            if changes or emissions:
                with write_transaction(self._engine) as connection:
                    step = self._begin_step(connection, now_ms)
                    write_ledger(connection, changes)
                    write_answers(connection, ledger, emissions, (), self._max_answer_bytes)
                self._step = step
        return emissions

    def _refuse(
        self,
        ledger: Ledger,
        refused: Sequence[RefusedDelta],
        deltas: Sequence[MergedDelta],
        frames: list[FrameSummary],
        now_ms: int,
    ) -> list[MergedDelta]:
        """Drops deltas that do not merge and states the loss: of a batch's own ones in its frames, which are changed in
        place, of stored ones in the ledger. Returns the batch's other deltas."""
        kept = _without(refused, deltas, frames)
        own = {d.to_row() for d in deltas} - {d.to_row() for d in kept}
        stored = {r.delta for r in refused} - own
        if stored:
            with self._transaction(ledger) as transaction, write_transaction(self._engine) as connection:
                step = self._begin_step(connection, now_ms)
                for delta in stored:
                    if drop_deltas(connection, delta, exactly=True) == 0:
                        # It was merged in the transaction that failed: from deltas of the slice, stored ones and new.
                        drop_deltas(connection, delta, exactly=False)
                        place = [d for d in kept if d.to_row().place == delta.place]
                        kept = _without([RefusedDelta(d.to_row(), "") for d in place], kept, frames)
                    ledger.handle(SlicesRefused(query_from_key(delta.query), (delta.slice_start_ms,)))
                write_ledger(connection, transaction.changes())
            self._step = step
        self._refused += refused
        return kept

    def take_refused(self) -> list[RefusedDelta]:
        """The merged partials that were refused since the last call."""
        refused, self._refused = self._refused, []
        return refused

    @contextmanager
    def _transaction(self, ledger: Ledger) -> Iterator[LedgerTransaction]:
        """A transaction of the ledger as stored. If it fails, the ledger is loaded again: now, or before it is used."""
        if self._step is None:
            self.load_ledger(ledger)
        try:
            with ledger.transaction() as transaction:
                yield transaction
        except Exception:
            self._step = None
            with suppress(Exception):  # the store may be out of reach: the error to report is the one above
                self.load_ledger(ledger)
            raise
        except BaseException:
            self._step = None
            raise

    def forget(self, ref: QueryRef) -> None:
        """Drops a deleted query's answers. Its slices were dropped with `QueryDeleted`; the consumed positions stay, so
        that a frame read again is not applied."""
        with write_transaction(self._engine) as connection:
            for table in (t.answers, t.shipped, t.late_slices, t.late_records):
                connection.execute(delete(table).where(table.c.query == query_key(ref)))

    def trim(self, before_ms: int) -> int:
        """Drops answers that were emitted before a wall time, at most a few hundred windows, so that the job is hardly
        delayed. Returns the number of answers; 0: there are none left to drop.

        A window is dropped with all its revisions once its final one is old enough; a window that is not final stays,
        however old. A deleted query's answers are dropped together once the newest one is old enough.
        """
        with write_transaction(self._engine) as connection:
            return drop_answers(connection, before_ms)

    def _begin_step(self, connection: Connection, now_ms: int) -> int:
        """Takes the writers' lock, and checks that this process leads and that the ledger in memory is the stored one.

        The ledgers differ if the confirmation of a commit was lost.
        """
        leases.hold(connection, self._epoch, now_ms + self._lease_ms)
        row = select(t.counters.c.value).where(t.counters.c.name == "step").with_for_update()
        stored = int(connection.execute(row).scalar_one())
        if stored != self._step:
            raise Conflict(f"the result store is at step {stored}, this job's ledger at {self._step}: try again")
        connection.execute(update(t.counters).where(t.counters.c.name == "step").values(value=stored + 1))
        return stored + 1

    def count_start(self) -> int:
        """Counts that the job starts; returns how often it has, this time included, since frames were applied last."""
        starts = t.counters.c.name == "starts"
        with write_transaction(self._engine) as connection:
            connection.execute(update(t.counters).where(starts).values(value=t.counters.c.value + 1))
            return _counter(connection, "starts")

    def reset_starts(self) -> None:
        """Frames were applied, or none is left."""
        with write_transaction(self._engine) as connection:
            connection.execute(update(t.counters).where(t.counters.c.name == "starts").values(value=0))

    def copy_query(self, key: str, to: ResultStore) -> None:
        """Copies what the job needs of a query to go on with it into an empty store."""
        tables = (t.ledger_queries, t.ledger_entries, t.deltas, t.shapes, t.consumed)
        with read_transaction(self._engine) as connection, write_transaction(to._engine) as target:
            for table in tables:
                rows = [dict(r._mapping) for r in connection.execute(select(table).where(table.c.query == key))]
                if rows:
                    target.execute(insert(table), rows)

    # Read by any process

    # Lists leave out sessions that were merged into others: their windows are empty and have no data. Such a session is
    # found by its start; its last revision names the session that has its records.

    # `min_phase` leaves out windows whose newest answer has not reached a phase.

    def latest(self, ref: QueryRef, min_phase: Phase = Phase.EARLY) -> AnswerRecord | None:
        """The newest revision of the query's last window."""
        newest = _newest_revisions(ref, min_phase).order_by(t.answers.c.window_start_ms.desc()).limit(1)
        return next(iter(self._newest(ref, newest)), None)

    def last(self, ref: QueryRef, count: int) -> int | None:
        """Start of the earliest of the query's last `count` windows; None: no window has an answer."""
        newest = _newest_revisions(ref).order_by(t.answers.c.window_start_ms.desc()).limit(count).subquery()
        with read_transaction(self._engine) as connection:
            start: int | None = connection.execute(select(func.min(newest.c.window_start_ms))).scalar_one()
        return start

    def windows(
        self,
        ref: QueryRef,
        start_ms: int | None,
        end_ms: int | None,
        limit: int,
        cursor: str | None = None,
        min_phase: Phase = Phase.EARLY,
    ) -> tuple[list[AnswerRecord], str | None]:
        """The newest revision of each window that starts in [start_ms, end_ms), ascending.

        Args:
            cursor: the cursor of the previous page.

        Returns:
            At most `limit` answers, and the cursor of the next page; None: there is none.

        Raises:
            InvalidRequest: not a cursor.
        """
        starts = t.answers.c.window_start_ms
        newest = _in_range(_newest_revisions(ref, min_phase), start_ms, end_ms)
        if cursor is not None:
            newest = newest.where(starts > _read_cursor(cursor))
        found = self._newest(ref, newest.order_by(starts).limit(limit + 1))
        if len(found) <= limit:
            return found, None
        return found[:limit], str(found[limit - 1].window_start_ms)

    def last_windows(
        self, ref: QueryRef, start_ms: int | None, end_ms: int | None, limit: int
    ) -> tuple[list[AnswerRecord], bool]:
        """The last windows that start in [start_ms, end_ms), ascending, without their synopses; and whether the range
        has earlier ones too."""
        newest = _in_range(_newest_revisions(ref), start_ms, end_ms)
        last = newest.order_by(t.answers.c.window_start_ms.desc()).limit(limit + 1)
        columns = [null().label("synopsis") if c.name == "synopsis" else c for c in t.answers.c]
        found = self._newest(ref, last, columns)
        return found[-limit:], len(found) > limit

    def at(self, ref: QueryRef, time_ms: int, min_phase: Phase = Phase.EARLY) -> list[AnswerRecord]:
        """The newest revision of each window that contains the event time, ascending."""
        starts, ends = t.answers.c.window_start_ms, t.answers.c.window_end_ms
        begun = _newest_revisions(ref, min_phase).where(starts <= time_ms)
        # Windows of a query have one size or do not overlap, so the last window that starts by then bounds where the
        # windows that contain `time_ms` start.
        last = begun.with_only_columns(func.max(ends) - starts).order_by(starts.desc()).limit(1)
        found = self._newest(ref, begun.where(starts > time_ms - last.scalar_subquery()))
        return [r for r in found if r.window_end_ms > time_ms]

    def answer(self, ref: QueryRef, window_start_ms: int, revision: int) -> AnswerRecord:
        """Raises NotFound."""
        rows = select(t.answers).where(
            t.answers.c.query == query_key(ref),
            t.answers.c.window_start_ms == window_start_ms,
            t.answers.c.revision == revision,
        )
        found = self._answers(rows)
        if not found:
            raise NotFound(f"query {query_key(ref)}: no revision {revision} of the window at {window_start_ms} ms")
        return found[0]

    def revisions(self, ref: QueryRef, window_start_ms: int) -> list[int]:
        """The revisions of a window, ascending; empty if it has no answer."""
        rows = select(t.answers.c.revision).where(
            t.answers.c.query == query_key(ref), t.answers.c.window_start_ms == window_start_ms
        )
        with read_transaction(self._engine) as connection:
            return list(connection.execute(rows.order_by(t.answers.c.revision)).scalars())

    def answers_after(self, answer_id: int, limit: int, query: QueryRef | None = None) -> list[AnswerRecord]:
        """Answers with a greater id, ascending; of one query or of all."""
        rows = select(t.answers).where(t.answers.c.answer_id > answer_id)
        if query is not None:
            rows = rows.where(t.answers.c.query == query_key(query))
        return self._answers(rows.order_by(t.answers.c.answer_id).limit(limit))

    def last_answer_id(self) -> int:
        """The id of the newest answer; 0: there is none."""
        with read_transaction(self._engine) as connection:
            return _counter(connection, "answer")

    def newest_answers(self, after: int) -> NewestAnswers:
        """The newest answer, and those of queries with answers after this one, which is read if they are few."""
        a = t.answers.c
        with read_transaction(self._engine) as connection:
            newest = _counter(connection, "answer")
            if not 0 < newest - after <= MAX_NEWEST:
                return NewestAnswers(newest)
            each = select(a.query, func.max(a.answer_id)).where(a.answer_id > after).group_by(a.query)
            return NewestAnswers(newest, {query_from_key(key): last for key, last in connection.execute(each)})

    def newest(self) -> tuple[int, int]:
        """`last_answer_id`, and a number that increases whenever records come for final windows."""
        with read_transaction(self._engine) as connection:
            return _counter(connection, "answer"), _counter(connection, "late")

    def shipped(self, ref: QueryRef) -> dict[str, dict[str, int]]:
        """Per edge, the applied ``frames`` and ``wire_bytes``."""
        rows = select(t.shipped.c.edge, t.shipped.c.frames, t.shipped.c.wire_bytes)
        rows = rows.where(t.shipped.c.query == query_key(ref)).order_by(t.shipped.c.edge)
        with read_transaction(self._engine) as connection:
            return {edge: {"frames": n, "wire_bytes": size} for edge, n, size in connection.execute(rows)}

    def late_records(self, ref: QueryRef | None = None) -> dict[tuple[QueryRef, str, str], int]:
        """By query, edge and reason, the number of records that came for windows when these were final."""
        rows = select(t.late_records)
        if ref is not None:
            rows = rows.where(t.late_records.c.query == query_key(ref))
        with read_transaction(self._engine) as connection:
            return {(query_from_key(r.query), r.edge, r.reason): r.records for r in connection.execute(rows)}

    def _newest(self, ref: QueryRef, newest: Any, columns: Sequence[Any] = (t.answers,)) -> list[AnswerRecord]:
        """The answers whose (window_start_ms, revision) `newest` selects."""
        chosen = newest.subquery()
        here = (
            (t.answers.c.query == query_key(ref))
            & (t.answers.c.window_start_ms == chosen.c.window_start_ms)
            & (t.answers.c.revision == chosen.c.revision)
        )
        rows = select(*columns).select_from(t.answers).join(chosen, here)
        return self._answers(rows.order_by(t.answers.c.window_start_ms))

    def _answers(self, rows: Any) -> list[AnswerRecord]:
        with read_transaction(self._engine) as connection:
            return _with_late_records(connection, [_record(row) for row in connection.execute(rows)])


def _newest_revisions(ref: QueryRef, min_phase: Phase = Phase.EARLY) -> Select[Any]:
    """(window_start_ms, revision) of the newest answer of each window, without windows that are empty now.

    A window's phase never moves back, so the newest answer is among those of the phases asked for, or none is.
    """
    answers = t.answers.c
    not_empty = case((answers.window_end_ms > answers.window_start_ms, answers.revision))
    newest = select(answers.window_start_ms, func.max(answers.revision).label("revision"))
    newest = newest.where(answers.query == query_key(ref)).group_by(answers.window_start_ms)
    if min_phase is not Phase.EARLY:
        newest = newest.where(answers.phase.in_([p.value for p in Phase if p.rank >= min_phase.rank]))
    return newest.having(func.max(answers.revision) == func.max(not_empty))


def _in_range(rows: Select[Any], start_ms: int | None, end_ms: int | None) -> Select[Any]:
    """Those of windows that start in [start_ms, end_ms)."""
    starts = t.answers.c.window_start_ms
    if start_ms is not None:
        rows = rows.where(starts >= start_ms)
    return rows if end_ms is None else rows.where(starts < end_ms)


def _record(row: Row[Any]) -> AnswerRecord:
    return AnswerRecord(
        answer_id=row.answer_id,
        query=query_from_key(row.query),
        window_start_ms=row.window_start_ms,
        window_end_ms=row.window_end_ms,
        revision=row.revision,
        phase=Phase(row.phase),
        answered_at_ms=row.answered_at_ms,
        staleness_ms=row.staleness_ms,
        quality=json.loads(row.quality),
        synopsis=row.synopsis,
    )


def _with_late_records(connection: Connection, records: list[AnswerRecord]) -> list[AnswerRecord]:
    """The final answers among them state the records that have come since; no revision can hold them."""
    windows: defaultdict[QueryRef, list[tuple[int, int]]] = defaultdict(list)
    for r in records:
        if r.phase is Phase.FINAL:
            windows[r.query].append((r.window_start_ms, r.window_end_ms))
    late = {ref: late_by_window(connection, query_key(ref), each) for ref, each in windows.items()}
    return [
        replace(r, quality=with_late_records(r.quality, counts))
        if r.phase is Phase.FINAL and (counts := late[r.query].get(r.window_start_ms))
        else r
        for r in records
    ]


def _counter(connection: Connection, name: str) -> int:
    return int(connection.execute(select(t.counters.c.value).where(t.counters.c.name == name)).scalar_one())


def _positions(connection: Connection) -> dict[str, int]:
    positions: dict[str, int] = dict(connection.execute(select(t.consumed.c.query, t.consumed.c.position)).all())
    return positions


def _not_applied(consumed: Mapping[str, int], through: Mapping[str, int], frames: Iterable[FrameSummary]) -> set[str]:
    """The queries of the batch that were not applied before. Raises Conflict if a query was applied in part."""
    new = {key for key, position in through.items() if position > consumed.get(key, 0)}
    for frame in frames:
        key = query_key(frame.query)
        if key not in through or frame.position > through[key]:
            raise StorageError(f"query {key}: a frame at {frame.position}, but the batch ends at {through.get(key)}")
        if key in new and frame.position <= consumed.get(key, 0):
            raise Conflict(
                f"query {key}: the frame at {frame.position} was applied already, and the batch ends at"
                f" {through[key]}: exclude its partials before merging"
            )
    return new


def _applicable(
    ledger: Ledger, deltas: Iterable[MergedDelta], frames: Iterable[FrameSummary], through: Mapping[str, int]
) -> list[MergedDelta]:
    """The deltas that belong to an open window: final windows do not change, and deleted queries have none."""
    touched = {(f.query, start) for f in frames for start in f.touched}
    kept = []
    for delta in deltas:
        if (delta.query, delta.slice_start_ms) not in touched:
            # No window would be answered from it: the data would be lost silently.
            raise StorageError(
                f"query {query_key(delta.query)}: a delta of slice {delta.slice_start_ms}, which no frame touches"
            )
        if not ledger.is_deleted(delta.query) and delta.slice_start_ms >= ledger.sealed_before(delta.query):
            kept.append(delta)
    return kept


def _require_bounded(ledger: Ledger, queries: Iterable[QueryRef]) -> None:
    """Raises QueryTooLarge for a query with more open windows than memory should hold."""
    for ref in queries:
        if not ledger.is_deleted(ref) and (count := ledger.open_windows(ref)) > MAX_OPEN_WINDOWS:
            raise QueryTooLarge(ref, f"{count} windows are not final; expected at most {MAX_OPEN_WINDOWS}")


def _weigh(ledger: Ledger, deltas: Iterable[MergedDelta]) -> None:
    """Tells the ledger, before it decides how many windows are answered, how large the slices of these deltas are."""
    sizes: defaultdict[QueryRef, list[int]] = defaultdict(list)
    slices: defaultdict[QueryRef, set[int]] = defaultdict(set)
    for delta in deltas:
        sizes[delta.query].append(len(delta.synopsis))
        slices[delta.query].add(delta.slice_start_ms)
    for ref, each in sizes.items():
        ledger.weigh(ref, sum(each), len(slices[ref]))


def _without(
    refused: Iterable[RefusedDelta], deltas: Sequence[MergedDelta], frames: list[FrameSummary]
) -> list[MergedDelta]:
    """The deltas that are not refused; the loss of the others is stated in their frames, which are changed in place."""
    bad = {r.delta for r in refused}
    if not bad:
        return list(deltas)
    kept = []
    for delta in deltas:
        if delta.to_row() in bad:
            state_refusal(frames, delta.query, delta.slice_start_ms, delta.position)
        else:
            kept.append(delta)
    return kept


def _read_cursor(cursor: str) -> int:
    try:
        return int(cursor)
    except ValueError as exc:
        raise InvalidRequest("cursor", cursor, "the next_cursor of an earlier page") from exc
