"""The bound of policies that do not know the future."""

from __future__ import annotations

import numpy as np
import pytest

from bench.budgets.bound import Groups, Relaxation, level_probabilities
from edgewater.synopses import FloatArray

GROUPS = Groups(np.array([0.3, 2.0, 20.0]), np.array([100.0, 30.0, 5.0]))
EXACT = level_probabilities(np.ones(1), 0.0)


def relaxation(values: FloatArray, slots: float) -> Relaxation:
    return Relaxation(GROUPS, values, slots, steps=100)


def test_without_a_link_every_group_above_the_limit_is_left() -> None:
    expected = float(GROUPS.counts @ -np.expm1(-GROUPS.rates))
    assert relaxation(EXACT, 0.0).best(60) == pytest.approx(expected, rel=1e-6)
    # A limit of 2.5 ones: at least three records.
    more = 1.0 - np.exp(-GROUPS.rates) * (1.0 + GROUPS.rates + GROUPS.rates**2 / 2.0)
    assert relaxation(level_probabilities(np.ones(1), 2.4), 0.0).best(60) == pytest.approx(
        float(GROUPS.counts @ more), rel=0.02
    )


@pytest.mark.slow
def test_the_bound_falls_with_the_bandwidth_and_with_the_limit() -> None:
    bounds = [relaxation(EXACT, slots).best(60) for slots in (0.0, 20.0, 60.0, 2000.0)]
    assert bounds == sorted(bounds, reverse=True) and bounds[-1] < 2.0 < bounds[1]
    assert relaxation(level_probabilities(np.ones(1), 2.4), 20.0).best(60) < bounds[1]


def test_sending_whenever_a_group_changes_as_the_link_permits_is_above_the_bound() -> None:
    """A simulated policy that knows the rates: at each slot it sends the dirty group of the smallest rate."""
    rng, slots, left = np.random.default_rng(1), 40, []
    rates = np.repeat(GROUPS.rates, GROUPS.counts.astype(int))
    for _ in range(200):
        dirty = np.zeros(len(rates), bool)
        for _ in range(slots):
            dirty |= rng.random(len(rates)) < -np.expm1(-rates / slots)
            waiting = np.flatnonzero(dirty)
            dirty[waiting[:1]] = False  # groups are in the order of their rates
        left.append(np.count_nonzero(dirty))
    bound = relaxation(EXACT, slots).best(60)
    assert 0.7 * np.mean(left) < bound < np.mean(left)
