"""Values that a request computes from measures, and the rows that it selects: bounds hold for every possible value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from center.serving.measures import MeasureQuestions
from center.serving.row_selection import RowSelection
from edgewater.base.errors import InvalidRequest
from edgewater.model.computed import ComputedValue
from edgewater.model.query import QuerySpec
from edgewater.synopses import Estimates
from tests.center.rendered import render, to_table
from tests.center.serving.test_render import aggregate, record, spec
from tests.examples import examples

EXPRESSIONS = (
    "a / b", "a - b", "a / (a + b)", "(a - b) / b", "100 * a / (a + b)", "a * b - a", "-a / b + 1", "(a + b) / (a + b)",
    "a * a", "1 / (a - b)",
)  # fmt: skip


def interval_of(bounds: Sequence[tuple[float, float]], value: Sequence[float], confidence: float = 1.0) -> Estimates:
    lower, upper = (np.array(side, float) for side in zip(*bounds, strict=True))
    return Estimates(np.array(value, float), lower, upper, confidence)


def computed(text: str, **intervals: Estimates) -> Estimates:
    return ComputedValue("c", text).estimates(intervals, ())


numbers = st.one_of(st.integers(-50, 50).map(float), st.floats(-1e6, 1e6, allow_subnormal=False))


@pytest.mark.nightly
@given(
    st.sampled_from(EXPRESSIONS),
    st.tuples(numbers, numbers),
    st.tuples(numbers, numbers),
    st.floats(0, 1),
    st.floats(0, 1),
)
@examples(2_000)
def test_no_values_within_the_intervals_of_measures_give_a_result_outside(
    text: str, a: tuple[float, float], b: tuple[float, float], at_a: float, at_b: float
) -> None:
    (low_a, high_a), (low_b, high_b) = sorted(a), sorted(b)
    result = computed(text, a=interval_of([(low_a, high_a)], [low_a]), b=interval_of([(low_b, high_b)], [high_b]))
    point = {
        "a": min(max(low_a + (high_a - low_a) * at_a, low_a), high_a),
        "b": min(max(low_b + (high_b - low_b) * at_b, low_b), high_b),
    }
    with np.errstate(all="ignore"):
        truth = float(eval(text, {}, {name: np.float64(x) for name, x in point.items()}))
    if not np.isfinite(truth) or np.isnan(result.value[0]):
        return
    slack = 1e-9 * max(abs(truth), 1.0)
    assert np.isnan(result.lower[0]) or result.lower[0] <= truth + slack
    assert np.isnan(result.upper[0]) or result.upper[0] >= truth - slack


def test_a_measure_that_occurs_twice_has_one_value() -> None:
    share = computed("a / (a + b)", a=interval_of([(90, 110)], [100]), b=interval_of([(900, 1_100)], [1_000]))
    assert share.lower[0] == pytest.approx(90 / 1_190) and share.upper[0] == pytest.approx(110 / 1_010)


def test_exact_measures_give_an_exact_result() -> None:
    ratio = computed("a / b", a=interval_of([(1, 1)], [1]), b=interval_of([(3, 3)], [3]))
    assert ratio.lower[0] == ratio.value[0] == ratio.upper[0] == 1 / 3 and ratio.confidence == 1.0


def test_the_rounding_of_large_terms_that_cancel_is_in_the_interval() -> None:
    one = computed("(n + 1e17) - 1e17", n=interval_of([(1, 1)], [1]))
    assert one.lower[0] <= 1 <= one.upper[0]
    values = (94_906_267.0, 94_906_265.0, 94_906_266.0)
    each = {name: interval_of([(value, value)], [value]) for name, value in zip("abc", values, strict=True)}
    difference = computed("a * b - c * c", **each)
    assert difference.lower[0] <= 94_906_267 * 94_906_265 - 94_906_266**2 <= difference.upper[0]
    assert difference.value[0] != -1, "float64 has not the exact products"


def test_a_denominator_that_may_be_zero_leaves_the_bounds_unknown_and_zero_leaves_no_value() -> None:
    ratio = computed("a / b", a=interval_of([(1, 2), (1, 1)], [1, 1]), b=interval_of([(-1, 1), (0, 0)], [1, 0]))
    assert np.isnan(ratio.lower).all() and np.isnan(ratio.upper).all()
    assert ratio.value[0] == 1 and np.isnan(ratio.value[1])


def test_an_unknown_bound_of_a_measure_keeps_the_bound_that_follows_without_it() -> None:
    nan = float("nan")
    ratio = computed("a / b", a=interval_of([(1, nan)], [1]), b=interval_of([(10, nan)], [10]))
    assert ratio.lower[0] == 0 and np.isnan(ratio.upper[0])


def test_the_confidence_of_a_result_allows_each_measure_to_miss() -> None:
    a, b = interval_of([(1, 2)], [1], 0.95), interval_of([(1, 2)], [1], 0.99)
    assert computed("a / b", a=a, b=b).confidence == pytest.approx(0.94)


QUERY = spec(group_by=["carrier"], measures={"n": "count()", "known": "count(delay)", "late": "sum(x)"})
DATA = aggregate(
    spec(group_by=["carrier"], measures={"n": "count()", "known": "count(delay)", "late": "sum(x)"}),
    {"carrier": ["UA", "AA", "UA", "DL"], "delay": [1.0, None, 2.0, 5.0], "x": [1, 0, 1, 7]},
).to_bytes()


def names(query: QuerySpec) -> list[str]:
    return [*query.group_by, *(measure.name for measure in query.measures)]


def questions(compute: Sequence[str] = (), query: QuerySpec = QUERY, **selection: Any) -> MeasureQuestions:
    values = tuple(ComputedValue.parse(text, names(query)) for text in compute)
    return MeasureQuestions(computed=values, selection=RowSelection(**selection))


def carriers(answer: dict[str, Any]) -> list[str]:
    return [row["group"]["carrier"] for row in answer["data"]]


def test_a_computed_value_is_a_column_of_rows_and_of_the_total() -> None:
    answer = render(record(QUERY, DATA), QUERY, questions(["share: known / n"]))
    assert [row["share"]["estimate"] for row in answer["data"]] == [0.0, 1.0, 1.0]
    assert answer["total"]["share"] == {"estimate": 0.75, "lower": 0.75, "upper": 0.75}
    table = to_table(record(QUERY, DATA), QUERY, questions(["share: known / n"]))
    assert table.column("share_upper").to_pylist() == [0.0, 1.0, 1.0]


def test_the_share_of_a_count_is_at_most_one_while_an_edge_is_missing() -> None:
    answer = render(record(QUERY, DATA, missing=("jfk",)), QUERY, questions(["share: known / n", "other: late / n"]))
    assert {row["share"]["upper"] for row in answer["data"]} == {1.0}
    assert {row["share"]["lower"] for row in answer["data"]} == {0.0}
    assert {row["other"]["upper"] for row in answer["data"]} == {None}


def test_rows_are_selected_by_bounds_and_sorted() -> None:
    asked = questions(["each: late / n"], having="each_lower >= 1 AND carrier <> 'XX'", order=("-each", "carrier"))
    answer = render(record(QUERY, DATA), QUERY, asked)
    assert carriers(answer) == ["DL", "UA"]
    assert answer["data"][0]["each"]["estimate"] == 7
    assert carriers(render(record(QUERY, DATA), QUERY, questions(order=("-late", "carrier"), limit=1))) == ["DL"]
    assert carriers(render(record(QUERY, DATA), QUERY, questions(order=("n", "-carrier")))) == ["DL", "AA", "UA"]


def test_a_condition_on_an_unknown_bound_selects_no_row() -> None:
    missing = record(QUERY, DATA, missing=("jfk",))
    assert carriers(render(missing, QUERY, questions(having="late_upper > 0 OR late_upper <= 0"))) == []
    assert carriers(render(missing, QUERY, questions(having="n_lower >= 2"))) == ["UA"]


def test_a_revision_names_the_rows_that_left_the_selection() -> None:
    before = record(QUERY, DATA, revision=1)
    after = record(QUERY, aggregate(QUERY, {"carrier": ["UA"], "delay": [1.0], "x": [1]}).to_bytes())
    answer = render(after, QUERY, questions(having="late >= 2"), base=before)
    assert answer["data"] == [] and [g["carrier"] for g in answer["removed"]] == ["DL", "UA"]


def test_measures_that_are_not_asked_for_can_be_read() -> None:
    asked = MeasureQuestions(
        measures=("n",), computed=(ComputedValue("each", "late / n"),), selection=RowSelection(having="known > 0")
    )
    answer = render(record(QUERY, DATA), QUERY, asked)
    assert carriers(answer) == ["DL", "UA"]
    assert set(answer["data"][0]) == {"group", "n", "each"} and set(answer["total"]) == {"n", "each"}


def test_a_ratio_of_quantiles_is_computed_from_their_columns() -> None:
    query = spec(measures={"delay": "quantiles(delay)"})
    data = aggregate(query, {"delay": [float(i) for i in range(1, 1_001)]}).to_bytes()
    asked = questions(['spread: "delay_0.99" / "delay_0.5"'], query)
    (row,) = render(record(query, data), query, asked)["data"]
    assert row["spread"]["lower"] <= 990 / 500 <= row["spread"]["upper"]


@pytest.mark.parametrize(
    ("compute", "accepted"),
    [
        ("n / late", "name: expression"),
        ("n: late / n", "a name that no measure"),
        ("rate: lower(n)", "+, -, *"),
        ("rate: 'x' + n", "+, -, *"),
        ("rate: 1 + 2", "+, -, *"),
        ("rate: n +", "SQL expression"),
        ("Rate: n / late", "name: expression"),
    ],
)
def test_a_wrong_computed_value_is_refused_with_what_is_accepted(compute: str, accepted: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ComputedValue.parse(compute, names(QUERY))
    assert refused.value.field == "compute" and accepted in refused.value.accepted


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (questions(["rate: n / lat"]), "compute"),
        (questions(having="lat > 1"), "having"),
        (questions(having="n"), "having"),
        (questions(order=("-lat",)), "order"),
    ],
)
def test_a_column_that_the_answer_lacks_is_refused_with_the_field(asked: MeasureQuestions, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        render(record(QUERY, DATA), QUERY, asked)
    assert refused.value.field == field


def test_a_selection_of_an_answer_without_data_is_empty() -> None:
    assert render(record(QUERY, None), QUERY, questions(["each: late / n"], having="n > 0"))["data"] == []
