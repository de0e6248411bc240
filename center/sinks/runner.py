"""`SinkRunner` writes the answers of the result store to one sink.

A sink stores its position itself, together with the answers that it writes. `SinkStore` has a copy of the position,
only for operators and for the retention of answers.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from center.catalog import Catalog
from center.ledger import Phase, late_counts
from center.results import AnswerReader, AnswerRecord, LeaseLost
from center.serving.answer_tables import empty_table, has_types, stated_answer, with_types, without_zone
from center.sinks.base import Position, Sink, SinkAnswer, SinkContext, SinkQuery
from center.sinks.definitions import SinkDefinition, masked
from center.sinks.store import Aside, SinkStatus, SinkStore
from edgewater.model.errors import EdgewaterError, StorageError
from edgewater.model.registered_query import RegisteredQuery
from edgewater.model.streams import EdgeId
from edgewater.wire import QueryRef

log = logging.getLogger(__name__)

LEASE_MS = 3_000
POLL_S = 0.1
STANDBY_S = 1.0
RENEW_MS = 1_000
LOOK_MS = 1_000
"""The time in ms between two reads of the queries, and between two checks of a sink that does not run."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
MAX_ANSWERS = 500
"""The most answers in a page."""
PAGE_BYTES = 16 << 20
"""A page ends when its answers have this number of bytes of merged data."""
LATE_ANSWERS = 50
"""The most final answers with late records that are read at once."""
ALARM_FAILURES = 2
"""Number of consecutive failures that raises an alarm. One lost connection raises no alarm."""
PARTIAL_MS = 60_000
"""The time in ms for which a part of a sink, such as one target of alerts, may fail before an alarm is raised."""
MAX_REMEMBERED = 100_000
MAX_REVISIONS = 20
"""The most earlier revisions whose groups are compared with the groups of the newest revision."""


@dataclass(frozen=True, slots=True)
class ReadQuery:
    """A query whose answers are read for a sink."""

    registered: RegisteredQuery
    of_sink: SinkQuery

    def typed(self, catalog: Catalog) -> ReadQuery:
        """Returns the query with the types of its answers. Called when the query has answers."""
        return self if self.of_sink.is_typed else read_query(self.registered, catalog, has_answers=True)


def read_query(query: RegisteredQuery, catalog: Catalog, *, has_answers: bool = False) -> ReadQuery:
    """Returns a query in the form that sinks get.

    Args:
        has_answers: whether the query has answers. The catalog then has all the types of its columns that it will get.
    """
    is_typed = has_answers or has_types(catalog, query.spec)
    schema = empty_table(catalog, query.spec).schema
    return ReadQuery(query, SinkQuery(query.ref, query.spec, schema, is_typed))


