"""The thesis' interval, as printed, misses what the interval of the next delay has."""

from __future__ import annotations

import numpy as np

from bench.scheduling.normal_interval import normal_interval


def test_the_printed_variance_misses_what_the_predictive_one_has() -> None:
    rng = np.random.default_rng(3)
    epochs = rng.uniform(0, 1000, (100, 50))
    means, squares = epochs.mean(axis=1).tolist(), (epochs**2).mean(axis=1).tolist()
    printed = normal_interval(means, squares, 0.95, "printed")
    predictive = normal_interval(means, squares, 0.95)
    drawn = rng.uniform(0, 1000, 4_000)

    assert np.mean([printed.contains(d) for d in drawn]) < 0.2
    assert np.mean([predictive.contains(d) for d in drawn]) >= 0.95
