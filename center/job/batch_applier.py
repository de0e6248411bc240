"""`BatchApplier`: applies the merged frames of a plan to the result store exactly once, with their facts.

Only the result store records which frames have been applied. Tasks return merged partials, and say which frames cannot
be used. The driver reads the frames' other statements from the frame index.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from center.budgets.processing_delay import ProcessingDelays
from center.catalog import SetAside
from center.early import RATES_EVERY_MS
from center.job.function_rates import StoredRates
from center.job.job_parts import JobParts
from center.job.ledger_writer import FOR_EVER_MS, MAX_ALARMS, LedgerWriter
from center.job.loop_core import QueryFault, Run, positions_of
from center.job.merge import MAX_REASON_BYTES, Frame, PartMerged, SkipKind, Skipped, as_reason
from center.ledger import FRAMES, Emission, FrameSummary, QueryTooLarge, state_refusal
from center.storage.delta_segments import Delta
from center.storage.frame_facts import read_facts
from center.storage.frame_log import FrameEntry, FrameLog
from edgewater.base.errors import Conflict, EdgewaterError, NotFound, StorageError, named
from edgewater.base.streams import MIN_TIME_MS, EdgeId
from edgewater.model.registered_query import query_from_key, query_key
from edgewater.wire import FrameBody, InputLoss, LossReason, QueryRef

log = logging.getLogger(__name__)

REASONS = frozenset(LossReason)
_TRACEBACK = re.compile(r"^( *)(?:\S.*)?Traceback \(most recent call last\):\n(?:(?!\1\S).*\n)*\1(\S.*)", re.MULTILINE)
"""A traceback of a Python process in a message of Spark; group 2 is the line that names the exception."""
_CALL = re.compile(r"^An error occurred while calling .*\n: ")
_LOST_TASK = re.compile(r"Lost task \S+ in stage \S+ \(TID \d+\) \([^)]*\): ")


class _Alarm(NamedTuple):
    kind: str
    edge: EdgeId
    query: str
    message: str


def reason_of(exc: BaseException | None) -> str:
    """Returns an exception's code, or its class if it has none, and its message in one line.

    If a Spark job has failed, the message of the failed task counts. It may contain the traceback of a Python process.
    Then the result is the first line of the message, and the line that names the Python exception.
    """
    message = _CALL.sub("", str(exc).strip())
    if (task := _LOST_TASK.search(message)) is not None:
        message = message[task.end() :]
    first = message.partition("\n")[0].partition("Traceback (most recent call last):")[0]
    first = first.partition(" Consider setting ")[0].rstrip(" :.")
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
    return not isinstance(exc, Conflict | OSError)


@dataclass(frozen=True, slots=True)
class Batch:
    """Merged frames, of one query or of several, for one transaction.

    Attributes:
        through: by query key, the position of the last frame.
    """

    deltas: tuple[Delta, ...]
    summaries: tuple[FrameSummary, ...]
    through: Mapping[str, int]
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True, slots=True)
class Times:
    """When a plan's tasks began, and when they had returned, in ms of the wall clock."""

    began_ms: int
    merged_ms: int


_Applied = tuple[tuple[FrameSummary, ...], list[Emission]]
"""The frames of one transaction, and its answers."""
Facts = Mapping[str, Mapping[int, bytes]]
"""By query key and position (`center.storage.frame_facts`)."""


def to_batch(frames: Iterable[Frame], deltas: Iterable[Delta], skipped: Iterable[Skipped], facts: Facts) -> Batch:
    """Joins deltas and the facts of their frames, for the store. Pure.

    Args:
        frames: ordered by position within a query.
        skipped: why a frame, or a partial of a frame, is not among `deltas`.

    Raises:
        StorageError: facts of a frame are missing. Another driver has applied the frame meanwhile.
    """
    skipped = tuple(skipped)
    unusable = {(skip.key, skip.position) for skip in skipped if skip.kind is not SkipKind.REFUSED}
    summaries: list[FrameSummary] = []
    through: dict[str, int] = {}
    for key, entry in frames:
        through[key] = entry.position
        if (encoded := facts.get(key, {}).get(entry.position)) is None:
            raise StorageError(f"query {key}: the frame at {entry.position} is no longer in the index")
        body = _LOST if (key, entry.position) in unusable else read_facts(encoded)
        summaries.append(_summary(entry, body))
    for skip in skipped:
        if skip.kind is SkipKind.REFUSED:
            state_refusal(summaries, query_from_key(skip.key), skip.slice_start_ms, skip.position)
    return Batch(tuple(deltas), tuple(summaries), through, skipped)


