"""The records that are out of an early answer widen the intervals of a synopsis."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from center.serving.predictions import RecordsOut, SynopsisAccuracy
from edgewater.answers import Bounds, Facts, Predicted
from edgewater.answers.cells import CellColumn
from edgewater.answers.own_error import OwnError
from edgewater.answers.statement import Contract, judged
from edgewater.model.query import QuerySpec
from edgewater.synopses import Stack
from edgewater.synopses.base import Mean, Quantile

GROUPS = {"k": pa.array(["a", "b", "c"])}


def spec(text: str, error: str = "5%", **measures: str) -> QuerySpec:
    return QuerySpec.from_mapping(
        {
            "name": "q", "from": "s", "measures": {"m": text, **measures}, "window": {"tumbling": "3s"},
            "group_by": ["k"], "accuracy": {"error": error, "measure": "m"},
        }
    )  # fmt: skip


def stacks(query: QuerySpec, *values: int) -> dict[str, Stack]:
    """Returns stacks of one row per number n: the values 1 to n."""
    made = {m.name: m.stack(pa.float64()) for m in query.measures}
    for name, stack in made.items():
        stack.grow(len(values))
        for row, n in enumerate(values):
            if name == "n":
                stack.update(np.full(n, row), np.ones(n))
            else:
                stack.update(np.full(n, row), np.arange(1.0, n + 1))
    return made


def predicted(**uppers: float | None) -> Predicted:
    groups: dict[str, Bounds] = {f'["{k}"]': (None, None, n) for k, n in uppers.items()}
    return Predicted("m", of_records=True, confidence=0.9, groups=groups)


def test_the_bound_of_the_number_of_records_less_the_merged_records_widens_each_row() -> None:
    query = spec("quantile(x, 0.5)")
    data = stacks(query, 100, 100, 100)
    out = RecordsOut.of(query, predicted(a=100.9, b=105.4), GROUPS, data)
    assert out is not None
    question = Quantile(0.5)
    own = data["m"].query(question)
    widened = out.widen("m", data["m"], own, question)
    assert widened.confidence == pytest.approx(0.9)
    assert [widened.lower[0], widened.upper[0]] == [own.lower[0], own.upper[0]], "no whole record is out"
    assert widened.lower[1] <= 47.5 and widened.upper[1] >= 52, "the ranks of 5 more records"
    assert widened.upper[1] < 54
    assert np.isnan(widened.lower[2]) and np.isnan(widened.upper[2]), "the number of records is unknown"


def test_a_count_of_all_records_excludes_records_without_a_value() -> None:
    data = stacks(spec("quantile(x, 0.5)", n="count()"), 100, 100, 100)
    few = stacks(spec("quantile(x, 0.5)", n="count()"), 60, 60, 60)
    both = {"m": few["m"], "n": data["n"]}  # of 100 records, 60 have a value
    with_count = RecordsOut.of(spec("quantile(x, 0.5)", n="count()"), predicted(a=104), GROUPS, both)
    without = RecordsOut.of(spec("quantile(x, 0.5)"), predicted(a=104), GROUPS, both)
    assert with_count is not None and without is not None
    assert with_count.missing["m"][0] == 4 and without.missing["m"][0] == 44


def test_an_interval_wider_than_the_error_and_a_lost_bound_violate_the_accuracy() -> None:
    query = spec("quantile(x, 0.9)")
    data = stacks(query, 100, 100, 100)
    question = Quantile(0.9)

    def contract(**uppers: float) -> Contract:
        out, accuracy = RecordsOut.of(query, predicted(**uppers), GROUPS, data), SynopsisAccuracy.of(query, data)
        assert out is not None and accuracy is not None
        own = data["m"].query(question)
        accuracy.note("m", data["m"], own, out.widen("m", data["m"], own, question), out.missing["m"], None)
        return judged(
            Facts(1, 1, 1.0), [CellColumn("m", (), OwnError(), accuracy_error=accuracy.worst["m"])], query
        ).contract

    assert contract(a=104).met
    (wide,) = contract(a=107).violations
    assert wide.code == "accuracy" and "may be off by 6.54 %; the accuracy is 5 %" in wide.message
    for refuted_or_lost in (98, 120):
        (lost,) = contract(a=refuted_or_lost).violations
        assert lost.code == "accuracy" and "has no bound" in lost.message


def test_a_sample_keeps_the_accuracy_if_few_enough_records_are_out_of_it() -> None:
    query = spec("reservoir(x, 50)", n="count()")
    data = stacks(query, 100, 100, 100)

    def worst(**uppers: float) -> float:
        out, accuracy = RecordsOut.of(query, predicted(**uppers), GROUPS, data), SynopsisAccuracy.of(query, data)
        assert out is not None and accuracy is not None
        own = data["m"].query(Mean())
        widened = out.widen("m", data["m"], own, Mean())
        assert np.isnan(widened.lower[0]), "the values of the records that are out may be any"
        accuracy.note("m", data["m"], own, widened, out.missing["m"], None)
        return accuracy.worst["m"]

    assert worst(a=104) == pytest.approx(4 / 104)
    assert worst(a=98) == np.inf, "more records than predicted"
