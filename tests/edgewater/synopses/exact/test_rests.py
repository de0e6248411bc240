"""Rests of exact measures: whatever records one is made of, adding it gives the value of all records together."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edgewater.synopses import GroupedAggregate, Stack, function_named
from edgewater.synopses.named_questions import merge_groups
from edgewater.synopses.rests import FUNCTIONS, NOTHING, rest_of, union_of_rests, with_rest
from edgewater.wire import Rest
from tests.examples import examples

floats = st.one_of(st.floats(-1e12, 1e12), st.sampled_from([0.1, 1e-300, -1e300, math.nan, math.inf, -math.inf, -0.0]))
integers = st.one_of(st.integers(-9, 9), st.integers(-(1 << 63), (1 << 63) - 1))
columns = st.one_of(
    st.lists(floats, min_size=1, max_size=9).map(lambda v: pa.array(v, pa.float64())),
    st.lists(integers, min_size=1, max_size=9).map(lambda v: pa.array(v, pa.int64())),
)


def stack_of(function: str, values: pa.Array, groups: int = 3) -> Stack:
    """The values in a few groups, one after the other."""
    made = function_named(function)
    assert made is not None
    aggregate = GroupedAggregate({"k": pa.int64()}, {"v": made.make((), values.type)})
    aggregate.update([pa.array(np.arange(len(values)) % groups)], {"v": values}, len(values))
    return aggregate.measures["v"]


def all_of(stack: Stack, records: int = 0) -> Rest | None:
    return rest_of(stack, np.arange(len(stack)), records)


def told(stack: Stack) -> Any:
    estimates = stack.query()
    exact = None if estimates.integers is None else estimates.integers.to_pylist()
    return exact, estimates.value.tolist(), estimates.present


@examples(200)
@given(st.sampled_from(FUNCTIONS), columns, st.integers(0, 9), st.integers(0, 9))
@example("sum", pa.array([(1 << 63) - 1] * 3 + [-5], pa.int64()), 1, 2)
@example("max", pa.array([(1 << 53) + 1, 1 << 53], pa.int64()), 1, 1)
def test_values_in_rests_are_as_if_they_were_in_groups(function: str, values: pa.Array, sent: int, first: int) -> None:
    parts = [values[sent : sent + first], values[sent + first :]]
    rests = [all_of(stack_of(function, part)) for part in parts]
    rest = union_of_rests(function, rests)
    if rest is None:
        assert any(abs(v) > 1e299 for v in values.to_pylist())
        return
    assert rest.to_state() == Rest.from_state(json.loads(json.dumps(rest.to_state(), allow_nan=False))).to_state()
    total = with_rest(stack_of(function, values[:sent]), rest)
    assert total is not None
    whole, answered = told(merge_groups(stack_of(function, values))), told(total)
    assert answered[0] == whole[0]
    rel = 1e-12 if function == "var" else 0.0
    assert answered[1] == pytest.approx(whole[1], rel=rel, abs=0.0, nan_ok=True)


def test_the_rest_of_a_sketch_is_the_number_of_its_records() -> None:
    assert all_of(stack_of("distinct", pa.array([1, 2, 2])), 3) == Rest(3)
    assert union_of_rests("distinct", [Rest(3), Rest(4)]) == Rest(7)


def test_an_unknown_rest_makes_the_union_unknown() -> None:
    assert union_of_rests("sum", [Rest(1, (2.0,)), None]) is None
    assert union_of_rests("sum", []) == NOTHING


def test_a_rest_that_is_no_value_of_the_measure_is_refused() -> None:
    numbers = stack_of("sum", pa.array([1, 2]))
    assert with_rest(numbers, Rest(1, (0.5,))) is None
    assert with_rest(numbers, Rest(1, (math.nan,))) is None
    assert with_rest(numbers, Rest(1, (1e60,))) is None
    assert with_rest(stack_of("max", pa.array([1, 2])), Rest(1, (1e19,))) is None
    assert with_rest(stack_of("max", pa.array([1.0])), Rest(1, (1e19, 1.0))) is None
