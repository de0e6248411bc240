"""The error target of a staleness budget: learned from slice to slice, corrected within each."""

from __future__ import annotations

import numpy as np
import pytest

from edge.cache.error_target import ErrorTarget, nth_largest
from edgewater.synopses import FloatArray

SLOTS = 600.0


def pending(target: float, right: float, slope: float, rng: np.random.Generator) -> FloatArray:
    """As many errors above the target as a slice would be left with, were `right` what just fills its sends."""
    above = int(SLOTS * (right / target) ** slope * rng.lognormal(0.0, 0.05))
    return np.concatenate([target * (1.0 + rng.exponential(5.0, above)), target * rng.random(5000)])


@pytest.mark.parametrize("slope", [1.5, 2.5, 4.0])
@pytest.mark.parametrize("start", [0.3, 3.0, 20.0])
def test_the_target_converges_to_a_small_reserve_from_any_start(slope: float, start: float) -> None:
    rng, error_target = np.random.default_rng(7), ErrorTarget()
    error_target.target = start * 1e-5
    filled = []
    for _ in range(25):
        errors = pending(error_target.target, 1e-5, slope, rng)
        filled.append(np.count_nonzero(errors > error_target.target) / SLOTS)
        error_target.learn(errors, SLOTS)
    assert 0.7 < np.mean(filled[12:]) < 0.95
    assert np.mean(np.array(filled[12:]) > 1.0) < 0.2, "too low a target costs far more than too high a one"


def test_the_target_recovers_from_a_load_jump_within_two_slices() -> None:
    error_target = ErrorTarget(target=1e-9)
    for _ in range(2):
        error_target.learn(1e-3 * (1.0 + np.random.default_rng(1).exponential(5.0, 2000)), SLOTS)
    assert error_target.target is not None and error_target.target > 1e-4


def test_the_level_rises_if_a_slice_is_predicted_to_end_with_too_many_entries() -> None:
    rng = np.random.default_rng(3)
    error_target = ErrorTarget(target=1.0)
    usual = np.concatenate([1.0 + rng.exponential(5.0, 700), rng.random(1000)])
    for _ in range(3):
        error_target.target = 1.0
        assert error_target.level(usual, 0.1, 3000.0, SLOTS) == 1.0
        error_target.learn(usual[200:], SLOTS)  # 500 are left of 700
    error_target.target = 1.0
    assert error_target.level(usual, 0.1, 3000.0, SLOTS) == 1.0
    crowded = np.concatenate([usual, 1.0 + rng.exponential(5.0, 300)])
    level = error_target.level(crowded, 0.1, 3000.0, SLOTS)
    assert level > 1.0
    assert 700 < np.count_nonzero(crowded > level) < 800, "200 of them go before the end, the rest has its slots"


def test_the_level_is_at_least_the_largest_error_that_cannot_be_sent() -> None:
    errors = np.arange(1.0, 101.0)
    assert ErrorTarget(target=0.5).level(errors, 0.9, 10.0, 5.0) == nth_largest(errors, 10.0) == 90.0


@pytest.mark.parametrize("slots", [0.0, np.inf])
def test_a_slice_that_could_not_meet_its_deadline_is_not_learned_from(slots: float) -> None:
    error_target = ErrorTarget(target=2.0)
    error_target.learn(np.ones(10), slots)
    assert (error_target.target, error_target.slices) == (2.0, 0)