class SinkRunner:
    """Runs one sink. One thread calls `step` repeatedly.

    Args:
        owner: name of this process in the lease of the sink.
        now_ms: returns the wall time.
        monotonic: returns the seconds of a clock that nobody sets.
        is_stored: whether the API has defined the sink. If the API deletes the sink, the runner stops.
    """

    def __init__(
        self,
        definition: SinkDefinition,
        catalog: Catalog,
        results: AnswerReader,
        store: SinkStore,
        *,
        owner: str,
        now_ms: Callable[[], int],
        monotonic: Callable[[], float] = time.monotonic,
        is_stored: bool = False,
    ) -> None:
        self.definition = definition
        self._is_stored = is_stored
        self._catalog, self._results, self._store = catalog, results, store
        self._owner, self._now_ms, self._monotonic = owner, now_ms, monotonic
        self._epoch: int | None = None
        self._renewed_ms = self._looked_ms = 0
        self._status: SinkStatus | None = None
        self._sink: Sink | None = None
        self._position = Position()
        self._is_current = False
        self._queries: dict[QueryRef, ReadQuery] = {}
        self._seen: set[QueryRef] = set()
        self._replayed: int | None = None
        self._trimmed = 0
        self._gap: tuple[int, int] | None = None
        self._alarmed_since_ms = 0
        self._may_have_alarm = True  # an earlier process may have raised it
        self._failures = 0
        self._asides: dict[QueryRef, Aside] = {}
        self._refused: int | None = None
        self._tried_ms = 0
        # Per window, `late_counts` of the final answer that the sink has.
        self._late: dict[tuple[QueryRef, int], tuple[int, ...]] = {}

    @property
    def problem(self) -> str:
        """Why the last attempt failed; empty if it did not fail."""
        return self._status.problem if self._status is not None else ""

    def step(self) -> float:
        """Writes at most one page. Returns the time until the next call, in seconds. Never raises."""
        try:
            pause_s = self._step()
        except LeaseLost as exc:
            log.warning("%s", exc.message)
            self._give_up()
            return STANDBY_S
        except Exception as exc:  # a sink of a package may raise any exception, which must not stop other sinks
            return self._failed(exc)
        self._failures = 0
        if self._may_have_alarm and not self.problem:
            self._end_alarm()
        return pause_s

    def stop(self) -> None:
        """Closes the sink, and frees its lease for another process."""
        self._close()
        if self._epoch is not None:
            try:
                self._store.release(self.definition.name, self._epoch)
            except EdgewaterError as exc:
                log.warning("sink %s: the lease could not be freed: %s", self.definition.name, exc)
            self._epoch = None

    def _step(self) -> float:
        now_ms, name = self._now_ms(), self.definition.name
        if self._epoch is None:
            self._epoch = self._store.take(name, self._owner, now_ms, LEASE_MS, adds=not self._is_stored)
            if self._epoch is None:
                return STANDBY_S
            log.info("sink %s: this process runs it, epoch %d", name, self._epoch)
            self._gap, self._asides = self._store.status(name).gap, self._store.asides(name)
            self._report()
        elif abs(now_ms - self._renewed_ms) >= RENEW_MS:  # the wall clock may have stepped back
            self._report()
        assert self._status is not None
        if self._status.paused:
            self._close()
            return LOOK_MS / 1000
        if self._status.replay_after is not None:
            self._close()
        if self._sink is None or abs(now_ms - self._looked_ms) >= LOOK_MS:
            self._open(now_ms)
        if self._asides and abs(now_ms - self._tried_ms) >= LONGEST_PAUSE_S * 1000:
            self._try_asides()
        pause_s = self._copy_page()
        if (tick := getattr(self._sink, "tick", None)) is not None:
            tick(self._is_current)
        return pause_s

    def _open(self, now_ms: int) -> None:
        """Opens the sink. If it is open, opens it again only if its queries have changed."""
        self._looked_ms = now_ms
        queries = self._catalog.queries.all()
        self._seen = {query.ref for query in queries}
        wanted = {q.ref: q for q in queries if self.definition.includes(q.ref.name)}
        if self._sink is not None and wanted.keys() == self._queries.keys():
            return
        if self._sink is None:
            self._sink = self._new_sink()
        self._queries = {ref: read_query(q, self._catalog) for ref, q in wanted.items()}
        assert self._status is not None
        if self._status.replay_after is not None or any(ref not in wanted for ref in self._asides):
            is_replay = self._status.replay_after is not None
            self._set_asides({} if is_replay else {r: a for r, a in self._asides.items() if r in wanted})
        stored = self._open_sink()
        if self._status.replay_after is not None:
            self._replayed = self._status.replay_after
            self._position = Position(self._replayed, -1)
            self._late.clear()
        elif stored is not None:
            self._position = stored
        else:
            self._position = Position(*self._results.newest()) if self.definition.begins_now else Position()
            self._sink.write([], self._position)

    def _new_sink(self) -> Sink:
        assert self._epoch is not None
        memory = self._store.memory(self.definition.name, self._epoch)
        context = SinkContext(self.definition.name, self._epoch, memory, self._now_ms, self._monotonic, self._catalog)
        return cast("Sink", _Contained(self.definition.make(context)))

    def _open_sink(self) -> Position | None:
        """Opens the sink. If that fails again, opens it with each query alone, and sets aside the queries that fail."""
        assert self._sink is not None
        wanted = {ref: q.of_sink for ref, q in self._queries.items()}
        try:
            return self._sink.open([q for ref, q in wanted.items() if ref not in self._asides])
        except LeaseLost:
            raise
        except Exception:
            if not self._failures:
                raise
        stored = self._reopened([])
        problems = {}
        for ref, query in wanted.items():
            try:
                self._sink.open([query])
            except LeaseLost:
                raise
            except Exception as exc:
                problems[ref] = self._reason(exc)
                self._reopened([])
        if problems:
            has = self._position if stored is None else stored
            self._set_asides({ref: Aside(has.answer_id, p) for ref, p in problems.items()} | self._asides)
        return self._sink.open([q for ref, q in wanted.items() if ref not in self._asides])

    def _reopened(self, queries: Iterable[QueryRef]) -> Position | None:
        """Opens a new sink after a failure of one query. Raises an exception if the system cannot be used at all."""
        assert self._sink is not None
        with suppress(Exception):
            self._sink.close()
        self._sink = self._new_sink()
        return self._sink.open([self._queries[ref].of_sink for ref in queries])

    def _set_asides(self, queries: dict[QueryRef, Aside]) -> None:
        assert self._epoch is not None
        self._store.set_asides(self.definition.name, self._epoch, queries)
        self._asides = queries

    def _write_each(self, records: Sequence[AnswerRecord], position: Position) -> None:
        """Writes a page after a failure, query by query. A query that fails while the system accepts others is set
        aside: its answers are written when the cause is gone.
        """
        for ref in dict.fromkeys(record.query for record in records):
            try:
                self._write([r for r in records if r.query == ref], self._position)
            except LeaseLost:
                raise
            except Exception as exc:
                self._reopened(r for r in self._queries if r not in {ref, *self._asides})
                assert self._sink is not None
                self._sink.write([], self._position)
                log.warning("sink %s: query %s is set aside: %s", self.definition.name, ref, self._reason(exc))
                self._set_asides({**self._asides, ref: Aside(self._position.answer_id, self._reason(exc))})
        self._write([], position)

    def _try_asides(self) -> None:
        """Writes the next page of each set-aside query."""
        self._tried_ms = self._now_ms()
        for ref, aside in list(self._asides.items()):
            others = [r for r in self._queries if r not in self._asides]
            try:
                self._reopened([*others, ref])
                page = self._results.changes_after(aside.answer_id, MAX_ANSWERS, max_bytes=PAGE_BYTES).records
                page = [r for r in page if r.answer_id <= self._position.answer_id]
                self._write([r for r in page if r.query == ref and self._wants(r)], self._position)
                last = page[-1].answer_id if page else self._position.answer_id
            except LeaseLost:
                raise
            except Exception as exc:
                self._reopened(others)
                self._set_asides({**self._asides, ref: Aside(aside.answer_id, self._reason(exc))})
            else:
                rest = {r: a for r, a in self._asides.items() if r != ref}
                has_more = last < self._position.answer_id
                self._set_asides({**rest, ref: aside._replace(answer_id=last)} if has_more else rest)
                self._tried_ms = 0 if has_more else self._tried_ms

    def _open_typed(self, refs: Iterable[QueryRef]) -> None:
        """Opens the sink again if it was opened without the types of these queries, which have answers now."""
        assert self._sink is not None
        untyped = [ref for ref in refs if not self._queries[ref].of_sink.is_typed]
        if untyped:
            for ref in untyped:
                self._queries[ref] = self._queries[ref].typed(self._catalog)
            opened = {*refs, *(ref for ref in self._queries if ref not in self._asides)}
            self._sink.open([q.of_sink for ref, q in self._queries.items() if ref in opened])

    def _copy_page(self) -> float:
        assert self._sink is not None
        self._is_current = False
        newest = Position(*self._results.newest())
        # After a restore of the center from a backup, new ids are above all earlier ids. So a sink that is ahead has
        # answers of another center.
        if self._position.answer_id > newest.answer_id:
            raise StorageError(
                f"the sink has answers up to {self._position.answer_id}, the center only up to {newest.answer_id}:"
                " another center wrote to the sink, or this center wrote to it before an older backup was restored"
            )
        if self._position.answer_id < newest.answer_id:
            if self._waits(newest):
                return POLL_S
            self._write_new(newest)
            return 0.0
        if self._position.late != newest.late:
            self._write_late(newest)
            return 0.0
        self._is_current = True
        return POLL_S

    def _waits(self, newest: Position) -> bool:
        """Returns whether the new answers wait for further answers of the same batch."""
        batch_ms = self.definition.batch_ms
        if not batch_ms or newest.answer_id - self._position.answer_id >= MAX_ANSWERS:
            return False
        given_at_ms = self._results.answered_at_after(self._position.answer_id)
        return given_at_ms is not None and abs(self._now_ms() - given_at_ms) < batch_ms

    def _write_new(self, newest: Position) -> None:
        changes = self._results.changes_after(self._position.answer_id, MAX_ANSWERS, max_bytes=PAGE_BYTES)
        if self._results.trimmed() != self._trimmed:
            self._report()  # before the write, because answers that were deleted before the read are a gap
        answered = {record.query for record in changes.records}
        if not answered <= self._seen:
            self._open(self._now_ms())  # a query was registered since
            self._seen |= answered  # a query that is deleted does not come again
        records = [r for r in changes.records if self._wants(r) and r.query not in self._asides]
        # If there are no records, the answers after the position have been deleted.
        last = changes.records[-1].answer_id if changes.records else newest.answer_id
        write = self._write_each if self._failures and records else self._write
        write(records, Position(last, self._position.late))

    def _write_late(self, newest: Position) -> None:
        """Writes a final answer again if the numbers of its late records have changed."""
        for ref in [ref for ref in self._queries if ref not in self._asides]:
            for records in self._final_with_late(ref):
                self._write(records, self._position)
        self._write([], Position(self._position.answer_id, newest.late))

    def _final_with_late(self, ref: QueryRef) -> Iterator[list[AnswerRecord]]:
        for page in self._results.with_late_records(ref, LATE_ANSWERS):
            changed = [
                r for r in page if self._wants(r) and self._late.get((ref, r.window_start_ms)) != late_counts(r.quality)
            ]
            if changed:
                yield changed

    def _wants(self, record: AnswerRecord) -> bool:
        return record.query in self._queries and record.phase.rank >= self.definition.min_phase.rank

    def _write(self, records: Sequence[AnswerRecord], position: Position) -> None:
        assert self._sink is not None
        self._open_typed({record.query for record in records})
        answers = [self._answer(record) for record in records]
        self._sink.write(answers, position)
        self._position = position
        if len(self._late) > MAX_REMEMBERED:
            self._late.clear()
        self._late.update(
            {
                (r.query, r.window_start_ms): late_counts(r.quality)
                for r in records
                if r.phase is Phase.FINAL and any(late_counts(r.quality))
            }
        )
        self._report(len(answers), sum(a.rows.num_rows for a in answers))

    def _answer(self, record: AnswerRecord) -> SinkAnswer:
        query = self._queries[record.query]
        answer = sink_answer(record, query)
        return answer if record.revision == 1 else replace(answer, removed=lambda: self._removed(record, answer, query))

    def _removed(self, record: AnswerRecord, answer: SinkAnswer, query: ReadQuery) -> list[dict[str, Any]]:
        """Returns the groups of earlier revisions that the newest revision lacks."""
        earlier = [r for r in self._results.revisions(record.query, record.window_start_ms) if r < record.revision]
        now, gone = set(_groups(answer)), dict[tuple[Any, ...], None]()
        for revision in earlier[-MAX_REVISIONS:]:
            before = sink_answer(self._results.answer(record.query, record.window_start_ms, revision), query)
            gone |= dict.fromkeys(key for key in _groups(before) if key not in now)
        return [dict(zip(answer.group_columns, key, strict=True)) for key in gone]

    def _report(self, answers: int = 0, rows: int = 0, problem: str = "") -> None:
        assert self._epoch is not None
        now_ms, self._trimmed = self._now_ms(), self._results.trimmed()
        own = None if self._sink is None else self._own_problem()
        self._status = self._store.report(
            self.definition.name,
            self._epoch,
            now_ms + LEASE_MS,
            position=self._position if self._sink is not None and not problem else None,
            replayed=self._replayed,
            answers=answers,
            rows=rows,
            trimmed=self._trimmed,
            problem=problem or own,
            now_ms=now_ms,
        )
        self._renewed_ms, self._replayed = now_ms, None
        if self._status.gap != self._gap and self._status.gap is not None:
            first, last = self._status.gap
            self._alarm("sink-gap", f"the answers {first} to {last} were deleted before the sink had them")
        self._gap = self._status.gap
        refused = getattr(self._sink, "refused", 0)
        if self._refused is not None and refused > self._refused:
            self._alarm(
                "sink-refused", f"its system has refused {refused - self._refused} samples, which are lost there"
            )
        self._refused = refused if self._sink is not None else self._refused
        since_ms = self._status.problem_since_ms
        if own and not problem and abs(now_ms - since_ms) >= PARTIAL_MS and since_ms != self._alarmed_since_ms:
            self._alarmed_since_ms = since_ms
            self._alarm("sink-failing", "a part of the sink does not work; `edgewater sinks show` says why")

    def _own_problem(self) -> str:
        """Returns why a part of the sink does not work: a part that the sink names, or queries that are set aside."""
        parts = [getattr(self._sink, "problem", "")]
        for ref, aside in self._asides.items():
            parts.append(f"query {ref.name}@{ref.version}, after the answer {aside.answer_id}: {aside.problem}")
        return "; ".join(filter(None, parts))

    def _end_alarm(self) -> None:
        try:
            self._catalog.alarms.end("sink-failing", EdgeId(""), about=f"sink {self.definition.name}: ")
            self._may_have_alarm = False
        except EdgewaterError as exc:
            log.warning("sink %s: its alarm cannot be removed: %s", self.definition.name, exc)

    def _alarm(self, kind: str, message: str) -> None:
        self._may_have_alarm |= kind == "sink-failing"
        try:
            text = f"sink {self.definition.name}: {message}"
            self._catalog.alarms.add(kind, text, EdgeId(""), self._now_ms())
        except EdgewaterError as exc:
            log.warning("sink %s: no alarm %s can be stored: %s", self.definition.name, kind, exc)

    def _failed(self, exc: Exception) -> float:
        self._failures += 1
        reason, is_foreign = self._reason(exc), not isinstance(exc, EdgewaterError)
        if self._failures == 1:
            trace = "".join(traceback.format_exception(exc)) if is_foreign else ""
            log.warning("sink %s: %s", self.definition.name, masked(trace, self.definition.options) or reason)
        self._close()
        if self._failures >= ALARM_FAILURES:
            self._alarm("sink-failing", reason)
        try:
            if self._epoch is not None:
                self._report(problem=reason)
        except LeaseLost:
            self._give_up()
        except EdgewaterError as other:
            log.warning("sink %s: its state cannot be stored: %s", self.definition.name, other)
        return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._failures - 1, 20)))

    def _reason(self, exc: Exception) -> str:
        text = exc.message if isinstance(exc, EdgewaterError) else f"{type(exc).__name__}: {exc}"
        return masked(text, self.definition.options)

    def _give_up(self) -> None:
        self._close()
        self._epoch, self._status = None, None

    def _close(self) -> None:
        sink, self._sink, self._queries = self._sink, None, {}
        if sink is not None:
            try:
                sink.close()
            except Exception:
                log.exception("sink %s: it could not be closed", self.definition.name)


