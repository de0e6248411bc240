"""`SinkRunner` writes the answers of the result store to one sink.

A target has a position per query, which it stores together with the answers. The runner reads the answers of all
queries in the order of their ids, up to one id, `SinkStatus.answer_id`. A query that lacks answers up to this id, such
as a query that the target refuses, waits: its answers are read and written apart from those of other queries.
`SinkStore` has this id and the waiting queries, for operators and for the retention of answers.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import pyarrow as pa

from center.catalog import Catalog
from center.results import AnswerReader, AnswerRecord, LeaseLost
from center.serving.answer_tables import empty_table, has_types, stated_answer
from center.sinks.base import Sink, SinkAnswer, SinkQuery
from center.sinks.definitions import SinkDefinition, masked
from center.sinks.store import SinkStatus, SinkStore, WaitingQuery
from edgewater.answers import Cause
from edgewater.base.errors import EdgewaterError, StorageError, UnsupportedVersion, plain
from edgewater.base.streams import EdgeId
from edgewater.base.timestamps import rfc3339
from edgewater.model.json_types import Group
from edgewater.model.registered_query import RegisteredQuery, query_key
from edgewater.wire import QueryRef

log = logging.getLogger(__name__)

LEASE_MS = 3_000  # limit: time of a takeover
POLL_S = 0.1  # limit: reads at rest
STANDBY_S = 1.0  # limit: reads at rest
RENEW_MS = 1_000  # limit: writes at rest
LOOK_MS = 1_000  # limit: reads at rest
"""The time in ms between two reads of the queries, and between two checks of a sink that does not run."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # limit: attempts while a target fails
MAX_ANSWERS = 500
"""The most answers in a page."""
PAGE_BYTES = 16 << 20  # limit: memory of a page
"""A page ends when its answers have this number of bytes of merged data."""
ALARM_FAILURES = 2  # limit: number of alarms
"""Number of consecutive failures that raises an alarm. One lost connection raises no alarm."""
PARTIAL_MS = 60_000  # limit: number of alarms
"""The time in ms for which a part of a sink, such as one target of alerts, may fail before an alarm is raised."""
MAX_STATED = 5
"""The most failing queries that the problem of a sink names. `SinkStatus.waiting` has all of them."""
MAX_REVISIONS = 20
"""The most earlier revisions whose groups are compared with the groups of the newest revision."""


def read_query(query: RegisteredQuery | SinkQuery, catalog: Catalog, *, has_answers: bool = False) -> SinkQuery:
    """Returns a query in the form that sinks get.

    Args:
        has_answers: whether the query has answers. The catalog then has all the types of its columns that it will get.
    """
    is_typed = has_answers or has_types(catalog, query.spec)
    return SinkQuery(query.ref, query.spec, empty_table(catalog, query.spec).schema, is_typed)


@dataclass(slots=True)
class _Progress:
    """The progress of one query.

    Attributes:
        has: id of the last answer that the target has, as far as known.
        replay_after: the position that the query gets when it is opened; None: the position in the target.
        is_known: whether the target has been asked for its position.
        lacks: whether the target lacks answers up to `SinkStatus.answer_id`.
        waits: whether the answers are written apart from those of other queries. True if `lacks`, or after a failure.
        limit: number of answers that are written at once.
        turn: the queries that wait take turns.
        pause_ms: the time from `tried_ms` until the query is tried again.
    """

    query: SinkQuery
    has: int
    replay_after: int | None = None
    is_known: bool = False
    lacks: bool = False
    waits: bool = False
    limit: int = MAX_ANSWERS
    turn: int = 0
    problem: str = ""
    since_ms: int = 0
    failures: int = 0
    tried_ms: int = 0
    pause_ms: float = 0


