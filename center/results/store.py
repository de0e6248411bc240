"""The result store: merged slices, answers, and how far each query's frames have been applied.

One job writes; any number of processes read. A micro-batch, the ledger's new state, the answers that
follow from it and the positions it has consumed are one transaction, so a batch that is run again —
whatever Spark's checkpoint says — finds its positions consumed and changes nothing.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Row, Select, case, delete, func, insert, select, update

from center.catalog.store import query_from_key, query_key
from center.ledger.ledger import Deleted, Emission, FrameFact, Ledger, LedgerEvent, Phase, Reported, Tick
from center.ledger.state import pack_state
from center.results import schema as t
from center.results.trimming import drop_answers
from center.results.writes import Delta, add_deltas, add_shipped, set_consumed, write_answers, write_ledger
from center.storage.database import open_engine, read_transaction, schema_transaction, write_transaction
from edgewater.errors import Conflict, InvalidRequest, NotFound, StorageError
from edgewater.wire.frames import QueryRef

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class MergedDelta:
    """A batch's merged partial of one (query, slice, shard)."""

    query: QueryRef
    slice_start_ms: int
    shard: int
    synopsis: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """An answer as it was given; never changed afterwards.

    Attributes:
        answer_id: grows with each answer of any query, in the order they become visible.
        quality: `Quality.to_mapping()`.
        synopsis: the window's merged `GroupedAggregate` as bytes; None: no edge had data.
    """

    answer_id: int
    query: QueryRef
    window_start_ms: int
    window_end_ms: int
    revision: int
    phase: Phase
    given_at_ms: int
    staleness_ms: int
    quality: dict[str, Any]
    synopsis: bytes | None = field(repr=False)


