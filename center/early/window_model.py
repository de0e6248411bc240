"""The estimate of a window, from the arrived events, the sampled events, and the expected stragglers.

T = Σ_e mean_e·(A_e + ρ_e·Q_e),  N = Σ_e (A_e + Q_e): for source e, A events have arrived, Q stragglers are expected,
whose mean value is ρ times the mean value of the punctual events (`values.py`). The estimate is stratified by source,
because differences between sources are the most frequent cause of a correlation between delay and value.

A *column* of the arrays is one trigger (one group of the query); several are computed together (`TriggerBatch`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from center.early.sample_size import neyman_sizes
from edgewater.model.accuracy import COUNTS, MeasureKind
from edgewater.synopses import BoolArray, FloatArray, normal_quantile

_SIZE_ROUNDS, _SIZE_TOLERANCE = 8, 0.02
_BISECTIONS = 6
_EPSILON, _OPERATIONS = float(np.finfo(np.float64).eps), 16
"""Relative rounding of a number, and number of roundings of the estimate besides the roundings of its sums."""
_SKEW = 1e-6  # below it the distribution is normal


@dataclass(frozen=True, slots=True)
class WindowSample:
    """The sample of a window now. float64 [source, trigger]; `by_lag` is [trigger · sources + source, lag group].

    Attributes:
        arrived: number of events, sampled or not.
        count, total, squares: number, Σv and Σv² of the sampled events.
        by_lag: sampled events by lag group.
        least, greatest: values of the arrived events, sampled or not; infinity and -infinity without events, NaN if
            they are not known.
    """

    arrived: FloatArray
    count: FloatArray
    total: FloatArray
    squares: FloatArray
    by_lag: FloatArray
    least: FloatArray
    greatest: FloatArray

    def of(self, trigger: int) -> WindowSample:
        """Returns the sample of one trigger."""
        column, sources = slice(trigger, trigger + 1), len(self.arrived)
        by_lag = self.by_lag[trigger * sources : (trigger + 1) * sources]
        return WindowSample(
            self.arrived[:, column], self.count[:, column], self.total[:, column], self.squares[:, column], by_lag,
            self.least[:, column], self.greatest[:, column],
        )  # fmt: skip

    def means(self, fallback: FloatArray) -> FloatArray:
        return np.asarray(np.where(self.count > 0, self.total / np.maximum(self.count, 1.0), fallback))

    def variances(self, means: FloatArray) -> FloatArray:
        deviations = np.maximum(self.squares - self.count * means**2, 0.0)
        return np.asarray(deviations / np.maximum(self.count - 1, 1.0))


@dataclass(frozen=True, slots=True)
class LateRatio:
    """Per source: mean value of stragglers / mean value of the sampled punctual events, and its standard error."""

    ratio: FloatArray
    deviation: FloatArray


@dataclass(frozen=True, slots=True)
class WindowModel:
    """The terms of the estimate. Arrays are [source, trigger] or, for names that end in `_width`, [trigger].

    Attributes:
        population: A + ρQ, in units of punctual events.
        spread: standard deviation of values used for the interval.
        straggler_width: half-width due to the stragglers' number and mean value.
        reach: distance of `means` from the least and the greatest value of the events that have arrived, and of these
            and of the values of past windows, [least or greatest, arrived or past, source, trigger]; infinite: unknown.
        fallback_windows: number of past windows over which `means` is the average, for sources without values in this
            window; None: there are no such windows.
    """

    measure: MeasureKind
    arrived: FloatArray
    means: FloatArray
    spread: FloatArray
    population: FloatArray
    events: FloatArray
    straggler_width: FloatArray
    reach: FloatArray
    fallback_windows: FloatArray | None = None

    def of(self, trigger: int) -> WindowModel:
        """Returns the model of one trigger."""
        column = slice(trigger, trigger + 1)
        fallback = self.fallback_windows
        return WindowModel(
            self.measure, self.arrived[:, column], self.means[:, column], self.spread[:, column],
            self.population[:, column], self.events[:, column], self.straggler_width[column], self.reach[..., column],
            None if fallback is None else fallback[:, column],
        )  # fmt: skip

    @property
    def size(self) -> FloatArray:
        """N, per trigger."""
        return np.asarray(self.events.sum(axis=0))

    @property
    def estimate(self) -> FloatArray:
        """The measure, per trigger; NaN for a mean without events."""
        if self.measure in COUNTS:
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
        """Returns per trigger whether the interval is within the relative error. False for an estimate of zero.

        If the records of a synopsis are estimated, all records that may be out are within the error.

        Args:
            sampling: half-width due to sampling.
        """
        estimate, out = np.abs(self.estimate), 0.0
        if self.measure == "records":
            out = np.maximum(self.size - self.arrived.sum(axis=0), 0.0)
        return np.asarray((estimate > 0) & (np.hypot(sampling, self.straggler_width) + out <= error * estimate))

    def sampling_width(self, count: FloatArray, quantile: float | FloatArray) -> FloatArray:
        """Returns the half-width due to sampling `count` values; events that have not arrived count as not sampled.

        It is infinite where the range of values that were not sampled is unknown.
        """
        if self.measure in COUNTS:
            return np.zeros(self.arrived.shape[1])
        z = np.asarray(quantile, np.float64)
        below, above = (self._errors(count, side) for side in self.reach)
        # Either side may be wrong with half of the probability; where one is much wider, with nearly all of it.
        both, one = _failures(z)
        low = np.maximum(below.quantile(one), above.quantile(one))
        high = np.maximum(below.quantile(z), above.quantile(z))
        with np.errstate(invalid="ignore"):
            for _ in range(_BISECTIONS):
                middle = (low + high) / 2
                enough = _upper_tail(below.score(middle)) + _upper_tail(above.score(middle)) <= both
                low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        return np.asarray(np.nan_to_num(high, nan=np.inf, posinf=np.inf) / self.unit)

    def certain_bounds(self, sample: WindowSample) -> tuple[FloatArray, FloatArray]:
        """Returns bounds of the measure that follow from the values of the sample and the range, per trigger."""
        nothing = np.full(self.arrived.shape[1], np.inf)
        if self.measure in COUNTS:
            return self.arrived.sum(axis=0), nothing
        expected = self.events > 0
        least = np.where(expected, self.means - self.reach[0].max(axis=0), np.inf).min(axis=0)
        greatest = np.where(expected, self.means + self.reach[1].max(axis=0), -np.inf).max(axis=0)
        if self.measure == "mean":
            return least, greatest
        with np.errstate(invalid="ignore"):
            unsampled = np.where(self.arrived > sample.count, (self.arrived - sample.count) * sample.least, 0.0)
            known = (sample.total + unsampled).sum(axis=0)
        return np.where(least >= 0, known, -np.inf), nothing

    def rounding(self, sample: WindowSample) -> FloatArray:
        """Returns a bound of the rounding of the estimate per trigger: n·ε·Σ|v| of n summands, in whatever order.

        Σ|v| ≤ sqrt(n·Σv²). Without it, an interval of a window without stragglers would exclude the exact sum.
        """
        if self.measure in COUNTS:
            return np.zeros(self.arrived.shape[1])
        count, squares = sample.count.sum(axis=0), sample.squares.sum(axis=0)
        return np.asarray((count + _OPERATIONS) * _EPSILON * np.sqrt(count * squares) / self.unit)

    def sizes(self, half_width: FloatArray, quantile: float) -> FloatArray:
        """Returns the fewest values of one trigger with which the sampling width is at most `half_width`.

        Args:
            half_width: shape (1,).

        Returns:
            The number of values, [source, 1]. If too few values have arrived, it is the number of arrived values.
        """
        if self.measure in COUNTS:
            return np.zeros(self.arrived.shape)
        total, factor = float((half_width * self.unit)[0]), quantile
        sizes = self._sizes(total, factor)
        for _ in range(_SIZE_ROUNDS):
            # Half-widths fall with the root of the sizes, or with the sizes where a few large values decide.
            ratio = float((self.sampling_width(sizes, quantile) / half_width)[0]) if total > 0 else 1.0
            if abs(ratio - 1) < _SIZE_TOLERANCE or (ratio > 1 and (sizes >= self.arrived).all()):
                break
            factor = max(factor * ratio ** (0.7 if math.isfinite(ratio) else 1.0), quantile)
            sizes = self._sizes(total, factor)
        return sizes

    def _sizes(self, total: float, quantile: float) -> FloatArray:
        sizes = neyman_sizes(self.population[:, 0], self.spread[:, 0], total, quantile, self.arrived[:, 0])
        return sizes[:, None]

    def _errors(self, count: FloatArray, reach: FloatArray) -> _Errors:
        """The distribution of the error of the total to one side, per trigger, from `count` values per source.

        The U events that were not sampled are like the n that were, or, if they have arrived, like one at the end of
        the range; all compositions of U into n + 1 parts are equally likely. It is the bound of Gaffke for a finite
        population (see `edgewater.synopses.sampling.bounds`), by its first three moments: without the values, only by
        their variance and range. The third moment of values with variance σ² is at most σ²(reach - σ²/reach), as of
        two values; or else the third moment of a lognormal distribution of the same variation c is taken,
        (3c + c³)σ³. Values that no sample shows are so few that they are rarely among the stragglers.

        Args:
            reach: distance of the mean from the end of the range, [arrived or past, source, trigger].
        """
        population = np.maximum(self.population, count)
        unseen, parts, square = population - count, count + 1, self.spread**2
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            variation = self.spread / np.abs(self.means)
            likely = square * self.spread * (3 * variation + variation**3)
            third = np.fmin(square * np.maximum(reach[1] - square / reach[1], 0.0), likely)
            second = unseen * (population + 1) / ((parts + 1) * parts)
            cubic = second * (population + unseen + 1) / (parts + 2)
            own = np.stack([np.zeros_like(unseen), second * count * square, cubic * count * third])
            skipped = np.clip(self.arrived - count, 0.0, unseen)
            far = np.where(skipped > 0, reach[0], 0.0)
            step = far / parts
            second = skipped * (self.arrived + 1) / ((parts + 1) * parts)
            cubic = second * (self.arrived + skipped + 1) / (parts + 2)
            cubes = (far - step) ** 3 - count * (3 * step * square + step**3)
            end = np.stack([skipped * step, second * count * far * step, cubic * cubes])
        if self.fallback_windows is not None:
            # The values of a silent source vary around the mean of past windows.
            silent = (count == 0) & (self.arrived == 0) & (self.fallback_windows > 0)
            varying = population * square * (1 + 1 / np.maximum(self.fallback_windows, 1.0))
            own = np.where(silent, np.stack([np.zeros_like(unseen), varying, population * third]), own)
        none = (self.population <= 0.5) | (unseen <= 0)
        unknown = ~none & ~((self.spread > 0) | (count > 0))
        own, end = np.where(none, 0.0, own), np.where(none, 0.0, np.where(unknown, np.inf, end))
        # One record at the end is enough for all sources with a sample, because together they are one sample.
        sampled = np.where(count > 0, end, 0.0)
        worst = np.argmax(np.nan_to_num(sampled[0], nan=np.inf), axis=0)
        moments = own.sum(axis=1) + np.where(count > 0, 0.0, end).sum(axis=1) + sampled[:, worst, np.arange(len(worst))]
        shift, variance, third_of_sum = moments
        deviation = np.sqrt(variance)
        with np.errstate(divide="ignore", invalid="ignore"):
            skew = np.where(np.isfinite(shift) & (deviation > 0), third_of_sum / deviation**3, 0.0)
        return _Errors(shift, deviation, skew)


@dataclass(frozen=True, slots=True)
class _Errors:
    """A gamma distribution by its mean, standard deviation and skewness. Its quantile is approximated by Wilson and
    Hilferty (1931), and is not below the normal quantile. Arrays by trigger."""

    mean: FloatArray
    deviation: FloatArray
    skew: FloatArray

    def quantile(self, z: FloatArray) -> FloatArray:
        """Returns the quantile at the probability of the normal quantile z, above 0."""
        with np.errstate(divide="ignore", invalid="ignore"):
            gamma = 2 / self.skew * (np.maximum(1 + self.skew * z / 6 - self.skew**2 / 36, 0.0) ** 3 - 1)
        return np.asarray(self.mean + np.where(self.skew > _SKEW, np.maximum(gamma, z), z) * self.deviation)

    def score(self, value: FloatArray) -> FloatArray:
        """Returns the z whose quantile is `value`; infinite without deviation."""
        with np.errstate(divide="ignore", invalid="ignore"):
            normal = np.where(self.deviation > 0, (value - self.mean) / self.deviation, np.inf)
            root = np.cbrt(np.maximum(1 + self.skew * normal / 2, 0.0))
            gamma = 6 / self.skew * (root - 1 + self.skew**2 / 36)
        return np.where((self.skew > _SKEW) & np.isfinite(normal), np.minimum(gamma, normal), normal)


def _failures(z: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Elementwise: the probability beyond z on both sides, and the normal quantile that has it on one side."""
    distinct, inverse = np.unique(z, return_inverse=True)
    failures = np.array([_failure(q) for q in distinct.tolist()])[inverse.reshape(z.shape)]
    return failures[..., 0], failures[..., 1]