_LOST = FrameBody(MIN_TIME_MS, losses=(InputLoss(FRAMES, LossReason.FRAME_DAMAGED),))
"""Stands for the body of an unusable frame: lost input of its edge. So no answer counts the edge as complete."""


def _summary(entry: FrameEntry, body: FrameBody) -> FrameSummary:
    return FrameSummary(
        query=entry.query,
        position=entry.position,
        edge=entry.edge,
        through_ms=body.through_ms,
        closes=body.closes,
        touched=tuple(p.slice_start_ms for p in body.partials),
        wire_bytes=entry.wire_bytes,
        received_at_ms=entry.received_at_ms,
        incarnation=entry.incarnation,
        since_ms=body.since_ms,
        arrivals=body.arrivals,
        losses=body.losses,
        dropped=body.dropped,
        late=body.late,
    )


class BatchApplier:
    """Applies plans. One thread calls its methods.

    Args:
        writer: shared with the deadline thread.
        log_dir: the frame log, from which quarantined frames are copied.
    """

    def __init__(self, writer: LedgerWriter, shared: JobParts, log_dir: str | Path) -> None:
        self.writer = writer
        self._catalog, self._metrics, self._now_ms = shared.catalog, shared.metrics, shared.now_ms
        self._delays = ProcessingDelays(writer.margin)
        self._rates = StoredRates(shared)
        self._rates_at_ms = 0
        self._log = FrameLog(log_dir)
        self._set_aside: dict[str, SetAside] = {}
        self._count_set_aside()

    @property
    def set_aside(self) -> Mapping[str, SetAside]:
        """The queries whose frames are not applied, by key."""
        return dict(self._set_aside)

    def begin_term(self) -> None:
        """Begins a term: this driver leads from now on. Another driver may have solved earlier problems."""
        for key in self.set_aside:
            self.release(key)

    def quarantined(self) -> Mapping[tuple[str, int], str]:
        """Returns why frames were set aside, by key and position. Tasks do not read them. Raises StorageError."""
        return self._catalog.quarantine.frame_reasons()

    def apply(self, run: Run, outcomes: Sequence[PartMerged], times: Times) -> dict[str, QueryFault]:
        """Applies all queries of a plan together. If that fails, applies each query alone.

        Args:
            outcomes: of the plan's tasks. Partials of queries that are not in `run` are left out.

        Returns:
            Why queries were not applied, by key.

        Raises:
            Exception: the failure is not the frames' (`is_fault_of_frames`).
        """
        turn_ms = self._now_ms()
        self._state_lost(run)
        facts = self._catalog.frames.facts(positions_of(run.frames))
        failed: dict[str, QueryFault] = {}
        try:
            applied = [self._apply(run, outcomes, facts)]
        except Exception as exc:
            if not is_fault_of_frames(exc):
                raise
            applied = []
            log.warning("a batch of %d frames failed, its queries are applied alone: %s", len(run.frames), named(exc))
            for key in run.through:
                try:
                    applied.append(self._apply(run.of({key}), outcomes, facts))
                except Exception as failure:
                    if not is_fault_of_frames(failure):
                        raise
                    failed[key] = QueryFault(named(failure), isinstance(failure, NotFound | QueryTooLarge))
        self._observe(applied, times, turn_ms)
        return failed

    def count_failure(self, where: str) -> None:
        """Counts a failure after which a plan is tried again."""
        self._metrics.failures.labels(where).inc()

    def _observe(self, applied: Sequence[_Applied], times: Times, turn_ms: int) -> None:
        summaries = [summary for part, _ in applied for summary in part]
        emissions = [emission for _, part in applied for emission in part]
        now_ms = self._now_ms()
        self._metrics.observe_batch(summaries, emissions, times.began_ms, times.merged_ms, turn_ms, now_ms)
        self._store_processing_delays(summaries, now_ms)
        self._store_sampling_rates(now_ms)
        self._metrics.batches.inc()
        self._metrics.frames.inc(len(summaries))
        self._metrics.batch_seconds.observe(max(0, now_ms - times.began_ms) / 1000)
        self._metrics.last_batch.set(now_ms / 1000)

    def _apply(self, run: Run, outcomes: Sequence[PartMerged], facts: Facts) -> _Applied:
        keys = run.through.keys()
        batch = to_batch(
            run.frames,
            (d for outcome in outcomes for d in outcome.deltas if d.query in keys),
            (s for outcome in outcomes for s in outcome.skipped if s.key in keys),
            facts,
        )
        self._raise_alarms(batch.skipped, run)
        self._report_losses(batch.summaries)
        self._metrics.rows.inc(len(batch.deltas))
        return batch.summaries, self.writer.apply(batch.deltas, batch.summaries, run.through)

    def apply_loss(self, run: Run, reason: str, times: Times) -> dict[str, QueryFault]:
        """Quarantines the single frame of a plan, and applies it as a stated loss of its edge. Returns as `apply`."""
        ((key, entry),) = run.frames
        self.quarantine(entry, reason)
        skip = Skipped(key, entry.position, SkipKind.QUARANTINED, as_reason(reason))
        try:
            failed = self.apply(run, [PartMerged(skipped=(skip,))], times)
        except Exception:
            self._remove([self._catalog.quarantine.drop_frame(key, entry.position)])
            raise
        if failed:  # not even its loss can be stated: the query's state or the store is at fault
            self._remove([self._catalog.quarantine.drop_frame(key, entry.position)])
        return failed

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
        for ref, plans in self.writer.needed_plans().items():
            try:
                self._rates.store(ref, plans)
            except StorageError as exc:  # the batch has been applied; the rates matter only to overloaded edges
                log.warning("the sampling rates of %s are not stored: %s", ref.name, exc)

    def quarantine(self, entry: FrameEntry, reason: str) -> None:
        """Sets a frame aside: from now on it is read as a stated loss. Raises LeaseLost if another driver leads."""
        key = query_key(entry.query)
        self.writer.require_lease(key)
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

    def pause(self, key: str, reason: str) -> None:
        """Stops applying a query's frames, which stay in the log, until a driver begins to lead."""
        log.error("query %s is paused, its frames are kept: %s", key, reason)
        self._catalog.quarantine.set_query_aside(query_from_key(key), SetAside.PAUSED, reason, self._now_ms())
        self.leave_out(key, SetAside.PAUSED)

    def leave_out(self, key: str, state: SetAside) -> None:
        """Applies no frames of a query that is set aside, and gives it no answers, until `release`."""
        self._set_aside[key] = state
        self._count_set_aside()
        self.writer.pause(query_from_key(key), FOR_EVER_MS)

    def release(self, key: str) -> None:
        """Ends `leave_out`."""
        self._set_aside.pop(key, None)
        self._count_set_aside()
        self.writer.pause(query_from_key(key), 0)

    def _count_set_aside(self) -> None:
        states = list(self._set_aside.values())
        for state in SetAside:
            self._metrics.set_aside.labels(state).set(states.count(state))

    def _state_lost(self, run: Run) -> None:
        """Counts frames that were dropped from the index although they were never applied, and adds alarms."""
        read = positions_of(run.frames)
        for key, through in run.through.items():
            spans = read.get(key, [])
            ends = [run.after[key], *(last for _, last in spans)]
            for after, before in zip(ends, [*(first for first, _ in spans), through], strict=True):
                if after < before:
                    where = f"query {key}: frames {after + 1} to {before}"
                    self.writer.require_lease(key)
                    log.error("%s are no longer in the index and were never applied", where)
                    self._metrics.skipped.labels("lost").inc()
                    message = f"{where} were dropped unread"
                    self._catalog.alarms.add("frames-lost", message, EdgeId(""), self._now_ms(), key)

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

    def _raise_alarms(self, skipped: Iterable[Skipped], run: Run) -> None:
        """Counts skipped frames and partials, and adds alarms.

        This precedes the batch: after a crash alarms come twice rather than never.
        """
        raised, edges = list[_Alarm](), {(key, entry.position): entry.edge for key, entry in run.frames}
        for skip in skipped:
            if skip.kind is SkipKind.QUARANTINED:
                continue  # `Catalog.quarantine.add_frame` has added an alarm
            where = f"query {skip.key}, frame {skip.position}"
            if skip.kind is SkipKind.REFUSED:
                where += f", slice {skip.slice_start_ms}"
            self._metrics.skipped.labels(skip.kind).inc()
            edge = edges[skip.key, skip.position]
            raised.append(_Alarm(skip.kind, edge, skip.key, f"{where}: {skip.reason}"))
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
