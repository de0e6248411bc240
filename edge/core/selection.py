"""The outcome of a pull, the recorded outcome of a pull in a replay, and the limit of a frame's entries."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from edge.cache import EMPTY_SELECTION, GroupSelection, SendQueue
from edge.core.slices import INITIAL_ENTRY_BYTES, Slice
from edgewater.synopses import GroupedAggregate
from edgewater.wire import FrameBody

MAX_OVERSHOOT = 2
"""The entries of a frame may take this many times its capacity, if there is more than one."""


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
