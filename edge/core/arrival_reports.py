"""What an edge notes of every record of a query with an accuracy, and when it tells the center.

Statistics are complete up to a *point* (`edgewater.arrivals.ReportSchedule`), and it is points that are told, by the
stream's clock and not by its watermark: a window's end is one, and what has come by then leaves at once.
Stragglers follow at the points after it. Without news a point is told all the same: "nothing has come" is what
silence does not say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from edge.arrivals.group_monitor import GroupMonitor
from edge.arrivals.monitor import SubstreamMonitor
from edge.arrivals.sampler import BernoulliSampler
from edge.core.slices import Slice
from edgewater.accuracy import MAX_GROUPS
from edgewater.arrivals import GroupedSubstream, ReportSchedule, SubstreamStatistics
from edgewater.query import QuerySpec
from edgewater.streams import MAX_TIME_MS, MIN_TIME_MS
from edgewater.synopses import BoolArray, FloatArray, IntArray
from edgewater.windows import SlidingWindow
from edgewater.wire.frames import Arrivals, SamplingReason

Statistics = SubstreamStatistics | GroupedSubstream

READY_BYTES = 600
"""What the statistics of a sub-stream occupy at least while they wait for the link."""


@dataclass(frozen=True, slots=True)
class Observing:
    """How the center wants a query observed.

    Attributes:
        rate: probability with which a record is processed.
        clock_offset_ms: wall time, this edge's clock less the center's.
        reason: why the rate is below 1.
    """

    rate: float = 1.0
    clock_offset_ms: int = 0
    reason: SamplingReason = SamplingReason.NONE


class ArrivalMonitor:
    """One query's statistics at one edge. Times are event time by the stream's clock, corrected by the offset.

    Args:
        source: this edge's number, by which it draws its own sample.
        key_types: of the columns of `group_by`, whose statistics are kept per group.
    """

    def __init__(self, schedule: ReportSchedule, source: int, key_types: Sequence[pa.DataType] = ()) -> None:
        self.schedule, self.key_types = schedule, tuple(key_types)
        self.observing = Observing()
        self._monitor: SubstreamMonitor | GroupMonitor = (
            GroupMonitor(schedule.grid, self.key_types, MAX_GROUPS) if key_types else SubstreamMonitor(schedule.grid)
        )
        self._sampler = BernoulliSampler(source)
        self._ready: dict[int, Statistics] = {}
        self._complete = MIN_TIME_MS  # the point up to which `_ready` is complete
        self._told = MIN_TIME_MS
        self.last_arrival_ms = MIN_TIME_MS
        self._sampled = SamplingReason.NONE  # why records were passed over of which the center has not been told

    @property
    def nbytes(self) -> int:
        held = self._monitor.nbytes if isinstance(self._monitor, GroupMonitor) else 0
        return held + sum(
            READY_BYTES + (s.nbytes if isinstance(s, GroupedSubstream) else 16 * len(s.cells))
            for s in self._ready.values()
        )

    def observe(
        self,
        times_ms: IntArray,
        arrival_ms: int,
        values: FloatArray | None,
        kept: BoolArray | None,
        keys: Sequence[pa.Array] = (),
        population: BoolArray | None = None,
    ) -> None:
        """Records that count in the query, which arrived at once.

        Args:
            values: of all of them, float64, NaN where there is none; None for a count.
            kept: those that are processed; None: all.
            keys: their values of the columns of `group_by`.
            population: those that are counted, whether or not the value of those that are kept turns out to be one;
                None: those that have a value.
        """
        arrival_ms = self._not_back(arrival_ms)
        self._complete_through(self._point(arrival_ms))
        origin = self.schedule.origin_ms
        born = times_ms - origin
        if values is None:
            self._note(born, arrival_ms - origin, keys)
            return
        # A record without a value is none of a sum's or a mean's: it is not counted, or it would be taken
        # for one that was not sampled.
        sound = np.isfinite(values) if population is None else population
        if not sound.all():
            born, values, kept = born[sound], values[sound], None if kept is None else kept[sound]
            keys = [k.filter(pa.array(sound)) for k in keys]
        positions = np.arange(len(born)) if kept is None else np.flatnonzero(kept)
        if population is not None:
            positions = positions[np.isfinite(values[positions])]
        self._note(born, arrival_ms - origin, keys, values[positions], positions)

    def _note(
        self,
        born: IntArray,
        arrival: int,
        keys: Sequence[pa.Array],
        values: FloatArray | None = None,
        positions: IntArray | None = None,
    ) -> None:
        if isinstance(self._monitor, GroupMonitor):
            self._monitor.observe(born, arrival, keys, values, positions)
        else:
            self._monitor.observe(born, arrival, values, positions)

    def sample(self, ids: IntArray) -> BoolArray | None:
        """Which of the records, by number in their stream (ascending), are to be processed; None: all."""
        if self.observing.rate >= 1.0 or not len(ids):
            return None
        self._sampled = self.observing.reason
        first = int(ids[0])
        chosen = np.zeros(int(ids[-1]) - first + 1, bool)
        chosen[self._sampler.keep(first, len(chosen), self.observing.rate)] = True
        return np.asarray(chosen[ids - first])

    @property
    def told_before_ms(self) -> int:
        """The center has been told of all that came before, by this monitor's clock."""
        return self.schedule.starts_at(self._told) if self._told != MIN_TIME_MS else MIN_TIME_MS

    def due(self, now_ms: int) -> bool:
        """Is there a point that the clock has passed and the center has not been told?"""
        return self._point(now_ms) > self._told

    def next_due_ms(self, now_ms: int) -> int:
        """Event time of the next point to tell: now, or in the future."""
        if self.due(now_ms):
            return now_ms
        return self.schedule.starts_at(self.schedule.next_report_slot(self.schedule.slot_at(now_ms)))

    def take(
        self, now_ms: int, capacity_bytes: int, *, unread: bool = False, count: int | None = None
    ) -> Arrivals | None:
        """What is told of the last point that the clock has passed; None: nothing is due.

        With `unread` it is said that there may be input which has not been read: "nothing has come" is then not known.
        Of more than the capacity the rest stays for the next frame, and the point is told with the last of it.

        Args:
            count: of how many sub-streams to tell, whatever the capacity.
        """
        point = max(self._point(self._not_back(now_ms)), self._complete)
        self._complete_through(point)
        if point <= self._told:
            return None
        substreams: list[bytes] = []
        room = capacity_bytes
        for index in sorted(self._ready):
            if (substreams and room <= 0) if count is None else len(substreams) == count:
                break
            substreams.append(self._ready.pop(index).to_state())
            room -= len(substreams[-1])
        sampled = self._sampled
        if not self._ready:
            self._told, self._sampled = point, SamplingReason.NONE
        # Before anything was told there is no time to name but one before everything.
        return Arrivals(self.told_before_ms, tuple(substreams), sampled, unread)

    def _point(self, time_ms: int) -> int:
        return self.schedule.last_report_slot(self.schedule.slot_at(time_ms))

    def _not_back(self, time_ms: int) -> int:
        """A clock that steps back stands still: what was told of a point is not taken back."""
        at_least = self.last_arrival_ms
        if self._complete != MIN_TIME_MS:
            at_least = max(at_least, self.schedule.starts_at(self._complete))
        self.last_arrival_ms = max(time_ms, at_least)
        return self.last_arrival_ms

    def step_back(self) -> None:
        """The center has measured that this edge's clock was ahead: points are told anew, by the right time.

        Standing still until then would leave the center without word for as long as the clock was ahead.
        """
        self._complete = self._told = self.last_arrival_ms = MIN_TIME_MS

    def _complete_through(self, point: int) -> None:
        if point <= self._complete:
            return
        for statistics in self._monitor.take():
            held = self._ready.get(statistics.index)
            if held is None:
                self._ready[statistics.index] = statistics
            elif isinstance(held, GroupedSubstream):
                assert isinstance(statistics, GroupedSubstream)
                held.merge(statistics)
            else:
                assert isinstance(statistics, SubstreamStatistics)
                held.merge(statistics)
        self._complete = point

    def snapshot(self) -> tuple[dict[str, Any], list[bytes]]:
        document = {
            "complete": self._complete, "told": self._told, "last_arrival_ms": self.last_arrival_ms,
            "rate": self.observing.rate, "clock_offset_ms": self.observing.clock_offset_ms,
            "reason": int(self.observing.reason), "sampled": int(self._sampled),
        }  # fmt: skip
        return document, [self._monitor.to_state(), *(self._ready[i].to_state() for i in sorted(self._ready))]

    def restore(self, document: Mapping[str, Any], blobs: Sequence[bytes]) -> None:
        """What `snapshot` gave."""
        grid = self.schedule.grid
        self._complete, self._told = document["complete"], document["told"]
        self.last_arrival_ms = document["last_arrival_ms"]
        reason, self._sampled = SamplingReason(document["reason"]), SamplingReason(document["sampled"])
        self.observing = Observing(document["rate"], document["clock_offset_ms"], reason)
        ready: Iterable[Statistics]
        if self.key_types:
            self._monitor = GroupMonitor.from_state(blobs[0], grid, self.key_types, MAX_GROUPS)
            ready = [GroupedSubstream.from_state(blob, grid) for blob in blobs[1:]]
        else:
            self._monitor = SubstreamMonitor.from_state(blobs[0], grid)
            ready = [SubstreamStatistics.from_state(blob, grid) for blob in blobs[1:]]
        self._ready = {statistics.index: statistics for statistics in ready}


