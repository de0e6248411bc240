"""Combined budgets at an edge: nothing is sent early that can wait, what is sent is rounded, and both limits hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from edge.core.core import EdgeCore
from edge.core.events import BudgetSet, Ingested, PullEvent, TickEvent
from edge.core.streams import StreamSpec
from edge.uplink.flow_control import PackingEstimator
from edgewater.base.streams import LIVE, TIME_COLUMN
from edgewater.model.query import QuerySpec
from edgewater.synopses import FloatArray, GroupedAggregate
from edgewater.wire import FrameBody, QueryRef, link_bytes
from edgewater.wire import uplink_pb2 as pb
from edgewater.wire.session_stream import SessionPacker
from tests.cores import open_core, pulled

REF, GROUPS, WINDOW_MS, SHARE = QueryRef("q", 1), 400, 10_000, 1_000.0
QUANTUM = 32
"""The largest power of two that is at most a sixteenth of the share."""
COLUMNS = {"key": pa.string(), "whole": pa.int64(), "part": pa.float64()}


def query(staleness: str | None, **changes: Any) -> QuerySpec:
    budget = {"error": {"v": SHARE}, **({} if staleness is None else {"staleness": staleness})}
    return QuerySpec.from_mapping(
        {
            "name": "q", "from": "s", "group_by": ["key"], "measures": {"v": "sum(whole)"}, "lateness": "1m",
            "window": {"tumbling": "10s"}, "budget": budget, **changes,
        }
    )  # fmt: skip


def records(window: int, step: int) -> pa.RecordBatch:
    """Records of 100 ms; popular keys come often."""
    rng = np.random.default_rng((window, step))
    keys = np.minimum(rng.zipf(1.3, 300) - 1, GROUPS - 1)
    begin = window * WINDOW_MS + 100 * step
    values = np.rint(rng.lognormal(4.0, 1.0, len(keys)))
    return pa.record_batch(
        {
            "key": pa.array([f"key-{k:03d}" for k in keys.tolist()]),
            "whole": values.astype(np.int64),
            "part": values / 3.0,
            TIME_COLUMN: np.sort(rng.integers(begin, begin + 100, len(keys))),
        }
    )


class Edge:
    """An edge whose link has `bandwidth` bytes per second; frames occupy it for their size on the wire.

    The core is told of the link's bandwidth and room in bytes before compression, as the outbox does.
    """

    def __init__(self, spec: QuerySpec, bandwidth: float) -> None:
        self.core = open_core(StreamSpec(COLUMNS, LIVE, idle_ms=0), (REF, spec))
        self.core.handle(BudgetSet(REF, {"v": SHARE}, 1))
        self.bandwidth, self.free_ms = bandwidth, 0.0
        self.bodies: list[FrameBody] = []
        self.arrived_ms: dict[int, float] = {}
        self.early, self.overshoot_ms = 0, -float(WINDOW_MS)
        self.wire_bytes = 0
        self.packer, self.packing = SessionPacker(20, 19), PackingEstimator()

    def run(self, windows: int, column: str = "whole") -> list[FloatArray]:
        """Ingests windows and sends what is due; returns the true sums per window."""
        truth = [np.zeros(GROUPS) for _ in range(windows)]
        for window in range(windows):
            for step in range(WINDOW_MS // 100):
                batch, now_ms = records(window, step), window * WINDOW_MS + 100 * step + 99
                keys = np.array([int(k[4:]) for k in batch.column("key").to_pylist()])
                np.add.at(truth[window], keys, batch.column(column).to_numpy())
                self.core.handle(Ingested("s", "file", batch, now_ms))
                self.core.handle(TickEvent(now_ms + 1))
                self.send(now_ms + 1)
        for now_ms in range(windows * WINDOW_MS, (windows + 1) * WINDOW_MS, 100):
            self.core.handle(TickEvent(now_ms))
            self.send(now_ms)
        return truth

    def send(self, now_ms: int) -> None:
        while self.free_ms <= now_ms:
            plain_bytes_s = self.bandwidth / self.packing.fraction
            due = self.core.pulls.next_pull_ms(plain_bytes_s, now_ms, 5)
            if due is None or due > now_ms:
                return
            pull = PullEvent(8 << 10, self.core.pulls.event_times(now_ms), plain_bytes_s, 5)
            frames = pulled(self.core, pull)
            if not frames:
                return
            (frame,) = frames
            body = frame.unpack()
            plain = pb.FromEdge(frame=frame.plain().to_wire()).SerializeToString()
            size = link_bytes(self.packer.pack(plain)[1])
            self.free_ms = max(self.free_ms, now_ms) + size / self.bandwidth * 1000.0
            self.wire_bytes += size
            self.packing.add(frame.plain_wire_bytes, size)
            self.bodies.append(body)
            for partial in body.partials:
                end_ms = partial.slice_start_ms + WINDOW_MS
                if now_ms < end_ms:
                    self.overshoot_ms = max(self.overshoot_ms, self.free_ms - end_ms)
                    self.early += len(GroupedAggregate.from_bytes(partial.synopsis))
            for close in body.closes:
                self.arrived_ms[close.slice_start_ms] = self.free_ms

    def partials(self, start_ms: int) -> list[GroupedAggregate]:
        found = [p for body in self.bodies for p in body.partials if p.slice_start_ms == start_ms]
        return [GroupedAggregate.from_bytes(p.synopsis) for p in found]

    def received(self, window: int) -> tuple[FloatArray, int]:
        """Returns the sums at the center, and the number of entries that made them."""
        sums, entries = np.zeros(GROUPS), 0
        for part in self.partials(window * WINDOW_MS):
            keys = [int(k[4:]) for k in part.rows()[0].to_pylist()]
            np.add.at(sums, keys, part.query("v").value)
            entries += len(keys)
        return sums, entries

    def withheld(self, window: int) -> float:
        closes = [c for body in self.bodies for c in body.closes if c.slice_start_ms == window * WINDOW_MS]
        return max((w.largest_above for w in closes[-1].withheld), default=0.0)


def check_within_budget(edge: Edge, truth: list[FloatArray]) -> None:
    for window, true in enumerate(truth):
        missing = true - edge.received(window)[0]
        assert missing.min() >= -1e-9
        assert missing.max() <= SHARE
        assert edge.withheld(window) == pytest.approx(missing.max(), rel=1e-12)


@pytest.mark.parametrize("column", ["whole", "part"])
@pytest.mark.nightly
def test_on_a_wide_link_each_group_above_the_share_is_sent_once_and_rounded(column: str) -> None:
    edge = Edge(query("2s", measures={"v": f"sum({column})"}), 20_000.0)
    truth = edge.run(2, column)
    assert edge.early == 0
    check_within_budget(edge, truth)
    for window, true in enumerate(truth):
        sums, entries = edge.received(window)
        assert entries == np.count_nonzero(true > SHARE) > 50
        assert (np.fmod(sums, QUANTUM) == 0).all()
        for part in edge.partials(window * WINDOW_MS):
            keys = part.rows()[0].to_pylist()
            assert keys == sorted(keys)


@pytest.mark.nightly
def test_an_error_budget_alone_is_rounded_too_and_spends_the_link_on_freshness() -> None:
    alone, both = Edge(query(None), 20_000.0), Edge(query("2s"), 20_000.0)
    truth = alone.run(2)
    both.run(2)
    check_within_budget(alone, truth)
    assert alone.early > 0
    assert (np.fmod(alone.received(1)[0], QUANTUM) == 0).all()
    assert alone.received(1)[1] < 1.5 * np.count_nonzero(truth[1] > SHARE), "hardly any entry is sent twice"
    assert both.wire_bytes < alone.wire_bytes


@pytest.mark.nightly
def test_on_a_narrow_link_only_what_could_not_drain_in_time_is_sent_early() -> None:
    edge = Edge(query("1s"), 600.0)
    truth = edge.run(5)
    check_within_budget(edge, truth)
    assert edge.early > 0
    # 90 bytes: sizes are estimated.
    assert edge.overshoot_ms < 150, "early frames do not occupy the link after the close"
    for window in (3, 4):
        assert edge.arrived_ms[window * WINDOW_MS] <= (window + 1) * WINDOW_MS + 1000
        assert edge.received(window)[1] < 2 * np.count_nonzero(truth[window] > SHARE)


@pytest.mark.slow
def test_where_both_limits_cannot_hold_the_error_does_and_nothing_is_omitted() -> None:
    edge = Edge(query("1ms"), 1_000.0)
    truth = edge.run(2)
    check_within_budget(edge, truth)
    assert edge.early == 0, "a slice that closes after its deadline cannot be in time"
    assert edge.arrived_ms[0] > WINDOW_MS + 1


def test_nothing_is_rounded_beside_a_measure_that_counts_records() -> None:
    edge = Edge(query("2s", measures={"v": "sum(whole)", "mean": "mean(whole)"}), 20_000.0)
    truth = edge.run(1)
    check_within_budget(edge, truth)
    assert (np.fmod(edge.received(0)[0], QUANTUM) != 0).any()


def test_the_moment_of_an_early_send_is_known_ahead() -> None:
    """So that an agent whose source is silent wakes up in time."""
    edge = Edge(query("1s"), 150.0)
    for step in range(40):
        edge.core.handle(Ingested("s", "file", records(0, step), 100 * step + 99))
    edge.send(4_000)  # its progress
    now, due, waits = 4_000, edge.core.pulls.next_pull_ms(1_500.0, 4_000, 5), 0
    while due is not None and due > now:
        now, waits = due, waits + 1
        edge.core.handle(TickEvent(now))
        due = edge.core.pulls.next_pull_ms(1_500.0, now, 5)
    assert due is not None and now < WINDOW_MS and 0 < waits < 30
    pull = PullEvent(8 << 10, edge.core.pulls.event_times(now), 1_500.0, 5)
    assert pulled(edge.core, pull)


@pytest.mark.nightly
@pytest.mark.parametrize("budget", [{"error": {"v": SHARE}}, None])
def test_without_a_staleness_a_narrow_link_is_used_late_and_few_entries_are_sent_twice(budget: Any) -> None:
    edge = Edge(query(None, budget=budget), 3_000.0)
    truth = edge.run(5)
    assert edge.early > 0
    for window in (2, 3, 4):
        missing = truth[window] - edge.received(window)[0]
        share = 0.0 if budget is None else SHARE
        assert missing.min() >= -1e-9
        assert missing.max() <= share
        needed = np.count_nonzero(truth[window] > share)
        assert edge.received(window)[1] < (1.7 if budget is None else 1.4) * needed
        alone_ms = 1000.0 * needed * edge.core.queries[REF].shipper.entry_bytes / edge.bandwidth
        late_ms = edge.arrived_ms[window * WINDOW_MS] - (window + 1) * WINDOW_MS
        assert late_ms < max(0.5 * alone_ms, 300.0), "at least half would be late if all were sent after the close"


def closed_core(*queries: QuerySpec) -> EdgeCore:
    """Returns a core whose slice of many groups has closed."""
    given = ((QueryRef(f"q{number}", 1), spec) for number, spec in enumerate(queries))
    core = open_core(StreamSpec(COLUMNS, LIVE, idle_ms=0), *given)
    for step in range(20):
        core.handle(Ingested("s", "file", records(0, step), 100 * step))
    core.handle(TickEvent(WINDOW_MS))
    return core


def frame_bytes(core: EdgeCore, bandwidth: float) -> int:
    pull = PullEvent(256, core.pulls.event_times(WINDOW_MS), bandwidth)
    (frame,) = pulled(core, pull)
    return sum(len(p.synopsis) for p in frame.unpack().partials)


def test_frames_of_closed_slices_are_large_unless_another_query_has_a_deadline() -> None:
    exact = query(None, budget=None)
    for spec in (exact, query("2s")):  # a combined budget omits nothing, so all of the slice has to pass in any case
        assert 512 < frame_bytes(closed_core(spec), 2_000.0) < 3_000, "about what the link carries in a second"
    assert frame_bytes(closed_core(exact, query("2s")), 2_000.0) < 512
    assert frame_bytes(closed_core(query(None, budget={"staleness": "2s"})), 2_000.0) < 512


def half_over(spec: QuerySpec, groups: int) -> EdgeCore:
    """Returns a core whose slice is half over and has so many groups."""
    core = open_core(StreamSpec(COLUMNS, LIVE, idle_ms=0), (REF, spec))
    columns = {"key": [f"key-{k}" for k in range(groups)], "whole": [1] * groups, "part": [1.0] * groups}
    batch = pa.record_batch({**columns, TIME_COLUMN: pa.array(np.arange(groups) * 5_000 // groups)})
    core.handle(Ingested("s", "file", batch, WINDOW_MS // 2))
    core.handle(PullEvent(4 << 10))  # the first frame says that nothing is missing so far
    return core


@pytest.mark.parametrize("spec", [query(None, budget=None), query(None), query("500ms")])
def test_entries_wait_for_the_close_if_the_median_of_the_link_carries_them_after_it(spec: QuerySpec) -> None:
    """What the link carries at least does not make them leave early."""
    least, now_ms = 1_000.0, WINDOW_MS // 2
    for mid, is_due in ((1_000.0, True), (1e6, False)):
        core = half_over(spec, 2_000)
        core.handle(BudgetSet(REF, {"v": 0.5}, 1))
        assert (core.pulls.next_pull_ms(least, now_ms, mid_bytes_s=mid) == now_ms) is is_due
        pull = PullEvent(4 << 10, core.pulls.event_times(now_ms), least, mid_bytes_s=mid)
        assert bool(core.handle(pull)) is is_due


def test_an_early_frame_occupies_the_link_for_a_second_at_most() -> None:
    """Before a link has been seen, its rate is a low guess, so that half of the early sends may be half of all."""
    core, now_ms = half_over(query(None, budget=None), 2_400), WINDOW_MS // 2
    pull = PullEvent(64 << 10, core.pulls.event_times(now_ms), 1_000.0)
    (frame,) = pulled(core, pull)
    sent = sum(len(GroupedAggregate.from_bytes(p.synopsis)) for p in frame.unpack().partials)
    assert 0 < sent <= 71
