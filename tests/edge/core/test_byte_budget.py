"""A byte budget is never exceeded; windows close in time, with the largest errors sent, and the rest stated."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from edge.core.byte_budget import ByteCount, BytePrices, ByteRoom
from edge.core.core import EdgeCore
from edge.core.events import BudgetSet, Configured, Ingested, PullEvent
from edge.core.streams import StreamSpec
from edgewater.base.streams import TIME_COLUMN, StreamClock
from edgewater.model.byte_budget import close_bytes
from edgewater.model.query import QuerySpec
from edgewater.synopses import GroupedAggregate
from edgewater.wire import Frame, FrameBody, QueryRef, link_bytes
from tests.cells import at_night
from tests.cores import open_core, pulled

pytestmark = pytest.mark.slow

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
        self.core = open_core(StreamSpec({"k": pa.string()}, clock=StreamClock(0, 0, 1.0)), source="f")
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
        frames = pulled(self.core, PullEvent(8 << 10, {"s": self.now_ms}, 1e5, now_ms=now_ms))
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


@pytest.mark.nightly
@pytest.mark.parametrize(
    "beside", [{}, *at_night({"staleness": "5s"}, {"error": {"n": 0}}), {"error": {"n": 0}, "staleness": "5s"}]
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


@pytest.mark.nightly
@pytest.mark.parametrize("beside", [{}, {"staleness": "5s"}])
def test_what_the_budget_does_not_permit_is_no_demand_on_the_link(beside: dict[str, Any]) -> None:
    """Otherwise the plan of the link reserves bytes for groups that will not be sent."""
    edge = Edge({**ALONE, **beside})
    for _ in range(60):
        edge.window()
    edge._ingest(pa.array([f"group{k}" for k in np.arange(10 * GROUPS).repeat(50)]), edge.now_ms + 1)
    edge.now_ms += MINUTE_MS
    edge._ingest(pa.array(["group0"]), edge.now_ms)
    pipeline, pulls = edge.core.queries[REF], edge.core.pulls
    asked = PullEvent(8 << 10, {"s": edge.now_ms}, 1e5, now_ms=edge.now_ms)
    (demand,) = pulls.demands(asked, [pipeline])
    assert 0 < demand.required + demand.optional[-1] <= pipeline.byte_room(edge.now_ms).now_bytes  # type: ignore[union-attr]


def test_what_a_slice_takes_and_omits_is_known_for_forecasts() -> None:
    edge = Edge(ALONE)
    load = edge.core.queries[REF].load
    assert load.sent_bytes is None
    for _ in range(20):
        edge.window()
    bodies = [b for t, b in edge.bodies[-5:]]
    mean = np.mean([sum(len(p.synopsis) for p in b.partials) for b in bodies])
    assert mean < load.sent_bytes < mean + 400  # type: ignore[operator]
    entry_bytes = edge.core.queries[REF].shipper.entry_bytes
    omitted = entry_bytes * np.mean([c.withheld[0].groups for b in bodies for c in b.closes])
    assert load.omitted_bytes == pytest.approx(omitted, rel=0.3) and omitted > 0
    wide = Edge({"bytes": "50MB per hour"})
    wide.window()
    assert wide.core.queries[REF].load.omitted_bytes == 0


def test_what_an_error_limit_does_not_need_is_not_sent_although_there_are_bytes() -> None:
    edge = Edge({"bytes": "50MB per hour", "error": {"n": 3}})
    edge.core.handle(BudgetSet(REF, {"n": 3.0}))
    edge.window()
    sent = edge.sent(BEGIN_MS)
    assert {f"group{k}" for k in np.flatnonzero(COUNTS > 3)} == set(sent)


@pytest.mark.nightly
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


def test_a_query_without_bytes_waits_until_it_has_them() -> None:
    edge = Edge(ALONE)
    edge.window()
    count = edge.core.queries[REF].byte_count
    assert count is not None
    count.used = dict.fromkeys(count.used, AMOUNT - 200)
    edge._ingest(pa.array(["group0"]), edge.now_ms + MINUTE_MS)
    edge.now_ms += MINUTE_MS
    due_ms = edge.core.pulls.next_pull_ms(1e5, edge.now_ms)
    assert due_ms is not None and BEGIN_MS + HOUR_MS * 0.99 < due_ms <= BEGIN_MS + HOUR_MS
    assert not edge.pull(due_ms - 100) and edge.pull(due_ms)


def test_after_an_outage_as_many_windows_close_as_have_bytes_the_oldest_first() -> None:
    edge = Edge(ALONE)
    edge.window()
    for _ in range(6 * 60):  # the closes of all of these take more than an hour's bytes
        edge.now_ms += MINUTE_MS
        edge._ingest(pa.array(["group0"]), edge.now_ms)
    begin, pulled = edge.now_ms, len(edge.bodies)
    while edge.core.queries[REF].through_ms < begin:
        edge.now_ms = max(edge.core.pulls.next_pull_ms(1e5, edge.now_ms) or 0, edge.now_ms)
        edge.pull()
    starts = [c.slice_start_ms for _, b in edge.bodies for c in b.closes]
    assert starts == sorted(starts) and len(starts) == 6 * 60 + 1
    assert edge.now_ms - begin < 4 * HOUR_MS and len(edge.bodies) - pulled > 3
    assert all(used <= AMOUNT for used in edge.used.values())


@pytest.mark.nightly
@pytest.mark.parametrize("back_ms", [2 * MINUTE_MS, 2 * HOUR_MS, 20_000 * HOUR_MS])
def test_a_clock_that_is_set_back_gives_no_bytes_twice_and_takes_only_those_until_now(back_ms: int) -> None:
    edge = Edge(ALONE)
    for _ in range(61):
        edge.window()
    count = edge.core.queries[REF].byte_count
    assert count is not None
    newest_ms = edge.now_ms
    edge.now_ms -= back_ms
    assert count.room(edge.now_ms).now_bytes <= 0, "all bytes until now count as used"
    until_ms = edge.now_ms + HOUR_MS // 2
    while edge.now_ms < until_ms:
        edge._ingest(pa.array(["group0"]), newest_ms)
        newest_ms += MINUTE_MS
        edge._ingest(pa.array(["group0"]), newest_ms)
        edge.now_ms += MINUTE_MS
        edge.pull()
    assert edge.bodies[-1][0] > until_ms - 10 * MINUTE_MS, "the query goes on"
    edge.now_ms = newest_ms  # and if the first clock was right
    for _ in range(28 if back_ms > HOUR_MS else 0):
        edge.window()
    assert all(used <= AMOUNT for used in edge.used.values())


def test_an_earlier_period_has_no_bytes_until_now_and_what_it_uses_counts_in_the_newest_one_too() -> None:
    count, frame = ByteCount(Edge(ALONE).core.queries[REF].spec, BEGIN_MS), Frame.pack(0, REF, FrameBody(0))
    later_ms = BEGIN_MS + 3 * HOUR_MS // 2
    count.add(later_ms, frame)
    earlier_ms, before = later_ms - 2 * HOUR_MS, count.room(later_ms).now_bytes
    assert count.room(earlier_ms).now_bytes == 0 < count.room(earlier_ms + MINUTE_MS).now_bytes
    count.add(earlier_ms, frame)
    assert count.room(later_ms).now_bytes == before - link_bytes(frame.wire_bytes)


def test_errors_cost_more_before_a_part_of_the_hour_that_was_busy_in_the_hour_before() -> None:
    def affordable(busy: range) -> int:
        """Returns how many groups are worth their bytes after two thirds of an hour."""
        prices, errors = BytePrices(Edge(ALONE).core.queries[REF].spec), np.arange(300.0, 0.0, -1.0)
        for minute in range(60):
            learned = errors if minute in busy else errors[-4:]
            prices.learn(learned, ByteRoom(minute * MINUTE_MS, 1e4, 10_000, 0))
        now = ByteRoom(40 * MINUTE_MS, 1e4, 10_000, 1)
        prices.learn(errors, now)
        return prices.affordable(errors, now)

    assert affordable(range(45, 60)) < affordable(range(15))


def test_a_version_counts_what_earlier_versions_send() -> None:
    edge = Edge(ALONE)
    edge.window()
    first = edge.core.queries[REF]
    second = QueryRef("q", 2)
    edge.core.handle(Configured(((REF, first.spec), (second, first.spec)), now_ms=edge.now_ms))
    count = edge.core.queries[second].byte_count
    assert count is not None
    before, pulled = sum(count.used.values()), len(edge.bodies)
    edge.now_ms += MINUTE_MS
    edge._ingest(pa.array(["group1", "group2"]), edge.now_ms)
    while edge.pull():
        pass
    assert len(edge.bodies) > pulled and sum(count.used.values()) > before


def test_a_restored_state_has_counted_the_same_bytes() -> None:
    edge = Edge(ALONE)
    for _ in range(61):
        edge.window()
    edge.core.queries[REF].byte_count.room(edge.now_ms - 2 * HOUR_MS)  # type: ignore[union-attr]
    core = EdgeCore({"s": edge.core.streams["s"].spec})
    core.restore(edge.core.to_state())
    was, is_ = (each.queries[REF].byte_count for each in (edge.core, core))
    assert was is not None and is_ is not None and len(was.used) == 2 and was.used == is_.used


def test_late_records_of_many_windows_are_stated_in_as_many_places_as_a_frame_has_bytes_for() -> None:
    least = int(60 / 0.75 * close_bytes("q", ["n"])) + 1
    edge = Edge({"bytes": f"{least}B per hour"})
    for _ in range(3):
        edge.now_ms += 100 * MINUTE_MS
        edge._ingest(pa.array(["group0"]), edge.now_ms)
        while edge.pull():
            pass
    for k in range(200):
        edge._ingest(pa.array(["late"]), edge.now_ms - (k + 2) * MINUTE_MS)
    edge.now_ms += 61 * MINUTE_MS
    while edge.pull():
        pass
    assert sum(d.records for _, b in edge.bodies for d in (*b.dropped, *b.late)) == 200
    assert max(len(b.dropped) + len(b.late) for _, b in edge.bodies) < 200
    assert all(used <= least for used in edge.used.values())


def test_a_query_that_begins_within_an_hour_has_the_bytes_of_the_rest_of_it() -> None:
    edge = Edge(ALONE, now_ms=BEGIN_MS + 45 * MINUTE_MS)
    for _ in range(15):
        edge.window()
    assert edge.used[BEGIN_MS // HOUR_MS] <= AMOUNT * 0.75 / 4


@pytest.mark.nightly
def test_an_amount_over_all_edges_is_divided_among_the_expected_edges() -> None:
    budget = {"bytes": {"amount": "120KB", "per": "hour", "over": "all"}}
    edge = Edge(budget, edges=["a", "b", "c", "d"])
    for _ in range(120):
        edge.window()
    assert 0.8 * 30_000 < edge.used[BEGIN_MS // HOUR_MS + 1] <= 30_000


@pytest.mark.nightly
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
