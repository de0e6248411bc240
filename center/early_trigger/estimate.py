"""The estimate of a window from what arrived, what was sampled of it and what is still out, per group.

T = Σ_e mean_e·(A_e + ρ_e·Q_e),  N = Σ_e (A_e + Q_e): per source e, A events arrived, Q stragglers expected, whose
values are ρ times the punctual ones' (`late_values.py`). Stratified by source, because delays and values that
differ by source are the commonest way in which they hang together (corrections.md, Aion 7).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from center.early_trigger.late_values import LateRatio
from center.early_trigger.sample_size import neyman_sizes
from edgewater.accuracy import MeasureKind
from edgewater.synopses import FloatArray, normal_quantile

_SKEW_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Sampled:
    """What is known of a window now. float64; arrays are [source, group], `by_lag` [source, lag group].

    Of several watermarks at once (`together.py`) each is a group; `by_lag` has their sources one after the other's.

    Attributes:
        arrived: events, counted all, sampled or not.
        count, total, squares: of the sampled ones: how many, Σv, Σv².
        by_lag: sampled events by lag group (`late_values.lag_groups`).
    """

    arrived: FloatArray
    count: FloatArray
    total: FloatArray
    squares: FloatArray
    by_lag: FloatArray

    def of(self, mark: int) -> Sampled:
        """Of one of several watermarks."""
        mine, sources = slice(mark, mark + 1), len(self.arrived)
        by_lag = self.by_lag[mark * sources : (mark + 1) * sources]
        return Sampled(self.arrived[:, mine], self.count[:, mine], self.total[:, mine], self.squares[:, mine], by_lag)

    def means(self, fallback: FloatArray) -> FloatArray:
        return np.asarray(np.where(self.count > 0, self.total / np.maximum(self.count, 1.0), fallback))

    def variances(self, means: FloatArray) -> FloatArray:
        spread = np.maximum(self.squares - self.count * means**2, 0.0)
        return np.asarray(spread / np.maximum(self.count - 1, 1.0))


@dataclass(frozen=True, slots=True)
class WindowModel:
    """The parts of the estimate. Arrays are [source, group] or, where they end in `_width`, [group].

    Attributes:
        population: A + ρQ, in units of punctual events.
        spread: standard deviation of values used for the interval.
        straggler_width: half-width that comes from the stragglers' number and mean value.
        backing: past windows that `means` stands on where there are no values of this one; None: none.
    """

    measure: MeasureKind
    arrived: FloatArray
    means: FloatArray
    spread: FloatArray
    population: FloatArray
    events: FloatArray
    straggler_width: FloatArray
    backing: FloatArray | None = None

    def of(self, group: int) -> WindowModel:
        """Of one group."""
        mine = slice(group, group + 1)
        return WindowModel(
            self.measure, self.arrived[:, mine], self.means[:, mine], self.spread[:, mine], self.population[:, mine],
            self.events[:, mine], self.straggler_width[mine], None if self.backing is None else self.backing[:, mine],
        )  # fmt: skip

    @property
    def size(self) -> FloatArray:
        """N, per group."""
        return np.asarray(self.events.sum(axis=0))

    @property
    def estimate(self) -> FloatArray:
        """The measure, per group. NaN: a mean of nothing."""
        if self.measure == "count":
            return self.size
        total = (self.means * self.population).sum(axis=0)
        if self.measure == "sum":
            return np.asarray(total)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(total / self.size)

    @property
    def unit(self) -> FloatArray:
        """What a total's error is divided by to be the measure's: N for a mean, 1 for a sum."""
        return np.maximum(self.size, 1.0) if self.measure == "mean" else np.ones(self.size.shape)

    def sampling_width(self, count: FloatArray, quantile: float | FloatArray) -> FloatArray:
        """Half-width from having `count` values instead of all; what has not arrived counts as not sampled."""
        if self.measure == "count":
            return np.zeros(self.arrived.shape[1])
        quantile = self._skewed_quantile(count, quantile)
        with np.errstate(divide="ignore", invalid="ignore"):
            missing = 1 / count - 1 / np.maximum(self.population, count)
            variance = np.where(self.population > 0, (self.population * self.spread) ** 2 * missing, 0.0)
            if self.backing is not None:
                # Nothing has come of an edge that cannot be heard: its values vary around a mean that the past knows.
                unseen = self.population * self.spread**2 * (1 + 1 / self.backing)
                variance = np.where((count == 0) & (self.backing > 0), unseen, variance)
        variance = np.where((self.spread > 0) | (count > 0), variance, np.inf)
        variance = np.where(self.population > 0.5, variance, 0.0)
        return np.asarray(quantile * np.sqrt(np.nan_to_num(variance.sum(axis=0), nan=0.0, posinf=np.inf)) / self.unit)

    def sizes(self, half_width: FloatArray, quantile: float) -> FloatArray:
        """Of one group, the fewest values, [source, 1], with which the sampling width is at most `half_width`, (1,).

        As many as have arrived where that is not enough.
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
        """The quantile, larger where so few values are missing, or there, that a single large one decides.

        With n of N values the error's third moment is μ₃·m·(m²/n² - 1), m = N - n; the heavier side's quantile is that
        of a gamma of that skewness (Wilson and Hilferty 1931), at the probability of both sides. The values' skewness
        is taken for the lognormal's of the same variation, 3c + c³. At 95 % it changes next to nothing; for 100 groups
        at once the normal quantile covers 73 % of windows (docs/decisions/0006-watermarks.md).
        """
        here, total = count.sum(axis=0), self.population.sum(axis=0)
        missing = np.maximum(total - here, 0.0)
        both = np.asarray(quantile, np.float64)
        one, beyond = _tails(both)
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = (self.population * self.means).sum(axis=0) / total
            variation = np.sqrt((self.population * self.spread**2).sum(axis=0) / total) / np.abs(mean)
            lopsided = np.abs((missing / here) ** 2 - 1) / np.sqrt(missing * (total / here) ** 3)
            skew = (3 * variation + variation**3) * lopsided
            heavier = 2 / skew * (np.maximum(1 + skew * one / 6 - skew**2 / 36, 0.0) ** 3 - 1)
        certain = missing < beyond
        return np.where(certain | ~np.isfinite(heavier), both, np.maximum(both, heavier))


