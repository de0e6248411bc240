"""Statistics by group are those of a monitor per group, however they are batched, merged, written down and read."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.arrivals import SubstreamMonitor
from edgewater.arrivals import SlotGrid, SubstreamStatistics, encode_report, read_report, substream
from edgewater.arrivals.report import ROUNDED_SUM
from edgewater.base.errors import CorruptSynopsis, InvalidConfig, InvalidRecord, SynopsisError
from edgewater.synopses import FloatArray, IntArray
from edgewater.synopses.encoding.rice import pack_integers, unpack_integers
from edgewater.synopses.encoding.state import State
from tests.cells import at_night
from tests.examples import examples
from tests.refusals import refused

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


def monitor() -> SubstreamMonitor:
    return SubstreamMonitor(GRID, TYPES, LIMIT)


def told(parts: list[SubstreamStatistics]) -> dict[tuple[object, ...], tuple[IntArray, FloatArray]]:
    """By group and sub-stream: arrivals (slot, lag, count), sorted, and sums."""
    result = {}
    for part in parts:
        rows, sums = part.arrivals(), part.arrival_counts()
        for i, key in enumerate(zip(*(k.to_pylist() for k in part.keys), strict=True)):
            mine = rows[rows[:, 3] == i][:, :3]
            if len(mine):
                result[(*key, part.index)] = (mine, sums[i])
    return result


@pytest.mark.nightly
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
            one.observe(born[mine], arrival, (), values[chosen], positions, (of_mine, of_mine) if known else None)
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
        assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, s.arrivals()[:, :3].tolist()))
        assert sums[0] == s.events
        (alone_sums,) = s.arrival_counts()
        np.testing.assert_allclose(sums[1:-2], alone_sums[1:-2], rtol=1e-12, atol=1e-9)
        ends = alone_sums[-2:]
        # Unless all of a batch is known, the group of which it is might have more values than were sampled.
        assert np.array_equal(sums[-2:], ends, equal_nan=True) or (not known and np.isnan(sums[-2:]).all())


@pytest.mark.parametrize("seed", [0, *at_night(*range(1, 5))])
def test_statistics_of_several_reports_merge_to_those_of_one_report(seed: int) -> None:
    whole, pieces = monitor(), monitor()
    ready: dict[int, SubstreamStatistics] = {}
    for i, (born, arrival, group, values, kept) in enumerate(batches(seed)):
        for each in (whole, pieces):
            each.observe(born, arrival, keys_of(group), values, kept)
        if i % 3 == 2:
            for part in pieces.take():
                if part.index in ready:
                    ready[part.index].merge(SubstreamStatistics.from_state(part.to_state(), GRID, grouped=True))
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
        restored = SubstreamMonitor.from_state(state, GRID, TYPES, LIMIT)
    reports = [[s.to_state() for s in m.take()] for m in (plain, asked, restored)]
    assert reports[0] == reports[1] == reports[2] and len(reports[0]) > 3


def test_merged_statistics_of_a_count_which_has_no_values_are_read_back() -> None:
    m, merged = monitor(), dict[int, SubstreamStatistics]()
    for born, arrival, group, _, _ in batches(2):
        m.observe(born, arrival, keys_of(group))
        for part in m.take():
            if part.index in merged:
                merged[part.index].merge(part)
            merged.setdefault(part.index, part)
    for part in merged.values():
        read = SubstreamStatistics.from_state(part.to_state(), GRID, grouped=True)
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
    again = [SubstreamStatistics.from_state(s.to_state(), GRID, grouped=True) for s in found]
    assert [s.unattributed for s in again] == [s.unattributed for s in found]
    for born, arrival, group, values, kept in batches(1):
        m.observe(born, arrival, keys_of(group), values, kept)
    assert sum(s.unattributed for s in m.take()) == 0, "the next report starts empty"


class _Report:
    def __init__(self, part: SubstreamStatistics) -> None:
        self.events = int(part.counts.sum())


def test_with_too_many_cells_only_the_number_of_events_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def report_of(batch: Batch) -> SubstreamStatistics:
        edge = monitor()
        born, arrival, group, values, kept = batch
        edge.observe(np.full(len(born), 500), arrival, keys_of(group), values, kept)
        (part,) = edge.take()
        return part

    one, other = (report_of(b) for b in list(batches(5))[3:5])
    cells, events = len(one.cells), int(one.counts.sum() + other.counts.sum())
    monkeypatch.setattr(substream, "MAX_CELLS", cells)
    one.merge(other)
    read = SubstreamStatistics.from_state(one.to_state(), GRID, grouped=True)
    for part in (one, read):
        assert (part.unattributed, part.groups, len(part.arrivals()), len(part.arrival_counts())) == (events, 0, 0, 0)
    one.merge(report_of(list(batches(5))[5]))
    assert one.unattributed == events and one.groups, "later events are reported again"
    monkeypatch.setattr(substream, "MAX_CELLS", cells - 1)
    assert report_of(list(batches(5))[3]).unattributed > 0


def test_events_beyond_the_maximum_clock_skew_are_ignored() -> None:
    m = monitor()
    born = np.array([1_000, 1_500, 2_001], np.int64)
    m.observe(born, 1_000, keys_of(np.zeros(3, np.int64)), np.ones(2), np.array([1, 2]))
    found = m.take()
    assert sum(int(s.counts.sum()) for s in found) == 2
    assert sum(float(s.value_sums[0].sum()) for s in found) == 1


def one() -> SubstreamStatistics:
    m = monitor()
    m.observe(np.array([1_000, 1_005]), 1_050, keys_of(np.array([1, 2])), np.ones(2), np.arange(2))
    (part,) = m.take()
    return part


@pytest.mark.parametrize("cut", [0, 3, 20, 60])
def test_damaged_bytes_are_refused(cut: int) -> None:
    state = one().to_state()
    with pytest.raises(SynopsisError):
        SubstreamStatistics.from_state(state[: len(state) - 1 - cut], GRID, grouped=True)


def test_invalid_cells_and_columns_of_different_lengths_are_refused() -> None:
    part = one()
    part.cells = part.cells + GRID.substream_slots * GRID.lags * 2
    with pytest.raises(CorruptSynopsis):
        SubstreamStatistics.from_state(part.to_state(), GRID, grouped=True)
    part = one()
    part.keys = [part.keys[0], part.keys[1][:1]]
    with pytest.raises(CorruptSynopsis):
        SubstreamStatistics.from_state(part.to_state(), GRID, grouped=True)


def test_a_monitor_of_another_limit_or_other_types_is_refused() -> None:
    for types, limit in ((TYPES[::-1], LIMIT), (TYPES, LIMIT - 1), (TYPES, LIMIT + 1)):
        with pytest.raises(CorruptSynopsis):
            SubstreamMonitor.from_state(monitor().to_state(), GRID, types, limit)


def test_statistics_of_different_substreams_do_not_merge() -> None:
    part, other = one(), one()
    other.index += 1
    with pytest.raises(InvalidRecord):
        part.merge(other)


def test_a_monitor_needs_a_column_and_a_limit() -> None:
    for types, limit in ((TYPES, 0), ((), 5)):
        with refused(InvalidConfig, "groups"):
            SubstreamMonitor(GRID, types, limit)


# Reports


def reported(seed: int, *, grouped: bool, sampled: bool, spread_ms: int) -> list[SubstreamStatistics]:
    """The statistics of some batches. Unless the records are sampled, all values are known."""
    m = monitor() if grouped else SubstreamMonitor(GRID)
    for born, arrival, group, values, kept in batches(seed, spread_ms=spread_ms):
        keys = keys_of(group) if grouped else ()
        if sampled:
            m.observe(born, arrival, keys, values, kept)
        else:
            values = np.random.default_rng([seed, arrival]).gamma(2.0, 5.0, len(born))
            m.observe(born, arrival, keys, values, None, (values, values))
    return m.take()


Totals = dict[tuple[object, ...], FloatArray]


def by_slice(
    statistics: list[SubstreamStatistics], substreams: int
) -> tuple[dict[tuple[object, ...], int], Totals, Totals]:
    """Returns the counts of cells; by slice, group and lag group the sums; by slice and group the ranges."""
    cells, sums, ranges = dict[tuple[object, ...], int](), Totals(), Totals()
    for each in statistics:
        keys = list(zip(*(k.to_pylist() for k in each.keys), strict=True)) if each.keys else [()]
        for slot, lag, count, group in each.arrivals().tolist():
            cells[keys[group], each.index, slot, lag] = count
        for code, row in zip(each.value_cells.tolist(), each.value_sums.T, strict=True):
            group, lag_group = divmod(code, each.lag_groups)
            at = (keys[group], each.index // substreams, lag_group)
            sums[at] = sums.get(at, np.zeros(3)) + row
        for group, key in enumerate(keys):
            at = (key, each.index // substreams)
            least, greatest = ranges.get(at, np.array([np.inf, -np.inf]))
            with np.errstate(invalid="ignore"):
                row = np.array([np.minimum(least, each.ranges[0, group]), np.maximum(greatest, each.ranges[1, group])])
            if not (row == [np.inf, -np.inf]).all():
                ranges[at] = row
    return cells, sums, ranges


@examples(40)
@given(
    st.integers(0, 10_000), st.booleans(), st.booleans(), st.sampled_from([50, 900, 500_000]), st.sampled_from([1, 3])
)
def test_a_report_has_all_counts_and_rounded_values(
    seed: int, grouped: bool, sampled: bool, spread_ms: int, substreams: int
) -> None:
    sent = reported(seed, grouped=grouped, sampled=sampled, spread_ms=spread_ms)
    received = read_report(encode_report(sent, substreams), GRID, grouped=grouped)
    assert [s.index for s in received] == [s.index for s in sent]
    (cells, sums, ranges), (got_cells, got_sums, got_ranges) = (
        by_slice(sent, substreams),
        by_slice(received, substreams),
    )
    assert got_cells == cells and got_sums.keys() == sums.keys() and got_ranges.keys() == ranges.keys()
    totals: dict[tuple[object, ...], FloatArray] = {}
    for at in sums:
        assert got_sums[at][0] == sums[at][0]
        totals[at[:2]] = totals.get(at[:2], np.zeros((2, 3))) + np.stack([sums[at], got_sums[at]])
    for (count, total, squares), (_, got, got_squares) in totals.values():
        assert abs(got - total) <= 1.01 * ROUNDED_SUM * abs(total)
        variation = squares - total**2 / count
        assert 0.999 * variation - 1e-6 <= got_squares - got**2 / count <= 1.1 * variation + 1e-6
    for at, (least, greatest) in ranges.items():
        if np.isnan(least):
            assert np.isnan(got_ranges[at]).all()
        else:
            assert got_ranges[at][0] <= least and greatest <= got_ranges[at][1]
            np.testing.assert_allclose(got_ranges[at], (least, greatest), rtol=2.5e-4)


def test_a_report_is_small_and_equal_values_stay_equal() -> None:
    rng, m = np.random.default_rng(7), SubstreamMonitor(SlotGrid(20, 30, 384))
    for now in range(2_000, 2_600, 20):
        born = now - rng.exponential(240, 4).astype(np.int64)
        m.observe(born, now, (), np.full(4, 20.5), None, (np.full(4, 20.5),) * 2)
    sent = m.take()
    data = encode_report(sent, 5)
    assert len(data) < 240 < sum(len(s.to_state()) for s in sent) / 3
    received = read_report(data, sent[0].grid)
    count, total, squares = sum(s.value_sums.sum(axis=1) for s in received)
    assert (count, total) == (120, 120 * 20.5) and squares == pytest.approx(120 * 20.5**2, rel=1e-12)


@pytest.mark.parametrize("grouped", [False, True])
def test_damaged_reports_are_refused(grouped: bool) -> None:
    data = encode_report(reported(3, grouped=grouped, sampled=True, spread_ms=900), 3)
    for cut in (1, 3, 20, 60, len(data) - 2):
        with pytest.raises(SynopsisError):
            read_report(data[: len(data) - cut], GRID, grouped=grouped)
    with pytest.raises(SynopsisError):
        read_report(data, GRID, grouped=not grouped)


@examples(30)
@given(st.lists(st.one_of(st.integers(0, 3), st.integers(0, 1 << 45)), max_size=100))
def test_integers_are_read_back_and_other_numbers_of_them_are_refused(values: list[int]) -> None:
    data = pack_integers(np.array(values, np.int64))
    read, end = unpack_integers(b"-" + data, 1, len(values))
    assert read.tolist() == values and end == len(data) + 1
    with pytest.raises(CorruptSynopsis):
        unpack_integers(data, 0, len(values) + 1)
