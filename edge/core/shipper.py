"""`Shipper`: decides what of one query's slices leaves at a pull. `FrameState` applies the decision.

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

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from edge.cache import (
    GroupHistory,
    GroupSelection,
    SendSlots,
    max_entries_per_frame,
    primary_mask,
)
from edge.core.arrival_reports import ArrivalMonitor, ArrivalReport
from edge.core.close_barrier import close_barrier_ms, is_unreported
from edge.core.frame_state import CloseKind, Decision, FrameState, Send
from edge.core.least_bytes import LEAST_EARLY_GROUPS, EarlySends, SlicePeriod, early_sends
from edge.core.selection import PLANNED_SHARE, PullConditions, PullContext, limit_to_capacity, select_groups
from edge.core.slice_store import SliceStore
from edge.core.slices import INITIAL_ENTRY_BYTES, LinkEstimate, Slice
from edgewater.guard.frame_work import FULL_FRAME_WORK, FrameWork
from edgewater.guard.partial_check import group_bytes, max_groups
from edgewater.model.query import StalenessBudget
from edgewater.model.streams import MIN_TIME_MS
from edgewater.model.windows import TimeWindow
from edgewater.synopses import IntArray
from edgewater.synopses.encoding.state import State

FIRST_GROUPS = 48
"""The groups in a message of first closes. On 4 KiB/s such a message takes about half a second."""
ENTRY_BYTES_RATE, FEW_ENTRIES = 0.3, 32
"""Weight of the newest partial in the estimated size of entries; half of it for so many entries."""


@dataclass(slots=True)
class FrameDraft:
    """What a frame has, while it is decided.

    Attributes:
        room_bytes: what is left of the capacity.
        through_ms: event time up to which slices are closed with this frame.
        work: what the frame makes the center do.
        report: the report of arrivals.
        sends: what is sent, by the start of the slice.
        groups: how many groups are sent.
        closes: the starts of slices in the order of their reports.
    """

    room_bytes: int
    through_ms: int
    work: FrameWork
    report: ArrivalReport | None = None
    sends: dict[int, Send] = field(default_factory=dict)
    groups: int = 0
    closes: list[tuple[int, CloseKind]] = field(default_factory=list)

    def add(self, start: int, send: Send) -> None:
        """Adds groups of a slice."""
        size = len(send.partial.synopsis)
        self.sends[start] = send
        self.groups += len(send.shipment.groups)
        self.room_bytes -= size
        self.work.units += self.work.of_partial(size)


class Shipper:
    """Decides what the frames of one query have.

    It reads the state of the query, and changes only what `FrameState.apply` never reads: the history, queues and other
    memories of policies.

    Args:
        state: serialises what is sent.
        monitor: the arrival statistics of a query with early answers; None: it has none.

    Attributes:
        history: the history of groups over closed slices.
        entry_bytes: the estimated size of one entry in a frame, before compression.
    """

    def __init__(self, store: SliceStore, state: FrameState, monitor: ArrivalMonitor | None) -> None:
        self._store, self._state, self._monitor = store, state, monitor
        self._spec = store.spec
        self.history = GroupHistory(store.bounded_measures)
        self.entry_bytes = INITIAL_ENTRY_BYTES
        self._max_groups = max_groups(group_bytes(store.bound))
        self.is_staleness_bound = isinstance(self._spec.budget, StalenessBudget)
        self.sends_at_need = monitor is None and not self.is_staleness_bound
        # Omitted values have to be reported as withheld, which is possible only for bounded measures.
        self._may_omit = self.is_staleness_bound and bool(store.bounded_measures)
        self._closes_first = self._may_omit and isinstance(self._spec.window, TimeWindow)
        waits = self._spec.cache.eviction == "gain"
        self._picks = monitor is None and not self._spec.saves_bytes and waits

    # What is left to send

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

    def _pending_bytes(self) -> Iterator[tuple[int, int]]:
        """Yields the end of each slice and the estimated bytes that it has to send."""
        for start, slice_ in self._store.slices.items():
            if self._is_unreported(slice_) or (slice_.close_reported and self._has_deadline(start, slice_)):
                continue  # entries omitted under a staleness budget are not sent
            pending = slice_.count_pending(self._store.limits(start), 1.0)
            yield self._store.end(start), int(pending * self.entry_bytes)

    def early_due_ms(self, watermark_ms: int, now_ms: int, link: LinkEstimate) -> float | None:
        """Returns the event time from which entries of an open slice cannot wait for its close; None: all can."""
        if not self.sends_at_need:
            return None
        open_ = [
            (start, slice_) for start, slice_ in self._store.slices.items() if self._store.end(start) > watermark_ms
        ]
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
        is_done = self._store.through_ms > MIN_TIME_MS and all(slice_.close_reported for _, slice_ in closed)
        return is_done and self._passed_slice_end(watermark_ms)

    def _awaits_statement(self, start: int, slice_: Slice) -> bool:
        is_new = not slice_.is_stated and self._store.end(start) > self._store.through_ms
        return is_new and not slice_.close_reported and self._has_deadline(start, slice_)

    def _closed_slices(self, through_ms: int, report: ArrivalReport | None = None) -> list[tuple[int, Slice]]:
        """Returns the slices that end by an event time and may be closed, with their starts, ascending.

        Args:
            report: a report of arrivals in the same frame.
        """
        return [
            (start, slice_)
            for start, slice_ in sorted(self._store.slices.items())
            if self._store.end(start) <= through_ms and not self._is_unreported(slice_, report)
        ]

    def has_unreported_closes(self, watermark_ms: int) -> bool:
        """Returns whether the watermark has closed slices that have not been reported, or input was lost."""
        through = self._close_barrier_ms(watermark_ms)
        return (
            bool(self._store.losses.unsent)
            or self._passed_slice_end(through)
            or any(
                not slice_.close_reported and self._store.end(start) <= through and not self._is_unreported(slice_)
                for start, slice_ in self._store.slices.items()
            )
        )

    def _reported_before_ms(self, report: ArrivalReport | None) -> int:
        if report is not None:
            return report.arrivals.through_ms
        return self._monitor.reported_before_ms if self._monitor is not None else MIN_TIME_MS

    def _is_unreported(self, slice_: Slice, report: ArrivalReport | None = None) -> bool:
        return self._monitor is not None and is_unreported(slice_, self._reported_before_ms(report))

    def _close_barrier_ms(self, watermark_ms: int, report: ArrivalReport | None = None) -> int:
        """Returns the event time up to which slices may be closed, with a report in the same frame."""
        if self._monitor is None:
            return watermark_ms
        reported_before_ms, store = self._reported_before_ms(report), self._store
        return close_barrier_ms(store.slices, self._spec, reported_before_ms, watermark_ms, store.through_ms)

    def _passed_slice_end(self, through_ms: int) -> bool:
        """Returns whether a slice has ended since the last reported progress."""
        slice_start = self._spec.window.slice_start
        return through_ms > MIN_TIME_MS and slice_start(through_ms) > slice_start(self._store.through_ms)

    # Decisions

    def decide(self, at: PullConditions) -> Decision | None:
        """Returns what the most urgent frame has: closed slices first, oldest first; None: nothing to send."""
        store, draft = self._store, FrameDraft(at.capacity_bytes, MIN_TIME_MS, FrameWork.of(self._spec))
        # The report of arrivals may open the barrier, so it comes first.
        self._add_report(draft, at)
        draft.room_bytes, draft.groups = at.capacity_bytes, 0
        draft.through_ms = self._close_barrier_ms(at.watermark_ms, draft.report)
        is_done = self._add_closed(draft, at)
        # A frame that closes a slice is sent at once, not filled with early sends.
        if is_done and not draft.closes and at.first_groups is None:
            self._add_open(draft, at)
        through, losses = max(draft.through_ms, store.through_ms), store.losses
        states = draft.sends or draft.closes or draft.report or losses.unsent or self._passed_slice_end(through)
        if not states and not (at.report_drops and losses.drops):
            return None
        return Decision(through, at.watermark_ms, tuple(draft.sends.values()), tuple(draft.closes), draft.report)

    def _add_report(self, draft: FrameDraft, at: PullConditions) -> None:
        """Adds, for a query with early answers, the due arrival report and the pending values of ended slices, except
        what an error budget permits to withhold."""
        monitor, store = self._monitor, self._store
        if monitor is None or at.now_ms == MIN_TIME_MS:
            return
        counts_only = monitor.choose_detail(at.link.likely_bytes_per_ms)
        now_ms = at.now_ms - monitor.sampling.clock_offset_ms
        draft.report = monitor.report(now_ms, at.capacity_bytes, counts_only=counts_only, unread=at.unread)
        if draft.report is None:
            return
        for start in sorted(s for s in store.slices if at.watermark_ms < store.end(s) <= now_ms):
            entries = store.slices[start].entries
            self._add_groups(draft, start, np.flatnonzero(primary_mask(entries, store.limits(start))))

    def _add_closed(self, draft: FrameDraft, at: PullConditions) -> bool:
        """Adds groups of closed slices, and closes; returns whether all closed slices have been sent."""
        closed = self._closed_slices(min(draft.through_ms, at.watermark_ms), draft.report)
        drained, stated = {start for start, slice_ in closed if slice_.close_reported}, set[int]()
        is_first = at.first_groups is not None
        in_turn = [each for each in closed if not is_first or self._awaits_statement(*each)]
        for start, slice_ in in_turn:
            if draft.work.units >= FULL_FRAME_WORK:
                break
            # A frame of first closes has groups of the newest slice only.
            most = at.first_groups if start == in_turn[-1][0] else 0 if is_first else None
            selection = self._take(draft, start, slice_, at, most=most)
            if len(selection.groups) or is_first:
                stated.add(start)
            if selection.drained:
                drained.add(start)
            elif not is_first:
                drained.discard(start)
                break
            draft.work.add_slice(start, draft.work.of_close(len(self._store.bounded_measures)))
        self._close_slices(draft, closed, drained, stated)
        return len(drained) == len(closed)

    def _close_slices(
        self, draft: FrameDraft, closed: list[tuple[int, Slice]], drained: set[int], stated: set[int]
    ) -> None:
        """Closes the drained slices, the oldest first.

        From the first slice on that is not drained, the slices in `stated` are closed provisionally.
        """
        is_blocked = False
        for start, slice_ in closed:
            if not is_blocked and start not in drained:
                is_blocked, draft.through_ms = True, min(draft.through_ms, self._store.end(start) - 1)
            may_state = self._closes_first and self._store.end(start) > self._store.through_ms
            if not is_blocked and not slice_.close_reported:
                draft.closes.append((start, CloseKind.LAST))
            elif is_blocked and may_state and start in stated and self._has_deadline(start, slice_):
                draft.closes.append((start, CloseKind.PROVISIONAL))

    def _add_open(self, draft: FrameDraft, at: PullConditions) -> None:
        """Adds groups of open slices that are sent before their close."""
        for start, slice_ in sorted(self._store.slices.items()):
            end = self._store.end(start)
            if end <= at.watermark_ms or start in draft.sends:
                continue
            if draft.work.units >= FULL_FRAME_WORK:
                return
            early = self._early_sends(start, slice_, at.watermark_ms, at.now_ms, at.link)
            if self._may_send_early(end, at, early):
                self._take(draft, start, slice_, at, early)

    def _take(
        self,
        draft: FrameDraft,
        start: int,
        slice_: Slice,
        at: PullConditions,
        early: EarlySends | None = None,
        most: int | None = None,
    ) -> GroupSelection:
        """Adds the selected groups of a slice to the frame; returns the selection."""
        selection = self._select(start, slice_, draft, at, early, most)
        selection = limit_to_capacity(slice_, selection, at.capacity_bytes, self.entry_bytes)
        if len(selection.groups):
            self._add_groups(draft, start, selection.groups)
            is_closed = self._store.end(start) <= at.watermark_ms
            if self._state.has_session_windows and not (is_closed and selection.drained):
                draft.closes.append((start, CloseKind.OPEN))
        return selection

    def _add_groups(self, draft: FrameDraft, start: int, groups: IntArray) -> None:
        """Adds the pending values of these groups, if there are any."""
        if not len(groups):
            return
        send = self._state.send(start, self._store.slices[start].entries.in_key_order(groups))
        draft.add(start, send)
        # The estimate follows the actual size of entries, so that frames are about as large as the capacity. Partials
        # of few entries are mostly header.
        weight = ENTRY_BYTES_RATE * len(groups) / (len(groups) + FEW_ENTRIES)
        self.entry_bytes += weight * (len(send.partial.synopsis) / len(groups) - self.entry_bytes)

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

    def to_state(self) -> State:
        return State({"entry_bytes": self.entry_bytes}, {}, {"history": self.history.to_state()})

    def restore(self, state: State) -> None:
        """Restores what `to_state` returned."""
        self.entry_bytes = state.numbers["entry_bytes"]
        self.history = GroupHistory.from_state(state.components["history"])
