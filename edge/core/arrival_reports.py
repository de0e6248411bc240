"""Arrival reports: statistics of every record of a query with an accuracy, sent to the center on a schedule.

The monitor also draws the sample of records to process, and reports why it sampled the other records out.

Statistics are reported by report slots (`edgewater.arrivals.ReportSchedule`), by the stream's clock and not by its
watermark. A window's end is a report slot, so that all arrivals until then are reported at once. Stragglers follow in
later slots. A slot without arrivals is reported, too: silence does not say that nothing arrived.

Statistics of many groups may need more bytes than the values. On a narrow link they would delay the answers. Then only
the number of records is reported, once per window, and the center answers windows when they are complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from edge.arrivals import BernoulliSampler, EdgeSample, SubstreamMonitor
from edge.cache.error_target import NEWEST_WEIGHT
from edge.core.measure_inputs import ObservedRecords
from edgewater.arrivals import (
    DEFAULT_MAX_SKEW_MS,
    ReportSchedule,
    SubstreamStatistics,
    encode_report,
    fits_report,
    read_report,
)
from edgewater.base.streams import MIN_TIME_MS
from edgewater.model.accuracy import MAX_GROUPS
from edgewater.synopses import DEFAULT_SEED, BoolArray, FloatArray, IntArray
from edgewater.synopses.encoding.state import State
from edgewater.wire import Arrivals, SamplingReason

Keys = Sequence[pa.Array]
"""An array per column of `group_by`."""
NARROW_SHARE = 0.1  # limit: the share of a link that statistics of groups take
"""Part of the link, before compression, above which statistics of groups are not sent. Below half of it they are sent
again."""
READY_BYTES = 600  # limit: memory of statistics
"""The least memory of a sub-stream's statistics until they are sent."""


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """The sampling of a query, as set by the center.

    Attributes:
        rate: probability with which a record is processed.
        clock_offset_ms: wall time, this edge's clock less the center's.
        reason: why the rate is below 1.
        expected_records: the number of records of a window for which the rate is planned; 0: samples are not topped up.
    """

    rate: float = 1.0
    clock_offset_ms: int = 0
    reason: SamplingReason = SamplingReason.NONE
    expected_records: int = 0


@dataclass(frozen=True, slots=True)
class ArrivalReport:
    """A report that a frame has.

    Attributes:
        counts_only: whether statistics of groups are left out.
        slot: the report slot.
        rest: the statistics for later frames, by sub-stream.
        full_bytes: the bytes that the statistics take with groups.
    """

    arrivals: Arrivals
    counts_only: bool
    slot: int
    rest: dict[int, SubstreamStatistics]
    full_bytes: int