class ResultStore:
    """Opens the store, making its tables if they are not there.

    Every method is one transaction and blocks. `apply`, `tick` and `load_ledger` are the job's, called
    by one thread at a time; the others are anybody's.

    Args:
        url: SQLAlchemy URL; the catalog's is fine.

    Raises:
        InvalidConfig: not a URL of SQLite or PostgreSQL.
        StorageError: the database cannot be used, or belongs to a newer release. So does every method.
    """

    def __init__(self, url: str) -> None:
        self._engine = open_engine(url)
        # The step that the ledger in memory stands at; None: unknown, to be loaded before it is used.
        self._step: int | None = None
        with schema_transaction(self._engine, t.metadata) as connection:
            t.answers_by_phase.create(connection, checkfirst=True)  # A store of an older release has none.
            counters: dict[str, int] = dict(connection.execute(select(t.counters.c.name, t.counters.c.value)).all())
            for name, value in (("schema", SCHEMA_VERSION), ("answer", 0), ("step", 0)):
                if name not in counters:
                    connection.execute(insert(t.counters).values(name=name, value=value))
            if counters.get("schema", SCHEMA_VERSION) > SCHEMA_VERSION:
                raise StorageError(
                    f"result store of schema {counters['schema']}, this release reads up to {SCHEMA_VERSION}:"
                    " upgrade it"
                )

    def close(self) -> None:
        self._engine.dispose()

    # Written by the job

    def consumed(self) -> dict[str, int]:
        """By query key, the position through which frames have been applied; absent: none has."""
        with read_transaction(self._engine) as connection:
            return _positions(connection)

    def load_ledger(self, ledger: Ledger) -> None:
        """Puts the ledger's queries into the state of the last transaction."""
        with read_transaction(self._engine) as connection:
            step = _counter(connection, "step")
            heads = connection.execute(select(t.heads.c.query, t.heads.c.state)).all()
            parts: defaultdict[str, list[tuple[str, int, str]]] = defaultdict(list)
            columns = select(t.parts.c.query, t.parts.c.kind, t.parts.c.start_ms, t.parts.c.state)
            for key, kind, start, state in connection.execute(columns):
                parts[key].append((kind, start, state))
        for key, state in heads:
            if state is None:
                ledger.handle(Deleted(query_from_key(key)))
            else:
                ledger.restore(query_from_key(key), pack_state(state, parts[key]))
        self._step = step

    def apply(
        self,
        ledger: Ledger,
        deltas: Sequence[MergedDelta],
        facts: Sequence[FrameFact],
        through: Mapping[str, int],
        now_ms: int,
    ) -> list[Emission]:
        """Applies a micro-batch, or nothing of it: after an exception ledger and store are as before.

        A query whose `through` has been consumed already is passed over, with its deltas and facts.

        Args:
            deltas: the merged partials of exactly the frames that `facts` tell of.
            through: by query key, the position after which the next batch begins.

        Raises:
            Conflict: some frames of a query were applied before and others were not (leave out what
                `consumed` names before merging), or another job has written to the store.
            NotFound: frames of a query that the ledger was not told of: see `Ledger.handle`.
            SynopsisError: deltas that do not merge with the query's others; its message names the query.
        """
        self._ensure_loaded(ledger)
        with ledger.transaction() as transaction, write_transaction(self._engine) as connection:
            step = self._begin_step(connection)
            new = _not_applied(_positions(connection), through, facts)
            fresh = [f for f in facts if query_key(f.query) in new]
            kept = _applicable(ledger, [d for d in deltas if query_key(d.query) in new], fresh, through)
            emissions = ledger.handle(Reported(tuple(fresh), now_ms))
            add_deltas(connection, [Delta(query_key(d.query), d.slice_start_ms, d.shard, d.synopsis) for d in kept])
            write_ledger(connection, transaction.changes())
            write_answers(connection, ledger, emissions)
            add_shipped(connection, [f for f in fresh if not ledger.is_deleted(f.query)])
            set_consumed(connection, {key: position for key, position in through.items() if key in new})
        self._step = step
        return emissions

    def tick(self, ledger: Ledger, events: Sequence[LedgerEvent], now_ms: int) -> list[Emission]:
        """Hands over events (not `Reported`: that is `apply`'s) and then ``Tick(now_ms)``, all or nothing.

        Touches the database only if something changed, so it may be called often.

        Raises:
            Conflict: another job has written to the store.
        """
        if any(isinstance(e, Reported) for e in events):
            raise ValueError("frames are applied with their deltas, by ResultStore.apply")
        self._ensure_loaded(ledger)
        step = self._step
        with ledger.transaction() as transaction:
            emissions = [e for event in (*events, Tick(now_ms)) for e in ledger.handle(event)]
            changes = transaction.changes()
            if changes or emissions:
                with write_transaction(self._engine) as connection:
                    step = self._begin_step(connection)
                    write_ledger(connection, changes)
                    write_answers(connection, ledger, emissions)
        self._step = step
        return emissions

    def forget(self, ref: QueryRef) -> None:
        """Drops a deleted query's answers. Its slices went when the ledger was told `Deleted`; the
        positions stay, so that a frame read again counts nowhere."""
        with write_transaction(self._engine) as connection:
            for table in (t.answers, t.shipped):
                connection.execute(delete(table).where(table.c.query == query_key(ref)))

    def trim(self, before_ms: int) -> int:
        """Drops some of the answers that were given before a wall time, at most some hundred windows, so that the
        job hardly waits; how many answers. 0: there are none left to drop.

        A window goes with all its revisions once its final one is old enough; one that is not final yet stays,
        however old. A deleted query's answers go together, once the last of them is old enough.
        """
        with write_transaction(self._engine) as connection:
            return drop_answers(connection, before_ms)

    def _ensure_loaded(self, ledger: Ledger) -> None:
        if self._step is None:
            self.load_ledger(ledger)

    def _begin_step(self, connection: Connection) -> int:
        """Takes the writers' lock and makes sure that the ledger in memory is the one in the store.

        They part if another job writes too, or if a commit took place whose confirmation was lost.
        Until the step is confirmed by the caller, the ledger counts as unknown and is loaded anew.
        """
        known, self._step = self._step, None
        row = select(t.counters.c.value).where(t.counters.c.name == "step").with_for_update()
        stored = int(connection.execute(row).scalar_one())
        if stored != known:
            raise Conflict(f"the result store stands at step {stored}, this job's ledger at {known}: try again")
        connection.execute(update(t.counters).where(t.counters.c.name == "step").values(value=stored + 1))
        return stored + 1

    # Read by anybody

    # Lists leave out sessions that have become part of others: their windows are empty, and no data is
    # theirs. By its start such a session is found: it says where its records are.

    def latest(self, ref: QueryRef) -> AnswerRecord | None:
        """The newest revision of the query's last window."""
        newest = _standing(ref).order_by(t.answers.c.window_start_ms.desc()).limit(1)
        return next(iter(self._newest(ref, newest)), None)

    def last(self, ref: QueryRef, count: int) -> int | None:
        """The start of the first of the query's last `count` windows; None: none has an answer."""
        newest = _standing(ref).order_by(t.answers.c.window_start_ms.desc()).limit(count).subquery()
        with read_transaction(self._engine) as connection:
            start: int | None = connection.execute(select(func.min(newest.c.window_start_ms))).scalar_one()
        return start

    def windows(
        self, ref: QueryRef, start_ms: int | None, end_ms: int | None, limit: int, cursor: str | None = None
    ) -> tuple[list[AnswerRecord], str | None]:
        """The newest revision of each window that starts in [start_ms, end_ms), ascending.

        Args:
            cursor: where an earlier call stopped.

        Returns:
            At most `limit` answers, and the cursor for those after them; None: there are none.

        Raises:
            InvalidRequest: not a cursor.
        """
        starts = t.answers.c.window_start_ms
        newest = _standing(ref)
        if start_ms is not None:
            newest = newest.where(starts >= start_ms)
        if end_ms is not None:
            newest = newest.where(starts < end_ms)
        if cursor is not None:
            newest = newest.where(starts > _read_cursor(cursor))
        found = self._newest(ref, newest.order_by(starts).limit(limit + 1))
        if len(found) <= limit:
            return found, None
        return found[:limit], str(found[limit - 1].window_start_ms)

    def at(self, ref: QueryRef, time_ms: int) -> list[AnswerRecord]:
        """The newest revision of each window that contains the event time, ascending."""
        starts, ends = t.answers.c.window_start_ms, t.answers.c.window_end_ms
        begun = _standing(ref).where(starts <= time_ms)
        # Windows of a query are of one size, or do not overlap. So the last one that has begun by then
        # bounds where those over `time_ms` begin.
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
        """The revisions that were given of a window, ascending; none if it has no answer."""
        rows = select(t.answers.c.revision).where(
            t.answers.c.query == query_key(ref), t.answers.c.window_start_ms == window_start_ms
        )
        with read_transaction(self._engine) as connection:
            return list(connection.execute(rows.order_by(t.answers.c.revision)).scalars())

    def answers_after(self, answer_id: int, limit: int, query: QueryRef | None = None) -> list[AnswerRecord]:
        """Answers given after the one of that id, ascending; of one query or of all."""
        rows = select(t.answers).where(t.answers.c.answer_id > answer_id)
        if query is not None:
            rows = rows.where(t.answers.c.query == query_key(query))
        return self._answers(rows.order_by(t.answers.c.answer_id).limit(limit))

    def last_answer_id(self) -> int:
        """The id of the last answer that was given, 0 before the first."""
        with read_transaction(self._engine) as connection:
            return _counter(connection, "answer")

    def shipped(self, ref: QueryRef) -> dict[str, dict[str, int]]:
        """By edge, the ``frames`` and ``wire_bytes`` that were applied."""
        rows = select(t.shipped.c.edge, t.shipped.c.frames, t.shipped.c.wire_bytes)
        rows = rows.where(t.shipped.c.query == query_key(ref)).order_by(t.shipped.c.edge)
        with read_transaction(self._engine) as connection:
            return {edge: {"frames": n, "wire_bytes": size} for edge, n, size in connection.execute(rows)}

    def _newest(self, ref: QueryRef, newest: Any) -> list[AnswerRecord]:
        """The answers of (window_start_ms, revision) as `newest` selects them."""
        chosen = newest.subquery()
        here = (
            (t.answers.c.query == query_key(ref))
            & (t.answers.c.window_start_ms == chosen.c.window_start_ms)
            & (t.answers.c.revision == chosen.c.revision)
        )
        return self._answers(select(t.answers).join(chosen, here).order_by(t.answers.c.window_start_ms))

    def _answers(self, rows: Any) -> list[AnswerRecord]:
        with read_transaction(self._engine) as connection:
            return [_record(row) for row in connection.execute(rows)]


