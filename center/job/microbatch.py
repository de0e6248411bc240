"""Processing of a micro-batch: merged on the executors, applied to the result store exactly once.

Spark may run a batch again, in whole or in part, after any crash. Only the result store records which frames have been
applied: the source does not read them again, and the store ignores a batch that it has applied.

Tasks return merged partials and the positions that they have read. By these positions, the driver reads the frames'
other statements from the frame index.

Measured with PySpark 4.3 on two busy cores, 20 frames/s of a 3.3 KB partial over 10 queries, seconds per batch from
DataFrame to driver: reading alone 0.08, `mapInArrow` 0.12–0.15, `groupBy().applyInArrow` 0.26–0.38 (a shuffle, and a
Python call per key). So each task merges the rows that it has read (`FrameReader.read`). A key that is in two tasks
becomes two deltas; `frame_source.divide` makes such keys rare. A `mapInArrow` after the source needs a second Python
worker in every task: under load 10, alternating batches with and without it took 188 and 114 ms at the median, 311 and
180 at the 95th percentile.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from center.catalog import Catalog, SetAside
from center.early import RATES_EVERY_MS, rates_differ
from center.job.frame_source import read_frames
from center.job.ledger_writer import FOR_EVER_MS, LedgerWriter
from center.job.merge import merge_rows
from center.job.metrics import JobMetrics
from center.job.processing_delay import ProcessingDelays
from center.job.rows import (
    MAX_REASON_BYTES,
    FrameRow,
    RowKind,
    from_table,
    row_of_damage,
    rows_of_positions,
)
from center.ledger import FRAMES, Emission, FrameSummary, QueryTooLarge, state_refusal
from center.results import MergedDelta
from center.storage.frame_facts import FrameFacts
from center.storage.frame_log import FrameEntry, FrameLog
from edgewater.model.errors import Conflict, EdgewaterError, NotFound, StorageError, named
from edgewater.model.registered_query import query_from_key, query_key
from edgewater.model.streams import MIN_TIME_MS, EdgeId
from edgewater.wire import InputLoss, LossReason, QueryRef

log = logging.getLogger(__name__)


MAX_FAILED_ATTEMPTS = 16
"""How many attempts to apply a part of a query's frames may fail in one batch. Each attempt takes a transaction, and
loads the ledger. The next batch continues."""
MAX_CULPRITS = 8
"""How many frames of a query, from more than one edge, may be quarantined in a row. After so many without an applied
frame in between, the fault is not in the frames."""
REASONS = frozenset(LossReason)
_TRACEBACK = re.compile(r"^( *)(?:\S.*)?Traceback \(most recent call last\):\n(?:(?!\1\S).*\n)*\1(\S.*)", re.MULTILINE)
"""A traceback of a Python process in a message of Spark; group 2 is the line that names the exception."""
MAX_ALARMS = 20
"""Maximum alarms of one kind at one edge in one batch; the catalog stores no more messages."""


class _Alarm(NamedTuple):
    kind: str
    edge: EdgeId
    query: str
    message: str


class BatchFailed(Exception):
    """A micro-batch was not applied. Its message is short: see `BatchProcessor._stating_failure`."""


def reason_of(exc: BaseException | None) -> str:
    """Returns an exception's code, or its class if it has none, and its message in one line.

    Spark's message may contain the traceback of a Python process. Then the result is the first line of the message, and
    the line that names the Python exception.
    """
    message = str(exc).strip()
    first = message.partition("\n")[0].partition("Traceback (most recent call last):")[0].rstrip(" :.")
    raised = [line for _, line in _TRACEBACK.findall(message)[-1:]]
    kind = exc.code if isinstance(exc, EdgewaterError) else type(exc).__name__
    return ": ".join([kind, first, *raised])[:MAX_REASON_BYTES]


def is_fault_of_frames(exc: Exception) -> bool:
    """Returns whether other frames could be applied after this failure.

    If not, the failure says nothing about the frames: a database or a disk failed, another job writes too, or the job
    stops.
    """
    if isinstance(exc, StorageError):
        # PEP 249 has two classes for data that no database accepts.
        return any(c.__name__ in ("DataError", "IntegrityError") for c in type(exc.__cause__).__mro__)
    return not isinstance(exc, Conflict | OSError | BatchFailed)


def _halves(entries: Sequence[FrameEntry]) -> list[Sequence[FrameEntry]]:
    """Returns the two halves of at least two frames; for one frame, the frame; for none, nothing."""
    middle = len(entries) // 2
    return [half for half in (entries[:middle], entries[middle:]) if half]


@dataclass(frozen=True, slots=True)
class Applied:
    """The effects of one transaction."""

    summaries: tuple[FrameSummary, ...]
    emissions: list[Emission]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch in the driver, of one query or of all.

    Attributes:
        through: by query key, the last position read.
        skipped: DAMAGED, QUARANTINED and REFUSED rows.
    """

    deltas: tuple[MergedDelta, ...]
    summaries: tuple[FrameSummary, ...]
    through: Mapping[str, int]
    skipped: tuple[FrameRow, ...]


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """A micro-batch whose tasks have run.

    Attributes:
        table: the rows of all tasks (`rows.to_batch`).
        began_s, began_ms: when its tasks began, by a monotonic clock and by the wall clock.
        merged_ms: wall time at which they had run.
    """

    number: int
    table: pa.Table
    began_s: float
    began_ms: int
    merged_ms: int


