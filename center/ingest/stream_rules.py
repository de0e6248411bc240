"""The rules for streams: which clock a stream has, and how far event times may be ahead of the clock. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from center.config import StreamSection
from edgewater.base.errors import ProtocolError
from edgewater.base.streams import LIVE, StreamClock
from edgewater.base.timestamps import rfc3339
from edgewater.model.edge_records import StreamRecord

CLOCK_LEAD_MS = 60_000  # limit: how far a wrong clock of an edge counts
"""Wall time by which an edge's clock may be ahead of the center's."""
_DEFAULT = StreamSection()


class StreamRules:
    """The rules of all streams.

    Args:
        streams: the configuration, by stream. Other streams have the defaults.
        edges_set_clocks: streams without a configured `replay` may have any clock that an edge states.
    """

    def __init__(self, streams: Mapping[str, StreamSection], *, edges_set_clocks: bool) -> None:
        self._streams = streams
        self._edges_set_clocks = edges_set_clocks

    def require_clock(self, stream: StreamRecord) -> None:
        """Raises ProtocolError if an edge serves the stream with another clock than the configured clock."""
        replay = self._section(stream.name).replay
        if replay == "edges" or (replay is None and self._edges_set_clocks):
            return
        right = LIVE if replay is None else StreamClock(replay.start, replay.at, replay.speed)
        if stream.clock == right or (stream.clock.is_live and right.is_live):
            return
        raise ProtocolError(
            f"Hello: stream {stream.name} is {_described(stream.clock)}; expected {_described(right)}:"
            f" streams.{stream.name}.replay in the center's configuration is {'not given' if replay is None else 'so'}"
        )

    def latest_ms(self, stream: StreamRecord, now_ms: int) -> int:
        """The latest event time that an edge can have read by now."""
        return stream.clock.to_event_ms(now_ms + CLOCK_LEAD_MS) + self._section(stream.name).ahead_ms

    def max_offset_ms(self, streams: Iterable[StreamRecord]) -> int:
        """Returns how far the clock of an edge that serves these streams may be ahead of the center's clock.

        If it is further ahead, the sessions of the edge end, and its frames stay in its journal until one of the clocks
        is set. So frames are refused for good only if their event times are in the future by the edge's clock, too.
        """
        return CLOCK_LEAD_MS + max((self._section(s.name).ahead_ms for s in streams), default=0)

    def _section(self, stream: str) -> StreamSection:
        return self._streams.get(stream, _DEFAULT)


def _described(clock: StreamClock) -> str:
    if clock.is_live:
        return "live, without a replay"
    start, at = rfc3339(clock.event_origin_ms), rfc3339(clock.wall_origin_ms)
    return f"a replay {{speed: {clock.speed:g}, start: {start}, at: {at}}}"