def _pause_s(failures: int) -> float:
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures - 1, 20)))


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
        self._through: int | None = None
        self._queries: dict[QueryRef, _Progress] = {}
        self._opened: set[QueryRef] = set()
        self._seen: set[QueryRef] = set()
        self._stated: dict[QueryRef, WaitingQuery] = {}
        self._replayed: int | None = None
        self._trimmed = 0
        self._gap: tuple[int, int] | None = None
        self._alarmed_since_ms = 0
        self._may_have_alarm = True  # an earlier process may have raised it
        self._failures = 0
        self._refused = 0
        self._written: Counter[str] = Counter()

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
            status = self._store.report(name, self._epoch, now_ms + LEASE_MS)
            self._gap, self._stated = status.gap, dict(status.waiting)
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
            self._look(now_ms)
        has_tried = self._try_waiting(now_ms)
        has_written, is_current = self._copy_page()
        if (tick := getattr(self._sink, "tick", None)) is not None:
            tick(is_current and not any(q.waits for q in self._queries.values()))
        return 0.0 if has_tried or has_written else POLL_S

    def _look(self, now_ms: int) -> None:
        """Reads the queries. Opens the sink if it is closed, and opens new queries."""
        self._looked_ms = now_ms
        queries = self._catalog.queries.all()
        self._seen = {query.ref for query in queries}
        wanted = {q.ref: q for q in queries if self.definition.includes(q.ref.name)}
        gone, new = self._queries.keys() - wanted.keys(), [ref for ref in wanted if ref not in self._queries]
        is_changed = self._sink is None or bool(gone or new)
        for ref in gone:
            del self._queries[ref]
        if self._sink is None:
            self._sink = self._new_sink()
        assert self._status is not None
        if self._through is None:
            self._through = self._results.last_answer_id()
        begin = self._through if self.definition.begins_now else 0
        has = self._status.answer_id if self._status.answer_id >= 0 else begin
        for ref in new:
            before = self._stated.get(ref, WaitingQuery(has))
            self._queries[ref] = _Progress(
                read_query(wanted[ref], self._catalog), before.answer_id, self._status.replay_after,
                since_ms=before.problem_since_ms,
            )  # fmt: skip
        if is_changed:
            try:
                self._open(new)
            except TargetFailed as exc:
                self._reopen()
                self._blame(new, exc)
            self._follow()
            if self._status.replay_after is not None:
                self._replayed = self._status.replay_after
            self._report()

    def _new_sink(self) -> Sink:
        assert self._epoch is not None
        target = getattr(self.definition.options, "target", "")
        stored = self._store.context(self.definition.name, self._epoch, self._now_ms, target)
        context = replace(stored, monotonic=self._monotonic, catalog=self._catalog)
        self._opened, self._refused = set(), 0
        return cast("Sink", _Contained(self.definition.make(context)))

    def _open(self, refs: Sequence[QueryRef]) -> None:
        """Opens queries, and reads their positions. A query that lacks answers begins to wait."""
        assert self._sink is not None
        stored = dict(self._sink.open([self._queries[ref].query for ref in refs]))
        self._opened |= set(refs)
        if replayed := {ref: after for ref in refs if (after := self._queries[ref].replay_after) is not None}:
            self._sink.write([], replayed)
            stored |= replayed
        newest, last = self._results.newest_of(refs)
        if ahead := [ref for ref in refs if stored.get(ref, 0) > newest]:
            # After a restore of the center from a backup, new ids are above all earlier ids.
            reason = StorageError(
                f"the target has answers to {query_key(ahead[0])} up to {stored[ahead[0]]}, the center only up to"
                f" {newest}: a copy of this center wrote there, or an older backup was restored without"
                " `edgewater center restore`; let the sink write to another place, or write all answers again with"
                " `edgewater sinks replay`"
            )
            raise TargetFailed(str(reason)) from reason
        for ref in refs:
            query, has = self._queries[ref], stored.get(ref)
            if not query.is_known:
                begin = query.has if self.definition.begins_now else 0
                query.has, query.is_known = begin if has is None else has, True
            elif has is not None:  # the confirmation of a write may have been lost
                query.has = max(query.has, has)
            query.replay_after = None
            query.lacks = last.get(ref, 0) > query.has
            query.waits |= query.lacks

    def _open_needed(self, refs: Iterable[QueryRef]) -> None:
        """Opens the queries that are not open, or that were opened without the types of their answers."""
        needed = [r for r in refs if r not in self._opened or not self._queries[r].query.is_typed]
        if needed:
            for ref in needed:
                each = self._queries[ref]
                if not each.query.is_typed:
                    each.query = read_query(each.query, self._catalog, has_answers=True)
            self._open(needed)
            self._follow()

    def _follow(self) -> None:
        if (follow := getattr(self._sink, "follow", None)) is not None:
            follow([each.query for each in self._queries.values()])

    def _reopen(self) -> None:
        """Opens a new sink after a failure, without a query.

        Raises:
            TargetFailed: the target cannot be used at all.
        """
        if self._sink is not None:
            with suppress(TargetFailed):
                self._sink.close()
        self._sink = self._new_sink()
        self._sink.open([])
        self._follow()

    def _blame(self, refs: Sequence[QueryRef], exc: TargetFailed, records: Sequence[AnswerRecord] = ()) -> None:
        """Lets queries wait after a failure. If it was one query, the failure is its own. It is then tried again with
        fewer answers, to find the one that fails, and after a pause if it was one answer.
        """
        _, last = self._results.newest_of(refs)
        for ref in refs:
            query = self._queries[ref]
            query.waits, query.lacks = True, last.get(ref, 0) > query.has
        if len(refs) != 1:
            return
        reason, now_ms = self._reason(exc), self._now_ms()
        if not query.problem:
            log.warning("sink %s: query %s: %s", self.definition.name, query_key(ref), reason)
        query.since_ms, query.tried_ms = query.since_ms or now_ms, now_ms
        if len(records) > 1:
            query.problem, query.limit = reason, len(records) // 2
        else:
            windows = [f"window {rfc3339(record.window_start_ms)}: " for record in records]
            query.problem, query.failures = "".join([*windows, reason]), query.failures + 1
            query.pause_ms = 1000 * _pause_s(query.failures)

    def _try_waiting(self, now_ms: int) -> bool:
        """Writes the next answers of one waiting query. Returns whether a query was due."""
        due = [ref for ref, q in self._queries.items() if q.waits and abs(now_ms - q.tried_ms) >= q.pause_ms]
        if not due:
            return False
        ref = min(due, key=lambda each: self._queries[each].turn)
        query, records = self._queries[ref], list[AnswerRecord]()
        query.turn = 1 + max(each.turn for each in self._queries.values())
        if self.definition.batch_ms and query.lacks and not query.problem:
            count, _, first_ms = self._results.lag(ref, query.has, 0)
            rest_ms = self.definition.batch_ms - abs(now_ms - (first_ms or 0))
            if rest_ms > 0 and count < MAX_ANSWERS:
                query.tried_ms, query.pause_ms = now_ms, rest_ms
                return True
        try:
            self._open_needed([ref])
            read = self._results.changes_after(query.has, query.limit, ref, max_bytes=PAGE_BYTES).records
            records = [record for record in read if self._wants(record)]
            if records:
                self._write(records, {ref: read[-1].answer_id})
        except TargetFailed as exc:
            self._reopen()
            self._blame([ref], exc, records)
        else:
            assert self._through is not None
            query.has = read[-1].answer_id if read else max(query.has, self._through)
            query.limit, query.failures, query.pause_ms = min(MAX_ANSWERS, 2 * query.limit), 0, 0
            query.waits = query.lacks = query.has < self._through
            query.problem, query.since_ms = "", 0
        self._report()
        return True

    def _copy_page(self) -> tuple[bool, bool]:
        """Writes a page of the queries that do not wait. Returns whether there was one, and whether none is left."""
        if self._through is None:  # no query was ever opened
            return False, False
        newest = self._results.last_answer_id()
        if self._through >= newest:
            return False, True
        if self._is_batch_open(newest):
            return False, False
        self._write_new(newest)
        return True, False

    def _is_batch_open(self, newest: int) -> bool:
        """Returns whether the new answers wait for further answers of the same batch."""
        batch_ms = self.definition.batch_ms
        if not batch_ms or self._through is None or newest - self._through >= MAX_ANSWERS:
            return False
        given_at_ms = self._results.answered_at_after(self._through)
        return given_at_ms is not None and abs(self._now_ms() - given_at_ms) < batch_ms

    def _write_new(self, newest: int) -> None:
        assert self._through is not None
        changes = self._results.changes_after(self._through, MAX_ANSWERS, max_bytes=PAGE_BYTES)
        if self._results.trimmed() != self._trimmed:
            self._report()  # before the write, because answers that were deleted before the read are a gap
        answered = {record.query for record in changes.records}
        if not answered <= self._seen:
            self._look(self._now_ms())  # a query was registered since
            self._seen |= answered  # a query that is deleted does not come again
        records = [r for r in changes.records if self._wants(r) and r.answer_id > self._queries[r.query].has]
        for record in records:
            query = self._queries[record.query]
            if not query.lacks:
                # Not the id before the record: a correction may have the data of any answer of this page.
                query.has = max(query.has, self._through)
                query.lacks = query.waits
        records = [r for r in records if not self._queries[r.query].waits]
        positions = {record.query: record.answer_id for record in records}
        try:
            if records:
                self._write(records, positions)
        except TargetFailed as exc:
            self._reopen()
            self._blame(list(positions), exc, records)
        else:
            for ref, answer_id in positions.items():
                self._queries[ref].has = answer_id
        # If there are no records, the answers after the position have been deleted.
        self._through = changes.records[-1].answer_id if changes.records else newest
        self._report()

    def _wants(self, record: AnswerRecord) -> bool:
        return record.query in self._queries and record.phase.rank >= self.definition.min_phase.rank

    def _write(self, records: Sequence[AnswerRecord], positions: Mapping[QueryRef, int]) -> None:
        assert self._sink is not None
        self._open_needed(dict.fromkeys(record.query for record in records))
        answers = [self._answer(record) for record in records]
        self._sink.write(answers, positions)
        refused = getattr(self._sink, "refused", 0)
        self._written += Counter(
            answers=len(answers), rows=sum(a.rows.num_rows for a in answers), refused=refused - self._refused
        )
        self._refused = refused

    def _answer(self, record: AnswerRecord) -> SinkAnswer:
        if record.is_newer:
            reason = UnsupportedVersion("a newer release has written the answer; run the sinks with that release")
            raise TargetFailed(reason.message) from reason
        query, has = self._queries[record.query].query, self._queries[record.query].has
        answer = replace(sink_answer(record, query), repeats=0 < record.data_id <= has)
        return answer if record.revision == 1 else replace(answer, removed=lambda: self._removed(record, answer, query))

    def _removed(self, record: AnswerRecord, answer: SinkAnswer, query: SinkQuery) -> list[Group]:
        """Returns the groups of earlier revisions that the newest revision lacks."""
        last = record.data_of or record.revision - 1
        earlier = [r for r in self._results.revisions(record.query, record.window_start_ms) if r <= last]
        now, gone = set(_groups(answer)), dict[tuple[Any, ...], None]()
        for revision in earlier[-MAX_REVISIONS:]:
            before = sink_answer(self._results.answer(record.query, record.window_start_ms, revision), query)
            gone |= dict.fromkeys(key for key in _groups(before) if key not in now)
        return [dict(zip(answer.group_columns, key, strict=True)) for key in gone]

    def _report(self, problem: str = "") -> None:
        assert self._epoch is not None
        now_ms, self._trimmed = self._now_ms(), self._results.trimmed()
        is_open = self._sink is not None and self._through is not None and not problem
        own = None if self._sink is None else self._own_problem()
        written, self._written = self._written, Counter()
        waiting = self._stated
        if is_open:
            waiting = {ref: WaitingQuery(q.has, q.problem, q.since_ms) for ref, q in self._queries.items() if q.waits}
        changes = {ref: q for ref, q in waiting.items() if self._stated.get(ref) != q}
        lacking = [q.has for q in self._queries.values() if q.lacks]
        refusal = getattr(self._sink, "refusal", "") if written["refused"] else ""
        self._status = self._store.report(
            self.definition.name,
            self._epoch,
            now_ms + LEASE_MS,
            answer_id=self._through if is_open else None,
            lowest=min([self._through, *lacking]) if is_open and self._through is not None else -1,
            waits=changes | dict.fromkeys(self._stated.keys() - waiting.keys()),
            replayed=self._replayed,
            written=written,
            refusal=masked(refusal, self.definition.options),
            trimmed=self._trimmed,
            problem=problem or own,
            now_ms=now_ms,
        )
        self._renewed_ms, self._replayed, self._stated = now_ms, None, waiting
        if self._status.gap != self._gap and self._status.gap is not None:
            first, last = self._status.gap
            self._alarm("sink-gap", f"the answers {first} to {last} were deleted before the sink had them")
        self._gap = self._status.gap
        if refusal:
            text = f"its target has refused {written['refused']} samples or messages, which are lost there: {refusal}"
            self._alarm("sink-refused", masked(text, self.definition.options))
        since_ms = self._status.problem_since_ms
        if own and not problem and abs(now_ms - since_ms) >= PARTIAL_MS and since_ms != self._alarmed_since_ms:
            self._alarmed_since_ms = since_ms
            self._alarm("sink-failing", f"a part of the sink does not work: {own}")

    def _own_problem(self) -> str:
        """Returns why a part of the sink does not work: a part that the sink names, or queries that fail."""
        failing = [(ref, q.problem) for ref, q in self._queries.items() if q.problem]
        parts = [f"query {query_key(ref)}, {problem}" for ref, problem in failing[:MAX_STATED]]
        more = f"{len(failing) - MAX_STATED} more queries" if len(failing) > MAX_STATED else ""
        return "; ".join(filter(None, [getattr(self._sink, "problem", ""), *parts, more]))

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
        cause = exc.__cause__ if isinstance(exc, TargetFailed) else exc
        reason, is_foreign = self._reason(exc), not isinstance(cause, EdgewaterError)
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
        return _pause_s(self._failures)

    def _reason(self, exc: BaseException) -> str:
        if isinstance(exc, TargetFailed) and exc.__cause__ is not None:
            exc = exc.__cause__
        text = exc.message if isinstance(exc, EdgewaterError) else plain(f"{type(exc).__name__}: {exc}")
        return masked(text, self.definition.options)

    def _give_up(self) -> None:
        self._close()
        self._epoch, self._status = None, None

    def _close(self) -> None:
        """Closes the sink. When it is opened again, the positions are read again."""
        sink, self._sink, self._queries, self._through = self._sink, None, {}, None
        if sink is not None:
            try:
                sink.close()
            except Exception:
                log.exception("sink %s: it could not be closed", self.definition.name)


