"""A relative budget is each group's own: the largest withheld share of any group is compared with it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from center.ledger.window_facts import window_facts
from center.ledger.withheld import CloseTotals
from edgewater.answers import WithheldBound
from edgewater.answers.statement import violations_of_facts
from edgewater.wire import Signs, SliceClose, Withheld
from tests.center.answer_world import query

SUMS = {"s": "sum(f)", "r": "sum(i)", "other": "sum(x)"}
SPEC = query(SUMS, budget={"error": {"s": 5, "r": "1%"}})


def codes(share: float = 0.01, signs: frozenset[int] = frozenset({1}), **withheld: Any) -> list[str]:
    bounds = {n: WithheldBound(above, 0.0, None, share, 0.0) for n, above in withheld.items()}
    totals = CloseTotals(1, 0, bounds, {"r": signs})
    facts = window_facts(SPEC, totals, expected=1, staleness_ms=0, first_staleness_ms=0)
    return [violation.code for violation in violations_of_facts(facts, SPEC)]


def test_withholding_within_a_relative_budget_is_no_violation() -> None:
    assert codes(r=1e9) == []


@pytest.mark.parametrize("share", [0.011, 1.0, math.inf])
def test_a_larger_or_unknown_share_violates_a_relative_budget(share: float) -> None:
    assert codes(share, r=1.0) == ["error-budget"]


def test_a_percentage_of_values_of_both_signs_violates_the_budget_once() -> None:
    assert codes(math.inf, frozenset({1, -1}), r=1.0) == ["both-signs"]


def test_other_measures_keep_their_absolute_limits() -> None:
    assert codes(r=1e9, s=5.0) == []
    assert codes(s=5.1) == ["error-budget"]


def test_a_measure_that_the_budget_does_not_name_has_no_limit() -> None:
    assert codes(other=0.1) == []


def test_the_largest_share_of_any_edge_and_slice_holds_and_none_for_values_of_both_signs() -> None:
    spec = query({"v": "sum(f)"}, budget={"error": {"v": "10%"}})

    def close(share: float | None, signs: Signs = Signs.NOT_NEGATIVE) -> SliceClose:
        return SliceClose(0, 5, 0, (Withheld("v", 2.0, 1.0, 1, None, signs, share, 0.0),))

    def bound(*closes: SliceClose) -> WithheldBound:
        return (CloseTotals.of_closes(closes, spec).withheld or {})["v"]

    assert bound(close(0.01), close(0.03)) == WithheldBound(4.0, 2.0, None, 0.03, 0.0)
    assert bound(close(0.01), close(None)).above_share == math.inf
    assert bound(close(0.01), close(0.01, Signs.NEGATIVE)) == WithheldBound(4.0, 2.0)
    assert bound(close(0.01, Signs.NEGATIVE), SliceClose(0, 0, 0)).above_share == 0.01, "no record has no sign"
