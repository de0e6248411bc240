"""Statistics by group are those of a monitor per group, however they are batched, merged, written down and read."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.arrivals import GroupMonitor, SubstreamMonitor
from edgewater.arrivals import GroupedSubstream, SlotGrid, SubstreamStatistics, grouped
from edgewater.model.errors import CorruptSynopsis, InvalidConfig, InvalidRecord, SynopsisError
from edgewater.synopses import FloatArray, IntArray
from edgewater.synopses.encoding.state import State
from tests.cells import at_night
from tests.examples import examples

GRID = SlotGrid(10, 10, 64)
TYPES = (pa.string(), pa.int64())
LIMIT = 12
Batch = tuple[IntArray, int, IntArray, FloatArray, IntArray]


def batches(seed: int, count: int = 12, groups: int = 5, spread_ms: int = 900) -> Iterator[Batch]:
    """Births, arrival, groups, sampled values and their positions."""
    rng = np.random.default_rng([seed, 3])
    for i in range(count):
        n = int(rng.integers(0, 60))
        arrival = 1_000 + 37 * i
        born = arrival - rng.integers(-40, spread_ms, n)
        kept = np.flatnonzero(rng.random(n) < 0.7)
        yield born, arrival, rng.integers(0, groups, n), rng.gamma(2.0, 5.0, len(kept)), kept


def keys_of(group: IntArray) -> list[pa.Array]:
    names = [None if g == 0 else f"g{g // 2}" for g in group.tolist()]
    return [pa.array(names, pa.string()), pa.array((group % 2).tolist(), pa.int64())]


def monitor() -> GroupMonitor:
    return GroupMonitor(GRID, TYPES, LIMIT)


def told(parts: list[GroupedSubstream]) -> dict[tuple[object, ...], tuple[IntArray, FloatArray]]:
    """By group and sub-stream: arrivals (slot, lag, count), sorted, and sums."""
    result = {}
    for part in parts:
        rows, sums = part.arrivals(), part.arrival_counts()
        for i, key in enumerate(zip(*(k.to_pylist() for k in part.keys), strict=True)):
            mine = rows[rows[:, 3] == i][:, :3]
            if len(mine):
                result[(*key, part.index)] = (mine, sums[i])
    return result


@examples(30)
@given(st.integers(0, 10_000), st.sampled_from([0, 500_000]))
def test_the_statistics_of_a_group_equal_those_of_a_separate_monitor(seed: int, spread_ms: int) -> None:
    together, alone = monitor(), [SubstreamMonitor(GRID) for _ in range(5)]
    rng, known = np.random.default_rng(seed), seed % 3 > 0
    for born, arrival, group, values, kept in batches(seed, spread_ms=900 + spread_ms):
        every = rng.normal(0, 100, len(born))
        every[kept] = values
        together.observe(born, arrival, keys_of(group), values, kept, (every, every) if known else None)
        for g, one in enumerate(alone):
            mine = np.flatnonzero(group == g)
            chosen = np.flatnonzero(group[kept] == g)
            positions, of_mine = np.searchsorted(mine, kept[chosen]), every[mine]
            one.observe(born[mine], arrival, values[chosen], positions, (of_mine, of_mine) if known else None)
    found = told(together.take())
    expected: dict[tuple[object, ...], SubstreamStatistics] = {}
    for g, one in enumerate(alone):
        (name, number) = (k.to_pylist()[0] for k in keys_of(np.array([g])))
        for s in one.take():
            if s.events:
                expected[name, number, s.index] = s
    assert found.keys() == expected.keys()
    for key, (rows, sums) in found.items():
        s = expected[key]
        assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, np.stack(s.arrivals(), axis=1).tolist()))
        assert sums[0] == s.events
        late = s.value_sums.reshape(-1) if s.value_sums.size else np.zeros(len(sums) - 3)
        np.testing.assert_allclose(sums[1:-2], late, rtol=1e-12, atol=1e-9)
        ends = [s.least, s.greatest]
        # Unless all of a batch is known, the group of which it is might have more values than were sampled.
        assert np.array_equal(sums[-2:], ends, equal_nan=True) or (not known and np.isnan(sums[-2:]).all())


@pytest.mark.parametrize("seed", [0, *at_night(*range(1, 5))])
def test_statistics_of_several_reports_merge_to_those_of_one_report(seed: int) -> None:
    whole, pieces = monitor(), monitor()
    ready: dict[int, GroupedSubstream] = {}
    for i, (born, arrival, group, values, kept) in enumerate(batches(seed)):
        for each in (whole, pieces):
            each.observe(born, arrival, keys_of(group), values, kept)
        if i % 3 == 2:
            for part in pieces.take():
                if part.index in ready:
                    ready[part.index].merge(GroupedSubstream.from_state(part.to_state(), GRID))
                else:
                    ready[part.index] = part
    one, other = told(whole.take()), told(list(ready.values()))
    assert one.keys() == other.keys()
    for key, (rows, sums) in one.items():
        assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, other[key][0].tolist()))
        np.testing.assert_allclose(sums, other[key][1], rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("seed", [0, *at_night(*range(1, 5))])
def test_a_restored_monitor_reports_the_same_bytes_and_a_snapshot_changes_nothing(seed: int) -> None:
    plain, asked, restored = monitor(), monitor(), monitor()
    for born, arrival, group, values, kept in batches(seed, 40):
        for each in (plain, asked, restored):
            each.observe(born, arrival, keys_of(group), values, kept)
        asked.to_state()
        state = State.unpack(restored.to_state().pack("monitor"), "monitor")
        restored = GroupMonitor.from_state(state, GRID, TYPES, LIMIT)
    reports = [[s.to_state() for s in m.take()] for m in (plain, asked, restored)]
    assert reports[0] == reports[1] == reports[2] and len(reports[0]) > 3


def test_merged_statistics_of_a_count_which_has_no_values_are_read_back() -> None:
    m, merged = monitor(), dict[int, GroupedSubstream]()
    for born, arrival, group, _, _ in batches(2):
        m.observe(born, arrival, keys_of(group))
        for part in m.take():
            if part.index in merged:
                merged[part.index].merge(part)
            merged.setdefault(part.index, part)
    for part in merged.values():
        read = GroupedSubstream.from_state(part.to_state(), GRID)
        np.testing.assert_array_equal(read.arrivals(), part.arrivals())
        assert read.arrival_counts()[:, 1:-2].sum() == 0


def test_with_too_many_groups_only_the_number_of_events_is_reported() -> None:
    m = monitor()
    total = 0
    for born, arrival, group, values, kept in batches(1, 12, groups=2 * LIMIT + 2):
        m.observe(born, arrival, keys_of(group), values, kept)
        total += len(born)
    found = m.take()
    assert sum(s.unattributed for s in found) == total and sum(s.events for s in map(_Report, found)) == 0
    again = [GroupedSubstream.from_state(s.to_state(), GRID) for s in found]
    assert [s.unattributed for s in again] == [s.unattributed for s in found]
    for born, arrival, group, values, kept in batches(1):
        m.observe(born, arrival, keys_of(group), values, kept)
    assert sum(s.unattributed for s in m.take()) == 0, "the next report starts empty"


class _Report:
    def __init__(self, part: GroupedSubstream) -> None:
        self.events = int(part.counts.sum())


def test_with_too_many_cells_only_the_number_of_events_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def report_of(batch: Batch) -> GroupedSubstream:
        edge = monitor()
        born, arrival, group, values, kept = batch
        edge.observe(np.full(len(born), 500), arrival, keys_of(group), values, kept)
        (part,) = edge.take()
        return part

    one, other = (report_of(b) for b in list(batches(5))[3:5])
    cells, events = len(one.cells), int(one.counts.sum() + other.counts.sum())
    monkeypatch.setattr(grouped, "MAX_CELLS", cells)
    one.merge(other)
    read = GroupedSubstream.from_state(one.to_state(), GRID)
    for part in (one, read):
        assert (part.unattributed, part.groups, len(part.arrivals()), len(part.arrival_counts())) == (events, 0, 0, 0)
    one.merge(report_of(list(batches(5))[5]))
    assert one.unattributed == events and one.groups, "later events are reported again"
    monkeypatch.setattr(grouped, "MAX_CELLS", cells - 1)
    assert report_of(list(batches(5))[3]).unattributed > 0


def test_events_beyond_the_maximum_clock_skew_are_ignored() -> None:
    m = monitor()
    born = np.array([1_000, 1_500, 2_001], np.int64)
    m.observe(born, 1_000, keys_of(np.zeros(3, np.int64)), np.ones(2), np.array([1, 2]))
    found = m.take()
    assert sum(int(s.counts.sum()) for s in found) == 2
    assert sum(float(s.value_sums[0].sum()) for s in found) == 1


def one() -> GroupedSubstream:
    m = monitor()
    m.observe(np.array([1_000, 1_005]), 1_050, keys_of(np.array([1, 2])), np.ones(2), np.arange(2))
    (part,) = m.take()
    return part


@pytest.mark.parametrize("cut", [0, 3, 20, 60])
def test_damaged_bytes_are_refused(cut: int) -> None:
    state = one().to_state()
    with pytest.raises(SynopsisError):
        GroupedSubstream.from_state(state[: len(state) - 1 - cut], GRID)


def test_invalid_cells_and_columns_of_different_lengths_are_refused() -> None:
    part = one()
    part.cells = part.cells + GRID.substream_slots * GRID.lags * 2
    with pytest.raises(CorruptSynopsis, match="cells are not ascending"):
        GroupedSubstream.from_state(part.to_state(), GRID)
    part = one()
    part.keys = [part.keys[0], part.keys[1][:1]]
    with pytest.raises(CorruptSynopsis, match="expected keys"):
        GroupedSubstream.from_state(part.to_state(), GRID)


def test_a_monitor_of_another_limit_or_other_types_is_refused() -> None:
    for types, limit in ((TYPES[::-1], LIMIT), (TYPES, LIMIT - 1), (TYPES, LIMIT + 1)):
        with pytest.raises(CorruptSynopsis, match="group monitor of"):
            GroupMonitor.from_state(monitor().to_state(), GRID, types, limit)


def test_statistics_of_different_substreams_do_not_merge() -> None:
    part, other = one(), one()
    other.index += 1
    with pytest.raises(InvalidRecord):
        part.merge(other)


def test_a_monitor_needs_a_column_and_a_limit() -> None:
    for types, limit in ((TYPES, 0), ((), 5)):
        with pytest.raises(InvalidConfig, match="at least one group"):
            GroupMonitor(GRID, types, limit)