@lru_cache(maxsize=1024)
def _failure(z: float) -> tuple[float, float]:
    both = math.erfc(z / math.sqrt(2))
    return both, max(normal_quantile(max(1 - 2 * both, 1e-9)), 0.0)


def _upper_tail(z: FloatArray) -> FloatArray:
    return np.array([math.erfc(x / math.sqrt(2)) / 2 for x in np.atleast_1d(z).tolist()])


def model_window(
    measure: MeasureKind,
    sample: WindowSample,
    expected: FloatArray,
    deviation: FloatArray,
    ratio: LateRatio,
    spread: FloatArray,
    fallback: FloatArray,
    quantile: float | FloatArray,
    past_range: tuple[FloatArray, FloatArray],
    fallback_windows: FloatArray | None = None,
) -> WindowModel:
    """Computes the terms of the estimate.

    Args:
        expected, deviation: number of stragglers and its half-width (after `calibration.py`), [source, trigger].
        ratio: over the sources of all triggers, in order.
        spread: standard deviation of values, [source, trigger].
        fallback: mean value of sources without sampled values.
        quantile: of the other terms of the interval.
        past_range: least and greatest value of past windows, as far as they are known.
        fallback_windows: number of windows over which `fallback` is the average.
    """
    arrived = sample.arrived
    triggers = arrived.shape[1]
    means = sample.means(fallback)
    weight, weight_deviation = (x.reshape(triggers, -1).T for x in (ratio.ratio, ratio.deviation))
    events, population = arrived + expected, arrived + weight * expected
    if measure in COUNTS:
        effect = np.ones_like(means)
    elif measure == "sum":
        effect = weight * means
    else:
        size = np.maximum(events.sum(axis=0), 1.0)
        effect = (weight * means - (means * population).sum(axis=0) / size) / size
    number = ((effect * deviation) ** 2).sum(axis=0)
    value = np.zeros(triggers)
    if measure not in COUNTS:
        value = ((means * expected * weight_deviation) ** 2).sum(axis=0)
        if measure == "mean":
            value = value / np.maximum(events.sum(axis=0), 1.0) ** 2
    width = np.sqrt(number + quantile**2 * value)
    reach = _reach(means, sample, past_range)
    return WindowModel(measure, arrived, means, spread, population, events, width, reach, fallback_windows)


def _reach(means: FloatArray, sample: WindowSample, past_range: tuple[FloatArray, FloatArray]) -> FloatArray:
    """Returns `WindowModel.reach`. Without values, nothing is at a distance."""
    least, greatest = past_range
    past = np.fmin(sample.least, least), np.fmax(sample.greatest, greatest)
    with np.errstate(invalid="ignore"):
        reach = np.stack([means - np.stack([sample.least, past[0]]), np.stack([sample.greatest, past[1]]) - means])
    reach = np.where(np.isneginf(reach), 0.0, np.maximum(reach, 0.0))
    return np.asarray(np.where(np.isnan(reach), np.inf, reach))
