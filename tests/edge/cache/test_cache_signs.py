"""Values of either sign: over several edges, sliding windows and late records no group is further from the truth
than its budget allows, whatever cancels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.core.events import BudgetSet, Ingested, PullEvent, SourceEnded
from edge.core.streams import StreamSpec
from edgewater.base.streams import TIME_COLUMN
from edgewater.model.query import QuerySpec
from edgewater.synopses import FloatArray, GroupedAggregate, IntArray
from edgewater.wire import Frame, QueryRef
from tests.cores import drained, open_core, pulled
from tests.examples import examples

REF, GROUPS, EDGES, ERROR = QueryRef("q", 1), 6, 3, 40.0
SLICES, SLICE_MS = 4, 1000
FOLDS: dict[str, Any] = {"sum": np.add, "max": np.fmax, "min": np.fmin}
Records = tuple[IntArray, IntArray, FloatArray]


def query(function: str, budget: Any) -> QuerySpec:
    return QuerySpec.from_mapping(
        {
            "name": "q", "from": "s", "group_by": ["key"], "measures": {"v": f"{function}(value)"}, "lateness": "1h",
            "window": {"sliding": "2s", "every": "1s"}, "budget": {"error": {"v": budget}},
        }
    )  # fmt: skip


def table(function: str) -> FloatArray:
    return np.full((SLICES, GROUPS), 0.0 if function == "sum" else np.nan)


def an_edge(number: int, spec: QuerySpec, function: str, records: Records) -> tuple[FloatArray, FloatArray]:
    """(sent, true) per slice and group. Every third record is late."""
    core = open_core(StreamSpec({"key": pa.int64(), "value": pa.float64()}), (REF, spec), number=number)
    core.handle(BudgetSet(REF, {"v": ERROR / EDGES if function == "sum" else ERROR}))
    sent, true = table(function), table(function)
    times, keys, values = records
    FOLDS[function].at(true, (times // SLICE_MS, keys), values)
    late = np.arange(len(times)) % 3 == 2
    order = np.argsort(times + late * SLICE_MS, kind="stable")
    for rows in np.array_split(order, 5):
        if len(rows):
            batch = pa.record_batch({"key": keys[rows], "value": values[rows], TIME_COLUMN: times[rows]})
            now = int(times[rows].max())
            core.handle(Ingested("s", "file", batch, now))
            merge(sent, pulled(core, PullEvent(200, {"s": now}, 1000.0, 0)), function)
    core.handle(SourceEnded("s", "file"))
    merge(sent, drained(core, PullEvent(400)), function)
    return sent, true


def merge(sent: FloatArray, frames: list[Frame], function: str) -> None:
    for partial in (p for frame in frames for p in frame.unpack().partials):
        part = GroupedAggregate.from_bytes(partial.synopsis)
        at = (partial.slice_start_ms // SLICE_MS, part.rows()[0].to_numpy())
        sent[at] = FOLDS[function](sent[at], part.query("v").value)


def errors(function: str, budget: Any, records: list[Records]) -> tuple[FloatArray, FloatArray]:
    """Per window and group |center − true|, and |true|."""
    fold, spec = FOLDS[function].reduce, query(function, budget)
    edges = [an_edge(i, spec, function, given) for i, given in enumerate(records)]
    sent, true = (fold([edge[which] for edge in edges]) for which in (0, 1))
    windows = [(fold(sent[i : i + 2]), fold(true[i : i + 2])) for i in range(SLICES - 1)]
    center, truth = (np.nan_to_num(np.array(a)) for a in zip(*windows, strict=True))
    return np.abs(center - truth), np.abs(truth)


def of_either_sign(seed: int, negative: float, count: int = 150) -> list[Records]:
    """At every edge some group's values are all below 0 in every slice."""
    result = []
    for rng in np.random.default_rng(seed).spawn(EDGES):
        times, keys = rng.integers(0, SLICES * SLICE_MS, count), rng.integers(0, GROUPS - 1, count)
        values = np.round(rng.exponential(60.0, count), 3) + 0.5
        sign = np.where(rng.random(count) < negative, -1.0, 1.0)
        low = np.arange(SLICES) * SLICE_MS, np.full(SLICES, GROUPS - 1), np.full(SLICES, -300.0)
        high = np.arange(SLICES) * SLICE_MS, np.zeros(SLICES, np.int64), np.full(SLICES, 1e4)
        parts = zip((times, keys, values * sign), low, high, strict=True)
        joined = [np.concatenate(p) for p in parts]
        order = np.argsort(joined[0], kind="stable")
        result.append((joined[0][order], joined[1][order], joined[2][order].astype(np.float64)))
    return result


@pytest.mark.nightly
@given(st.integers(0, 2**32), st.sampled_from([0.3, 0.5, 0.9]), st.sampled_from(["sum", "max", "min"]))
@examples(25)
def test_an_absolute_budget_holds_whatever_signs_the_values_have(seed: int, negative: float, function: str) -> None:
    error, _ = errors(function, ERROR, of_either_sign(seed, negative))
    assert error.max() <= ERROR * (1 + 1e-9)


@pytest.mark.slow
@given(st.integers(0, 2**32), st.sampled_from([0.3, 0.5, 0.9]), st.sampled_from(["sum", "max", "min"]))
@examples(25)
def test_a_relative_budget_holds_whatever_signs_the_values_have(seed: int, negative: float, function: str) -> None:
    error, true = errors(function, "30%", of_either_sign(seed, negative))
    assert (error <= 0.3 * np.maximum(true, 1.0) * (1 + 1e-9)).all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("function,budget", [("sum", "30%"), ("sum", ERROR)])
def test_values_of_one_sign_are_still_withheld(sign: float, function: str, budget: Any) -> None:
    records = [(t, k, np.abs(v) * sign) for t, k, v in of_either_sign(5, 0.0)]
    error, true = errors(function, budget, records)
    assert error.max() > 0.0, "a budget that withholds nothing tests nothing"
    allowed = ERROR if budget == ERROR else 0.3 * np.maximum(true, 1.0)
    assert (error <= allowed * (1 + 1e-9)).all()


def test_maxima_that_are_not_negative_may_be_withheld() -> None:
    records = [(t, k, np.minimum(np.abs(v), 30.0)) for t, k, v in of_either_sign(5, 0.0)]
    error, _ = errors("max", ERROR, records)
    assert 0.0 < error.max() <= ERROR