def _standing(ref: QueryRef) -> Select[Any]:
    """(window_start_ms, revision) of the newest answer of each window, but of those that are empty now."""
    answers = t.answers.c
    not_empty = case((answers.window_end_ms > answers.window_start_ms, answers.revision))
    newest = select(answers.window_start_ms, func.max(answers.revision).label("revision"))
    newest = newest.where(answers.query == query_key(ref)).group_by(answers.window_start_ms)
    return newest.having(func.max(answers.revision) == func.max(not_empty))


def _record(row: Row[Any]) -> AnswerRecord:
    return AnswerRecord(
        answer_id=row.answer_id,
        query=query_from_key(row.query),
        window_start_ms=row.window_start_ms,
        window_end_ms=row.window_end_ms,
        revision=row.revision,
        phase=Phase(row.phase),
        given_at_ms=row.given_at_ms,
        staleness_ms=row.staleness_ms,
        quality=json.loads(row.quality),
        synopsis=row.synopsis,
    )


def _counter(connection: Connection, name: str) -> int:
    return int(connection.execute(select(t.counters.c.value).where(t.counters.c.name == name)).scalar_one())


def _positions(connection: Connection) -> dict[str, int]:
    positions: dict[str, int] = dict(connection.execute(select(t.consumed.c.query, t.consumed.c.position)).all())
    return positions