def is_untold(held: Slice, told_before_ms: int) -> bool:
    """Whether records of the slice were passed over of which the center has not been told."""
    return held.told_by_ms > MIN_TIME_MS and held.told_by_ms >= told_before_ms


def told_through(
    slices: Mapping[int, Slice], spec: QuerySpec, told_before_ms: int, watermark_ms: int, through_ms: int
) -> int:
    """Event time up to which slices may be closed: the watermark, or less.

    A slice that was closed before, and of which more has come, holds up no others but those with which one of its
    windows would become final.

    Args:
        slices: by their start.
        told_before_ms: the center has been told of all that came before, by the monitor's clock.
        through_ms: up to where they were closed before.
    """
    result = watermark_ms
    for start, held in slices.items():
        end = start + spec.window.slice_ms
        if end <= watermark_ms and is_untold(held, told_before_ms):
            result = min(result, (end if end > through_ms else _next_final(spec, start, through_ms)) - 1)
    return result


def _next_final(spec: QuerySpec, start: int, after_ms: int) -> int:
    """When the next window over a slice becomes final, behind `after_ms`; the end of time if there is none."""
    window = spec.window
    assert isinstance(window, SlidingWindow)  # as those of all queries with a monitor
    every, last_end = window.every_ms, window.last_window_end(start)
    first_end = last_end - (last_end - start - window.slice_ms) // every * every
    last = last_end + spec.lateness_ms
    if last <= after_ms:
        return MAX_TIME_MS
    return max(first_end + spec.lateness_ms, last - (last - after_ms - 1) // every * every)
