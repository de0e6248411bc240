"""`PullPlanner`: when the next pull is due, and under which conditions it is made from each query.

A pull is made at once for closed slices. Entries of open slices are sent if their gain is large enough
(`edge/cache/send_ranking.py`), once sending all pending values would take noticeable time. After a pull that sent
nothing the next pull is delayed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from edge.cache.send_queue import RERANK_FRACTION
from edge.core.events import PullEvent
from edge.core.least_bytes import MIN_DRAIN_MS
from edge.core.link_plan import MESSAGES_PER_FAIR, Demand
from edge.core.policies import PullConditions
from edge.core.query_pipeline import QueryPipeline
from edge.core.slices import CLOSING_FRAME_BYTES, LinkEstimate
from edge.core.streams import StreamState
from edgewater.base.streams import MIN_TIME_MS
from edgewater.wire import QueryRef

NO_DELAYS: Mapping[QueryRef, int] = MappingProxyType({})
MAX_FRAME_BYTES = 256 << 10
"""The approximate maximum size of the partials of one frame, before compression."""
BACKLOG_FRAME_BYTES, BACKLOG_FRAME_S = 16 << 10, 1.0  # limit: how long a frame occupies the link
"""A frame of closed slices may have this many bytes before compression, if the link carries it within this many
seconds."""
REPORT_DROPS_MS = 1_000  # limit: how late dropped records are stated
"""Wall time until records that came too late are reported, if no other frame has reported them before."""


class PullPlanner:
    """Plans the pulls of one edge.

    Nothing here is part of the core's state: it only determines when the next pull is made.

    Args:
        streams, queries: the core's own mappings, which it changes.
    """

    def __init__(self, streams: Mapping[str, StreamState], queries: Mapping[QueryRef, QueryPipeline]) -> None:
        self._streams, self._queries = streams, queries
        self._not_before_ms: dict[str, int] = {}  # event time per stream

    def _queries_of(self, stream: str) -> list[QueryPipeline]:
        return [p for p in self._queries.values() if p.spec.stream == stream]

    def next_pull_ms(
        self,
        bandwidth_bytes_s: float,
        now_ms: int,
        path_delay_ms: int = 0,
        processing_ms: Mapping[QueryRef, int] = NO_DELAYS,
        mid_bytes_s: float = 0.0,
    ) -> int | None:
        """Returns the wall time at which the next `PullEvent` is due; None: there is nothing to send.

        The arguments are as in the event.
        """
        pull = PullEvent(0, {}, bandwidth_bytes_s, path_delay_ms, processing_ms=processing_ms, mid_bytes_s=mid_bytes_s)
        dues: list[int] = []
        for name in self._streams:
            for pipeline in self._queries_of(name):
                dropped_ms = pipeline.store.losses.drops.since_ms
                if has_closed(pipeline):
                    dues.append(pipeline.bytes_due_ms(now_ms))
                elif dropped_ms is not None:
                    dues.append(max(dropped_ms + REPORT_DROPS_MS, pipeline.bytes_due_ms(now_ms)))
                if dues and dues[-1] <= now_ms:
                    return now_ms
            planned = self._next_report_ms(name, now_ms), self._early_due_ms(name, pull, now_ms)
            dues += [due_ms for due_ms in planned if due_ms is not None]
        return min(dues, default=None)

    def _next_report_ms(self, stream: str, now_ms: int) -> int | None:
        """Returns the wall time of the next arrival report of a query with an accuracy; None: there is none."""
        clock, dues = self._streams[stream].spec.clock, list[int]()
        for pipeline in self._queries_of(stream):
            monitor = pipeline.monitor
            if monitor is None or clock is None:
                continue
            offset = monitor.sampling.clock_offset_ms
            due_ms = monitor.next_due_ms(clock.to_event_ms(now_ms) - offset) + offset
            wall_ms = max(clock.to_wall_ms(due_ms), now_ms)
            dues.append(wall_ms + (clock.to_event_ms(wall_ms) < due_ms))  # a fast clock's rounding
        return min(dues, default=None)

    def _early_due_ms(self, stream: str, pull: PullEvent, now_ms: int) -> int | None:
        """Returns the earliest wall time at which entries of open slices have to be sent; None: never."""
        clock = self._streams[stream].spec.clock
        if clock is None:
            return None
        event_ms = clock.to_event_ms(now_ms)
        shares = self.shares(now_ms)
        dues = [
            p.shipper.early_due_ms(p.watermark_ms, event_ms, _estimate(pull, p, shares[p.ref]))
            for p in self._queries_of(stream)
        ]
        earliest = min((due for due in dues if due is not None), default=None)
        if earliest is None:
            return None
        return max(clock.to_wall_ms(max(math.ceil(earliest), self._not_before_ms.get(stream, MIN_TIME_MS))), now_ms)

    def defer(self, event: PullEvent) -> None:
        """Delays the next pull, after one that sent nothing, until the entries are ranked again."""
        for stream, after_ms in event.times_ms.items():
            ends = [p.spec.window.next_slice(after_ms) for p in self._queries_of(stream)]
            left_ms = max(min(ends, default=after_ms) - after_ms, 0)
            wait_ms = max(int(RERANK_FRACTION * left_ms), MIN_DRAIN_MS)
            self._not_before_ms[stream] = after_ms + wait_ms

    def event_times(self, now_ms: int) -> dict[str, int]:
        """Returns `PullEvent.times_ms` for a pull at `now_ms`."""
        clocks = {name: stream.spec.clock for name, stream in self._streams.items()}
        return {name: clock.to_event_ms(now_ms) for name, clock in clocks.items() if clock is not None}

    def shares(self, now_ms: int) -> dict[QueryRef, float]:
        """Returns the fraction of the link with which each query plans: in proportion to what it has to send.

        A query with a deadline sends after the close. So of a query without one, only closed slices compete with it.
        """
        queries = self._queries
        if len(queries) == 1:
            return dict.fromkeys(queries, 1.0)
        sizes = {ref: p.shipper.pending_bytes(p.byte_room(now_ms)) + CLOSING_FRAME_BYTES for ref, p in queries.items()}
        early = [p for p in queries.values() if p.store.policy.staleness_ms == math.inf]
        early_total = sum(sizes[p.ref] for p in early)
        timely_total = sum(sizes.values()) - early_total
        # The plan gives them no more while others wait (`LATE_QUERIES_SHARE`).
        closed = sum(p.shipper.closed_bytes(p.watermark_ms, timely_total, p.byte_room(now_ms)) for p in early)
        totals = dict.fromkeys(queries, timely_total + min(closed, timely_total)) | {p.ref: early_total for p in early}
        weight = MESSAGES_PER_FAIR * sum(p.spec.priority for p in queries.values())
        return {ref: max(sizes[ref] / totals[ref], p.spec.priority / weight) for ref, p in queries.items()}

    def demands(self, event: PullEvent, queries: Sequence[QueryPipeline]) -> list[Demand]:
        """Returns what the queries have to send of closed slices; a query's number is its position."""
        result = list[Demand]()
        for number, pipeline in enumerate(queries):
            estimate = _estimate(event, pipeline, 1.0)
            now_ms, room = _event_ms(pipeline, event), pipeline.byte_room(event.now_ms)
            shipper, watermark_ms, most = pipeline.shipper, pipeline.watermark_ms, event.capacity_bytes
            result += shipper.demands(number, watermark_ms, now_ms, estimate, most, room)
        return result

    def conditions(
        self, pipeline: QueryPipeline, event: PullEvent, room_bytes: int, share: float, first_groups: int | None = None
    ) -> PullConditions:
        """Returns the conditions of a pull from one query.

        Args:
            room_bytes, first_groups: as in `Turn`.
            share: as `shares` returned it.
        """
        stream = pipeline.spec.stream
        return PullConditions(
            min(max(room_bytes, self._backlog_frame_bytes(pipeline, event)), MAX_FRAME_BYTES),
            event.capacity_bytes,
            pipeline.watermark_ms,
            _event_ms(pipeline, event),
            _estimate(event, pipeline, share),
            stream in event.unread,
            _drops_are_due(pipeline, event),
            first_groups,
            pipeline.byte_room(event.now_ms),
        )

    def _backlog_frame_bytes(self, pipeline: QueryPipeline, event: PullEvent) -> int:
        """Returns the size of a frame of closed slices; 0: the size that the link allows.

        Another query with a deadline must not wait for a large frame.
        """
        others = (p for p in self._queries.values() if p is not pipeline)
        if any(p.store.policy.staleness_ms < math.inf for p in others):
            return 0
        largest = min(int(BACKLOG_FRAME_S * (event.mid_bytes_s or event.bandwidth_bytes_s)), BACKLOG_FRAME_BYTES)
        most = pipeline.store.policy.closed_frame_bytes(largest)
        room = pipeline.byte_room(event.now_ms)
        return min(most, pipeline.shipper.closed_bytes(pipeline.watermark_ms, most, room))


