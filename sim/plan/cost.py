"""The sizes of an update and of a window on the wire, measured on frames that a production edge builds from a trace."""

from __future__ import annotations

from dataclasses import replace

from edge.core.events import PullEvent
from edge.core.pull_planner import MAX_FRAME_BYTES
from edge.uplink.flow_control import PackingEstimator
from edge.uplink.uplink_session import WIDE_LEVEL
from edgewater.model.query import QuerySpec
from edgewater.synopses import GroupedAggregate
from edgewater.wire import link_bytes
from edgewater.wire import uplink_pb2 as pb
from edgewater.wire.session_stream import MOST_WINDOW_LOG, SessionPacker
from sim.budgets.edges import COARSEST, MIN_FRAME_BYTES, TracedEdge
from sim.budgets.trace import Trace


class _Meter(TracedEdge):
    """One edge with the frame sizes that an agent uses on a link of this bandwidth."""

    def __init__(self, part: Trace, query: QuerySpec, bandwidth_bytes_s: int) -> None:
        super().__init__(part, query)
        self._bandwidth = bandwidth_bytes_s
        self._capacity = min(max(MIN_FRAME_BYTES, bandwidth_bytes_s), MAX_FRAME_BYTES)
        self.shipped_bytes = self.entries = 0
        self._packer, self._packing = SessionPacker(MOST_WINDOW_LOG, WIDE_LEVEL), PackingEstimator()

    def pull(self, now_ms: int) -> int:
        """Returns the wire bytes of the next frame; 0 if no frame is due."""
        capacity, bandwidth = (size / self._packing.fraction for size in (self._capacity, self._bandwidth))
        due_ms = self.core.pulls.next_pull_ms(bandwidth, now_ms)
        if due_ms is None or due_ms > now_ms:
            return 0
        event = PullEvent(int(capacity), self.core.pulls.event_times(now_ms), bandwidth)
        frames = self.frames(event)
        for frame in frames:
            partials = frame.unpack().partials
            self.entries += sum(len(GroupedAggregate.from_bytes(p.synopsis)) for p in partials)
        plain = (pb.FromEdge(frame=f.plain().to_wire()).SerializeToString() for f in frames)
        size = sum(link_bytes(self._packer.pack(message)[1]) for message in plain)
        self._packing.add(sum(f.plain_wire_bytes for f in frames), size)
        self.shipped_bytes += size
        return size


def update_bytes(part: Trace, query: QuerySpec, bandwidth_bytes_s: int) -> float:
    """Returns the bytes per entry when an edge ships its first window exactly over such a link."""
    meter = _first_window(part, query, bandwidth_bytes_s)
    return round(meter.shipped_bytes / max(meter.entries, 1), 1)


def window_bytes(part: Trace, query: QuerySpec, bandwidth_bytes_s: int) -> float:
    """Returns the bytes that an edge ships of its first window exactly. An error budget needs no more."""
    return float(_first_window(part, query, bandwidth_bytes_s).shipped_bytes)


def _first_window(part: Trace, query: QuerySpec, bandwidth_bytes_s: int) -> _Meter:
    start = query.window.slice_start(int(part.times_ms[0]))
    end = start + query.window.longest_ms
    meter = _Meter(part, replace(query, budget=None), bandwidth_bytes_s)
    step, now = max(1.0, COARSEST * (end - start)), float(start)
    while now < end:
        meter.ingest(int(now))
        now += max(step, meter.pull(int(now)) / bandwidth_bytes_s * 1000.0)
    meter.end(end)
    while meter.pull(end):
        pass
    return meter
