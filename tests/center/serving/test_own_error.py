"""The error by cause is that of the cells, for each measure; only exact measures are called exact."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from center.serving.measures import MeasureQuestions
from tests.center.answer_world import World, query, rows
from tests.center.rendered import render

SKETCHES = {"users": "distinct(i, precision=6)", "q": "quantiles(f)", "top": "top_k(i, k=3, capacity=30)",
            "freq": "count_min(i, width=16, depth=3)", "pair": "fast_agms(i, width=16, depth=3)"}  # fmt: skip
SAMPLES = {"some": "reservoir(f, size=20)", "half": "bernoulli(f, rate=0.5)", "mid": "exact_quantile(f, limit=50)"}
EXACT = {
    "n": "count()",
    "total": "sum(f)",
    "whole": "sum(i)",
    "most": "max(i)",
    "middle": "mean(f)",
    "spread": "var(f)",
}


def world(measures: dict[str, str], **parts: object) -> World:
    made = World(query(measures, **parts), 2)
    for edge in range(2):
        for at in range(4):
            made.reads(edge, [{"key": "ab"[i % 2], "i": i * i % 97, "f": i / 7} for i in range(at, 900, 4)], at)
    return made


def intervals(cell: Any) -> list[tuple[float, float, float]]:
    """All intervals of a cell, of samples that of the mean."""
    if isinstance(cell, list):
        return [i for each in cell for i in intervals(each)]
    if not isinstance(cell, dict):
        return []
    if "estimate" in cell:
        return [(cell["estimate"], cell["lower"], cell["upper"])]
    if "mean" in cell:
        return intervals(cell["mean"])
    return [i for each in cell.values() for i in intervals(each)]


@pytest.mark.parametrize("measures,cause,other", [(SKETCHES, "sketch", "sampling"), (SAMPLES, "sampling", "sketch")])
def test_the_error_of_a_synopsis_is_the_largest_distance_of_a_bound(
    measures: dict[str, str], cause: str, other: str
) -> None:
    answer = world(measures).answer()
    stated = answer["quality"]["error"]
    for name in measures:
        shown = [i for row in answer["data"] for i in intervals(row[name])]
        widest = max(max(upper - value, value - lower) for value, lower, upper in shown)
        assert stated[cause][name] == pytest.approx(widest), name
        assert (widest > 0) == (name != "freq"), "the number of all items is exact"
    assert set(stated[other].values()) == {0} and stated["rounding"] == {}
    assert answer["contract"]["requested"] == {"exact": dict.fromkeys(measures, False)}
    assert answer["contract"]["met"] and stated["missing"] == dict.fromkeys(measures, 0)


def test_exact_measures_state_their_rounding() -> None:
    answer = world(EXACT).answer()
    stated = answer["quality"]["error"]
    assert answer["contract"]["requested"] == {"exact": True} and answer["contract"]["met"]
    assert set(stated["sketch"].values()) == set(stated["sampling"].values()) == {0}
    assert stated["rounding"]["n"] == stated["rounding"]["whole"] == stated["rounding"]["most"] == 0
    values = [Fraction(i / 7) for at in range(4) for i in range(at, 900, 4) if i % 2 == 0] * 2
    total, cells = sum(values), rows(answer)["a"]
    mean = total / len(values)
    spread = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
    for name, true in (("total", total), ("middle", mean), ("spread", spread)):
        error = abs(Fraction(cells[name]["estimate"]) - true)
        assert 0 < error <= Fraction(stated["rounding"][name]) < abs(true) / 10**9


def test_some_measures_are_exact() -> None:
    answer = world({"n": "count()", "users": "distinct(i)"}).answer()
    assert answer["contract"]["requested"] == {"exact": {"n": True, "users": False}}


def test_a_sum_beyond_float64_is_not_exact() -> None:
    made = World(query({"v": "sum(f)"}), 1)
    made.reads(0, [{"key": "a", "f": 1.7e308}, {"key": "a", "f": 1.7e308}])
    answer = made.answer()
    assert rows(answer)["a"]["v"]["not_finite"] == "Infinity"
    assert answer["quality"]["error"]["rounding"] == {"v": None}
    assert [v["code"] for v in answer["contract"]["violations"]] == ["rounding"]
    made = World(query({"v": "sum(f)"}), 1)
    made.reads(0, [{"key": "a", "f": f} for f in (1.7e308, 1.7e308, -1.7e308)])
    assert rows(made.answer())["a"]["v"]["estimate"] == 1.7e308


def test_the_error_is_that_of_the_whole_answer_whatever_is_asked() -> None:
    made = world({"n": "count()", "q": "quantiles(f)"})
    record = made.record()
    asked = MeasureQuestions(quantiles=(0.1,), measures=("q",), groups=(("key", ("a",)),))
    assert render(record, made.spec, asked)["quality"] == made.answer()["quality"]
