"""The half-width due to sampling, on populations whose samples do not show their largest values."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edgewater.arrivals.window_model import LateRatio, WindowSample, model_window
from edgewater.synopses import FloatArray

TRIALS, RECORDS = 400, 1_500
LEAST = {0.68: 0.62, 0.95: 0.915}
"""Fewer of 400 intervals hold once in 200 runs, if each holds as often as stated."""
QUANTILES = {0.68: 0.9945, 0.95: 1.96}


def one_outlier(rng: np.random.Generator, shape: tuple[int, ...]) -> FloatArray:
    values = rng.uniform(0, 1, shape)
    values[..., 0] = 10_000.0
    return values


POPULATIONS = {
    "normal": lambda rng, shape: rng.normal(10, 3, shape),
    "exponential": lambda rng, shape: rng.exponential(1, shape),
    "lognormal": lambda rng, shape: rng.lognormal(0, 2, shape),
    "Pareto": lambda rng, shape: rng.pareto(2.1, shape) + 1,
    "95 % zeros": lambda rng, shape: np.where(rng.random(shape) < 0.95, 0.0, rng.gamma(2, 5, shape)),
    "99.5 % zeros": lambda rng, shape: np.where(rng.random(shape) < 0.995, 0.0, rng.gamma(2, 5, shape)),
    "one outlier": one_outlier,
    "one negative outlier": lambda rng, shape: -one_outlier(rng, shape),
}


def sampled(values: FloatArray, rates: FloatArray, rng: np.random.Generator) -> WindowSample:
    """Bernoulli samples of [source, trial, record] values; each trial is a trigger."""
    kept = rng.random(values.shape) < rates[:, None, None]
    count, total, squares = (np.where(kept, values**power, 0.0).sum(axis=2) for power in (0, 1, 2))
    arrived = np.full(count.shape, float(values.shape[2]))
    return WindowSample(arrived, count, total, squares, np.zeros((0, 0)), values.min(axis=2), values.max(axis=2))


@pytest.mark.parametrize("name", POPULATIONS)
@pytest.mark.parametrize("rates", [(0.1, 0.1, 0.1), (0.02, 0.1, 0.5)], ids=["one rate", "three rates"])
def test_intervals_of_samples_hold_on_skewed_values(name: str, rates: tuple[float, ...]) -> None:
    rng = np.random.default_rng(5)
    values = POPULATIONS[name](rng, (len(rates), TRIALS, RECORDS)) * np.array([1.0, 2.0, 0.5])[:, None, None]
    sample = sampled(values, np.array(rates), rng)
    none, means = np.zeros(sample.arrived.shape), sample.means(np.zeros(sample.arrived.shape))
    spread = np.sqrt(sample.variances(means))
    ratio = LateRatio(np.ones(none.size), np.zeros(none.size))
    for measure in ("sum", "mean"):
        truth = values.sum(axis=(0, 2)) if measure == "sum" else values.mean(axis=(0, 2))
        for confidence, quantile in QUANTILES.items():
            past = np.full(none.shape, np.nan), np.full(none.shape, np.nan)
            model = model_window(measure, sample, none, none, ratio, spread, means, quantile, past)  # type: ignore[arg-type]
            width = model.sampling_width(sample.count, quantile)
            held = np.abs(model.estimate - truth) <= width
            assert held.mean() >= LEAST[confidence]
            least, greatest = model.certain_bounds(sample)
            assert ((least <= truth * (1 + 1e-9) + 1e-9) & (truth <= greatest * (1 + 1e-9) + 1e-9)).all() or (
                truth < 0
            ).any()
            if name == "normal" and confidence == 0.95 and rates[0] == rates[1]:
                missing = 1 / sample.count - 1 / sample.arrived
                normal = quantile * np.sqrt(((sample.arrived * spread) ** 2 * missing).sum(axis=0)) / model.unit
                assert np.median(width / normal) < 1.2


def test_the_rounding_of_a_window_without_stragglers_is_bounded() -> None:
    """The model's own half-width is 0, and the sums in order of arrival are not those that are rounded once."""
    values = np.random.default_rng(1).lognormal(0, 2, (1, 50, 600))
    arrived = np.full((1, 50), 600.0)
    total = np.add.accumulate(values, axis=2)[:, :, -1]
    sample = WindowSample(
        arrived, arrived, total, (values**2).sum(axis=2), np.zeros((0, 0)), values.min(axis=2), values.max(axis=2)
    )
    none, range_ = np.zeros((1, 50)), (np.full((1, 50), np.inf), np.full((1, 50), -np.inf))
    ratio = LateRatio(np.ones(50), np.zeros(50))
    for measure in ("sum", "mean", "count"):
        model = model_window(measure, sample, none, none, ratio, none, none, 1.96, range_)  # type: ignore[arg-type]
        exact = np.array([math.fsum(row) for row in values[0].tolist()]) / (600 if measure == "mean" else 1)
        exact = np.full(50, 600.0) if measure == "count" else exact
        error, rounding = np.abs(model.estimate - exact), model.rounding(sample)
        assert (error <= rounding).all() and not model.straggler_width.any()
        assert (rounding <= 2e-8 * exact).all() and error.any() == rounding.any() == (measure != "count")
