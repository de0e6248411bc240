"""The estimate of a window, from what has arrived, what was sampled of it, and the expected stragglers.

T = Σ_e mean_e·(A_e + ρ_e·Q_e),  N = Σ_e (A_e + Q_e): for source e, A events have arrived, Q stragglers are expected,
whose mean value is ρ times that of the punctual events (`late_values.py`). The estimate is stratified by source,
because differences between sources are the most frequent cause of a correlation between delay and value.

A *column* of the arrays is one trigger (one group of the query); several triggers are computed together in `batch.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from center.early_trigger.late_values import LateRatio
from center.early_trigger.sample_size import neyman_sizes
from edgewater.accuracy import MeasureKind
from edgewater.synopses import BoolArray, FloatArray, normal_quantile

_SKEW_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class WindowSample:
    """What is known of a window now. float64 [source, trigger]; `by_lag` is [trigger · sources + source, lag group].

    Attributes:
        arrived: number of events, sampled or not.
        count, total, squares: of the sampled events: number, Σv, Σv².
        by_lag: sampled events by lag group.
    """

    arrived: FloatArray
    count: FloatArray
    total: FloatArray
    squares: FloatArray
    by_lag: FloatArray

    def of(self, trigger: int) -> WindowSample:
        """Returns the sample of one trigger."""
        column, sources = slice(trigger, trigger + 1), len(self.arrived)
        by_lag = self.by_lag[trigger * sources : (trigger + 1) * sources]
        return WindowSample(
            self.arrived[:, column], self.count[:, column], self.total[:, column], self.squares[:, column], by_lag
        )

    def means(self, fallback: FloatArray) -> FloatArray:
        return np.asarray(np.where(self.count > 0, self.total / np.maximum(self.count, 1.0), fallback))

    def variances(self, means: FloatArray) -> FloatArray:
        deviations = np.maximum(self.squares - self.count * means**2, 0.0)
        return np.asarray(deviations / np.maximum(self.count - 1, 1.0))


@dataclass(frozen=True, slots=True)
class WindowModel:
    """The terms of the estimate. Arrays are [source, trigger] or, for names that end in `_width`, [trigger].

    Attributes:
        population: A + ρQ, in units of punctual events.
        spread: standard deviation of values used for the interval.
        straggler_width: half-width due to the stragglers' number and mean value.
        fallback_windows: number of past windows whose average `means` is, where this window has no values; None: none.
    """

    measure: MeasureKind
    arrived: FloatArray
    means: FloatArray
    spread: FloatArray
    population: FloatArray
    events: FloatArray
    straggler_width: FloatArray
    fallback_windows: FloatArray | None = None

    def of(self, trigger: int) -> WindowModel:
        """Returns the model of one trigger."""
        column = slice(trigger, trigger + 1)
        fallback = self.fallback_windows
        return WindowModel(
            self.measure, self.arrived[:, column], self.means[:, column], self.spread[:, column],
            self.population[:, column], self.events[:, column], self.straggler_width[column],
            None if fallback is None else fallback[:, column],
        )  # fmt: skip

    @property
    def size(self) -> FloatArray:
        """N, per trigger."""
        return np.asarray(self.events.sum(axis=0))

    @property
    def estimate(self) -> FloatArray:
        """The measure, per trigger; NaN for a mean without events."""
        if self.measure == "count":
            return self.size
        total = (self.means * self.population).sum(axis=0)
        if self.measure == "sum":
            return np.asarray(total)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(total / self.size)

    @property
    def unit(self) -> FloatArray:
        """The divisor from the error of the total to the error of the measure: N for a mean, 1 for a sum."""
        return np.maximum(self.size, 1.0) if self.measure == "mean" else np.ones(self.size.shape)

    def is_within(self, error: float, sampling: FloatArray) -> BoolArray:
        """Returns per trigger whether the interval is within the relative error. No error is relative to zero.

        Args:
            sampling: half-width due to sampling.
        """
        estimate = np.abs(self.estimate)
        return np.asarray((estimate > 0) & (np.hypot(sampling, self.straggler_width) <= error * estimate))

    def sampling_width(self, count: FloatArray, quantile: float | FloatArray) -> FloatArray:
        """Returns the half-width due to sampling `count` values; events that have not arrived count as not sampled."""
        if self.measure == "count":
            return np.zeros(self.arrived.shape[1])
        quantile = self._skewed_quantile(count, quantile)
        with np.errstate(divide="ignore", invalid="ignore"):
            missing = 1 / count - 1 / np.maximum(self.population, count)
            variance = np.where(self.population > 0, (self.population * self.spread) ** 2 * missing, 0.0)
            if self.fallback_windows is not None:
                # The values of a silent source vary around the mean of past windows.
                unseen = self.population * self.spread**2 * (1 + 1 / self.fallback_windows)
                variance = np.where((count == 0) & (self.fallback_windows > 0), unseen, variance)
        variance = np.where((self.spread > 0) | (count > 0), variance, np.inf)
        variance = np.where(self.population > 0.5, variance, 0.0)
        return np.asarray(quantile * np.sqrt(np.nan_to_num(variance.sum(axis=0), nan=0.0, posinf=np.inf)) / self.unit)

    def sizes(self, half_width: FloatArray, quantile: float) -> FloatArray:
        """Returns the fewest values of one trigger with which the sampling width is at most `half_width`.

        Args:
            half_width: shape (1,).

        Returns:
            [source, 1]; as many as have arrived where these are too few.
        """
        if self.measure == "count":
            return np.zeros(self.arrived.shape)
        total = float((half_width * self.unit)[0])
        sizes = self._sizes(total, quantile)
        for _ in range(_SKEW_ROUNDS):
            skewed = float(self._skewed_quantile(sizes, quantile)[0])
            if not skewed > quantile:
                break
            sizes = self._sizes(total, skewed)
        return sizes

    def _sizes(self, total: float, quantile: float) -> FloatArray:
        sizes = neyman_sizes(self.population[:, 0], self.spread[:, 0], total, quantile, self.arrived[:, 0])
        return sizes[:, None]

    def _skewed_quantile(self, count: FloatArray, quantile: float | FloatArray) -> FloatArray:
        """Returns the quantile, increased where so few values are sampled or missing that a single large one decides.

        With n of N values the error's third moment is μ₃·m·(m²/n² - 1), m = N - n. The quantile of the heavier side is
        that of a gamma distribution with this skewness (Wilson and Hilferty 1931), at the probability of both sides.
        The values' skewness is assumed to be that of a lognormal distribution of the same variation c, 3c + c³. At 95 %
        the correction is negligible; for 100 groups simultaneously the normal quantile covers 73 % of windows
        (docs/decisions/0006-watermarks.md).
        """
        sampled, total = count.sum(axis=0), self.population.sum(axis=0)
        missing = np.maximum(total - sampled, 0.0)
        both = np.asarray(quantile, np.float64)
        one, beyond = _tails(both)
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = (self.population * self.means).sum(axis=0) / total
            variation = np.sqrt((self.population * self.spread**2).sum(axis=0) / total) / np.abs(mean)
            asymmetry = np.abs((missing / sampled) ** 2 - 1) / np.sqrt(missing * (total / sampled) ** 3)
            skew = (3 * variation + variation**3) * asymmetry
            heavier = 2 / skew * (np.maximum(1 + skew * one / 6 - skew**2 / 36, 0.0) ** 3 - 1)
        certain = missing < beyond
        return np.where(certain | ~np.isfinite(heavier), both, np.maximum(both, heavier))


def _tails(quantile: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Elementwise: the one-sided quantile with the tail probability of both sides of `quantile`, and half of that."""
    if quantile.ndim == 0:
        one, half = _tail(float(quantile))
        return np.asarray(one), np.asarray(half)
    distinct, inverse = np.unique(quantile, return_inverse=True)
    found = np.array([_tail(q) for q in distinct.tolist()])[inverse.reshape(quantile.shape)]
    return found[..., 0], found[..., 1]