def _not_applied(consumed: Mapping[str, int], through: Mapping[str, int], facts: Iterable[FrameFact]) -> set[str]:
    """The queries of the batch that were not applied before. Raises Conflict for half and half."""
    new = {key for key, position in through.items() if position > consumed.get(key, 0)}
    for fact in facts:
        key = query_key(fact.query)
        if key not in through or fact.position > through[key]:
            raise StorageError(f"query {key}: a frame at {fact.position}, the batch goes through {through.get(key)}")
        if key in new and fact.position <= consumed.get(key, 0):
            raise Conflict(
                f"query {key}: the frame at {fact.position} has been applied, and the batch goes through"
                f" {through[key]}: its partials must be left out before merging"
            )
    return new


def _applicable(
    ledger: Ledger, deltas: Iterable[MergedDelta], facts: Iterable[FrameFact], through: Mapping[str, int]
) -> list[MergedDelta]:
    """The deltas that some window still wants: a final one changes no more, a deleted query has none."""
    touched = {(f.query, start) for f in facts for start in f.touched}
    kept = []
    for delta in deltas:
        if (delta.query, delta.slice_start_ms) not in touched:
            # No window would ever be answered from it: the data would be lost without a trace.
            raise StorageError(
                f"query {query_key(delta.query)}: a delta of slice {delta.slice_start_ms}, which no frame touched"
            )
        if not ledger.is_deleted(delta.query) and delta.slice_start_ms >= ledger.sealed_before(delta.query):
            kept.append(delta)
    return kept


def _read_cursor(cursor: str) -> int:
    try:
        return int(cursor)
    except ValueError as exc:
        raise InvalidRequest("cursor", cursor, "the cursor that an earlier answer carried") from exc
