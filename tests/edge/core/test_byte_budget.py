"""A byte budget is never exceeded; windows close in time, with the largest errors sent, and the rest stated."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from edge.core import BudgetSet, Configured, EdgeCore, FrameBuilt, Ingested, PullEvent, SourcesOpened, StreamSpec
from edgewater.model.byte_budget import close_bytes
from edgewater.model.query import QuerySpec
from edgewater.model.streams import TIME_COLUMN, StreamClock
from edgewater.synopses import GroupedAggregate
from edgewater.wire import FrameBody, QueryRef, link_bytes

MINUTE_MS, HOUR_MS, GROUPS, AMOUNT = 60_000, 3_600_000, 300, 30_000
BEGIN_MS = 470_000 * HOUR_MS
REF = QueryRef("q", 1)
COUNTS = np.maximum(200 // np.arange(1, GROUPS + 1), 1)
ALONE: dict[str, Any] = {"bytes": f"{AMOUNT}B per hour"}


class Edge:
    """An edge that pulls when a window ends. Group k has `COUNTS[k]` records in each window."""

    def __init__(self, budget: dict[str, Any], now_ms: int = BEGIN_MS, **parts: Any) -> None:
        query: dict[str, Any] = {
            "name": "q", "from": "s", "group_by": ["k"], "measures": {"n": "count()"},
            "window": {"tumbling": "1m"}, "budget": budget, **parts,
        }  # fmt: skip
        self.core = EdgeCore({"s": StreamSpec({"k": pa.string()}, clock=StreamClock(0, 0, 1.0))})
        self.core.handle(SourcesOpened((("s", "f"),)))
        self.core.handle(Configured(((REF, QuerySpec.from_mapping(query)),), now_ms=now_ms))
        self.now_ms, self.used = now_ms, Counter[int]()
        self.bodies: list[tuple[int, FrameBody]] = []

    def window(self, counts: np.ndarray[Any, Any] = COUNTS) -> None:
        """Reads the records of a window, ends it, and sends."""
        keys = pa.array([f"group{k}" for k in np.repeat(np.arange(len(counts)), counts)])
        self._ingest(keys, self.now_ms + 1)
        self.now_ms += MINUTE_MS
        self._ingest(pa.array(["group0"]), self.now_ms)
        while self.pull():
            pass

    def _ingest(self, keys: pa.Array, at_ms: int) -> None:
        batch = pa.record_batch({"k": keys, TIME_COLUMN: pa.array([at_ms] * len(keys), pa.int64())})
        self.core.handle(Ingested("s", "f", batch, at_ms))

    def pull(self, now_ms: int | None = None) -> bool:
        now_ms = self.now_ms if now_ms is None else now_ms
        built = self.core.handle(PullEvent(8 << 10, {"s": self.now_ms}, 1e5, now_ms=now_ms))
        frames = [e.frame for e in built if isinstance(e, FrameBuilt)]
        for frame in frames:
            self.used[now_ms // HOUR_MS] += link_bytes(frame.wire_bytes)
            self.bodies.append((now_ms, frame.unpack()))
        return bool(frames)

    def sent(self, start_ms: int) -> dict[str, float]:
        parts = [p.synopsis for _, b in self.bodies for p in b.partials if p.slice_start_ms == start_ms]
        if not parts:
            return {}
        merged = GroupedAggregate.from_bytes(GroupedAggregate.merge_bytes(parts))
        return dict(zip(merged.rows()[0].to_pylist(), merged.query("n").value.tolist(), strict=True))


@pytest.mark.parametrize(
    "beside", [{}, {"staleness": "5s"}, {"error": {"n": 0}}, {"error": {"n": 0}, "staleness": "5s"}]
)
def test_each_hour_keeps_the_budget_and_each_window_closes_in_time_with_its_largest_groups(
    beside: dict[str, Any],
) -> None:
    edge = Edge({**ALONE, **beside})
    if "error" in beside:
        edge.core.handle(BudgetSet(REF, {"n": 0.0}))
    windows = range(BEGIN_MS, BEGIN_MS + 4 * HOUR_MS, MINUTE_MS)
    for _ in windows:
        edge.window()
    assert all(used <= AMOUNT for used in edge.used.values())
    full = [edge.used[BEGIN_MS // HOUR_MS + hour] for hour in (1, 2)]
    assert all(used > 0.9 * AMOUNT for used in full), "bytes that are left would have lowered the error"
    for start in windows:
        ((at_ms, close),) = [(t, c) for t, b in edge.bodies for c in b.closes if c.slice_start_ms == start]
        assert at_ms == start + MINUTE_MS and not close.provisional
        sent, (withheld,) = edge.sent(start), close.withheld
        unsent = [int(c) for k, c in enumerate(COUNTS) if f"group{k}" not in sent]
        assert withheld.groups >= len(unsent) > 0 and withheld.largest_above >= max(unsent)
        if start >= BEGIN_MS + 2 * HOUR_MS:
            assert withheld.largest_above <= 10, "the price is about the same for all windows"


def test_what_an_error_limit_does_not_need_is_not_sent_although_there_are_bytes() -> None:
    edge = Edge({"bytes": "50MB per hour", "error": {"n": 3}})
    edge.core.handle(BudgetSet(REF, {"n": 3.0}))
    edge.window()
    sent = edge.sent(BEGIN_MS)
    assert {f"group{k}" for k in np.flatnonzero(COUNTS > 3)} == set(sent)


def test_bytes_that_are_not_needed_at_night_are_for_the_day() -> None:
    edge = Edge({"bytes": f"{AMOUNT}B per hour"})
    busy = [np.full(4, 2)] * 30 + [COUNTS] * 30
    for counts in busy * 3:
        edge.window(counts)
    assert all(used <= AMOUNT for used in edge.used.values())
    even = Edge(ALONE)
    for _ in range(3 * 60):
        even.window()
    # A busy window has more bytes than if all windows were alike.
    largest = [
        np.median([w.largest_above for _, b in each.bodies[-25:] for c in b.closes for w in c.withheld])
        for each in (edge, even)
    ]
    assert largest[0] < largest[1]


def test_without_bytes_for_its_close_a_window_closes_late_and_in_order() -> None:
    least = int(60 / 0.75 * close_bytes("q", ["n"])) + 1
    edge = Edge({"bytes": f"{least}B per hour"})
    edge.pull()
    edge.now_ms += 30_000  # half a minute's bytes do not suffice for a close
    begin = edge.now_ms
    for k in range(4):
        edge._ingest(pa.array(["group0"]), begin + k * MINUTE_MS)
    assert not edge.pull(begin)
    assert not edge.bodies
    edge.now_ms += 10 * MINUTE_MS
    while edge.pull():
        pass
    starts = [c.slice_start_ms for _, b in edge.bodies for c in b.closes]
    assert starts == sorted(starts) and len(starts) == 3


@pytest.mark.parametrize("back_ms", [MINUTE_MS, 2 * HOUR_MS])
def test_a_clock_that_is_set_back_gives_no_bytes_twice(back_ms: int) -> None:
    edge = Edge(ALONE)
    for _ in range(60):
        edge.window()
    before = sum(edge.used.values())
    edge.pull(edge.now_ms - back_ms)
    room = edge.core.queries[REF].byte_count
    assert room is not None
    left = room.room(edge.now_ms - back_ms).now_bytes
    assert left <= max(AMOUNT - before, AMOUNT // 4)


def test_a_query_that_begins_within_an_hour_has_the_bytes_of_the_rest_of_it() -> None:
    edge = Edge(ALONE, now_ms=BEGIN_MS + 45 * MINUTE_MS)
    for _ in range(15):
        edge.window()
    assert edge.used[BEGIN_MS // HOUR_MS] <= AMOUNT * 0.75 / 4


def test_an_amount_over_all_edges_is_divided_among_the_expected_edges() -> None:
    budget = {"bytes": {"amount": "120KB", "per": "hour", "over": "all"}}
    edge = Edge(budget, edges=["a", "b", "c", "d"])
    for _ in range(120):
        edge.window()
    assert 0.8 * 30_000 < edge.used[BEGIN_MS // HOUR_MS + 1] <= 30_000


def test_large_and_new_groups_never_exceed_what_is_counted() -> None:
    """Keys of a kilobyte are much larger than the entries from which their size was estimated."""
    edge = Edge(ALONE)
    for _ in range(60):
        edge.window()
    for _ in range(10):
        keys = pa.array([chr(97 + k % 26) * 1_000 + str(np.random.default_rng(k).bytes(300)) for k in range(200)])
        edge._ingest(keys, edge.now_ms + 1)
        edge.window()
        room = edge.core.queries[REF].byte_count
        assert room is not None and room.room(edge.now_ms).now_bytes >= 0
