"""When an edge is to sample, at which rate, and by how much its clock is off. Pure.

Counting, adding up and taking means cost less than drawing a sample would save, so a query with an accuracy is not
sampled as long as edges and links keep up. One that does not keep up processes what the contract needs and no more.
Where the measure itself is expensive, that is all that is ever processed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from edgewater.query import QuerySpec
from edgewater.streams import EdgeId
from edgewater.wire import uplink_pb2 as pb
from edgewater.wire.frames import QueryRef, SamplingReason

OVERLOADED_S, RELIEVED_S = 2.0, 0.5
"""Time that the backlog would take the link: above the one an edge samples, until it is below the other."""
BUSY_SHARE, CALM_SHARE = 0.9, 0.6
"""Parts of time that an edge does not wait for input: above the one it is overloaded, until it is below the other."""
IN_A_ROW = 3
"""Heartbeats that must agree: a moment of much work is none of too much."""
SOON = 30
"""Heartbeats after a relief within which a new overload says that it was sampling that brought the relief."""
MOST_IN_A_ROW = IN_A_ROW << 6
RESERVE = 1.25
"""By how much the sample is larger than planned: what was passed over cannot be added afterwards."""
RATES_EVERY_MS = 5_000
"""How often, at most, the rates that are needed are written down for the gateways."""
WORTH_SAYING = 0.1
CLOCK_OFFSET_NOISE_MS = 20.0
"""Less than this is what a session measures between equal clocks on a busy link."""
HEARTBEATS = 5


@dataclass(frozen=True, slots=True)
class SamplingRequirement:
    """What one edge is to be told of a query with an accuracy.

    Attributes:
        needed: the rate at which its records would have to be processed for the contract.
        always: the measure is expensive: no more is processed than needed, whether the edge keeps up or not.
    """

    query: QueryRef
    needed: float
    always: bool = False


def needed_rate(spec: QuerySpec, planned: float) -> float:
    """The rate below which the contract would be lost, from the one that the watermark plans.

    1 where a sample would make other numbers of the answer wrong, or save nothing: of a count all is known.
    """
    if spec.accuracy is None or spec.accuracy.kind == "count" or len(spec.measures) > 1:
        return 1.0
    return min(1.0, RESERVE * planned)


def is_expensive(spec: QuerySpec) -> bool:
    """Whether a sample pays also where edges and links keep up: the measure that the accuracy is about costs much."""
    return spec.accuracy is not None and any(m.is_expensive for m in spec.measures if m.name == spec.accuracy.measure)


class ProcessorLoadDetector:
    """Whether an edge's processor keeps up, heartbeat by heartbeat.

    Sampling itself lowers the share by which that is judged. So after a relief that did not last, the next one takes
    twice as many calm heartbeats, and an edge that is overloaded for good comes to be asked once in some minutes.
    """

    def __init__(self) -> None:
        self.overloaded = False
        self._agreeing = 0  # heartbeats in a row that speak for a change
        self._since_relief: int | None = None
        self._calm_needed = IN_A_ROW

    def on_heartbeat(self, busy_share: float) -> None:
        """Args: busy_share: of the time since the last heartbeat; 0 of an edge that does not say."""
        if self._since_relief is not None:
            self._since_relief += 1
        speaks = busy_share < CALM_SHARE if self.overloaded else busy_share > BUSY_SHARE
        self._agreeing = self._agreeing + 1 if speaks else 0
        if self._agreeing < (self._calm_needed if self.overloaded else IN_A_ROW):
            return
        self._agreeing, self.overloaded = 0, not self.overloaded
        if not self.overloaded:
            self._since_relief = 0
            return
        again = self._since_relief is not None and self._since_relief <= SOON
        self._calm_needed = min(2 * self._calm_needed, MOST_IN_A_ROW) if again else IN_A_ROW


class EdgeSamplingController:
    """Decides for one edge in one session, heartbeat by heartbeat."""

    def __init__(self) -> None:
        self._link_overloaded = False
        self._processor = ProcessorLoadDetector()
        self._offsets: deque[float] = deque(maxlen=HEARTBEATS)
        self._told: dict[QueryRef, tuple[float, float, SamplingReason]] = {}

    def on_heartbeat(
        self,
        backlog_bytes: int,
        bandwidth_bytes_s: float,
        clock_offset_ms: float,
        orders: tuple[SamplingRequirement, ...],
        busy_share: float = 0.0,
    ) -> list[pb.Sampling]:
        """The words that are news to the edge; of each query the first is said whatever it is."""
        behind_s = backlog_bytes / max(bandwidth_bytes_s, 1.0)
        self._link_overloaded = behind_s > (RELIEVED_S if self._link_overloaded else OVERLOADED_S)
        self._processor.on_heartbeat(busy_share)
        self._offsets.append(clock_offset_ms)
        offset = median(self._offsets)
        news = []
        for order in orders:
            reason = self._reason(order)
            rate = order.needed if reason else 1.0
            known = self._told.get(order.query)
            if known is not None and known[2] is reason and not _differs(known[:2], rate, offset):
                continue
            said = offset if abs(offset) > CLOCK_OFFSET_NOISE_MS else 0.0
            self._told[order.query] = (rate, said, reason)
            ref, why = order.query, pb.Sampling.Reason.ValueType(reason)
            word = pb.Sampling(query=ref.name, query_version=ref.version, rate=rate, clock_offset_ms=said, reason=why)
            news.append(word)
        live = {order.query for order in orders}
        self._told = {ref: word for ref, word in self._told.items() if ref in live}
        return news

    def _reason(self, order: SamplingRequirement) -> SamplingReason:
        if order.needed >= 1.0:
            return SamplingReason.NONE
        if order.always:
            return SamplingReason.MEASURE
        if self._processor.overloaded:
            return SamplingReason.PROCESSOR
        return SamplingReason.LINK if self._link_overloaded else SamplingReason.NONE


def _differs(known: tuple[float, float], rate: float, offset_ms: float) -> bool:
    told_rate, told_offset = known
    return abs(rate - told_rate) > WORTH_SAYING * told_rate or (rate == 1.0) != (told_rate == 1.0) or (
        abs(offset_ms - told_offset) > CLOCK_OFFSET_NOISE_MS
    )  # fmt: skip


def rates_differ(said: Mapping[EdgeId, float], now: Mapping[EdgeId, float]) -> bool:
    """Whether needed rates have changed enough to be written down again."""
    return said.keys() != now.keys() or any(abs(now[e] - said[e]) > WORTH_SAYING * max(said[e], 0.01) for e in now)
