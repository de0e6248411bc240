"""First answers allow for late records: they rarely miss, and windows without late records say that they are met."""

from __future__ import annotations

from typing import Any

import pytest

from bench.late_records import FirstAnswer, LateTrace, Score, first_answers

WARM_UP = 40
"""Windows from which on the history is long enough."""


def after_the_first(rate: float, **query: Any) -> list[FirstAnswer]:
    statements = query.pop("statements", True)
    return first_answers(LateTrace(rate, windows=110, records=200), query, statements=statements)[WARM_UP:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "lateness"), [(0.01, "1m"), *(pytest.param(r, "0s", marks=pytest.mark.nightly) for r in (0.001, 0.05))]
)
def test_met_first_answers_rarely_miss_and_whole_windows_are_met(rate: float, lateness: str) -> None:
    score = Score.of(after_the_first(rate, lateness=lateness))
    assert score.met == score.answers and score.whole_met == score.whole
    assert 0 < score.width < 8 * rate + 0.02
    # A count, two extrema and three measures that move with the sum miss with probabilities of 1/41 to 1/101 each, at
    # most: 4 of 68 are expected.
    assert score.missed <= 7


@pytest.mark.slow
def test_a_query_without_late_records_allows_for_none() -> None:
    score = Score.of(after_the_first(0.0))
    assert (score.met, score.missed, score.width) == (score.answers, 0, 0.0)


@pytest.mark.slow
def test_an_old_edge_leaves_sums_without_bounds_so_nothing_is_met() -> None:
    answers = after_the_first(0.01, statements=False)
    assert not any(each.met or each.missed == ("s",) for each in answers)


def test_few_windows_may_change() -> None:
    answers = first_answers(LateTrace(0.05, windows=15, records=300), {})
    assert [each.met for each in answers] == [True] + [False] * 12


@pytest.mark.slow
def test_bounds_that_exceed_the_budget_may_change() -> None:
    budget = {"budget": {"error": {"n": "1%", "s": "1%"}}}
    assert not any(each.met for each in after_the_first(0.05, **budget))
