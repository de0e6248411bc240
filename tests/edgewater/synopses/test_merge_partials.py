from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewater.model.errors import CorruptSynopsis, IncompatibleSynopses
from edgewater.model.measure import Measure
from edgewater.synopses.base import Count
from edgewater.synopses.grouped import GroupedAggregate

Records = list[tuple[str, int]]
INTEGER, FLOAT = pa.int64(), pa.float64()
INT64 = st.integers(-(2**62), 2**62)
RECORDS = st.lists(st.tuples(st.sampled_from("abcdé"), INT64), max_size=20)


def partial(records: Records, argument: pa.DataType = INTEGER) -> bytes:
    functions = {"n": "count()", "total": "sum(x)", "least": "min(x)", "most": "max(x)"}
    measures = {name: Measure.parse(name, text) for name, text in functions.items()}
    stacks = {n: m.stack(argument if m.argument else None) for n, m in measures.items()}
    aggregate = GroupedAggregate({"key": pa.string()}, stacks)
    values = pa.array([x for _, x in records], argument)
    given = {n: values if m.argument else None for n, m in measures.items()}
    aggregate.update([pa.array([k for k, _ in records], pa.string())], given, len(records))
    return aggregate.to_bytes()


def contents(merged: bytes) -> dict[str, tuple[int, ...]]:
    """Key -> (count, exact integer sum): the stored int64, past what float64 estimates can show."""
    aggregate = GroupedAggregate.from_bytes(merged)
    sums = aggregate.measures["total"]._view("sum").tolist()  # type: ignore[attr-defined]
    counts = aggregate.query("n", Count()).value.astype(np.int64).tolist()
    return {k: (n, s) for k, n, s in zip(aggregate.rows()[0].to_pylist(), counts, sums, strict=True)}


def expected(records: Records) -> dict[str, tuple[int, ...]]:
    def wrapped(total: int) -> int:
        return (total + 2**63) % 2**64 - 2**63

    by_key: dict[str, list[int]] = {}
    for key, x in records:
        by_key.setdefault(key, []).append(x)
    return {k: (len(xs), wrapped(sum(xs))) for k, xs in by_key.items()}


@pytest.mark.slow
@given(st.lists(RECORDS, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_sums_merged_in_any_order_and_grouping_are_the_exact_same_integers(batches: list[Records], rng: object) -> None:
    parts = [partial(records) for records in batches]
    rng.shuffle(parts)  # type: ignore[attr-defined]
    at_once = GroupedAggregate.merge_bytes(parts)
    one_by_one = parts[0]
    for part in parts[1:]:
        one_by_one = GroupedAggregate.merge_bytes([one_by_one, part])
    want = expected([r for records in batches for r in records])
    assert contents(at_once) == want
    assert contents(one_by_one) == want
    assert GroupedAggregate.from_bytes(at_once).records == sum(map(len, batches))


def test_merging_does_not_change_the_partials() -> None:
    parts = [partial([("a", 1)]), partial([("a", 2), ("b", 3)])]
    before = list(parts)
    first = GroupedAggregate.merge_bytes(parts)
    assert parts == before
    assert GroupedAggregate.merge_bytes(parts) == first


def test_a_single_partial_is_returned_unchanged() -> None:
    part = partial([("a", 1)])
    assert GroupedAggregate.merge_bytes([part]) is part


def test_an_empty_partial_adds_nothing() -> None:
    part = partial([("a", 1)])
    assert contents(GroupedAggregate.merge_bytes([partial([]), part, partial([])])) == {"a": (1, 1)}


def test_a_single_damaged_partial_is_refused() -> None:
    part = bytearray(partial([("a", 1)]))
    part[-1] ^= 1
    with pytest.raises(CorruptSynopsis, match="CRC32C"):
        GroupedAggregate.merge_bytes([bytes(part)])


def test_partials_of_different_queries_do_not_merge() -> None:
    with pytest.raises(IncompatibleSynopses):
        GroupedAggregate.merge_bytes([partial([("a", 1)]), partial([("a", 1)], FLOAT)])


def test_an_empty_list_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        GroupedAggregate.merge_bytes([])
