"""The policies of budgets: what a query's slices have to send, what may wait and what may be withheld.

There is one class per budget, and `policy_of` chooses it. Nothing outside this module asks which budget a query has. A
policy is asked

- before a slice closes, which of its entries cannot wait (`early_sends`),
- at a pull, which groups leave (`select`) and how their sums are rounded (`quanta`),
- when a slice closes, whether its other entries may be omitted (`omits`) and what is stated of them (`withheld`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from edge.cache.entries import SliceEntries
from edge.cache.error_limits import ErrorLimits
from edge.cache.history import GroupHistory
from edge.cache.policy import (
    RankingContext,
    errors_left,
    learn,
    rank_closed,
    rank_closed_by_deadline,
    rank_closed_by_error,
    rank_open,
    rank_open_by_deadline,
)
from edge.cache.send_queue import EMPTY_SELECTION, MAX_QUEUED, GroupSelection, SendQueue
from edge.cache.sizing import SendSlots
from edge.cache.withheld import withheld_of
from edge.core.byte_budget import BytePrices, ByteRoom
from edge.core.least_bytes import (
    LEAST_EARLY_GROUPS,
    MIN_DRAIN_MS,
    USED_AFTER_CLOSE,
    EarlySends,
    EarlyTerms,
    OpenSlice,
    early_sends,
    in_one_frame,
    quanta_of,
)
from edge.core.slices import INITIAL_ENTRY_BYTES, UNKNOWN_LINK, LinkEstimate, Slice
from edgewater.base.streams import MIN_TIME_MS
from edgewater.model.accuracy import report_schedule
from edgewater.model.query import CombinedBudget, ErrorBudget, QuerySpec, StalenessBudget
from edgewater.model.windows import TimeWindow
from edgewater.synopses import FloatArray, Stack
from edgewater.wire import Withheld

EARLY_MARGIN = 1.5  # measured: bench.constants; with 1, exact results are a third later
"""Without a staleness budget, sending begins this many times as early as the link needs."""
DRAIN_SAFETY = 2.0  # measured: bench.constants
"""Under a staleness budget it begins this many times as early. With 1, errors are 40 % larger on a narrow link."""
LATE_SHARE = 1 / 8  # measured: bench.constants; half of it sends 2 % more bytes
"""If the watermark is further behind the clock than this fraction of a slice, the source may be late. Without a
staleness budget, nothing of an ended slice is then sent early, since most groups will change."""
PLANNED_SHARE = 0.95
"""The fraction of the link's bytes that a staleness budget plans with. Sizes of entries are estimates, and heartbeats
use the link, too."""
BYTES_MARGIN = 1.25  # limit: the bytes of a frame beyond their estimate
"""Under a byte budget, an entry is expected to be so many times as large as usual."""
MAX_OVERSHOOT = 2
"""The entries of a frame may take this many times its capacity, if there is more than one."""
FIRST_GROUPS = 48  # limit: half a second of a link of 4 KiB/s
"""The groups in a message of first closes. On 4 KiB/s such a message takes about half a second."""


@dataclass(frozen=True, slots=True)
class PullConditions:
    """The conditions of a pull from one query.

    Attributes:
        capacity_bytes: approximate size of the body before compression. At least one entry is sent, so that a small
            capacity delays but never blocks. The body's work is bounded too (`FULL_FRAME_WORK`).
        report_bytes: as `capacity_bytes`, of a report of arrivals. A report in parts is late, and the center would take
            the edge for silent.
        watermark_ms: the watermark that the query sees.
        now_ms: event time; the minimum time in a stream without a clock.
        link: the measured link, for staleness budgets.
        unread: whether the stream may have unread input.
        report_drops: a frame is built even if it states nothing but dropped records.
        first_groups: how many groups a frame of first closes may have (`Shipper.awaits_first_close`); None: the frame
            is another one.
        bytes: what the query may use of a byte budget; None: it has none.
    """

    capacity_bytes: int
    report_bytes: int
    watermark_ms: int
    now_ms: int = MIN_TIME_MS
    link: LinkEstimate = UNKNOWN_LINK
    unread: bool = False
    report_drops: bool = False
    first_groups: int | None = None
    bytes: ByteRoom | None = None


@dataclass(frozen=True, slots=True)
class PullContext:
    """The conditions under which a slice is pulled from.

    Attributes:
        start_ms, end_ms: the slice, in event time.
        now_ms: event time.
        max_groups: how many groups may be sent.
        link: what the query may use of the link.
        entry_bytes: the estimated size of an entry in a frame.
        sent_groups: how many groups the frame has already.
        newer_groups: how many groups newer closed slices have.
        early: what cannot wait for the slice's close; None: it has closed.
        bytes: what the frame may use of a byte budget; None: there is none.
    """

    start_ms: int
    end_ms: int
    now_ms: int
    max_groups: int
    link: LinkEstimate
    entry_bytes: float
    sent_groups: int = 0
    newer_groups: int = 0
    early: EarlySends | None = None
    bytes: ByteRoom | None = None

    @property
    def ranking_context(self) -> RankingContext:
        elapsed = (self.now_ms - self.start_ms) / (self.end_ms - self.start_ms)
        return RankingContext(self.now_ms, min(max(elapsed, 0.0), 1.0))


class ExactPolicy:
    """Everything is sent. Only what the link could not send after the close leaves before it.

    Attributes:
        bounded: the measures whose withheld error is reported.
        states_first: whether slices are first closed provisionally, so that a small frame states them before their
            deadline.
        staleness_ms: wall time after a slice's end until which answers have to have it; infinite without a deadline.
        relative: per measure, the fraction of a group's own value that may be withheld.
        divisors: per measure with an absolute limit, among how many slices a window divides it.
        may_omit: whether it may omit entries of any slice (`omits`).
        prices: of a byte budget; None: there is none.
    """

    may_omit = False
    prices: BytePrices | None = None

    @property
    def lacks_bytes(self) -> bool:
        """Whether entries that a close withholds are omitted because there are not enough bytes."""
        return self.may_omit or self.prices is not None

    def __init__(self, spec: QuerySpec) -> None:
        self._spec = spec
        self.bounded = tuple(m.name for m in spec.measures) if spec.may_withhold else ()
        self.states_first, self.staleness_ms = False, math.inf
        self.relative: Mapping[str, float] = {}
        self.divisors: Mapping[str, int] = {}
        self._has_early_answers = report_schedule(spec.window, spec.accuracy, spec.lateness_ms) is not None
        # The policies of TR 16-003 send whenever the link is idle.
        self._waits = spec.cache.eviction == "gain"

    # Before the close

    def early_sends(self, open_: OpenSlice) -> EarlySends | None:
        """Returns which entries of an open slice have to be sent before it closes; None: no entries.

        Early answers have the entries of open slices with the reports of arrivals.
        """
        terms = self._early_terms(open_)
        if self._has_early_answers or terms is None or open_.now_ms == MIN_TIME_MS:
            return None
        return early_sends(open_, terms)

    def _early_terms(self, open_: OpenSlice) -> EarlyTerms | None:
        close_ms = open_.close_ms
        if close_ms - open_.end_ms > LATE_SHARE * (open_.end_ms - open_.start_ms):
            close_ms = open_.end_ms
        margin, least_ms = EARLY_MARGIN, MIN_DRAIN_MS * open_.link.speed
        return EarlyTerms(close_ms, 0.0, margin, open_.link.path_delay_ms, least_ms, from_start=not self._waits)

    @property
    def limited(self) -> list[str]:
        """The measures with an error limit."""
        return [*self.divisors, *self.relative]

    def closed_frame_bytes(self, most: int) -> int:
        """Returns how many bytes a frame of closed slices may have, if no other query waits; 0: what the link allows.

        Entries of closed slices are final, so no later frame updates them, and a large frame compresses better.

        Args:
            most: what the link carries without a long delay.
        """
        return most

    # At a pull

    def select(self, slice_: Slice, history: GroupHistory, limits: ErrorLimits, at: PullContext) -> GroupSelection:
        """Selects the groups of a slice to send."""
        queue = slice_.send_queue
        if at.early is not None:
            count = self._most_open(at, at.early)
            if queue.expired_open(at.now_ms, at.end_ms):
                queue = slice_.send_queue = self._rank_open(slice_, history, limits, at)
            return (
                EMPTY_SELECTION if queue.left < min(count, self._least_open(at)) else queue.draw(slice_.entries, count)
            )
        if not slice_.learned:
            self._learn(slice_, history, limits)
            slice_.learned = True
        if queue.expired_closed(slice_.entries):
            queue = slice_.send_queue = self._rank_closed(slice_.entries, limits, history)
        return queue.draw(slice_.entries, at.max_groups)

    def _most_open(self, at: PullContext, early: EarlySends) -> int:
        """Returns how many groups of an open slice a frame may have."""
        return min(at.max_groups, early.entries, early.in_one_frame if self._waits else MAX_QUEUED)

    def _least_open(self, at: PullContext) -> int:
        """Returns how many groups a frame of an open slice needs. A smaller frame is mostly overhead."""
        return LEAST_EARLY_GROUPS if self._waits and not self._has_early_answers else 0

    def _rank_open(self, slice_: Slice, history: GroupHistory, limits: ErrorLimits, at: PullContext) -> SendQueue:
        return rank_open(slice_.entries, limits, self._spec.cache, history, at.ranking_context)

    def _rank_closed(self, entries: SliceEntries, limits: ErrorLimits, history: GroupHistory) -> SendQueue:
        return rank_closed(entries, limits)

    def _learn(self, slice_: Slice, history: GroupHistory, limits: ErrorLimits) -> None:
        learn(slice_.entries, history, None, limits)

    def quanta(self, shares: Mapping[str, float], stacks: Mapping[str, Stack]) -> dict[str, float]:
        """Returns the rounding unit of each measure whose sent values are rounded (`quanta_of`)."""
        return {}

    def affordable(self, errors: FloatArray | None, room: ByteRoom | None, entry_bytes: float) -> int:
        """Returns how many groups of a closed slice a byte budget permits.

        Args:
            errors: of the groups that have not been sent, descending; None: unknown, as before the first frame.
            room: what the query may use; None: there is no byte budget.
        """
        return MAX_QUEUED

    # At the close

    def omits(self, end: int, slice_: Slice) -> bool:
        """Returns whether entries of a slice are omitted if there is no time for them."""
        return False

    def withheld(self, entries: SliceEntries) -> tuple[Withheld, ...]:
        """Returns what a closed slice withholds."""
        return withheld_of(entries, shares=bool(self.relative))

    def due_ms(self, end: int, link: LinkEstimate) -> float:
        """Returns the event time by which entries of a slice that ends at `end` should have been sent."""
        if self.staleness_ms == math.inf:
            return end + self._spec.window.slice_ms
        return end + self.staleness_ms * link.speed - link.path_delay_ms


class ErrorPolicy(ExactPolicy):
    """Entries within this edge's share of the error stay at the edge."""

    def __init__(self, spec: QuerySpec) -> None:
        super().__init__(spec)
        budget = spec.error_budget
        assert budget is not None
        self.relative = dict(budget.relative)
        slices, functions = spec.window.slices_per_window, {m.name: m.function for m in spec.measures}
        self.divisors = {name: slices if functions[name].error == "sum" else 1 for name, _ in budget.limits}

    def quanta(self, shares: Mapping[str, float], stacks: Mapping[str, Stack]) -> dict[str, float]:
        if self.relative or any(m.function.error is None for m in self._spec.measures):
            return {}  # the difference of rounding counts as a record that was not sent
        return quanta_of(self._spec, shares, stacks)


