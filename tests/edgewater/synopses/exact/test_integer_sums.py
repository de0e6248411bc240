"""Integer sums are exact beyond int64; the array of carries is written only if it is needed."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewater.base.errors import IncompatibleSynopses
from edgewater.synopses.base import Sum
from edgewater.synopses.encoding import codec
from edgewater.synopses.exact.aggregates import CountStack, IntegerSumStack, wide_sums
from edgewater.synopses.grouped import GroupedAggregate
from edgewater.synopses.quantiles.ddsketch import DDSketchStack
from tests.examples import examples

LEAST, GREATEST = -(1 << 63), (1 << 63) - 1
extreme = st.one_of(st.integers(LEAST, GREATEST), st.sampled_from([LEAST, GREATEST, -1, 0, 1, LEAST + 1]))
rows = st.lists(st.tuples(st.integers(0, 2), extreme), min_size=1, max_size=30)


def exact(low: np.ndarray, carry: np.ndarray) -> list[int]:
    return [int(a) + (int(b) << 64) for a, b in zip(low, carry, strict=True)]


@examples(200)
@given(rows, rows)
def test_sums_and_their_merges_are_those_of_unbounded_integers(
    left: list[tuple[int, int]], right: list[tuple[int, int]]
) -> None:
    stacks = []
    for given_rows in (left, right):
        stack = IntegerSumStack(3)
        stack.update(np.array([g for g, _ in given_rows]), np.array([v for _, v in given_rows], np.int64))
        stacks.append(stack)
        stacks.append(IntegerSumStack.from_message(stack.to_message()))
    one, two = stacks[0], stacks[3]
    one.merge(two, np.array([2, 0, 1]))
    truth = [sum(v for g, v in left if g == group) for group in range(3)]
    for group, target in enumerate((2, 0, 1)):
        truth[target] += sum(v for g, v in right if g == group)
    assert exact(*one.wide()) == truth
    assert np.allclose(one._total(), [float(t) for t in truth], rtol=1e-15, atol=0)
    again = IntegerSumStack.from_message(one.to_message())
    assert exact(*again.wide()) == truth
    assert len(one.to_message().arrays) == (2 if all(LEAST <= t <= GREATEST for t in truth) else 3)


def test_sums_of_more_rows_than_float64_adds_exactly_are_exact() -> None:
    values = np.full((1 << 21) + 5, (1 << 32) - 1)
    low, carry = wide_sums(np.zeros(len(values), np.int64), values, 1)
    assert exact(low, carry) == [len(values) * ((1 << 32) - 1)]


def test_a_sum_beyond_int64_does_not_wrap() -> None:
    stack = IntegerSumStack(1)
    for _ in range(3):
        stack.update(np.zeros(2, np.int64), np.array([GREATEST, GREATEST]))
    assert stack.query(Sum())[0].value == 6.0 * 2.0**63
    stack.reset(np.array([0]))
    assert codec.seal(stack.to_message()) == codec.seal(IntegerSumStack(1).to_message())


def test_reading_a_sketch_does_not_change_its_message() -> None:
    stack = DDSketchStack(1)
    stack.update(np.zeros(3, np.int64), np.array([1.0, -2.0, 3.0]))
    message = stack.to_message()
    before = message.SerializeToString(deterministic=True)
    DDSketchStack.from_message(message)
    assert message.SerializeToString(deterministic=True) == before


def test_aggregates_with_an_incompatible_measure_are_refused_before_anything_changes() -> None:
    def aggregate(accuracy: float) -> GroupedAggregate:
        result = GroupedAggregate({"k": pa.string()}, {"n": CountStack(), "q": DDSketchStack(accuracy=accuracy)})
        result.update([pa.array(["a", "b"])], {"n": None, "q": pa.array([1.0, 2.0])}, 2)
        return result

    one = aggregate(0.01)
    before = one.to_bytes()
    with pytest.raises(IncompatibleSynopses, match=r"0\.01.*0\.02"):
        one.merge(aggregate(0.02))
    assert one.to_bytes() == before
    with pytest.raises(IncompatibleSynopses, match=r"^partial 3 of 3: .*0\.01.*0\.02"):
        GroupedAggregate.merge_bytes([before, before, aggregate(0.02).to_bytes()])