Facts = Mapping[str, Mapping[int, FrameFacts]]
"""By query key and position."""


def to_micro_batch(rows: Iterable[FrameRow], facts: Facts) -> MicroBatch:
    """Groups merged rows, and the facts of their frames, for the store. Pure.

    Raises:
        StorageError: facts of a position that was read are missing. Another driver has applied the frame meanwhile.
    """
    deltas: list[MergedDelta] = []
    skipped: list[FrameRow] = []
    read: list[FrameRow] = []
    for row in rows:
        if row.kind is RowKind.PARTIAL:
            position = row.position if row.partials == 1 else None
            deltas.append(MergedDelta(query_from_key(row.query), row.slice_start_ms, row.payload, position))
        elif row.kind is RowKind.READ:
            read.append(row)
        else:
            skipped.append(row)
    unusable = {(row.query, row.position) for row in skipped if row.kind is not RowKind.REFUSED}
    summaries: list[FrameSummary] = []
    through: dict[str, int] = {}
    for row in sorted(read, key=lambda row: (row.query, row.position)):
        ref, of_query = query_from_key(row.query), facts.get(row.query, {})
        through[row.query] = max(row.last, through.get(row.query, 0))
        for position in range(row.position, row.last + 1):
            if position not in of_query:
                raise StorageError(f"query {row.query}: the frame at {position} is no longer in the index")
            summary = _summary_of_loss if (row.query, position) in unusable else _summary
            summaries.append(summary(ref, of_query[position]))
    for row in skipped:
        if row.kind is RowKind.REFUSED:
            state_refusal(summaries, query_from_key(row.query), row.slice_start_ms, row.position)
    return MicroBatch(tuple(deltas), tuple(summaries), through, tuple(skipped))


def _summary_of_loss(query: QueryRef, facts: FrameFacts) -> FrameSummary:
    """Returns a summary that states an unusable frame as lost input of its edge.

    So no answer counts the edge as complete.
    """
    return FrameSummary(
        query=query,
        position=facts.position,
        edge=facts.edge,
        through_ms=MIN_TIME_MS,
        closes=(),
        touched=(),
        wire_bytes=facts.wire_bytes,
        received_at_ms=facts.received_at_ms,
        incarnation=facts.incarnation,
        losses=(InputLoss(FRAMES, LossReason.FRAME_DAMAGED),),
    )


def _summary(query: QueryRef, facts: FrameFacts) -> FrameSummary:
    body = facts.body()
    return FrameSummary(
        query=query,
        position=facts.position,
        edge=facts.edge,
        through_ms=body.through_ms,
        closes=body.closes,
        touched=tuple(p.slice_start_ms for p in body.partials),
        wire_bytes=facts.wire_bytes,
        received_at_ms=facts.received_at_ms,
        incarnation=facts.incarnation,
        since_ms=body.since_ms,
        arrivals=body.arrivals,
        losses=body.losses,
        dropped=body.dropped,
    )


