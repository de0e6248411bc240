import numpy as np
import pytest

from edgewater.model.errors import IncompatibleSynopses
from edgewater.synopses import Count, FifoSample, Maximum, Mean, Minimum, Proportion, Quantile, Rank, Sum, from_bytes
from edgewater.synopses.sampling.fifo import FifoStack

SEED = 12


def test_it_keeps_the_newest_records_and_answers_exactly_for_them() -> None:
    values = np.random.default_rng(SEED).normal(0, 1, 5000)
    sample = FifoSample(100)
    for at in np.array_split(np.arange(5000), 13):
        sample.update(values[at], times=at * 10)
    newest = values[-100:]
    assert sample.items().to_pylist() == newest.tolist()
    for question, truth in (
        (Mean(), newest.mean()),
        (Sum(), newest.sum()),
        (Count(), 100),
        (Minimum(), newest.min()),
        (Maximum(), newest.max()),
        (Proportion(0, 9), (newest >= 0).mean()),
        (Rank(0.0), (newest <= 0).mean()),
        (Quantile(0.5), np.sort(newest)[49]),
    ):
        answer = sample.query(question)
        assert answer.lower == answer.upper == answer.value == pytest.approx(truth) and answer.confidence == 1.0


def test_late_records_and_any_order_of_arrival_give_the_same() -> None:
    rng = np.random.default_rng(SEED)
    values, times = rng.normal(0, 1, 50_000), rng.integers(0, 10_000, 50_000)
    numbers, shuffled, ordered = np.arange(50_000), FifoSample(500), FifoSample(500)
    ordered.update(values, times=times, ids=numbers)
    for at in np.array_split(rng.permutation(50_000), 20):
        shuffled.update(values[at], times=times[at], ids=numbers[at])
    assert shuffled.to_bytes() == ordered.to_bytes()


def test_equal_times_are_ordered_by_source_and_number_and_equal_values_are_separate_records() -> None:
    parts = []
    for source in (2, 0, 1):
        parts.append(FifoSample(5, source=source))
        parts[-1].update([10.0 * source] * 3, times=[7, 7, 7])
    one = parts[0].merge_many(parts[1:])
    other = parts[2].merge_many([parts[1], parts[0], parts[0]])
    assert one.items() == other.items() and one.items().to_pylist() == [10.0, 10.0, 20.0, 20.0, 20.0]


def test_times_at_the_ends_of_int64_do_not_overflow() -> None:
    sample = FifoSample(2)
    ends = np.iinfo(np.int64)
    sample.update([1.0, 2.0, 3.0], times=[ends.max, ends.min, 0])
    assert sample.items().to_pylist() == [3.0, 1.0]


def test_source_counts_show_a_source_with_a_fast_clock() -> None:
    right, fast = FifoSample(50, source=1), FifoSample(50, source=2)
    right.update(np.zeros(1000), times=np.arange(1000))
    fast.update(np.ones(1000), times=np.arange(1000) + 60_000)
    assert right.merge_many([fast]).source_counts() == {2: 50}
    assert right.source_counts() == {1: 50}


def test_without_times_the_order_of_arrival_counts() -> None:
    sample = FifoSample(3)
    sample.update(["a", "b", "c"])
    sample.update(["d", None, "e"])
    assert sample.items().to_pylist() == ["c", "d", "e"]
    again = from_bytes(sample.to_bytes())
    assert isinstance(again, FifoSample)
    again.update(["f"])
    assert again.items().to_pylist() == ["d", "e", "f"]


def test_groups_keep_their_own_newest() -> None:
    rng = np.random.default_rng(SEED)
    groups, times = rng.integers(0, 400, 30_000), rng.permutation(30_000)
    stack = FifoStack(400, size=4)
    stack.update(groups, times.astype(np.float64), times=times)
    order = np.lexsort((times, groups))
    last = np.array([times[order][groups[order] == g][-4:].sum() for g in range(400)])
    np.testing.assert_array_equal(stack.query(Sum()).value, last)
    assert (stack.times(3) == np.sort(times[groups == 3])[-4:]).all()


def test_sizes_must_agree() -> None:
    with pytest.raises(IncompatibleSynopses, match=r"10.*20"):
        FifoSample(10).merge_many([FifoSample(20)])
