"""What slices teach about when and how many records of a group arrive."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from edge.cache.arrival_profile import EXPERTS, PARTS, ArrivalProfile, parts_of
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


def test_without_a_rhythm_no_profile_of_a_group_is_used_and_the_rate_is_constant() -> None:
    history = learned(quarter=False)
    assert np.isinf(EXPERTS[history.profile.expert][2][1])
    held = entries(*records(99, quarter=False))
    forecast(held, np.arange(GROUPS), history, 0.5)
    assert np.abs(held.recall_cache.remaining.T - np.linspace(1.0, 0.0, PARTS + 1)).max() < 0.05


def test_the_weight_of_earlier_slices_falls_when_rates_change_from_slice_to_slice() -> None:
    steady, changing = ArrivalProfile(), ArrivalProfile()
    rng, mean = np.random.default_rng(1), np.full(GROUPS, 80.0)
    for _ in range(6):
        factor = np.exp(rng.normal(0.0, 1.0, (GROUPS, 1)))
        for profile, rates in ((steady, np.ones((GROUPS, 1))), (changing, factor)):
            profile.learn(rng.poisson(5.0 * rates * np.ones(PARTS)).astype(float), mean, np.full((GROUPS, PARTS), 5.0))
    assert EXPERTS[steady.expert][1] > EXPERTS[changing.expert][1]


def test_a_level_that_all_groups_share_is_followed_within_the_slice() -> None:
    profile, rng = ArrivalProfile(), np.random.default_rng(1)
    for slice_ in range(6):
        counts = rng.poisson(0.25 * (1 + slice_ % 2 * 11), (GROUPS, PARTS)).astype(float)
        profile.learn(counts, np.full(GROUPS, 26.0), np.full((GROUPS, PARTS), 1.6))
    assert EXPERTS[profile.expert][0]


def test_the_mean_of_all_groups_counts_more_where_groups_have_the_same_values() -> None:
    rng, n = np.random.default_rng(1), np.full(GROUPS, 2.0)
    same, different = ArrivalProfile(), ArrivalProfile()
    own = np.exp(rng.normal(0.0, 2.0, GROUPS))
    for _ in range(5):
        noise = [rng.exponential(1.0, (GROUPS, 2)).sum(axis=1) for _ in range(2)]
        same.learn_values(n, noise[0], n, noise[1])
        different.learn_values(n, own * noise[0], n, own * noise[1])
    assert same.value_weight > different.value_weight


def test_the_history_is_restored_with_its_profile() -> None:
    history, now = learned(quarter=True), entries(*records(5, quarter=True))
    restored = GroupHistory.from_state(history.to_state())
    every = np.arange(len(now))
    before, after = (forecast(now, every, h, 0.4).arrivals for h in (history, restored))
    assert before.tobytes() == after.tobytes() or np.array_equal(before, after)
