"""The verdict on a series of memory: flat, grows, or not shown."""

from __future__ import annotations

import numpy as np
import pytest

from bench.memory_series import FLAT_MINUTES, FLAT_SHARE, Trend

MINUTES = np.arange(0, 30, 1 / 6)


def noise(seed: int, deviation: float, follows: float = 0.8) -> np.ndarray:
    """An AR(1) series: each sample depends on the one before."""
    rng, series = np.random.default_rng(seed), np.zeros(len(MINUTES))
    for i in range(1, len(series)):
        series[i] = follows * series[i - 1] + rng.normal(0, deviation)
    return series


@pytest.mark.parametrize("seed", range(5))
def test_a_level_is_flat_a_leak_grows_and_a_start_that_settles_is_flat(seed: int) -> None:
    level = 200 + noise(seed, 1.0)
    assert Trend.of(MINUTES, level).verdict == "flat"
    assert Trend.of(MINUTES, level + MINUTES).verdict == "grows", "30 MiB in 30 minutes"
    start = -80 * np.exp(-MINUTES / 2)
    assert Trend.of(MINUTES, level + start).verdict == "flat", "it settles within a third of the run"


def test_a_standard_error_covers_samples_that_depend_on_each_other() -> None:
    slopes = [Trend.of(MINUTES, 200 + noise(seed, 3.0)) for seed in range(200)]
    covered = np.mean([abs(t.slope) <= 2 * t.standard_error for t in slopes])
    assert covered > 0.85
    wide = Trend.of(MINUTES, 200 + noise(1, 60.0))
    assert wide.verdict == "not shown" and wide.standard_error > 200 * FLAT_SHARE / FLAT_MINUTES
    assert Trend.of(MINUTES[:12], 200 + noise(1, 1.0)[:12]).verdict == "not shown", "two minutes show nothing"
