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
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa

from edge.core import (
    Acked,
    BudgetSet,
    Configured,
    EdgeCore,
    FrameBuilt,
    Ingested,
    PullEvent,
    SourcesOpened,
    StreamSpec,
    TickEvent,
)
from edgewater.model.query import QuerySpec
from edgewater.model.streams import LIVE
from edgewater.synopses import GroupedAggregate
from edgewater.wire import QueryRef
from sim.budgets.center import MergingCenter
from sim.budgets.link import LinkModel, LinkSimulation
from sim.budgets.outcome import PolicyOutcome, truth_per_window
from sim.budgets.trace import Trace

RESOLUTION = 0.03
COARSEST = 0.03
NEAR = 0.1
"""When this fraction of a window remains, steps are twice as coarse as `RESOLUTION`. They approach it towards the
end.
"""
FINEST_MS = 1.0
MIN_FRAME_BYTES = 8 << 10
"""An agent on a usual link makes frames of at least this size."""
GROUP_CODE_COLUMN = "group_code"
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


Rebalance = Callable[[int, "list[EdgeSimulation]"], Mapping[str, float] | None]


class EdgeSimulation:
    """One edge with its records, its core and its link.

    Attributes:
        core: the production state machine.
        decode: decodes its partials.
        updates: number of entries sent so far.
    """

    def __init__(self, number: int, part: Trace, query: QuerySpec, link: LinkModel, edges: int, first_ms: int) -> None:
        self.number = number
        self.ref = QueryRef(query.name, 1)
        tickets = None if link.bytes_per_update is None else TicketCodec(link.bytes_per_update)
        self.decode = GroupedAggregate.from_bytes if tickets is None else tickets.decode
        encode = GroupedAggregate.to_bytes if tickets is None else tickets.encode
        self.core = EdgeCore({query.stream: StreamSpec(part.columns, LIVE, idle_ms=0)}, number, encode)
        self.wire = LinkSimulation(link, number)
        self.updates = 0
        self._part, self._query, self._link = part, query, link
        self._times = part.times_ms
        self._row = 0
        self._window_end_ms = first_ms + query.window.slice_ms
        self.core.handle(SourcesOpened(((query.stream, "trace"),)))
        self.core.handle(Configured(((self.ref, query),)))
        self.set_shares(equal_shares(query, edges))

    def set_shares(self, shares: Mapping[str, float]) -> None:
        """Sets the edge's shares of the error budget."""
        if shares:
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
            self._ingest(self._window_end_ms - 1)
            self.core.handle(TickEvent(self._window_end_ms))
            self._window_end_ms += self._query.window.slice_ms
        self._ingest(now)
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
        built = [e.frame for e in self.core.handle(event) if isinstance(e, FrameBuilt)]
        for frame in built:
            body = frame.unpack()
            parts = [(p.slice_start_ms, self.decode(p.synopsis)) for p in body.partials]
            count = sum(len(part) for _, part in parts)
            self.updates += count
            per_update = self._link.bytes_per_update
            size = float(frame.wire_bytes) if per_update is None else count * per_update
            center.receive(self.number, body, parts, self.wire.transmit(size, now_ms))
            self.core.handle(Acked(frame.seq))
        return bool(built)

    def _ingest(self, until_ms: int) -> None:
        row = int(np.searchsorted(self._times, until_ms, "right"))
        if row > self._row:
            batch = self._part.batch.slice(self._row, row - self._row)
            self.core.handle(Ingested(self._query.stream, "trace", batch, until_ms))
            self._row = row

    @property
    def quiet(self) -> bool:
        """Whether the edge has no more records to read and nothing to send."""
        core = self.core
        return self._row == len(self._times) and core.pulls.next_pull_ms(self._bandwidth(), self._window_end_ms) is None


def equal_shares(query: QuerySpec, edges: int) -> dict[str, float]:
    """Returns equal shares: E / n for sums; E for extrema, whose errors do not add up."""
    if query.error_budget is None:
        return {}
    extrema = {m.name for m in query.measures if m.function.error == "extremum"}
    return {name: limit if name in extrema else limit / edges for name, limit in query.error_budget.limits}


def with_group_codes(trace: Trace, query: QuerySpec) -> tuple[Trace, QuerySpec]:
    """Replaces the key columns by the integer code of the group, which is faster.

    The result is the same if the size of an update does not depend on its keys.
    """
    columns = {f.name: trace.batch.column(f.name) for f in trace.batch.schema if f.name not in trace.keys}
    batch = pa.record_batch({GROUP_CODE_COLUMN: pa.array(trace.codes), **columns})
    return Trace(batch, (GROUP_CODE_COLUMN,), trace.codes), replace(
        query, group_by=(GROUP_CODE_COLUMN,) if query.group_by else ()
    )


def simulate(
    trace: Trace, parts: list[Trace], query: QuerySpec, link: LinkModel, rebalance: Rebalance | None = None
) -> PolicyOutcome:
    """Runs the edges until the trace has ended and nothing remains to be sent."""
    truth = truth_per_window(trace, query, query.measures[0].name)
    measure = query.measures[0]
    simulated = query
    if link.bytes_per_update is not None:
        pairs = [with_group_codes(part, query) for part in parts]
        parts, simulated = [p for p, _ in pairs], pairs[0][1]
    starts = list(truth)
    center = MergingCenter(trace, simulated, measure, starts, len(parts), coded_keys=link.bytes_per_update is not None)
    runs = [EdgeSimulation(i, part, simulated, link, len(parts), starts[0]) for i, part in enumerate(parts)]
    last_ms = starts[-1] + query.window.slice_ms
    agenda = [(float(starts[0]), run.number) for run in runs]
    ended = 0
    while agenda:
        now, number = heapq.heappop(agenda)
        while rebalance is not None and ended < len(starts) and now >= starts[ended] + query.window.slice_ms:
            shares = rebalance(ended, runs)
            for run in runs if shares else ():
                run.set_shares(shares or {})
            ended += 1
        following = runs[number].step(now, center)
        if now < last_ms or not (center.complete(number) or runs[number].quiet):
            heapq.heappush(agenda, (following, number))
    updates, per_update = sum(r.updates for r in runs), link.bytes_per_update
    # A product is exact; a sum would accumulate rounding errors.
    sent_bytes = sum(r.wire.sent_bytes for r in runs) if per_update is None else updates * per_update
    return center.outcome(truth, query.window.slice_ms, updates, sent_bytes)