@lru_cache(maxsize=1024)
def _tail(quantile: float) -> tuple[float, float]:
    both = math.erfc(quantile / math.sqrt(2))
    return normal_quantile(max(1 - 2 * both, 1e-9)), both / 2


def model_window(
    measure: MeasureKind,
    sample: WindowSample,
    expected: FloatArray,
    deviation: FloatArray,
    ratio: LateRatio,
    spread: FloatArray,
    fallback: FloatArray,
    quantile: float | FloatArray,
    fallback_windows: FloatArray | None = None,
) -> WindowModel:
    """Computes the terms of the estimate.

    Args:
        expected, deviation: number of stragglers and its half-width (after `calibration.py`), [source, trigger].
        ratio: over the sources of all triggers, in order.
        spread: standard deviation of values, [source, trigger].
        fallback: mean value of sources without sampled values.
        quantile: of the other terms of the interval.
        fallback_windows: number of windows whose average `fallback` is.
    """
    arrived = sample.arrived
    triggers = arrived.shape[1]
    means = sample.means(fallback)
    weight, weight_deviation = (x.reshape(triggers, -1).T for x in (ratio.ratio, ratio.deviation))
    events, population = arrived + expected, arrived + weight * expected
    if measure == "count":
        effect = np.ones_like(means)
    elif measure == "sum":
        effect = weight * means
    else:
        size = np.maximum(events.sum(axis=0), 1.0)
        effect = (weight * means - (means * population).sum(axis=0) / size) / size
    number = ((effect * deviation) ** 2).sum(axis=0)
    value = np.zeros(triggers)
    if measure != "count":
        value = ((means * expected * weight_deviation) ** 2).sum(axis=0)
        if measure == "mean":
            value = value / np.maximum(events.sum(axis=0), 1.0) ** 2
    width = np.sqrt(number + quantile**2 * value)
    return WindowModel(measure, arrived, means, spread, population, events, width, fallback_windows)
