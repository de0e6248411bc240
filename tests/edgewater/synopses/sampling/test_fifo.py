from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewater.base.errors import IncompatibleSynopses, InvalidRequest
from edgewater.synopses import Count, FifoSample, Maximum, Mean, Minimum, Proportion, Quantile, Rank, Sum, from_bytes
from tests.examples import examples
from tests.refusals import refused

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


def kept(rows: list[tuple[int, int, int]], size: int, quota: int) -> list[tuple[int, int, int]]:
    """Selects the newest records of each source, then the newest of those."""
    candidates = [row for source in {r[1] for r in rows} for row in sorted(r for r in rows if r[1] == source)[-quota:]]
    return sorted(candidates)[-size:]


def sample_of(rows: list[tuple[int, int, int]], size: int, quota: int) -> FifoSample:
    parts = [FifoSample(size, source=source, quota=quota) for source in sorted({r[1] for r in rows})]
    for part in parts:
        mine = [r for r in rows if r[1] == part.source]
        times, numbers = (np.array([r[i] for r in mine]) for i in (0, 2))
        part.update(numbers, times=times, ids=numbers)
    return parts[0].merge_many(parts[1:])


@examples(80)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=2, max_size=40),
    st.integers(1, 12),
    st.integers(1, 6),
    st.integers(0, 40),
)
def test_any_tree_of_merges_keeps_the_newest_within_the_quotas(drawn, size, quota, cut) -> None:
    rows = [(time, source, number) for number, (time, source) in enumerate(drawn)]
    whole = sample_of(rows, size, quota)
    assert whole.items().to_pylist() == [number for _, _, number in kept(rows, size, quota)]
    parts = [sample_of(part, size, quota) for part in (rows[:cut], rows[cut:]) if part]
    merged = parts[-1].merge_many([*parts, parts[0]])
    assert merged.items() == whole.items()
    assert from_bytes(merged.to_bytes()).to_bytes() == merged.to_bytes()


def test_a_quota_limits_a_source_with_a_fast_clock() -> None:
    parts = [FifoSample(100, source=k, quota=40) for k in range(4)]
    for part in parts:
        ahead = 3_600_000 if part.source == 0 else 0
        part.update(np.arange(1000), times=np.arange(1000) + ahead)
    merged = parts[0].merge_many(parts[1:])
    assert merged.source_counts() == {0: 40, 1: 20, 2: 20, 3: 20}
    free = FifoSample(100, source=0)
    with pytest.raises(IncompatibleSynopses):
        merged.merge_many([free])
    with refused(InvalidRequest, "quota"):
        FifoSample(100, quota=0)
