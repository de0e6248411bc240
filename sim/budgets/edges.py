"""Edges under a virtual clock: the production `EdgeCore`s, their links, and a center that merges.

Time is cut as coarsely as it may be. A core is asked for a frame whenever its link is free, and is fed all
records up to that moment first, so that a frame carries the freshest values. A frame is kept to what the
link carries in a small part of the time that is left to the window's end (`RESOLUTION`, at most
`COARSEST` of a window), so decisions get finer towards the end, where they count. What a window's answer waits
for is timed by the link, byte by byte, not by these steps.

Where every update costs the same (`LinkModel.bytes_per_update`), frames carry tickets of that size instead of
encoded partials (`TicketOffice`): all that the core decides stays as it is, at a fraction of the time.
"""

from __future__ import annotations

import heapq
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa

from edge.core.core import EdgeCore
from edge.core.events import Acked, BudgetSet, Configured, FrameBuilt, Ingested, Pull, SourcesOpened, Tick
from edge.core.streams import StreamSpec
from edgewater.query import ErrorBudget, QuerySpec
from edgewater.streams import LIVE
from edgewater.synopses import GroupedAggregate
from edgewater.wire.frames import QueryRef
from sim.budgets.center import MergingCenter
from sim.budgets.link import LinkModel, Wire
from sim.budgets.outcome import Outcome, truth_per_window
from sim.budgets.trace import Trace

RESOLUTION = 0.03
COARSEST = 0.03
NEAR = 0.1
"""Where so much of a window is left, steps are twice as coarse as RESOLUTION says; near the end they are as it says."""
FINEST_MS = 1.0
CODE = "group_code"
TICKET = struct.Struct("<Q")


class TicketOffice:
    """Encodes partials as tickets: bytes of the right number, which stand for the aggregate itself."""

    def __init__(self, bytes_per_update: float) -> None:
        self.entry_bytes = max(round(bytes_per_update), TICKET.size)
        self._held: dict[int, GroupedAggregate] = {}
        self._issued = 0

    def encode(self, part: GroupedAggregate) -> bytes:
        self._issued += 1
        self._held[self._issued] = part
        return TICKET.pack(self._issued) + bytes(self.entry_bytes * len(part) - TICKET.size)

    def decode(self, data: bytes) -> GroupedAggregate:
        """Each ticket is good for once."""
        return self._held.pop(TICKET.unpack_from(data)[0])


Rebalance = Callable[[int, "list[EdgeRun]"], Mapping[str, float] | None]


class EdgeRun:
    """One edge: its records, its core and its link.

    Attributes:
        core: the production state machine.
        decode: reads its partials.
        updates: entries sent so far.
    """

    def __init__(self, number: int, part: Trace, query: QuerySpec, link: LinkModel, edges: int, first_ms: int) -> None:
        self.number = number
        self.ref = QueryRef(query.name, 1)
        office = None if link.bytes_per_update is None else TicketOffice(link.bytes_per_update)
        self.decode = GroupedAggregate.from_bytes if office is None else office.decode
        encode = GroupedAggregate.to_bytes if office is None else office.encode
        self.core = EdgeCore({query.stream: StreamSpec(part.columns, LIVE, idle_ms=0)}, number, encode)
        self.wire = Wire(link, number)
        self.updates = 0
        self._part, self._query, self._link = part, query, link
        self._times = part.times_ms
        self._row = 0
        self._window_end_ms = first_ms + query.window.slice_ms
        self.core.handle(SourcesOpened(((query.stream, "trace"),)))
        self.core.handle(Configured(((self.ref, query),)))
        self.give(equal_shares(query, edges))

    def give(self, shares: Mapping[str, float]) -> None:
        """New shares of the error budget."""
        if shares:
            self.core.handle(BudgetSet(self.ref, shares))

    @property
    def window_end_ms(self) -> int:
        """The end of the window that is open."""
        return int(self._window_end_ms)

    @property
    def _entry_bytes(self) -> float:
        return self.core.queries[self.ref].progress.entry_bytes

    def step(self, now_ms: float, center: MergingCenter) -> float:
        """What happens at `now_ms`, when the link is free; returns when something may happen next."""
        now = math.ceil(now_ms)
        while now >= self._window_end_ms:
            self._ingest(self._window_end_ms - 1)
            self.core.handle(Tick(self._window_end_ms))
            self._window_end_ms += self._query.window.slice_ms
        self._ingest(now)
        left = self._window_end_ms - now_ms
        size = self._query.window.slice_ms
        step_ms = max(min(RESOLUTION * left * (1.0 + left / size / NEAR), COARSEST * size), FINEST_MS)
        bandwidth = self._bandwidth()
        due = self.core.next_pull_ms(bandwidth, now)
        if due is not None and due <= now and self._pull(now_ms, now, step_ms, bandwidth, center):
            return max(self.wire.free_ms, now_ms + 1e-6)
        return float(min(now_ms + step_ms, self._window_end_ms))

    def _bandwidth(self) -> float:
        """Bytes per second in the core's own count of bytes."""
        if self._link.bytes_per_update is None:
            return self.wire.delivered_bytes_s
        return self._link.bandwidth_bytes_s / self._link.bytes_per_update * self._entry_bytes

    def _pull(self, now_ms: float, now: int, step_ms: float, bandwidth: float, center: MergingCenter) -> bool:
        # In whole entries, and a little more, so that the division does not lose one.
        entries = max(1, round(bandwidth * step_ms / 1000.0 / self._entry_bytes))
        capacity = math.ceil(entries * self._entry_bytes) + 1
        way = round(self._link.latency_ms + self._link.jitter_ms)
        event = Pull(capacity, self.core.open_between(bandwidth, now), bandwidth, way)
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
        """Has it nothing left to read or to send?"""
        core = self.core
        return self._row == len(self._times) and core.next_pull_ms(self._bandwidth(), self._window_end_ms) is None


