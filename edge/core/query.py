"""One query at one edge: filter, assign slices, update entries; later, decide what leaves.

A slice is open until the stream's watermark passes its end, then closed: its primary entries are
drained, and a `SliceClose` says what was observed and what is withheld. It is kept, for late
records, until the last window over it can no longer be revised, and then forgotten. Of one that was
sent in full only the counters are kept.

Sessions are told from where a slice's records begin and end, by the center, which knows those of all
edges. So for a session query each frame that carries records of a slice says so, open slices included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from edge.cache.entries import SliceEntries
from edge.cache.history import GroupHistory
from edge.cache.partition import Limits
from edge.cache.send_queue import NOTHING, Choice, Ranking, portion
from edge.core.arrival_reports import ArrivalMonitor, Observing, is_untold, told_through
from edge.core.budget_schedule import ShareSchedule
from edge.core.drift import drift_near
from edge.core.measure_inputs import Arguments, Promise
from edge.core.selection import Chance, Departure, Recorded, choose, fitting, slots_left
from edge.core.slices import UNKNOWN_CARRIER, Carrier, Progress, Slice
from edgewater.accuracy import report_schedule
from edgewater.algebra import LateRecordPolicy, late_record_policy_of
from edgewater.query import BoundQuery, ErrorBudget, QuerySpec, StalenessBudget
from edgewater.streams import MIN_TIME_MS, TIME_COLUMN
from edgewater.synopses import BoolArray, GroupedAggregate, IntArray, is_sampled
from edgewater.windows import SessionWindow
from edgewater.wire.frames import Arrivals, FrameBody, Partial, QueryRef, SliceClose

NOTHING_OPEN = (MIN_TIME_MS, MIN_TIME_MS)
HALF_SPENT = 0.5
"""With eager promotion, entries that have used up half of their limit count as what is to be sent."""


@dataclass(slots=True)
class QueryPipeline:
    """The state of one query.

    Attributes:
        since_ms: event time from which on this edge has all records; slices before it are skipped.
        schedule: this edge's shares of the error budget, per slice.
        spent: the counters of slices that were sent in full.
        drift: per measure, the sum of `drift_near` since this process began.
        source: with a record's number in its stream, the identity of the record among those of all edges.
        history: what closed slices tell about groups.
        monitor: of a query with an accuracy, what has arrived and when.
        promise: of a query with an accuracy, the measure that it is about.
        encode: a partial's bytes. The simulator has its own where bytes are not what is measured.
        drawn_at: of a function of a sample, the probability with which a record is processed.
    """

    ref: QueryRef
    bound: BoundQuery
    since_ms: int = MIN_TIME_MS
    schedule: ShareSchedule = field(default_factory=ShareSchedule)
    slices: dict[int, Slice] = field(default_factory=dict)
    spent: dict[int, tuple[int, int, int, int]] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    source: int = 0
    drift: dict[str, float] = field(default_factory=dict)
    late_record_policy: LateRecordPolicy = field(init=False)
    promise: Promise | None = field(init=False)
    history: GroupHistory = field(default_factory=GroupHistory)
    monitor: ArrivalMonitor | None = None
    encode: Callable[[GroupedAggregate], bytes] = GroupedAggregate.to_bytes
    drawn_at: float = 1.0

    def __post_init__(self) -> None:
        if self.bounded_measures and not self.history.measures:
            self.history = GroupHistory(self.bounded_measures)
        self.late_record_policy = late_record_policy_of(self.bound.spec)
        clock = report_schedule(self.spec.window, self.spec.accuracy, self.spec.lateness_ms)
        if clock is not None and self.monitor is None:
            self.monitor = ArrivalMonitor(clock, self.source, self.bound.group_types)
        self.promise = Promise(self.bound) if self.spec.accuracy is not None else None

    @property
    def spec(self) -> QuerySpec:
        return self.bound.spec

    @property
    def nbytes(self) -> int:
        monitored = self.monitor.nbytes if self.monitor is not None else 0
        return sum(s.entries.nbytes for s in self.slices.values()) + self.history.nbytes + monitored

    @property
    def ships_rows(self) -> bool:
        """Whether its accuracy is about a function of a sample."""
        return self.spec.accuracy is not None and self.spec.accuracy.kind is None

    @property
    def bounded_measures(self) -> tuple[str, ...]:
        """Every measure of a query under a budget: all of them are reported as withheld."""
        kept_back = self.spec.budget is not None and self.spec.accuracy is None
        return tuple(m.name for m in self.spec.measures) if kept_back else ()

    def ingest(
        self, batch: pa.RecordBatch, watermark_ms: int, touch: int, first: int = 0, arrival_ms: int = MIN_TIME_MS
    ) -> dict[str, int]:
        """Updates the slices with a batch; returns how many records were not counted, by reason.

        Args:
            first: the number in its stream of the batch's first record; the others follow.
            arrival_ms: event time by the stream's clock at which it came.
        """
        ids = np.arange(first, first + batch.num_rows)
        if self.bound.where is not None:
            mask = self.bound.where.array(batch)
            batch, ids = batch.filter(mask), pa.array(ids).filter(mask).to_numpy()
        if batch.num_rows == 0:
            return {}
        dropped: dict[str, int] = {}
        times = batch.column(TIME_COLUMN).to_numpy()
        starts = self.spec.window.slice_starts(times)
        # Nearly every batch is of one slice, which costs less to see than to sort for.
        distinct = starts[:1] if (starts == starts[0]).all() else np.unique(starts)
        for start in distinct.tolist():
            rows = None if len(distinct) == 1 else np.flatnonzero(starts == start)
            part = batch if rows is None else batch.take(pa.array(rows))
            reason = self._refused(start, watermark_ms)
            if reason:
                dropped[reason] = dropped.get(reason, 0) + part.num_rows
                continue
            when, numbers = (times, ids) if rows is None else (times[rows], ids[rows])
            keys = [part.column(name) for name in self.spec.group_by]
            arguments, kept = Arguments(self.bound, part), None
            if self.monitor is not None and self.promise is not None:
                kept = self.monitor.sample(numbers)
                came_ms = arrival_ms - self.monitor.observing.clock_offset_ms
                seen = self.promise.observed(arguments, kept)
                self.monitor.observe(when, came_ms, seen.values, kept, keys, seen.population)
                arguments = seen.processed
            elif self.drawn_at < 1.0 and self._end(start) > watermark_ms:
                # Of what is late nothing is passed over: it would thin what has been sent to the rate of now.
                kept = is_sampled(self.source, numbers, self.drawn_at)
                arguments = arguments.among(kept)
            if kept is not None:
                sampled_out = part.num_rows - int(kept.sum())
                dropped["sampled-out"] = dropped.get("sampled-out", 0) + sampled_out
            self._update(start, keys, arguments, when, numbers, watermark_ms, touch, kept)
            if kept is not None and self.monitor is not None:
                self.slices[start].told_by_ms = self.monitor.last_arrival_ms
        return dropped

    def observe_as(self, observing: Observing) -> None:
        """Takes a word of the center in."""
        assert self.monitor is not None
        step_ms = observing.clock_offset_ms - self.monitor.observing.clock_offset_ms
        self.monitor.observing = observing
        if step_ms > self.monitor.schedule.grid.substream_ms:
            self.monitor.step_back()
            for held in self.slices.values():
                held.told_by_ms = max(held.told_by_ms - step_ms, MIN_TIME_MS)

    def _refused(self, start: int, watermark_ms: int) -> str:
        if start < self.since_ms:
            return "before-query"
        if self.late_record_policy is LateRecordPolicy.DROPPED and self._end(start) <= watermark_ms:
            return "out-of-order"
        return "too-late" if self._final(start, watermark_ms) else ""

    def _update(
        self,
        start: int,
        keys: list[pa.Array],
        arguments: Arguments,
        times: IntArray,
        ids: IntArray,
        watermark_ms: int,
        touch: int,
        kept: BoolArray | None,
    ) -> None:
        """Counts the records, and processes those that are `kept` (None: all), of which the arguments are."""
        held = self.slices.get(start)
        if held is None:
            held = self.slices[start] = Slice(
                SliceEntries.of(self.bound, self.source, self.bounded_measures), *self.spent.pop(start, ())
            )
        held.observed += len(times)
        held.first_ms, held.last_ms = min(held.first_ms, int(times.min())), max(held.last_ms, int(times.max()))
        if self._end(start) <= watermark_ms:
            held.late += len(times)
        held.stated = False
        if self.ships_rows and kept is not None:
            held.drawn_at = min(held.drawn_at, self.drawn_at)
        if held.drawn_at < 1.0:
            held.entries.offer(held.drawn_at)
        if self.ships_rows and kept is not None:
            # Also of a group of which no row is drawn the center has to know, and that it was drawn from.
            held.entries.announce(keys, len(times), touch, self._elapsed(start, int(times.max())))
        if kept is not None:
            times, ids = times[kept], ids[kept]
            if not len(times):
                return
            keys = [arguments.records.column(name) for name in self.spec.group_by]
        elapsed = self._elapsed(start, int(times.max()))
        held.entries.update(keys, arguments.by_measure(), len(times), times, touch, ids, elapsed)

    def _end(self, start: int) -> int:
        return start + self.spec.window.slice_ms

    def _final(self, start: int, watermark_ms: int) -> bool:
        return self.spec.window.last_window_end(start) + self.spec.lateness_ms <= watermark_ms

    @property
    def shares(self) -> Mapping[str, float]:
        """Per measure and window, what slices to come may hold back."""
        return self.schedule.last.shares

    def set_shares(self, version: int, shares: Mapping[str, float], from_ms: int) -> None:
        """Takes a word of the center in; closed slices keep the shares under which they were closed."""
        if version == 0:  # of a center that does not count: for all slices, closed ones too
            if dict(shares) != dict(self.shares):
                self.schedule = ShareSchedule.always(shares)
                for held in self.slices.values():
                    held.stated, held.ranking = False, Ranking()
            return
        through = self.progress.through_ms
        not_closed = MIN_TIME_MS if through == MIN_TIME_MS else self.spec.window.slice_start(through)
        self.schedule = self.schedule.take(version, shares, from_ms, not_closed)

    def slice_shares(self, start: int) -> dict[str, float]:
        """A slice's shares: a window of k slices may hold back E in all, or E in each for extrema."""
        if not isinstance(self.spec.budget, ErrorBudget):
            return {}
        functions = {m.name: m.function for m in self.spec.measures}
        k, shares = self.spec.window.slices_per_window, self.schedule.at(start)
        return {
            name: shares.get(name, 0.0) / (k if functions[name].error == "sum" else 1)
            for name, _ in self.spec.budget.limits
        }

    def closed_bytes(self, watermark_ms: int) -> int:
        """Estimated bytes of closed slices that are still to be sent."""
        through = self._told_through(watermark_ms)
        return sum(size for end, size in self._sizes() if end <= through)

    def open_bytes(self, watermark_ms: int, after_ms: int) -> tuple[int, int | None]:
        """Estimated bytes of open slices that may leave early, and the first one's end.

        Args:
            after_ms: where the clock stands. A slice that should have closed by it waits for its
                records; to send what it has now would be to send most groups twice.
        """
        if self.monitor is not None:
            return 0, None  # its points are its time
        after = watermark_ms if self.wants_news else max(watermark_ms, after_ms)
        sizes = [(end, size) for end, size in self._sizes() if end > after and size]
        return sum(size for _, size in sizes), min((end for end, _ in sizes), default=None)

    def _limits(self, start: int) -> Limits:
        relative = dict(self.spec.budget.relative) if isinstance(self.spec.budget, ErrorBudget) else {}
        return Limits(self.slice_shares(start), relative)

    def _elapsed(self, start: int, now_ms: int) -> float:
        """The part of a slice that has passed, 0 to 1."""
        return min(max((now_ms - start) / self.spec.window.slice_ms, 0.0), 1.0)

    def _sizes(self) -> Iterator[tuple[int, int]]:
        margin = HALF_SPENT if self.spec.cache.eviction == "gain" else 1.0
        for start, held in self.slices.items():
            if self._is_untold(held) or (held.in_time and held.stated):
                continue  # what a staleness budget has omitted stays here
            waiting = held.count_waiting(self._limits(start), 1.0 if held.learnt else margin)
            yield self._end(start), int(waiting * self.progress.entry_bytes)

    def has_news(self, watermark_ms: int) -> bool:
        """Is there something to tell the center about slices that the watermark has closed?"""
        through = self._told_through(watermark_ms)
        return self._crossed(through) or any(
            not held.stated and self._end(start) <= through and not self._is_untold(held)
            for start, held in self.slices.items()
        )

    def _is_untold(self, held: Slice) -> bool:
        return self.monitor is not None and is_untold(held, self.monitor.told_before_ms)

    def _told_through(self, watermark_ms: int) -> int:
        """Up to where slices may be closed."""
        if self.monitor is None:
            return watermark_ms
        told_before_ms, through_ms = self.monitor.told_before_ms, self.progress.through_ms
        return told_through(self.slices, self.spec, told_before_ms, watermark_ms, through_ms)

    def _crossed(self, through_ms: int) -> bool:
        """Has a slice ended since the center was last told how far this edge has come?"""
        border = self.spec.window.slice_start
        return through_ms > MIN_TIME_MS and border(through_ms) > border(self.progress.through_ms)

    def pull(
        self,
        capacity_bytes: int,
        watermark_ms: int,
        open_between_ms: tuple[int, int] = NOTHING_OPEN,
        carrier: Carrier = UNKNOWN_CARRIER,
        unread: bool = False,
        recorded: Recorded | None = None,
    ) -> Departure | None:
        """The frame that is worth most: closed slices first, oldest first.

        Args:
            capacity_bytes: about how large the body may be before compression; at least one entry
                leaves, so that a small capacity delays but never blocks.
            open_between_ms: now, and when what open slices have to send would be drained; slices still open
                may be drawn from if they end behind now. Under a staleness budget also if they do not: late
                or not, it wants news.
            carrier: the link, for staleness budgets.
            unread: the stream may have input that has not been read.
            recorded: of a replay, what left: it leaves again, with the values that this state has for it.
        """
        arrivals, partials = self._tell(open_between_ms[0], watermark_ms, capacity_bytes, unread, recorded)
        closes: list[SliceClose] = []
        closed: list[int] = []
        through, room, closing = self._told_through(watermark_ms), capacity_bytes, False
        for start in sorted(self.slices):
            held = self.slices[start]
            end = self._end(start)
            if end > watermark_ms and (closing or not self._may_leave_early(end, open_between_ms)):
                continue  # what an answer waits for does not wait for a frame to be filled
            if end <= watermark_ms and (end > through or self._is_untold(held)):
                continue
            made: list[Partial] = []
            chosen = self._choose(start, held, room, end <= watermark_ms, open_between_ms, carrier)
            leaving = fitting(held, chosen, capacity_bytes, self.progress.entry_bytes)
            if recorded is not None:
                leaving = recorded.instead(start, held, leaving)
            if len(leaving.groups):
                made = [self._partial(start, held, leaving.groups, recorded)]
                partials += made
                room -= sum(len(p.synopsis) for p in made)
            if made and self._in_sessions and (end > watermark_ms or not leaving.drained):
                closes.append(self._statement(start, held))
            if end > watermark_ms:
                continue
            if not leaving.drained:
                through = min(through, end - 1)
                break
            if not held.stated:
                closes.append(self._close(start, held))
                closed.append(start)
                closing = True
        if recorded is not None:
            if recorded.departure is None:
                return None
            self._follow(recorded, partials, closes, closed)
            through = recorded.departure.body.through_ms
        through = max(through, self.progress.through_ms)
        if recorded is None and not partials and not closes and arrivals is None and not self._crossed(through):
            return None
        self.progress.through_ms = through
        self._forget_final(watermark_ms)
        since = None if self.since_ms == MIN_TIME_MS else self.since_ms
        return Departure(FrameBody(through, tuple(partials), tuple(closes), since, arrivals), tuple(closed))

    def _close(self, start: int, held: Slice) -> SliceClose:
        """All of the slice that is to be sent has been."""
        statement = self._statement(start, held)
        self._note_drift(start, held.entries)
        held.stated = True
        if not self.bounded_measures:
            self.spent[start] = self.slices.pop(start).counters
        return statement

    def _follow(
        self, recorded: Recorded, partials: list[Partial], closes: list[SliceClose], closed: Sequence[int]
    ) -> None:
        """Takes out what left slices to which a replay of other values has not come."""
        for start in [s for s in recorded.parts if s in self.slices]:
            held = self.slices[start]
            groups = recorded.instead(start, held, NOTHING).groups
            partials.append(self._partial(start, held, groups, recorded))
        for start in recorded.closed:
            if start not in closed and start in self.slices:
                closes.append(self._close(start, self.slices[start]))

    def _tell(
        self, now_ms: int, watermark_ms: int, capacity_bytes: int, unread: bool, recorded: Recorded | None
    ) -> tuple[Arrivals | None, list[Partial]]:
        """Of a query with an accuracy, what is due by the clock: statistics, and all of slices that have ended."""
        if self.monitor is None or now_ms == MIN_TIME_MS:
            return None, []
        now_ms -= self.monitor.observing.clock_offset_ms
        count = None if recorded is None else recorded.substreams
        arrivals = self.monitor.take(now_ms, capacity_bytes, unread=unread, count=count)
        if arrivals is None:
            return None, []
        partials = []
        for start in sorted(s for s in self.slices if watermark_ms < self._end(s) <= now_ms):
            held = self.slices[start]
            groups = np.flatnonzero(held.entries.has_pending)
            if recorded is not None:
                groups = recorded.instead(start, held, Choice(groups, True)).groups
            if len(groups):
                partials.append(self._partial(start, held, groups, recorded))
        return arrivals, partials

    def _choose(
        self, start: int, held: Slice, room: int, closed: bool, open_between_ms: tuple[int, int], carrier: Carrier
    ) -> Choice:
        """What leaves a slice now, of at most about `room` bytes, but one entry if there is any room."""
        entry_bytes, end = self.progress.entry_bytes, self._end(start)
        count = max(1, int(room / entry_bytes)) if room > 0 else 0
        # What is omitted has to be stated as withheld, and is only of measures that are bounded.
        slots = slots_left(self.spec, end, open_between_ms[0], carrier, entry_bytes) if self.bounded_measures else None
        if not closed and self.spec.cache.eviction == "gain":
            count = min(count, portion(end - open_between_ms[0], carrier.bytes_per_ms / entry_bytes))
        chance = Chance(start, end, closed, open_between_ms, count)
        return choose(held, self.spec, self.history, self._limits(start), chance, slots)

    @property
    def _in_sessions(self) -> bool:
        return isinstance(self.spec.window, SessionWindow)

    def _statement(self, start: int, held: Slice) -> SliceClose:
        extent = (held.first_ms, held.last_ms) if self._in_sessions else (None, None)
        return SliceClose(start, held.observed, held.late, held.entries.withheld(), *extent)

    def _may_leave_early(self, end: int, open_between_ms: tuple[int, int]) -> bool:
        if self.monitor is not None:
            return False
        after, through = open_between_ms
        return through > after if end > after else self.wants_news

    @property
    def wants_news(self) -> bool:
        """Is an answer given at its time, whatever has come by then?"""
        return isinstance(self.spec.budget, StalenessBudget)

    def _partial(self, start: int, held: Slice, groups: IntArray, recorded: Recorded | None) -> Partial:
        self._note_drift(start, held.entries, groups)
        held.count_out(self._limits(start), groups)
        told = recorded.parts.pop(start) if recorded is not None else None
        data = self.encode(held.entries.send(groups, told))
        # The estimate follows what entries really cost, so that frames come out near the capacity.
        self.progress.entry_bytes += 0.3 * (len(data) / len(groups) - self.progress.entry_bytes)
        return Partial(start, 0, data)

    def _note_drift(self, start: int, entries: SliceEntries, groups: IntArray | None = None) -> None:
        """What leaves, or is kept back for good (None: all that is pending), tells how much a larger share
        would save."""
        for measure, share in self.slice_shares(start).items():
            error = entries.accumulated_error(measure, groups)
            amount = drift_near(error if groups is not None else error[entries.has_pending], share)
            self.drift[measure] = self.drift.get(measure, 0.0) + amount

    def _forget_final(self, watermark_ms: int) -> None:
        done = [
            s for s, held in self.slices.items() if held.stated and s < watermark_ms and self._final(s, watermark_ms)
        ]
        for start in done:
            del self.slices[start]
        for start in [s for s in self.spent if self._final(s, watermark_ms)]:
            del self.spent[start]
        if done and self.slices:
            self.schedule = self.schedule.without_before(min(self.slices))
