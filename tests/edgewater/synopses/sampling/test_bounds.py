"""Bounds of sums and means: exact cases, hard data, and the range that samples carry."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from edgewater.base.errors import CorruptSynopsis
from edgewater.synopses import BernoulliSample, BiasedReservoir, Mean, Quantile, ReservoirSample, Sum, from_bytes
from edgewater.synopses.encoding import codec
from edgewater.synopses.intervals import normal_quantile
from edgewater.synopses.sampling.bernoulli import BernoulliStack
from edgewater.synopses.sampling.bounds import UpperBounds
from edgewater.synopses.sampling.reservoir import ReservoirStack
from edgewater.synopses.testing import least_hits


def bounds(values: Any, rate: float, greatest: float, tail: float) -> UpperBounds:
    intensity = -math.log1p(-rate)
    held = np.asarray(values, float)
    return UpperBounds(
        np.zeros(len(held), np.int64), held, np.full(len(held), intensity), np.array([intensity]),
        np.array([greatest]), normal_quantile(1 - 2 * tail),
    )  # fmt: skip


@pytest.mark.parametrize("tail", [0.16, 0.025, 0.005])
@pytest.mark.parametrize("n", [1, 3, 50])
def test_values_that_were_not_sampled_have_a_mass_of_minus_log_tail_over_n(n: int, tail: float) -> None:
    assert bounds(np.zeros(n), 1e-9, 1.0, tail).of_mean()[0] == pytest.approx(1 - tail ** (1 / n), rel=0.01)
    for rate in (0.02, 0.5, 0.95):
        lost = math.log(tail) / math.log1p(-rate)
        assert bounds(np.zeros(n), rate, 1.0, tail).of_sum()[0] == pytest.approx(lost, rel=0.01)


@pytest.mark.parametrize("rate", [0.01, 0.5, 0.9])
@pytest.mark.parametrize("sign", [1, -1])
def test_bounds_are_the_quantiles_of_the_population_that_they_describe(rate: float, sign: int) -> None:
    rng = np.random.default_rng(3)
    values, tail = sign * rng.lognormal(0, 2, 12), 0.025
    greatest = float(values.max()) + 3.0
    copies = rng.geometric(rate, (40_000, 12))
    unseen = rng.exponential(-1 / math.log1p(-rate), 40_000)
    sums = copies @ values + unseen * max(greatest, 0.0)
    means = (copies @ values + unseen * greatest) / (copies.sum(axis=1) + unseen)
    found = bounds(values, rate, greatest, tail)
    for drawn, bound in ((sums, found.of_sum()[0]), (means, found.of_mean()[0])):
        assert 0.5 * tail < (drawn > bound).mean() < 1.25 * tail


def zeros(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return np.where(rng.random(shape) < 0.995, 0.0, rng.exponential(1, shape))


def outlier(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    values = rng.uniform(0, 1, shape)
    values[:, 7] = -1e5
    return values


def lognormal(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return rng.lognormal(0, 2, shape)


@pytest.mark.parametrize("make", [zeros, outlier, lognormal])
@pytest.mark.parametrize("stack", [lambda: ReservoirStack(size=40), lambda: BernoulliStack(rate=0.04)])
def test_intervals_hold_on_skewed_and_sparse_data_of_three_edges(
    make: Callable[[np.random.Generator, tuple[int, int]], np.ndarray], stack: Callable[[], Any]
) -> None:
    groups, trials = 100, 100
    parts = [make(np.random.default_rng([5, edge]), (groups, 350)) * scale for edge, scale in enumerate((1, 10, 1))]
    merged = stack()
    merged.grow(groups)
    for source, values in enumerate(parts, 1):
        edge = type(merged)(**merged.parameters, source=source)
        edge.grow(groups)
        edge.update(np.repeat(np.arange(groups), values.shape[1]), values.reshape(-1))
        merged.merge(edge, np.arange(groups))
    values = np.concatenate(parts, axis=1)
    for question, truth in ((Mean(0.95), values.mean(axis=1)), (Sum(0.95), values.sum(axis=1))):
        answer = merged.query(question)
        slack = 1e-9 * np.abs(truth)
        held = (answer.lower - slack <= truth) & (truth <= answer.upper + slack)
        assert held.sum() >= least_hits(trials, 0.95), question


def test_equal_values_have_an_exact_mean_and_huge_ones_a_bounded_one() -> None:
    for value in (7.1, -3.0, 1e300, 0.0):
        sample = ReservoirSample(20)
        sample.update(np.full(500, value))
        answer = sample.query(Mean())
        assert answer.lower == pytest.approx(value, rel=1e-14) and answer.upper == pytest.approx(value, rel=1e-14)
        assert answer.lower <= answer.value <= answer.upper
    sample = ReservoirSample(20)
    sample.update(np.geomspace(1e-300, 1e300, 500))
    answer = sample.query(Mean())
    assert 0 < answer.lower <= np.geomspace(1e-300, 1e300, 500).mean() <= answer.upper <= 1e300


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_leaves_no_bounds_even_if_it_is_not_sampled(odd: float) -> None:
    sample = ReservoirSample(20)
    sample.update(np.r_[np.arange(5000.0), odd])
    assert np.isfinite(sample.items().to_numpy()).all()
    for question in (Mean(), Sum()):
        answer = sample.query(question)
        assert math.isfinite(answer.value)
        assert math.isinf(answer.lower) or (question == Mean() and (answer.lower, odd) == (0, math.inf))
        assert math.isinf(answer.upper) or (question == Mean() and (answer.upper, odd) == (4999, -math.inf))


def test_a_sampled_value_outside_of_the_range_is_corrupt() -> None:
    sample = ReservoirSample(5)
    sample.update(np.arange(100.0))
    message = codec.unseal(sample.to_bytes())
    message.arrays[3].CopyFrom(codec.encode(np.array([2.0])))
    with pytest.raises(CorruptSynopsis):
        from_bytes(codec.seal(message))


@pytest.mark.parametrize("make", [lambda s: ReservoirSample(20, source=s), lambda s: BernoulliSample(0.02, source=s)])
def test_quantiles_of_a_sample_near_an_end_are_bounded_by_the_range(make: Callable[[int], Any]) -> None:
    values = np.random.default_rng(3).normal(0, 1, 1000)
    parts = [make(source) for source in (1, 2)]
    for part, some in zip(parts, np.split(values, 2), strict=True):
        part.update(some)
    sample = parts[0].merge_many(parts[1:])
    for one in (sample, from_bytes(sample.to_bytes())):
        high, low = one.query(Quantile(0.99, 0.99)), one.query(Quantile(0.01, 0.99))
        assert high.upper == values.max() and low.lower == values.min()
        assert high.lower <= np.quantile(values, 0.99) and low.upper >= np.quantile(values, 0.01)


def test_quantiles_of_recent_records_are_bounded_by_the_range_of_all_records() -> None:
    sample = BiasedReservoir(16)
    sample.update(np.arange(500.0))
    assert sample.query(Quantile(0.99)).upper == 499 and sample.query(Quantile(0.001, 0.99)).lower == 0


def test_quantiles_of_a_sample_whose_range_has_nan_are_not_bounded_by_it() -> None:
    sample = ReservoirSample(20)
    sample.update(np.r_[np.arange(500.0), math.nan])
    answer = sample.query(Quantile(0.99, 0.99))
    assert (answer.lower > -math.inf, answer.upper) == (True, math.inf)