def unapplied(rows: Iterable[FrameRow], consumed: Mapping[str, int]) -> list[FrameRow]:
    """Returns the rows of queries with positions beyond the consumed positions.

    Of other queries, Spark has run the batch again.

    It returns or omits the rows of whole queries. If the source ever read frames on both sides of the consumed
    position, their partials would be merged. The store refuses these (`Conflict`), and they must not be lost here.
    """
    rows, through = list(rows), dict[str, int]()
    for row in rows:
        through[row.query] = max(row.last, through.get(row.query, 0))
    return [row for row in rows if through[row.query] > consumed.get(row.query, 0)]


def positions_read(rows: Iterable[FrameRow]) -> dict[str, list[tuple[int, int]]]:
    """Returns, by query key, the ranges of positions that were read, each (after, through), ascending."""
    spans: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for row in rows:
        if row.kind is RowKind.READ:
            spans[row.query].append((row.position - 1, row.last))
    return {key: sorted(each) for key, each in spans.items()}


def gaps(rows: Iterable[FrameRow], consumed: Mapping[str, int]) -> dict[str, list[tuple[int, int]]]:
    """Returns, by query key, the unread ranges (first, last) between the consumed and the last read position."""
    result: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for key, spans in positions_read(rows).items():
        at = consumed.get(key, 0)
        for after, through in spans:
            if after > at:
                result[key].append((at + 1, after))
            at = max(at, through)
    return dict(result)


