"""Staleness budgets on links that are too narrow: the deadline is kept, the best groups leave, the rest is stated."""

from __future__ import annotations

from edge.core.events import Configured, FrameBuilt, PullEvent
from edgewater.model.query import QuerySpec
from edgewater.wire import QueryRef
from tests.edge.core.shops import BUDGET_MS, GROUPS, WINDOW_MS, Shops, query

RATE_BYTES_S = 1_000.0
FEW = 150
"""More groups than the link carries in the time of the budget."""


def site(*others: QuerySpec) -> Shops:
    return Shops(query("q"), *others, rate=RATE_BYTES_S, capacity=500, max_frames=1)


def largest(count: int, shops: int = GROUPS) -> set[str]:
    return {f"shop{k}" for k in range(shops - count, shops)}


def test_the_close_travels_with_the_last_groups_that_are_in_time() -> None:
    edge = site()
    edge.sell_out(0)
    edge.send(WINDOW_MS, WINDOW_MS + 5_000)
    with_groups = [at for at, body in edge.timed() if any(p.slice_start_ms == 0 for p in body.partials)]
    assert edge.closed_ms(0) == with_groups[-1] <= WINDOW_MS + BUDGET_MS
    sent = edge.sent(0)
    assert 20 <= len(sent) < GROUPS
    assert set(sent) == largest(len(sent)), "what is worth most leaves"


def test_what_an_exact_query_has_in_open_windows_takes_nothing_from_a_deadline() -> None:
    sites = site(), site(query("hourly", window={"tumbling": "1h"}, budget=None))
    for edge in sites:
        edge.sell_out(0)
        edge.send(WINDOW_MS, WINDOW_MS + 5_000)
    alone, beside = (len(edge.sent(0)) for edge in sites)
    assert beside >= 0.9 * alone


def test_after_an_outage_the_newest_window_leaves_first_and_the_older_ones_are_stated_as_withheld() -> None:
    edge = site()
    edge.sell_out(0, 1, 2, 3)
    resumes_ms = 4 * WINDOW_MS + 2 * BUDGET_MS  # the deadlines of all four windows have passed
    edge.send(resumes_ms, resumes_ms + WINDOW_MS)
    assert [len(edge.sent(window)) for window in range(3)] == [0, 0, 0]
    sent = edge.sent(3)
    assert 20 <= len(sent) <= 100, "about what the link passes in the time of the budget"
    assert set(sent) == largest(len(sent))
    assert edge.closed_ms(3) <= resumes_ms + BUDGET_MS + 500
    closes = {c.slice_start_ms: c for body in edge.bodies() for c in body.closes}
    for window in range(4):
        (withheld,) = closes[window * WINDOW_MS].withheld
        assert withheld.groups == GROUPS - len(edge.sent(window))


def test_a_path_that_takes_longer_than_the_budget_still_gets_the_groups_that_are_worth_most() -> None:
    edge = site()
    edge.sell_out(0)
    edge.send(WINDOW_MS, WINDOW_MS + 8_000, path_delay_ms=BUDGET_MS + 500)
    sent = edge.sent(0)
    assert 20 <= len(sent) <= 100
    assert set(sent) == largest(len(sent))


def test_a_late_window_does_not_make_the_next_one_late() -> None:
    edge = site()
    edge.sell(0, 1)
    edge.end(0)
    edge.send(WINDOW_MS + 2 * BUDGET_MS, 2 * WINDOW_MS)
    edge.end(1)
    edge.send(2 * WINDOW_MS, 2 * WINDOW_MS + 5_000)
    assert edge.closed_ms(1) <= 2 * WINDOW_MS + BUDGET_MS
    assert len(edge.sent(1)) >= 20


def test_records_that_arrive_after_their_deadline_are_history_and_are_sent_completely() -> None:
    edge = site()
    edge.sell(0, arrival_ms=500_000, shops=FEW)
    edge.end(0)
    edge.send(500_000, 500_000 + 8_000)
    assert len(edge.sent(0)) == FEW


def test_an_answer_that_takes_the_center_long_brings_forward_the_deadline_of_its_query_only() -> None:
    slow, quick = QueryRef("slow", 1), QueryRef("quick", 1)
    closed_ms: dict[QueryRef, int] = {}
    edge = site()
    edge.core.handle(Configured(tuple((ref, query(ref.name)) for ref in (slow, quick))))
    edge.sell_out(0)
    now_ms = WINDOW_MS
    while len(closed_ms) < 2:
        pull = PullEvent(500, {"sales": now_ms}, RATE_BYTES_S, processing_ms={slow: 1_500})
        for effect in edge.core.handle(pull):
            if isinstance(effect, FrameBuilt) and effect.closed:
                closed_ms[effect.frame.query] = now_ms
        now_ms += 100
    assert closed_ms[slow] <= WINDOW_MS + BUDGET_MS - 1_500 + 100
    assert closed_ms[slow] + 500 <= closed_ms[quick] <= WINDOW_MS + BUDGET_MS


def test_a_backlog_leaves_newer_windows_the_time_until_their_deadline() -> None:
    edge = site()
    edge.sell(0, 1, 2, 3, arrival_ms=39_000, shops=FEW)  # three windows of history, and one of now
    edge.end(3)
    edge.send(4 * WINDOW_MS, 4 * WINDOW_MS + BUDGET_MS)
    assert len(edge.sent(3)) > 24, "more than the groups of a first close"
    assert set(edge.sent(3)) == largest(len(edge.sent(3)), FEW)
    edge.send(4 * WINDOW_MS + BUDGET_MS, 4 * WINDOW_MS + 16_000)
    assert [len(edge.sent(window)) for window in range(3)] == [FEW] * 3
    assert edge.bodies()[-1].through_ms >= 4 * WINDOW_MS
