"""Derived measures in answers: quotients of measures, with bounds, in each window, in totals and in roll-ups."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from center.serving.measures import MeasureQuestions
from center.serving.row_selection import RowSelection
from edgewater.answers import Phase, Predicted, WithheldBound
from edgewater.base.errors import InvalidRequest
from edgewater.model.computed import BINOMIAL, ComputedValue
from edgewater.model.query import QuerySpec
from edgewater.synopses import Estimates
from tests.center.rendered import render, to_csv, to_table
from tests.center.serving.test_render import aggregate, record, spec
from tests.refusals import refused

MEASURES = {"n": "count()", "late": "count(delay)", "share": "late / n", "each": "sum(x) / count(delay)"}


def query(**parts: Any) -> QuerySpec:
    return spec(**{"group_by": ["carrier"], "measures": MEASURES, **parts})


def synopsis(of: QuerySpec, carrier: str, late: int, on_time: int = 0, x: int = 0) -> bytes:
    """Of a carrier, `late` records with the value `x`, and others without a delay."""
    data = {"carrier": [carrier] * (late + on_time), "delay": [1.0] * late + [None] * on_time}
    argument = {m.name: m.argument for m in of.measures}
    assert set(argument.values()) <= {None, "delay", "x"}
    return aggregate(of, {**data, "x": [x] * late + [0] * on_time}).to_bytes()


def test_a_ratio_is_a_member_of_rows_totals_tables_and_statements() -> None:
    of = query()
    data = aggregate(of, {"carrier": ["AA", "AA", "UA"], "delay": [1.0, None, None], "x": [4, 2, 9]})
    answer = render(record(of, data.to_bytes()), of)
    assert [row["share"]["estimate"] for row in answer["data"]] == [0.5, 0.0]
    assert answer["data"][0]["each"] == {"estimate": 6.0, "lower": 6.0, "upper": 6.0}
    assert answer["total"]["share"]["estimate"] == pytest.approx(1 / 3)
    assert set(answer["data"][0]) == {"group", "n", "late", "share", "each"}, "no part of a derived measure"
    assert set(answer["total"]) == set(answer["shapes"]) == {"n", "late", "share", "each"}
    assert answer["contract"] == {"requested": {"exact": True}, "met": True, "violations": []}
    assert answer["confidence"] == 1.0 and "share" not in answer["quality"]["error"]["sketch"]
    table = to_table(record(of, data.to_bytes()), of)
    assert [c for c in table.column_names if c.startswith(("share", "part"))] == [
        "share", "share_lower", "share_upper", "share.binomial", "share.binomial_lower", "share.binomial_upper",
    ]  # fmt: skip
    assert b"share_upper" in to_csv(record(of, data.to_bytes()), of)


def test_a_zero_denominator_gives_no_value_and_no_violation() -> None:
    of = query()
    answer = render(record(of, synopsis(of, "AA", 0, 2)), of)
    assert answer["data"][0]["each"] == {"estimate": None, "lower": None, "upper": None}
    assert answer["contract"] == {"requested": {"exact": True}, "met": True, "violations": []}


def test_a_missing_edge_leaves_a_share_between_zero_and_one_and_a_ratio_without_bounds() -> None:
    of = query()
    answer = render(record(of, synopsis(of, "AA", 1, 1, x=5), missing=("jfk",)), of)
    (row,) = answer["data"]
    assert (row["share"]["lower"], row["share"]["upper"]) == (0.0, 1.0)
    assert row["each"]["upper"] is None and "each" in answer["contract"]["uncovered"]
    assert not answer["contract"]["met"]


def test_what_edges_withhold_widens_a_ratio_by_what_its_parts_may_be() -> None:
    of = query(measures={"n": "count()", "late": "count(delay)", "share": "late / n"}, budget={"error": {"n": 2}})
    held = {"n": WithheldBound(2.0, 0.0), "late": WithheldBound(2.0, 0.0)}
    answer = render(record(of, synopsis(of, "AA", 5, 5), withheld=held), of)
    share = answer["data"][0]["share"]
    assert share["lower"] <= 5 / 12 and share["upper"] >= 7 / 10
    assert answer["data"][0]["share"][BINOMIAL]["upper"] > share["upper"]


def test_questions_about_synopses_leave_what_derived_measures_read() -> None:
    of = query(measures={"n": "count()", "mid": "quantile(delay, 0.5)", "ratio": "mid / n", "all": "quantiles(delay)"})
    data = aggregate(of, {"carrier": ["AA"] * 4, "delay": [8.0, 8.0, 8.0, 8.0]}).to_bytes()
    answer = render(record(of, data), of, MeasureQuestions(quantiles=(0.9,)))
    assert answer["data"][0]["ratio"]["estimate"] == pytest.approx(2.0, rel=0.02)
    only = render(record(of, data), of, MeasureQuestions(measures=("ratio",)))
    assert set(only["data"][0]) == {"group", "ratio"} and set(only["total"]) == {"ratio"}


def test_requests_compute_and_select_by_derived_measures() -> None:
    of = query()
    data = aggregate(of, {"carrier": ["AA", "AA", "UA"], "delay": [1.0, None, None], "x": [4, 2, 9]}).to_bytes()
    asked = MeasureQuestions(
        measures=("n",), computed=(ComputedValue("percent", "100 * share"),), selection=RowSelection("share > 0.1")
    )
    answer = render(record(of, data), of, asked)
    assert [row["percent"]["estimate"] for row in answer["data"]] == [50.0]
    assert set(answer["data"][0]) == {"group", "n", "percent"}
    surely = MeasureQuestions(selection=RowSelection('"share.binomial_lower" > 0.4'))
    assert render(record(of, data), of, surely)["data"] == []


def binomial(hits: tuple[float, float], records: tuple[float, float], confidence: float = 0.95) -> tuple[float, float]:
    of = query()
    intervals = {
        name: Estimates(np.array([lower]), np.array([lower]), np.array([upper]))
        for name, (lower, upper) in (("late", hits), ("n", records))
    }
    found = of.derived[0].binomial(intervals, of.measures, confidence)
    assert found is not None
    return float(found.lower[0]), float(found.upper[0])


@pytest.mark.nightly
@pytest.mark.parametrize(("records", "rate"), [(10, 0.02), (50, 0.1), (400, 0.5), (1_000, 0.01)])
def test_the_binomial_interval_contains_the_rate_with_its_confidence(records: int, rate: float) -> None:
    """The coverage is computed, not sampled."""
    covered = 0.0
    for hits in range(records + 1):
        lower, upper = binomial((hits, hits), (records, records))
        if lower <= rate <= upper:
            covered += math.comb(records, hits) * rate**hits * (1 - rate) ** (records - hits)
    assert covered >= 0.95


def test_the_binomial_interval_contains_those_of_all_counts_within_their_bounds() -> None:
    whole = binomial((3, 6), (20, 30))
    for hits in range(3, 7):
        for records in range(20, 31):
            one = binomial((hits, hits), (records, records))
            assert whole[0] <= one[0] and one[1] <= whole[1]
    assert binomial((3, math.nan), (20, math.nan)) == (0.0, 1.0)
    assert binomial((5, 5), (5, 5))[0] < 1 - 1 / (2 * NormalDist().inv_cdf(0.975) ** 2)


def test_only_a_share_of_the_records_has_a_binomial_reading() -> None:
    of = query(
        measures={"n": "count()", "a": "count(delay)", "b": "sum(x)", "p": "a / n", "q": "b / n", "r": "2 * a / n"}
    )
    answer = render(record(of, synopsis(of, "AA", 1, 1)), of)
    assert [BINOMIAL in answer["data"][0][name] for name in "pqr"] == [True, False, False]


def test_nothing_is_computed_from_an_estimate_and_from_what_has_arrived_whatever_its_name() -> None:
    of = query(measures={"n": "count()", "late": "count(delay)", "tenth": "n / 10"}, group_by=None)
    given = record(of, synopsis(of, "", 1, 1), phase=Phase.EARLY)
    facts = replace(given.facts, predicted=Predicted("n", confidence=0.95, interval=(100.0, 90.0, 110.0)))
    texts = {"same": "tenth / n", "mixed": "late / tenth", "again": "mixed + 1", "arrived": "late / 2"}
    asked = MeasureQuestions(computed=tuple(ComputedValue(*each) for each in texts.items()))
    (row,) = render(replace(given, facts=facts), of, asked)["data"]
    assert {name: row[name]["estimate"] for name in texts} == {
        "same": 0.1, "mixed": None, "again": None, "arrived": 0.5
    }  # fmt: skip


def test_requests_do_not_read_a_part_of_a_derived_measure() -> None:
    of = query(measures={"n": "count()", "share": "count(delay) / n"})
    given = record(of, synopsis(of, "AA", 1, 1))
    assert [m.name for m in of.measures] == ["n", "part_1"]
    with refused(InvalidRequest, "compute"):
        render(given, of, MeasureQuestions(computed=(ComputedValue("more", "2 * part_1"),)))
    with refused(InvalidRequest, "having"):
        render(given, of, MeasureQuestions(selection=RowSelection("part_1 > 0")))
    asked = MeasureQuestions(selection=RowSelection("share > 0"), computed=(ComputedValue("more", "2 * share"),))
    assert render(given, of, asked)["data"][0]["more"]["estimate"] == 1.0