class ArrivalMonitor:
    """The arrival statistics of one query at one edge.

    Times are event time by the stream's clock, less the clock offset.

    Args:
        source: this edge's number, so that edges draw independent samples.
        key_types: types of the columns of `group_by`; statistics are kept per group.
        seed: seed of the choice of records that are processed.

    Attributes:
        last_arrival_ms: arrival time of the last batch; never decreases.
        windows: the samples of windows that are topped up, by start.
    """

    def __init__(
        self, schedule: ReportSchedule, source: int, key_types: Sequence[pa.DataType] = (), seed: int = DEFAULT_SEED
    ) -> None:
        self.schedule, self.key_types = schedule, tuple(key_types)
        self.sampling = SamplingSettings()
        self._monitor = SubstreamMonitor(schedule.grid, self.key_types, MAX_GROUPS if key_types else 1)
        self._sampler = BernoulliSampler(source, seed)
        self.windows: dict[int, EdgeSample] = {}
        self._ready: dict[int, SubstreamStatistics] = {}
        self._complete = MIN_TIME_MS  # report slot up to which `_ready` is complete
        self._reported = MIN_TIME_MS  # report slot up to which the center has all statistics
        self.last_arrival_ms = MIN_TIME_MS
        self._unreported_reason = SamplingReason.NONE  # why records were sampled out since the last report
        self._counts_only = False  # the last report left out the statistics of groups
        self._prefers_counts = False  # the link is too narrow for statistics of groups
        self._bytes_per_ms = 0.0  # complete statistics of groups, in bytes per ms of event time
        self._full_bytes = 0  # the part of the current report that was already taken

    @property
    def nbytes(self) -> int:
        of_windows = sum(window.nbytes for window in self.windows.values())
        return self._monitor.nbytes + sum(READY_BYTES + s.nbytes for s in self._ready.values()) + of_windows

    def observe(
        self,
        times_ms: IntArray,
        arrival_ms: int,
        values: FloatArray | None,
        kept: BoolArray | None,
        keys: Sequence[pa.Array] = (),
        population: BoolArray | None = None,
        bounds: tuple[FloatArray, FloatArray] | None = None,
    ) -> None:
        """Adds a batch of records that count in the query.

        Args:
            times_ms: int64, event times.
            arrival_ms: event time at which the batch arrived.
            values: float64 per record, NaN for a record without a value; None for a count.
            kept: mask of the records that the query processes; None: all records.
            keys: an Arrow array per column of `group_by`.
            population: mask of the records that count, whatever their value; None: the records that have a value.
            bounds: least and greatest possible value per record. Given if `population` contains records with unknown
                values.
        """
        self.last_arrival_ms = arrival_ms = self._monotonic_ms(arrival_ms)
        self._complete_through(self._report_slot(arrival_ms, self._counts_only))
        origin = self.schedule.origin_ms
        born = times_ms - origin
        if values is None:
            self._monitor.observe(born, arrival_ms - origin, keys)
            return
        # A record without a value does not contribute to a sum or a mean. It is not counted, because it would be
        # treated as a record that was sampled out.
        counts = np.isfinite(values) if population is None else population
        if not counts.all():
            born, values, kept = born[counts], values[counts], None if kept is None else kept[counts]
            keys = [k.filter(pa.array(counts)) for k in keys]
            bounds = None if bounds is None else (bounds[0][counts], bounds[1][counts])
        positions = np.arange(len(born)) if kept is None else np.flatnonzero(kept)
        if population is not None:
            positions = positions[np.isfinite(values[positions])]
        if population is None:  # with a population, only the values of sampled records are known
            bounds = values, values
        self._monitor.observe(born, arrival_ms - origin, keys, values[positions], positions, bounds)

    def sample(self, ids: IntArray, window: EdgeSample | None = None) -> BoolArray | None:
        """Returns a mask of the records to process; None: all.

        Args:
            ids: int64, numbers of the records in their stream, ascending.
            window: the sample of their window, if it is topped up.
        """
        rate, reason = self.sampling.rate, self.sampling.reason
        if window is not None:
            rate, reason = window.rate, SamplingReason.MEASURE
        if rate >= 1.0 or not len(ids):
            return None
        self._unreported_reason = reason
        return self._marks(ids) < rate

    def _marks(self, ids: IntArray) -> FloatArray:
        first = int(ids[0])
        return self._sampler.marks(first, int(ids[-1]) - first + 1)[ids - first]

    def set_sampling(self, settings: SamplingSettings) -> None:
        """Applies new settings. A window keeps the rate with which it began, as long as samples are topped up."""
        self.sampling = settings
        if not settings.expected_records:
            self.windows = {start: window for start, window in self.windows.items() if not window.is_open}

    def begin_window(self, start: int, end: int, now_ms: int) -> None:
        """Begins the sample of a window at its first record, if it can be topped up when the window ends."""
        settings = self.sampling
        if settings.rate < 1.0 and settings.expected_records and self._monotonic_ms(now_ms) < end:
            self.windows[start] = EdgeSample.begin(settings.rate, settings.expected_records)

    def keep(
        self, window: EdgeSample, records: pa.RecordBatch, ids: IntArray, times_ms: IntArray, population: BoolArray
    ) -> None:
        """Keeps records of the last batch that were passed over, until the window ends.

        Args:
            times_ms, population: as in `observe`.
        """
        counted = population & (times_ms <= self.last_arrival_ms + DEFAULT_MAX_SKEW_MS)
        window.add(records, self._marks(ids), counted, self.last_arrival_ms)

    def ended_windows(self, now_ms: int, end: Callable[[int], int]) -> list[int]:
        """Returns the starts of the windows that have ended and are not topped up yet."""
        now_ms = self._monotonic_ms(now_ms)
        return [start for start, window in self.windows.items() if window.is_open and end(start) <= now_ms]

    def add_values(self, born_ms: IntArray, arrival_ms: IntArray, keys: Keys, observed: ObservedRecords) -> None:
        """Adds the values of records that `observe` has counted without them.

        Args:
            born_ms, arrival_ms: int64, the event time and the arrival time of each record.
            keys: as in `observe`.
        """
        assert observed.values is not None
        origin = self.schedule.origin_ms
        self._monitor.add_values(born_ms - origin, arrival_ms - origin, keys, observed.values, observed.bounds)

    @property
    def reported_before_ms(self) -> int:
        """Arrival time before which all arrivals are reported, by this monitor's clock."""
        return self.schedule.starts_at(self._reported) if self._reported != MIN_TIME_MS else MIN_TIME_MS

    def due(self, now_ms: int) -> bool:
        """Returns whether the clock has passed a report slot whose report has not been taken."""
        return self._report_slot(now_ms, self._prefers_counts) > self._reported

    def next_due_ms(self, now_ms: int) -> int:
        """Returns the event time of the next report: now, or in the future."""
        if self.due(now_ms):
            return now_ms
        slot = self.schedule.slot_at(now_ms)
        if self._prefers_counts:
            return self.schedule.starts_at(self.schedule.last_window_end(slot) + self.schedule.every_slots)
        return self.schedule.starts_at(self.schedule.next_report_slot(slot))

    def choose_detail(self, link_bytes_per_ms: float) -> bool:
        """Returns whether the link is too narrow for statistics of groups. Called at each pull.

        While records are sampled out, the statistics of groups are sent on any link, because estimates need them.

        Args:
            link_bytes_per_ms: bytes per ms of event time; 0: unknown.
        """
        share = NARROW_SHARE / 2 if self._prefers_counts else NARROW_SHARE
        is_narrow = 0.0 < share * link_bytes_per_ms < self._bytes_per_ms
        is_sampled = self.sampling.rate < 1.0 or self._unreported_reason is not SamplingReason.NONE
        self._prefers_counts = is_narrow and not is_sampled
        return self._prefers_counts

    def report(
        self, now_ms: int, capacity_bytes: int, *, counts_only: bool, unread: bool = False, count: int | None = None
    ) -> ArrivalReport | None:
        """Returns the report of the last report slot that the clock has passed; None: no report is due.

        Statistics that exceed the capacity wait for the next frame. The slot counts as reported with its last
        statistics. A frame with the report always follows, with a call of `apply`.

        Args:
            counts_only: whether statistics of groups are left out, as `choose_detail` says.
            unread: whether the source may have unread input. A report without arrivals then does not mean that none
                came.
            count: in a replay, the number of sub-streams to report, whatever the capacity.
        """
        now_ms = self._monotonic_ms(now_ms)
        slot = max(self._report_slot(now_ms, counts_only), self._complete)
        if slot <= self._reported:
            return None
        self.last_arrival_ms = now_ms
        self._complete_through(slot)
        ready, full_bytes = self._ready, 0
        if counts_only:
            full_bytes = len(self._encoded([each for _, each in sorted(ready.items())]))
            ready = _without_groups(ready)
        indices = sorted(ready)
        sent = self._sent(ready, indices, capacity_bytes) if count is None else indices[:count]
        data = self._encoded([ready[index] for index in sent])
        rest = {index: ready[index] for index in indices[len(sent) :]}
        if self.key_types and not counts_only:
            full_bytes = len(data)
        substreams = (data,) if sent else ()
        # Until the first slot is reported completely, `reported_before_ms` is the minimum time.
        through_ms = self.reported_before_ms if rest else self.schedule.starts_at(slot)
        arrivals = Arrivals(through_ms, substreams, self._unreported_reason, unread)
        return ArrivalReport(arrivals, counts_only, slot, rest, full_bytes)

    def count(self, arrivals: Arrivals) -> int:
        """Returns the number of sub-streams of a recorded report."""
        grid, grouped = self.schedule.grid, bool(self.key_types)
        return sum(len(read_report(each, grid, grouped=grouped)) for each in arrivals.substreams)

    def _sent(self, ready: Mapping[int, SubstreamStatistics], indices: list[int], capacity_bytes: int) -> list[int]:
        """Returns the sub-streams of a report that is within the capacity, at least one if there are any."""
        statistics = [ready[index] for index in indices]
        while len(statistics) > 1:
            if fits_report(statistics) and len(self._encoded(statistics)) <= capacity_bytes:
                break
            statistics = statistics[: len(statistics) // 2]
        return indices[: len(statistics)]

    def _encoded(self, statistics: Sequence[SubstreamStatistics]) -> bytes:
        return encode_report(statistics, self.schedule.slice_substreams) if statistics else b""

    def apply(self, report: ArrivalReport) -> None:
        """Removes what a report has, which `report` has just returned."""
        self._counts_only, self._ready = report.counts_only, report.rest
        self._full_bytes += report.full_bytes
        if not report.rest:
            self._learn_bytes(report.slot)
            self._reported, self._unreported_reason = report.slot, SamplingReason.NONE

    def _learn_bytes(self, slot: int) -> None:
        """Updates the bytes per time that complete statistics need, when a report up to a slot is complete."""
        if self._reported != MIN_TIME_MS:
            now = self._full_bytes / ((slot - self._reported) * self.schedule.grid.slot_ms)
            self._bytes_per_ms += NEWEST_WEIGHT * (now - self._bytes_per_ms)
        self._full_bytes = 0

    def _report_slot(self, time_ms: int, counts_only: bool) -> int:
        slot = self.schedule.slot_at(time_ms)
        return self.schedule.last_window_end(slot) if counts_only else self.schedule.last_report_slot(slot)

    def _monotonic_ms(self, time_ms: int) -> int:
        """Returns the time. If the clock was set back, returns the last time, because a report is never revoked."""
        at_least = self.last_arrival_ms
        if self._complete != MIN_TIME_MS:
            at_least = max(at_least, self.schedule.starts_at(self._complete))
        return max(time_ms, at_least)

    def restart_reports(self) -> None:
        """Restarts the reports. Called when the center has measured that this edge's clock was ahead.

        Without the restart, the edge would report nothing for as long as its clock was ahead.
        """
        self._complete = self._reported = self.last_arrival_ms = MIN_TIME_MS

    def _complete_through(self, slot: int) -> None:
        if slot <= self._complete:
            return
        for statistics in self._monitor.take():
            ready = self._ready.get(statistics.index)
            if ready is None:
                self._ready[statistics.index] = statistics
            else:
                ready.merge(statistics)
        self._complete = slot

    def to_state(self) -> State:
        sampling = self.sampling
        settings = [sampling.rate, sampling.clock_offset_ms, int(sampling.reason)]
        times = [self._complete, self._reported, self.last_arrival_ms]
        ready = {str(index): statistics.to_state() for index, statistics in sorted(self._ready.items())}
        detail = [self._counts_only, self._bytes_per_ms, self._full_bytes]
        numbers = [settings, times, int(self._unreported_reason), detail]
        each = {str(start): window.to_state() for start, window in self.windows.items()}
        windows = State([sampling.expected_records], components=each)
        return State(numbers, ready, {"monitor": self._monitor.to_state(), "windows": windows})

    @classmethod
    def from_state(
        cls, state: State, schedule: ReportSchedule, source: int, key_types: Sequence[pa.DataType], seed: int
    ) -> ArrivalMonitor:
        result, grid, monitor = cls(schedule, source, key_types, seed), schedule.grid, state.components["monitor"]
        (rate, clock_offset_ms, reason), times, unreported_reason, detail = state.numbers
        windows = state.components.get("windows", State([0]))  # release 0.3.0 has none
        result.sampling = SamplingSettings(rate, clock_offset_ms, SamplingReason(reason), *windows.numbers)
        result.windows = {int(start): EdgeSample.from_state(each) for start, each in windows.components.items()}
        result._complete, result._reported, result.last_arrival_ms = times
        result._unreported_reason = SamplingReason(unreported_reason)
        result._counts_only, result._bytes_per_ms, result._full_bytes = detail
        result._prefers_counts = result._counts_only
        result._monitor = SubstreamMonitor.from_state(monitor, grid, key_types, result._monitor.limit)
        result._ready = {
            int(index): SubstreamStatistics.from_state(data, grid, grouped=bool(key_types))
            for index, data in state.arrays.items()
        }
        return result


def _without_groups(ready: Mapping[int, SubstreamStatistics]) -> dict[int, SubstreamStatistics]:
    """Returns the number of records as statistics of the first sub-stream."""
    grouped = [replace(s) for _, s in sorted(ready.items())]
    for statistics in grouped:
        statistics.drop_groups()
    if not grouped:
        return {}
    grouped[0].unattributed = sum(s.unattributed for s in grouped)
    return {grouped[0].index: grouped[0]}
