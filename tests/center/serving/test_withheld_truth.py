"""What answers state under an error budget, against the truth: values of either sign, NaN and infinities included."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.center.answer_world import World, query, rows
from tests.examples import examples

ERROR = 40.0
EAGER = {"eviction": "mae"}
"""Sends whatever exceeds its limit when the link has room, so that later records can be withheld."""
EDGES = 3
Record = tuple[int, str, float]
"""Edge, group, value."""

amounts = st.one_of(st.integers(-60, 60), st.integers(-3000, 3000)).map(lambda n: n / 2)
worlds = st.lists(st.tuples(st.integers(0, EDGES - 1), st.sampled_from("abc"), amounts), min_size=1, max_size=12)
odd_amounts = st.one_of(amounts, st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0]))
odd_worlds = st.lists(
    st.tuples(st.integers(0, EDGES - 1), st.sampled_from("abc"), odd_amounts), min_size=1, max_size=12
)
FUNCTIONS = ("max", "min", "sum", "count", "mean")


def true_value(function: str, values: Sequence[float]) -> float:
    if function == "count":
        return len(values)
    if function in ("max", "min"):
        if any(map(math.isnan, values)):
            return math.nan
        return max(values) if function == "max" else min(values)
    try:
        total = math.fsum(values)
    except (ValueError, OverflowError):  # of infinities of either sign
        total = math.nan
    return total if function == "sum" else total / len(values)


def world(function: str, budget: Any, records: Sequence[Record], pulls: bool) -> dict[str, Any]:
    share = ERROR / EDGES if function in ("sum", "count", "mean") else ERROR
    made = World(
        query({"v": f"{function}(f)"}, budget={"error": {"v": budget}}, cache=EAGER),
        EDGES,
        shares={} if isinstance(budget, str) else {"v": share},
    )
    for edge in range(EDGES):
        mine = [{"key": key, "f": value} for e, key, value in records if e == edge]
        for at, batch in enumerate((mine[:2], mine[2:])):
            if batch:
                made.reads(edge, batch, 10 + 100 * at, pulls)
    return made.answer()


def check(function: str, budget: Any, records: Sequence[Record], answer: dict[str, Any]) -> None:
    """Every statement about a group in the answer is true; with the contract met its error is within the budget."""
    limit = 0.3 if isinstance(budget, str) else ERROR
    stated = rows(answer)
    for key in {key for _, key, _ in records}:
        values = [v for _, k, v in records if k == key]
        true = true_value(function, values)
        if key not in stated:
            assert function == "mean" or math.isfinite(true), f"group {key} is {true}, and was never sent"
            continue
        cell = stated[key]["v"]
        value, lower, upper = cell["estimate"], cell["lower"], cell["upper"]
        shown = f"{function} of {key}: {cell}, the truth is {true}"
        if not math.isfinite(true):
            if answer["contract"]["met"]:
                name = "NaN" if math.isnan(true) else "Infinity" if true > 0 else "-Infinity"
                assert function == "mean" or (value is None and cell["not_finite"] == name), shown
            assert lower is None or true >= lower, shown
            assert upper is None or true <= upper, shown
            continue
        assert lower is None or lower <= true + 1e-9, shown
        assert upper is None or upper >= true - 1e-9, shown
        if answer["contract"]["met"] and function != "mean":
            error = abs(value - true)
            assert error <= (limit * max(abs(true), 1.0) if isinstance(budget, str) else limit) + 1e-9, shown


@examples(120)
@given(worlds, st.sampled_from(FUNCTIONS), st.sampled_from([ERROR, "30%"]), st.booleans())
@example([(0, "a", -500.0), (1, "a", 30.0)], "max", ERROR, False)
@example([(0, "a", -500.0), (1, "a", 0.0)], "max", ERROR, False)
@example([(0, "a", -500.0), (1, "a", 0.0)], "max", "30%", False)
@example([(0, "a", 100.0), (1, "a", -99.0)], "sum", "30%", False)
@example([(0, "a", 100.0), (0, "a", 12.0), (1, "a", -99.0)], "sum", "30%", True)
def test_what_is_stated_of_values_of_either_sign_is_true(
    records: list[Record], function: str, budget: Any, pulls: bool
) -> None:
    check(function, budget, records, world(function, budget, records, pulls))


@examples(120)
@given(odd_worlds, st.sampled_from(FUNCTIONS), st.sampled_from([ERROR, "30%"]), st.booleans())
@example([(0, "a", math.inf), (0, "a", -math.inf), (1, "a", 1.0)], "sum", ERROR, False)
@example([(0, "a", math.inf), (1, "b", 1.0)], "sum", "30%", False)
@example([(0, "a", -math.inf), (1, "a", 3.0)], "max", ERROR, False)
@example([(0, "a", math.nan), (1, "a", 3.0)], "max", "30%", False)
@pytest.mark.slow
def test_what_is_stated_of_nan_and_infinities_is_true(
    records: list[Record], function: str, budget: Any, pulls: bool
) -> None:
    check(function, budget, records, world(function, budget, records, pulls))


@pytest.mark.parametrize("budget", [{"error": {"v": 100}}, {"error": {"v": "10%"}}, None])
@pytest.mark.parametrize(
    "measure,name",
    [("sum(ln(i))", "-Infinity"), ("max(ln(i - 1))", "NaN"), ("min(ln(i))", "-Infinity"), ("mean(ln(i))", "-Infinity"),
     ("sum(sqrt(i - 1))", "NaN")],
)  # fmt: skip
def test_a_logarithm_of_zero_reaches_the_answer(measure: str, name: str, budget: Any) -> None:
    spec = query({"v": measure}, **({"budget": budget} if budget else {}))
    made = World(spec, 2, shares={"v": 50.0} if budget else {})
    made.reads(0, [{"key": "a", "i": 0}, {"key": "b", "i": 1}, {"key": "b", "i": 5}])
    made.reads(1, [{"key": "a", "i": 7}, {"key": "b", "i": 5}])
    answer = made.answer()
    if budget and measure.startswith("mean"):
        return  # records are withheld, which the answer states
    assert rows(answer)["a"]["v"] == {"estimate": None, "lower": None, "upper": None, "not_finite": name}
    assert answer["contract"]["met"]
    (value,) = made.table().slice(0, 1)["v"].to_pylist()
    assert str(value) == {"NaN": "nan", "-Infinity": "-inf"}[name]
    assert made.csv().splitlines()[1].startswith('"a",' + str(value))


def test_maxima_of_both_signs_meet_the_budget_where_every_edge_has_sent_something_of_each_group() -> None:
    made = World(query({"v": "max(f)"}, budget={"error": {"v": ERROR}}), 2, shares={"v": ERROR})
    made.reads(0, [{"key": "a", "f": -500.0}, {"key": "b", "f": 1e3}])
    made.reads(1, [{"key": "a", "f": 30.0}, {"key": "c", "f": -1.0}])
    answer = made.answer()
    assert answer["contract"]["met"]
    assert rows(answer)["a"]["v"]["estimate"] == 30.0


def test_a_maximum_that_was_never_sent_is_unknown_below_the_limit() -> None:
    made = World(query({"v": "max(f)"}, budget={"error": {"v": ERROR}}), 2, shares={"v": ERROR})
    made.reads(0, [{"key": "a", "f": -500.0}])
    made.reads(1, [{"key": "a", "f": 30.0}])
    answer = made.answer()
    assert rows(answer)["a"]["v"] == {"estimate": -500.0, "lower": -500.0, "upper": 30.0}
    assert not answer["contract"]["met"]
    assert [v["code"] for v in answer["contract"]["violations"]] == ["error-budget"]


def test_a_percentage_of_sums_of_both_signs_is_not_met_and_of_one_sign_is() -> None:
    for sign, met in ((-1.0, False), (1.0, True)):
        made = World(query({"v": "sum(f)"}, budget={"error": {"v": "10%"}}, cache=EAGER), 2)
        made.reads(0, [{"key": "a", "f": 100.0}], 10, True)
        made.reads(0, [{"key": "a", "f": 5.0}], 20)
        made.reads(1, [{"key": "a", "f": sign * 99.0}])
        answer = made.answer()
        assert answer["contract"]["met"] is met, answer
