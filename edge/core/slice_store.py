"""`SliceStore`: the slices of one query, from their first record until their windows are final.

A slice is open until the stream's watermark passes its end. Then it is closed: its entries are sent, and a `SliceClose`
reports the observed records and the withheld error. A slice that withholds values is kept for late records until the
last window over it is final. Of a slice that was sent completely only the counters are kept.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import islice

import numpy as np

from edge.cache.entries import SliceEntries
from edge.cache.error_limits import ErrorLimits
from edge.cache.send_queue import SendQueue
from edge.core.budget_schedule import ShareSchedule
from edge.core.finished import NO_COUNTERS, Counters, FinishedSlices
from edge.core.memory import FullSlices, HeldMemory, MemoryAction
from edge.core.policies import policy_of
from edge.core.query_losses import QueryLosses
from edge.core.slices import Slice, is_final
from edgewater.base.streams import MIN_TIME_MS
from edgewater.model.query import BoundQuery
from edgewater.model.window_range import ALL_WINDOWS, WindowRange
from edgewater.synopses.encoding.state import State
from edgewater.wire import SliceClose

SLICE_BYTES, MEASURE_BYTES = 3_500, 700  # measured: tracemalloc
"""Memory of a slice without its groups, and of each of its measures; measured with tracemalloc."""


class _Total:
    """A sum over slices, for which only the slices that have changed are computed again.

    Args:
        size_of: returns the size of a slice by its start; 0 if there is none.

    Attributes:
        changed: the slices that have changed since the sum was computed.
    """

    def __init__(self, size_of: Callable[[int], int]) -> None:
        self._size_of, self._sizes, self._sum = size_of, dict[int, int](), 0
        self.changed = set[int]()

    @property
    def value(self) -> int:
        for start in self.changed:
            size = self._size_of(start)
            self._sum += size - self._sizes.pop(start, 0)
            if size:
                self._sizes[start] = size
        self.changed.clear()
        return self._sum


class SliceStore:
    """The state of all slices of a query.

    Args:
        since_ms: event time from which this edge has all records; earlier slices are skipped.
        source: number of this edge; with a record's number in its stream it identifies the record.
        windows: the windows of this version of the query.

    Attributes:
        begin_ms, end_ms: event time of the slices of these windows. Other slices belong to other versions.
        slices: the slices with entries, by the event time of their start.
        finished: the counters of slices that were sent completely.
        full: the slices that take no more records, because open slices use too much memory.
        schedule: this edge's shares of the error budget, per slice.
        through_ms: event time up to which slices are closed.
        losses: what windows of the query may lack.
        counts_earlier: whether late records before `begin_ms` are counted here, because the version that had their
            windows is gone.
        policy: of the query's budget.
        bounded_measures: all measures of a query whose edges may withhold: the withheld error of each is reported.
    """

    def __init__(
        self, bound: BoundQuery, since_ms: int = MIN_TIME_MS, source: int = 0, windows: WindowRange = ALL_WINDOWS
    ) -> None:
        self.bound, self.spec = bound, bound.spec
        self.since_ms, self.source = since_ms, source
        self.slices: dict[int, Slice] = {}
        self.finished = FinishedSlices()
        self.full = FullSlices()
        self.schedule = ShareSchedule()
        self.through_ms = MIN_TIME_MS
        self.counts_earlier = False
        self.windows = windows
        self.begin_ms, self.end_ms = windows.slices(self.spec.window)
        self.losses = QueryLosses(self.spec, max(since_ms, self.begin_ms))
        self.policy = policy_of(self.spec)
        self.bounded_measures = self.policy.bounded
        self._index()
        self._slice_bytes = SLICE_BYTES + MEASURE_BYTES * len(self.spec.measures)

    def set_windows(self, windows: WindowRange) -> None:
        """Applies a new border after which windows belong to the next version; drops the slices behind it."""
        if windows != self.windows:
            self.windows = windows
            self.begin_ms, self.end_ms = windows.slices(self.spec.window)
            self.slices = {start: slice_ for start, slice_ in self.slices.items() if self.takes(start)}
            self._index()

    def _index(self) -> None:
        """Indexes the slices again. Called when many of them have changed."""
        # The starts of slices that have something to report, ascending; and a heap of all other ones, and of some that
        # are gone.
        self._due = sorted(start for start, slice_ in self.slices.items() if not slice_.close_reported)
        self._reported = [start for start, slice_ in self.slices.items() if slice_.close_reported]
        heapify(self._reported)
        self._bytes, self._pending = _Total(self._bytes_of), _Total(self._pending_of)
        self._changed(self.slices)

    def takes(self, start: int) -> bool:
        """Returns whether a slice belongs to a window of this version."""
        return self.begin_ms <= start < self.end_ms

    def ended(self, through_ms: int) -> Iterator[tuple[int, Slice]]:
        """Yields the slices that end by an event time and have something to report, with their starts, ascending."""
        return ((start, self.slices[start]) for start in islice(self._due, self.count_ended(through_ms)))

    def not_ended(self, through_ms: int) -> list[tuple[int, Slice]]:
        """Returns the slices that end after an event time and have something to report, as `ended`."""
        return [(start, self.slices[start]) for start in self._due[self.count_ended(through_ms) :]]

    def count_ended(self, through_ms: int) -> int:
        """Returns how many slices `ended` yields."""
        return bisect_right(self._due, through_ms, key=self.end)

    @property
    def nbytes(self) -> int:
        return self._bytes.value + self.finished.nbytes

    @property
    def pending(self) -> int:
        """The number of groups that slices have to send."""
        return self._pending.value

    def _changed(self, starts: Iterable[int]) -> None:
        self._bytes.changed.update(starts)
        self._pending.changed.update(starts)

    def _bytes_of(self, start: int) -> int:
        return self._nbytes_of(self.slices[start]) if start in self.slices else 0

    def _pending_of(self, start: int) -> int:
        slice_ = self.slices.get(start)
        return 0 if slice_ is None or slice_.close_reported else slice_.count_pending(self.limits(start), 1.0)

    def _nbytes_of(self, slice_: Slice) -> int:
        return slice_.entries.nbytes + self._slice_bytes

    def end(self, start: int) -> int:
        """Returns the event time at which a slice ends."""
        return self.spec.window.slice_end(start)

    def is_final(self, start: int, watermark_ms: int) -> bool:
        """Returns whether all windows that contain the slice are final, so that late records are dropped."""
        return is_final(self.spec, start, watermark_ms)

    def elapsed(self, start: int, now_ms: int) -> float:
        """Returns the elapsed fraction of a slice, 0 to 1."""
        return min(max((now_ms - start) / (self.end(start) - start), 0.0), 1.0)

    def open(self, start: int, arrival_ms: int) -> Slice:
        """Returns the slice that takes records, which has to be reported (again); a new one continues the counters of
        a finished slice.

        Args:
            arrival_ms: event time by the stream's clock at which the records arrived.
        """
        slice_ = self.slices.get(start)
        if slice_ is None:
            slice_ = self.slices[start] = Slice(self._no_entries(), *(self.finished.get(start) or ()))
            slice_.first_arrival_ms = arrival_ms
        self._changed((start,))
        slice_.close_reported = False
        at = bisect_left(self._due, start)
        if at == len(self._due) or self._due[at] != start:
            self._due.insert(at, start)
        return slice_

    def sent(self, starts: Collection[int], closed: Collection[int]) -> None:
        """Notes that a frame has sent groups of slices, and has closed some of them.

        A closed slice that withholds values is kept for late records. Of others only the counters are kept.
        """
        self._changed(starts)
        if not closed:
            return
        done, first, last = set(closed), bisect_left(self._due, min(closed)), bisect_right(self._due, max(closed))
        self._due[first:last] = [start for start in self._due[first:last] if start not in done]
        for start in closed:
            slice_ = self.slices[start]
            slice_.close_reported = True
            if self.bounded_measures and len(slice_.entries):
                heappush(self._reported, start)
            else:
                self.finish(start, self.slices.pop(start).counters)

    def _no_entries(self) -> SliceEntries:
        return SliceEntries.for_query(self.bound, self.source, self.bounded_measures)

    # Shares of an error budget

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
                self._index()
            return
        through = self.through_ms
        not_closed = MIN_TIME_MS if through == MIN_TIME_MS else self.spec.window.slice_start(through)
        schedule = self.schedule.updated(version, shares, from_ms, not_closed)
        if schedule is self.schedule:
            return
        self.schedule = schedule
        self._changed(self._due)
        for start in self._due:
            self.slices[start].send_queue = SendQueue()  # under a smaller share, a half-sent slice has more to send

    def slice_shares(self, start: int) -> dict[str, float]:
        """Returns the shares of a slice: of k slices of a window each may withhold E/k, or E for extrema."""
        if not self.policy.divisors:
            return {}
        shares = self.schedule.at(start)
        return {name: shares.get(name, 0.0) / slices for name, slices in self.policy.divisors.items()}

    def limits(self, start: int) -> ErrorLimits:
        """Returns the error limits of the groups of a slice."""
        return ErrorLimits(self.slice_shares(start), self.policy.relative)

    # Memory

    def held_memory(self, watermark_ms: int) -> HeldMemory:
        """Returns the memory that slices hold, and whether it grows and is limited."""
        held, finished = self._holding(watermark_ms), self.finished.nbytes
        open_ = [start for start in held if self.end(start) > watermark_ms]
        return HeldMemory(
            sum(map(self._nbytes_of, held.values())) + finished,
            sum(self._nbytes_of(slice_) for slice_ in held.values() if slice_.close_reported) + finished,
            any(not self.full.refuses(start, is_open=True) for start in open_),
            any(start in self.full.suspended for start in open_),
        )

    def _holding(self, watermark_ms: int) -> dict[int, Slice]:
        """Returns the slices with groups that no link frees: open slices, and slices kept for late records."""
        return {
            start: slice_
            for start, slice_ in sorted(self.slices.items())
            if len(slice_.entries) and (slice_.close_reported or self.end(start) > watermark_ms)
        }

    def limit_memory(self, action: MemoryAction, watermark_ms: int) -> None:
        """Applies a decision about the memory that slices hold."""
        held = self._holding(watermark_ms)
        match action:
            case MemoryAction.SUSPEND:
                self.full.suspended = {start for start in held if self.end(start) > watermark_ms}
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
        floor_ms = self.end(int(starts[math.ceil(fraction * len(starts)) - 1]))
        for start in closed:
            if start < floor_ms:
                self._changed((start,))
                del self.slices[start]
        self.finished.forget_before(floor_ms)
        self.full.raise_floor(floor_ms)

    def _discard(self, start: int, slice_: Slice) -> None:
        """Drops the groups of an open slice. What was sent of it stays counted."""
        self.full.discard(start)
        self._changed((start,))
        unsent = int(slice_.entries.pending_records.sum())
        if unsent:
            self.refused(start)
        if slice_.observed > unsent:
            slice_.observed -= unsent
            slice_.late = min(slice_.late, slice_.observed)
            slice_.entries = self._no_entries()
            slice_.send_queue, slice_.pending_count = SendQueue(), ((), 0)
        else:
            del self.slices[start], self._due[bisect_left(self._due, start)]

    def refused(self, start: int) -> None:
        """States once that a slice lacks records for which there was no memory."""
        span = self.full.state(start)
        if span is not None:
            self.losses.lose_memory(*span)

    # Ends of slices

    def finish(self, start: int, counters: Counters) -> None:
        """Keeps the counters of a slice that was sent completely, for late records."""
        if start >= self.full.floor_ms:  # earlier ones take no late records
            self.finished[start] = counters

    def restore_counters(self, close: SliceClose) -> None:
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
            self.finish(start, counters)
        else:
            slice_.observed, slice_.late, slice_.first_ms, slice_.last_ms = counters

    def drop_final(self, watermark_ms: int) -> None:
        """Drops the slices whose windows are final. Called after each frame."""
        done = False
        while self._reported and self.is_final(self._reported[0], watermark_ms):
            start = heappop(self._reported)
            if start in self.slices and self.slices[start].close_reported:
                done = True
                self._changed((start,))
                del self.slices[start]
        self.finished.forget(lambda start: self.is_final(start, watermark_ms))
        self.full.forget(lambda start: self.is_final(start, watermark_ms))
        if done and self.slices:
            self.schedule = self.schedule.without_before(min(self.slices))

    def to_state(self) -> State:
        numbers = {
            "since_ms": self.since_ms,
            "through_ms": self.through_ms,
            "schedule": self.schedule.to_state(),
            "full": self.full.to_state(),
            **self.losses.to_state(),
        }
        if self.counts_earlier:
            numbers["counts_earlier"] = True
        if self.windows != ALL_WINDOWS:
            numbers["windows"] = [self.windows.from_ms, self.windows.until_ms]
        slices = {str(start): slice_.to_state() for start, slice_ in sorted(self.slices.items())}
        return State(numbers, {}, {"slices": State(components=slices), "finished": self.finished.to_state()})

    @classmethod
    def from_state(cls, state: State, bound: BoundQuery, source: int) -> SliceStore:
        numbers, components = state.numbers, state.components
        result = cls(bound, numbers["since_ms"], source, WindowRange(*numbers.get("windows", ())))
        result.through_ms = numbers["through_ms"]
        result.counts_earlier = numbers.get("counts_earlier", False)
        result.schedule = ShareSchedule.from_state(numbers["schedule"])
        result.full = FullSlices.from_state(numbers["full"])
        result.losses.restore(numbers)
        result.finished = FinishedSlices.from_state(components["finished"])
        for start, slice_ in components["slices"].components.items():
            result.slices[int(start)] = Slice.from_state(slice_, result.bounded_measures)
        result._index()
        return result
