"""Totals of answers under a budget, against the truth: records go through real edge cores, the ledger and rendering."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

from center.serving.measures import MeasureQuestions
from edgewater.model.query import QuerySpec
from tests.center.answer_world import World, query, rows
from tests.center.rendered import render
from tests.examples import examples

EDGES = 3
EAGER = {"eviction": "mae"}
MEASURES = {
    "n": "count()", "m": "count(f)", "s": "sum(f)", "t": "sum(i)", "lo": "min(f)", "hi": "max(f)", "k": "max(i)",
    "a": "mean(f)", "v": "var(i)",
}  # fmt: skip
SLIDING = {"sliding": "1s", "every": "500ms"}
BUDGETS: list[dict[str, Any]] = [
    {"error": {"n": 30, "m": 30, "s": 4e3, "t": 1e18, "lo": 9e3, "hi": 9e3, "k": 1e18}},
    {"error": {"n": 60}},
    {"error": {"s": "40%"}},
    {"error": {"a": 20}},
]
Record = tuple[int, int, str, float | None, int]
"""Edge, event time, group, and the values of f and i."""

floats = st.one_of(st.integers(-60, 6_000).map(lambda n: n / 8), st.sampled_from([None, 0.1, -0.0, 1e-300, 1e17]))
integers = st.one_of(st.integers(-9, 99), st.sampled_from([(1 << 62) + 1, -(1 << 62) - 3, (1 << 53) + 1]))
records = st.lists(
    st.tuples(st.integers(0, EDGES - 1), st.sampled_from([10, 310, 610]), st.sampled_from("abcd"), floats, integers),
    min_size=1,
    max_size=14,
)


def made(spec: QuerySpec, given: Sequence[Record], shares: dict[str, float] | None = None) -> World:
    world = World(spec, EDGES, shares=shares or {})
    for edge, time_ms, key, f, i in sorted(given, key=lambda r: r[1]):
        world.reads(edge, [{"key": key, "f": f, "i": i}], time_ms, pulls=True)
    return world


def shares_of(budget: dict[str, Any]) -> dict[str, float]:
    """An equal share of each edge, as the center would allocate it."""
    limits = {name: limit for name, limit in budget["error"].items() if not isinstance(limit, str)}
    return {name: limit if name in ("lo", "hi", "k") else limit / EDGES for name, limit in limits.items()}


def exact(given: Sequence[Record]) -> dict[str, Any]:
    """The true totals; floats are rounded once."""
    fs, ks = [f for *_, f, _ in given if f is not None], [i for *_, i in given]
    mean = sum(map(Fraction, fs)) / len(fs) if fs else None
    center = Fraction(sum(ks), len(ks))
    squares = sum((k - center) ** 2 for k in ks)
    return {
        "n": len(given), "m": len(fs), "s": float(sum(map(Fraction, fs))) if fs else None, "t": sum(ks),
        "lo": min(fs, default=None), "hi": max(fs, default=None), "k": max(ks),
        "a": None if mean is None else float(mean), "v": float(squares / (len(ks) - 1)) if len(ks) > 1 else None,
    }  # fmt: skip


@pytest.mark.nightly
@examples(150)
@given(records, st.sampled_from(BUDGETS), st.sampled_from([{"tumbling": "1s"}, SLIDING]))
@example([(e, 10, k, 5.0, 1 << 62) for e in range(3) for k in "abcd"], BUDGETS[0], {"tumbling": "1s"})
@example([(0, 10, "a", 0.0, 0)], BUDGETS[0], {"tumbling": "1s"})
def test_totals_are_exact_whatever_is_withheld(given: list[Record], budget: Any, window: dict[str, Any]) -> None:
    measures = {name: f for name, f in MEASURES.items() if name not in ("a", "v") or budget is not BUDGETS[0]}
    spec = query(measures, budget=budget, cache=EAGER, window=window)
    answer = made(spec, given, shares_of(budget)).answer()
    event(f"withheld: {any(answer['rest'].values())}")
    true = exact(given)
    for name in measures:
        cell = answer["total"][name]
        rel = 2.0**-48 * len(given) if name in ("a", "v") else 0.0
        assert cell["estimate"] == pytest.approx(true[name], rel=rel, abs=0.0), (name, answer["total"], true)
        if true[name] is not None:
            assert cell["lower"] == cell["upper"] == cell["estimate"]
    for name in ("n", "m", "t"):
        in_groups = sum(row[name]["estimate"] or 0 for row in answer["data"])
        assert answer["rest"][name] == true[name] - in_groups


def test_the_total_is_exact_where_no_group_was_sent() -> None:
    spec = query({"n": "count()", "s": "sum(i)"}, budget={"error": {"n": 30, "s": 3e3}})
    given = [(e, 10, f"k{n}", 0.0, n) for e in range(EDGES) for n in range(40)]
    answer = made(spec, given, {"n": 10.0, "s": 1e3}).answer()
    assert answer["data"] == [] and answer["contract"]["met"]
    assert answer["total"]["n"] == {"estimate": 120, "lower": 120, "upper": 120}
    assert answer["total"]["s"]["lower"] == answer["total"]["s"]["upper"] == EDGES * sum(range(40))
    assert answer["rest"] == {"n": 120, "s": EDGES * sum(range(40))}


def test_a_row_without_groups_has_what_edges_withhold() -> None:
    measures = {"n": "count()", "s": "sum(i)", "a": "mean(f)", "d": "distinct(i)"}
    spec = query(measures, budget={"error": {"n": 30}}, group_by=[], cache=EAGER)
    given = [(e, 10, "a", float(n), n) for e in range(EDGES) for n in range(8)]
    answer = made(spec, given, {"n": 10.0}).answer()
    (row,) = answer["data"]
    assert {name: row[name] for name in ("n", "s", "a")} == answer["total"]
    assert row["a"]["lower"] == row["a"]["upper"] == 3.5 and row["n"]["upper"] == 24
    assert row["d"]["upper"] is None or row["d"]["upper"] >= 8


def test_the_total_is_about_all_groups_whatever_groups_are_asked_for() -> None:
    spec = query({"n": "count()", "s": "sum(i)"}, budget={"error": {"n": 3}})
    world = made(spec, [(0, 10, "abc"[n % 3], 0.0, n) for n in range(9)], {"n": 1.0})
    answer = world.answer(MeasureQuestions(groups=(("key", ("a",)),), measures=("n",)))
    assert list(rows(answer)) == ["a"] and set(answer["total"]) == {"n"}
    assert answer["total"]["n"] == {"estimate": 9, "lower": 9, "upper": 9}


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_nan_and_infinities_are_in_the_total(odd: float) -> None:
    spec = query({"s": "sum(f)", "hi": "max(f)"}, budget={"staleness": "1s"})
    answer = made(spec, [(0, 10, "a", odd, 0), (1, 10, "b", 1.0, 0)]).answer()
    name = {math.inf: "Infinity", -math.inf: "-Infinity"}.get(odd, "NaN")
    assert answer["total"]["s"] == {"estimate": None, "lower": None, "upper": None, "not_finite": name}
    assert answer["total"]["hi"]["estimate"] == (1.0 if odd == -math.inf else None)


def test_measures_of_sketches_have_no_total() -> None:
    spec = query({"n": "count()", "d": "distinct(i)", "q": "quantiles(f)"}, budget={"error": {"n": 3}})
    assert set(made(spec, [(0, 10, "a", 1.0, 1)], {"n": 1.0}).answer()["total"]) == {"n"}


def test_groups_that_a_staleness_budget_omits_are_in_the_total() -> None:
    """After the deadline nothing more is sent. Thousands of groups are omitted, and the close states their rest."""
    spec = query({"n": "count()", "s": "sum(f)"}, budget={"staleness": "1s"})
    rng = np.random.default_rng(3)
    values = np.round(rng.lognormal(3, 2, 3_000), 3)
    world = World(spec, 1)
    world.reads(0, [{"key": f"k{n}", "f": float(v)} for n, v in enumerate(values)], 10)
    world.closes_late(0, 2_500)
    answer = world.answer()
    assert 0 < len(answer["data"]) < 300
    assert answer["total"]["n"] == {"estimate": 3_000, "lower": 3_000, "upper": 3_000}
    assert answer["total"]["s"]["estimate"] == math.fsum(values)
    assert answer["rest"]["n"] == 3_000 - len(answer["data"])


def test_a_contract_that_is_met_names_the_measures_that_have_no_bounds() -> None:
    measures = {"n": "count()", "a": "mean(f)", "hi": "max(f)"}
    world = World(query(measures, budget={"staleness": "1s"}), 1)
    world.reads(0, [{"key": f"k{n}", "f": float(n)} for n in range(3_000)], 10)
    world.closes_late(0, 2_500)
    answer = world.answer()
    unknown = {name for row in answer["data"] for name in measures if None in (row[name]["lower"], row[name]["upper"])}
    assert answer["contract"]["met"] and "a" in unknown and set(answer["contract"]["uncovered"]) == unknown
    exact = made(query(measures), [(0, 10, "a", 1.0, 1)]).answer()["contract"]
    assert exact["met"] and "uncovered" not in exact


def test_late_records_in_several_frames_are_never_counted_twice() -> None:
    """The edge has withheld every group. Late records push the groups over the limit, one frame each. Between these
    frames, the rest that the edge had stated contains values that the center has by now."""
    spec = query({"n": "count()"}, budget={"error": {"n": 3}}, lateness="1h")
    world = World(spec, 1, shares={"n": 3.0})
    world.reads(0, [{"key": key} for key in "abc" for _ in range(2)], 10)
    world.reads(0, [{"key": "a"}], 1_500)
    world.pulls_small(0)
    closed = len(world.bodies[0])
    world.reads(0, [{"key": key} for key in "abc" for _ in range(5)], 20)
    world.pulls_small(0)
    bodies, totals = world.bodies[0], []
    assert len(bodies) >= closed + 3
    for count in range(closed, len(bodies) + 1):
        answer = render(world.record_of([bodies[:count]], step_ms=60_000), spec)
        totals.append(answer["total"]["n"])
        assert totals[-1]["upper"] is None or totals[-1]["lower"] == totals[-1]["upper"] in (6, 21)
        assert totals[-1]["lower"] <= 21
    assert totals[0] == {"estimate": 6, "lower": 6, "upper": 6}
    assert totals[-1] == {"estimate": 21, "lower": 21, "upper": 21}
    assert any(total["upper"] is None for total in totals)
