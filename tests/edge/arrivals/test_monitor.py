import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.arrivals import SubstreamMonitor
from edgewater.arrivals import SlotGrid, SubstreamStatistics, lag_groups
from edgewater.base.errors import CorruptSynopsis, InvalidQuery, InvalidRecord, UnsupportedVersion
from edgewater.synopses.encoding.state import State
from tests.examples import examples
from tests.refusals import refused

GRID = SlotGrid(slot_ms=20, substream_slots=30, lags=100)


@pytest.fixture
def monitor():
    return SubstreamMonitor(GRID)


def batch(rng, count):
    born = np.sort(rng.integers(0, 3000, count))
    return born, born + rng.integers(0, 900, count), rng.normal(5, 2, count)


def observe(monitor, born, arrival, values=None, kept=None, bounds=None):
    """Adds events one by one, each with its own time of arrival."""
    for i, (born_ms, arrival_ms) in enumerate(zip(born.tolist(), arrival.tolist(), strict=True)):
        mine = [] if values is None else np.flatnonzero(kept == i) if kept is not None else [i]
        sampled = (values[mine], np.zeros(len(mine), np.int64)) if values is not None else (None, None)
        known = None if bounds is None else tuple(each[i : i + 1] for each in bounds)
        monitor.observe(np.array([born_ms]), arrival_ms, (), *sampled, known)


def range_of(s):
    return tuple(s.ranges[:, 0].tolist())


def same(a, b):
    assert (a.index, a.events) == (b.index, b.events)
    assert np.array_equal(a.cells, b.cells)
    assert np.array_equal(a.counts, b.counts)
    assert np.array_equal(a.value_cells, b.value_cells)
    assert np.allclose(a.value_sums, b.value_sums)


@examples(30)
@given(st.integers(0, 2**32 - 1), st.integers(1, 199))
def test_batches_add_up_to_the_whole(seed, cut):
    born, arrival, value = batch(np.random.default_rng(seed), 200)
    every = np.arange(200)
    whole, parts = SubstreamMonitor(GRID), SubstreamMonitor(GRID)
    observe(whole, born, arrival, value, every)
    observe(parts, born[:cut], arrival[:cut], value[:cut], every[:cut])
    first = {s.index: s for s in parts.take()}
    observe(parts, born[cut:], arrival[cut:], value[cut:], every[: 200 - cut])
    for s in parts.take():
        if s.index in first:
            first[s.index].merge(s)
        else:
            first[s.index] = s
    for s in whole.take():
        same(first[s.index], s)


def test_statistics_are_those_of_the_events(monitor):
    born, arrival, value = batch(np.random.default_rng(4), 1000)
    observe(monitor, born, arrival, value[::2], np.arange(0, 1000, 2))
    found = monitor.take()
    assert sum(s.events for s in found) == 1000
    assert sum(s.value_sums[0].sum() for s in found) == 500
    inside = (born >= 600) & (born < 1200)
    second = next(s for s in found if s.index == 1)
    _, lags, counts, _ = second.arrivals().T
    assert (lags * counts).sum() * GRID.slot_ms / second.events == pytest.approx(
        (arrival - born)[inside].mean(), abs=GRID.slot_ms / 4
    )
    assert second.value_sums[1].sum() == pytest.approx(value[inside & (np.arange(1000) % 2 == 0)].sum())
    assert monitor.take() == []


def test_arrivals_are_by_slot_and_lag(monitor):
    observe(monitor, np.array([605, 610, 700]), np.array([650, 611, 5000]))
    (s,) = monitor.take()
    slots, lags, counts, _ = s.arrivals().T
    assert sorted(zip(slots.tolist(), lags.tolist(), counts.tolist(), strict=True)) == [
        (30, 0, 1),
        (32, 2, 1),
        (134, 99, 1),
    ]


def test_an_event_from_the_future_is_neither_counted_nor_measured():
    monitor = SubstreamMonitor(GRID, max_skew_ms=100)
    observe(monitor, np.array([500, 560, 90_000]), np.array([510, 550, 520]), np.array([1.0, 2.0, 3.0]), np.arange(3))
    found = monitor.take()
    assert sum(s.events for s in found) == 2
    assert min(s.arrivals()[:, 1].min() for s in found) >= 0
    assert sum(s.value_sums[0].sum() for s in found) == 2


@examples(30)
@given(st.integers(0, 2**32 - 1))
def test_statistics_are_read_as_they_were_written(seed):
    born, arrival, value = batch(np.random.default_rng(seed), 300)
    monitor = SubstreamMonitor(GRID)
    observe(monitor, born, arrival, value, np.arange(300))
    for s in monitor.take():
        again = SubstreamStatistics.from_state(s.to_state(), GRID)
        same(again, s)
        assert again.to_state() == s.to_state()


