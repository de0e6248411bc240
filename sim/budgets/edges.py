"""Edges under a virtual clock: production `EdgeCore`s with simulated links to a center that merges.

Time advances in coarse steps. Whenever its link is idle, a core first ingests all records up to that moment and is then
asked for a frame, so that frames have the newest values. A frame has at most the bytes that the link carries in a small
fraction of the remaining time of the window (`RESOLUTION`, at most `COARSEST` of a window). So decisions are finer
towards the end, where they matter. The link model determines arrival times byte by byte, independently of these steps.

If every update has the same size (`LinkModel.bytes_per_update`), frames contain tickets of that size instead of encoded
partials (`TicketCodec`). The core's decisions are the same, at a fraction of the run time.
"""

from __future__ import annotations

import heapq
import math
import struct
from collections.abc import Callable

import numpy as np

from center.budgets import error_limits
from edge.core.core import EdgeCore
from edge.core.events import Acked, BudgetSet, Configured, FrameBuilt, Ingested, PullEvent, SourcesOpened, TickEvent
from edge.core.streams import StreamSpec
from edgewater.base.streams import LIVE
from edgewater.model.query import QuerySpec
from edgewater.synopses import GroupedAggregate
from edgewater.wire import Frame, QueryRef
from sim.budgets.center import MergingCenter
from sim.budgets.link import LinkSimulation, SimulatedLink
from sim.budgets.outcome import PolicyOutcome, truth_per_window
from sim.budgets.trace import Trace

RESOLUTION = 0.03  # limit: time of a simulation
COARSEST = 0.03  # limit: time of a simulation
NEAR = 0.1  # limit: time of a simulation
"""When this fraction of a window remains, steps are twice as coarse as `RESOLUTION`. They approach it towards the
end.
"""
FINEST_MS = 1.0  # limit: number of steps
MIN_FRAME_BYTES = 8 << 10
"""An agent on a usual link makes frames of at least this size."""
TICKET = struct.Struct("<Q")


class TicketCodec:
    """Encodes partials as tickets, which refer to the aggregate.

    A ticket has as many bytes as the partial's updates.
    """

    def __init__(self, bytes_per_update: float) -> None:
        self.entry_bytes = max(round(bytes_per_update), TICKET.size)
        self._held: dict[int, GroupedAggregate] = {}
        self._issued = 0

    def encode(self, part: GroupedAggregate) -> bytes:
        self._issued += 1
        self._held[self._issued] = part
        return TICKET.pack(self._issued) + bytes(self.entry_bytes * len(part) - TICKET.size)

    def decode(self, data: bytes) -> GroupedAggregate:
        """Returns the aggregate of a ticket, once."""
        return self._held.pop(TICKET.unpack_from(data)[0])


Rebalance = Callable[[int, "list[EdgeSimulation]"], None]
"""Called with the number of each window that has ended, and the edges."""


class TracedEdge:
    """A production core that reads the records of a trace.

    Attributes:
        core: the state machine.
    """

    def __init__(
        self,
        part: Trace,
        query: QuerySpec,
        number: int = 0,
        encode: Callable[[GroupedAggregate], bytes] = GroupedAggregate.to_bytes,
    ) -> None:
        self.ref = QueryRef(query.name, 1)
        self.core = EdgeCore({query.stream: StreamSpec(part.columns, LIVE, idle_ms=0)}, number, encode)
        self._part, self._query, self._times, self._row = part, query, part.times_ms, 0
        self.core.handle(SourcesOpened(((query.stream, "trace"),)))
        self.core.handle(Configured(((self.ref, query),)))

    def ingest(self, until_ms: int) -> None:
        """Reads the records up to an event time."""
        row = int(np.searchsorted(self._times, until_ms, "right"))
        if row > self._row:
            batch = self._part.batch.slice(self._row, row - self._row)
            self.core.handle(Ingested(self._query.stream, "trace", batch, until_ms))
            self._row = row

    def end(self, end_ms: int) -> None:
        """Ends a window after its last record."""
        self.ingest(end_ms - 1)
        self.core.handle(TickEvent(end_ms))

    def frames(self, event: PullEvent) -> list[Frame]:
        """Returns the frames of a pull, which are acknowledged."""
        frames = [e.frame for e in self.core.handle(event) if isinstance(e, FrameBuilt)]
        for frame in frames:
            self.core.handle(Acked(frame.seq))
        return frames


