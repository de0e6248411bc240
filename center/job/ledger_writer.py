"""Serialises all changes of the ledger and the result store: batches of frames, changes in the catalog, deadlines."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from center.early import SamplingPlan
from center.job.job_parts import JobParts
from center.job.metrics import JobMetrics
from center.ledger import (
    ClockStepped,
    EdgesChanged,
    Emission,
    FrameSummary,
    Ledger,
    LedgerEvent,
    QueryDeleted,
    QueryFailed,
    QueryRegistered,
    QueryTooLarge,
)
from center.results import AnswersCostly, LeaseLost
from center.storage.delta_segments import Delta, SliceSpan, SpanMerge, SpanPart
from center.storage.progress import Track
from edgewater.answers import Phase
from edgewater.answers.statement import STALENESS
from edgewater.base.errors import StorageError
from edgewater.base.streams import MIN_TIME_MS, EdgeId
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import query_from_key, query_key
from edgewater.wire import UNCERTAIN, QueryRef

log = logging.getLogger(__name__)

ALARM_EVERY_MS = 10_000  # limit: number of alarms
"""Least time between two alarms about records of one edge that came for final windows."""
FOR_EVER_MS = 1 << 62  # format: above all times
PAUSE_MS = 60_000  # limit: work for a query that fails
"""If a query's state or answers raise exceptions, time alone does not advance the query for this long."""
LEAST_STEP_MS = 1_000
"""Between two readings, the wall clock and a monotonic clock differ by less than this, unless the wall clock is set."""
FAILING = "query-failing"
"""The alarm about a query that cannot be advanced by time."""
MAX_ALARMS = 20
"""Maximum alarms of one kind in one transaction, about refused partials or at one edge. The catalog stores no more
messages."""
MAX_MESSAGE = 2_000  # limit: length of a message
YIELD_S = 0.002  # limit: how long other writers wait
"""Pause between two transactions when more work is due. A batch that waits for the lock can then take it."""
CATALOG_POLL_S = 1.0  # limit: reads at rest
"""Interval of polling the catalog's version while nothing else happens."""


