"""What leaves a slice at a pull: the cache's policies, given the budget, the clock and the link.

Policies rank by exponentials, logarithms and sums, to which another library or processor may give another last bit, and
so other groups to leave. So a replay runs them for what they learn, and takes from the recorded frame what leaves.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from edge.cache import policy as choice
from edge.cache.history import GroupHistory
from edge.cache.partition import Limits
from edge.cache.send_queue import NOTHING, Choice, Ranking
from edge.cache.sizing import Slots
from edge.core.slices import INITIAL_ENTRY_BYTES, Carrier, Slice
from edgewater.query import QuerySpec, StalenessBudget
from edgewater.streams import MIN_TIME_MS
from edgewater.synopses import GroupedAggregate
from edgewater.wire.frames import FrameBody

MOST_OVER = 2
"""Times its capacity that entries may take in a frame, if they are more than one."""


@dataclass(frozen=True, slots=True)
class Chance:
    """A slice's chance to send.

    Attributes:
        start_ms, end_ms: the slice, in event time.
        closed: the watermark has passed its end.
        open_between_ms: now, and when what open slices have to send would be drained (`Pull.open_between`).
        count: how many entries may leave.
    """

    start_ms: int
    end_ms: int
    closed: bool
    open_between_ms: tuple[int, int]
    count: int

    @property
    def now_ms(self) -> int:
        return self.open_between_ms[0]

    @property
    def moment(self) -> choice.Moment:
        after, through = self.open_between_ms
        elapsed = (after - self.start_ms) / (self.end_ms - self.start_ms)
        # The part of the slice's time left that its entries would take to drain; from 1 on, all of it.
        pressure = min((through - after) / max(self.end_ms - after, 1), 1.0)
        return choice.Moment(after, min(max(elapsed, 0.0), 1.0), pressure)


@dataclass(frozen=True, slots=True)
class Departure:
    """What leaves a query at a pull.

    Attributes:
        closed: the starts of the slices of which this is all there is. (A session's slice is stated before that, too.)
    """

    body: FrameBody
    closed: tuple[int, ...]


@dataclass(slots=True)
class Recorded:
    """What left a query at a pull that is replayed.

    Attributes:
        departure: None: nothing left.
        parts: by slice, what left it and has not been taken out again yet.
    """

    departure: Departure | None
    parts: dict[int, GroupedAggregate] = field(init=False)

    def __post_init__(self) -> None:
        partials = self.departure.body.partials if self.departure is not None else ()
        self.parts = {p.slice_start_ms: GroupedAggregate.from_bytes(p.synopsis) for p in partials}

    @property
    def closed(self) -> tuple[int, ...]:
        return self.departure.closed if self.departure is not None else ()

    @property
    def substreams(self) -> int:
        """Of how many sub-streams statistics left."""
        arrivals = self.departure.body.arrivals if self.departure is not None else None
        return len(arrivals.substreams) if arrivals is not None else 0

    def instead(self, start: int, held: Slice, chosen: Choice) -> Choice:
        """What left the slice, instead of what the policies choose now."""
        groups, closed = NOTHING.groups, held.stated or start in self.closed
        if start in self.parts:
            # By their keys: where another record was let through, groups are numbered otherwise.
            groups = held.entries.codes(self.parts[start].rows(), len(self.parts[start]))
        if not np.array_equal(groups, chosen.groups):
            held.ranking = Ranking()  # those it has drawn have their turn again
        return Choice(groups, closed)


def choose(
    held: Slice, spec: QuerySpec, history: GroupHistory, limits: Limits, chance: Chance, slots: Slots | None
) -> Choice:
    """What leaves. `slots`: under a staleness budget (`slots_left`)."""
    if not chance.closed:
        if held.ranking.is_due(chance.now_ms, chance.end_ms):
            held.ranking = (
                choice.of_open(held.entries, limits, spec.cache, history, chance.moment)
                if slots is None
                else choice.by_deadline(held.entries, spec.cache, history, chance.moment, slots)
            )
        return held.ranking.draw(held.entries, chance.count)
    if not held.learnt:
        choice.learn(held.entries, history, slots)
        held.learnt = True
    count = chance.count
    if slots is not None:
        if held.in_time and slots.left < 1.0:
            return NOTHING  # the rest is omitted, and stated as withheld
        held.in_time |= slots.left >= 1.0
        count = min(count, int(slots.left)) if held.in_time and slots.left < count else count
    if held.ranking.is_overtaken(held.entries):
        held.ranking = (
            choice.of_closed(held.entries, limits) if slots is None else choice.until_deadline(held.entries, history)
        )
    return held.ranking.draw(held.entries, count)


def slots_left(spec: QuerySpec, end_ms: int, now_ms: int, carrier: Carrier, entry_bytes: float) -> Slots | None:
    """Under a staleness budget, how many entries can still be sent in time. What comes after the deadline
    (a backfill, or a link that was down) has had no chance to be in time: it is sent whole."""
    if not isinstance(spec.budget, StalenessBudget):
        return None
    if carrier.bytes_per_ms <= 0.0 or now_ms == MIN_TIME_MS:
        return Slots(np.inf, np.inf)
    rate = carrier.bytes_per_ms / entry_bytes
    allowed = spec.budget.staleness_ms - carrier.way_ms
    left = rate * (end_ms + allowed - now_ms)
    return Slots(max(left, 0.0), max(rate * (spec.window.slice_ms + allowed), 0.0))


def fitting(held: Slice, chosen: Choice, capacity_bytes: int, entry_bytes: float) -> Choice:
    """The first of these groups, at least one, that together are not far larger than a frame should be: the center
    refuses a frame above its bound, for ever. Until one was sent nobody knows how large an entry is, and of samples
    none is like another."""
    pending, groups = held.entries.pending, chosen.groups
    if not pending.samples and entry_bytes != INITIAL_ENTRY_BYTES:
        return chosen
    while len(groups) > 1 and pending.take(groups).nbytes > MOST_OVER * capacity_bytes:
        groups, held.ranking = groups[: len(groups) // 2], Ranking()  # the others have their turn again
    return Choice(groups, chosen.drained and len(groups) == len(chosen.groups))