class CombinedPolicy(ErrorPolicy):
    """The fewest bytes with which an answer is within the error at its deadline.

    Only what the link could not send between the close and the deadline is sent early. Nothing is omitted: if the
    limits contradict each other, the error budget holds.
    """

    def __init__(self, spec: QuerySpec) -> None:
        super().__init__(spec)
        assert spec.staleness_budget is not None
        self.staleness_ms = spec.staleness_budget.staleness_ms

    def _early_terms(self, open_: OpenSlice) -> EarlyTerms | None:
        free_ms = self.due_ms(open_.end_ms, open_.link) - open_.close_ms
        if open_.link.bytes_per_ms <= 0.0 or free_ms <= 0.0:
            return None  # a slice that would close after its deadline cannot be in time: it waits for its close
        return EarlyTerms(open_.close_ms, USED_AFTER_CLOSE * free_ms, 1.0, 0.0, 0.0)

    def _least_open(self, at: PullContext) -> int:
        return 0

    def _rank_open(self, slice_: Slice, history: GroupHistory, limits: ErrorLimits, at: PullContext) -> SendQueue:
        return rank_open(slice_.entries, limits, self._spec.cache, history, at.ranking_context, waits=True)

    def _rank_closed(self, entries: SliceEntries, limits: ErrorLimits, history: GroupHistory) -> SendQueue:
        return rank_closed_by_error(entries, limits, history)