class BatchProcessor:
    """Reads micro-batches and applies them. One thread at a time calls `apply`, in the order of the batches.

    Args:
        writer: shared with the deadline thread.
        log_dir: the frame log, for frames that have to be read one by one.
        now_ms: wall clock, ms.
        monotonic: clock in seconds, for durations.
        margin_ms: how long before the end of a staleness budget the early answer is given.

    Attributes:
        failure: the exception of the last failed batch.
        problem: why batches fail. It is empty if no batch has failed since the last success.
        applied: number of batches that were applied.
    """

    def __init__(
        self,
        writer: LedgerWriter,
        catalog: Catalog,
        metrics: JobMetrics,
        log_dir: str | Path,
        *,
        now_ms: Callable[[], int],
        monotonic: Callable[[], float],
        margin_ms: int = 0,
    ) -> None:
        self._writer = writer
        self._catalog = catalog
        self._metrics = metrics
        self._now_ms = now_ms
        self._monotonic = monotonic
        self._delays = ProcessingDelays(margin_ms)
        self._rates: dict[QueryRef, dict[EdgeId, float]] = {}
        self._rates_at_ms = 0
        self._log, self._log_dir = FrameLog(log_dir), Path(log_dir)
        self._set_aside: dict[str, SetAside] = {}
        self._count_set_aside()
        self._culprits: dict[str, list[EdgeId]] = {}
        self.failure: Exception | None = None
        self.problem = ""
        self.applied = 0

    @property
    def set_aside(self) -> Mapping[str, SetAside]:
        """The queries whose frames are not applied, by key."""
        return dict(self._set_aside)

    def begin_term(self) -> None:
        """Begins a term: this driver leads from now on.

        Another driver may have solved this driver's earlier problems.
        """
        for key in self.set_aside:
            self.release(key)
        self._culprits, self.failure, self.problem = {}, None, ""

    def __call__(self, frame: Any, batch_id: int) -> None:
        """Reads a batch and applies it: a function of `foreachBatch`. Raises BatchFailed."""
        self.apply(self.read(frame, batch_id))

    def read(self, frame: Any, batch_id: int, is_moot: Callable[[], bool] = lambda: False) -> ReadBatch:
        """Runs the batch's tasks, which merge its frames on the executors.

        Args:
            is_moot: whether to ignore a failure, because the batch was cancelled or an earlier batch has failed.

        Raises:
            BatchFailed: the attribute `failure` has the cause.
        """
        began_s, began_ms = self._monotonic(), self._now_ms()
        with self._stating_failure(batch_id, is_moot):
            table = frame.toArrow()
        return ReadBatch(batch_id, table, began_s, began_ms, self._now_ms())

    def apply(self, batch: ReadBatch) -> None:
        """Applies a batch. All earlier batches have been applied, or have failed. Raises BatchFailed."""
        with self._stating_failure(batch.number):
            frames = self._process(batch)
            took_s = self._monotonic() - batch.began_s
            self.applied += 1
            self.problem = ""
            self._metrics.batch_seconds.observe(took_s)
            log.debug("batch %d: %d frames applied in %.3f s", batch.number, frames, took_s)

    @contextlib.contextmanager
    def _stating_failure(self, batch_id: int, is_moot: Callable[[], bool] = lambda: False) -> Iterator[None]:
        try:
            yield
        except Exception as exc:
            if not is_moot():
                self.failure = exc
                self.problem = f"batch {batch_id} failed: {reason_of(exc)}"
            # The JVM applies a recursive regular expression to the traceback of an exception raised here. A traceback
            # that quotes a Java stack overflows the JVM's stack, and the stream's thread dies without a message.
            raise BatchFailed(f"batch {batch_id}: {type(exc).__name__}") from None

    def _process(self, batch: ReadBatch) -> int:
        """Returns the number of applied frames."""
        turn_ms = self._now_ms()
        consumed = self._writer.consumed()
        rows = [row for row in unapplied(from_table(batch.table), consumed) if row.query not in self._set_aside]
        self._check_gaps(gaps(rows, consumed))
        applied = self._apply_isolated(rows, self._catalog.frames.facts(positions_read(rows)), consumed)
        summaries = [summary for part in applied for summary in part.summaries]
        emissions = [emission for part in applied for emission in part.emissions]
        now_ms = self._now_ms()
        self._metrics.observe_batch(summaries, emissions, batch.began_ms, batch.merged_ms, turn_ms, now_ms)
        self._store_processing_delays(summaries, now_ms)
        self._store_sampling_rates(now_ms)
        self._metrics.batches.inc()
        self._metrics.rows.inc(len(rows))
        self._metrics.frames.inc(len(summaries))
        self._metrics.last_batch.set(now_ms / 1000)
        return len(summaries)

    def _store_processing_delays(self, summaries: Iterable[FrameSummary], now_ms: int) -> None:
        """Stores changed processing delays in the catalog, from which gateways send them to edges."""
        delays: defaultdict[QueryRef, list[int]] = defaultdict(list)
        for summary in summaries:
            delays[summary.query].append(now_ms - summary.received_at_ms)
        for ref, delays_ms in delays.items():
            self._delays.add(ref, delays_ms, now_ms)
        if not (changes := self._delays.take_changes(now_ms)):
            return
        try:
            self._catalog.budgets.record_processing_delays(changes, now_ms)
        except StorageError as exc:  # the batch has been applied; later batches report the delays again
            for ref in changes:
                self._delays.mark_unreported(ref)
            log.warning("the processing delays of %d queries are not stored: %s", len(changes), exc)

    def _store_sampling_rates(self, now_ms: int) -> None:
        """Stores changed sampling rates in the catalog, for the gateways."""
        if abs(now_ms - self._rates_at_ms) < RATES_EVERY_MS:
            return
        self._rates_at_ms = now_ms
        for ref, rates in self._writer.needed_rates().items():
            for edge, rate in rates.items():
                self._metrics.needed_rate.labels(ref.name, edge).set(rate)
            if not rates_differ(self._rates.get(ref, {}), rates):
                continue
            try:
                self._catalog.budgets.record_sampling_rates(ref, rates)
                self._rates[ref] = rates
            except StorageError as exc:  # the batch has been applied; the rates matter only to overloaded edges
                log.warning("the sampling rates of %s are not stored: %s", ref.name, exc)

    def _apply(self, rows: Iterable[FrameRow], facts: Facts) -> Applied:
        batch = to_micro_batch(rows, facts)
        self._raise_alarms(batch.skipped, facts)
        self._report_losses(batch.summaries)
        emissions = self._writer.apply(batch.deltas, batch.summaries, batch.through) if batch.through else []
        return Applied(batch.summaries, emissions)

    def _apply_isolated(self, rows: Sequence[FrameRow], facts: Facts, consumed: Mapping[str, int]) -> list[Applied]:
        """Applies all queries together.

        If that fails, applies each query alone, and of a failing query each frame that can be.

        Raises:
            Exception: the failure is not the frames' (`is_fault_of_frames`).
        """
        try:
            return [self._apply(rows, facts)]
        except Exception as exc:
            if not is_fault_of_frames(exc):
                raise
            log.warning("a batch of %d rows failed, its queries are applied one by one: %s", len(rows), named(exc))
        by_query: defaultdict[str, list[FrameRow]] = defaultdict(list)
        for row in rows:
            by_query[row.query].append(row)
        failed: dict[str, Exception] = {}
        applied = []
        for key, mine in by_query.items():
            try:
                applied.append(self._apply(mine, facts))
            except Exception as exc:
                if not is_fault_of_frames(exc):
                    raise
                failed[key] = exc
        # Last, so that the other queries do not wait for it.
        for key, failure in failed.items():
            if isinstance(failure, NotFound | QueryTooLarge):
                self._pause(key, failure)
                continue
            through = max(row.last for row in by_query[key])
            applied += self._isolate(key, self._catalog.frames.entries(key, consumed.get(key, 0), through))
        return applied

    def _isolate(self, key: str, entries: Sequence[FrameEntry]) -> list[Applied]:
        """Applies the frames of a query whose batch has failed twice, by halves. Quarantines frames that fail alone.

        Raises:
            BatchFailed: too many attempts have failed, so the other queries' frames come first. Some frames were
                applied; the stream starts again at the others.
        """
        applied: list[Applied] = []
        parts = deque(_halves(entries))
        failures = 0
        quarantined = self._catalog.quarantine.frame_reasons()
        facts = self._catalog.frames.facts({key: [(entries[0].position - 1, entries[-1].position)]} if entries else {})
        while parts and key not in self._set_aside:
            part = parts.popleft()
            rows = list(read_frames(self._log, self._log_dir, [(key, entry) for entry in part], quarantined))
            try:
                applied.append(self._apply(merge_rows(rows), facts))
                self._culprits.pop(key, None)
            except Exception as exc:
                if not is_fault_of_frames(exc):
                    raise
                failures += 1
                if len(part) > 1:
                    parts.extendleft(reversed(_halves(part)))
                else:
                    applied += self._quarantine(key, part[0], facts, exc)
            if parts and failures >= MAX_FAILED_ATTEMPTS:
                raise BatchFailed(f"query {key}: frames up to {part[-1].position} are applied or in quarantine")
        return applied

    def _quarantine(self, key: str, entry: FrameEntry, facts: Facts, exc: Exception) -> list[Applied]:
        """Sets a frame aside that has failed alone, and applies it as a stated loss of its edge."""
        culprits = self._culprits.setdefault(key, [])
        culprits.append(entry.edge)
        if len(culprits) > MAX_CULPRITS and len(set(culprits)) > 1:
            # Frames of several edges, one after the other, and none between them could be applied.
            self._pause(key, exc)
            return []
        reason = named(exc)
        self.quarantine(entry, reason)
        damage = row_of_damage(key, entry.position, reason, RowKind.QUARANTINED)
        try:
            applied = self._apply([*rows_of_positions([(key, entry.position)]), damage], facts)
        except Exception as failure:
            # Not even its loss can be stated: the query's state or the store is at fault.
            self._remove([self._catalog.quarantine.drop_frame(key, entry.position)])
            if not is_fault_of_frames(failure):
                raise
            self._pause(key, failure)
            return []
        return [applied]

    def quarantine(self, entry: FrameEntry, reason: str) -> None:
        """Sets a frame aside: from now on it is read as a stated loss. Raises LeaseLost if another driver leads."""
        key = query_key(entry.query)
        self._writer.require_lease(key)
        # The frame is copied out of the segment, so that frames of other queries do not stay on disk with it.
        with contextlib.suppress(StorageError, OSError):
            copy = self._log.copy(entry)
            entry = replace(entry, segment=copy.segment, offset=copy.offset, length=copy.length)
        unused = self._catalog.quarantine.add_frame(entry, reason, self._now_ms())
        log.error("query %s, frame %d of edge %s is in quarantine: %s", key, entry.position, entry.edge, reason)
        self._metrics.skipped.labels("frame-quarantined").inc()
        self._remove(unused)

    def _remove(self, segments: Iterable[str | None]) -> None:
        removable = [segment for segment in segments if segment is not None]
        for segment in removable:
            self._log.remove(segment)
        self._catalog.frames.forget_segments(removable)

    def _pause(self, key: str, exc: Exception) -> None:
        """Stops applying a query's frames, which stay in the log, until a driver begins to lead."""
        log.error("query %s is paused, its frames are kept: %s", key, named(exc))
        self._catalog.quarantine.set_query_aside(query_from_key(key), SetAside.PAUSED, named(exc), self._now_ms())
        self.leave_out(key, SetAside.PAUSED)

    def leave_out(self, key: str, state: SetAside) -> None:
        """Applies no frames of a query that is set aside, and gives it no answers, until `release`."""
        self._set_aside[key] = state
        self._count_set_aside()
        self._writer.pause(query_from_key(key), FOR_EVER_MS)

    def release(self, key: str) -> None:
        """Ends `leave_out`. The caller restarts the stream, which then reads the frames that were left out."""
        self._set_aside.pop(key, None)
        self._count_set_aside()
        self._writer.pause(query_from_key(key), 0)

    def _count_set_aside(self) -> None:
        states = list(self._set_aside.values())
        for state in SetAside:
            self._metrics.set_aside.labels(state).set(states.count(state))

    def _check_gaps(self, missing: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        """Handles frames that were not read although later frames were. They must not be skipped if they exist.

        Raises:
            StorageError: the index has them; the stream must restart at the consumed positions.
        """
        for key, first, last in ((key, *span) for key, spans in missing.items() for span in spans):
            where = f"query {key}: frames {first} to {last}"
            if self._catalog.frames.entries(key, first - 1, last):
                raise StorageError(f"{where} were not read before later ones")
            log.error("%s are no longer in the index and were never applied", where)
            self._metrics.skipped.labels("lost").inc()
            self._catalog.alarms.add("frames-lost", f"{where} were dropped unread", EdgeId(""), self._now_ms(), key)

    def _report_losses(self, summaries: Iterable[FrameSummary]) -> None:
        """Counts stated losses of input and adds alarms; as `_raise_alarms`."""
        stated: dict[_Alarm, None] = {}  # one alarm of each, in this order
        for summary in summaries:
            for loss in summary.losses:
                if loss.reason == LossReason.BEFORE_QUERY or loss.source == FRAMES:
                    continue  # no assumption is violated, or the skipped row has an alarm; the answers state both
                query = ""
                if loss.reason == LossReason.QUERY_MEMORY:
                    kind, query = str(LossReason.QUERY_MEMORY), query_key(summary.query)
                    message = (
                        f"query {query_key(summary.query)}: edge {summary.edge} does not count all records: the groups "
                        "of open windows take more memory than a query may have (limits.max_query_bytes)"
                    )
                else:
                    kind = "input-lost"
                    count = "an unknown number of" if loss.records is None else f"{loss.records}"
                    message = (
                        f"edge {summary.edge}, source {loss.source}: {count} records are lost or may be: {loss.reason}"
                    )
                stated[_Alarm(kind, summary.edge, query, message)] = None
                # An edge may state any text.
                self._metrics.losses.labels(loss.reason if loss.reason in REASONS else "other").inc()
        self._add_alarms(stated)

    def _raise_alarms(self, skipped: Iterable[FrameRow], facts: Facts) -> None:
        """Counts skipped rows and adds alarms.

        This precedes the batch: after a crash alarms come twice rather than never.
        """
        raised: list[_Alarm] = []
        for row in skipped:
            if row.kind is RowKind.QUARANTINED:
                continue  # `Catalog.quarantine.add_frame` has added an alarm
            kind = "frame-damaged" if row.kind is RowKind.DAMAGED else "partial-refused"
            where = f"query {row.query}, frame {row.position}"
            if row.kind is RowKind.REFUSED:
                where += f", slice {row.slice_start_ms}"
            message = f"{where}: {row.payload.decode(errors='replace')}"
            self._metrics.skipped.labels(kind).inc()
            raised.append(_Alarm(kind, facts[row.query][row.position].edge, row.query, message))
        self._add_alarms(raised)

    def _add_alarms(self, raised: Iterable[_Alarm]) -> None:
        """Adds alarms, at most `MAX_ALARMS` of one kind, edge and query.

        Each alarm is a transaction, and one frame may give thousands.
        """
        by_source: dict[tuple[str, EdgeId, str], list[str]] = {}
        for alarm in raised:
            by_source.setdefault((alarm.kind, alarm.edge, alarm.query), []).append(alarm.message)
        for (kind, edge, query), messages in by_source.items():
            if len(messages) > MAX_ALARMS:
                messages[MAX_ALARMS - 1 :] = [f"{messages[MAX_ALARMS - 1]}, and {len(messages) - MAX_ALARMS} more"]
            for message in messages:
                log.error("%s: %s", kind, message)
                self._catalog.alarms.add(kind, message, edge, self._now_ms(), query)
