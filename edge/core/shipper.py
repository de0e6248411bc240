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

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from edge.cache.error_limits import primary_mask
from edge.cache.error_target import NEWEST_WEIGHT
from edge.cache.history import GroupHistory
from edge.cache.policy import errors_left
from edge.cache.send_queue import GroupSelection, SendQueue
from edge.core.arrival_reports import ArrivalMonitor, ArrivalReport
from edge.core.byte_budget import ByteRoom
from edge.core.close_barrier import close_barrier_ms, is_unreported
from edge.core.frame_state import CloseKind, Decision, FrameState, Send
from edge.core.least_bytes import EarlySends, OpenSlice
from edge.core.link_plan import LEVELS, Demand, bytes_above
from edge.core.policies import PullConditions, PullContext, limit_to_capacity
from edge.core.slice_store import SliceStore
from edge.core.slices import FEW_ENTRIES, INITIAL_ENTRY_BYTES, LinkEstimate, Slice
from edgewater.base.streams import MIN_TIME_MS
from edgewater.guard.frame_work import FULL_FRAME_WORK, FrameWork
from edgewater.guard.partial_check import group_bytes, max_groups
from edgewater.model.byte_budget import frame_bytes, stated_bytes
from edgewater.model.query import DEFAULT_PRIORITY
from edgewater.synopses import FloatArray, IntArray
from edgewater.synopses.encoding.state import State

