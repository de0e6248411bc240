"""Sums and counts that are cut into multiples of a quantum and a rest, which together are what they were."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewater.synopses import CountStack, DivisibleSum
from edgewater.synopses.exact.aggregates import FloatSumStack, IntegerSumStack

QUANTA = st.integers(-40, 70).map(lambda k: 2.0**k)


def integer_sums(values: list[int]) -> IntegerSumStack:
    stack = IntegerSumStack()
    stack.grow(3)
    for value in values:
        stack.update(np.array([1]), np.array([value], np.int64))
    return stack


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4), QUANTA)
def test_integer_sums_beyond_64_bits_too(values: list[int], quantum: float) -> None:
    stack = integer_sums(values)
    rest = stack.cut(quantum)
    step = int(min(max(quantum, 1.0), 2.0**62))
    assert _total(stack) == sum(values) // step * step
    assert _total(rest) == sum(values) % step
    before = integer_sums(values)
    stack.merge(rest, np.arange(3))
    assert stack.to_message() == before.to_message(), "the rest counts no values"


def _total(stack: IntegerSumStack) -> int:
    low, carry = stack.wide()
    return int(low[1]) + (int(carry[1]) << 64)


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=4), QUANTA)
def test_sums_of_floats_stay_exact(values: list[float], quantum: float) -> None:
    stack, before = FloatSumStack(), FloatSumStack()
    for each in (stack, before):
        each.grow(2)
        for value in values:
            each.update(np.array([1]), np.array([value]))
    rest = stack.cut(quantum)
    parts, left = (Fraction(float(s._total()[1])) for s in (stack, rest))
    exact = sum(map(Fraction, values))
    if left:
        assert parts % Fraction(quantum) == 0
        assert abs(exact - parts) <= Fraction(quantum)
    stack.merge(rest, np.arange(2))
    assert stack.to_message() == before.to_message()


@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan, 1e300])
def test_values_that_no_multiple_expresses_stay_whole(odd: float) -> None:
    stack = FloatSumStack()
    stack.grow(2)
    stack.update(np.array([0, 1]), np.array([odd, 70.5]))
    rest = stack.cut(64.0)
    np.testing.assert_array_equal(stack._total(), [odd, 64.0])
    assert rest._total().tolist() == [0.0, 6.5]


def test_counts_are_cut_too() -> None:
    stack = CountStack()
    stack.grow(2)
    stack.update(np.zeros(37, np.int64), None)
    assert isinstance(stack, DivisibleSum)
    rest = stack.cut(16.0)
    assert (stack.query().value.tolist(), rest.query().value.tolist()) == ([32, 0], [5, 0])