class EdgeSimulation(TracedEdge):
    """One edge with its records, its core and its link.

    Attributes:
        decode: decodes its partials.
        updates: number of entries sent so far.
    """

    def __init__(
        self, number: int, part: Trace, query: QuerySpec, link: SimulatedLink, edges: int, first_ms: int
    ) -> None:
        self.number = number
        tickets = None if link.bytes_per_update is None else TicketCodec(link.bytes_per_update)
        self.decode = GroupedAggregate.from_bytes if tickets is None else tickets.decode
        super().__init__(part, query, number, GroupedAggregate.to_bytes if tickets is None else tickets.encode)
        self.wire = LinkSimulation(link, number)
        self.updates = 0
        self._link = link
        self._window_end_ms = first_ms + query.window.slice_ms
        if shares := equal_shares(query, edges):
            self.core.handle(BudgetSet(self.ref, shares))

    @property
    def window_end_ms(self) -> int:
        """The end of the open window."""
        return int(self._window_end_ms)

    @property
    def _entry_bytes(self) -> float:
        return self.core.queries[self.ref].shipper.entry_bytes

    def step(self, now_ms: float, center: MergingCenter) -> float:
        """Advances to `now_ms`, when the link is idle; returns the time of the next step."""
        now = math.ceil(now_ms)
        while now >= self._window_end_ms:
            self.end(self._window_end_ms)
            self._window_end_ms += self._query.window.slice_ms
        self.ingest(now)
        left_ms = self._window_end_ms - now_ms
        size = self._query.window.slice_ms
        step_ms = max(min(RESOLUTION * left_ms * (1.0 + left_ms / size / NEAR), COARSEST * size), FINEST_MS)
        bandwidth = self._bandwidth()
        path_delay = round(self._link.latency_ms + self._link.jitter_ms)
        due_ms = self.core.pulls.next_pull_ms(bandwidth, now, path_delay)
        if due_ms is not None and due_ms <= now and self._pull(now_ms, now, step_ms, bandwidth, path_delay, center):
            return max(self.wire.free_ms, now_ms + 1e-6)
        return float(min(now_ms + step_ms, self._window_end_ms))

    def _bandwidth(self) -> float:
        """Returns the bandwidth in the bytes that the core accounts for, per second."""
        if self._link.bytes_per_update is None:
            return self.wire.delivered_bytes_s
        return self._link.bandwidth_bytes_s / self._link.bytes_per_update * self._entry_bytes

    def _pull(
        self, now_ms: float, now: int, step_ms: float, bandwidth: float, path_delay_ms: int, center: MergingCenter
    ) -> bool:
        # Whole entries, plus one byte against rounding.
        entries = max(1, round(bandwidth * step_ms / 1000.0 / self._entry_bytes))
        capacity = math.ceil(entries * self._entry_bytes) + 1
        if self._query.saves_bytes and self._link.bytes_per_update is None:
            capacity = max(capacity, MIN_FRAME_BYTES)  # like an agent, since small frames are mostly overhead
        event = PullEvent(capacity, self.core.pulls.event_times(now), bandwidth, path_delay_ms)
        built = self.frames(event)
        for frame in built:
            body = frame.unpack()
            parts = [(p.slice_start_ms, self.decode(p.synopsis)) for p in body.partials]
            count = sum(len(part) for _, part in parts)
            self.updates += count
            per_update = self._link.bytes_per_update
            size = float(frame.wire_bytes) if per_update is None else count * per_update
            center.receive(self.number, body, parts, self.wire.transmit(size, now_ms))
        return bool(built)

    @property
    def quiet(self) -> bool:
        """Whether the edge has no more records to read and nothing to send."""
        core = self.core
        return self._row == len(self._times) and core.pulls.next_pull_ms(self._bandwidth(), self._window_end_ms) is None


def equal_shares(query: QuerySpec, edges: int) -> dict[str, float]:
    """Returns equal shares: E / n for sums; E for extrema, whose errors do not add up."""
    divided, undivided = error_limits(query)
    return {name: limit / edges for name, limit in divided.items()} | undivided


def simulate(
    trace: Trace, parts: list[Trace], query: QuerySpec, link: SimulatedLink, rebalance: Rebalance | None = None
) -> PolicyOutcome:
    """Runs the edges until the trace has ended and nothing remains to be sent."""
    truth = truth_per_window(trace, query)
    starts = list(truth)
    center = MergingCenter(trace, query, starts, len(parts))
    runs = [EdgeSimulation(i, part, query, link, len(parts), starts[0]) for i, part in enumerate(parts)]
    last_ms = starts[-1] + query.window.slice_ms
    agenda = [(float(starts[0]), run.number) for run in runs]
    ended = 0
    while agenda:
        now, number = heapq.heappop(agenda)
        while rebalance is not None and ended < len(starts) and now >= starts[ended] + query.window.slice_ms:
            rebalance(ended, runs)
            ended += 1
        following = runs[number].step(now, center)
        if now < last_ms or not (center.complete(number) or runs[number].quiet):
            heapq.heappush(agenda, (following, number))
    updates, per_update = sum(r.updates for r in runs), link.bytes_per_update
    # A product is exact; a sum would accumulate rounding errors.
    sent_bytes = sum(r.wire.sent_bytes for r in runs) if per_update is None else updates * per_update
    return center.outcome(truth, query.window.slice_ms, updates, sent_bytes)