@examples(30)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 100, 4_000]), st.integers(1, 300))
def test_the_range_is_that_of_all_events_whatever_was_sampled_and_however_they_were_batched(seed, spread_ms, cut):
    rng = np.random.default_rng(seed)
    born, value = 10_000 - rng.integers(0, spread_ms, 300), rng.normal(0, 100, 300)
    kept = np.flatnonzero(rng.random(300) < 0.1)
    whole, pieces = SubstreamMonitor(GRID), SubstreamMonitor(GRID)
    whole.observe(born, 10_000, (), value[kept], kept, (value, value))
    for begin, end in ((0, cut), (cut, 300)):
        mine = kept[(kept >= begin) & (kept < end)]
        part = value[begin:end]
        pieces.observe(born[begin:end], 10_000, (), value[mine], mine - begin, (part, part))
        pieces = SubstreamMonitor.from_state(State.unpack(pieces.to_state().pack("m"), "m"), GRID)
    index = born // GRID.substream_ms
    for monitor in (whole, pieces):
        for s in monitor.take():
            of_part = value[index == s.index]
            assert range_of(s) == (of_part.min(), of_part.max())


def test_values_that_are_not_known_make_the_range_unknown_and_stay_so(monitor):
    born = np.array([100, 110, 120, GRID.substream_ms + 100])
    monitor.observe(born, 1_000, (), np.array([3.0, 4.0]), np.array([0, 1]))
    monitor.observe(born[:2], 1_010, (), np.array([5.0, 6.0]))
    first, second = monitor.take()
    assert np.isnan([first.ranges, second.ranges]).all()
    first.merge(SubstreamStatistics(GRID, first.index, ranges=np.array([[1.0], [2.0]])))
    assert np.isnan(first.ranges).all()
    monitor.observe(born[:3], 1_020, (), np.array([5.0, 6.0]), np.array([0, 1]), (np.full(3, -1.0), np.full(3, 9.0)))
    (third,) = monitor.take()
    assert range_of(third) == (-1.0, 9.0)


def test_statistics_whose_least_value_is_above_the_greatest_are_refused():
    with pytest.raises(CorruptSynopsis):
        SubstreamStatistics.from_state(SubstreamStatistics(GRID, 0, ranges=np.array([[2.0], [1.0]])).to_state(), GRID)


@examples(60)
@given(st.data())
def test_damaged_state_is_refused_or_reads_as_statistics(data):
    monitor = SubstreamMonitor(GRID)
    observe(monitor, *batch(np.random.default_rng(1), 50)[:2])
    state = bytearray(monitor.take()[0].to_state())
    state[data.draw(st.integers(0, len(state) - 1))] ^= data.draw(st.integers(1, 255))
    cut = bytes(state[: data.draw(st.integers(0, len(state)))])
    try:
        SubstreamStatistics.from_state(cut, GRID)
    except (CorruptSynopsis, UnsupportedVersion):
        return
    assert len(cut) == len(state)


def test_statistics_of_different_substreams_do_not_merge():
    with refused(InvalidRecord, "substream"):
        SubstreamStatistics(GRID, 1).merge(SubstreamStatistics(GRID, 2))


def test_a_substream_that_does_not_divide_the_window_is_refused():
    with refused(InvalidQuery, "substream"):
        SlotGrid.of(3000, 700, 6000)


@examples(30)
@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.sampled_from([0.0, 1e6]))
def test_a_batch_that_arrived_at_once_equals_its_events_one_by_one(seed, size, offset):
    rng = np.random.default_rng(seed)
    at_once, one_by_one = SubstreamMonitor(GRID), SubstreamMonitor(GRID)
    now = 10_000
    for _ in range(8):
        born = now - rng.exponential(300, size).astype(np.int64)
        values = offset + rng.normal(5, 2, size)
        values[rng.random(size) < 0.1] = np.nan
        kept = np.flatnonzero(rng.random(size) < 0.5)
        at_once.observe(born, now, (), values[kept], kept)
        observe(one_by_one, born, np.full(size, now), values[kept], kept)
        now += int(rng.integers(0, 30))
    found, expected = at_once.take(), one_by_one.take()
    assert [s.index for s in found] == [s.index for s in expected]
    for a, b in zip(found, expected, strict=True):
        same(a, b)


def test_the_buffer_between_takes_is_bounded(monitor):
    rng = np.random.default_rng(4)
    most = 0
    for number in range(4000):
        now = 5000 + 20 * (number % 50)
        monitor.observe(now - rng.integers(0, 1000, 20), now, (), np.ones(20), np.arange(20))
        if number % 500 == 0:
            most = max(most, len(monitor.to_state().pack("monitor")))
    cells = 50 * 100  # arrival slots, lags
    assert most < cells * 16 + (8192 + 20) * 24


@examples(25)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 11), max_size=4))
def test_reading_or_restoring_the_state_at_any_moment_changes_no_byte_of_the_statistics(seed, moments):
    """A replay of the journal from any checkpoint must build the same frames."""
    rng = np.random.default_rng(seed)
    # The large batches have more values in a slot than are buffered.
    sizes = [40] * 8 + [1500] * 4
    batches = [(*batch(rng, n), np.flatnonzero(rng.random(n) < 0.7)) for n in sizes]
    unread, read_out = SubstreamMonitor(GRID), SubstreamMonitor(GRID)
    restored = read_out
    for number, (born, _, value, kept) in enumerate(batches):
        now = 4000 + 7 * number
        for monitor in {id(m): m for m in (unread, read_out, restored)}.values():
            monitor.observe(born, now, (), value[kept], kept)
        if number in moments:
            restored = SubstreamMonitor.from_state(State.unpack(read_out.to_state().pack("monitor"), "monitor"), GRID)
    taken = [[s.to_state() for s in m.take()] for m in (unread, read_out)]
    assert taken[0] == taken[1]
    if restored is not read_out:
        assert [s.to_state() for s in restored.take()] == taken[0]


