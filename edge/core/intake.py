"""`Intake`: takes the records of one query into its slices.

Filters records, assigns slices, drops late records, draws samples, and updates entries.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from edge.cache.arrival_profile import parts_of
from edge.cache.timetable import positions_of
from edge.core.arrival_reports import ArrivalMonitor, SamplingSettings
from edge.core.dropped import COUNTED, LATE
from edge.core.measure_inputs import AccuracyMeasure, MeasureArguments
from edge.core.shared_batch import BatchRecords, Reading
from edge.core.slice_store import SliceStore
from edge.core.slices import Slice
from edgewater.base.streams import MIN_TIME_MS
from edgewater.guard.partial_check import group_bytes
from edgewater.model.algebra import LateRecordPolicy, late_record_policy_of
from edgewater.synopses import BoolArray, IntArray, count_distinct, is_sampled
from edgewater.wire import LossReason, QueryRef

GROUP_BYTES = 32
"""What a group takes at least, besides its states: counters, and its place in the table of keys."""


class Intake:
    """Takes the records of one query.

    Args:
        monitor: the arrival statistics of a query with early answers; None: it has none.

    Attributes:
        reading: what it computes of a batch, of which it shares what others compute too.
        late_record_policy: what happens to records of closed slices.
        sampling_rate: for a function of a sample: the probability with which a record is processed.
        max_state_bytes: as in `SourcesOpened`.
    """

    def __init__(self, ref: QueryRef, store: SliceStore, monitor: ArrivalMonitor | None) -> None:
        self._store, self._monitor = store, monitor
        self._bound, self._spec = store.bound, store.spec
        self.reading = Reading.of(self._bound, ref)
        self.late_record_policy = late_record_policy_of(self._spec)
        self.sampling_rate = 1.0
        self.max_state_bytes: int | None = None
        self._accuracy_measure = AccuracyMeasure(self._bound) if self._spec.accuracy is not None else None
        self.tops_up = self._spec.tops_up_samples
        self._group_bytes = group_bytes(self._bound) + GROUP_BYTES

    @property
    def ships_rows(self) -> bool:
        """Whether the accuracy is about a function of a sample, so that sampled rows are sent."""
        return self._spec.accuracy is not None and self._spec.accuracy.kind is None

    def take(
        self,
        batch: BatchRecords,
        watermark_ms: int,
        batch_number: int,
        arrival_ms: int = MIN_TIME_MS,
        *,
        is_backfill: bool = False,
    ) -> dict[str, int]:
        """Updates the slices with a batch; returns the numbers of records that were not counted, by reason.

        Args:
            batch_number: ascending over the batches of all streams.
            arrival_ms: event time by the stream's clock at which the batch arrived.
            is_backfill: whether the records were read before, when other versions may have counted them.
        """
        self._forget_windows()
        self.top_up(arrival_ms, batch_number)
        matching = batch.joined(self._bound).matching(self._bound, self.reading)
        if not len(matching):
            return {}
        dropped: dict[str, int] = {}
        for start, records in matching.by_slice(self._spec.window, self.reading):
            if not self._store.takes(start):
                # Another version of the query counts them, unless it is gone because its windows are final.
                if start < self._store.begin_ms and self._store.counts_earlier and not is_backfill:
                    dropped["too-late"] = dropped.get("too-late", 0) + len(records)
                    arguments = MeasureArguments(self._bound, records.batch)
                    self._store.losses.drops.add(MIN_TIME_MS, "too-late", len(records), late=arguments)
                continue
            reason = self._drop_reason(start, watermark_ms) or self._too_large(start, records)
            if reason:
                dropped[reason] = dropped.get(reason, 0) + len(records)
                late = MeasureArguments(self._bound, records.batch) if reason in LATE else None
                self._store.losses.drops.add(start, reason, len(records), late=late)
                if reason == LossReason.QUERY_MEMORY:
                    self._store.refused(start)
                continue
            is_late = self._store.end(start) <= watermark_ms
            arguments, kept = self._sample(start, records, arrival_ms, is_late=is_late)
            if kept is not None:
                sampled_out = len(records) - int(kept.sum())
                dropped["sampled-out"] = dropped.get("sampled-out", 0) + sampled_out
            slice_ = self._store.open(start, arrival_ms)
            self._count(slice_, records, is_late=is_late)
            self._update(start, slice_, records, arguments, batch_number, kept)
            if is_late and self._monitor is None:  # otherwise reports of arrivals state them
                self._store.losses.drops.add(start, COUNTED, len(records), late=arguments)
            if kept is not None and self._monitor is not None:
                slice_.unreported_until_ms = self._monitor.last_arrival_ms
        return dropped

    def _drop_reason(self, start: int, watermark_ms: int) -> str:
        store = self._store
        if start < store.since_ms:
            return "before-query"
        if self.late_record_policy is LateRecordPolicy.DROPPED and store.end(start) <= watermark_ms:
            return "out-of-order"
        if store.is_final(start, watermark_ms):
            return "too-late"
        is_full = store.full.refuses(start, is_open=store.end(start) > watermark_ms)
        return LossReason.QUERY_MEMORY if is_full else ""

    def _too_large(self, start: int, records: BatchRecords) -> str:
        """Returns the reason not to count these records, if their new groups would take too much memory.

        A state of fixed size is up to 3 MiB a measure, so a batch of a few hundred groups may take more than there is.
        """
        size, limit, slices = self._group_bytes, self.max_state_bytes, self._store.slices
        if limit is None or len(records) * size <= limit // 8 or not self._spec.group_by:
            return ""
        keys = records.keys(self._bound, self.reading).distinct
        groups = len(keys[0])
        if start in slices:
            known = slices[start].entries.pending.rows()
            groups = count_distinct([pa.concat_arrays([*pair]) for pair in zip(known, keys, strict=True)])
        others = sum(len(slice_.entries) for other, slice_ in slices.items() if other != start)
        return LossReason.QUERY_MEMORY if (others + groups) * size > limit else ""

    def _sample(
        self, start: int, records: BatchRecords, arrival_ms: int, *, is_late: bool
    ) -> tuple[MeasureArguments, BoolArray | None]:
        """Returns the arguments of the processed records, and the mask of these records; None: all are processed."""
        arguments = MeasureArguments(self._bound, records.batch)
        monitor = self._monitor
        if monitor is not None and self._accuracy_measure is not None:
            corrected_ms, store = arrival_ms - monitor.sampling.clock_offset_ms, self._store
            if self.tops_up and start not in store.slices and store.finished.get(start) is None:
                monitor.begin_window(start, store.end(start), corrected_ms)
            window = monitor.windows.get(start)
            kept = monitor.sample(records.ids, window)
            observed = self._accuracy_measure.observed(arguments, kept)
            keys = self._bound.key_arrays(records.batch)
            monitor.observe(
                records.times, corrected_ms, observed.values, kept, keys, observed.population, observed.bounds
            )
            if window is not None and window.is_open and observed.population is not None:
                read = records.batch.select(list(self.reading.columns))
                monitor.keep(window, read, records.ids, records.times, observed.population)
            return observed.processed, kept
        if self.sampling_rate < 1.0 and not is_late:
            # Late records are not sampled: they would lower the rate of the sample that has been sent already.
            kept = is_sampled(self._store.source, records.ids, self.sampling_rate, self._spec.sampling_seed)
            return arguments.filter(kept), kept
        return arguments, None

    def top_up(self, arrival_ms: int, batch_number: int) -> bool:
        """Tops up the samples of windows that have ended; returns whether any window has.

        Called before each batch, and before each pull, so that a report has all values of the windows that end by its
        slot. The records have been stated as sampled out (`Dropped`) when they came.

        Args:
            arrival_ms: event time now, by the stream's clock.
            batch_number: as in `take`.
        """
        monitor, store = self._monitor, self._store
        if monitor is None or not monitor.windows or self._accuracy_measure is None:
            return False
        starts = monitor.ended_windows(arrival_ms - monitor.sampling.clock_offset_ms, store.end)
        for start in starts:
            ended = monitor.windows[start].end()
            if ended is None or start not in store.slices:
                continue
            batch, arrivals = ended
            records = BatchRecords(batch, lambda: np.zeros(0, np.int64))
            arguments = MeasureArguments(self._bound, batch)
            observed = self._accuracy_measure.observed(arguments, np.ones(len(records), bool))
            monitor.add_values(records.times, arrivals, self._bound.key_arrays(batch), observed)
            self._update(start, store.open(start, arrival_ms), records, observed.processed, batch_number, None)
        return bool(starts)

    def _forget_windows(self) -> None:
        """Forgets the samples of windows that take no more records."""
        if self._monitor is not None and self._monitor.windows:
            self._monitor.windows = {
                start: window
                for start, window in self._monitor.windows.items()
                if start in self._store.slices or self._store.finished.get(start) is not None
            }

    @staticmethod
    def _count(slice_: Slice, records: BatchRecords, *, is_late: bool) -> None:
        """Counts all records of a slice, processed or not."""
        rows, (first_ms, last_ms) = len(records), records.extent
        slice_.observed += rows
        slice_.first_ms, slice_.last_ms = min(slice_.first_ms, first_ms), max(slice_.last_ms, last_ms)
        slice_.late += rows if is_late else 0

    def _update(
        self,
        start: int,
        slice_: Slice,
        records: BatchRecords,
        arguments: MeasureArguments,
        batch_number: int,
        kept: BoolArray | None,
    ) -> None:
        """Updates the entries of a slice with the `kept` records (None: all).

        Args:
            arguments: of the kept records.
        """
        entries, window = slice_.entries, self._spec.window
        if self.ships_rows and kept is not None:
            slice_.sampling_rate = min(slice_.sampling_rate, self.sampling_rate)
        if slice_.sampling_rate < 1.0:
            entries.set_sampling_rate(slice_.sampling_rate)
        if self.ships_rows and kept is not None:
            # The center must also know the groups of which no row was sampled.
            keys, elapsed = self._bound.key_arrays(records.batch), self._store.elapsed(start, records.extent[1])
            entries.add_groups(keys, len(records), batch_number, elapsed)
        if kept is not None:
            records = records.filtered(kept)
            if not len(records):
                return
        entries.update(
            records.keys(self._bound, self.reading),
            arguments.by_measure(),
            len(records),
            records.times,
            batch_number,
            records.ids if entries.pending.samples else None,
            self._store.elapsed(start, records.extent[1]),
            self._parts(start, records),
            positions_of(records.times, start, window.slice_end(start) - start) if entries.keeps_times else None,
        )

    def _parts(self, start: int, records: BatchRecords) -> IntArray:
        """Returns the parts of the slice that the records are in; one, if it is the same for all."""
        slice_ms = self._spec.window.slice_end(start) - start
        bounds = parts_of(np.array(records.extent), start, slice_ms)
        return bounds[:1] if bounds[0] == bounds[1] else parts_of(records.times, start, slice_ms)

    def set_sampling(self, settings: SamplingSettings) -> None:
        """Applies the sampling settings from the center. A query without an accuracy has none."""
        monitor = self._monitor
        if monitor is None:
            if self.ships_rows and settings.rate > 0:
                self.sampling_rate = settings.rate
            return
        step_ms = settings.clock_offset_ms - monitor.sampling.clock_offset_ms
        monitor.set_sampling(settings)
        if step_ms > monitor.schedule.grid.substream_ms:
            monitor.restart_reports()
            for slice_ in self._store.slices.values():
                slice_.unreported_until_ms = max(slice_.unreported_until_ms - step_ms, MIN_TIME_MS)