class _Contained:
    """A sink whose library may panic. The panic of a library in Rust is no `Exception`, and would end all sinks."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._sink, name)
        return partial(self._call, value) if callable(value) else value

    @staticmethod
    def _call(method: Callable[..., Any], *args: Any) -> Any:
        try:
            return method(*args)
        except (Exception, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as exc:
            raise RuntimeError(f"{type(exc).__name__}: {exc}") from exc


def _groups(answer: SinkAnswer) -> list[tuple[Any, ...]]:
    columns = [answer.rows.column(name).to_pylist() for name in answer.group_columns]
    return list(zip(*columns, strict=True)) if columns else [()] * answer.rows.num_rows


def sink_answer(record: AnswerRecord, query: ReadQuery) -> SinkAnswer:
    """Returns an answer in the form that sinks get."""
    table, statement = stated_answer(record, query.registered)
    rows = with_types(without_zone(table), query.of_sink.schema)
    if record.synopsis is None and query.registered.spec.group_by:
        rows = rows.slice(0, 0)  # the only row says that an answer exists; the statement says it, too
    return SinkAnswer(
        record.query,
        record.window_start_ms,
        record.window_end_ms,
        record.revision,
        record.phase,
        record.answered_at_ms,
        record.answer_id,
        rows,
        statement,
        tuple(query.registered.spec.group_by),
    )