def _tails(quantile: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Elementwise: the normal quantile that leaves on one side what `quantile` leaves on both, and half of that."""
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
    sampled: Sampled,
    expected: FloatArray,
    deviation: FloatArray,
    ratio: LateRatio,
    spread: FloatArray,
    fallback: FloatArray,
    quantile: float | FloatArray,
    backing: FloatArray | None = None,
) -> WindowModel:
    """Puts the parts together: of several watermarks, each of which is a group.

    Args:
        expected, deviation: of the stragglers, [source, group]; the deviation as many times as its interval has
            (`calibration.py`).
        ratio: of all their sources, one watermark's after the other's.
        spread: standard deviation of values, [source, group].
        fallback: mean value where nothing was sampled.
        quantile: of the rest of the interval.
        backing: windows that `fallback` is the mean of.
    """
    arrived = sampled.arrived
    groups = arrived.shape[1]
    means = sampled.means(fallback)
    weight, doubt = (x.reshape(groups, -1).T for x in (ratio.ratio, ratio.deviation))
    events, population = arrived + expected, arrived + weight * expected
    if measure == "count":
        effect = np.ones_like(means)
    elif measure == "sum":
        effect = weight * means
    else:
        size = np.maximum(events.sum(axis=0), 1.0)
        effect = (weight * means - (means * population).sum(axis=0) / size) / size
    number = ((effect * deviation) ** 2).sum(axis=0)
    value = np.zeros(groups)
    if measure != "count":
        value = ((means * expected * doubt) ** 2).sum(axis=0)
        if measure == "mean":
            value = value / np.maximum(events.sum(axis=0), 1.0) ** 2
    width = np.sqrt(number + quantile**2 * value)
    return WindowModel(measure, arrived, means, spread, population, events, width, backing)
