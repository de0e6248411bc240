"""First closes: what must arrive before a deadline is one small frame for each query, before everything else."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from edge.core.events import Configured
from edgewater.model.query import QuerySpec
from edgewater.wire import QueryRef
from tests.edge.core.shops import GROUPS, WINDOW_MS, Shops, groups, query

LATE_MS = 3_000
"""After this time, no frame of a staleness budget of 2 s is in time."""


def exact(name: str = "exact") -> QuerySpec:
    return replace(query(name), budget=None)


def test_each_frame_closes_the_slice_with_less_withheld_and_the_last_one_advances_the_progress() -> None:
    edge = Shops(query("q"))
    edge.sell_out(0)
    edge.send(WINDOW_MS, WINDOW_MS + LATE_MS)
    bodies = edge.bodies("q")
    closes = [close for body in bodies for close in body.closes]
    assert [close.provisional for close in closes] == [True] * (len(bodies) - 1) + [False] and len(bodies) > 3
    assert all(body.through_ms < WINDOW_MS for body in bodies[:-1]) and bodies[-1].through_ms >= WINDOW_MS
    assert groups(bodies[0]) == 24 < groups(bodies[1])
    sent = 0
    for body, close in zip(bodies, closes, strict=True):
        sent += groups(body)
        (withheld,) = close.withheld
        assert (withheld.groups, withheld.largest_above) == (GROUPS - sent, GROUPS - sent)
        assert withheld.rest is not None and withheld.rest.values == GROUPS - sent


@pytest.mark.parametrize(("queries", "expected"), [(1, 24), (3, 16), (8, 6), (30, 4)])
def test_first_closes_that_are_due_together_share_a_message_in_which_nothing_else_is(
    queries: int, expected: int
) -> None:
    names = [f"q{k}" for k in range(queries)]
    edge = Shops(*map(query, names), exact())
    edge.sell_out(0)
    frames = edge.pull(WINDOW_MS, capacity=1_500 * queries)
    assert sorted(f.query.name for f in frames) == sorted(names)
    assert {groups(f.unpack()) for f in frames} == {expected}
    assert all(close.provisional for f in frames for close in f.unpack().closes)


def test_a_window_without_records_is_reported_with_the_first_closes() -> None:
    edge = Shops(query("busy"), query("idle", where="shop = 'none'"), exact())
    edge.sell_out(0)
    edge.send(WINDOW_MS, 2 * WINDOW_MS)
    edge.messages.clear()
    edge.sell_out(1)
    assert sorted(f.query.name for f in edge.pull(2 * WINDOW_MS)) == ["busy", "idle"]
    assert edge.bodies("idle")[0].through_ms >= 2 * WINDOW_MS


def test_after_first_closes_queries_share_the_link_equally() -> None:
    names = ["a", "b", "c"]
    edge = Shops(*map(query, names), exact())
    edge.sell_out(0)
    edge.send(WINDOW_MS, WINDOW_MS + 1_500)
    sizes = Counter[str]()
    for _, frames in edge.messages[1:]:
        sizes.update({f.query.name: f.plain_wire_bytes for f in frames})
    largest = max(f.plain_wire_bytes for _, frames in edge.messages for f in frames)
    assert set(sizes) == {*names, "exact"}
    assert max(sizes.values()) - min(sizes.values()) <= 2 * largest


@pytest.mark.slow
@pytest.mark.parametrize(("windows", "closed"), [(8, 1), pytest.param(40, 4, marks=pytest.mark.nightly)])
def test_a_link_that_is_too_narrow_for_first_closes_still_carries_last_closes_and_other_queries(
    windows: int, closed: int
) -> None:
    short = {"tumbling": "1s"}
    edge, now_ms = Shops(*(query(f"q{k}", window=short) for k in range(4)), exact()), 0
    for window in range(windows):
        edge.ingest(window * 1_000 + 1, [f"shop{k}" for k in range(50)], [1] * 50)
        edge.ingest((window + 1) * 1_000, ["next"], [1])
        now_ms = max(now_ms, (window + 1) * 1_000)
        while now_ms < (window + 2) * 1_000:
            size = sum(frame.plain_wire_bytes for frame in edge.pull(now_ms, 400, 1_000.0))
            now_ms += max(size, 20)  # on a link of 1,000 bytes per second
    assert edge.bodies("exact")
    assert sum(edge.bodies(f"q{k}")[-1].through_ms > 4_000 for k in range(4)) >= closed


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("count", "rate", "windows"), [pytest.param(200, 2_048.0, 12, marks=pytest.mark.nightly), (48, 480.0, 8)]
)
def test_on_a_link_that_is_too_narrow_for_all_queries_each_one_sends(count: int, rate: float, windows: int) -> None:
    budgets = {"staleness": "2s"}, {"error": {"amount": 1}}, {"error": {"amount": 1}, "staleness": "2s"}, None
    specs = [
        exact(name) if budget is None else query(name, budget=budget)
        for k, name in enumerate(f"q{k:03}" for k in range(count))
        for budget in [budgets[k % len(budgets)]]
    ]
    edge, now_ms = Shops(*specs), 0
    for window in range(windows):
        edge.ingest(window * WINDOW_MS + 1, [f"shop{k}" for k in range(5)], list(range(1, 6)))
        edge.end(window)
        now_ms = max(now_ms, (window + 1) * WINDOW_MS)
        while now_ms < (window + 2) * WINDOW_MS:
            size = sum(frame.plain_wire_bytes for frame in edge.pull(now_ms, 1_024, rate))
            now_ms += max(round(1000 * size / rate), 20)
    assert [spec.name for spec in specs if not any(b.closes or b.partials for b in edge.bodies(spec.name))] == []
    for spec in specs[::4]:  # what the staleness budget omits is stated
        first = next(close for body in edge.bodies(spec.name) for close in body.closes)
        assert first.withheld[0].groups > 0


def test_a_query_that_was_idle_has_saved_nothing_up() -> None:
    edge = Shops(exact("a"))
    edge.sell_out(0)
    edge.send(WINDOW_MS, 10 * WINDOW_MS)
    edge.core.handle(Configured(tuple((QueryRef(name, 1), exact(name)) for name in "ab")))
    edge.messages.clear()
    edge.sell_out(9)
    for _ in range(9):
        edge.pull(10 * WINDOW_MS, rate=0.0)  # on a link that is not too narrow for both
    sizes = Counter[str]()
    for _, frames in edge.messages:
        sizes.update({f.query.name: f.plain_wire_bytes for f in frames})
    assert abs(sizes["a"] - sizes["b"]) <= max(sizes.values()) / 4


def test_after_an_outage_the_closes_of_all_windows_are_in_the_first_frame_with_groups_of_the_newest() -> None:
    edge = Shops(query("q"))
    edge.sell_out(0, 1, 2, 3)
    (frame,) = edge.pull(5 * WINDOW_MS)
    body = frame.unpack()
    assert [close.slice_start_ms for close in body.closes] == [0, WINDOW_MS, 2 * WINDOW_MS, 3 * WINDOW_MS]
    assert [groups(body, start * WINDOW_MS) for start in range(4)] == [0, 0, 0, 24]


def test_on_a_wide_link_windows_that_are_late_are_sent_completely() -> None:
    edge = Shops(query("q"))
    edge.sell_out(0, 1, 2, 3)
    now_ms = 5 * WINDOW_MS
    while edge.pull(now_ms, 1 << 16, 1e6):
        now_ms += 20
    sent = Counter[int]()
    for body in edge.bodies("q"):
        sent.update({start: groups(body, start * WINDOW_MS) for start in range(4)})
    assert dict(sent) == dict.fromkeys(range(4), GROUPS)


def test_only_time_windows_with_a_staleness_budget_alone_are_closed_provisionally() -> None:
    others = {
        "exact": exact(),
        "combined": query("q", budget={"error": {"amount": 5}, "staleness": "2s"}),
        "sessions": query("q", window={"session": "1s", "max": "10s"}),
        "accuracy": query("q", group_by=[], accuracy={"error": "5%", "substream": "1s"}, lateness="5s"),
    }
    for kind, spec in others.items():
        edge = Shops(spec)
        edge.sell_out(0, shops=100)
        edge.send(WINDOW_MS, 4 * WINDOW_MS)
        closes = [close for body in edge.bodies(spec.name) for close in body.closes]
        assert closes and not any(close.provisional for close in closes), kind


def test_a_restored_edge_goes_on_where_it_was() -> None:
    edge = Shops(*map(query, "ab"), exact())
    edge.sell_out(0)
    edge.send(WINDOW_MS, WINDOW_MS + 800)
    again = Shops(*map(query, "ab"), exact())
    again.core.restore(edge.core.to_state())
    edge.messages.clear()
    for each in (edge, again):
        each.send(WINDOW_MS + 800, WINDOW_MS + LATE_MS)
    assert again.messages == edge.messages and len(edge.messages) > 3