class StalenessPolicy(ExactPolicy):
    """What can be sent by the deadline is sent, the largest errors first. The rest is omitted, and stated as withheld.

    Entries wait for the close, unless sending them takes until after the deadline. So most groups are sent once.
    """

    may_omit = True

    def __init__(self, spec: QuerySpec) -> None:
        super().__init__(spec)
        assert spec.staleness_budget is not None
        self.staleness_ms = spec.staleness_budget.staleness_ms
        # Omitted values have to be stated, which is possible only for bounded measures.
        self.states_first = bool(self.bounded) and isinstance(spec.window, TimeWindow)

    def early_sends(self, open_: OpenSlice) -> EarlySends | None:
        """Returns which entries of an open slice have to be sent before it closes; None: no entries.

        What a slice that should have closed has to send leaves at once.
        """
        end, pending = open_.end_ms, open_.pending
        if not pending or open_.now_ms == MIN_TIME_MS:
            return None
        due_ms, entries = self.due_ms(end, open_.link), MAX_QUEUED
        if open_.now_ms < end and open_.link.bytes_per_ms > 0.0 and self._ranks_by_deadline(end, open_.slice_):
            # Before its first close has to leave, the link carries so many entries. The first close has no more than
            # the link carries within the budget: a narrow link is not idle until then.
            rate = PLANNED_SHARE * open_.link.bytes_per_ms / open_.entry_bytes
            first = min(FIRST_GROUPS, rate * self.staleness_ms * open_.link.speed)
            entries = int(rate * (due_ms - open_.now_ms) - first)
        if entries < 1:
            return None
        drain_ms = DRAIN_SAFETY * pending * open_.entry_bytes / max(open_.link.likely_bytes_per_ms, 1e-3)
        from_ms = due_ms - drain_ms if self._waits else float(open_.start_ms)
        from_ms = min(from_ms, end) if drain_ms >= MIN_DRAIN_MS * open_.link.speed else end
        return EarlySends(entries, from_ms, in_one_frame(min(entries, pending), open_.link, open_.entry_bytes))

    def closed_frame_bytes(self, most: int) -> int:
        return 0  # the last entries of a large frame may be too late

    def omits(self, end: int, slice_: Slice) -> bool:
        """Returns whether entries of a slice are omitted if there is no time for them.

        A slice whose first records arrived after the deadline, such as a slice of a backfill, is sent completely: it
        delays no answer that a reader waits for. The deadline is compared at the stream's speed 1, which is exact for
        live streams.
        """
        return slice_.first_arrival_ms <= end + self.staleness_ms

    def select(self, slice_: Slice, history: GroupHistory, limits: ErrorLimits, at: PullContext) -> GroupSelection:
        """Selects the largest accumulated errors.

        A closed slice is drained if no further group can be sent in time.
        """
        if at.early is not None or not self._ranks_by_deadline(at.end_ms, slice_):
            return super().select(slice_, history, limits, at)
        slots = self._slots(slice_, at)
        if not slice_.learned:
            learn(slice_.entries, history, slots)
            slice_.learned = True
        if slots.remaining < 1.0:
            return EMPTY_SELECTION
        if slice_.send_queue.expired_closed(slice_.entries):
            slice_.send_queue = rank_closed_by_deadline(slice_.entries, history)
        selection = slice_.send_queue.draw(slice_.entries, int(min(at.max_groups, slots.remaining)))
        return GroupSelection(selection.groups, selection.drained or slots.remaining - len(selection.groups) < 1.0)

    def _ranks_by_deadline(self, end: int, slice_: Slice) -> bool:
        return bool(self.bounded) and self.omits(end, slice_)

    def _least_open(self, at: PullContext) -> int:
        return super()._least_open(at) if at.now_ms < at.end_ms else 0

    def _rank_open(self, slice_: Slice, history: GroupHistory, limits: ErrorLimits, at: PullContext) -> SendQueue:
        if not self._ranks_by_deadline(at.end_ms, slice_):
            return super()._rank_open(slice_, history, limits, at)
        slots = self._slots(slice_, at)
        return rank_open_by_deadline(slice_.entries, self._spec.cache, history, at.ranking_context, slots)

    def _learn(self, slice_: Slice, history: GroupHistory, limits: ErrorLimits) -> None:
        learn(slice_.entries, history, None)

    def _slots(self, slice_: Slice, at: PullContext) -> SendSlots:
        """Returns how many entries of a slice can be sent in time, after the entries of the frame.

        If the deadline has passed before the first frame of a closed slice, such as after an outage, groups are sent
        for as long as the budget, less the time of newer slices. A late answer should not be empty, and should not
        delay the next answer.
        """
        # An entry leaves early only if even a link of the median could not carry it after the close.
        link = at.link if at.early is None else replace(at.link, bytes_per_ms=at.link.likely_bytes_per_ms)
        deadline_ms = max(self.due_ms(at.end_ms, link), slice_.late_until_ms)
        if link.bytes_per_ms <= 0.0 or at.now_ms == MIN_TIME_MS:
            return SendSlots(np.inf, np.inf)
        rate, budget_ms = PLANNED_SHARE * link.bytes_per_ms / at.entry_bytes, self.staleness_ms * link.speed
        if at.early is None and not slice_.learned and deadline_ms <= at.now_ms:
            slice_.late_until_ms = at.now_ms + round(budget_ms - at.newer_groups / rate)
            deadline_ms = max(deadline_ms, slice_.late_until_ms)
        total = rate * (self._spec.window.slice_ms + budget_ms - link.path_delay_ms)
        return SendSlots(max(rate * (deadline_ms - at.now_ms) - at.sent_groups, 0.0), max(total, 0.0))


