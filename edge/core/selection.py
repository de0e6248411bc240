"""Selects the groups of a slice to send at a pull, by the cache policies, the budget, the time and the link.

Policies rank by exponentials, logarithms and sums. Their last bit may depend on the library or processor, and so may
the selected groups. A replay therefore runs the policies only to change their state, and reads the selected groups from
the recorded frame.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

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
from edge.core.slices import INITIAL_ENTRY_BYTES, Slice
from edgewater.model.query import QuerySpec, StalenessBudget
from edgewater.synopses import GroupedAggregate
from edgewater.wire import FrameBody

PLANNED_SHARE = 0.95
"""The fraction of the link's bytes that a staleness budget plans with. Sizes of entries are estimates, and heartbeats
use the link, too."""
MAX_OVERSHOOT = 2
"""The entries of a frame may take this many times its capacity, if there is more than one."""


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


@dataclass(frozen=True, slots=True)
class PullResult:
    """The outcome of a pull from a query.

    Attributes:
        body: of the frame to send.
        closed: the starts of the slices that are now sent completely. (A slice of session windows has a `SliceClose`
            earlier, too.)
    """

    body: FrameBody
    closed: tuple[int, ...]


@dataclass(slots=True)
class RecordedPull:
    """The outcome of a pull that a replay reads from the journal.

    Attributes:
        result: None: nothing was sent.
        partials: by slice, the sent values that the state still contains.
    """

    result: PullResult | None
    partials: dict[int, GroupedAggregate] = field(init=False)

    def __post_init__(self) -> None:
        partials = self.result.body.partials if self.result is not None else ()
        self.partials = {p.slice_start_ms: GroupedAggregate.from_bytes(p.synopsis) for p in partials}

    @property
    def closed(self) -> tuple[int, ...]:
        return self.result.closed if self.result is not None else ()

    @property
    def provisional(self) -> tuple[int, ...]:
        """The starts of the slices that were closed provisionally."""
        closes = self.result.body.closes if self.result is not None else ()
        return tuple(close.slice_start_ms for close in closes if close.provisional)

    @property
    def substreams(self) -> int:
        """The number of sub-streams whose statistics were sent."""
        arrivals = self.result.body.arrivals if self.result is not None else None
        return len(arrivals.substreams) if arrivals is not None else 0

    def replace_selection(self, start: int, slice_: Slice, selection: GroupSelection) -> GroupSelection:
        """Returns the recorded selection of the slice, which replaces the selection that the policies make now."""
        groups, closed = EMPTY_SELECTION.groups, slice_.close_reported or start in self.closed
        if start in self.partials:
            # Compared by key, because groups are numbered differently if a source's records have changed.
            groups = slice_.entries.codes(self.partials[start].rows(), len(self.partials[start]))
        if not np.array_equal(np.sort(groups), selection.groups):  # a record may list them in the order of their keys
            slice_.send_queue = SendQueue()  # drawn groups that were not sent have to be ranked again
        return GroupSelection(groups, closed)


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