class LedgerWriter:
    """The only writer of the ledger. Any thread may call its methods.

    Args:
        monotonic: clock in seconds that nobody sets, which shows steps of the wall clock; None if there is none.
        answered: called after the commit of answers.

    Attributes:
        margin: of the ledger.
    """

    def __init__(
        self,
        ledger: Ledger,
        shared: JobParts,
        *,
        monotonic: Callable[[], float] | None = None,
        answered: Callable[[], object] = lambda: None,
    ) -> None:
        ledger.on_query = lambda ref: shared.progress.enter(Track.LEDGER, query_key(ref))
        self._ledger, self._answered, self.margin = ledger, answered, ledger.margin
        self._store, self._catalog, self._metrics = shared.store, shared.catalog, shared.metrics
        self._now_ms, self._progress = shared.now_ms, shared.progress
        self._acknowledged: int | None = None  # the catalog's version whose events are applied
        self._monotonic = monotonic
        self._read: tuple[int, float] | None = None
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._closed = False
        # How many records alarms have reported that came for final windows, and when the next alarms may follow.
        self._alarmed: dict[tuple[QueryRef, str, str], int] = {}
        self._alarmed_in_all = 0
        self._next_alarms_ms = 0
        self._alarmed_delays: set[tuple[QueryRef, str]] = set()
        self._ended: set[QueryRef] = set()
        # When each failing query is tried again, by its key, and whether the alarms of earlier terms are among them.
        self._failing: dict[str, int] = {}
        self._has_earlier_alarms = False
        # The costly merges that answers of a query wait for, and who is told.
        self._awaited: dict[str, tuple[SliceSpan, ...]] = {}
        self.on_awaited: Callable[[str], object] = lambda _: None

    def begin_term(self) -> None:
        """Begins a term: this driver leads from now on.

        Since its last term, others may have applied frames and events.
        """
        with self._lock:
            self._acknowledged = None
            self._alarmed_in_all = 0
            self._ended.clear()
            self._failing.clear()
            self._has_earlier_alarms = False
            for key in self._awaited:
                self._ledger.pause(query_from_key(key), 0)
            self._awaited.clear()
        self._changed.set()

    def require_lease(self, key: str) -> None:
        """Raises LeaseLost unless this driver leads the query's partition. Called before effects outside of the store's
        transactions.
        """
        self._store.renew_lease(self._now_ms(), key)

    def consumed(self) -> dict[str, int]:
        """As `ResultStore.consumed`. Only `apply` changes it."""
        return self._store.consumed()

    def apply(
        self, deltas: Sequence[Delta], summaries: Sequence[FrameSummary], through: Mapping[str, int]
    ) -> list[Emission]:
        """As `ResultStore.apply`, after the ledger has applied the catalog's changes."""
        with self._working():
            # A query may have been registered since the last poll, and its first frame may have arrived.
            self._apply_catalog_events(self._now_ms())
            emissions = self._store.apply(self._ledger, deltas, summaries, through, self._now_ms())
            self._observe_report_delay(summaries)
            self._await(self._store.take_crowded())
            self._report_refused()
            self._raise_alarms()
            self._count(emissions, "report")
        self._changed.set()
        return emissions

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Holds the lock. At the end, also after an error, the progress names no query."""
        with self._lock:
            self._require_open()
            try:
                yield
            finally:
                self._progress.step(Track.LEDGER)

    def rest(self) -> None:
        """Notes that there is no work: this driver does not lead."""
        with self._lock:
            self._progress.rest(Track.LEDGER)

    def pause(self, ref: QueryRef, until_ms: int) -> None:
        """As `Ledger.pause`."""
        with self._lock:
            self._ledger.pause(ref, until_ms)

    def _observe_report_delay(self, summaries: Sequence[FrameSummary]) -> None:
        for summary in summaries:
            if (
                summary.arrivals is None
                or summary.arrivals.through_ms <= MIN_TIME_MS
                or self._ledger.is_deleted(summary.query)
            ):
                continue
            reported_at_ms = self._ledger.wall_ms(summary.query, summary.arrivals.through_ms)
            self._metrics.report_delay.observe(max(0, summary.received_at_ms - reported_at_ms) / 1000)

    def advance(self) -> list[Emission]:
        """Applies changes in the catalog and emits the answers that are due; if none is due, corrects final answers."""
        with self._working():
            now_ms = self._now_ms()
            emissions = self._apply_catalog_events(now_ms)
            due_ms = self._ledger.next_deadline()
            if due_ms is not None and due_ms <= now_ms:
                emissions = [*emissions, *self._tick([], now_ms)]
            elif (correct_ms := self._store.correct_at_ms) is not None and correct_ms <= now_ms:
                self._metrics.answers.labels("correction").inc(self._store.correct(now_ms))
                self._answered()
            self._report_refused()
            self._raise_alarms()
            self._end_queries(now_ms)
        return emissions

    def _end_queries(self, now_ms: int) -> None:
        """Marks queries whose windows are all final, and will stay final. The store has their answers."""
        for ref in self._ledger.ended(now_ms):
            if ref in self._ended:
                continue
            try:
                self._catalog.queries.end(ref, now_ms)
                self._ended.add(ref)
            except StorageError as exc:  # the next call tries again
                log.warning("query %s has ended, which is not stored: %s", query_key(ref), exc)

    def _raise_alarms(self) -> None:
        """Adds alarms for records that came for final windows.

        After a start, it adds them for all earlier records too.

        The store counts these records. So no alarm is lost, whatever happens between its transaction and this one.
        """
        self._raise_delay_alarms()
        in_all, now_ms = sum(self._ledger.after_final(ref) for ref in self._ledger.queries()), self._now_ms()
        if in_all == self._alarmed_in_all or now_ms < self._next_alarms_ms:
            return
        self._next_alarms_ms = now_ms + ALARM_EVERY_MS
        try:
            for late, records in self._store.late_records().items():
                ref, edge, reason = late
                if reason in UNCERTAIN:
                    continue  # the gateway raises one alarm for all queries; a guess is probably right
                if query_key(ref) in self._store.partition and self._alarmed.get(late) != records:
                    message = (
                        f"query {query_key(ref)}: accepted records came for windows that were final ({reason}); their"
                        f" answers and GET /v1/queries/{ref.name} say how many"
                    )
                    self._catalog.alarms.add("records-after-final", message, EdgeId(edge), now_ms, query_key(ref))
                    self._alarmed[late] = records
            self._alarmed_in_all = in_all
        except StorageError as exc:  # the store counts the records; the next call tries again
            log.warning("the alarm about records that came after final answers is not stored: %s", exc)

    def _raise_delay_alarms(self) -> None:
        """Adds an alarm for each edge whose records came later than a query declares; again after a start."""
        exceeding = {(ref, edge) for ref, by_edge in self._ledger.exceeding_delays().items() for edge in by_edge}
        for ref, edge in exceeding - self._alarmed_delays:
            message = (
                f"query {query_key(ref)}: records came later than accuracy.delays declares; its early answers no longer"
                " rely on it, and say how many came"
            )
            # The ledger counts the records. If the alarm is not stored, the next call tries again.
            if self._add_alarm("delays-exceeded", message, query_key(ref), EdgeId(edge)):
                self._alarmed_delays.add((ref, edge))

    def _apply_catalog_events(self, now_ms: int) -> list[Emission]:
        if abs(step_ms := self._step_ms(now_ms)) >= LEAST_STEP_MS:
            log.warning("the wall clock was set by %+.1f s", step_ms / 1000)
            self._ledger.handle(ClockStepped(step_ms))
        version, events = self.pending()
        if not events:
            return []
        self._store.require_newer(self._ledger, self._catalog.backups.older_since_ms())
        emissions = self._tick(events, now_ms)
        self._metrics.keep_only(
            {e.query.ref.name for e in events if isinstance(e, QueryRegistered)},
            {edge.edge for e in events if isinstance(e, EdgesChanged) for edge in e.edges if not edge.retired},
        )
        self._acknowledged = version
        return emissions

    def pending(self) -> tuple[int, list[LedgerEvent]]:
        """Returns the catalog's version, and the events since the version whose events the ledger has applied.

        Only queries of the partition of this driver are among them. Raises StorageError.
        """
        # The version is read first: a change during the following reads makes a new version, which the next call
        # reports.
        version, partition = self._catalog.version(), self._store.partition
        if version == self._acknowledged:
            return version, []
        queries = [query for query in self._catalog.queries.all(deleted=True) if query.key in partition]
        # A deletion ends all versions up to its own, so it precedes the registration of a later version.
        events: list[LedgerEvent] = [EdgesChanged(tuple(self._catalog.edges.all()))]
        events += [QueryDeleted(query.ref) for query in queries if query.deleted_at_ms is not None]
        events += [QueryRegistered(query) for query in queries if query.deleted_at_ms is None]
        return version, events

    def _step_ms(self, now_ms: int) -> int:
        """Returns by how much the wall clock was set since the last call."""
        if self._monotonic is None:
            return 0
        before, self._read = self._read, (now_ms, self._monotonic())
        return 0 if before is None else now_ms - before[0] - round((self._read[1] - before[1]) * 1000)

    def _tick(self, events: Sequence[LedgerEvent], now_ms: int) -> list[Emission]:
        """Advances all queries, except queries whose state or answer raises an exception."""
        while True:
            try:
                emissions = self._store.tick(self._ledger, events, now_ms)
            except AnswersCostly as exc:
                self._await(exc.spans)
                continue
            except QueryFailed as exc:
                self._pause_failed(exc, now_ms)
                continue
            self._count(emissions, "deadline")
            self._end_failures(now_ms)
            return emissions

    def _await(self, spans: Sequence[SliceSpan]) -> None:
        """Time does not advance these queries until `give` has the merges of the spans."""
        by_key: dict[str, set[SliceSpan]] = {}
        for span in spans:
            by_key.setdefault(span.key, set(self._awaited.get(span.key, ()))).add(span)
        for key, wanted in by_key.items():
            self._ledger.pause(query_from_key(key), FOR_EVER_MS)
            self._awaited[key] = tuple(sorted(wanted))
            self.on_awaited(key)

    def awaited(self) -> list[str]:
        """Returns the keys of the queries whose answers wait for costly merges."""
        with self._lock:
            return list(self._awaited)

    def segment_prefix(self, number: int) -> str:
        """Returns the prefix of the names of the segments that a plan's tasks write (`DeltaSegments`)."""
        return f"{self._store.partition.directory}/{self._store.epoch}/{number}"

    def parts(self, key: str, prefix: str) -> list[SpanPart]:
        """Returns what tasks merge for the answers of a query. Raises StorageError."""
        with self._lock:
            spans = self._awaited.get(key, ())
        return [self._store.part(span, prefix) for span in spans]

    def give(self, key: str, merges: Sequence[SpanMerge]) -> None:
        """Writes the answers of a query that are due now, with costly merges. Raises as `advance`."""
        with self._working():
            now_ms = self._now_ms()
            for merge in merges:
                self._store.keep_merge(self._ledger, merge, now_ms)
            self._awaited.pop(key, None)
            self._ledger.pause(query_from_key(key), 0)
            self._tick([], now_ms)
            self._report_refused()
        self._changed.set()

    def _end_failures(self, now_ms: int) -> None:
        """Removes the alarms about queries that were tried again, and did not fail."""
        try:
            if not self._has_earlier_alarms:
                failing = [a.query for a in self._catalog.alarms.latest() if a.kind == FAILING]
                self._failing = dict.fromkeys((q for q in failing if q in self._store.partition), 0) | self._failing
                self._has_earlier_alarms = True
            for key in [key for key, until_ms in self._failing.items() if until_ms <= now_ms]:
                self._catalog.alarms.end(FAILING, EdgeId(""), key)
                del self._failing[key]
        except StorageError as exc:
            log.warning("the alarms about queries that work again are not removed: %s", exc)

    def _pause_failed(self, failure: QueryFailed, now_ms: int) -> None:
        cause = failure.__cause__
        message = f"{failure} cannot be advanced by time for {PAUSE_MS // 1000} s: {type(cause).__name__}: {cause}"
        until_ms = now_ms + PAUSE_MS
        if isinstance(failure, QueryTooLarge):
            message, until_ms = f"{failure}; it gets no answers by time until the job starts again", FOR_EVER_MS
        log.error("%s", message, exc_info=cause)
        self._ledger.pause(failure.query, until_ms)
        self._metrics.failures.labels("query").inc()
        query = query_key(failure.query)
        self._failing[query] = until_ms
        self._add_alarm(FAILING, message, query)  # if that fails: the query fails again in a minute

    def _report_refused(self) -> None:
        """Counts merged partials that the store has refused, and adds alarms. The answers state them."""
        for number, refused in enumerate(self._store.take_refused()):
            self._metrics.skipped.labels("partial-refused").inc()
            if number >= MAX_ALARMS:
                continue  # each alarm is a transaction, for which all queries wait
            delta = refused.delta
            message = f"query {delta.query}, slice {delta.slice_start_ms}: {refused.reason}"[:MAX_MESSAGE]
            log.error("partial-refused: %s", message)
            self._add_alarm("partial-refused", message, delta.query)

    def _add_alarm(self, kind: str, message: str, query: str, edge: EdgeId = EdgeId("")) -> bool:  # noqa: B008
        """Adds an alarm about a query. Returns whether it is stored."""
        try:
            self._catalog.alarms.add(kind, message[:MAX_MESSAGE], edge, self._now_ms(), query)
        except StorageError as exc:
            log.warning("the alarm %s about query %s is not stored: %s", kind, query, exc)
            return False
        return True

    def _count(self, emissions: Sequence[Emission], cause: str) -> None:
        if emissions:
            self._answered()
            self._observe_margin(emissions, self._now_ms())
        self._metrics.answers.labels(cause).inc(len(emissions))
        for emission in emissions:
            self._metrics.observe_accuracy(emission)
            codes = emission.codes() if emission.phase is Phase.FINAL or emission.revision == 1 else []
            if emission.phase is Phase.FINAL:
                self._metrics.final_answers.labels(emission.query.name, codes[0] if codes else "none").inc()
            # Counted only for a window's first answer, because later answers repeat the violation.
            if emission.revision == 1 and STALENESS in codes:
                self._metrics.missed.labels(emission.query.name).inc()

    def _observe_margin(self, emissions: Sequence[Emission], written_ms: int) -> None:
        after_ms = []
        for emission in emissions:
            budget, staleness_ms = emission.spec.staleness_budget, emission.facts.staleness_ms
            if emission.revision == 1 and budget is not None:
                overdue_ms = staleness_ms - (budget.staleness_ms - self.margin.of(budget.staleness_ms))
                after_ms += [overdue_ms] if overdue_ms >= 0 else []  # else it waited for no deadline
        if after_ms:
            self.margin.written(max(after_ms) + written_ms - emissions[0].answered_at_ms)

    def needed_plans(self) -> dict[QueryRef, dict[EdgeId, SamplingPlan]]:
        """As `Ledger.needed_plans`."""
        with self._lock:
            return self._ledger.needed_plans()

    def sampled_functions(self) -> dict[QueryRef, tuple[QuerySpec, tuple[EdgeId, ...]]]:
        """As `Ledger.sampled_functions`."""
        with self._lock:
            return self._ledger.sampled_functions()

    def wait(self, max_s: float = CATALOG_POLL_S) -> None:
        """Waits until the next deadline, at most `max_s`; returns early if `apply` may have changed the deadline."""
        with self._lock:
            due = [ms for ms in (self._ledger.next_deadline(), self._store.correct_at_ms) if ms is not None]
            pause_s = min([max_s, *(max(YIELD_S, (due_ms - self._now_ms()) / 1000) for due_ms in due)])
        self._changed.wait(pause_s)
        self._changed.clear()

    def close(self) -> None:
        """Waits for the running write. Later calls that write raise StorageError."""
        with self._lock:
            self._closed = True
        self._changed.set()

    def _require_open(self) -> None:
        if self._closed:
            raise StorageError("the job is stopping")


class DeadlineLoop:
    """Advances the writer until stopped, while `leads` is set. Answers become due without data, and without Spark."""

    def __init__(
        self, writer: LedgerWriter, metrics: JobMetrics, stop: threading.Event, leads: threading.Event
    ) -> None:
        self._writer = writer
        self._metrics = metrics
        self._stopping, self._leads = stop, leads
        self.problem = ""

    def run(self) -> None:
        while not self._stopping.is_set():
            if not self._leads.wait(CATALOG_POLL_S):
                self._writer.rest()
                self.problem = ""
                continue
            try:
                self._writer.advance()
                self.problem = ""
                self._writer.wait()
            except LeaseLost:
                self._stopping.wait(CATALOG_POLL_S)  # until `leads` is cleared, too
            except Exception as exc:
                if self._stopping.is_set():
                    return
                if not self.problem:
                    log.exception("deadlines are not met; trying again")
                self.problem = f"deadlines are not met: {exc}"
                self._metrics.failures.labels("deadlines").inc()
                self._stopping.wait(CATALOG_POLL_S)
