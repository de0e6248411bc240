"""One query at one edge: filters records, assigns slices, updates entries, and selects the entries to send.

A slice is open until the stream's watermark passes its end. Then it is closed: its primary entries are
drained, and a `SliceClose` reports the observed records and the withheld error. It is kept for late
records until the last window over it is final, and then dropped. Of a slice that was sent completely
only the counters are kept.

The center merges session windows from the first and last event times of the slices of all edges. So for a
query with session windows each frame with records of a slice has a `SliceClose` of it, even if it is open.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace

import numpy as np
import pyarrow as pa

from edge.cache import (
    EMPTY_SELECTION,
    ErrorLimits,
    GroupHistory,
    Selection,
    SendQueue,
    SliceEntries,
    max_entries_per_frame,
    parts_of,
    positions_of,
)
from edge.core.arrival_reports import ArrivalMonitor, SamplingSettings, close_barrier_ms, is_unreported
from edge.core.backfill import Backfill
from edge.core.batch_queue import BatchQueue
from edge.core.budget_schedule import ShareSchedule
from edge.core.drift import estimate_drift
from edge.core.dropped import UnreportedDrops
from edge.core.finished import NO_COUNTERS, Counters, FinishedSlices
from edge.core.least_bytes import LEAST_EARLY_GROUPS, EarlySends, SlicePeriod, early_sends, quanta_of
from edge.core.measure_inputs import AccuracyMeasure, MeasureArguments
from edge.core.memory import FullSlices, HeldMemory, MemoryAction
from edge.core.selection import (
    PullContext,
    PullResult,
    RecordedPull,
    late_groups,
    limit_to_capacity,
    remaining_slots,
    select_groups,
)
from edge.core.shared_batch import Reading, Records
from edge.core.slices import UNKNOWN_LINK, LinkEstimate, Progress, Slice
from edge.core.streams import MAX_LOSSES, StreamState, add_loss, constant_type
from edge.records import RejectedRecords
from edgewater.guard.frame_work import FULL_FRAME_WORK, FrameWork
from edgewater.guard.partial_check import group_bytes, max_groups
from edgewater.model.accuracy import report_schedule
from edgewater.model.algebra import LateRecordPolicy, late_record_policy_of
from edgewater.model.errors import InvalidQuery, StorageError
from edgewater.model.query import BoundQuery, QuerySpec, StalenessBudget
from edgewater.model.streams import MAX_TIME_MS, MIN_TIME_MS, Constant
from edgewater.model.windows import SessionWindow
from edgewater.synopses import BoolArray, GroupedAggregate, IntArray, count_distinct, is_sampled
from edgewater.synopses.encoding.state import State
from edgewater.wire import Arrivals, FrameBody, InputLoss, LossReason, Partial, QueryRef, SliceClose

MEMORY = "memory"
"""The source of losses of records that were read, and that the query had no memory for."""
GROUP_BYTES = 32
"""What a group takes at least, besides its states: counters, and its place in the table of keys."""
SLICE_BYTES, MEASURE_BYTES = 3_500, 700
"""Memory of a slice without its groups, and of each of its measures; measured with tracemalloc."""
TYPES_REMEDY = "Restore the columns, delete the query at the center, and change them then"
NO_DRAIN_WINDOW = (MIN_TIME_MS, MIN_TIME_MS)
ENTRY_BYTES_RATE, FEW_ENTRIES = 0.3, 32
"""Weight of the newest partial in the estimated size of entries; half of it for so many entries."""


@dataclass(slots=True)
class QueryPipeline:
    """The state of one query.

    Attributes:
        since_ms: event time since which this edge has all records; earlier slices are skipped.
        schedule: this edge's shares of the error budget, per slice.
        slices: by the event time of their start.
        finished: the counters of slices that were sent completely.
        source: number of this edge; with a record's number in its stream it identifies the record.
        constants: columns that have one value in all records of its stream.
        drift: per measure, the sum of `estimate_drift` since this process began.
        accuracy_measure: the measure of the query's accuracy, if it has one.
        reading: what it computes of a batch, of which it shares what others compute too.
        max_groups: groups that a partial may have.
        max_state_bytes: as in `SourcesOpened`.
        history: the history of groups over closed slices.
        monitor: the arrival statistics of a query with early answers.
        encode: serialises a partial. The simulator replaces it where bytes are not measured.
        sampling_rate: for a function of a sample: the probability with which a record is processed.
        losses: losses of input that have not been sent.
        unreported_drops: records that came too late, which the center has not been told of.
        backfill: while records from before the registration are read again.
        full: the slices that take no more records, as open slices hold too much memory.
        queue: the batches that it has not processed.
    """

    ref: QueryRef
    bound: BoundQuery
    since_ms: int = MIN_TIME_MS
    schedule: ShareSchedule = field(default_factory=ShareSchedule)
    slices: dict[int, Slice] = field(default_factory=dict)
    finished: FinishedSlices = field(default_factory=FinishedSlices)
    progress: Progress = field(default_factory=Progress)
    source: int = 0
    constants: Mapping[str, Constant] = field(default_factory=dict)
    drift: dict[str, float] = field(default_factory=dict)
    reading: Reading = field(init=False)
    late_record_policy: LateRecordPolicy = field(init=False)
    accuracy_measure: AccuracyMeasure | None = field(init=False)
    max_groups: int = field(init=False)
    max_state_bytes: int | None = None
    _state_bytes: int = field(init=False)
    _slice_bytes: int = field(init=False)
    _divisors: dict[str, int] = field(init=False)
    history: GroupHistory = field(default_factory=GroupHistory)
    monitor: ArrivalMonitor | None = None
    encode: Callable[[GroupedAggregate], bytes] = GroupedAggregate.to_bytes
    sampling_rate: float = 1.0
    losses: tuple[InputLoss, ...] = ()
    unreported_drops: UnreportedDrops = field(default_factory=UnreportedDrops)
    backfill: Backfill | None = None
    full: FullSlices = field(default_factory=FullSlices)
    queue: BatchQueue = field(default_factory=BatchQueue)

    def __post_init__(self) -> None:
        if self.bounded_measures and not self.history.measures:
            self.history = GroupHistory(self.bounded_measures)
        self.reading = Reading.of(self.bound, self.ref)
        self.late_record_policy = late_record_policy_of(self.bound.spec)
        clock = report_schedule(self.spec.window, self.spec.accuracy, self.spec.lateness_ms)
        if clock is not None and self.monitor is None:
            self.monitor = ArrivalMonitor(clock, self.source, self.bound.group_types, self.spec.sampling_seed)
        self.accuracy_measure = AccuracyMeasure(self.bound) if self.spec.accuracy is not None else None
        self._state_bytes = group_bytes(self.bound)
        self._slice_bytes = SLICE_BYTES + MEASURE_BYTES * len(self.spec.measures)
        self.max_groups = max_groups(self._state_bytes)
        budget, k = self.spec.error_budget, self.spec.window.slices_per_window
        functions = {m.name: m.function for m in self.spec.measures}
        limits = () if budget is None else budget.limits
        self._divisors = {name: k if functions[name].error == "sum" else 1 for name, _ in limits}

    @property
    def spec(self) -> QuerySpec:
        return self.bound.spec

    @property
    def nbytes(self) -> int:
        monitored = self.monitor.nbytes if self.monitor is not None else 0
        slices = sum(map(self._nbytes_of, self.slices.values())) + self.finished.nbytes
        return slices + self.history.nbytes + monitored

    def _nbytes_of(self, slice_: Slice) -> int:
        return slice_.entries.nbytes + self._slice_bytes

    @property
    def ships_rows(self) -> bool:
        """Whether the accuracy is about a function of a sample, so that sampled rows are sent."""
        return self.spec.accuracy is not None and self.spec.accuracy.kind is None

    @property
    def bounded_measures(self) -> tuple[str, ...]:
        """All measures of a query with a budget: the withheld error of each is reported."""
        may_withhold = self.spec.budget is not None and self.spec.accuracy is None
        return tuple(m.name for m in self.spec.measures) if may_withhold else ()

    def ingest(
        self, batch: Records, watermark_ms: int, batch_number: int, arrival_ms: int = MIN_TIME_MS
    ) -> dict[str, int]:
        """Updates the slices with a batch; returns the numbers of records that were not counted, by reason.

        Args:
            batch_number: ascending over the batches of all streams.
            arrival_ms: event time by the stream's clock at which the batch arrived.
        """
        matching = batch.matching(self.bound, self.reading)
        if not len(matching):
            return {}
        dropped: dict[str, int] = {}
        for start, records in matching.by_slice(self.spec.window, self.reading):
            reason = self._drop_reason(start, watermark_ms) or self._too_large(start, records)
            if reason:
                dropped[reason] = dropped.get(reason, 0) + len(records)
                self.unreported_drops.add(start, reason, len(records))
                if reason == LossReason.QUERY_MEMORY:
                    self._state_full(start)
                continue
            arguments, kept = MeasureArguments(self.bound, records.batch), None
            if self.monitor is not None and self.accuracy_measure is not None:
                kept = self.monitor.sample(records.ids)
                corrected_ms = arrival_ms - self.monitor.sampling.clock_offset_ms
                observed = self.accuracy_measure.observed(arguments, kept)
                keys = self.bound.key_arrays(records.batch)
                self.monitor.observe(
                    records.times, corrected_ms, observed.values, kept, keys, observed.population, observed.bounds
                )
                arguments = observed.processed
            elif self.sampling_rate < 1.0 and self._end(start) > watermark_ms:
                # Late records are not sampled: they would lower the rate of the sample that has been sent already.
                kept = is_sampled(self.source, records.ids, self.sampling_rate, self.spec.sampling_seed)
                arguments = arguments.filter(kept)
            if kept is not None:
                sampled_out = len(records) - int(kept.sum())
                dropped["sampled-out"] = dropped.get("sampled-out", 0) + sampled_out
            self._update(start, records, arguments, watermark_ms, batch_number, kept, arrival_ms)
            if kept is not None and self.monitor is not None:
                self.slices[start].unreported_until_ms = self.monitor.last_arrival_ms
        return dropped

    def watermark_ms(self, stream_ms: int) -> int:
        """Returns the stream's watermark, or less while the queue or the backfill may have records before it."""
        if self.queue:
            stream_ms = self.queue.first.watermark_ms
        return stream_ms if self.backfill is None else min(stream_ms, self.backfill.watermark_ms)

    def decides_alike(self, watermark_ms: int, other_ms: int) -> bool:
        """Returns whether the same records are late, and too late, at two watermarks of the stream."""
        slice_start, lateness_ms = self.spec.window.slice_start, self.spec.lateness_ms
        return slice_start(watermark_ms) == slice_start(other_ms) and (
            slice_start(watermark_ms - lateness_ms) == slice_start(other_ms - lateness_ms)
        )

    def end_backfill(self, sources: Collection[str]) -> None:
        """Ends the backfill of these sources; the records that it has not read are stated as lost to this query."""
        assert self.backfill is not None
        for source in sorted(sources):
            for from_ms, to_ms, records in self.backfill.end(source):
                number = records if self.bound.where is None else None
                loss = self._not_final(InputLoss(source, LossReason.BEFORE_QUERY, from_ms, to_ms, number))
                self.losses += () if loss is None else (loss,)  # apart, so that only these windows lack records
        if not self.backfill.unread:
            self.backfill = None

    def lose(self, loss: InputLoss) -> None:
        """Adds a loss of input, to be sent with the next frame, if the query may lack its records."""
        counted = self._not_final(loss)
        if counted is not None:
            self.losses = add_loss(self.losses, counted)

    def reject(self, rejected: RejectedRecords, arrival_ms: int) -> None:
        """Adds rejected records, to be stated with the next frame, if windows of the query may lack them.

        Args:
            arrival_ms: wall time.
        """
        window = self.spec.window
        from_ms = self.since_ms if rejected.from_ms is None else max(rejected.from_ms, self.since_ms)
        to_ms = MAX_TIME_MS if rejected.to_ms is None else rejected.to_ms
        if from_ms < to_ms:
            start = from_ms if from_ms == MIN_TIME_MS else window.slice_start(from_ms)
            until = to_ms if to_ms == MAX_TIME_MS else self._end(window.slice_start(to_ms - 1))
            self.unreported_drops.add(start, rejected.reason, rejected.records, until)
            self.unreported_drops.begin(arrival_ms)

    def _not_final(self, loss: InputLoss) -> InputLoss | None:
        """Returns the part of a loss that may lie in windows that are not final here. None: there is no such part, and
        the lost records count in no window of the query.
        """
        window, from_ms, through = self.spec.window, self.since_ms, self.progress.through_ms
        if through > MIN_TIME_MS:
            passed_ms = window.slice_start(through - self.spec.lateness_ms)
            if loss.to_ms is None or loss.to_ms > passed_ms:
                # Each of these windows that has a moment of the loss before `passed_ms` contains `passed_ms` too.
                from_ms = max(from_ms, passed_ms)
            elif self._final(window.slice_start(loss.to_ms - 1), through):
                return None
        if from_ms > MIN_TIME_MS:
            loss = replace(loss, from_ms=max(from_ms, loss.from_ms or MIN_TIME_MS))
        return loss if loss.from_ms is None or loss.to_ms is None or loss.from_ms < loss.to_ms else None

    def apply_sampling(self, settings: SamplingSettings) -> None:
        """Applies the sampling settings from the center."""
        assert self.monitor is not None
        step_ms = settings.clock_offset_ms - self.monitor.sampling.clock_offset_ms
        self.monitor.sampling = settings
        if step_ms > self.monitor.schedule.grid.substream_ms:
            self.monitor.restart_reports()
            for slice_ in self.slices.values():
                slice_.unreported_until_ms = max(slice_.unreported_until_ms - step_ms, MIN_TIME_MS)

    def _drop_reason(self, start: int, watermark_ms: int) -> str:
        if start < self.since_ms:
            return "before-query"
        if self.late_record_policy is LateRecordPolicy.DROPPED and self._end(start) <= watermark_ms:
            return "out-of-order"
        if self._final(start, watermark_ms):
            return "too-late"
        is_full = self.full.refuses(start, is_open=self._end(start) > watermark_ms)
        return LossReason.QUERY_MEMORY if is_full else ""

    def _too_large(self, start: int, records: Records) -> str:
        """Returns the reason not to count these records, if their new groups would take too much memory.

        A state of fixed size is up to 3 MiB a measure, so a batch of a few hundred groups may take more than there is.
        """
        size, limit = self._state_bytes + GROUP_BYTES, self.max_state_bytes
        if limit is None or len(records) * size <= limit // 8 or not self.spec.group_by:
            return ""
        keys = records.keys(self.bound, self.reading).distinct
        groups = len(keys[0])
        if start in self.slices:
            known = self.slices[start].entries.pending.rows()
            groups = count_distinct([pa.concat_arrays([*pair]) for pair in zip(known, keys, strict=True)])
        others = sum(len(slice_.entries) for other, slice_ in self.slices.items() if other != start)
        return LossReason.QUERY_MEMORY if (others + groups) * size > limit else ""

    def held_memory(self, watermark_ms: int) -> HeldMemory:
        """Returns the memory that slices hold, and whether it grows and is limited."""
        held, finished = self._holding(watermark_ms), self.finished.nbytes
        open_ = [start for start in held if self._end(start) > watermark_ms]
        return HeldMemory(
            sum(map(self._nbytes_of, held.values())) + finished,
            sum(self._nbytes_of(slice_) for slice_ in held.values() if slice_.close_reported) + finished,
            any(not self.full.refuses(start, is_open=True) for start in open_),
            any(start in self.full.suspended for start in open_),
        )

    def _holding(self, watermark_ms: int) -> dict[int, Slice]:
        """Returns the slices with groups that no link frees: open ones, and those kept for late records."""
        return {
            start: slice_
            for start, slice_ in sorted(self.slices.items())
            if len(slice_.entries) and (slice_.close_reported or self._end(start) > watermark_ms)
        }

    def limit_memory(self, action: MemoryAction, watermark_ms: int) -> None:
        """Applies a decision about the memory that slices hold."""
        held = self._holding(watermark_ms)
        match action:
            case MemoryAction.SUSPEND:
                self.full.suspended = {start for start in held if self._end(start) > watermark_ms}
            case MemoryAction.RESUME:
                self.full.suspended.clear()
            case MemoryAction.DISCARD:
                self._forget_closed(held, 1.0)
                for start, slice_ in held.items():
                    if not slice_.close_reported:
                        self._discard(start, slice_)
            case MemoryAction.FORGET:
                self._forget_closed(held, 0.5)

    def _forget_closed(self, held: Mapping[int, Slice], fraction: float) -> None:
        """Forgets the oldest closed slices, which take no late records then. What they withhold is reported."""
        closed = [start for start, slice_ in held.items() if slice_.close_reported]
        starts = np.union1d(np.array(closed, np.int64), self.finished.starts())
        if not len(starts):
            return
        floor_ms = self._end(int(starts[math.ceil(fraction * len(starts)) - 1]))
        for start in closed:
            if start < floor_ms:
                del self.slices[start]
        self.finished.forget_before(floor_ms)
        self.full.raise_floor(floor_ms)

    def _discard(self, start: int, slice_: Slice) -> None:
        """Drops the groups of an open slice. What was sent of it stays counted."""
        self.full.discard(start)
        unsent = int(slice_.entries.pending_records.sum())
        if unsent:
            self._state_full(start)
        if slice_.observed > unsent:
            slice_.observed -= unsent
            slice_.late = min(slice_.late, slice_.observed)
            slice_.entries = SliceEntries.for_query(self.bound, self.source, self.bounded_measures)
            slice_.send_queue, slice_.pending_count = SendQueue(), ((), 0)
        else:
            del self.slices[start]

    def _state_full(self, start: int) -> None:
        """States once that records of a full slice are lost; adjacent slices in one statement."""
        span = self.full.state(start)
        if span is None:
            return
        loss = InputLoss(MEMORY, LossReason.QUERY_MEMORY, span[0], self._end(span[1]))
        last = self.losses[-1] if self.losses else None
        continues = last is not None and last.reason == loss.reason and last.to_ms == loss.from_ms
        apart = not continues and len(self.losses) < MAX_LOSSES
        self.losses = (*self.losses, loss) if apart else add_loss(self.losses, loss)

    def _update(
        self,
        start: int,
        records: Records,
        arguments: MeasureArguments,
        watermark_ms: int,
        batch_number: int,
        kept: BoolArray | None,
        arrival_ms: int,
    ) -> None:
        """Counts the records of a slice, and updates its entries with the `kept` ones (None: all).

        Args:
            arguments: of the kept records.
        """
        slice_ = self.slices.get(start)
        if slice_ is None:
            slice_ = self.slices[start] = Slice(
                SliceEntries.for_query(self.bound, self.source, self.bounded_measures),
                *(self.finished.get(start) or ()),
            )
            slice_.first_arrival_ms = arrival_ms
        rows, (first_ms, last_ms) = len(records), records.extent
        slice_.observed += rows
        slice_.first_ms, slice_.last_ms = min(slice_.first_ms, first_ms), max(slice_.last_ms, last_ms)
        if self._end(start) <= watermark_ms:
            slice_.late += rows
        slice_.close_reported = False
        if self.ships_rows and kept is not None:
            slice_.sampling_rate = min(slice_.sampling_rate, self.sampling_rate)
        if slice_.sampling_rate < 1.0:
            slice_.entries.set_sampling_rate(slice_.sampling_rate)
        if self.ships_rows and kept is not None:
            # The center must also know the groups of which no row was sampled.
            keys = self.bound.key_arrays(records.batch)
            slice_.entries.add_groups(keys, rows, batch_number, self._elapsed(start, last_ms))
        if kept is not None:
            records = records.filtered(kept)
            if not len(records):
                return
            first_ms, last_ms = records.extent
        slice_.entries.update(
            records.keys(self.bound, self.reading),
            arguments.by_measure(),
            len(records),
            records.times,
            batch_number,
            records.ids if slice_.entries.pending.samples else None,
            self._elapsed(start, last_ms),
            self._parts(start, records),
            positions_of(records.times, start, self.spec.window.slice_ms) if slice_.entries.keeps_times else None,
        )

    def _parts(self, start: int, records: Records) -> IntArray:
        """Returns the parts of the slice that the records are in; one, if it is the same for all."""
        slice_ms = self.spec.window.slice_ms
        bounds = parts_of(np.array(records.extent), start, slice_ms)
        return bounds[:1] if bounds[0] == bounds[1] else parts_of(records.times, start, slice_ms)

    def _end(self, start: int) -> int:
        return start + self.spec.window.slice_ms

    def _final(self, start: int, watermark_ms: int) -> bool:
        return self.spec.window.last_window_end(start) + self.spec.lateness_ms <= watermark_ms

    @property
    def shares(self) -> Mapping[str, float]:
        """The shares of future slices, per measure and window."""
        return self.schedule.last.shares

    def set_shares(self, version: int, shares: Mapping[str, float], from_ms: int) -> None:
        """Applies new shares from the center. Closed slices keep the shares under which they were closed."""
        if version == 0:  # unversioned shares apply to all slices, including closed ones
            if dict(shares) != dict(self.shares):
                self.schedule = ShareSchedule.uniform(shares)
                for slice_ in self.slices.values():
                    slice_.close_reported, slice_.send_queue = False, SendQueue()
            return
        through = self.progress.through_ms
        not_closed = MIN_TIME_MS if through == MIN_TIME_MS else self.spec.window.slice_start(through)
        self.schedule = self.schedule.updated(version, shares, from_ms, not_closed)

    def slice_shares(self, start: int) -> dict[str, float]:
        """Returns the shares of a slice: of k slices of a window each may withhold E/k, or E for extrema."""
        if not self._divisors:
            return {}
        shares = self.schedule.at(start)
        return {name: shares.get(name, 0.0) / slices for name, slices in self._divisors.items()}

    def closed_bytes(self, watermark_ms: int) -> int:
        """Returns the estimated bytes of closed slices that are still to be sent."""
        through = self._close_barrier_ms(watermark_ms)
        return sum(size for end, size in self._pending_bytes() if end <= through)

    def open_bytes(self, watermark_ms: int) -> tuple[int, int | None]:
        """Returns, under a staleness budget, the estimated bytes of open slices, and the first end of these slices."""
        if not self.is_staleness_bound:
            return 0, None  # it sends at its report times, or what `early_sends` demands
        sizes = [(end, size) for end, size in self._pending_bytes() if end > watermark_ms and size]
        return sum(size for _, size in sizes), min((end for end, _ in sizes), default=None)

    def early_due_ms(self, watermark_ms: int, now_ms: int, link: LinkEstimate) -> float | None:
        """Returns the event time from which entries of an open slice cannot wait for its close; None: all can."""
        if not self.sends_at_need:
            return None
        open_ = [(start, slice_) for start, slice_ in self.slices.items() if self._end(start) > watermark_ms]
        early = [self._early_sends(start, slice_, watermark_ms, now_ms, link) for start, slice_ in open_]
        return min((e.from_ms for e in early if e is not None), default=None)

    def _early_sends(
        self, start: int, slice_: Slice, watermark_ms: int, now_ms: int, link: LinkEstimate
    ) -> EarlySends | None:
        if not self.sends_at_need:
            return None
        period = SlicePeriod(start, self._end(start), now_ms, watermark_ms)
        limits = self._limits(start)
        return early_sends(slice_, self.spec, self.history, limits, period, link, self.progress.entry_bytes)

    def _limits(self, start: int) -> ErrorLimits:
        relative = dict(self.spec.error_budget.relative) if self.spec.error_budget is not None else {}
        return ErrorLimits(self.slice_shares(start), relative)

    def _elapsed(self, start: int, now_ms: int) -> float:
        """Returns the elapsed fraction of a slice, 0 to 1."""
        return min(max((now_ms - start) / self.spec.window.slice_ms, 0.0), 1.0)

    def _pending_bytes(self) -> Iterator[tuple[int, int]]:
        """Yields the end of each slice and the estimated bytes that it has to send."""
        for start, slice_ in self.slices.items():
            if self._is_unreported(slice_) or (slice_.close_reported and self._has_deadline(start, slice_)):
                continue  # entries omitted under a staleness budget are not sent
            pending = slice_.count_pending(self._limits(start), 1.0)
            yield self._end(start), int(pending * self.progress.entry_bytes)

    def has_unreported_closes(self, watermark_ms: int) -> bool:
        """Returns whether the watermark has closed slices that have not been reported, or input was lost."""
        through = self._close_barrier_ms(watermark_ms)
        return (
            bool(self.losses)
            or self._passed_slice_end(through)
            or any(
                not slice_.close_reported and self._end(start) <= through and not self._is_unreported(slice_)
                for start, slice_ in self.slices.items()
            )
        )

    def _is_unreported(self, slice_: Slice) -> bool:
        return self.monitor is not None and is_unreported(slice_, self.monitor.reported_before_ms)

    def _close_barrier_ms(self, watermark_ms: int) -> int:
        """Returns the event time up to which slices may be closed."""
        if self.monitor is None:
            return watermark_ms
        reported_before_ms, through_ms = self.monitor.reported_before_ms, self.progress.through_ms
        return close_barrier_ms(self.slices, self.spec, reported_before_ms, watermark_ms, through_ms)

    def _passed_slice_end(self, through_ms: int) -> bool:
        """Returns whether a slice has ended since the last reported progress."""
        slice_start = self.spec.window.slice_start
        return through_ms > MIN_TIME_MS and slice_start(through_ms) > slice_start(self.progress.through_ms)

    def pull(
        self,
        capacity_bytes: int,
        watermark_ms: int,
        drain_window_ms: tuple[int, int] = NO_DRAIN_WINDOW,
        link: LinkEstimate = UNKNOWN_LINK,
        unread: bool = False,
        recorded: RecordedPull | None = None,
        report_drops: bool = False,
        arrivals_before_ms: int = MAX_TIME_MS,
    ) -> PullResult | None:
        """Builds the body of the most urgent frame: closed slices first, oldest first; None: nothing to send.

        Args:
            capacity_bytes: approximate size of the body before compression. At least one entry is sent, so that a
                small capacity delays but never blocks. The body's work is bounded too (`FULL_FRAME_WORK`).
            drain_window_ms: as in `PullEvent.drain_windows`. Slices that end after now may be sent from early;
                under a staleness budget also slices that should have closed.
            link: the measured link, for staleness budgets.
            unread: whether the stream may have unread input.
            recorded: in a replay, the recorded outcome: the same groups are sent again, with the values of this state.
            report_drops: a frame is built even if it has nothing but `unreported_drops`.
            arrivals_before_ms: event time by the stream's clock; records that arrived later have not been processed.
        """
        heard_ms = min(drain_window_ms[0], arrivals_before_ms)
        if self.monitor is not None:
            self.monitor.choose_detail(link.bytes_per_ms)
        arrivals, partials = self._take_due_arrivals(heard_ms, watermark_ms, capacity_bytes, unread, recorded)
        closes: list[SliceClose] = []
        closed: list[int] = []
        through, room, closing = self._close_barrier_ms(watermark_ms), capacity_bytes, False
        work = FrameWork.of(self.spec)
        work.units = sum(work.of_partial(len(p.synopsis)) for p in partials)
        for start in sorted(self.slices):
            slice_ = self.slices[start]
            end = self._end(start)
            if recorded is None and work.units >= FULL_FRAME_WORK:
                through = min(through, end - 1)
                break
            now_ms = drain_window_ms[0]
            early = self._early_sends(start, slice_, watermark_ms, now_ms, link) if end > watermark_ms else None
            if end > watermark_ms and (closing or not self._may_send_early(end, drain_window_ms, early)):
                continue  # a frame that closes a slice is sent at once, not filled with early sends
            if end <= watermark_ms and (end > through or self._is_unreported(slice_)):
                continue
            made: list[Partial] = []
            slice_.forget_unchanged(self._limits(start))
            selection = self._select(start, slice_, room, end <= watermark_ms, drain_window_ms, link, early)
            selection = limit_to_capacity(slice_, selection, capacity_bytes, self.progress.entry_bytes)
            if recorded is not None:
                selection = recorded.replace_selection(start, slice_, selection)
            if len(selection.groups):
                made = [self._partial(start, slice_, selection.groups, recorded)]
                partials += made
                room -= sum(len(p.synopsis) for p in made)
                work.units += sum(work.of_partial(len(p.synopsis)) for p in made)
            if made and self._has_session_windows and (end > watermark_ms or not selection.drained):
                closes.append(self._slice_close(start, slice_))
            if end > watermark_ms:
                continue
            if not selection.drained:
                through = min(through, end - 1)
                break
            if not slice_.close_reported:
                closes.append(self._close(start, slice_))
                closed.append(start)
                closing = True
                work.add_slice(start, work.of_close(len(closes[-1].withheld)))
        if recorded is not None:
            if recorded.result is None:
                return None
            self._replay_rest(recorded, partials, closes, closed)
            through = recorded.result.body.through_ms
        through = max(through, self.progress.through_ms)
        if (
            recorded is None
            and not partials
            and not closes
            and arrivals is None
            and not self.losses
            and not self._passed_slice_end(through)
            and not (report_drops and self.unreported_drops)
        ):
            return None
        losses = self._take_losses(through, recorded)
        self.progress.through_ms = through
        self._drop_final(watermark_ms)
        since = None if self.since_ms == MIN_TIME_MS else self.since_ms
        dropped = self.unreported_drops.take()
        body = FrameBody(through, tuple(partials), tuple(closes), since, arrivals, losses, dropped)
        return PullResult(body, tuple(closed))

    def _take_losses(self, through_ms: int, recorded: RecordedPull | None) -> tuple[InputLoss, ...]:
        losses = self.losses
        sent = losses if recorded is None or recorded.result is None else recorded.result.body.losses
        # A loss that this replay has found is not in the recorded frame; it is sent with the next one. The records of
        # slices that the recorded frame closes are in it or in an earlier one.
        kept = (self._not_sent(loss, through_ms) for loss in losses if loss not in sent)
        self.losses = tuple(
            loss for loss in kept if loss.to_ms is None or loss.from_ms is None or loss.from_ms < loss.to_ms
        )
        return losses

    def _not_sent(self, loss: InputLoss, through_ms: int) -> InputLoss:
        """Returns the part of a loss after the slices that are closed through `through_ms`.

        Progress is made only once all older slices have been sent, those with late records too. With early answers, a
        slice may be left out.
        """
        before_ms, from_ms = self.progress.through_ms, MIN_TIME_MS if loss.from_ms is None else loss.from_ms
        if through_ms <= before_ms or (self.monitor is not None and from_ms < before_ms):
            return loss
        return replace(loss, from_ms=max(from_ms, self.spec.window.slice_start(through_ms)))

    def _close(self, start: int, slice_: Slice) -> SliceClose:
        """Closes a slice that has been sent completely; returns its report."""
        report = self._slice_close(start, slice_)
        self._record_drift(start, slice_.entries)
        slice_.close_reported = True
        if not self.bounded_measures or not len(slice_.entries):
            self._finish(start, self.slices.pop(start).counters)
        return report

    def _finish(self, start: int, counters: Counters) -> None:
        if start >= self.full.floor_ms:  # earlier ones take no late records
            self.finished[start] = counters

    def _replay_rest(
        self, recorded: RecordedPull, partials: list[Partial], closes: list[SliceClose], closed: Sequence[int]
    ) -> None:
        """Applies the recorded sends and closes that the replay did not reach because its values differ or are lost."""
        for start in [s for s in recorded.partials if s in self.slices]:
            slice_ = self.slices[start]
            groups = recorded.replace_selection(start, slice_, EMPTY_SELECTION).groups
            partials.append(self._partial(start, slice_, groups, recorded))
        for start in recorded.closed:
            if start not in closed and start in self.slices:
                closes.append(self._close(start, self.slices[start]))
        for close in recorded.result.body.closes if recorded.result is not None else ():
            self._restore_counters(close)

    def _restore_counters(self, close: SliceClose) -> None:
        """Raises the counters of a slice to the recorded ones: records that are lost for a replay have been counted."""
        start = close.slice_start_ms
        slice_ = self.slices.get(start)
        observed, late, first_ms, last_ms = (
            slice_.counters if slice_ is not None else self.finished.get(start) or NO_COUNTERS
        )
        if close.observed <= observed and close.late <= late:
            return
        counters = (
            max(observed, close.observed),
            max(late, close.late),
            first_ms if close.first_ms is None else min(first_ms, close.first_ms),
            last_ms if close.last_ms is None else max(last_ms, close.last_ms),
        )
        if slice_ is None:
            self._finish(start, counters)
        else:
            slice_.observed, slice_.late, slice_.first_ms, slice_.last_ms = counters

    def _take_due_arrivals(
        self, now_ms: int, watermark_ms: int, capacity_bytes: int, unread: bool, recorded: RecordedPull | None
    ) -> tuple[Arrivals | None, list[Partial]]:
        """Takes, for a query with early answers, the due arrival report and all pending values of ended slices."""
        if self.monitor is None or now_ms == MIN_TIME_MS:
            return None, []
        now_ms -= self.monitor.sampling.clock_offset_ms
        count = None if recorded is None else recorded.substreams
        arrivals = self.monitor.take(now_ms, capacity_bytes, unread=unread, count=count)
        if arrivals is None:
            return None, []
        partials = []
        for start in sorted(s for s in self.slices if watermark_ms < self._end(s) <= now_ms):
            slice_ = self.slices[start]
            groups = np.flatnonzero(slice_.entries.has_pending)
            if recorded is not None:
                groups = recorded.replace_selection(start, slice_, Selection(groups, True)).groups
            if len(groups):
                partials.append(self._partial(start, slice_, groups, recorded))
        return arrivals, partials

    def _select(
        self,
        start: int,
        slice_: Slice,
        room: int,
        closed: bool,
        drain_window_ms: tuple[int, int],
        link: LinkEstimate,
        early: EarlySends | None,
    ) -> Selection:
        """Selects the groups of a slice to send now, of about `room` bytes; at least one if there is any room."""
        entry_bytes, end = self.progress.entry_bytes, self._end(start)
        count = min(max(1, int(room / entry_bytes)), self.max_groups) if room > 0 else 0
        # Omitted values have to be reported as withheld, which is possible only for bounded measures.
        slots, late = None, 0
        if self.bounded_measures and self._has_deadline(start, slice_):
            slots = remaining_slots(self.spec, end, drain_window_ms[0], link, self.progress.entry_bytes)
            late = self._late_groups(start, drain_window_ms[0], link) if closed and not slice_.learned else 0
        if not closed and self.spec.cache.eviction == "gain":
            rate, large = link.bytes_per_ms / entry_bytes, self.packs_small
            most = max_entries_per_frame(end - drain_window_ms[0], rate, large=large)
            count = min(count, max(most, early.in_one_frame) if early is not None else most)
        if early is not None:
            count = min(count, early.entries, early.fitting)
        least = LEAST_EARLY_GROUPS if self._picks else 0
        context = PullContext(start, end, closed, drain_window_ms[0], count, late, least)
        return select_groups(slice_, self.spec, self.history, self._limits(start), context, slots)

    def _has_deadline(self, start: int, slice_: Slice) -> bool:
        """Whether a staleness budget limits what is sent of a slice.

        A slice whose first records arrived after the deadline, such as those of a backfill, is sent completely: it
        delays no answer that a reader waits for. The deadline is compared at the stream's speed 1, which is
        exact for live streams.
        """
        budget = self.spec.budget
        if not isinstance(budget, StalenessBudget):
            return False
        return slice_.first_arrival_ms <= self._end(start) + budget.staleness_ms

    def _late_groups(self, start: int, now_ms: int, link: LinkEstimate) -> int:
        """Returns how many groups of a slice may be sent after its deadline. Newer ended slices come first."""
        newer = sum(
            len(slice_.entries)
            for other, slice_ in self.slices.items()
            if other > start and self._end(other) <= now_ms and not slice_.close_reported
        )
        return max(late_groups(self.spec, link, self.progress.entry_bytes) - newer, 0)

    @property
    def _has_relative_limit(self) -> bool:
        budget = self.spec.error_budget
        return budget is not None and bool(budget.relative)

    @property
    def _has_session_windows(self) -> bool:
        return isinstance(self.spec.window, SessionWindow)

    def _slice_close(self, start: int, slice_: Slice) -> SliceClose:
        extent = (slice_.first_ms, slice_.last_ms) if self._has_session_windows else (None, None)
        withheld = slice_.entries.withheld(shares=self._has_relative_limit)
        return SliceClose(start, slice_.observed, slice_.late, withheld, *extent)

    def _may_send_early(self, end: int, drain_window_ms: tuple[int, int], early: EarlySends | None) -> bool:
        after, through = drain_window_ms
        if self.is_staleness_bound:
            return through > after or end <= after
        return early is not None and early.from_ms <= after

    @property
    def is_staleness_bound(self) -> bool:
        """Whether the query has a staleness budget: its answers are due at a fixed time, complete or not."""
        return isinstance(self.spec.budget, StalenessBudget)

    @property
    def sends_at_need(self) -> bool:
        """Whether entries of open slices are sent when `early_sends` says so."""
        return self.monitor is None and not self.is_staleness_bound

    @property
    def _picks(self) -> bool:
        """Whether an open slice sends only entries that will probably not change."""
        return self.sends_at_need and not self.spec.saves_bytes and self.spec.cache.eviction == "gain"

    @property
    def packs_small(self) -> bool:
        """Whether frames are made as small as possible: every byte delays a deadline or costs a byte of a budget."""
        return self.spec.saves_bytes or self.is_staleness_bound

    def _partial(self, start: int, slice_: Slice, groups: IntArray, recorded: RecordedPull | None) -> Partial:
        groups = slice_.entries.in_key_order(groups)
        self._record_drift(start, slice_.entries, groups)
        slice_.discount_pending(self._limits(start), groups)
        sent = recorded.partials.pop(start) if recorded is not None else None
        quanta = quanta_of(self.spec, self.slice_shares(start), slice_.entries.pending.measures)
        data = self.encode(slice_.entries.send(groups, sent, quanta))
        # The estimate follows the actual size of entries, so that frames are about as large as the capacity. Partials
        # of few entries are mostly header.
        weight = ENTRY_BYTES_RATE * len(groups) / (len(groups) + FEW_ENTRIES)
        self.progress.entry_bytes += weight * (len(data) / len(groups) - self.progress.entry_bytes)
        return Partial(start, data)

    def _record_drift(self, start: int, entries: SliceEntries, groups: IntArray | None = None) -> None:
        """Adds the drift of groups that are sent, or (None) of all groups that a closed slice withholds."""
        for measure, share in self.slice_shares(start).items():
            error = entries.accumulated_error(measure, groups)
            amount = estimate_drift(error if groups is not None else error[entries.has_pending], share)
            self.drift[measure] = self.drift.get(measure, 0.0) + amount

    def _drop_final(self, watermark_ms: int) -> None:
        done = [
            s
            for s, slice_ in self.slices.items()
            if slice_.close_reported and s < watermark_ms and self._final(s, watermark_ms)
        ]
        for start in done:
            del self.slices[start]
        self.finished.forget(lambda start: self._final(start, watermark_ms))
        self.full.forget(lambda start: self._final(start, watermark_ms))
        if done and self.slices:
            self.schedule = self.schedule.without_before(min(self.slices))

    def to_state(self) -> State:
        """Returns the state. The spec is bound again on reading, as a new release may evaluate it otherwise."""
        numbers = {
            "query": [self.ref.name, self.ref.version],
            "spec": self.spec.to_mapping(),
            "types": _types_of(self.bound, self.constants),
            "since_ms": self.since_ms,
            "schedule": self.schedule.to_state(),
            "progress": [self.progress.through_ms, self.progress.entry_bytes],
            "sampling_rate": self.sampling_rate,
            "losses": [astuple(loss) for loss in self.losses],
            "unreported_drops": self.unreported_drops.to_state(),
            "backfill": None if self.backfill is None else self.backfill.to_state(),
            "full": self.full.to_state(),
        }
        slices = {str(start): slice_.to_state() for start, slice_ in sorted(self.slices.items())}
        components = {
            "history": self.history.to_state(),
            "slices": State(components=slices),
            "finished": self.finished.to_state(),
        }
        if self.monitor is not None:
            components["monitor"] = self.monitor.to_state()
        return State(numbers, {}, components)

    @classmethod
    def from_state(
        cls,
        state: State,
        streams: Mapping[str, StreamState],
        source: int,
        encode: Callable[[GroupedAggregate], bytes],
    ) -> QueryPipeline | None:
        """Builds the pipeline from its state; returns None if the configuration no longer has the query's stream.

        Raises:
            StorageError: the stream no longer has a column that the query needs.
        """
        numbers, components = state.numbers, state.components
        ref, spec = QueryRef(*numbers["query"]), QuerySpec.from_mapping(numbers["spec"])
        stream = streams.get(spec.stream)
        if stream is None:
            return None
        try:
            bound = spec.bind(stream.spec.columns)
        except InvalidQuery as exc:
            # Without the query, the values that it has not sent yet would be lost.
            raise StorageError(
                f"the columns of stream {spec.stream} do not match query {ref.name}, which this edge runs: {exc}. "
                f"{TYPES_REMEDY}"
            ) from exc
        types = _types_of(bound, stream.spec.constants)
        if types != numbers["types"]:
            raise StorageError(
                f"query {ref.name}, which this edge runs, has counted keys and values of other types than the columns "
                f"of stream {spec.stream} have now: {numbers['types']}, now {types}. {TYPES_REMEDY}"
            )
        schedule = ShareSchedule.from_state(numbers["schedule"])
        result = cls(
            ref, bound, numbers["since_ms"], schedule, source=source, constants=stream.spec.constants, encode=encode
        )
        result.progress, result.sampling_rate = Progress(*numbers["progress"]), numbers["sampling_rate"]
        result.finished = FinishedSlices.from_state(components["finished"])
        result.losses = tuple(InputLoss(*loss) for loss in numbers["losses"])
        result.unreported_drops = UnreportedDrops.from_state(numbers["unreported_drops"])
        if numbers["backfill"] is not None:
            result.backfill = Backfill.from_state(numbers["backfill"])
        result.full = FullSlices.from_state(numbers["full"])
        result.history = GroupHistory.from_state(components["history"])
        if result.monitor is not None:
            reports, key_types = result.monitor.schedule, result.monitor.key_types
            result.monitor = ArrivalMonitor.from_state(
                components["monitor"], reports, source, key_types, spec.sampling_seed
            )
        for start, slice_ in components["slices"].components.items():
            result.slices[int(start)] = Slice.from_state(slice_, result.bounded_measures)
        return result


def _types_of(bound: BoundQuery, constants: Mapping[str, Constant]) -> list[list[str]]:
    """Returns the types of a query's keys, with their constants, and of its measures' arguments. States depend on
    them."""
    arguments = [str(m.argument.type) if m.argument is not None else "" for m in bound.measures]
    known = {name: value for name, value in constants.items() if name in bound.spec.plain_keys}
    keys = zip(bound.spec.group_by, bound.group_types, strict=True)
    return [[constant_type(t, known.get(name)) for name, t in keys], arguments]
