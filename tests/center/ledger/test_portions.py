"""One event answers a bounded number of a query's windows; the rest follow, and nothing is lost on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from center.ledger import AT_ONCE_MS, Emission
from center.ledger.answer_work import MAX_WORK
from edgewater.base.streams import EdgeId
from edgewater.wire import InputLoss
from tests.center.ledger.test_ledger import MINUTE, REF, Center, close, reload, told
from tests.center.statement_world import missing

MANY = 2 * MAX_WORK + 50


def keep(center: Center) -> None:
    return


def drain(center: Center, between: Callable[[Center], None], now_ms: int = 0) -> list[list[Emission]]:
    """The answers of each tick until none is due."""
    portions = []
    for _ in range(50):
        if center.ledger.next_deadline() != AT_ONCE_MS:
            return portions
        between(center)
        portions.append(center.tick(now_ms))
    raise AssertionError("there is always more to answer")


@pytest.mark.parametrize("between", [keep, reload])
@pytest.mark.parametrize("lateness", ["0s", "30d"])
def test_windows_that_close_at_once_are_answered_in_portions_in_order(
    between: Callable[[Center], None], lateness: str
) -> None:
    center = Center("a", lateness=lateness)
    closes = [close(n * MINUTE, 1) for n in range(MANY)]
    first = center.says("a", MANY * MINUTE, *closes)
    portions = [first, *drain(center, between)]
    assert all(len(portion) <= MAX_WORK for portion in portions)
    phase = "final" if lateness == "0s" else "complete"
    assert [a for portion in portions for a in told(portion)] == [(n * MINUTE, 1, phase) for n in range(MANY)]
    assert {e.facts.observed for portion in portions for e in portion} == {1}


def test_slices_of_windows_that_wait_for_their_final_answer_accept_data() -> None:
    center = Center("a")
    center.says("a", MANY * MINUTE, *[close(n * MINUTE, 1) for n in range(MANY)])
    assert center.ledger.sealed_before(REF) <= MAX_WORK * MINUTE
    center.says("a", MANY * MINUTE, close((MANY - 1) * MINUTE, 5))
    answers = {e.window_start_ms: e for portion in drain(center, keep) for e in portion}
    assert answers[(MANY - 1) * MINUTE].facts.observed == 5
    assert center.ledger.after_final(REF) == 0


@pytest.mark.parametrize("between", [keep, reload])
def test_windows_that_change_at_once_are_revised_in_portions(between: Callable[[Center], None]) -> None:
    center = Center("a", lateness="30d")
    center.says("a", MANY * MINUTE, *[close(n * MINUTE, 1) for n in range(MANY)])
    drain(center, keep)
    first = center.says("a", MANY * MINUTE, *[close(n * MINUTE, 2) for n in range(MANY)], now_ms=MINUTE)
    portions = [first, *drain(center, between, MINUTE)]
    assert all(len(portion) <= MAX_WORK for portion in portions)
    assert sorted(a for portion in portions for a in told(portion)) == [
        (n * MINUTE, 2, "complete") for n in range(MANY)
    ]
    assert {e.facts.observed for portion in portions for e in portion} == {2}


def test_a_window_of_many_slices_counts_for_more() -> None:
    center = Center("a", window={"sliding": "400m", "every": "1m"})
    portion = center.says("a", 1000 * MINUTE, *[close(n * MINUTE, 1) for n in range(500)])
    assert 1 <= len(portion) <= 4
    rest = drain_all(center)
    assert len({e.window_start_ms for e in [*portion, *rest]}) == 500 + 399


def drain_all(center: Center) -> list[Emission]:
    answers: list[Emission] = []
    while center.ledger.next_deadline() == AT_ONCE_MS:
        portion = center.tick(0)
        assert len(portion) <= 4
        answers += portion
    return answers


def test_windows_that_may_lack_records_are_answered_in_portions() -> None:
    center = Center("a", lateness="30d")
    center.says("a", MANY * MINUTE, *[close(n * MINUTE, 1) for n in range(MANY)])
    drain(center, keep)
    fact = center.fact("a", MANY * MINUTE)
    lost = InputLoss("source", "file-gone", 0, MANY * MINUTE)
    first = center.reports(replace(fact, losses=(lost,)), now_ms=MANY * MINUTE)
    reload(center)
    portions = [first, *drain(center, keep)]
    assert all(len(portion) <= MAX_WORK for portion in portions)
    newest = {e.window_start_ms: e for portion in portions for e in portion}
    assert sorted(newest) == [n * MINUTE for n in range(MANY)]
    assert {missing(e) for e in newest.values()} == {(EdgeId("a"),)}
    assert {e.revision for e in newest.values()} == {2}
