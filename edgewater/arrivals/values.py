"""The values of past windows. `LateValues` compares late events with punctual events. `ValueHistory` has averages over
windows.

Eq. 3 of the Aion paper assumes that delay and value are independent. Where they are correlated, the coverage of the
paper's intervals drops to 0 %. `LateValues` estimates the mean value by *lag* from the sampled events of past windows.
An event with a long lag that was born early in its window arrives before the window ends. So the estimate does not wait
until a window is complete. Stragglers are weighted by the lags that the current delay distribution predicts. So a
change of delays does not bias the estimate. A ratio of the means of complete windows to early means would be valid only
for the delays of its own time.

The correlation may change, too. The mean values of a lag may vary between windows more than chance explains. This
variation is measured by how well each window was predicted (`LateValues.drift`). It widens the interval.

`ValueHistory` averages the means and variations of past windows' samples. The next window's sampling rates are planned
from them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgewater.arrivals import lag_groups
from edgewater.arrivals.named_arrays import NamedArrays
from edgewater.arrivals.window_model import LateRatio, WindowSample
from edgewater.synopses import FloatArray, IntArray

MEMORY_SUBSTREAMS = 25.0
DRIFT_SUBSTREAMS = 100.0
"""Memory of the variation between windows. If a change comes every 10 or 20 windows, it must be remembered until the
next change."""

MEMORY_WINDOWS = 20.0
UPWARD, DOWNWARD = 10.0, 40.0
"""Multiples of the usual variance at which half of a deviation is attributed to this window: for upward and for
downward deviations."""
RANGE_WINDOWS = 20
"""The range covers at least this number of windows, and at most twice this number."""
MEAN_WINDOWS = 5.0
"""Effective number of windows in an exponential average with weight 0.3, (2 - 0.3)/0.3."""
DEPARTURE_VARIANCES = 25.0
"""Squared standard errors at which half of a source's deviation from the other sources is attributed to the source."""
HEAVY_TAIL_NOISE = 0.2
"""Relative variance of σ² between windows above which tails count as heavy. A single sample then shows too little of
the tail."""
INFLATION, INFLATION_SAMPLED = 0.2, 0.4
"""Relative increase of σ² where tails are heavy: `INFLATION` for a small sample, plus `INFLATION_SAMPLED` if all events
are sampled.

The average σ² is larger than most windows need, so a small sample meets the target with little inflation. If most
events are sampled, the sum of the few other events is as skewed as the events. But a larger σ² then costs little."""


