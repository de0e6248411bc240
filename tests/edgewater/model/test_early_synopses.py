"""Accuracies about synopses: what is refused, and how the error divides."""

from __future__ import annotations

import math
from typing import Any

import pytest

from edgewater.base.errors import InvalidQuery
from edgewater.model.early_synopses import own_error, split_confidence, straggler_share
from edgewater.model.measure import Measure
from edgewater.model.query import QuerySpec
from tests.refusals import refused


def spec(text: str, error: str = "5%", **parts: Any) -> QuerySpec:
    measures = {"m": text, "n": "count()", **parts.pop("measures", {})}
    accuracy = {"error": error, "measure": "m", **parts.pop("accuracy", {})}
    given = {"name": "q", "from": "s", "measures": measures, "window": {"tumbling": "3s"}, "accuracy": accuracy}
    return QuerySpec.from_mapping({**given, **parts})


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("quantile(x, 0.5)", 0.05),
        ("quantile(x, 0.99)", 0.0095),
        ("quantile(x, 0.02)", 0.019),
        ("quantiles(x)", 0.0095),
        ("top_k(x, 10)", 0.04),
        ("top_k(x, 10, capacity=1000)", 0.049),
        ("count_min(x, width=1024)", 0.05 - math.e / 1024),
        ("equi_width(x, 0, 1)", 0.05),
        ("max(x)", 0.025),
    ],
)
def test_the_error_less_the_certain_error_of_the_synopsis_remains_for_records_that_are_out(
    text: str, share: float
) -> None:
    early = spec(text).early_accuracy
    assert early is not None
    assert early.error == pytest.approx(share) and early.confidence == 0.95


@pytest.mark.parametrize(("text", "own"), [("distinct(x)", 0.0184), ("kll(x, k=800)", 0.0034)])
def test_the_failures_of_a_synopsis_with_a_confidence_and_of_the_number_of_records_add_up(
    text: str, own: float
) -> None:
    measure = Measure.parse("m", text)
    records, synopsis = split_confidence(measure, 0.95)
    assert (1 - records) + (1 - synopsis) == pytest.approx(0.05)
    assert own_error(measure, synopsis) == pytest.approx(own, rel=0.03)
    early = spec(text).early_accuracy
    assert early is not None and early.confidence == pytest.approx(0.975)
    assert early.error == pytest.approx(min(0.05 - own, 0.0095 if "kll" in text else 1), rel=0.01)


def test_the_records_that_edges_may_withhold_leave_less_for_records_that_are_out() -> None:
    early = spec("quantile(x, 0.5)", budget={"error": {"m": "2%"}}).early_accuracy
    assert early is not None and early.error == pytest.approx(0.03)
    assert straggler_share(Measure.parse("m", "quantile(x, 0.9)"), 0.5, 0.95, 0.02) == pytest.approx(0.075)
    with refused(InvalidQuery, "budget.error.m"):
        spec("top_k(x, 10)", budget={"error": {"m": "4.5%"}})
    with refused(InvalidQuery, "budget.error.m"):
        spec("top_k(x, 10)", budget={"error": {"m": 100}})


def test_a_budget_that_leaves_nothing_but_rounding_is_refused() -> None:
    """0.02 - 0.01 · 0.95 and such are not 0 in floating point."""
    budget = {"error": {"m": "0.95%"}}
    with refused(InvalidQuery, "budget.error.m"):
        spec("quantile(x, 0.99)", error="2%", budget=budget)


def test_the_highest_confidence_divides() -> None:
    for text in ("kll(x)", "distinct(x)"):
        asked = spec(text, "99%", accuracy={"confidence": "99.9999999999%"})
        assert QuerySpec.from_mapping(asked.to_mapping()) == asked


def test_a_synopsis_that_cannot_keep_the_accuracy_is_refused() -> None:
    with refused(InvalidQuery, "accuracy.error"):
        spec("distinct(x, precision=10)")
    with refused(InvalidQuery, "accuracy.error"):
        spec("top_k(x, 1)")
    with refused(InvalidQuery, "measures.m"):
        spec("quantile(x, 1.0)")
    with refused(InvalidQuery, "accuracy.measure"):
        spec("var(x)")


def test_distinct_and_samples_need_a_count_beside_them_and_no_simultaneous_intervals() -> None:
    for text in ("distinct(x)", "reservoir(x)", "bernoulli(x, 0.1)"):
        with refused(InvalidQuery, "measures"):
            spec(text, measures={"n": "sum(x)"})
    scope: dict[str, Any] = {"accuracy": {"scope": "all"}, "group_by": ["k"]}
    for text in ("distinct(x)", "reservoir(x)", "max(x)"):
        with refused(InvalidQuery, "accuracy.scope"):
            spec(text, **scope)
    assert spec("quantile(x, 0.5)", **scope).accuracy is not None


def test_a_spec_with_an_accuracy_about_a_synopsis_is_read_back() -> None:
    made = spec("quantile(x, 0.9)", budget={"error": {"m": "1%"}})
    assert QuerySpec.from_mapping(made.to_mapping()) == made


def test_an_accuracy_about_several_synopses_leaves_the_least_of_their_shares() -> None:
    several: dict[str, Any] = {"measures": {"users": "distinct(x)"}, "accuracy": {"measure": ["m", "users"]}}
    made = spec("quantile(x, 0.99)", **several)
    assert QuerySpec.from_mapping(made.to_mapping()) == made
    early = made.early_accuracy
    assert early is not None and early.error == pytest.approx(0.0095), "a 99th percentile needs the most records"
    assert early.confidence == pytest.approx(0.975), "the number of records is needed for distinct, too"
    one = spec("quantile(x, 0.99)", accuracy={"measure": ["m"]})
    assert one.accuracy is not None and one.accuracy.to_mapping()["measure"] == "m"


@pytest.mark.parametrize(
    ("named", "value"), [(["m", "total"], ["m", "total"]), (["m", "n"], ["m", "n"]), (["m", "x"], "x"), ([], [])]
)
def test_an_accuracy_about_several_measures_is_about_synopses_only(named: list[str], value: object) -> None:
    with refused(InvalidQuery, "accuracy.measure", value):
        spec("quantile(x, 0.5)", measures={"total": "sum(x)"}, accuracy={"measure": named})