def _estimate(pull: PullEvent, pipeline: QueryPipeline, share: float) -> LinkEstimate:
    """Returns a query's share of the link in the stream's event time, in which slices end."""
    clock = pipeline.stream.spec.clock
    speed = clock.speed if clock is not None else 1.0
    delay_ms = pull.path_delay_ms + pull.processing_ms.get(pipeline.ref, 0)
    rates = pull.bandwidth_bytes_s, pull.mid_bytes_s or pull.bandwidth_bytes_s
    low, mid = (share * rate / 1000.0 / speed for rate in rates)
    return LinkEstimate(low, delay_ms * speed, speed, mid)


def _event_ms(pipeline: QueryPipeline, event: PullEvent) -> int:
    """Returns the event time of a pull; the minimum time in a stream without a clock."""
    return event.times_ms.get(pipeline.spec.stream, MIN_TIME_MS)


def has_closed(pipeline: QueryPipeline) -> bool:
    """Returns whether a query has closed slices to send or to report, or losses of input to state."""
    return pipeline.shipper.has_unreported_closes(pipeline.watermark_ms)


def _drops_are_due(pipeline: QueryPipeline, event: PullEvent) -> bool:
    """Returns whether the first late record came long enough ago; always true in a stream without a clock."""
    due_ms, stream = pipeline.store.losses.drops.since_ms, pipeline.spec.stream
    clock = pipeline.stream.spec.clock
    if due_ms is None or clock is None or stream not in event.times_ms:
        return True
    return clock.to_wall_ms(event.times_ms[stream]) >= due_ms + REPORT_DROPS_MS