class LateValues(NamedArrays):
    """Decayed sums of sampled values by source and lag group, float64 [source, lag group].

    Attributes:
        count, total, squares: number, Σv and Σv² of the sampled values.
        excess, precision: sums over windows of e²/s² - 1 and of 1/s². e is the error of a lag group's predicted mean. s
            is the standard error of e by chance alone.
    """

    LAYOUT = dict.fromkeys(
        ("count", "total", "squares", "excess", "precision"), (("source", "lag group"), np.float64, 0)
    )
    count: FloatArray
    total: FloatArray
    squares: FloatArray
    excess: FloatArray
    precision: FloatArray

    def __init__(self, sources: int, lags: int) -> None:
        self.lag_groups = lag_groups(lags)
        super().__init__(**{"source": sources, "lag group": int(self.lag_groups[-1]) + 1})

    @classmethod
    def joined(cls, members: Sequence[LateValues]) -> LateValues:
        """Returns a copy with the sources of all members, in the order of `members`."""
        result = cls.__new__(cls)
        result.lag_groups = members[0].lag_groups
        result.join(members, "source")
        return result

    def learn(self, count: FloatArray, total: FloatArray, squares: FloatArray, substreams: float = 1.0) -> None:
        """Adds the sampled values of the last `substreams` sub-streams.

        Args:
            count, total, squares: number, Σv and Σv² of the values, [source, lag group].
        """
        if self.count.any():
            self._learn_errors(count, total, squares, substreams)
        decay = float(np.exp(-substreams / MEMORY_SUBSTREAMS))
        self.count = self.count * decay + count
        self.total = self.total * decay + total
        self.squares = self.squares * decay + squares

    def _learn_errors(self, count: FloatArray, total: FloatArray, squares: FloatArray, substreams: float) -> None:
        """Updates `excess` and `precision` by the errors of the predicted means of a window."""
        means, variances = self.means()
        own = total / np.maximum(count, 1.0)
        within = np.maximum(squares - count * own**2, 0.0).sum(axis=1) / np.maximum(count.sum(axis=1), 1.0)
        chance = within[:, None] / np.maximum(count, 1.0) + variances
        known = (count > 0) & (self.count > 0) & (chance > 0)
        precision = np.where(known, 1 / np.where(known, chance, 1.0), 0.0)
        decay = float(np.exp(-substreams / DRIFT_SUBSTREAMS))
        self.excess = self.excess * decay + np.where(known, (own - means) ** 2 * precision - 1, 0.0)
        self.precision = self.precision * decay + precision

    def drift(self) -> FloatArray:
        """Returns the standard deviation of the mean values between windows, [source, lag group].

        It is the moment estimator of a random effect whose mean is predicted (DerSimonian and Laird 1986).
        """
        variance = np.maximum(self.excess, 0.0) / np.where(self.precision > 0, self.precision, 1.0)
        return np.asarray(np.sqrt(variance))

    def means(self) -> tuple[FloatArray, FloatArray]:
        """Returns the mean value by [source, lag group], and the variance of this mean.

        The mean of each lag group is shrunk towards the mean of the next shorter lag group. How much it is shrunk
        follows from the between-group variance of an analysis of variance. If chance alone explains the differences
        between groups, all groups have the same mean. Lags longer than all observed lags have the mean of the longest
        observed lag.
        """
        n = np.maximum(self.count.sum(axis=1), 1e-9)[:, None]
        overall = self.total.sum(axis=1, keepdims=True) / n
        mean = np.where(self.count > 0, self.total / np.maximum(self.count, 1e-9), overall)
        within = np.maximum((self.squares - self.count * mean**2).sum(axis=1, keepdims=True), 0.0)
        used = (self.count > 0).sum(axis=1, keepdims=True)
        within = within / np.maximum(n - used, 1.0)
        between = (self.count * (mean - overall) ** 2).sum(axis=1, keepdims=True) - (used - 1) * within
        between = np.maximum(between, 0.0) / np.maximum(n - (self.count**2).sum(axis=1, keepdims=True) / n, 1e-9)
        with np.errstate(divide="ignore", invalid="ignore"):
            pseudo_count = np.where(between > 0, within / between, np.inf)
            weight = np.where(np.isinf(pseudo_count), 0.0, self.count / (self.count + pseudo_count))
        result, variance = np.empty_like(mean), np.empty_like(mean)
        shorter, shorter_variance = overall[:, 0], np.zeros(len(mean))
        own, inherited = weight**2 * within / np.maximum(self.count, 1.0), (1 - weight) ** 2
        for group in range(mean.shape[1]):
            shorter = shorter + weight[:, group] * (mean[:, group] - shorter)
            shorter_variance = own[:, group] + inherited[:, group] * shorter_variance
            result[:, group], variance[:, group] = shorter, shorter_variance
        return result, variance

    def ratio(self, late: FloatArray, punctual: FloatArray) -> LateRatio:
        """Returns the mean value of stragglers divided by the mean value of punctual events, per source.

        Args:
            late: expected stragglers, [source, lag].
            punctual: sampled events of the window, [source, lag group].
        """
        means, variances = self.means()
        starts = np.searchsorted(self.lag_groups, np.arange(self.count.shape[1]))
        by_group = np.add.reduceat(late, starts, axis=1)
        numerator, noise = _weighted(means, variances, by_group)
        denominator, _ = _weighted(means, variances, punctual)
        # The worst case is assumed: late values rise while punctual values fall, so the two drifts are added.
        drift = self.drift()
        late_drift, punctual_drift = (_weighted(drift, drift, w)[0] for w in (by_group, punctual))
        valid = (denominator != 0) & (by_group.sum(axis=1) > 0) & (punctual.sum(axis=1) > 0)
        divisor = np.where(valid, denominator, 1.0)
        ratio = np.where(valid, numerator / divisor, 1.0)
        change = late_drift + np.abs(ratio) * punctual_drift
        return LateRatio(ratio, np.where(valid, np.sqrt(noise + change**2) / np.abs(divisor), 0.0))


