"""What the times of records in the newest slices say about groups that keep to a schedule."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from edge.cache.entries import SliceEntries
from edge.cache.forecast import forecast
from edge.cache.history import GroupHistory
from edge.cache.timetable import MAX_TIMES, SLICES, Timetable, positions_of
from edgewater.synopses import GroupedAggregate, IntArray, function_named

GROUPS, SLICE_MS = 300, 86_400_000
TIMES: IntArray = np.sort(np.random.default_rng(0).integers(0, SLICE_MS, 2 * GROUPS))
"""Of a day on schedule, whose groups have two records each."""
KEYS: IntArray = np.random.default_rng(1).permutation(np.repeat(np.arange(GROUPS), 2))


def entries(keys: IntArray, times: IntArray, *, batches: int = 3) -> SliceEntries:
    function = function_named("sum")
    assert function is not None
    held = SliceEntries(GroupedAggregate({"key": pa.int64()}, {"v": function.make((), pa.float64())}), ("v",))
    for number, at in enumerate(np.array_split(np.arange(len(keys)), batches)):
        values = {"v": pa.array(np.ones(len(at)))}
        positions = positions_of(times[at], 0, SLICE_MS)
        held.update([pa.array(keys[at])], values, len(at), times[at], number, positions=positions)
    return held


def learned(*, scheduled: bool, slices: int = 6) -> GroupHistory:
    history, rng = GroupHistory(("v",)), np.random.default_rng(2)
    for _ in range(slices):
        kept = rng.random(len(KEYS)) < 0.95
        keys = KEYS[kept] if scheduled else rng.integers(0, GROUPS, 2 * GROUPS)
        times = TIMES[kept] if scheduled else np.sort(rng.integers(0, SLICE_MS, 2 * GROUPS))
        history.learn(entries(keys, times))
    return history


def until(elapsed: float) -> SliceEntries:
    seen = elapsed * SLICE_MS >= TIMES
    return entries(KEYS[seen], TIMES[seen])


@pytest.mark.parametrize("elapsed", [0.7, 0.99])
def test_on_a_schedule_the_records_to_come_are_those_that_came_later_on_the_days_before(elapsed: float) -> None:
    history, held = learned(scheduled=True), until(elapsed)
    expected = forecast(held, np.arange(len(held)), history, elapsed)
    keys = held.pending.rows(np.arange(len(held)))[0].to_numpy()
    to_come = np.bincount(KEYS[elapsed * SLICE_MS < TIMES], minlength=GROUPS)[keys]
    assert history.timetable.is_used
    history.timetable.advantage = 0.0
    profile = forecast(held, np.arange(len(held)), history, elapsed)
    errors = [np.abs(f.arrivals - to_come).mean() for f in (expected, profile)]
    assert errors[0] < errors[1] / 2.0
    assert ((expected.any_arrival() > 0.5) == (to_come > 0)).mean() > 0.98
    assert expected.dispersion is not None and np.median(expected.dispersion) < 0.5


def test_without_a_schedule_the_times_are_not_used_and_forecasts_are_those_of_the_profile() -> None:
    history, held = learned(scheduled=False), until(0.9)
    every = np.arange(len(held))
    before = forecast(held, every, history, 0.9)
    assert not history.timetable.is_used and before.dispersion is None
    history.timetable = Timetable()
    assert np.array_equal(forecast(held, every, history, 0.9).arrivals, before.arrivals)


def test_a_slice_with_too_many_records_is_not_kept_and_older_ones_leave_after_a_number_of_slices() -> None:
    history = learned(scheduled=True)
    many = np.arange(MAX_TIMES + 1, dtype=np.int64)
    for number in range(SLICES):
        assert history.timetable.is_used, number
        large = entries(many % 1_000, many)
        assert not large.keeps_times
        history.learn(large)
    assert not history.timetable.is_used and history.timetable.nbytes < 100
    assert not entries(np.zeros(2_000, np.int64), many[:2_000]).keeps_times  # too many for one group
    medium = many[: MAX_TIMES // 2 - 10]
    for _ in range(SLICES):
        history.learn(entries(medium % 1_000, medium))
    assert sum(len(times) for times in history.timetable.slices if times is not None) <= MAX_TIMES


def test_a_restored_history_and_open_slice_forecast_as_before_and_states_without_times_are_read() -> None:
    history, held = learned(scheduled=True), until(0.6)
    again = SliceEntries.from_state(held.to_state(), ("v",))
    restored = GroupHistory.from_state(history.to_state())
    every = np.arange(len(held))
    forecasts = [forecast(e, every, h, 0.6).arrivals for e, h in ((held, history), (again, restored))]
    assert np.array_equal(*forecasts)
    history.learn(held), restored.learn(again)
    for ours, theirs in zip(history.timetable.slices, restored.timetable.slices, strict=True):
        assert ours is not None and theirs is not None
        assert np.array_equal(ours.hashes, theirs.hashes) and np.array_equal(ours.positions, theirs.positions)
    assert history.timetable.advantage == restored.timetable.advantage

    state = until(0.6).to_state()
    older = SliceEntries.from_state(
        type(state)(None, {n: a for n, a in state.arrays.items() if n not in ("timed", "positions")}), ("v",)
    )
    history.learn(older)
    assert not older.keeps_times and history.timetable.slices[0] is None  # its first records are not known
    state = history.to_state()
    components = {n: c for n, c in state.components.items() if n != "timetable"}
    old = GroupHistory.from_state(type(state)(state.numbers, state.arrays, components))
    assert not old.timetable.is_used and np.isfinite(forecast(held, every, old, 0.6).arrivals).all()
