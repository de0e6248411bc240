"""Intervals under an error budget, against the truth: of groups of very different sizes, and of sketches.

Records go through real edge cores, the ledger and the rendering. An answer that is met states no interval that is wider
than its budget, and no value without bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, event, example, given
from hypothesis import strategies as st

from center.serving.measures import MeasureQuestions
from center.serving.withheld import GroupsWithheld, with_withheld_amounts
from edgewater.answers import WithheldBound
from edgewater.model.query import QuerySpec
from edgewater.synopses import Estimates
from tests.center.answer_world import World, query, rows
from tests.examples import examples

EDGES = 3
EAGER = {"eviction": "mae"}
SLIDING = {"sliding": "1s", "every": "500ms"}
Batch = tuple[int, int, str, int, int]
"""Edge, event time, group, number of records, and their value."""

batches = st.lists(
    st.tuples(
        st.integers(0, EDGES - 1),
        st.sampled_from([10, 310, 610]),
        st.sampled_from("abc"),
        st.sampled_from([1, 2, 9, 30, 300]),
        st.integers(0, 50),
    ),
    min_size=1,
    max_size=10,
)


def made(spec: QuerySpec, given: Sequence[Batch], shares: dict[str, float] | None = None, **parts: Any) -> World:
    world = World(spec, EDGES, shares=shares or {}, **parts)
    for edge, time_ms, key, count, value in sorted(given, key=lambda b: b[1]):
        records = [{"key": key, "f": float(value + i % 7), "i": value + i % 7} for i in range(count)]
        world.reads(edge, records, time_ms, pulls=True)
    return world


def values(given: Sequence[Batch], group: str) -> list[float]:
    return [float(v + i % 7) for _, _, key, count, v in given if key == group for i in range(count)]


def check_interval(cell: dict[str, Any], true: float, limit: float | str, is_met: bool, shown: str) -> None:
    """The interval has the truth, and is within the budget wherever in it the truth is."""
    value, lower, upper = cell["estimate"], cell["lower"], cell["upper"]
    assert lower is None or lower <= true + 1e-9, shown
    assert upper is None or upper >= true - 1e-9, shown
    if is_met:
        for bound in (lower, upper):
            assert bound is not None, shown
            most = float(limit[:-1]) / 100 * max(abs(bound), 1.0) if isinstance(limit, str) else limit
            assert abs(bound - value) <= most * (1 + 1e-9), shown


@pytest.mark.nightly
@examples(150)
@given(
    batches,
    st.sampled_from(["count()", "sum(f)", "sum(-f)", "sum(i)", "max(f)", "min(f)", "min(-f)", "max(-f)"]),
    st.sampled_from(["1%", "10%", "60%", 20.0]),
    st.sampled_from([{"tumbling": "1s"}, SLIDING]),
)
@example([(0, 10, "a", 300, 1), (0, 10, "b", 30, 1), (0, 310, "a", 2, 1)], "count()", "1%", {"tumbling": "1s"})
@example([(e, 10, "a", 300, 1) for e in range(3)] + [(e, 610, "a", 2, 1) for e in range(3)]
         + [(0, 10, "b", 30, 1)], "sum(f)", "1%", SLIDING)  # fmt: skip
def test_a_met_answer_states_no_interval_wider_than_its_budget(
    given: list[Batch], measure: str, limit: Any, window: dict[str, Any]
) -> None:
    spec = query({"v": measure}, budget={"error": {"v": limit}}, cache=EAGER, window=window)
    is_sum = measure.startswith(("count", "sum"))
    shares = None if isinstance(limit, str) else {"v": limit / EDGES if is_sum else limit}
    answer = made(spec, given, shares).answer()
    assert answer["contract"]["met"] or measure == "max(-f)", answer["contract"]
    stated = rows(answer)
    event(f"withheld: {bool(answer['quality']['error']['withheld'])}")
    for group in {b[2] for b in given}:
        found = [-v for v in values(given, group)] if "-" in measure else values(given, group)
        function = {"count()": len, "max": max, "min": min}.get(measure if measure == "count()" else measure[:3], sum)
        true = float(function(found))
        shown = f"{measure} {limit} of {group}: {stated.get(group)}, the truth is {true}, {answer['contract']}"
        if group in stated:
            check_interval(stated[group]["v"], true, limit, answer["contract"]["met"], shown)
        elif isinstance(limit, str):
            assert true == 0.0, shown  # a group is sent, unless its value is 0
        else:
            assert abs(true) <= answer["quality"]["error"]["withheld"]["v"]["above"], shown


@pytest.mark.parametrize("edges", [1, 3])
def test_the_interval_of_a_small_group_does_not_depend_on_what_is_withheld_of_a_large_one(edges: int) -> None:
    spec = query({"v": "count()"}, budget={"error": {"v": "1%"}}, cache=EAGER)
    records = [(e, 10, "large", 3000, 1) for e in range(edges)] + [(0, 10, "small", 150, 1)]
    records += [(e, 310, "large", 25, 1) for e in range(edges)]
    answer = made(spec, records).answer()
    assert answer["quality"]["error"]["withheld"]["v"]["above"] == 25 * edges
    assert answer["contract"]["met"]
    large, small = rows(answer)["large"]["v"], rows(answer)["small"]["v"]
    assert large == {"estimate": 3000 * edges, "lower": 3000 * edges, "upper": 3025 * edges}
    assert small == {"estimate": 150, "lower": 150, "upper": 151}


@pytest.mark.parametrize(("above", "excess"), [(11.0, {}), (15.0, {"v": (15.0, 11.5)})])
def test_a_relative_limit_applies_to_the_bound_of_an_interval(above: float, excess: dict[str, Any]) -> None:
    spec = query({"v": "sum(f)"}, budget={"error": {"v": "10%"}})
    withheld = GroupsWithheld.of(spec, {"v": WithheldBound(above, 0.0, None, 1.0, 0.0)})
    stack = spec.measures[0].stack(pa.float64())
    estimates = Estimates.exact(np.array([100.0]))
    widened = withheld.widen(spec.measures[0], stack, estimates, None, np.zeros(1))
    assert (widened.lower[0], widened.upper[0]) == (100.0, 100.0 + above)
    assert withheld.excess == {name: pytest.approx(each) for name, each in excess.items()}


OWN = [{"key": key} for key in "abc"]


@examples(60)
@given(batches, st.sampled_from(["count()", "sum(f)", "max(f)"]), st.sampled_from([9.0, 90.0, "10%"]), st.booleans())
@example([(e, t, k, n, 1) for e, k in enumerate("abc") for t, n in ((10, 300), (310, 2))], "count()", 9.0, True)
def test_only_edges_that_may_have_records_of_a_group_widen_its_interval(
    given: list[Batch], measure: str, limit: Any, all_have_constants: bool
) -> None:
    """Each edge has records of one group. The last edge states no constant, or all state one."""
    given = [(edge, time_ms, "abc"[edge], *rest) for edge, time_ms, _, *rest in given]
    spec = query({"v": measure, "d": "distinct(i)"}, budget={"error": {"v": limit}}, cache=EAGER)
    is_sum = measure != "max(f)"
    shares = None if isinstance(limit, str) else {"v": limit / EDGES if is_sum else limit}
    constants = OWN if all_have_constants else [*OWN[:2], {}]
    answer = made(spec, given, shares, constants=constants).answer()
    withheld = answer["quality"]["error"]["withheld"].get("v", {"above": 0.0})
    for group, row in rows(answer).items():
        found = values(given, group)
        true = float({"count()": len, "max(f)": max, "sum(f)": sum}[measure](found))
        shown = f"{measure} {limit} of {group}: {row}, {answer['quality']}"
        check_interval(row["v"], true, limit, answer["contract"]["met"], shown)
        check_within(row["d"], len(set(found)), "distinct")
        if all_have_constants and not isinstance(limit, str):
            assert row["v"]["upper"] - row["v"]["estimate"] <= (limit / EDGES if is_sum else limit), shown
        assert row["v"]["upper"] - row["v"]["estimate"] <= withheld["above"] + 1e-9, shown


SKETCHES = {
    "n": "count()", "d": "distinct(i)", "q": "quantiles(f)", "k": "kll(f)", "t": "top_k(i, 10)", "cm": "count_min(i)",
    "b": "bloom(i, capacity=1000)", "cf": "counting_cuckoo(i, capacity=1000)", "j": "fast_agms(i)",
    "h": "histogram(f, lo=0, hi=60, buckets=6)", "ed": "equi_depth(f, buckets=3)",
}  # fmt: skip


def check_within(cell: dict[str, Any], true: float, shown: str, slack: float = 1e-9) -> None:
    assert cell["lower"] is None or cell["lower"] <= true + slack, f"{shown}: {cell}, the truth is {true}"
    assert cell["upper"] is None or cell["upper"] >= true - slack, f"{shown}: {cell}, the truth is {true}"


def check_sketches(row: dict[str, Any], found: Sequence[float]) -> None:
    """Compares each value of the cells with its truth. With few values no sketch exceeds its interval."""
    ordered, frequency = sorted(found), {v: found.count(v) for v in found}
    check_within(row["d"], len(frequency), "distinct")
    check_within(row["b"], len(frequency), "bloom")
    check_within(row["cf"], len(frequency), "cuckoo")
    check_within(row["cm"], len(found), "count_min")
    check_within(row["j"], sum(n * n for n in frequency.values()), "self-join size")
    for item in row["t"]["top"]:
        check_within(item, frequency[float(item["item"])], f"frequency of {item['item']}")
    for name in ("q", "k"):
        for q, cell in row[name]["quantiles"].items():
            check_within(cell, ordered[math.floor(float(q) * (len(ordered) - 1))], f"{name} at {q}")
    for at, cell in enumerate(row["ed"]["boundaries"]):
        check_within(cell, ordered[math.floor(at / 3 * (len(ordered) - 1))], f"boundary {at}")
    for bucket in row["h"]["buckets"]:
        inside = [v for v in found if bucket["from"] <= v < bucket["to"]]
        check_within(bucket, len(inside), f"bucket from {bucket['from']}")


def check_questions(row: dict[str, Any], found: Sequence[float]) -> None:
    for name in ("q", "k", "ed"):
        for x, cell in row[name]["ranks"].items():
            check_within(cell, sum(v <= float(x) for v in found) / len(found), f"rank of {x} in {name}")
    for name in ("t", "cm", "cf"):
        for cell in row[name]["items"]:
            check_within(cell, found.count(float(cell["item"])), f"frequency of {cell['item']} in {name}")
    for cell in row["b"]["contains"]:
        check_within(cell, float(cell["item"]) in found, f"whether {cell['item']} is in the filter")
    for cell in row["ed"]["ranges"].values():
        check_within(cell, sum(0 <= v <= 9 for v in found), "range")


def has_null(value: Any) -> bool:
    if isinstance(value, dict):
        return any(value.get(side, 0) is None for side in ("lower", "upper")) or any(map(has_null, value.values()))
    return isinstance(value, list) and any(map(has_null, value))


@pytest.mark.nightly
@examples(60)
@given(batches, st.sampled_from(["2%", "30%", 12.0]), st.sampled_from([{"tumbling": "1s"}, SLIDING]))
@example([(0, 10, "a", 300, 1), (0, 310, "a", 2, 40)], "2%", {"tumbling": "1s"})
@example([(0, 10, "a", 9, 1), (1, 10, "a", 30, 1), (0, 610, "a", 2, 40)], "30%", SLIDING)
def test_sketches_state_true_bounds_where_records_are_withheld(
    given: list[Batch], limit: Any, window: dict[str, Any]
) -> None:
    spec = query(SKETCHES, budget={"error": {"n": limit}}, cache=EAGER, window=window)
    world = made(spec, given, None if isinstance(limit, str) else {"n": limit / EDGES})
    answer = world.answer()
    stated = rows(answer)
    event(f"withheld: {bool(answer['quality']['error']['withheld'])}, met: {answer['contract']['met']}")
    for group, row in stated.items():
        check_sketches(row, values(given, group))
    if answer["contract"]["met"]:
        assert not has_null(answer["data"]), answer
    else:
        assert [v["code"] for v in answer["contract"]["violations"]] == ["withheld"] * len(
            answer["contract"]["violations"]
        )
    asked = MeasureQuestions(ranks=(3.0, 20.0), items=("3", "40"), contains=("3", "40"), ranges=((0.0, 9.0),))
    for group, row in rows(world.answer(asked)).items():
        check_questions(row, values(given, group))


def test_a_percentile_keeps_its_interval_where_few_records_are_withheld() -> None:
    spec = query({"n": "count()", "q": "quantiles(f)"}, budget={"error": {"n": "2%"}}, cache=EAGER)
    answer = made(spec, [(0, 10, "a", 300, 1), (0, 310, "a", 2, 40)]).answer()
    assert answer["quality"]["error"]["withheld"]["q"]["above"] == 2
    quantiles = rows(answer)["a"]["q"]["quantiles"]
    assert all(c["lower"] is not None and c["upper"] is not None for q, c in quantiles.items() if q != "0.99")
    assert quantiles["0.99"]["upper"] is not None, "the two records are above it"
    assert answer["contract"]["met"]


@pytest.mark.parametrize("function", ["mean(f)", "var(f)", "reservoir(f, 10)", "exact_quantile(f, 0.5)"])
def test_a_measure_without_bounds_is_not_met_unless_the_budget_limits_its_records(function: str) -> None:
    records = [(0, 10, "a", 300, 1), (0, 310, "a", 2, 40)]
    measures, of_count = {"n": "count()", "m": function}, {"n": "2%"}
    spec = query(measures, budget={"error": of_count}, cache=EAGER)
    assert [note.partition(":")[0] for note in spec.notes] == ["budget.error.n", "measures.m"]
    contract = made(spec, records).answer()["contract"]
    assert [v["code"] for v in contract["violations"]] == ["withheld"]
    limited = query(measures, budget={"error": {**of_count, "m": "2%"}}, cache=EAGER)
    assert [note.partition(":")[0] for note in limited.notes].count("budget.error.m") == 2
    assert made(limited, records).answer()["contract"]["met"]
    exact = made(spec, records[:1]).answer()
    assert exact["contract"]["met"]
    assert not has_null(exact["data"])


@pytest.mark.parametrize("function", ["sum(f)", "max(f)"])
@pytest.mark.parametrize("withheld", [math.inf, math.nan])
def test_a_value_that_lost_its_bound_is_not_met_though_the_budget_names_another_measure(
    function: str, withheld: float
) -> None:
    spec = query({"n": "count()", "m": function}, budget={"error": {"n": "2%"}}, cache=EAGER)
    world = World(spec, EDGES)
    world.reads(0, [{"key": "a", "f": 1.0}] * 300, 10, pulls=True)
    world.reads(0, [{"key": "a", "f": withheld}] * 2, 310, pulls=True)
    answer = world.answer()
    assert rows(answer)["a"]["m"]["upper"] is None
    assert not answer["contract"]["met"]
    assert [v["code"] for v in answer["contract"]["violations"]] == ["withheld"]


@examples(30)
@given(batches)
def test_a_budget_without_a_count_bounds_sketches_too(given: list[Batch]) -> None:
    """Sums of bytes limit no number of records. The edge states how many records it withholds."""
    spec = query({"s": "sum(f)", "d": "distinct(i)", "t": "top_k(i, 10)"}, budget={"error": {"s": 90}}, cache=EAGER)
    answer = made(spec, given, {"s": 30.0}).answer()
    assume(answer["data"])
    for group, row in rows(answer).items():
        found = values(given, group)
        check_within(row["d"], len(set(found)), "distinct")
        for item in row["t"]["top"]:
            check_within(item, found.count(float(item["item"])), f"frequency of {item['item']}")
    assert answer["contract"]["met"]
    assert not has_null(answer["data"])


def test_an_infinite_value_has_no_bounds_under_an_unlimited_amount() -> None:
    values = np.array([math.inf, -math.inf, 1.0])
    lower, upper = with_withheld_amounts(values, values, WithheldBound(math.inf, math.inf), whole=False)
    assert [bool(low == -math.inf or math.isnan(low)) for low in lower] == [True] * 3
    assert [bool(high == math.inf or math.isnan(high)) for high in upper] == [True] * 3
