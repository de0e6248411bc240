"""What slices teach about when and how many records of a group arrive."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from edge.cache.arrival_profile import parts_of, records_to_come
from edge.cache.entries import SliceEntries
from edge.cache.forecast import forecast
from edge.cache.history import GroupHistory
from edgewater.synopses import GroupedAggregate, IntArray, function_named

GROUPS, SLICE_MS = 200, 16_000


def entries(keys: IntArray, times: IntArray) -> SliceEntries:
    function = function_named("sum")
    assert function is not None
    held = SliceEntries(GroupedAggregate({"key": pa.int64()}, {"v": function.make((), pa.float64())}), ("v",))
    held.update(
        [pa.array(keys)], {"v": pa.array(np.ones(len(keys)))}, len(keys), times, 0, parts=parts_of(times, 0, SLICE_MS)
    )
    return held


def records(seed: int, *, quarter: bool) -> tuple[IntArray, IntArray]:
    """Eight records a group on average, in one quarter of the slice that depends on the group, or at any time."""
    rng = np.random.default_rng(seed)
    keys = np.repeat(np.arange(GROUPS), rng.poisson(8, GROUPS))
    when = (keys % 4 + rng.random(len(keys))) / 4 if quarter else rng.random(len(keys))
    return keys, (when * SLICE_MS).astype(np.int64)


def learned(*, quarter: bool, slices: int = 8) -> GroupHistory:
    history = GroupHistory(("v",))
    for seed in range(slices):
        history.learn(entries(*records(seed, quarter=quarter)))
    return history


def test_groups_that_come_in_a_quarter_of_the_slice_are_forecast_to_be_done_after_it() -> None:
    history = learned(quarter=True)
    keys, times = records(99, quarter=True)
    seen = times < SLICE_MS * 3 // 4
    held = entries(
        np.concatenate([keys[seen], np.arange(GROUPS)]), np.concatenate([times[seen], np.zeros(GROUPS, np.int64)])
    )
    group = held.pending.rows(np.arange(len(held)))[0].to_numpy()
    left = forecast(held, np.arange(len(held)), history, 0.75).arrivals
    assert left[group % 4 != 3].max() < 0.5
    assert abs(left[group % 4 == 3].mean() - 8.0) < 2.0


def test_without_a_rhythm_half_of_the_records_are_forecast_for_the_second_half() -> None:
    history = learned(quarter=False)
    keys, times = records(99, quarter=False)
    seen = times < SLICE_MS // 2
    held = entries(keys[seen], times[seen])
    left = forecast(held, np.arange(len(held)), history, 0.5).arrivals
    assert abs(left.mean() / 4.0 - 1.0) < 0.1 and left.max() < 10.0


def test_what_came_in_this_slice_outweighs_what_came_in_earlier_ones() -> None:
    half = np.array([0.5])
    usual, many = (float(records_to_come(np.array([n]), np.array([80.0]), half)[0]) for n in (40.0, 400.0))
    assert abs(usual - 40.0) < 1.0 and many > 200.0
    few = float(records_to_come(np.array([0.0]), np.array([2.0]), half)[0])
    assert 0.5 < few < 1.0, "a group of few records has the rate of earlier slices"


def test_the_history_is_restored_with_its_profile() -> None:
    history, now = learned(quarter=True), entries(*records(5, quarter=True))
    state = history.to_state()
    profile = state.components["profile"]
    assert len(profile.numbers) == 2 and {*profile.arrays} == {"counts", "scores", "value_scores"}, "0.3.0 reads these"
    restored = GroupHistory.from_state(state)
    every = np.arange(len(now))
    before, after = (forecast(now, every, h, 0.4).arrivals for h in (history, restored))
    assert before.tobytes() == after.tobytes() or np.array_equal(before, after)
