import math

import numpy as np
import pyarrow as pa
import pytest

from edgewater.base.errors import CorruptSynopsis, IncompatibleSynopses, InvalidRequest
from edgewater.synopses import (
    Contains,
    Count,
    CountingCuckooFilter,
    CuckooFilter,
    Distinct,
    FalsePositiveRate,
    Frequency,
    Synopsis,
    from_bytes,
)
from edgewater.synopses.encoding import codec
from edgewater.synopses.membership.cuckoo import CuckooStack
from edgewater.synopses.membership.cuckoo_table import SLOTS
from tests.refusals import refused

pytestmark = pytest.mark.slow

SEED = 14
each_kind = pytest.mark.parametrize("kind", [CuckooFilter, CountingCuckooFilter])


def found(held: CuckooFilter | CountingCuckooFilter, values: np.ndarray) -> np.ndarray:
    """Answers `Contains` for many values at once."""
    stack = held.stack
    keys = stack.table.keys(0, stack._hash(values))
    return stack.table.holds(keys) | (stack._stash.holds(keys) > 0)


def different(n: int, seed: int = SEED) -> np.ndarray:
    return np.unique(np.random.default_rng(seed).integers(0, 1 << 60, n + 10))[:n]


def test_a_story_of_a_set() -> None:
    held: CuckooFilter = CuckooFilter.for_capacity(1000)
    assert isinstance(held, Synopsis) and held.stack.buckets == 512
    held.update(pa.array(["ann", None, "bob", "ann"]))
    yes, no = held.query(Contains("ann")), held.query(Contains("cy"))
    assert yes.value == 1 and 0.999 < yes.confidence < 1 and yes.basis == "cuckoo"
    assert no.value == no.upper == 0 and no.confidence == 1
    assert round(held.query().value) == 2 and held.records == 3
    other = CuckooFilter.for_capacity(1000)
    other.update(["bob", "cy"])
    both = held.merge_many([other, other, held])
    assert codec.seal(both.stack.to_message()) == codec.seal(other.merge_many([held]).stack.to_message())
    assert round(both.query(Distinct()).value) == 3 and both.query(Contains("cy")).value == 1
    again = from_bytes(both.to_bytes())
    assert isinstance(again, CuckooFilter) and again.query() == both.query()


def test_a_story_of_a_multiset() -> None:
    held = CountingCuckooFilter.for_capacity(100)
    held.update(["ann", "bob", "ann"])
    other = CountingCuckooFilter.for_capacity(100)
    other.update(["ann", "cy"])
    both = held.merge_many([other])
    assert both.query(Frequency("ann")).value == 3 and both.query(Count()).value == 5 == both.query().value
    assert both.query(Contains("bob")).value == 1 and both.records == 5
    assert from_bytes(both.to_bytes()).to_bytes() == both.to_bytes()


@each_kind
@pytest.mark.parametrize("load", [0.3, 0.9, 0.95, 1.0, 1.3])
def test_there_are_no_false_negatives_in_an_overfull_filter(kind: type, load: float) -> None:
    held = kind(1 << 10)
    values = different(int(load * SLOTS * 1024))
    for part in np.array_split(values, 5):
        held.update(part)
    assert found(held, values).all()
    assert held.overfull == (load > 0.95)
    stack = held.stack
    stashed = int((~stack.table.holds(stack._stash.keys)).sum())
    assert int(stack.table.sizes()[0]) + stashed == len(stack._contents()[0])
    if load <= 0.95:
        assert stashed == 0, "all have a place in the table"
    else:
        assert "overfull: " in held.query(Contains(int(values[0]))).basis
    again = from_bytes(held.to_bytes())
    assert found(again, values).all() and again.to_bytes() == held.to_bytes()
    if kind is CountingCuckooFilter:
        assert held.query(Count()).value == len(values)


ALL_LOADS = pytest.param((0.25, 0.95, 1.1), 4_000_000, marks=pytest.mark.nightly)


@pytest.mark.parametrize(("loads", "absent"), [((0.95,), 1_500_000), ALL_LOADS])
def test_the_false_positive_rate_is_as_stated(loads: tuple[float, ...], absent: int) -> None:
    """Beyond 5 standard deviations of the Poisson distribution: 6e-7 per case."""
    outside = np.arange(absent) - (1 << 40)
    for load in loads:
        held = CuckooFilter(1 << 12)
        held.update(different(int(load * SLOTS * 4096), int(load * 100)))
        expected = held.query(FalsePositiveRate()).value * len(outside)
        assert abs(found(held, outside).sum() - expected) < 5 * math.sqrt(expected)


def test_a_million_copies_of_a_value_take_one_slot() -> None:
    held = CountingCuckooFilter(8)
    held.update(np.zeros(1_000_000, np.int64))
    held.update(np.arange(20))
    assert held.query(Frequency(0)).value == 1_000_001
    assert not held.overfull and found(held, np.arange(20)).all()
    assert len(held.to_bytes()) < 300


# For a coverage of exactly 95 %, fewer than 265 of 300 intervals contain the true value with probability 3e-7.
def test_intervals_of_sizes_contain_the_true_value_as_often_as_stated() -> None:
    stack = CuckooStack(300, buckets=1)
    n = 3
    stack.update(np.repeat(np.arange(300), n), np.random.default_rng(SEED).integers(0, 1 << 60, 300 * n))
    given = stack.query(Distinct())
    assert ((given.lower <= n) & (n <= given.upper)).sum() >= 265
    crowded = CuckooStack(200, buckets=16)
    n = 4000  # far above the capacity, so that values share cells
    crowded.update(np.repeat(np.arange(200), n), np.random.default_rng(SEED).integers(0, 1 << 60, 200 * n))
    given = crowded.query(Distinct())
    assert (given.lower < n).mean() > 0.9, "some values share a cell"
    assert ((given.lower <= n) & (n <= given.upper)).sum() >= 172  # of 200 at 95 %: 4e-7


def test_sizes_and_bad_parameters() -> None:
    assert CuckooFilter.for_capacity(1).stack.buckets == 1
    assert CuckooFilter.for_capacity(3891).stack.buckets == 1024
    assert CuckooFilter.for_capacity(3892).stack.buckets == 2048
    for buckets in (0, 3, 1 << 25, 2.0, True):
        with refused(InvalidRequest, "buckets"):
            CuckooFilter(buckets)  # type: ignore[arg-type]
    with refused(InvalidRequest, "capacity"):
        CuckooFilter.for_capacity(1 << 30)
    with refused(InvalidRequest, "question"):
        CuckooFilter(8).query(Frequency(1))
    with pytest.raises(IncompatibleSynopses):
        CuckooFilter(8).merge_many([CuckooFilter(16)])
    with pytest.raises(IncompatibleSynopses):
        CuckooFilter(8).merge_many([CountingCuckooFilter(8)])  # type: ignore[list-item]


def test_cells_outside_the_table_are_corrupt() -> None:
    held = CuckooFilter(8)
    held.update(np.arange(10))
    for array, values in ((1, np.full(10, 9)), (2, np.zeros(10, np.int64)), (0, np.array([9])), (1, np.arange(9))):
        message = held.stack.to_message()
        message.arrays[array].CopyFrom(codec.encode(values))
        with pytest.raises(CorruptSynopsis):
            from_bytes(codec.seal(message))
