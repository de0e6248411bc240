"""Simulates the center of a wire simulation: the gateway's side of sessions, and the time that answers take."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from center.budgets import BudgetAllocator, Grant, error_limits
from center.budgets.processing_delay import AnswerMargin, ProcessingDelays
from center.config import GatewaySection
from center.ingest.gateway import GatewayBounds
from center.ingest.validation import read_budget_report
from edgewater.base.streams import EdgeId, StreamClock
from edgewater.model.query import QuerySpec
from edgewater.synopses import GroupedAggregate
from edgewater.wire import PROTOCOL, Frame, QueryRef
from edgewater.wire import uplink_pb2 as pb
from edgewater.wire.session_stream import MOST_WINDOW_LOG, SessionUnpacker
from sim.budgets.center import MergingCenter
from sim.wire.connection import Call

LIMITS = GatewaySection()
CLOCK_LEAD_MS = 1_000
"""An early answer is given this long before it is due."""


@dataclass(frozen=True, slots=True)
class CenterTimes:
    """Times that the center takes for a frame, measured on two cores.

    Attributes:
        commit_s: time from a frame's arrival until it is durable and acknowledged.
        batch_s: time of each batch. A batch takes all frames that are durable when it begins.
        entry_s: time of each entry of a batch.
        answer_s: time from the end of the batch that completes a window until a client sees the answer.
    """

    commit_s: float = 0.012
    batch_s: float = 0.1
    entry_s: float = 20e-6
    answer_s: float = 0.1


@dataclass(slots=True)
class _Waiting:
    """Frames that no batch has taken yet."""

    parts: list[Callable[[float], None]] = field(default_factory=list)
    arrivals_ms: list[int] = field(default_factory=list)
    entries: int = 0


class WireCenter:
    """Serves all edges of one query: grants shares, acknowledges frames, and merges them in batches.

    Args:
        merging: receives the values, with the times at which a client can see them, in event time.
        clock: the clock of the query's stream. The clocks of the edges are right.
        now_ms: the wall clock.
    """

    def __init__(
        self,
        query: QuerySpec,
        edges: int,
        merging: MergingCenter,
        times: CenterTimes,
        clock: StreamClock,
        now_ms: Callable[[], int],
    ) -> None:
        self.ref = QueryRef(query.name, 1)
        self.entries = 0
        self._query, self._merging, self._times, self._clock, self._now_ms = query, merging, times, clock, now_ms
        self._loop = asyncio.get_running_loop()
        self._edges = [EdgeId(f"edge{number}") for number in range(edges)]
        self._calls: dict[int, Call] = {}
        self._unpackers = [SessionUnpacker(MOST_WINDOW_LOG, LIMITS.max_frame_bytes) for _ in self._edges]
        self._allocator = BudgetAllocator(*error_limits(query))
        self._allocator.set_members(frozenset(self._edges), {})
        self._sent: dict[EdgeId, tuple[Grant | None, int]] = {}
        self._delays, self._delay_ms = ProcessingDelays(AnswerMargin()), 0
        self._waiting, self._is_busy = _Waiting(), False

    def connect(self, number: int, call: Call) -> None:
        """Begins to serve an edge."""
        self._calls[number] = call

    def serve(self, number: int, data: bytes) -> None:
        """Handles a message of an edge at its arrival."""
        message, call = pb.FromEdge.FromString(data), self._calls[number]
        if message.WhichOneof("message") == "packed":
            message, _ = self._unpackers[number].unpack(message.packed)
        kind = message.WhichOneof("message")
        if kind == "hello":
            self._welcome(number)
        elif kind == "heartbeat":
            now_ms = self._now_ms()
            call.send(
                pb.ToEdge(
                    time_echo=pb.TimeEcho(
                        edge_sent_at_ms=message.heartbeat.sent_at_ms,
                        center_received_at_ms=now_ms,
                        center_replied_at_ms=now_ms,
                        heartbeat_ms=LIMITS.heartbeat_ms,
                    )
                )
            )
        elif kind == "budget_report":
            _, report = read_budget_report(self._edges[number], message.budget_report)
            self._allocator.report(self._edges[number], report, self._now_ms())
        elif kind in ("frame", "frames"):
            frames = [message.frame] if kind == "frame" else message.frames.frames
            self._take(number, [Frame.from_wire(frame) for frame in frames])

    def _welcome(self, number: int) -> None:
        welcome = pb.Welcome(
            protocol=PROTOCOL,
            max_frame_bytes=LIMITS.max_frame_bytes,
            credit_bytes=LIMITS.credit_bytes,
            received_at_ms=self._now_ms(),
            window_log=MOST_WINDOW_LOG,
        )
        query = pb.Query(name=self.ref.name, version=1, spec=json.dumps(self._query.to_mapping()))
        self._calls[number].send(pb.ToEdge(welcome=welcome))
        self._calls[number].send(pb.ToEdge(queries=pb.Queries(version=1, queries=[query])))
        self._grant(number)

    async def allocate(self) -> None:
        """Divides the error budget at intervals, until cancelled."""
        window = self._query.window
        while True:
            await asyncio.sleep(GatewayBounds().poll_ms / 1000)
            ahead_ms = self._clock.to_event_ms(self._now_ms() + CLOCK_LEAD_MS)
            self._allocator.rebalance(self._now_ms(), window.slice_start(ahead_ms) + window.slice_ms)
            for number in self._calls:
                self._grant(number)

    def _grant(self, number: int) -> None:
        """Sends an edge its shares and the processing delay, if they differ from the last message."""
        grant = self._allocator.grants().get(self._edges[number])
        delay_ms = self._delay_ms if self._query.staleness_budget is not None else 0
        if (grant, delay_ms) == self._sent.get(self._edges[number], (None, 0)):
            return
        self._sent[self._edges[number]] = grant, delay_ms
        budget = pb.Budget(query=self.ref.name, query_version=1, center_ms=delay_ms)
        if grant is not None:
            budget.shares.update(grant.shares)
            budget.version, budget.from_ms = grant.version, grant.from_ms
        self._calls[number].send(pb.ToEdge(budget=budget))

    def _take(self, number: int, frames: list[Frame]) -> None:
        held_ms = round(1000 * self._times.commit_s)
        ack = pb.ToEdge(ack=pb.Ack(through=frames[-1].seq, held_ms=held_ms, received_at_ms=self._now_ms()))
        for frame in frames:
            body = frame.unpack()
            parts = [(p.slice_start_ms, GroupedAggregate.from_bytes(p.synopsis)) for p in body.partials]
            count = sum(len(part) for _, part in parts)
            self.entries += count
            merge = partial(self._merging.receive, number, body, parts)
            self._loop.call_later(self._times.commit_s, self._wait, merge, count, self._now_ms())
        self._loop.call_later(self._times.commit_s, self._calls[number].send, ack)

    def _wait(self, merge: Callable[[float], None], entries: int, arrival_ms: int) -> None:
        self._waiting.parts.append(merge)
        self._waiting.arrivals_ms.append(arrival_ms)
        self._waiting.entries += entries
        if not self._is_busy:
            self._begin_batch()

    def _begin_batch(self) -> None:
        batch, self._waiting = self._waiting, _Waiting()
        self._is_busy = bool(batch.parts)
        if not batch.parts:
            return
        took_s = self._times.batch_s + self._times.entry_s * batch.entries
        self._loop.call_later(took_s, self._end_batch, batch)

    def _end_batch(self, batch: _Waiting) -> None:
        now_ms = self._now_ms()
        self._delays.add(self.ref, (now_ms - at_ms for at_ms in batch.arrivals_ms), now_ms)
        self._delay_ms = self._delays.take_changes(now_ms).get(self.ref, self._delay_ms)
        seen_ms = now_ms + 1000.0 * self._times.answer_s
        at_ms = self._clock.event_origin_ms + (seen_ms - self._clock.wall_origin_ms) * self._clock.speed
        for merge in batch.parts:
            merge(at_ms)
        self._begin_batch()
