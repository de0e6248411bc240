"""The size of an update on the wire, measured on the frames that a production edge builds from the trace."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from edge.core import (
    MAX_FRAME_BYTES,
    Acked,
    Configured,
    EdgeCore,
    FrameBuilt,
    Ingested,
    PullEvent,
    SourcesOpened,
    StreamSpec,
    TickEvent,
)
from edge.uplink.flow_control import PackingEstimator
from edge.uplink.uplink_session import WIDE_LEVEL
from edgewater.model.query import QuerySpec
from edgewater.model.streams import LIVE
from edgewater.synopses import GroupedAggregate
from edgewater.wire import QueryRef, link_bytes
from edgewater.wire import uplink_pb2 as pb
from edgewater.wire.session_stream import MOST_WINDOW_LOG, SessionPacker
from sim.budgets.edges import COARSEST, MIN_FRAME_BYTES
from sim.budgets.trace import Trace
from sim.plan.trace import PlacedTrace


class _Meter:
    """One edge with the frame sizes that an agent uses on a link of this bandwidth."""

    def __init__(self, part: Trace, query: QuerySpec, bandwidth_bytes_s: int) -> None:
        self._part, self._stream, self._bandwidth = part, query.stream, bandwidth_bytes_s
        self._capacity = min(max(MIN_FRAME_BYTES, bandwidth_bytes_s), MAX_FRAME_BYTES)
        self._row = 0
        self.shipped_bytes = self.entries = 0
        self._packer, self._packing = SessionPacker(MOST_WINDOW_LOG, WIDE_LEVEL), PackingEstimator()
        self._core = EdgeCore({query.stream: StreamSpec(part.columns, LIVE, idle_ms=0)}, source=0)
        self._core.handle(SourcesOpened(((query.stream, "trace"),)))
        self._core.handle(Configured(((QueryRef(query.name, 1), query),)))

    def ingest(self, until_ms: int) -> None:
        row = int(np.searchsorted(self._part.times_ms, until_ms, "right"))
        if row > self._row:
            batch = self._part.batch.slice(self._row, row - self._row)
            self._core.handle(Ingested(self._stream, "trace", batch, until_ms))
            self._row = row

    def end(self, end_ms: int) -> None:
        self._core.handle(TickEvent(end_ms))

    def pull(self, now_ms: int) -> int:
        """Returns the wire bytes of the next frame; 0 if no frame is due."""
        capacity, bandwidth = (size / self._packing.fraction for size in (self._capacity, self._bandwidth))
        due_ms = self._core.pulls.next_pull_ms(bandwidth, now_ms)
        if due_ms is None or due_ms > now_ms:
            return 0
        event = PullEvent(int(capacity), self._core.pulls.event_times(now_ms), bandwidth)
        frames = [e.frame for e in self._core.handle(event) if isinstance(e, FrameBuilt)]
        for frame in frames:
            partials = frame.unpack().partials
            self.entries += sum(len(GroupedAggregate.from_bytes(p.synopsis)) for p in partials)
            self._core.handle(Acked(frame.seq))
        messages = [self._packer.pack(pb.FromEdge(frame=f.plain().to_wire())) for f in frames]
        size = sum(link_bytes(message.ByteSize()) for message in messages)
        self._packing.add(sum(f.plain_wire_bytes for f in frames), size)
        self.shipped_bytes += size
        return size


def update_bytes(trace: PlacedTrace, query: QuerySpec, edges: int, bandwidth_bytes_s: int) -> float:
    """Returns the bytes per entry when the busiest edge ships its first window exactly over such a link."""
    part = trace.split(edges)[int(np.bincount(trace.home, minlength=edges).argmax())]
    start = query.window.slice_start(int(part.times_ms[0]))
    end = start + query.window.longest_ms
    meter = _Meter(part, replace(query, budget=None), bandwidth_bytes_s)
    step, now = max(1.0, COARSEST * (end - start)), float(start)
    while now < end:
        meter.ingest(int(now))
        now += max(step, meter.pull(int(now)) / bandwidth_bytes_s * 1000.0)
    meter.ingest(end - 1)
    meter.end(end)
    while meter.pull(end):
        pass
    return round(meter.shipped_bytes / max(meter.entries, 1), 1)
