"""An edge that sends prepared frames through the real uplink, and records when each was acknowledged."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from edge.process import now_ms
from edge.uplink import LinkForecast, LinkLimits, Uplink, accepted
from edge.uplink.outbox import MAX_PULLED_FRAMES
from edgewater.model.query import QuerySpec
from edgewater.model.window_range import NO_BORDERS, WindowRange
from edgewater.synopses import CountStack, GroupedAggregate
from edgewater.synopses.exact.aggregates import IntegerSumStack
from edgewater.wire import MIN_PROTOCOL, PROTOCOL, Frame, FrameBody, Partial, QueryRef, SliceClose
from edgewater.wire import uplink_pb2 as pb

EDGE = "load"
STREAM = "load"
WINDOW_MS = 1000


def spec(name: str, edges: Sequence[str] = (EDGE,)) -> dict[str, object]:
    return {
        "name": name,
        "from": STREAM,
        "group_by": ["key"],
        "measures": {"n": "count()", "total": "sum(value)"},
        "window": {"tumbling": "1s"},
        "edges": list(edges),
    }


def synopsis(groups: int, seed: int) -> bytes:
    """Returns a partial with this number of groups; about 4 KB for 170 groups."""
    rng = np.random.default_rng(seed)
    aggregate = GroupedAggregate({"key": pa.string()}, {"n": CountStack(), "total": IntegerSumStack()})
    keys = pa.array([f"key-{i:05d}" for i in rng.permutation(groups)])
    values = pa.array(rng.integers(0, 1 << 40, groups))
    aggregate.update([keys], {"n": None, "total": values}, groups)
    return aggregate.to_bytes()


class SyntheticEdge:
    """An `UplinkEndpoint` that sends the frames of `queue`.

    Attributes:
        acked_at: time of the acknowledgement of each frame.
        refused: frames that the center has refused, by reason.
    """

    def __init__(self, address: str, edge: str = EDGE, stream: str = STREAM) -> None:
        self.edge, self.stream = edge, stream
        self.refused = Counter[str]()
        self.queue: asyncio.Queue[Frame] = asyncio.Queue()
        self.acked_at: dict[int, float] = {}
        self.queries: dict[str, QueryRef] = {}
        self.next_seq = 1
        self.incarnation = uuid.uuid4().hex
        self._unacked: dict[int, Frame] = {}
        self.uplink = Uplink(
            address, self, token=None, tls=None, limits=LinkLimits(), now_ms=now_ms, monotonic=time.monotonic
        )

    def put(self, query: str, slice_start_ms: int, synopses: Sequence[bytes]) -> int:
        """Queues a frame that closes one window of a query; returns its seq."""
        body = FrameBody(
            slice_start_ms + WINDOW_MS,
            tuple(Partial(slice_start_ms, data) for data in synopses),
            (SliceClose(slice_start_ms, len(synopses), 0),),
        )
        return self.put_body(query, body)

    def put_body(self, query: str, body: FrameBody) -> int:
        """Queues a frame of a query; returns its seq."""
        frame = self.pack(query, body)
        self.queue.put_nowait(frame)
        return frame.seq

    def pack(self, query: str, body: FrameBody) -> Frame:
        """Returns the edge's next frame, which the caller queues."""
        frame = Frame.pack(self.next_seq, self.queries[query], body)
        self.next_seq += 1
        return frame

    def unacknowledged(self, after: int | None) -> Iterable[Frame]:
        return [f for seq, f in sorted(self._unacked.items()) if after is None or seq > after]

    async def take(self, capacity_bytes: int) -> Sequence[Frame]:
        frames = [await self.queue.get()]
        size = frames[0].wire_bytes
        while size < capacity_bytes and len(frames) < MAX_PULLED_FRAMES and not self.queue.empty():
            frames.append(self.queue.get_nowait())
            size += frames[-1].wire_bytes
        self._unacked |= {frame.seq: frame for frame in frames}
        return frames

    def on_welcome(self, acked_through: int | None) -> None:
        self.on_ack(acked_through or 0)

    def on_ack(self, through: int) -> None:
        now = time.perf_counter()
        for seq in [s for s in self._unacked if s <= through]:
            del self._unacked[seq]
            self.acked_at[seq] = now

    def on_queries(
        self, queries: Sequence[tuple[QueryRef, QuerySpec]], windows: Mapping[QueryRef, WindowRange] = NO_BORDERS
    ) -> Sequence[pb.QueryStatus]:
        self.queries = {ref.name: ref for ref, _ in queries}
        return [accepted(ref) for ref, _ in queries]

    def on_budget(self, budget: pb.Budget) -> None:
        return

    def on_sampling(self, sampling: pb.Sampling) -> None:
        return

    def on_refused(self, query: QueryRef, reason: str, message: str, frames: int) -> None:
        self.refused[reason] += frames

    async def budget_reports(self, *, all_queries: bool) -> Sequence[pb.BudgetReport]:
        return []

    def on_link(self, forecast: Callable[[], LinkForecast]) -> None:
        return

    def table_rows(self) -> Sequence[str]:
        return ()

    def may_omit(self) -> bool:
        return False

    def hello(self) -> pb.Hello:
        columns = [pb.Stream.Column(name="key", type="string"), pb.Stream.Column(name="value", type="int64")]
        return pb.Hello(
            protocol_min=MIN_PROTOCOL, protocol_max=PROTOCOL, edge=self.edge, incarnation=self.incarnation,
            streams=[pb.Stream(name=self.stream, columns=columns)], oldest_seq=1,
            next_seq=self.next_seq, sent_at_ms=now_ms(),
        )  # fmt: skip

    def link_report(self, low_bytes_s: float, high_bytes_s: float, *, all_queries: bool) -> pb.LinkReport | None:
        return None

    def has_news(self) -> bool:
        return False

    def heartbeat(self) -> pb.Heartbeat:
        return pb.Heartbeat(sent_at_ms=now_ms())
