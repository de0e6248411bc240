"""The estimate of a window, from the arrived events, the sampled events, and the expected stragglers.

T = Σ_e mean_e·(A_e + ρ_e·Q_e),  N = Σ_e (A_e + Q_e)

For each source e, A events have arrived and Q stragglers are expected. The mean value of the stragglers is ρ times the
mean value of the punctual events (`values.py`). The estimate is stratified by source, because differences between
sources are the most frequent cause of a correlation between delay and value.

A *column* of the arrays belongs to one trigger, which is one group of the query. Several triggers are computed together
(`TriggerBatch`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from edgewater.arrivals.report import ROUNDED_SUM
from edgewater.arrivals.sample_size import neyman_sizes
from edgewater.arrivals.targets import COUNTS, EXTREMES, NOT_PREDICTED, MeasureKind
from edgewater.synopses import BoolArray, FloatArray, normal_quantile

_SIZE_ROUNDS, _SIZE_TOLERANCE = 8, 0.02
_BISECTIONS = 6
_EPSILON, _OPERATIONS = float(np.finfo(np.float64).eps), 16
"""Relative rounding error of a float64, and number of roundings of the estimate in addition to the roundings of its
sums."""
_SKEW = 1e-6  # with a smaller skewness, the distribution counts as normal


@dataclass(frozen=True, slots=True)
class WindowSample:
    """The current sample of a window. Arrays are float64 [source, trigger], except for `by_lag`.

    Attributes:
        arrived: number of arrived events, sampled or not.
        count, total, squares: number, Σv and Σv² of the sampled events.
        by_lag: number of sampled events, [trigger · sources + source, lag group].
        least, greatest: least and greatest value of the arrived events, sampled or not. They are infinity and -infinity
            without events, and NaN if they are not known.
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

    def extremes(self, kind: MeasureKind) -> FloatArray | None:
        """Returns the least or the greatest value of the arrived events, per trigger, as reports round it outwards;
        None for a kind that is no extreme.
        """
        if kind not in EXTREMES:
            return None
        return np.asarray(self.least.min(axis=0) if kind == "min" else self.greatest.max(axis=0))

    def means(self, fallback: FloatArray) -> FloatArray:
        return np.asarray(np.where(self.count > 0, self.total / np.maximum(self.count, 1.0), fallback))

    def variances(self, means: FloatArray) -> FloatArray:
        deviations = np.maximum(self.squares - self.count * means**2, 0.0)
        return np.asarray(deviations / np.maximum(self.count - 1, 1.0))


@dataclass(frozen=True, slots=True)
class LateRatio:
    """The mean value of stragglers divided by the mean value of the sampled punctual events, and its standard error.

    `ratio` and `deviation` have one value per source.
    """

    ratio: FloatArray
    deviation: FloatArray


