import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewater.base.errors import IncompatibleSynopses, InvalidRequest
from edgewater.synopses import FifoSample, from_bytes
from tests.examples import examples
from tests.refusals import refused


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
