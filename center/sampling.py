"""When an edge is to sample, at which rate, and by how much its clock is off. Pure.

Counting, adding up and taking means cost less than drawing a sample would save, so a query with an accuracy is not
sampled as long as edges and links keep up. One that does not keep up processes what the contract needs and no more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from edgewater.query import QuerySpec
from edgewater.streams import EdgeId
from edgewater.watermarks.watermark import Policy
from edgewater.wire import uplink_pb2 as pb
from edgewater.wire.frames import QueryRef

OVERLOADED_S, RELIEVED_S = 2.0, 0.5
"""Time that the backlog would take the link: above the one an edge samples, until it is below the other."""
RESERVE = 1.25
"""By how much the sample is larger than planned: what was passed over cannot be added afterwards."""
WORTH_SAYING = 0.1
CLOCKS_AGREE_MS = 20.0
"""Less than this is what a session measures between equal clocks on a busy link."""
HEARTBEATS = 5


@dataclass(frozen=True, slots=True)
class SamplingOrder:
    """What one edge is to be told of a query with an accuracy.

    Attributes:
        needed: the rate at which its records would have to be processed for the contract.
    """

    query: QueryRef
    needed: float


def needed_rate(spec: QuerySpec, planned: float) -> float:
    """The rate below which the contract would be lost, from the one that the watermark plans to begin with.

    1 where a sample would make other numbers of the answer wrong, or save nothing: of a count all is known.
    """
    if spec.accuracy is None or spec.accuracy.kind == "count" or len(spec.measures) > 1:
        return 1.0
    return min(1.0, RESERVE * planned / Policy().eager)


class EdgeSampling:
    """Decides for one edge in one session, heartbeat by heartbeat."""

    def __init__(self) -> None:
        self._overloaded = False
        self._offsets: deque[float] = deque(maxlen=HEARTBEATS)
        self._told: dict[QueryRef, tuple[float, float]] = {}

    def on_heartbeat(
        self, backlog_bytes: int, bandwidth_bytes_s: float, clock_offset_ms: float, orders: tuple[SamplingOrder, ...]
    ) -> list[pb.Sampling]:
        """The words that are news to the edge; of each query the first is said whatever it is."""
        behind_s = backlog_bytes / max(bandwidth_bytes_s, 1.0)
        self._overloaded = behind_s > (RELIEVED_S if self._overloaded else OVERLOADED_S)
        self._offsets.append(clock_offset_ms)
        offset = median(self._offsets)
        news = []
        for order in orders:
            rate = order.needed if self._overloaded else 1.0
            known = self._told.get(order.query)
            if known is not None and not _differs(known, rate, offset):
                continue
            said = offset if abs(offset) > CLOCKS_AGREE_MS else 0.0
            self._told[order.query] = (rate, said)
            ref = order.query
            news.append(pb.Sampling(query=ref.name, query_version=ref.version, rate=rate, clock_offset_ms=said))
        live = {order.query for order in orders}
        self._told = {ref: word for ref, word in self._told.items() if ref in live}
        return news


def _differs(known: tuple[float, float], rate: float, offset_ms: float) -> bool:
    told_rate, told_offset = known
    return abs(rate - told_rate) > WORTH_SAYING * told_rate or (rate == 1.0) != (told_rate == 1.0) or (
        abs(offset_ms - told_offset) > CLOCKS_AGREE_MS
    )  # fmt: skip


def rates_differ(said: Mapping[EdgeId, float], now: Mapping[EdgeId, float]) -> bool:
    """Whether needed rates have changed enough to be written down again."""
    return said.keys() != now.keys() or any(abs(now[e] - said[e]) > WORTH_SAYING * max(said[e], 0.01) for e in now)
