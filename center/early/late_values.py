"""Whether late events differ in value from punctual ones, and by how much.

Eq. 3 of the Aion paper assumes that delay and value are independent; where they are correlated, the coverage of its
intervals drops to 0 %. `LateValues` estimates the mean value by *lag* from the sampled events of past windows. An event
with a long lag that was born early in its window arrives before the window ends, so no estimate waits for a window to
be complete. Stragglers are weighted by the lags that the current delay distribution predicts, so a change of delays
does not bias the estimate; a ratio of complete to early window means would be tied to the delays of its own time.

The correlation itself may change. How much the mean values of a lag vary between windows, beyond what chance explains,
follows from how well each window was predicted (`LateValues.drift`), and widens the interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from center.early.named_arrays import Arrays, ArrayState
from edgewater.arrivals import lag_groups
from edgewater.synopses import FloatArray

MEMORY_SUBSTREAMS = 25.0
DRIFT_SUBSTREAMS = 100.0
"""Of the variation between windows: a change that comes every 10 or 20 windows must be remembered until the next."""


@dataclass(frozen=True, slots=True)
class LateRatio:
    """Per source: mean value of stragglers / mean value of the sampled punctual events, and its standard error."""

    ratio: FloatArray
    deviation: FloatArray


class LateValues(ArrayState):
    """Decayed sums of sampled values: `count`, `total` (Σv) and `squares` (Σv²), float64 [source, lag group].

    Attributes:
        excess, precision: decayed sums over windows of e²/s² - 1 and of 1/s², where e is the error of the predicted
            mean of a lag group and s its standard error by chance alone, float64 [source, lag group].
    """

    STATE = ("count", "total", "squares", "excess", "precision")

    def __init__(self, sources: int, lags: int) -> None:
        self.lag_groups = lag_groups(lags)
        shape = (sources, int(self.lag_groups[-1]) + 1)
        self.count: FloatArray = np.zeros(shape)
        self.total: FloatArray = np.zeros(shape)
        self.squares: FloatArray = np.zeros(shape)
        self.excess: FloatArray = np.zeros(shape)
        self.precision: FloatArray = np.zeros(shape)

    @classmethod
    def join(cls, members: Sequence[LateValues]) -> LateValues:
        """Returns a copy with the sources of all members, in order."""
        result = cls.__new__(cls)
        result.lag_groups = members[0].lag_groups
        for name in cls.STATE:
            setattr(result, name, np.concatenate([getattr(m, name) for m in members]))
        return result

    def restore(self, arrays: Arrays) -> None:
        """Restores `to_state`, or what it was without the variation between windows."""
        super().restore({name: np.zeros(self.count.shape) for name in ("excess", "precision")} | arrays)

    def learn(self, count: FloatArray, total: FloatArray, squares: FloatArray, substreams: float = 1.0) -> None:
        """Adds the sampled values of the last `substreams` sub-streams, [source, lag group]."""
        if self.count.any():
            self._learn_errors(count, total, squares, substreams)
        decay = float(np.exp(-substreams / MEMORY_SUBSTREAMS))
        self.count = self.count * decay + count
        self.total = self.total * decay + total
        self.squares = self.squares * decay + squares

    def _learn_errors(self, count: FloatArray, total: FloatArray, squares: FloatArray, substreams: float) -> None:
        """Compares a window's mean values with their prediction."""
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

        The moment estimator of a random effect whose mean is predicted (DerSimonian and Laird 1986).
        """
        variance = np.maximum(self.excess, 0.0) / np.where(self.precision > 0, self.precision, 1.0)
        return np.asarray(np.sqrt(variance))

    def means(self) -> tuple[FloatArray, FloatArray]:
        """Returns the mean value by [source, lag group], and its variance.

        Each lag group is shrunk towards the next shorter one by as much as groups are alike, according to the
        between-group variance of an analysis of variance. If chance alone explains the differences, shrinkage is total
        and all groups have the same mean. Lags longer than any observed have the mean of the longest observed one.
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
        own, kept = weight**2 * within / np.maximum(self.count, 1.0), (1 - weight) ** 2
        for group in range(mean.shape[1]):
            shorter = shorter + weight[:, group] * (mean[:, group] - shorter)
            shorter_variance = own[:, group] + kept[:, group] * shorter_variance
            result[:, group], variance[:, group] = shorter, shorter_variance
        return result, variance

    def ratio(self, late: FloatArray, punctual: FloatArray) -> LateRatio:
        """Returns the ratio of mean values of stragglers to punctual events.

        Args:
            late: expected stragglers, [source, lag].
            punctual: sampled events of the window, [source, lag group].
        """
        means, variances = self.means()
        starts = np.searchsorted(self.lag_groups, np.arange(self.count.shape[1]))
        by_group = np.add.reduceat(late, starts, axis=1)
        numerator, noise = _weighted(means, variances, by_group)
        denominator, _ = _weighted(means, variances, punctual)
        # A change shifts all lags at once: late values up while punctual ones go down.
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