@pytest.mark.parametrize("size", [50, 5000])
def test_sums_by_lag_are_those_of_the_events(size, monitor):
    rng = np.random.default_rng(size)
    now = 10_000
    born = now - rng.exponential(300, size).astype(np.int64)
    values = rng.lognormal(1, 1, size)
    monitor.observe(born, now, (), values)
    lag = np.minimum(now // 20 - born // 20, 99)
    for s in monitor.take():
        mine = born // 600 == s.index
        sums = s.arrival_counts()[0, 1:-2].reshape(3, -1)
        for row, weights in zip(sums, (np.ones(size), values, values**2), strict=True):
            assert row == pytest.approx(np.bincount(lag_groups(100)[lag[mine]], weights[mine], len(row)), rel=1e-9)
        assert s.events == s.value_sums[0].sum() == mine.sum()


def test_values_without_positions_belong_to_all_events():
    born, arrival, value = batch(np.random.default_rng(5), 300)
    named, unnamed = SubstreamMonitor(GRID), SubstreamMonitor(GRID)
    observe(named, born, arrival, value, np.arange(300))
    observe(unnamed, born, arrival, value)
    assert [s.to_state() for s in named.take()] == [s.to_state() for s in unnamed.take()]


def test_a_wrong_number_of_values_is_refused():
    with refused(InvalidRecord, "values"):
        SubstreamMonitor(GRID).observe(np.arange(5), 60, (), np.ones(4))
    with refused(InvalidRecord, "values"):
        SubstreamMonitor(GRID).observe(np.arange(5), 60, (), np.ones(4), np.arange(3))


@pytest.mark.slow
def test_events_that_span_hours_are_counted():
    rng = np.random.default_rng(6)
    born = rng.integers(0, 6 * 3_600_000, 2500)
    now = 6 * 3_600_000
    at_once, one_by_one = SubstreamMonitor(GRID), SubstreamMonitor(GRID)
    at_once.observe(born, now, (), born / 1e3)
    observe(one_by_one, born, np.full(2500, now), born / 1e3)
    found, expected = at_once.take(), one_by_one.take()
    assert sum(s.events for s in found) == sum(s.value_sums[0].sum() for s in found) == 2500
    for a, b in zip(found, expected, strict=True):
        same(a, b)


@examples(30)
@given(st.lists(st.integers(-5000, 5000), min_size=1, max_size=40), st.integers(0, 5000))
def test_clock_jumps_lose_no_event_and_cause_no_negative_delay(steps, first):
    """Each batch comes when its edge's clock says, however that jumps."""
    monitor = SubstreamMonitor(GRID, max_skew_ms=1_000)
    now, given = 10_000_000 + first, 0
    for step in steps:
        now += step
        monitor.observe(now + np.array([-700, 0, 1_000, 1_001, 9_999_999]), now)
        given += 3
    found = monitor.take()
    assert sum(s.events for s in found) == given
    assert all((s.arrivals()[:, 1] >= 0).all() for s in found)


def test_the_statistics_of_release_0_3_0_are_read(monitor):
    """Its header has 88 bytes of numbers that no release reads. Release 0.3.0 reads zeros there."""
    observe(monitor, np.array([605, 610, 700]), np.array([650, 611, 5000]), np.array([1.0, 2.0, 4.0]))
    (s,) = monitor.take()
    state = s.to_state()
    assert state[17:105] == bytes(88)
    old = state[:17] + struct.pack("<qq9d", 1, 2, *range(9)) + state[105:]
    same(SubstreamStatistics.from_state(old, GRID), s)


def test_the_monitor_of_release_0_3_0_is_restored(monitor):
    observe(monitor, np.array([605, 610, 700]), np.array([650, 611, 5000]), np.array([1.0, 2.0, 4.0]))
    state = monitor.to_state()
    count, total, squares = state.arrays["sums"]
    centred = np.stack([count, total - 2 * count, squares - 4 * total + 4 * count])
    old = State([700, 2.0, [[1, 3.0, 2.5, 1.0]], [[1, [0, 2]]]], state.arrays | {"sums": centred})
    (expected,) = monitor.take()
    (restored,) = SubstreamMonitor.from_state(old, GRID).take()
    same(restored, expected)


@pytest.mark.parametrize("number", [1, 3000])
def test_squares_of_large_values_are_infinite_without_a_warning(number, monitor):
    monitor.observe(np.full(number, 50), 60, (), np.full(number, 1e200))
    (s,) = monitor.take()
    assert s.value_sums.sum(axis=1).tolist() == [number, pytest.approx(number * 1e200), np.inf]
