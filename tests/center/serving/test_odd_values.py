"""NaN, infinities and both zeros in every kind of answer, and as keys of groups."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from center.api.answer_cache import to_json
from center.serving.measures import MeasureQuestions
from center.serving.predictions import with_prediction
from edgewater.answers import Facts, Predicted
from edgewater.answers.cells import CellColumn
from edgewater.answers.own_error import OwnError
from edgewater.answers.statement import judged
from edgewater.synopses import Estimates, Sum
from edgewater.synopses.quantiles.ddsketch import DDSketchStack
from tests.center.answer_world import World, query, rows
from tests.center.rendered import render
from tests.query_specs import query_spec

ODD = [math.nan, math.inf, -math.inf, 1.0, 2.0]


def world(measures: dict[str, str], values: list[Any], **parts: object) -> World:
    made = World(query(measures, **parts), 2)
    made.reads(0, [{"key": "a", "f": value} for value in values])
    made.reads(1, [{"key": "b", "f": 3.0}])
    return made


@pytest.mark.parametrize("measure", ["quantiles(f)", "kll(f)", "equi_depth(f, buckets=2)", "equi_width(f, lo=0, hi=9)"])
def test_quantiles_and_histograms_count_nan_apart(measure: str) -> None:
    cells = rows(world({"q": measure}, [*ODD, *[math.inf] * 9]).answer())
    assert (cells["a"]["q"]["nan"], cells["b"]["q"]["nan"]) == (1, 0)
    if "quantiles" in cells["a"]["q"]:
        assert cells["a"]["q"]["quantiles"]["0.99"]["not_finite"] == "Infinity"
    fine = rows(world({"q": measure}, [1.0, 2.0]).answer())
    assert "nan" not in fine["a"]["q"] or measure.startswith("equi_width")


@pytest.mark.parametrize("measure", ["reservoir(f, size=10)", "bernoulli(f, rate=1.0)", "fifo(f, size=10)"])
def test_the_mean_of_a_sample_with_nan_is_nan(measure: str) -> None:
    made = world({"s": measure}, ODD)
    assert rows(made.answer())["a"]["s"]["mean"] == {
        "estimate": None, "lower": None, "upper": None, "not_finite": "NaN",
    }  # fmt: skip
    assert math.isnan(made.table()["s.mean"].to_pylist()[0])


def test_items_and_samples_name_what_json_cannot_write() -> None:
    made = world({"top": "top_k(f, k=5)", "some": "reservoir(f, size=10)"}, [*ODD, math.nan, 0.0, -0.0])
    answer = json.loads(to_json(render(made.record(), made.spec, MeasureQuestions(top=5, values=True))))
    items = {entry["item"]: entry["estimate"] for entry in rows(answer)["a"]["top"]["top"]}
    assert items["NaN"] == 2 and items[0.0] == 2
    assert {"NaN", "Infinity", "-Infinity"} <= {str(v) for v in rows(answer)["a"]["some"]["values"]}


def test_keys_that_json_cannot_write_are_told_apart_and_found() -> None:
    made = World(query({"n": "count()"}, group_by=["f"]), 2)
    for edge in range(2):
        made.reads(edge, [{"f": f} for f in (*ODD, None, 0.0, -0.0, float("-nan"))])
    record = made.record()
    found = {row["group"]["f"]: row["n"]["estimate"] for row in render(record, made.spec)["data"]}
    assert found == {"NaN": 4, "Infinity": 2, "-Infinity": 2, None: 2, 0.0: 4, 1.0: 2, 2.0: 2}
    for text in ("NaN", "-Infinity", "null", "0"):
        (row,) = render(record, made.spec, MeasureQuestions(groups=(("f", (text,)),)))["data"]
        assert str(row["group"]["f"]) in (text, "0.0", "None")


def test_a_sum_of_a_sketch_that_cancels_is_not_called_exact() -> None:
    stack = DDSketchStack(1)
    for value in (1e16, 1.0, -1e16):
        stack.update(np.zeros(1, np.int64), np.array([value]))
    answer = stack.query(Sum())[0]
    assert answer.lower <= 1.0 <= answer.upper
    stack = DDSketchStack(1)
    stack.update(np.zeros(3, np.int64), np.array([1.0, -2.0, 4.0]))
    assert stack.query(Sum())[0].lower == stack.query(Sum())[0].upper == 3.0


def test_an_early_answer_does_not_predict_what_is_nan_already() -> None:
    spec = query_spec(measures={"v": "sum(f)"}, window={"tumbling": "3s"}, accuracy={"error": "5%"})
    (measure,) = spec.measures
    arrived = Estimates.exact_floats(np.array([math.nan]), np.array([True]))
    predicted = Predicted("v", confidence=0.95, interval=(10.0, 9.0, 11.0))
    stated = with_prediction(arrived, measure, predicted, {})
    assert stated.odd.all() and np.isnan([*stated.lower, *stated.upper]).all()
    own = OwnError()
    own.note(arrived)
    contract = judged(Facts(1, 1, 1.0), [CellColumn("v", (), own)], spec).contract
    assert contract.codes == "accuracy"
    large = replace(predicted, interval=(2.0**61,) * 3)
    stated = with_prediction(Estimates.exact(np.array([4.0])), measure, large, {})
    assert stated.lower < 2.0**61 - 124 and stated.upper > 2.0**61 + 124
    finite = with_prediction(Estimates.exact(np.array([4.0])), measure, predicted, {})
    assert (finite.value, finite.lower, finite.upper) == (10.0, 9.0, 11.0)
    assert pa.array(finite.value).to_pylist() == [10.0]
