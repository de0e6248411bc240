"""What a staleness budget aims at: how it is learnt from slice to slice, and guarded within each."""

from __future__ import annotations

import numpy as np
import pytest

from edge.cache import GroupHistory, max_entries_per_frame
from edge.cache.error_target import ErrorTarget, nth_largest
from edge.cache.send_queue import MAX_QUEUED, MIN_ENTRIES_PER_FRAME
from edgewater.synopses import FloatArray
from edgewater.synopses.encoding.state import State

SLOTS = 600.0


def pending(target: float, right: float, slope: float, rng: np.random.Generator) -> FloatArray:
    """As many errors above the target as a slice would be left with, were `right` what just fills its sends."""
    above = int(SLOTS * (right / target) ** slope * rng.lognormal(0.0, 0.05))
    return np.concatenate([target * (1.0 + rng.exponential(5.0, above)), target * rng.random(5000)])


@pytest.mark.parametrize("slope", [1.5, 2.5, 4.0])
@pytest.mark.parametrize("start", [0.3, 3.0, 20.0])
def test_the_target_comes_to_leave_a_little_room_whatever_it_started_from(slope: float, start: float) -> None:
    rng, aim = np.random.default_rng(7), ErrorTarget()
    aim.target = start * 1e-5
    filled = []
    for _ in range(25):
        errors = pending(aim.target, 1e-5, slope, rng)
        filled.append(np.count_nonzero(errors > aim.target) / SLOTS)
        aim.learn(errors, SLOTS)
    assert 0.7 < np.mean(filled[12:]) < 0.95
    assert np.mean(np.array(filled[12:]) > 1.0) < 0.2, "too low a target costs far more than too high a one"


def test_a_jump_of_the_load_is_made_up_for_within_two_slices() -> None:
    aim = ErrorTarget(target=1e-9)
    for _ in range(2):
        aim.learn(1e-3 * (1.0 + np.random.default_rng(1).exponential(5.0, 2000)), SLOTS)
    assert aim.target is not None and aim.target > 1e-4


def test_a_slice_that_is_seen_to_end_with_too_many_is_given_a_higher_level() -> None:
    rng = np.random.default_rng(3)
    aim = ErrorTarget(target=1.0)
    usual = np.concatenate([1.0 + rng.exponential(5.0, 700), rng.random(1000)])
    for _ in range(3):
        aim.target = 1.0
        assert aim.level(usual, 0.1, 3000.0, SLOTS) == 1.0
        aim.learn(usual[200:], SLOTS)  # 500 are left of 700
    aim.target = 1.0
    assert aim.level(usual, 0.1, 3000.0, SLOTS) == 1.0
    crowded = np.concatenate([usual, 1.0 + rng.exponential(5.0, 300)])
    level = aim.level(crowded, 0.1, 3000.0, SLOTS)
    assert level > 1.0
    assert 700 < np.count_nonzero(crowded > level) < 800, "200 of them go before the end, the rest has its slots"


def test_below_what_can_still_be_sent_nothing_is_aimed_at() -> None:
    errors = np.arange(1.0, 101.0)
    assert ErrorTarget(target=0.5).level(errors, 0.9, 10.0, 5.0) == nth_largest(errors, 10.0) == 90.0


@pytest.mark.parametrize("slots", [0.0, np.inf])
def test_a_slice_without_a_deadline_that_it_could_keep_teaches_nothing(slots: float) -> None:
    aim = ErrorTarget(target=2.0)
    aim.learn(np.ones(10), slots)
    assert (aim.target, aim.slices) == (2.0, 0)


def test_a_history_that_is_read_back_aims_as_before() -> None:
    history = GroupHistory(("v",))
    rng = np.random.default_rng(2)
    for _ in range(4):
        if history.error_target.target is not None:
            history.error_target.level(rng.random(2000), 0.2, 900.0, SLOTS)
        history.error_target.learn(rng.random(2000), SLOTS)
    history.error_target.level(rng.random(2000), 0.3, 900.0, SLOTS)
    again = GroupHistory.from_state(State.unpack(history.to_state().pack("t"), "t"))
    errors = rng.random(3000)
    for aim in (history.error_target, again.error_target):
        aim.level(errors, 0.1, 700.0, SLOTS)
        aim.learn(errors, SLOTS)
    assert again.to_state().pack("t") == history.to_state().pack("t")


def test_a_portion_shrinks_towards_the_end_and_is_never_mostly_envelope() -> None:
    assert max_entries_per_frame(60_000.0, 1.0) == 900
    assert max_entries_per_frame(600.0, 1.0) == MIN_ENTRIES_PER_FRAME
    assert max_entries_per_frame(60_000.0, 0.0) == MAX_QUEUED, "an unknown link is not held back"
    assert max_entries_per_frame(-5.0, 1.0) == MAX_QUEUED, "nor is a slice that should have closed"
