"""Selects the groups of a slice to send at a pull, by the cache policies, the budget, the time and the link."""

from __future__ import annotations

from dataclasses import dataclass

from edge.cache import (
    EMPTY_SELECTION,
    ErrorLimits,
    GroupHistory,
    GroupSelection,
    RankingContext,
    SendQueue,
    SendSlots,
    learn,
    rank_closed,
    rank_closed_by_deadline,
    rank_closed_by_error,
    rank_open,
    rank_open_by_deadline,
)
from edge.core.slices import INITIAL_ENTRY_BYTES, UNKNOWN_LINK, LinkEstimate, Slice
from edgewater.model.query import QuerySpec, StalenessBudget
from edgewater.model.streams import MIN_TIME_MS

PLANNED_SHARE = 0.95
"""The fraction of the link's bytes that a staleness budget plans with. Sizes of entries are estimates, and heartbeats
use the link, too."""
MAX_OVERSHOOT = 2
"""The entries of a frame may take this many times its capacity, if there is more than one."""

NO_DRAIN_WINDOW = (MIN_TIME_MS, MIN_TIME_MS)


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


@dataclass(frozen=True, slots=True)
class PullContext:
    """The conditions under which a slice is pulled from.

    Attributes:
        start_ms, end_ms: the slice, in event time.
        closed: whether the watermark has passed the slice's end.
        now_ms: event time.
        max_groups: how many groups may be sent.
        least_groups: how many groups a frame of an open slice needs without a staleness budget. A smaller frame is
            mostly overhead.
    """

    start_ms: int
    end_ms: int
    closed: bool
    now_ms: int
    max_groups: int
    least_groups: int = 0

    @property
    def ranking_context(self) -> RankingContext:
        elapsed = (self.now_ms - self.start_ms) / (self.end_ms - self.start_ms)
        return RankingContext(self.now_ms, min(max(elapsed, 0.0), 1.0))


def select_groups(
    slice_: Slice,
    spec: QuerySpec,
    history: GroupHistory,
    limits: ErrorLimits,
    context: PullContext,
    slots: SendSlots | None,
) -> GroupSelection:
    """Selects the groups to send.

    Args:
        slots: under a staleness budget, how many entries can be sent in time.
    """
    if slots is not None:
        select = _select_closed_by_deadline if context.closed else _select_open_by_deadline
        return select(slice_, spec, history, context, slots)
    if not context.closed:
        if slice_.send_queue.expired_open(context.now_ms, context.end_ms):
            slice_.send_queue = rank_open(
                slice_.entries, limits, spec.cache, history, context.ranking_context, waits=spec.saves_bytes
            )
        if slice_.send_queue.left < min(context.max_groups, context.least_groups):
            return EMPTY_SELECTION
        return slice_.send_queue.draw(slice_.entries, context.max_groups)
    if not slice_.learned:
        learn(slice_.entries, history, None, None if isinstance(spec.budget, StalenessBudget) else limits)
        slice_.learned = True
    if slice_.send_queue.expired_closed(slice_.entries):
        if spec.saves_bytes:
            slice_.send_queue = rank_closed_by_error(slice_.entries, limits, history)
        else:
            slice_.send_queue = rank_closed(slice_.entries, limits)
    return slice_.send_queue.draw(slice_.entries, context.max_groups)


def _select_closed_by_deadline(
    slice_: Slice, spec: QuerySpec, history: GroupHistory, context: PullContext, slots: SendSlots
) -> GroupSelection:
    """Selects the largest accumulated errors.

    The slice is drained if no further group can be sent in time: its other groups are omitted, and stated as withheld.
    """
    if not slice_.learned:
        learn(slice_.entries, history, slots)
        slice_.learned = True
    if slice_.close_reported or slots.remaining < 1.0:
        return EMPTY_SELECTION
    if slice_.send_queue.expired_closed(slice_.entries):
        slice_.send_queue = rank_closed_by_deadline(slice_.entries, history)
    selection = slice_.send_queue.draw(slice_.entries, int(min(context.max_groups, slots.remaining)))
    return GroupSelection(selection.groups, selection.drained or slots.remaining - len(selection.groups) < 1.0)


def _select_open_by_deadline(
    slice_: Slice, spec: QuerySpec, history: GroupHistory, context: PullContext, slots: SendSlots
) -> GroupSelection:
    if slice_.send_queue.expired_open(context.now_ms, context.end_ms):
        slice_.send_queue = rank_open_by_deadline(slice_.entries, spec.cache, history, context.ranking_context, slots)
    if slice_.send_queue.left < min(context.max_groups, context.least_groups):
        return EMPTY_SELECTION
    return slice_.send_queue.draw(slice_.entries, context.max_groups)


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