MOST_LEARNED = 32
"""The history learns from so many of the closed slices that are to be sent. What older ones add has faded to less than
1 % when the newest one is learned."""
PARTIAL_BYTES, LOSS_BYTES = 32, 64  # derived: fields of `Partial` and `InputLoss` in uplink.proto
"""Upper bounds of a partial without its synopsis, and of a loss of input without its source, in a frame."""


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
        newer: under a staleness budget, how many groups newer closed slices have, by the start of the slice.
        has_values: whether the frame may have values under a byte budget.
    """

    room_bytes: int
    through_ms: int
    work: FrameWork
    report: ArrivalReport | None = None
    sends: dict[int, Send] = field(default_factory=dict)
    groups: int = 0
    closes: list[tuple[int, CloseKind]] = field(default_factory=list)
    newer: dict[int, int] = field(default_factory=dict)
    has_values: bool = True

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
        self._policy = store.policy
        self._stated_bytes = stated_bytes([m.name for m in store.spec.measures])

    # What is left to send

    def pending_bytes(self, room: ByteRoom | None) -> int:
        """Returns the estimated bytes of all slices that are still to be sent.

        Args:
            room: what a byte budget permits; None: there is none.
        """
        pending = self._store.pending * self.entry_bytes
        return int(pending if room is None else min(pending, max(room.now_bytes, 0.0)))

    def demands(
        self,
        query: int,
        watermark_ms: int,
        now_ms: int,
        link: LinkEstimate,
        message_bytes: int,
        room: ByteRoom | None = None,
    ) -> list[Demand]:
        """Returns what the closed slices have to send, by due time.

        If the query is late and fills a message, what it has to send later changes nothing, and is left out.

        Args:
            query: its number, for the plan.
            now_ms: event time; the minimum time in a stream without a clock.
            room: as in `pending_bytes`.
        """
        required, optional, total = dict[float, float](), dict[float, FloatArray](), 0.0
        for start, slice_ in self._closed_slices(self._close_barrier_ms(watermark_ms)):
            end = self._store.end(start)
            due_ms = max(self._policy.due_ms(end, link), slice_.late_until_ms)
            left_ms = max(due_ms - now_ms, 0.0) / link.speed if now_ms > MIN_TIME_MS else math.inf
            omits = self._policy.omits(end, slice_)
            is_full = total > max(message_bytes, link.bytes_per_ms * link.speed * left_ms)
            if is_full and not self._policy.may_omit:
                break
            # After its time, a slice is closed with what has been sent of it.
            if (is_full and not omits) or (omits and slice_.learned and left_ms <= 0.0):
                continue
            errors = errors_left(slice_.entries, self.history, slice_.send_queue) if omits or room else None
            size = self._wanted(start, slice_, errors, room)
            if not size:
                continue
            if room is not None:
                room = replace(room, now_bytes=room.now_bytes - size)
            if omits:
                # Before the groups are ranked, their errors are unknown: they count as large.
                above = size if errors is None else np.minimum(bytes_above(errors, self.entry_bytes), size)
                optional[left_ms] = optional.get(left_ms, np.zeros(len(LEVELS))) + above
            else:
                required[left_ms], total = required.get(left_ms, 0.0) + size, total + size
        priority = self._spec.priority / DEFAULT_PRIORITY
        return [
            *(Demand(query, left_ms, size, priority=priority) for left_ms, size in required.items()),
            *(Demand(query, left_ms, optional=sizes, priority=priority) for left_ms, sizes in optional.items()),
        ]

    def _wanted(self, start: int, slice_: Slice, errors: FloatArray | None, room: ByteRoom | None) -> float:
        """Returns the estimated bytes that a closed slice still has to send.

        Args:
            errors: what `errors_left` returned.
        """
        pending = slice_.count_pending(self._store.limits(start), 1.0)
        return min(pending, self._policy.affordable(errors, room, self.entry_bytes)) * self.entry_bytes

    def closed_bytes(self, watermark_ms: int, most: int, room: ByteRoom | None) -> int:
        """Returns the estimated bytes of closed slices that are still to be sent; at least `most` if they are more.

        Args:
            room: as in `pending_bytes`.
        """
        total = 0.0
        for start, slice_ in self._closed_slices(self._close_barrier_ms(watermark_ms)):
            errors = errors_left(slice_.entries, self.history, slice_.send_queue) if room else None
            total += self._wanted(start, slice_, errors, room)
            if total >= most:
                break
        return int(total)

    def early_due_ms(self, watermark_ms: int, now_ms: int, link: LinkEstimate) -> float | None:
        """Returns the event time from which entries of an open slice cannot wait for its close; None: all can."""
        open_ = self._store.not_ended(watermark_ms)
        early = [self._early_sends(start, slice_, watermark_ms, now_ms, link) for start, slice_ in open_]
        return min((e.from_ms for e in early if e is not None), default=None)

    def _early_sends(
        self, start: int, slice_: Slice, watermark_ms: int, now_ms: int, link: LinkEstimate
    ) -> EarlySends | None:
        end, limits = self._store.end(start), self._store.limits(start)
        return self._policy.early_sends(
            OpenSlice(start, end, now_ms, watermark_ms, slice_, limits, self.history, link, self.entry_bytes)
        )

    def awaits_first_close(self, watermark_ms: int) -> bool:
        """Returns whether, under a staleness budget, nothing has been stated of the slices that closed last."""
        if not self._policy.states_first:
            return False
        if any(self._awaits_statement(*each) for each in self._closed_slices(watermark_ms)):
            return True
        is_done = self._store.through_ms > MIN_TIME_MS and not any(self._closed_slices(watermark_ms))
        return is_done and self._passed_slice_end(watermark_ms)

    def _awaits_statement(self, start: int, slice_: Slice) -> bool:
        return not slice_.is_stated and self._may_state(start, slice_)

    def _may_state(self, start: int, slice_: Slice) -> bool:
        """Returns whether a closed slice may be closed provisionally."""
        end = self._store.end(start)
        return self._policy.states_first and end > self._store.through_ms and self._policy.omits(end, slice_)

    def _closed_slices(self, through_ms: int, report: ArrivalReport | None = None) -> Iterator[tuple[int, Slice]]:
        """Yields the slices that end by an event time and are to be closed, with their starts, ascending.

        Args:
            report: a report of arrivals in the same frame.
        """
        ended = self._store.ended(through_ms)
        return ended if self._monitor is None else (each for each in ended if not self._is_unreported(each[1], report))

    def has_unreported_closes(self, watermark_ms: int) -> bool:
        """Returns whether the watermark has closed slices that have not been reported, or input was lost."""
        through = self._close_barrier_ms(watermark_ms)
        return bool(self._store.losses.unsent) or self._passed_slice_end(through) or any(self._closed_slices(through))

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
        """Returns what the most urgent frame has: closed slices first, oldest first; None: nothing to send.

        Under a byte budget, a frame that could exceed it has no values. If even that is too much, it waits.
        """
        decision, room = self._decide(at), at.bytes
        if decision is None or room is None or self._bytes_of(decision) <= room.now_bytes:
            return decision
        for send in decision.sends:
            self._store.slices[send.partial.slice_start_ms].send_queue = SendQueue()  # they are ranked again
        decision = self._decide(at, has_values=False)
        return decision if decision is not None and self._bytes_of(decision) <= room.now_bytes else None

    def _bytes_of(self, decision: Decision) -> int:
        content = sum(len(send.partial.synopsis) for send in decision.sends)
        return self._most_bytes(content, len(decision.sends), len(decision.closes))

    @property
    def least_bytes(self) -> int:
        """The most bytes that the link carries for the smallest frame that closes a slice."""
        return self._most_bytes(0, 0, 1)

    def _most_bytes(self, content: int, partials: int, closes: int) -> int:
        """Returns at most how many bytes the link carries for a frame.

        Args:
            content: the bytes of its synopses.
        """
        losses = self._store.losses
        content += PARTIAL_BYTES * partials + (closes + len(losses.drops.counts)) * self._stated_bytes
        content += sum(LOSS_BYTES + len(x.source.encode()) for x in losses.unsent)
        return frame_bytes(self._spec.name, content)

    def _decide(self, at: PullConditions, *, has_values: bool = True) -> Decision | None:
        store, work = self._store, FrameWork.of(self._spec)
        draft = FrameDraft(at.capacity_bytes, MIN_TIME_MS, work, has_values=has_values)
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
        draft.report = monitor.report(now_ms, at.report_bytes, counts_only=counts_only, unread=at.unread)
        if draft.report is None:
            return
        for start in sorted(s for s in store.slices if at.watermark_ms < store.end(s) <= now_ms):
            entries = store.slices[start].entries
            self._add_groups(draft, start, np.flatnonzero(primary_mask(entries, store.limits(start))))

    def _add_closed(self, draft: FrameDraft, at: PullConditions) -> bool:
        """Adds groups of closed slices, and closes; returns whether all closed slices have been sent."""
        through_ms, is_first, newest = min(draft.through_ms, at.watermark_ms), at.first_groups is not None, None
        in_turn: Iterable[tuple[int, Slice]] = self._closed_slices(through_ms, draft.report)
        if self._policy.may_omit:  # history, such as a backfill, is after slices with a deadline
            closed = list(in_turn)
            timed = [each for each in closed if self._policy.omits(self._store.end(each[0]), each[1])]
            newer = 0
            for start, slice_ in reversed(closed):
                draft.newer[start], newer = newer, newer + len(slice_.entries)
            if is_first:
                in_turn = [each for each in timed if self._awaits_statement(*each)]
                newest = max((start for start, _ in in_turn), default=None)
            else:
                deadlines = {start for start, _ in timed}
                in_turn = chain(timed, (each for each in closed if each[0] not in deadlines))
        drained, stated = set[int](), set[int]()
        left = self._store.count_ended(through_ms)
        for start, slice_ in in_turn:
            if draft.work.units >= FULL_FRAME_WORK or self._bytes_left(draft, at, len(drained) + 1) < 0:
                break
            if left > MOST_LEARNED and not self._policy.omits(self._store.end(start), slice_):
                slice_.learned = True
            left -= 1
            # A frame of first closes has groups of the newest slice only.
            most = None if not is_first else at.first_groups if start == newest else 0
            selection = self._take(draft, start, slice_, at, most=most)
            if len(selection.groups) or is_first:
                stated.add(start)
            if selection.drained:
                drained.add(start)
            elif not is_first:
                break
            draft.work.add_slice(start, draft.work.of_close(len(self._store.bounded_measures)))
        return self._close_slices(draft, through_ms, drained, stated)

    def _bytes_left(self, draft: FrameDraft, at: PullConditions, closes: int) -> float:
        """Returns what a byte budget leaves to a frame that has so many closes; negative: it does not permit them."""
        if at.bytes is None:
            return math.inf
        sent = at.capacity_bytes - draft.room_bytes
        return at.bytes.now_bytes - self._most_bytes(sent, len(draft.sends), closes)

    def _close_slices(self, draft: FrameDraft, through_ms: int, drained: set[int], stated: set[int]) -> bool:
        """Closes the drained slices, the oldest first; returns whether these are all.

        From the first slice on that is not drained, the slices in `stated` are closed provisionally.
        """
        is_blocked = False
        for start, slice_ in self._closed_slices(through_ms, draft.report):
            if not is_blocked and start not in drained:
                is_blocked, draft.through_ms = True, min(draft.through_ms, self._store.end(start) - 1)
            if not is_blocked:
                draft.closes.append((start, CloseKind.LAST))
            elif not self._policy.states_first:
                break
            elif start in stated and self._may_state(start, slice_):
                draft.closes.append((start, CloseKind.PROVISIONAL))
        return not is_blocked

    def _add_open(self, draft: FrameDraft, at: PullConditions) -> None:
        """Adds groups of open slices that are sent before their close."""
        for start, slice_ in self._store.not_ended(at.watermark_ms):
            if start in draft.sends:
                continue
            if draft.work.units >= FULL_FRAME_WORK:
                return
            early = self._early_sends(start, slice_, at.watermark_ms, at.now_ms, at.link)
            if early is not None and early.from_ms <= at.now_ms:
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
        # The estimate follows the actual size of entries, so that frames are about as large as the capacity.
        weight = NEWEST_WEIGHT * len(groups) / (len(groups) + FEW_ENTRIES)
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
        count = min(max(1, int(room / entry_bytes)), self._max_groups) if room > 0 else 0
        if most is not None:
            count = min(count, most)
        bytes_ = at.bytes
        if bytes_ is not None:
            left = self._bytes_left(draft, at, self._store.count_ended(at.watermark_ms)) if draft.has_values else 0
            bytes_ = replace(bytes_, now_bytes=left)
        context = PullContext(
            start, end, at.now_ms, count, at.link, entry_bytes, draft.groups, draft.newer.get(start, 0), early, bytes_
        )
        return self._policy.select(slice_, self.history, self._store.limits(start), context)

    def to_state(self) -> State:
        prices = self._policy.prices
        remembered = {} if prices is None else {"prices": prices.to_state()}
        return State({"entry_bytes": self.entry_bytes}, {}, {"history": self.history.to_state(), **remembered})

    def restore(self, state: State) -> None:
        """Restores what `to_state` returned."""
        self.entry_bytes = state.numbers["entry_bytes"]
        self.history = GroupHistory.from_state(state.components["history"])
        if self._policy.prices is not None:
            self._policy.prices.restore(state.components["prices"])
