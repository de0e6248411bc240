"""Numbers keep their digits from the records to JSON, Arrow and CSV; nothing cancels."""

from __future__ import annotations

import json
from typing import Any

import pytest

from center.api.answer_cache import to_json
from tests.center.answer_world import World, query, rows

BIG = (1 << 53) + 1
GREATEST = (1 << 63) - 1


def world(measures: dict[str, str], column: str, *edges: list[Any], **parts: object) -> World:
    made = World(query(measures, **parts), len(edges), shares=dict.fromkeys(measures, 1e6) if parts else {})
    for edge, values in enumerate(edges):
        made.reads(edge, [{"key": "a", column: value} for value in values])
    return made


def test_integers_beyond_float64_keep_their_digits() -> None:
    made = world({"most": "max(i)", "least": "min(i)", "total": "sum(i)", "n": "count(i)"}, "i", [BIG, 1], [-BIG])
    cells = rows(json.loads(to_json(made.answer())))["a"]
    for name, value in (("most", BIG), ("least", -BIG), ("total", 1), ("n", 3)):
        assert cells[name] == {"estimate": value, "lower": value, "upper": value}
    table = made.table()
    assert {str(t) for t in table.drop_columns(["key"]).schema.types} == {"int64"}
    assert table["most_upper"].to_pylist() == [BIG] and table["least_lower"].to_pylist() == [-BIG]
    assert f'"a",{BIG},{BIG},{BIG},{-BIG}' in made.csv()


def test_sums_beyond_int64_are_exact_in_json_and_null_in_tables() -> None:
    made = world({"total": "sum(i)", "n": "count()"}, "i", [GREATEST, GREATEST], [5])
    total = 2 * GREATEST + 5
    assert rows(json.loads(to_json(made.answer())))["a"]["total"]["estimate"] == total
    table = made.table()
    assert {str(t) for t in table.drop_columns(["key"]).schema.types} == {"int64"}
    assert (table["total"].to_pylist(), table["n"].to_pylist()) == ([None], [3])


@pytest.mark.parametrize("function", ["max", "sum"])
def test_bounds_of_large_integers_contain_the_truth(function: str) -> None:
    """A withheld amount of 1 is lost in float64 beside a large integer."""
    budget = {"error": {"v": 4}}
    made = world({"v": f"{function}(i)"}, "i", [1 << 60], [3], budget=budget, cache={"eviction": "mae"})
    truth = (1 << 60) + (3 if function == "sum" else 0)
    cell = rows(made.answer())["a"]["v"]
    assert cell["estimate"] == 1 << 60 and cell["lower"] <= truth <= cell["upper"]
    assert cell["upper"] > 1 << 60 or function == "max"


@pytest.mark.parametrize("sign", [1, -1])
def test_the_bound_of_a_large_integer_that_a_withheld_amount_makes_smaller_contains_the_truth(sign: int) -> None:
    """2^53 + 3 is rounded to 2^53 + 4, and 19 less is below 2^53, where float64 has all integers."""
    spec = query({"v": "sum(i)"}, budget={"error": {"v": 20}}, cache={"eviction": "mae"})
    made = World(spec, 1, shares={"v": 20.0})
    made.reads(0, [{"key": "a", "i": sign * ((1 << 53) + 3)}], 10, pulls=True)
    made.reads(0, [{"key": "a", "i": sign * -19}], 20)
    answer = made.answer()
    cell = rows(answer)["a"]["v"]
    assert cell["estimate"] == sign * ((1 << 53) + 3)
    assert cell["lower"] <= sign * ((1 << 53) - 16) <= cell["upper"]
    assert answer["total"]["v"]["estimate"] == sign * ((1 << 53) - 16)


def test_nothing_cancels() -> None:
    made = world({"total": "sum(f)", "middle": "mean(f)", "spread": "var(f)"}, "f", [1e16, 1.0], [-1e16])
    cells = rows(made.answer())["a"]
    assert (cells["total"]["estimate"], cells["middle"]["estimate"]) == (1.0, 1.0 / 3)
    assert cells["spread"]["estimate"] == pytest.approx(1e32, rel=1e-12)
    spread = rows(world({"v": "var(i)"}, "i", [1 << 53], [(1 << 53) + 2]).answer())["a"]["v"]
    assert spread["estimate"] == 2.0
