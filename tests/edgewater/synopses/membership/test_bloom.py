import math

import numpy as np
import pyarrow as pa
import pytest

from edgewater.base.errors import InvalidRequest
from edgewater.synopses import (
    BloomFilter,
    Contains,
    Distinct,
    FalsePositiveRate,
    IntersectionSize,
    Synopsis,
    UnionSize,
    from_bytes,
)
from edgewater.synopses.membership.bloom import size_for
from tests.refusals import refused

SEED = 13


def filter_of(values: object, bits: int = 1 << 14, hashes: int = 4) -> BloomFilter:
    result = BloomFilter(bits, hashes)
    result.update(values)
    return result


def found(held: BloomFilter, values: np.ndarray) -> np.ndarray:
    """Answers `Contains` for many values at once."""
    stack, result = held.stack, np.ones(len(values), bool)
    bits = np.unpackbits(stack.table()[0], bitorder="little").astype(bool)
    for row in range(stack.hashes):
        result &= bits[stack._position(stack._hash(values), row)]
    return result


def test_a_story_of_one_filter() -> None:
    held: BloomFilter = BloomFilter.for_capacity(1000, 0.01)
    assert isinstance(held, Synopsis)
    held.update(pa.array(["ann", None, "bob", "ann"]))
    yes, no = held.query(Contains("ann")), held.query(Contains("cy"))
    assert yes.value == 1 and 0.999 < yes.confidence < 1, "a yes may be wrong"
    assert no.value == no.upper == 0 and no.confidence == 1, "a no is certain"
    assert round(held.query().value) == 2 and held.records == 3
    other = BloomFilter.for_capacity(1000, 0.01)
    other.update(["bob", "cy"])
    both = held.merge_many([other, held, other])
    assert both.query(Contains("cy")).value == 1 and round(both.query().value) == 3
    assert round(held.query(UnionSize(other)).value) == 3
    assert round(held.query(IntersectionSize(other)).value) == 1
    again = from_bytes(both.to_bytes())
    assert isinstance(again, BloomFilter) and again.query() == both.query()
    assert BloomFilter().query(Contains("x")).value == 0 == BloomFilter().query().upper


@pytest.mark.parametrize("load", [0.1, 0.5, 1.0, 2.0])
def test_there_are_no_false_negatives_and_the_false_positive_rate_is_as_stated(load: float) -> None:
    """40,000 absent values; beyond 5 standard deviations of the binomial: 6e-7 per case."""
    held = BloomFilter.for_capacity(5000, 0.02)
    values = np.random.default_rng(SEED).permutation(1 << 20)
    inside, outside = values[: int(5000 * load)], values[-40_000:]
    held.update(inside)
    assert found(held, inside).all()
    rate = held.query(FalsePositiveRate()).value
    assert abs(found(held, outside).mean() - rate) < 5 * math.sqrt(rate * (1 - rate) / 40_000) + 1e-4
    if load <= 1:
        assert rate < 0.021


def test_a_filter_above_half_full_is_overfull() -> None:
    edge = [filter_of(np.arange(1000 * i, 1000 * (i + 1)), *size_for(1500, 0.01)) for i in range(8)]
    assert not any(e.overfull for e in edge)
    assert edge[0].query(Contains(5)).basis == "bloom"
    merged = edge[0].merge_many(edge[1:])
    assert merged.overfull and merged.fill > 0.9
    for question in (Contains(5), Distinct(), UnionSize(edge[0])):
        assert "bloom, overfull: 9" in merged.query(question).basis, "sized for one edge and not for all"
    assert merged.query(FalsePositiveRate()).value > 0.5
    assert merged.query(Contains(5)).confidence < 0.5


def test_a_full_filter_answers_yes_to_everything_and_has_infinite_bounds() -> None:
    full = filter_of(np.arange(5000), 64, 3)
    assert full.fill == 1
    answer = full.query(Distinct())
    assert answer.value == math.inf == answer.upper and answer.lower >= 22
    assert full.query(Contains(10**9)).value == 1 and full.query(Contains(10**9)).confidence == 0
    one = filter_of([1], 64, 3)
    assert one.query(UnionSize(full)).upper == math.inf
    intersection = full.query(IntersectionSize(one))
    assert 0 <= intersection.lower <= intersection.value <= intersection.upper < 5


def test_the_or_is_the_union_and_the_and_is_not_the_intersection() -> None:
    a, b = np.arange(0, 2000), np.arange(1500, 3500)
    left, right = filter_of(a), filter_of(b)
    assert left.merge_many([right]).fill == filter_of(np.arange(3500)).fill
    common = left.stack.table() & right.stack.table()
    assert np.bitwise_count(common).sum() > np.bitwise_count(filter_of(np.arange(1500, 2000)).stack.table()).sum()
    answer = left.query(IntersectionSize(right))
    assert answer.lower <= 500 <= answer.upper and abs(answer.value - 500) < 100


def test_a_batch_sets_several_bits_of_one_byte() -> None:
    """An assignment with repeated indices would keep only one of several bits in a byte."""
    together = filter_of(np.arange(200), 64, 1)
    one_by_one = BloomFilter(64, 1)
    for value in range(200):
        one_by_one.update([value])
    assert together.fill == one_by_one.fill


def test_for_capacity_gives_the_sizes_of_the_formula() -> None:
    bits, hashes = size_for(1_000_000, 0.01)
    assert 9_585_059 <= bits <= 9_585_059 * 1.13 and hashes == 7
    assert size_for(1, 0.5) == (64, 32)
    for capacity, fpr, field in ((0, 0.1, "capacity"), (10**10, 0.01, "capacity"), (5, 0, "fpr"), (5, 1, "fpr")):
        with refused(InvalidRequest, field):
            size_for(capacity, fpr)
    for bits, hashes in ((100, 3), (0, 3), (1 << 32, 3), (64, 0), (64, 33)):
        with refused(InvalidRequest, "hashes" if bits == 64 else "bits"):
            BloomFilter(bits, hashes)