class BytePolicy(ExactPolicy):
    """Of a slice that closes, the groups whose errors are above the price are sent, once. The rest is withheld.

    Beside another budget, its policy says which groups are sent at most. An error limit that costs more bytes than
    there are is exceeded.
    """

    def __init__(self, spec: QuerySpec) -> None:
        super().__init__(spec)
        self.states_first = False  # a provisional close costs as much as a last one
        self.prices = BytePrices(spec)

    def early_sends(self, open_: OpenSlice) -> EarlySends | None:
        """Returns None: a group that leaves early may have to be sent again."""
        return None

    def select(self, slice_: Slice, history: GroupHistory, limits: ErrorLimits, at: PullContext) -> GroupSelection:
        """Selects the groups that are worth their bytes."""
        assert self.prices is not None and at.bytes is not None
        was_learned = slice_.learned
        super().select(slice_, history, limits, replace(at, max_groups=0))  # ranks them
        errors = errors_left(slice_.entries, history, slice_.send_queue)
        if errors is None:  # there is no time for any
            return EMPTY_SELECTION
        if not was_learned:
            self.prices.learn(errors, at.bytes)
        count = self.affordable(errors, at.bytes, at.entry_bytes)
        selection = super().select(slice_, history, limits, replace(at, max_groups=min(count, at.max_groups)))
        return GroupSelection(selection.groups, selection.drained or count <= at.max_groups)

    def affordable(self, errors: FloatArray | None, room: ByteRoom | None, entry_bytes: float) -> int:
        assert self.prices is not None and room is not None
        most = max(int(room.now_bytes / (BYTES_MARGIN * entry_bytes)), 0)
        return most if errors is None else min(self.prices.affordable(errors, room), most)

    def _rank_closed(self, entries: SliceEntries, limits: ErrorLimits, history: GroupHistory) -> SendQueue:
        if self.limited:
            return rank_closed_by_error(entries, limits, history)
        return rank_closed_by_deadline(entries, history)


