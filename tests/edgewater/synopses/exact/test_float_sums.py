"""Sums, means and variances of floats and integers against exact arithmetic, whatever cancels."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edgewater.base.errors import CorruptSynopsis
from edgewater.synopses import GroupedAggregate
from edgewater.synopses.base import Mean
from edgewater.synopses.encoding import codec
from edgewater.synopses.exact.aggregates import (
    FloatSumStack,
    IntegerMaxStack,
    IntegerMinStack,
    MeanStack,
    VarianceStack,
)
from tests.examples import examples

LEAST, GREATEST = -(1 << 63), (1 << 63) - 1
floats = st.one_of(
    st.floats(-1e6, 1e6), st.floats(-1e307, 1e307), st.sampled_from([1e16, -1e16, 1.0, 2.0**53, 2.0**-1074, 1e300])
)
integers = st.one_of(st.integers(-100, 100), st.integers(LEAST, GREATEST), st.integers((1 << 53) - 2, (1 << 53) + 2))
batches = st.lists(st.lists(floats, min_size=1, max_size=8), min_size=1, max_size=4)
integer_batches = st.lists(st.lists(integers, min_size=1, max_size=8), min_size=1, max_size=4)


def of(kind: Any, given: list[list[Any]], dtype: Any = np.float64, merge: bool = False) -> Any:
    """A stack of two groups of which the second has all values; by updates, or (in reverse) by merges."""
    stack = kind(2)
    for batch in reversed(given) if merge else given:
        part = kind(1) if merge else stack
        part.update(np.full(len(batch), 0 if merge else 1), np.array(batch, dtype))
        if merge:
            stack.merge(kind.from_message(part.to_message()), np.array([1]))
    return stack


def exact(given: list[list[Any]]) -> tuple[Fraction, Fraction, Fraction | None]:
    values = [Fraction(v) for batch in given for v in batch]
    total = sum(values, Fraction(0))
    mean = total / len(values)
    squares = sum(((v - mean) ** 2 for v in values), Fraction(0))
    return total, mean, squares / (len(values) - 1) if len(values) > 1 else None


def rounded(value: Fraction) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value)


def check(estimates: Any, true: Fraction) -> None:
    """The value is off by at most its rounding; one beyond float64 is infinite, and its rounding unknown."""
    value, rounding = float(estimates.value[1]), float(estimates.rounding[1])
    if math.isinf(value):
        assert math.isinf(rounding)
    else:
        assert math.isinf(rounding) or abs(Fraction(value) - true) <= Fraction(rounding)


@examples(200)
@given(batches)
@example([[1e16, 1.0, -1e16]])
@example([[1e16], [1.0], [-1e16]])
@example([[1e300, 1.0], [-1e300]])
@example([[1e307] * 8, [1e307] * 8, [1e307] * 8, [-1e307] * 8])
@example([[0.30000000000000004, -(2.0**-55)], [-1.5e-307]])
def test_sums_are_those_of_exact_arithmetic_in_any_order(given: list[list[float]]) -> None:
    true, mean, _ = exact(given)
    one, two = of(FloatSumStack, given), of(FloatSumStack, given, merge=True)
    assert codec.seal(one.to_message()) == codec.seal(two.to_message())
    assert one.query().value[1] == rounded(true) and math.isnan(one.query().value[0])
    check(one.query(), true)
    check(of(MeanStack, given).query(), mean)


@examples(200)
@given(batches)
@example([[2.0**53, 2.0**53 + 2]])
@example([[0.1] * 3, [0.1] * 5])
def test_variances_of_floats_are_within_their_rounding(given: list[list[float]]) -> None:
    _, mean, variance = exact(given)
    for merge in (False, True):
        stack = of(VarianceStack, given, merge=merge)
        check(stack.query(Mean()), mean)
        if variance is not None:
            check(stack.query(), variance)
            assert (stack.query().value[1] == 0.0) == (len({v for b in given for v in b}) == 1) or variance < 1e-300


@examples(200)
@given(integer_batches)
@example([[1 << 53, (1 << 53) + 2]])
@example([[1 << 53], [(1 << 53) + 1]])
@example([[LEAST, GREATEST, 5]])
def test_means_and_variances_of_integers_are_within_their_rounding(given: list[list[int]]) -> None:
    _, mean, variance = exact(given)
    for merge in (False, True):
        check(of(MeanStack, given, np.int64, merge).query(), mean)
        stack = of(VarianceStack, given, np.int64, merge)
        check(stack.query(Mean()), mean)
        if variance is not None:
            check(stack.query(), variance)


def test_a_variance_does_not_cancel() -> None:
    assert of(VarianceStack, [[1 << 53, (1 << 53) + 2]], np.int64).query().value[1] == 2.0
    assert of(VarianceStack, [[1e9 + 4, 1e9 + 7], [1e9 + 13, 1e9 + 16]]).query().value[1] == 30.0


@given(integer_batches)
def test_extrema_of_integers_have_all_digits(given: list[list[int]]) -> None:
    values = [v for batch in given for v in batch]
    for kind, function in ((IntegerMinStack, min), (IntegerMaxStack, max)):
        for merge in (False, True):
            estimates = of(kind, given, np.int64, merge).query()
            assert estimates.integers.to_pylist() == [None, function(values)]


@pytest.mark.parametrize("kind", [FloatSumStack, MeanStack])
def test_nan_and_infinities_propagate_and_the_order_makes_no_difference(kind: Any) -> None:
    for values, total in (
        ([1.0, math.inf], math.inf), ([math.inf, -math.inf], math.nan), ([math.nan, 1.0], math.nan),
        ([-math.inf, -1e300], -math.inf),
    ):  # fmt: skip
        one, two = of(kind, [values, [2.0]]), of(kind, [values[::-1], [2.0]], merge=True)
        assert codec.seal(one.to_message()) == codec.seal(two.to_message())
        np.testing.assert_array_equal(one.query().value[1], total)
        one.reset(np.array([1]))
        assert codec.seal(one.to_message()) == codec.seal(kind(2).to_message())


def test_sums_that_float64_represents_take_no_more_bytes() -> None:
    stack = of(FloatSumStack, [[0.5, 2.25, 1e6], [3.0]])
    assert [list(array.shape) for array in stack.to_message().arrays] == [[2], [2]]


def test_a_part_that_is_not_finite_is_corrupt() -> None:
    message = of(FloatSumStack, [[1.0]]).to_message()
    message.arrays[1].CopyFrom(codec.encode(np.array([0.0, math.inf])))
    with pytest.raises(CorruptSynopsis):
        FloatSumStack.from_message(message)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_partial_with_a_negative_zero_gives_the_same_bytes_in_any_order_and_as_one_stack(
    order: tuple[int, ...],
) -> None:
    """No edge sends one; its sign depended on which other sums have several parts."""

    def partial(keys: list[int], values: list[float]) -> bytes:
        grouped = GroupedAggregate({"k": pa.int64()}, {"m": FloatSumStack()})
        grouped.update([pa.array(keys)], {"m": pa.array(values)}, len(keys))
        return grouped.to_bytes()

    message = codec.unseal(partial([7], [5.5]))
    message.parts[0].arrays[1].CopyFrom(codec.encode(np.array([-0.0])))
    partials = [partial([1, 1, 2], [1.0, 2.0**-60, 3.0]), codec.seal(message), partial([2, 2], [1e100, 1.0])]
    merged = GroupedAggregate.merge_bytes([partials[at] for at in order])
    assert merged == GroupedAggregate.merge_one_by_one([partials[at] for at in order])
    sums = GroupedAggregate.from_bytes(merged)
    values = dict(zip(sums.rows()[0].to_pylist(), sums.query("m").value, strict=True))
    assert values == {1: 1.0, 2: 1e100, 7: 0.0} and not np.signbit(values[7])