def _weighted(means: FloatArray, variances: FloatArray, weights: FloatArray) -> tuple[FloatArray, FloatArray]:
    share = weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-12)
    return (share * means).sum(axis=1), (share**2 * variances).sum(axis=1)


class ValueHistory(NamedArrays):
    """Exponential averages of the mean and of the squared coefficient of variation of each source, float64 [source, 1].

    Sizes are planned on the *average* of σ²/μ² over windows. A single sample of a heavy-tailed distribution mostly
    shows too little of the tail, so a size planned on one sample would be too small.

    A joined history (`joined`) has a column per trigger.

    Attributes:
        share: rises from 0 towards 1 over the windows in which the source has had events.
        weight: number of windows with a valid sample.
        noise: mean squared relative deviation of a window's σ² from the past σ².
        pooled_noise: the same as `noise`, but over all sources together, [trigger].
        windows: number of answered windows, int64 [trigger].
        least, greatest: least and greatest value in the current period of `RANGE_WINDOWS` windows. They are infinity
            and -infinity without values, and NaN if not all values are known.
        least_before, greatest_before: the same in the period before the current period.
    """

    LAYOUT = {
        **dict.fromkeys(("mean", "variation", "share", "weight"), (("source", "trigger"), np.float64, 0)),
        "noise": (("source", "trigger"), np.float64, 1),
        "pooled_noise": (("trigger",), np.float64, 1),
        "windows": (("trigger",), np.int64, 0),
        **dict.fromkeys(("least", "least_before"), (("source", "trigger"), np.float64, np.inf)),
        **dict.fromkeys(("greatest", "greatest_before"), (("source", "trigger"), np.float64, -np.inf)),
    }
    mean: FloatArray
    variation: FloatArray
    share: FloatArray
    weight: FloatArray
    noise: FloatArray
    pooled_noise: FloatArray
    windows: IntArray
    least: FloatArray
    least_before: FloatArray
    greatest: FloatArray
    greatest_before: FloatArray

    def __init__(self, sources: int, triggers: int = 1) -> None:
        super().__init__(source=sources, trigger=triggers)

    @property
    def range(self) -> tuple[FloatArray, FloatArray]:
        """The least and the greatest value of the last windows, [source, trigger]; NaN if they are not known."""
        return np.minimum(self.least, self.least_before), np.maximum(self.greatest, self.greatest_before)

    @classmethod
    def joined(cls, members: Sequence[ValueHistory]) -> ValueHistory:
        """Returns a copy of all members, with a column per member."""
        result = cls(members[0].sizes["source"], len(members))
        result.join(members, "trigger")
        return result

    def copy_to(self, members: Sequence[ValueHistory]) -> None:
        """Copies each column of a joined history to the corresponding member."""
        for i, member in enumerate(members):
            for name in self.LAYOUT:
                setattr(member, name, getattr(self, name)[..., i : i + 1].copy())

    def learn(self, sample: WindowSample) -> None:
        """Adds the sample of an answered window."""
        means = sample.means(self.mean)
        variances = sample.variances(means)
        if self.windows.any():
            ratio = self._pooled_ratio(sample, variances, self.variation * self._expected_means(sample, means) ** 2)
            surprise = np.minimum((np.nan_to_num(ratio, nan=1.0, posinf=6.0) - 1) ** 2, 25.0)
            change = (surprise - self.pooled_noise) / np.clip(self.windows, 1, MEMORY_WINDOWS)
            self.pooled_noise += np.where(self.windows > 0, change, 0.0)
        valid = (sample.count > 1) & (means != 0)
        squared = np.where(valid, variances / np.where(means != 0, means, 1.0) ** 2, 0.0)
        self.weight = np.where(valid, self.weight + 1, self.weight)
        pace = np.where(valid, 1 / np.minimum(np.maximum(self.weight, 1), MEMORY_WINDOWS), 0.0)
        # Means adapt faster than variations, because only variations need a long memory.
        self.mean = np.where(valid, self.mean + np.maximum(pace, 0.3) * (means - self.mean), self.mean)
        surprise = np.where(self.variation > 0, (squared / np.maximum(self.variation, 1e-12) - 1) ** 2, 1.0)
        self.noise = self.noise + np.where(self.weight > 1, pace, 0.0) * (np.minimum(surprise, 25.0) - self.noise)
        self.variation = self.variation + pace * (squared - self.variation)
        now = np.where(sample.arrived > 0, 1.0, self.share)
        self.share = np.where(self.windows > 0, self.share + 0.2 * (now - self.share), now)
        self._learn_range(sample)
        self.windows = self.windows + 1

    def _learn_range(self, sample: WindowSample) -> None:
        begins = (self.windows > 0) & (self.windows % RANGE_WINDOWS == 0)
        self.least_before = np.where(begins, self.least, self.least_before)
        self.greatest_before = np.where(begins, self.greatest, self.greatest_before)
        self.least = np.minimum(np.where(begins, np.inf, self.least), sample.least)
        self.greatest = np.maximum(np.where(begins, -np.inf, self.greatest), sample.greatest)

    @property
    def effective_windows(self) -> FloatArray:
        """The effective number of windows in the average `mean`, [source, trigger]."""
        return np.asarray(np.minimum(self.weight, MEAN_WINDOWS))

    def inflated_variation(self, sampled: FloatArray | float = 0.0) -> FloatArray:
        """Returns σ²/μ², increased where windows differ much. In this case, the average has not seen the largest
        values.

        Args:
            sampled: share of the events that is sampled, [trigger].
        """
        inflation = INFLATION + INFLATION_SAMPLED * sampled
        return np.asarray(self.variation * (1 + inflation * np.clip(self.noise - HEAVY_TAIL_NOISE, 0.0, 1.0)))

    def spread(self, sample: WindowSample, means: FloatArray) -> FloatArray:
        """Returns the σ to use for a window: the past σ, corrected by the window's sample where they differ
        significantly.

        A sample whose size depends on its own values is biased. It is small if the sample's variation looks small; for
        skewed values, the sample's mean is then low. So sizes follow the past. The sample's own means and variances
        count for all sources together, and only beyond their usual variation. Upward deviations count sooner than
        downward deviations.

        Args:
            means: mean values of the sample, [source, trigger].
        """
        own = sample.variances(means)
        sampled = sample.count.sum(axis=0) / np.maximum(sample.arrived.sum(axis=0), 1.0)
        past = self.inflated_variation(sampled) * self._expected_means(sample, means) ** 2
        ratio = self._pooled_ratio(sample, own, past)
        gap = (ratio - 1) ** 2
        reluctance = np.where(ratio > 1, UPWARD, DOWNWARD) * np.maximum(self.pooled_noise, 1e-4)
        with np.errstate(invalid="ignore"):
            change = 1 + gap / (gap + reluctance) * (ratio - 1)
        variance = np.where(np.isfinite(change) & (past > 0), past * change, own)
        return np.asarray(np.sqrt(np.where(sample.count > 1, variance, past)))

    def _expected_means(self, sample: WindowSample, means: FloatArray) -> FloatArray:
        """Returns the past means, scaled to the level of the sample. A source that deviates much has the mean of its
        own sample.
        """
        before = np.where(self.weight > 0, self.mean, means)
        total = (before * sample.arrived).sum(axis=0)
        steady = np.abs(total) > 0.1 * (np.abs(before) * sample.arrived).sum(axis=0)
        move = (means * sample.arrived).sum(axis=0) / np.where(steady, total, 1.0)
        expected = np.where(steady & (move > 0), before * move, means)
        error = sample.variances(means) / np.maximum(sample.count, 1.0)
        gap = (means - expected) ** 2
        own = gap / np.maximum(gap + DEPARTURE_VARIANCES * error, 1e-300)
        return np.asarray(expected + own * (means - expected))

    def _pooled_ratio(self, sample: WindowSample, own: FloatArray, past: FloatArray) -> FloatArray:
        """Returns the sample's variance divided by the past variance, [trigger]; 1 without a sample.

        Sources are weighted by their numbers of events.
        """
        weight = np.where((sample.count > 1) & (past > 0), sample.arrived, 0.0)
        before = (weight * past).sum(axis=0)
        return np.asarray(np.where(before > 0, (weight * own).sum(axis=0) / np.where(before > 0, before, 1.0), 1.0))
