"""`Shipper`: selects what of one query's slices leaves at a pull, and builds the bodies of frames.

Closed slices leave first, the oldest first: their entries are sent, and a `SliceClose` reports what was counted and
what is withheld. Entries of open slices leave early if they could not leave in time after the close.

Under a staleness budget, the first frame after the end of a slice is small, so that it arrives before the deadline on
any link. It has the groups that matter most, and a provisional close, which states the rest as withheld. Each further
frame closes the slice again, with less withheld. The last frame advances the progress. So a wrong estimate of the link
costs accuracy, and the center still answers in time.

The center merges session windows from the first and last event times of the slices of all edges. So for a query with
session windows each frame with records of a slice has a `SliceClose` of it, even if it is open.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from edge.cache import (
    EMPTY_SELECTION,
    GroupHistory,
    GroupSelection,
    SendSlots,
    SliceEntries,
    max_entries_per_frame,
    primary_mask,
    withheld_of,
)
from edge.core.arrival_reports import ArrivalMonitor
from edge.core.close_barrier import close_barrier_ms, is_unreported
from edge.core.drift import estimate_drift
from edge.core.least_bytes import LEAST_EARLY_GROUPS, EarlySends, SlicePeriod, early_sends, quanta_of
from edge.core.selection import (
    PLANNED_SHARE,
    PullContext,
    PullResult,
    RecordedPull,
    limit_to_capacity,
    select_groups,
)
from edge.core.slice_store import SliceStore
from edge.core.slices import INITIAL_ENTRY_BYTES, UNKNOWN_LINK, LinkEstimate, Slice
from edgewater.guard.frame_work import FULL_FRAME_WORK, FrameWork
from edgewater.guard.partial_check import group_bytes, max_groups
from edgewater.model.query import StalenessBudget
from edgewater.model.streams import MIN_TIME_MS
from edgewater.model.windows import SessionWindow, TimeWindow
from edgewater.synopses import GroupedAggregate, IntArray
from edgewater.synopses.encoding.state import State
from edgewater.wire import Arrivals, FrameBody, Partial, SliceClose

FIRST_GROUPS = 48
"""The groups in a message of first closes. On 4 KiB/s such a message takes about half a second."""
MOST_LEARNED = 32
"""The history learns from so many of the closed slices that are to be sent. What older ones add has faded to less than
1 % when the newest one is learned."""
NO_DRAIN_WINDOW = (MIN_TIME_MS, MIN_TIME_MS)
ENTRY_BYTES_RATE, FEW_ENTRIES = 0.3, 32
"""Weight of the newest partial in the estimated size of entries; half of it for so many entries."""

Encode = Callable[[GroupedAggregate], bytes]
"""Serialises a partial."""


@dataclass(frozen=True, slots=True)
class PullConditions:
    """The conditions of a pull from one query.

    Attributes:
        capacity_bytes: approximate size of the body before compression. At least one entry is sent, so that a small
            capacity delays but never blocks. The body's work is bounded too (`FULL_FRAME_WORK`).
        watermark_ms: the watermark that the query sees.
        drain_window_ms: as in `PullEvent.drain_windows`. Slices that end after now may be sent from early; under a
            staleness budget also slices that should have closed.
        link: the measured link, for staleness budgets.
        unread: whether the stream may have unread input.
        report_drops: a frame is built even if it states nothing but dropped records.
        first_groups: how many groups a frame of first closes may have (`Shipper.awaits_first_close`); None: the frame
            is another one.
    """

    capacity_bytes: int
    watermark_ms: int
    drain_window_ms: tuple[int, int] = NO_DRAIN_WINDOW
    link: LinkEstimate = UNKNOWN_LINK
    unread: bool = False
    report_drops: bool = False
    first_groups: int | None = None

    @property
    def now_ms(self) -> int:
        """Event time of the pull; the minimum time in a stream without a clock."""
        return self.drain_window_ms[0]


@dataclass(slots=True)
class FrameDraft:
    """The body of a frame while it is built.

    Attributes:
        room_bytes: what is left of the capacity.
        through_ms: event time up to which slices are closed with this frame.
        work: what the frame makes the center do.
        groups: how many groups the partials have.
        closes: the reports of slices, also of open slices of session windows.
        closed: the starts of the slices that the frame closes for the last time.
    """

    room_bytes: int
    through_ms: int
    work: FrameWork
    arrivals: Arrivals | None = None
    partials: list[Partial] = field(default_factory=list)
    closes: list[SliceClose] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    groups: int = 0

    def add(self, partial: Partial, groups: int) -> None:
        """Adds groups of a slice."""
        self.groups += groups
        self.partials.append(partial)
        self.room_bytes -= len(partial.synopsis)
        self.work.units += self.work.of_partial(len(partial.synopsis))

    def close(self, report: SliceClose) -> None:
        """Adds the report of a closed slice."""
        self.closes.append(report)
        if not report.provisional:
            self.closed.append(report.slice_start_ms)


class Shipper:
    """Builds the frames of one query.

    Args:
        monitor: the arrival statistics of a query with early answers; None: it has none.
        encode: serialises a partial. The simulator replaces it where bytes are not measured.

    Attributes:
        history: the history of groups over closed slices.
        drift: per measure, the sum of `estimate_drift` since this process began.
        entry_bytes: the estimated size of one entry in a frame, before compression.
    """

    def __init__(self, store: SliceStore, monitor: ArrivalMonitor | None, encode: Encode) -> None:
        self._store, self._monitor, self._encode = store, monitor, encode
        self._spec = store.spec
        self.history = GroupHistory(store.bounded_measures)
        self.drift: dict[str, float] = {}
        self.entry_bytes = INITIAL_ENTRY_BYTES
        self._max_groups = max_groups(group_bytes(store.bound))
        budget = self._spec.error_budget
        self._has_relative_limit = budget is not None and bool(budget.relative)
        self._has_session_windows = isinstance(self._spec.window, SessionWindow)
        self.is_staleness_bound = isinstance(self._spec.budget, StalenessBudget)
        self.sends_at_need = monitor is None and not self.is_staleness_bound
        # Omitted values have to be reported as withheld, which is possible only for bounded measures.
        self._may_omit = self.is_staleness_bound and bool(store.bounded_measures)
        self._closes_first = self._may_omit and isinstance(self._spec.window, TimeWindow)
        waits = self._spec.cache.eviction == "gain"
        self._picks = monitor is None and not self._spec.saves_bytes and waits

    # What is left to send

    def closed_bytes(self, watermark_ms: int, most: int) -> int:
        """Returns the estimated bytes of closed slices that are still to be sent; at least `most` if they are more."""
        total = 0
        for start, slice_ in self._closed_slices(self._close_barrier_ms(watermark_ms)):
            total += self._pending_bytes(start, slice_)
            if total >= most:
                break
        return total

    def open_bytes(self, watermark_ms: int) -> tuple[int, int | None]:
        """Returns, under a staleness budget, the estimated bytes of open slices, and the first end of these slices."""
        if not self.is_staleness_bound:
            return 0, None  # it sends at its report times, or what `early_sends` demands
        sizes = [
            (self._store.end(start), self._pending_bytes(start, slice_))
            for start, slice_ in self._store.not_ended(watermark_ms)
            if not self._is_unreported(slice_)
        ]
        sizes = [(end, size) for end, size in sizes if size]
        return sum(size for _, size in sizes), min((end for end, _ in sizes), default=None)

    def _pending_bytes(self, start: int, slice_: Slice) -> int:
        """Returns the estimated bytes that a slice has to send."""
        return int(slice_.count_pending(self._store.limits(start), 1.0) * self.entry_bytes)

    def early_due_ms(self, watermark_ms: int, now_ms: int, link: LinkEstimate) -> float | None:
        """Returns the event time from which entries of an open slice cannot wait for its close; None: all can."""
        if not self.sends_at_need:
            return None
        open_ = self._store.not_ended(watermark_ms)
        early = [self._early_sends(start, slice_, watermark_ms, now_ms, link) for start, slice_ in open_]
        return min((e.from_ms for e in early if e is not None), default=None)

    def _early_sends(
        self, start: int, slice_: Slice, watermark_ms: int, now_ms: int, link: LinkEstimate
    ) -> EarlySends | None:
        if not self.sends_at_need:
            return None
        period = SlicePeriod(start, self._store.end(start), now_ms, watermark_ms)
        limits = self._store.limits(start)
        return early_sends(slice_, self._spec, self.history, limits, period, link, self.entry_bytes)

    def awaits_first_close(self, watermark_ms: int) -> bool:
        """Returns whether, under a staleness budget, nothing has been stated of the slices that closed last."""
        if not self._closes_first:
            return False
        closed = self._closed_slices(watermark_ms)
        if any(self._awaits_statement(*each) for each in closed):
            return True
        is_done = self._store.through_ms > MIN_TIME_MS and not closed
        return is_done and self._passed_slice_end(watermark_ms)

    def _awaits_statement(self, start: int, slice_: Slice) -> bool:
        is_new = not slice_.is_stated and self._store.end(start) > self._store.through_ms
        return is_new and self._has_deadline(start, slice_)

    def _closed_slices(self, through_ms: int) -> list[tuple[int, Slice]]:
        """Returns the slices that end by an event time and are to be closed, with their starts, ascending."""
        return [each for each in self._store.ended(through_ms) if not self._is_unreported(each[1])]

    def has_unreported_closes(self, watermark_ms: int) -> bool:
        """Returns whether the watermark has closed slices that have not been reported, or input was lost."""
        through = self._close_barrier_ms(watermark_ms)
        return bool(self._store.losses.unsent) or self._passed_slice_end(through) or bool(self._closed_slices(through))

    def _is_unreported(self, slice_: Slice) -> bool:
        return self._monitor is not None and is_unreported(slice_, self._monitor.reported_before_ms)

    def _close_barrier_ms(self, watermark_ms: int) -> int:
        """Returns the event time up to which slices may be closed."""
        if self._monitor is None:
            return watermark_ms
        reported_before_ms, store = self._monitor.reported_before_ms, self._store
        return close_barrier_ms(store.slices, self._spec, reported_before_ms, watermark_ms, store.through_ms)

    def _passed_slice_end(self, through_ms: int) -> bool:
        """Returns whether a slice has ended since the last reported progress."""
        slice_start = self._spec.window.slice_start
        return through_ms > MIN_TIME_MS and slice_start(through_ms) > slice_start(self._store.through_ms)

    # Pulls

    def pull(self, at: PullConditions, recorded: RecordedPull | None = None) -> PullResult | None:
        """Builds the body of the most urgent frame: closed slices first, oldest first; None: nothing to send.

        Args:
            recorded: in a replay, the recorded outcome: the same groups are sent again, with the values of this state.
        """
        store = self._store
        if self._monitor is not None:
            self._monitor.choose_detail(at.link.likely_bytes_per_ms)
        # The report of arrivals may open the barrier, so it comes first.
        arrivals, partials = self._take_due_arrivals(at, recorded)
        draft = FrameDraft(
            at.capacity_bytes, self._close_barrier_ms(at.watermark_ms), FrameWork.of(self._spec), arrivals
        )
        for partial in partials:
            draft.add(partial, 0)
        draft.room_bytes = at.capacity_bytes
        is_done = self._add_closed(draft, at, recorded)
        # A frame that closes a slice is sent at once, not filled with early sends.
        if is_done and not draft.closes and at.first_groups is None:
            self._add_open(draft, at, recorded)
        if recorded is not None:
            if recorded.result is None:
                return None
            self._replay_rest(recorded, draft)
            draft.through_ms = recorded.result.body.through_ms
        through = max(draft.through_ms, store.through_ms)
        if recorded is None and not self._is_worth_sending(draft, through, report_drops=at.report_drops):
            return None
        return self._finished(draft, through, at.watermark_ms, recorded)

    def _add_closed(self, draft: FrameDraft, at: PullConditions, recorded: RecordedPull | None) -> bool:
        """Adds groups of closed slices, and closes; returns whether all closed slices have been sent."""
        closed = self._closed_slices(min(draft.through_ms, at.watermark_ms))
        drained, stated = set[int](), set[int]()
        is_first = at.first_groups is not None
        in_turn = [each for each in closed if not is_first or self._awaits_statement(*each)]
        for number, (start, slice_) in enumerate(in_turn):
            if recorded is None and draft.work.units >= FULL_FRAME_WORK:
                break
            if len(in_turn) - number > MOST_LEARNED and not self._has_deadline(start, slice_):
                slice_.learned = True
            # A frame of first closes has groups of the newest slice only.
            most = at.first_groups if start == in_turn[-1][0] else 0 if is_first else None
            selection = self._take(draft, start, slice_, at, recorded, most=most)
            if len(selection.groups) or is_first:
                stated.add(start)
            if selection.drained:
                drained.add(start)
            elif not is_first:
                break
            draft.work.add_slice(start, draft.work.of_close(len(self._store.bounded_measures)))
        self._close_slices(draft, closed, drained, stated, recorded)
        return len(drained) == len(closed)

    def _close_slices(
        self,
        draft: FrameDraft,
        closed: list[tuple[int, Slice]],
        drained: set[int],
        stated: set[int],
        recorded: RecordedPull | None,
    ) -> None:
        """Closes the drained slices, the oldest first.

        From the first slice on that is not drained, the slices in `stated` are closed provisionally.
        """
        is_blocked = False
        for start, slice_ in closed:
            if not is_blocked and start not in drained:
                is_blocked, draft.through_ms = True, min(draft.through_ms, self._store.end(start) - 1)
                if recorded is None and not self._closes_first:
                    return
            if recorded is not None:
                is_last, is_provisional = start in recorded.closed, start in recorded.provisional
            else:
                is_last = not is_blocked
                may_state = self._closes_first and self._store.end(start) > self._store.through_ms
                is_provisional = is_blocked and may_state and start in stated and self._has_deadline(start, slice_)
            if is_last:
                draft.close(self._close(start, slice_))
            elif is_provisional:
                draft.close(self._provisional_close(start, slice_))

    def _add_open(self, draft: FrameDraft, at: PullConditions, recorded: RecordedPull | None) -> None:
        """Adds groups of open slices that are sent before their close."""
        for start, slice_ in self._store.not_ended(at.watermark_ms):
            end = self._store.end(start)
            if recorded is None and draft.work.units >= FULL_FRAME_WORK:
                return
            early = self._early_sends(start, slice_, at.watermark_ms, at.now_ms, at.link)
            if self._may_send_early(end, at, early):
                self._take(draft, start, slice_, at, recorded, early)

    def _take(
        self,
        draft: FrameDraft,
        start: int,
        slice_: Slice,
        at: PullConditions,
        recorded: RecordedPull | None,
        early: EarlySends | None = None,
        most: int | None = None,
    ) -> GroupSelection:
        """Adds the selected groups of a slice to the frame; returns the selection."""
        slice_.forget_unchanged(self._store.limits(start))
        selection = self._select(start, slice_, draft, at, early, most)
        selection = limit_to_capacity(slice_, selection, at.capacity_bytes, self.entry_bytes)
        if recorded is not None:
            selection = recorded.replace_selection(start, slice_, selection)
        if len(selection.groups):
            draft.add(self._partial(start, slice_, selection.groups, recorded), len(selection.groups))
            is_closed = self._store.end(start) <= at.watermark_ms
            if self._has_session_windows and not (is_closed and selection.drained):
                draft.closes.append(self._slice_close(start, slice_))
        return selection

    def _is_worth_sending(self, draft: FrameDraft, through_ms: int, *, report_drops: bool) -> bool:
        losses = self._store.losses
        return bool(
            draft.partials
            or draft.closes
            or draft.arrivals is not None
            or losses.unsent
            or self._passed_slice_end(through_ms)
            or (report_drops and losses.drops)
        )

    def _finished(
        self, draft: FrameDraft, through_ms: int, watermark_ms: int, recorded: RecordedPull | None
    ) -> PullResult:
        """Returns the body of the frame, and advances the store to its state after the frame."""
        store, has_monitor = self._store, self._monitor is not None
        stated = recorded.result.body.losses if recorded is not None and recorded.result is not None else None
        losses = store.losses.take(store.through_ms, through_ms, monitored=has_monitor, recorded=stated)
        store.through_ms = through_ms
        store.drop_final(watermark_ms)
        since = None if store.since_ms == MIN_TIME_MS else store.since_ms
        dropped, partials = store.losses.drops.take(), tuple(draft.partials)
        body = FrameBody(through_ms, partials, tuple(draft.closes), since, draft.arrivals, losses, dropped)
        return PullResult(body, tuple(draft.closed))

    def _close(self, start: int, slice_: Slice) -> SliceClose:
        """Closes a slice that has been sent completely; returns its report."""
        report, store = self._slice_close(start, slice_), self._store
        self._record_drift(start, slice_.entries)
        slice_.close_reported = True
        if not store.bounded_measures or not len(slice_.entries):
            store.finish(start, store.slices.pop(start).counters)
        return report

    def _provisional_close(self, start: int, slice_: Slice) -> SliceClose:
        slice_.is_stated = True
        return replace(self._slice_close(start, slice_), provisional=True)

    def _slice_close(self, start: int, slice_: Slice) -> SliceClose:
        extent = (slice_.first_ms, slice_.last_ms) if self._has_session_windows else (None, None)
        withheld = withheld_of(slice_.entries, shares=self._has_relative_limit)
        return SliceClose(start, slice_.observed, slice_.late, withheld, *extent)

    def _replay_rest(self, recorded: RecordedPull, draft: FrameDraft) -> None:
        """Applies the recorded sends and closes that the replay did not reach because its values differ or are lost."""
        slices = self._store.slices
        for start in [s for s in recorded.partials if s in slices]:
            slice_ = slices[start]
            groups = recorded.replace_selection(start, slice_, EMPTY_SELECTION).groups
            draft.add(self._partial(start, slice_, groups, recorded), len(groups))
        for start in recorded.closed:
            if start not in draft.closed and start in slices:
                draft.closes.append(self._close(start, slices[start]))
        stated = {close.slice_start_ms for close in draft.closes}
        for start in recorded.provisional:
            if start not in stated and start in slices:
                draft.closes.append(self._provisional_close(start, slices[start]))
        for close in recorded.result.body.closes if recorded.result is not None else ():
            self._store.restore_counters(close)

    def _take_due_arrivals(
        self, at: PullConditions, recorded: RecordedPull | None
    ) -> tuple[Arrivals | None, list[Partial]]:
        """Takes, for a query with early answers, the due arrival report and the pending values of ended slices, except
        what an error budget permits to withhold."""
        now_ms, monitor = at.now_ms, self._monitor
        if monitor is None or now_ms == MIN_TIME_MS:
            return None, []
        now_ms -= monitor.sampling.clock_offset_ms
        count = None if recorded is None else recorded.substreams
        arrivals = monitor.take(now_ms, at.capacity_bytes, unread=at.unread, count=count)
        if arrivals is None:
            return None, []
        partials, store = [], self._store
        for start in sorted(s for s in store.slices if at.watermark_ms < store.end(s) <= now_ms):
            slice_ = store.slices[start]
            groups = np.flatnonzero(primary_mask(slice_.entries, store.limits(start)))
            if recorded is not None:
                groups = recorded.replace_selection(start, slice_, GroupSelection(groups, True)).groups
            if len(groups):
                partials.append(self._partial(start, slice_, groups, recorded))
        return arrivals, partials

    # Selection of groups

    def _select(
        self,
        start: int,
        slice_: Slice,
        draft: FrameDraft,
        at: PullConditions,
        early: EarlySends | None,
        most: int | None,
    ) -> GroupSelection:
        """Selects the groups of a slice to send now, for the room that is left; at least one if there is any room."""
        entry_bytes, end, room = self.entry_bytes, self._store.end(start), draft.room_bytes
        is_closed = end <= at.watermark_ms
        count = min(max(1, int(room / entry_bytes)), self._max_groups) if room > 0 else 0
        if most is not None:
            count = min(count, most)
        slots = None
        if self._may_omit and self._has_deadline(start, slice_):
            slots = self._slots(start, slice_, at, draft.groups)
            if not is_closed and at.now_ms < end:
                count = min(count, self._before_first_close(end, at))
        if not is_closed and self._spec.cache.eviction == "gain":
            rate, large = at.link.likely_bytes_per_ms / entry_bytes, self._spec.saves_bytes or self.is_staleness_bound
            due_ms = self._deadline_ms(end, at.link) if self.is_staleness_bound else end
            per_frame = max_entries_per_frame(due_ms - at.now_ms, rate, large=large)
            count = min(count, max(per_frame, early.in_one_frame) if early is not None else per_frame)
        if early is not None:
            count = min(count, early.entries, early.fitting)
        least = LEAST_EARLY_GROUPS if self._picks and (self.sends_at_need or at.now_ms < end) else 0
        context = PullContext(start, end, is_closed, at.now_ms, count, least)
        return select_groups(slice_, self._spec, self.history, self._store.limits(start), context, slots)

    def _has_deadline(self, start: int, slice_: Slice) -> bool:
        """Whether a staleness budget limits what is sent of a slice.

        A slice whose first records arrived after the deadline, such as a slice of a backfill, is sent completely: it
        delays no answer that a reader waits for. The deadline is compared at the stream's speed 1, which is
        exact for live streams.
        """
        budget = self._spec.budget
        if not isinstance(budget, StalenessBudget):
            return False
        return slice_.first_arrival_ms <= self._store.end(start) + budget.staleness_ms

    def _slots(self, start: int, slice_: Slice, at: PullConditions, sent: int) -> SendSlots:
        """Returns how many entries of a slice with a deadline can be sent in time, after the entries of the frame.

        If the deadline has passed before the first frame of a closed slice, such as after an outage, groups are sent
        for as long as the budget, less the time of newer slices. A late answer should not be empty, and should not
        delay the next answer.
        """
        end, link = self._store.end(start), at.link
        is_closed = end <= at.watermark_ms
        if not is_closed:
            # An entry leaves early only if even a link of the median could not carry it after the close.
            link = replace(link, bytes_per_ms=link.likely_bytes_per_ms)
        budget = self._spec.staleness_budget
        assert budget is not None
        deadline_ms = max(self._deadline_ms(end, link), slice_.late_until_ms)
        if link.bytes_per_ms <= 0.0 or at.now_ms == MIN_TIME_MS:
            return SendSlots(np.inf, np.inf)
        rate = PLANNED_SHARE * link.bytes_per_ms / self.entry_bytes
        if is_closed and not slice_.learned and deadline_ms <= at.now_ms:
            newer = sum(len(s.entries) for at_ms, s in self._closed_slices(at.watermark_ms) if at_ms > start)
            slice_.late_until_ms = at.now_ms + round(budget.staleness_ms * link.speed - newer / rate)
            deadline_ms = max(deadline_ms, slice_.late_until_ms)
        total = rate * (self._spec.window.slice_ms + budget.staleness_ms * link.speed - link.path_delay_ms)
        return SendSlots(max(rate * (deadline_ms - at.now_ms) - sent, 0.0), max(total, 0.0))

    def _before_first_close(self, end: int, at: PullConditions) -> int:
        """Returns how many entries of an open slice the link carries before it has to carry first closes in time."""
        link = at.link
        if link.bytes_per_ms <= 0.0:
            return self._max_groups
        free_ms = self._deadline_ms(end, link) - at.now_ms
        first_bytes = min(FIRST_GROUPS * self.entry_bytes, at.capacity_bytes)
        return max(int((PLANNED_SHARE * link.bytes_per_ms * free_ms - first_bytes) / self.entry_bytes), 0)

    def _may_send_early(self, end: int, at: PullConditions, early: EarlySends | None) -> bool:
        """Returns whether entries of an open slice may be sent now.

        Under a staleness budget they wait for the close, unless sending them takes until after the deadline. So most
        groups are sent once. The policies of TR 16-003 send whenever the link is idle.
        """
        after, through = at.drain_window_ms
        if not self.is_staleness_bound:
            return early is not None and early.from_ms <= after
        waits = self._spec.cache.eviction == "gain"
        return end <= after or through > (self._deadline_ms(end, at.link) if waits else after)

    def _deadline_ms(self, end: int, link: LinkEstimate) -> float:
        """Returns when entries of a slice that ends at `end` have to be sent under a staleness budget."""
        budget = self._spec.staleness_budget
        assert budget is not None
        return end + budget.staleness_ms * link.speed - link.path_delay_ms

    def _partial(self, start: int, slice_: Slice, groups: IntArray, recorded: RecordedPull | None) -> Partial:
        """Returns the pending values of these groups, and removes them from the slice."""
        groups = slice_.entries.in_key_order(groups)
        self._record_drift(start, slice_.entries, groups)
        slice_.discount_pending(self._store.limits(start), groups)
        sent = recorded.partials.pop(start) if recorded is not None else None
        quanta = quanta_of(self._spec, self._store.slice_shares(start), slice_.entries.pending.measures)
        data = self._encode(slice_.entries.send(groups, sent, quanta))
        # The estimate follows the actual size of entries, so that frames are about as large as the capacity. Partials
        # of few entries are mostly header.
        weight = ENTRY_BYTES_RATE * len(groups) / (len(groups) + FEW_ENTRIES)
        self.entry_bytes += weight * (len(data) / len(groups) - self.entry_bytes)
        return Partial(start, data)

    def _record_drift(self, start: int, entries: SliceEntries, groups: IntArray | None = None) -> None:
        """Adds the drift of groups that are sent, or (None) of all groups that a closed slice withholds."""
        for measure, share in self._store.slice_shares(start).items():
            error = entries.accumulated_error(measure, groups)
            amount = estimate_drift(error if groups is not None else error[entries.has_pending], share)
            self.drift[measure] = self.drift.get(measure, 0.0) + amount

    def to_state(self) -> State:
        return State({"entry_bytes": self.entry_bytes}, {}, {"history": self.history.to_state()})

    def restore(self, state: State) -> None:
        """Restores what `to_state` returned."""
        self.entry_bytes = state.numbers["entry_bytes"]
        self.history = GroupHistory.from_state(state.components["history"])