class ByteErrorPolicy(BytePolicy, ErrorPolicy):
    """A byte budget and an error budget."""


class ByteStalenessPolicy(BytePolicy, StalenessPolicy):
    """A byte budget and a staleness budget."""


class ByteCombinedPolicy(BytePolicy, CombinedPolicy):
    """A byte budget, an error budget and a staleness budget."""


def policy_of(spec: QuerySpec) -> ExactPolicy:
    """Returns the policy of a query.

    With an accuracy, a staleness budget beside an error budget limits the early answers of the center.
    """
    if spec.byte_budget is not None:
        return _BYTE_POLICIES[type(spec.budget)](spec)
    match spec.budget:
        case StalenessBudget():
            return StalenessPolicy(spec)
        case CombinedBudget() if spec.accuracy is None:
            return CombinedPolicy(spec)
        case ErrorBudget() | CombinedBudget():
            return ErrorPolicy(spec)
        case _:
            return ExactPolicy(spec)


_BYTE_POLICIES: Mapping[type, type[BytePolicy]] = {
    type(None): BytePolicy,
    ErrorBudget: ByteErrorPolicy,
    StalenessBudget: ByteStalenessPolicy,
    CombinedBudget: ByteCombinedPolicy,
}


def limit_to_capacity(
    slice_: Slice, selection: GroupSelection, capacity_bytes: int, entry_bytes: float
) -> GroupSelection:
    """Reduces a selection to at least one group, so that its frame is not much larger than allowed.

    The center refuses a frame above its limit each time. The size of entries is unknown until the first entries have
    been sent. Samples need this check always, because their sizes differ.
    """
    pending, groups = slice_.entries.pending, selection.groups
    if not pending.samples and entry_bytes != INITIAL_ENTRY_BYTES:
        return selection
    while len(groups) > 1 and pending.take(groups).nbytes > MAX_OVERSHOOT * capacity_bytes:
        groups, slice_.send_queue = groups[: len(groups) // 2], SendQueue()  # the other groups are ranked again
    return GroupSelection(groups, selection.drained and len(groups) == len(selection.groups))