@dataclass(frozen=True, slots=True)
class WindowModel:
    """The terms of the estimate. Arrays are [source, trigger], or [trigger] if their name ends in `_width`.

    Attributes:
        arrived: number of arrived events.
        means: mean value of the events.
        spread: standard deviation of values, for the interval.
        population: A + ρQ, in units of punctual events.
        events: A + Q.
        straggler_width: half-width due to the number and the mean value of the stragglers.
        reach: distance of `means` from the least and the greatest value, [least or greatest, arrived or past, source,
            trigger]. For "arrived", the values are the values of the arrived events. For "past", the values of past
            windows are included. The distance is infinite if the values are not known.
        fallback_windows: for sources without values in this window, the number of past windows over which `means` is
            the average; None if there are no such windows.
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
        """N, the estimated number of events, per trigger."""
        return np.asarray(self.events.sum(axis=0))

    @property
    def estimate(self) -> FloatArray:
        """The estimated value of the measure, per trigger; NaN for a mean without events."""
        if self.measure in COUNTS:
            return self.size
        total = (self.means * self.population).sum(axis=0)
        if self.measure == "sum":
            return np.asarray(total)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(total / self.size)

    @property
    def unit(self) -> FloatArray:
        """The number by which the error of the total is divided to get the error of the measure: N for a mean, 1 for a
        sum.
        """
        return np.maximum(self.size, 1.0) if self.measure == "mean" else np.ones(self.size.shape)

    def is_within(self, error: float, sampling: FloatArray) -> BoolArray:
        """Returns per trigger whether the interval is within the relative error. The result is false for an estimate of
        zero.

        For measures that are `NOT_PREDICTED`, the number of expected records that have not arrived is added to the
        half-width.

        Args:
            error: relative error.
            sampling: half-width due to sampling, [trigger].
        """
        estimate, out = np.abs(self.estimate), 0.0
        if self.measure in NOT_PREDICTED:
            out = np.maximum(self.size - self.arrived.sum(axis=0), 0.0)
        return np.asarray((estimate > 0) & (np.hypot(sampling, self.straggler_width) + out <= error * estimate))

    def sampling_width(self, count: FloatArray, quantile: float | FloatArray) -> FloatArray:
        """Returns the half-width due to sampling only `count` values. Events that have not arrived count as not
        sampled.

        The half-width is infinite if the range of the values that were not sampled is not known.
        """
        if self.measure in COUNTS:
            return np.zeros(self.arrived.shape[1])
        z = np.asarray(quantile, np.float64)
        below, above = (self._errors(count, side) for side in self.reach)
        # Each side of the interval may fail with half of the probability. If one side is much wider than the other
        # side, it may fail with nearly all of the probability.
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
        """Returns a lower and an upper bound of the measure, per trigger. They follow from the sampled values and the
        range.
        """
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
            known = (sample.total + unsampled).sum(axis=0) - self.rounding(sample)
        return np.where(least >= 0, known, -np.inf), nothing

    def rounding(self, sample: WindowSample) -> FloatArray:
        """Returns a bound of the rounding error of the estimate, per trigger: n·ε·Σ|v| for n summands, in any order,
        and the rounding of sums in reports.

        Σ|v| ≤ sqrt(n·Σv²). Without this bound, the interval of a window without stragglers would exclude the exact sum.
        """
        if self.measure in COUNTS:
            return np.zeros(self.arrived.shape[1])
        count, squares = sample.count.sum(axis=0), sample.squares.sum(axis=0)
        relative = (count + _OPERATIONS) * _EPSILON + ROUNDED_SUM
        return np.asarray(relative * np.sqrt(count * squares) / self.unit)

    def sizes(self, half_width: FloatArray, quantile: float) -> FloatArray:
        """Returns the fewest values of one trigger for which the sampling width is at most `half_width`.

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
            # Half-widths fall with the root of the sizes. If a few large values determine the half-width, it falls with
            # the sizes themselves.
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
        """Returns the distribution of the error of the total on one side of the interval, per trigger.

        The distribution is the bound of Gaffke for a finite population (see `edgewater.synopses.sampling.bounds`). U
        events were not sampled, and n events were sampled. Each of the U events has the value of one of the n events;
        if the U events have arrived, it may also have the value at the end of the range. All compositions of U into n +
        1 parts are equally likely.

        The bound is computed from its first three moments, because only the variance and the range of the values are
        known. The third moment of values with variance σ² is at most σ²(reach - σ²/reach), which is the third moment of
        a distribution on two values. The third moment of a lognormal distribution with the same variation c, (3c +
        c³)σ³, is used if it is smaller. Values that no sample shows are so few that they are rarely among the
        stragglers.

        Args:
            count: number of sampled values, [source, trigger].
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
        # The sources with a sample are together one sample. So one record at the end of the range is enough for them.
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
    """A gamma distribution, by its mean, standard deviation and skewness. Arrays are by trigger.

    The quantile is approximated by Wilson and Hilferty (1931). It is never below the normal quantile.
    """

    mean: FloatArray
    deviation: FloatArray
    skew: FloatArray

    def quantile(self, z: FloatArray) -> FloatArray:
        """Returns the quantile whose probability is the probability of the normal quantile z. z is above 0."""
        with np.errstate(divide="ignore", invalid="ignore"):
            gamma = 2 / self.skew * (np.maximum(1 + self.skew * z / 6 - self.skew**2 / 36, 0.0) ** 3 - 1)
        return np.asarray(self.mean + np.where(self.skew > _SKEW, np.maximum(gamma, z), z) * self.deviation)

    def score(self, value: FloatArray) -> FloatArray:
        """Returns the z for which `quantile` is `value`; infinite if the standard deviation is 0."""
        with np.errstate(divide="ignore", invalid="ignore"):
            normal = np.where(self.deviation > 0, (value - self.mean) / self.deviation, np.inf)
            root = np.cbrt(np.maximum(1 + self.skew * normal / 2, 0.0))
            gamma = 6 / self.skew * (root - 1 + self.skew**2 / 36)
        return np.where((self.skew > _SKEW) & np.isfinite(normal), np.minimum(gamma, normal), normal)


def _failures(z: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Returns, elementwise, the probability beyond z on both sides, and the normal quantile with this probability on
    one side.
    """
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
        expected, deviation: number of stragglers and half-width of this number (after `calibration.py`), [source,
            trigger].
        ratio: ratios over the sources of all triggers, in the order of the triggers.
        spread: standard deviation of values, [source, trigger].
        fallback: mean value of sources without sampled values, [source, trigger].
        quantile: normal quantile for the other terms of the interval, [trigger] or one number.
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
    """Returns `WindowModel.reach`. The distance is 0 if there are no values."""
    least, greatest = past_range
    past = np.fmin(sample.least, least), np.fmax(sample.greatest, greatest)
    with np.errstate(invalid="ignore"):
        reach = np.stack([means - np.stack([sample.least, past[0]]), np.stack([sample.greatest, past[1]]) - means])
    reach = np.where(np.isneginf(reach), 0.0, np.maximum(reach, 0.0))
    return np.asarray(np.where(np.isnan(reach), np.inf, reach))