class TargetFailed(Exception):
    """A method of a sink has raised an exception, the cause, or an answer is not to be written."""


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
        except (LeaseLost, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as exc:
            raise TargetFailed(str(exc)) from exc


def _groups(answer: SinkAnswer) -> list[tuple[Any, ...]]:
    columns = [answer.rows.column(name).to_pylist() for name in answer.group_columns]
    return list(zip(*columns, strict=True)) if columns else [()] * answer.rows.num_rows


def sink_answer(record: AnswerRecord, query: SinkQuery) -> SinkAnswer:
    """Returns an answer in the form that sinks get."""
    spec, facts = query.spec, record.facts
    rows, answer = stated_answer(record, spec, query.schema)

    def of_others() -> pa.Table:
        others = replace(record, facts=facts.without(Cause.MISSING, Cause.LEFT))
        return stated_answer(others, spec, query.schema)[0].slice(0, rows.num_rows)

    if record.synopsis is None and spec.group_by:
        rows = rows.slice(0, 0)  # the only row says that an answer exists; the statement says it, too
    return SinkAnswer(
        record.query, record.window_start_ms, record.window_end_ms, record.revision, record.phase,
        record.answered_at_ms, record.answer_id, rows, answer.members(), tuple(spec.group_by),
        data_id=record.data_id, stated=answer.stated, of_others=of_others if facts.lacking else None,
    )  # fmt: skip
