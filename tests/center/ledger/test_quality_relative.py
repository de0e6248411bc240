"""A relative budget is each group's own; an answer states it, and what it withholds by it is no violation."""

from __future__ import annotations

from typing import Any

from center.ledger.quality import WithheldBound, _over_budget
from edgewater.query import ErrorBudget

BUDGET = ErrorBudget((("s", 5.0),), (("r", 0.01),))


def codes(**withheld: Any) -> list[str]:
    return [v.code for v in _over_budget({n: WithheldBound(above, 0.0) for n, above in withheld.items()}, BUDGET)]


def test_withholding_within_a_relative_budget_is_no_violation() -> None:
    assert codes(r=1e9) == []


def test_other_measures_keep_their_absolute_limits() -> None:
    assert codes(r=1e9, s=5.0) == []
    assert codes(s=5.1) == ["error-budget"]


def test_a_measure_that_the_budget_does_not_name_has_no_limit() -> None:
    assert codes(other=0.1) == []
