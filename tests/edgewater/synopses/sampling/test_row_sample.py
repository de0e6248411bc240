from __future__ import annotations

from itertools import permutations

import numpy as np
import pyarrow as pa
import pytest

from edgewater.base.errors import CorruptSynopsis, IncompatibleSynopses, InvalidRecord, InvalidRequest
from edgewater.model.query import QuerySpec
from edgewater.synopses.encoding import codec
from edgewater.synopses.grouped import GroupedAggregate
from edgewater.synopses.sampling.row_sample import RowSampleStack, is_sampled
from tests.query_specs import query_spec
from tests.refusals import refused

GROUPS = 3


def shipped(source: int, records: int, rate: float = 1.0, limit: int = 100, columns: int = 2) -> RowSampleStack:
    """Returns what an edge ships that samples at `rate`."""
    stack = RowSampleStack(GROUPS, columns=columns, limit=limit, source=source)
    stack.reduce_rate(rate)
    ids = np.arange(records)
    values = np.random.default_rng(source).normal(size=(records, columns))
    kept = is_sampled(source, ids, rate)
    stack.update((ids % GROUPS)[kept], values[kept], ids=ids[kept])
    return stack


def merged(*partials: RowSampleStack) -> RowSampleStack:
    result = RowSampleStack(GROUPS, columns=partials[0].columns, limit=partials[0].limit)
    for each in partials:
        result.merge(each, np.arange(GROUPS))
    return result


def to_bytes(stack: RowSampleStack) -> bytes:
    return codec.seal(stack.to_message())


@pytest.mark.parametrize("limit", [10_000, 100])
def test_rows_of_several_columns_merge_in_any_order_to_equal_bytes(limit: int) -> None:
    partials = [shipped(1, 2_000, 0.5, limit), shipped(2, 3_000, 0.2, limit), shipped(3, 500, 1.0, limit)]

    each = {to_bytes(merged(*order)) for order in permutations(partials)}
    by_tree = merged(merged(partials[0], partials[1]), merged(partials[2], partials[0]))

    assert each == {to_bytes(by_tree)}


def test_the_rate_is_the_minimum_of_the_partials() -> None:
    both = merged(shipped(1, 9_000, 0.5, 10_000), shipped(2, 9_000, 0.2, 10_000))

    assert both.rates() == pytest.approx([0.2] * GROUPS)
    # A fifth of 6,000 rows per group, with a standard deviation of 31.
    assert all(1_050 < len(rows) < 1_350 for rows in both.rows_by_group())


def test_a_group_above_the_limit_has_exactly_the_limit_and_a_lower_rate() -> None:
    stack = shipped(1, 9_000, 1.0, 100)

    assert [len(rows) for rows in stack.rows_by_group()] == [100] * GROUPS
    counts = stack.query()
    assert ((counts.lower < 3_000) & (counts.upper > 3_000)).all()


def test_is_sampled_selects_the_rows_that_a_stack_keeps() -> None:
    ids = np.arange(5_000)
    stack = RowSampleStack(1, columns=1, source=7)
    stack.reduce_rate(0.3)
    stack.update(np.zeros(5_000, np.int64), ids.astype(float), ids=ids)

    kept = np.sort(stack.rows_by_group()[0][:, 0])

    assert np.array_equal(kept, ids[is_sampled(7, ids, 0.3)])
    assert is_sampled(7, ids, 0.1)[~is_sampled(7, ids, 0.3)].sum() == 0, "the sample of a lower rate is a subset"


def test_a_reset_group_keeps_its_rate() -> None:
    stack = shipped(1, 3_000, 0.25, 10_000)
    stack.reset(np.array([1]))
    ids = np.arange(3_000, 4_000)
    kept = is_sampled(1, ids, 0.25)
    stack.update(np.full(int(kept.sum()), 1), np.zeros((int(kept.sum()), 2)), ids=ids[kept])

    assert stack.take(np.array([1])).rates() == pytest.approx([0.25])


def test_rows_with_a_number_that_is_not_finite_are_skipped() -> None:
    stack = RowSampleStack(1, columns=2)
    stack.update(np.zeros(3, np.int64), np.array([[1.0, np.nan], [np.inf, 1.0], [1.0, 2.0]]), ids=np.arange(3))

    assert stack.rows_by_group()[0].tolist() == [[1.0, 2.0]]


