"""An edge with many shops, whose link pulls a message whenever the message before has passed."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from edge.core.events import Configured, Ingested, PullEvent
from edge.core.streams import StreamSpec
from edgewater.base.streams import TIME_COLUMN, StreamClock
from edgewater.model.query import QuerySpec
from edgewater.synopses import GroupedAggregate
from edgewater.wire import Frame, FrameBody, QueryRef
from tests.cores import open_core, pulled

WINDOW_MS, BUDGET_MS, GROUPS = 10_000, 2_000, 1_000


def query(name: str, **parts: Any) -> QuerySpec:
    return QuerySpec.from_mapping(
        {
            "name": name, "from": "sales", "group_by": ["shop"], "measures": {"amount": "sum(amount)"},
            "window": {"tumbling": "10s"}, "budget": {"staleness": "2s"}, "lateness": "1h", **parts,
        }
    )  # fmt: skip


class Shops:
    """An edge and its link, in virtual time. `messages` has what passed the link, with its times."""

    def __init__(self, *specs: QuerySpec, rate: float = 4_096.0, capacity: int = 1_500, max_frames: int = 64) -> None:
        columns = {"shop": pa.string(), "amount": pa.int64()}
        self.core = open_core(StreamSpec(columns, clock=StreamClock(0, 0, 1.0)), stream="sales", source="till")
        self.core.handle(Configured(tuple((QueryRef(spec.name, 1), spec) for spec in specs)))
        self.rate, self.capacity, self.max_frames = rate, capacity, max_frames
        self.messages: list[tuple[int, list[Frame]]] = []

    def sell(self, *windows: int, arrival_ms: int | None = None, shops: int = GROUPS) -> None:
        """Sells in each shop in these windows, shop k for 1 + k."""
        for window in windows:
            names = [f"shop{k}" for k in range(shops)]
            self.ingest(window * WINDOW_MS + 1, names, list(range(1, shops + 1)), arrival_ms)

    def sell_out(self, *windows: int, shops: int = GROUPS) -> None:
        """Sells in these windows, and ends the last of them."""
        self.sell(*windows, shops=shops)
        self.end(windows[-1])

    def end(self, window: int) -> None:
        """Brings the watermark to the end of a window."""
        self.ingest((window + 1) * WINDOW_MS, ["next"], [1])

    def ingest(self, at_ms: int, shops: list[str], amounts: list[int], arrival_ms: int | None = None) -> None:
        times = pa.array([at_ms] * len(shops), pa.int64())
        batch = pa.record_batch({"shop": shops, "amount": pa.array(amounts, pa.int64()), TIME_COLUMN: times})
        self.core.handle(Ingested("sales", "till", batch, at_ms if arrival_ms is None else arrival_ms))

    def pull(
        self, now_ms: int, capacity: int | None = None, rate: float | None = None, path_delay_ms: int = 0
    ) -> list[Frame]:
        rate = self.rate if rate is None else rate
        event = PullEvent(capacity or self.capacity, {"sales": now_ms}, rate, path_delay_ms, max_frames=self.max_frames)
        frames = pulled(self.core, event)
        if frames:
            self.messages.append((now_ms, frames))
        return frames

    def send(self, from_ms: int, to_ms: int, path_delay_ms: int = 0) -> None:
        now_ms = from_ms
        while now_ms < to_ms:
            size = sum(frame.plain_wire_bytes for frame in self.pull(now_ms, path_delay_ms=path_delay_ms))
            now_ms += max(round(1000 * size / self.rate), 20)

    def timed(self, name: str = "q") -> list[tuple[int, FrameBody]]:
        return [(at, f.unpack()) for at, frames in self.messages for f in frames if f.query.name == name]

    def bodies(self, name: str = "q") -> list[FrameBody]:
        return [body for _, body in self.timed(name)]

    def sent(self, window: int) -> list[str]:
        """Returns the shops of a window that the query `q` has sent, in order."""
        parts = [p for body in self.bodies() for p in body.partials if p.slice_start_ms == window * WINDOW_MS]
        return [row for p in parts for row in GroupedAggregate.from_bytes(p.synopsis).rows()[0].to_pylist()]

    def closed_ms(self, window: int) -> int:
        """Returns when the frame with the last close of a window was built."""
        starts = [(at, {c.slice_start_ms for c in body.closes}) for at, body in self.timed()]
        return [at for at, closed in starts if window * WINDOW_MS in closed][-1]


def groups(body: FrameBody, start: int = 0) -> int:
    return sum(len(GroupedAggregate.from_bytes(p.synopsis)) for p in body.partials if p.slice_start_ms == start)