def equal_shares(query: QuerySpec, edges: int) -> dict[str, float]:
    """E / n for sums; E for extrema, of which the center takes the largest."""
    if not isinstance(query.budget, ErrorBudget):
        return {}
    extrema = {m.name for m in query.measures if m.function.error == "extremum"}
    return {name: limit if name in extrema else limit / edges for name, limit in query.budget.limits}


def coded(trace: Trace, query: QuerySpec) -> tuple[Trace, QuerySpec]:
    """The same records with one whole number for the group's key: as good where updates cost the same
    whatever their keys, and faster."""
    columns = {f.name: trace.batch.column(f.name) for f in trace.batch.schema if f.name not in trace.keys}
    batch = pa.record_batch({CODE: pa.array(trace.codes), **columns})
    return Trace(batch, (CODE,), trace.codes), replace(query, group_by=(CODE,) if query.group_by else ())


def simulate(
    trace: Trace, parts: list[Trace], query: QuerySpec, link: LinkModel, rebalance: Rebalance | None = None
) -> Outcome:
    """Runs the edges until the trace has ended and everything has been sent that is to be sent."""
    truth = truth_per_window(trace, query, query.measures[0].name)
    measure = query.measures[0]
    given = query
    if link.bytes_per_update is not None:
        pairs = [coded(part, query) for part in parts]
        parts, given = [p for p, _ in pairs], pairs[0][1]
    starts = list(truth)
    center = MergingCenter(trace, given, measure, starts, len(parts), coded_keys=link.bytes_per_update is not None)
    runs = [EdgeRun(i, part, given, link, len(parts), starts[0]) for i, part in enumerate(parts)]
    last_ms = starts[-1] + query.window.slice_ms
    agenda = [(float(starts[0]), run.number) for run in runs]
    ended = 0
    while agenda:
        now, number = heapq.heappop(agenda)
        while rebalance is not None and ended < len(starts) and now >= starts[ended] + query.window.slice_ms:
            shares = rebalance(ended, runs)
            for run in runs if shares else ():
                run.give(shares or {})
            ended += 1
        following = runs[number].step(now, center)
        if now < last_ms or not (center.complete(number) or runs[number].quiet):
            heapq.heappush(agenda, (following, number))
    updates, per_update = sum(r.updates for r in runs), link.bytes_per_update
    # Not a sum of many roundings where a product is exact.
    sent_bytes = sum(r.wire.sent_bytes for r in runs) if per_update is None else updates * per_update
    return center.outcome(truth, query.window.slice_ms, updates, sent_bytes)