def test_two_records_of_one_identity_are_refused() -> None:
    one, other = shipped(1, 100), RowSampleStack(GROUPS, columns=2, limit=100, source=1)
    other.update(np.zeros(1, np.int64), np.zeros((1, 2)), ids=np.zeros(1, np.int64))

    with pytest.raises(IncompatibleSynopses):
        merged(one, other)


@pytest.mark.parametrize(
    "values", [np.zeros((3, 3)), np.zeros(3), np.array([["a", "b"]] * 3), pa.array([1.0, 2.0, 3.0])]
)
def test_other_rows_are_refused(values: object) -> None:
    with refused(InvalidRecord, "values"):
        RowSampleStack(1, columns=2).update(np.zeros(3, np.int64), values)


def test_damaged_bytes_are_refused() -> None:
    message = shipped(1, 100).to_message()
    message.arrays[-1].CopyFrom(codec.encode(np.zeros(10)))
    with pytest.raises(CorruptSynopsis):
        RowSampleStack.from_message(message)
    message.arrays[-1].CopyFrom(codec.encode(np.full((100, 2), np.nan)))
    with pytest.raises(CorruptSynopsis):
        RowSampleStack.from_message(message)


@pytest.mark.parametrize("rate", [0.0, -1.0, 1.5])
def test_a_rate_is_a_probability(rate: float) -> None:
    with refused(InvalidRequest, "rate"):
        RowSampleStack(1).reduce_rate(rate)


def test_a_query_makes_rows_of_its_expressions() -> None:
    spec = query_spec(measures={"c": "kmeans(x, y + 1)"})
    bound = spec.bind({"x": pa.float64(), "y": pa.int64()}).measures[0]
    assert bound.argument is not None
    batch = pa.record_batch({"x": [1.0, None, float("nan"), 4.0], "y": [1, 2, 3, None], "event_time_ms": [0] * 4})
    stack = bound.measure.stack(bound.argument.type)
    aggregate = GroupedAggregate({}, {"c": stack})

    aggregate.update([], {"c": bound.argument.array(batch)}, 4)

    back = GroupedAggregate.from_bytes(aggregate.to_bytes()).measures["c"]
    assert isinstance(back, RowSampleStack)
    assert back.rows_by_group()[0].tolist() == [[1.0, 2.0]]
    _, rows = back.sampled()
    assert rows.to_pylist() == [[1.0, 2.0]]


def test_a_lower_rate_thins_the_rows_without_a_further_batch() -> None:
    stack = shipped(1, 3_000, 1.0, 10_000)
    before = to_bytes(stack)

    stack.reduce_rate(0.1)

    back = RowSampleStack.from_message(codec.unseal(to_bytes(stack)))
    assert back.rates() == pytest.approx([0.1] * GROUPS)
    assert 0 < sum(map(len, back.rows_by_group())) < 600
    assert to_bytes(stack) != before


def test_groups_merged_into_one_have_the_minimum_of_their_rates() -> None:
    low, high = shipped(1, 3_000, 0.2, 10_000), shipped(2, 3_000, 1.0, 10_000)
    result = RowSampleStack(1, columns=2, limit=10_000)
    both = RowSampleStack(2, columns=2, limit=10_000)
    both.merge(low.take(np.array([0])), np.array([0]))
    both.merge(high.take(np.array([0])), np.array([1]))

    result.merge(both, np.zeros(2, np.int64))

    assert result.rates() == pytest.approx([0.2])


def test_whole_numbers_beyond_2_to_53_are_rows_of_the_nearest_float() -> None:
    spec = query_spec(measures={"c": "kmeans(x, x)"})
    argument = spec.bind({"x": pa.int64()}).measures[0].argument
    assert argument is not None

    rows = argument.array(pa.record_batch({"x": [2**60 + 1, None, 3], "event_time_ms": [0] * 3}))

    assert rows.to_pylist() == [[2.0**60, 2.0**60], None, [3.0, 3.0]]


@pytest.mark.parametrize(
    "text", ["kmeans((3), k=2)", "kmeans((-3))", "kmeans(((x)))", "kmeans(x, (3))", "kmeans((x, x))"]
)
def test_a_registered_measure_can_be_parsed_again(text: str) -> None:
    spec = query_spec(measures={"c": text})

    assert QuerySpec.from_mapping(spec.to_mapping()) == spec
