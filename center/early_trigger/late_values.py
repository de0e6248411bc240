"""Whether late events differ in value from punctual ones, and by how much.

The guarantee of Eq. 3 needs delay and value to be independent; where they are not, coverage is 0 %
(corrections.md, Aion 7). What is learnt here is the mean value by *lag*, from the sampled events of past
windows. An event with a long lag is seen punctually if it was born early in the window, so no window has to
be waited for, and since the stragglers' lags come from the delay distribution *of now*, a shift of delays
does not make the learnt means wrong. That was the open case: a ratio of complete to early windows' means
is tied to the delays it was learnt under.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgewater.arrivals import lag_groups
from edgewater.synopses import FloatArray
from edgewater.synopses.encoding.named_arrays import Arrays, restore

MEMORY_SUBSTREAMS = 25.0
_STATE = ("count", "total", "squares")


@dataclass(frozen=True, slots=True)
class LateRatio:
    """Per source: mean value of stragglers / mean value of the sampled punctual events, and its standard error."""

    ratio: FloatArray
    deviation: FloatArray


class LateValues:
    """Forgetting sums of sampled values by (source, lag group); what edges send of them adds up."""

    def __init__(self, sources: int, lags: int) -> None:
        self.groups = lag_groups(lags)
        shape = (sources, int(self.groups[-1]) + 1)
        self.count: FloatArray = np.zeros(shape)
        self.total: FloatArray = np.zeros(shape)
        self.squares: FloatArray = np.zeros(shape)

    @classmethod
    def over(cls, parts: Sequence[LateValues]) -> LateValues:
        """A copy of what all have learnt, their sources one after the other."""
        result = cls.__new__(cls)
        result.groups = parts[0].groups
        for name in _STATE:
            setattr(result, name, np.concatenate([getattr(p, name) for p in parts]))
        return result

    def learn(self, count: FloatArray, total: FloatArray, squares: FloatArray, substreams: float = 1.0) -> None:
        """Adds sampled values of the last `substreams` sub-streams, [source, lag group]."""
        fade = float(np.exp(-substreams / MEMORY_SUBSTREAMS))
        self.count = self.count * fade + count
        self.total = self.total * fade + total
        self.squares = self.squares * fade + squares

    @property
    def known(self) -> FloatArray:
        """Values remembered per source."""
        return np.asarray(self.count.sum(axis=1))

    def means(self) -> tuple[FloatArray, FloatArray]:
        """Mean by (source, group) and its variance.

        Each group is shrunk towards the next shorter lags' as far as groups are alike, by the between-group
        variance of an analysis of variance. Where chance alone explains the differences the shrinkage is total and
        nothing is corrected; lags longer than any seen take the longest one's mean.
        """
        n = np.maximum(self.known, 1e-9)[:, None]
        overall = self.total.sum(axis=1, keepdims=True) / n
        mean = np.where(self.count > 0, self.total / np.maximum(self.count, 1e-9), overall)
        within = np.maximum((self.squares - self.count * mean**2).sum(axis=1, keepdims=True), 0.0)
        used = (self.count > 0).sum(axis=1, keepdims=True)
        within = within / np.maximum(n - used, 1.0)
        between = (self.count * (mean - overall) ** 2).sum(axis=1, keepdims=True) - (used - 1) * within
        between = np.maximum(between, 0.0) / np.maximum(n - (self.count**2).sum(axis=1, keepdims=True) / n, 1e-9)
        with np.errstate(divide="ignore", invalid="ignore"):
            ballast = np.where(between > 0, within / between, np.inf)
            weight = np.where(np.isinf(ballast), 0.0, self.count / (self.count + ballast))
        result, variance = np.empty_like(mean), np.empty_like(mean)
        before, doubt = overall[:, 0], np.zeros(len(mean))
        own, stays = weight**2 * within / np.maximum(self.count, 1.0), (1 - weight) ** 2
        for group in range(mean.shape[1]):
            before = before + weight[:, group] * (mean[:, group] - before)
            doubt = own[:, group] + stays[:, group] * doubt
            result[:, group], variance[:, group] = before, doubt
        return result, variance

    def ratio(self, late: FloatArray, punctual: FloatArray) -> LateRatio:
        """Of stragglers to punctual events.

        Args:
            late: expected stragglers by (source, lag).
            punctual: sampled events of the window by (source, lag group).
        """
        means, variances = self.means()
        starts = np.searchsorted(self.groups, np.arange(self.count.shape[1]))
        by_group = np.add.reduceat(late, starts, axis=1)
        numerator, noise = _weighted(means, variances, by_group)
        denominator, _ = _weighted(means, variances, punctual)
        sound = (denominator != 0) & (by_group.sum(axis=1) > 0) & (punctual.sum(axis=1) > 0)
        safe = np.where(sound, denominator, 1.0)
        return LateRatio(np.where(sound, numerator / safe, 1.0), np.where(sound, np.sqrt(noise) / np.abs(safe), 0.0))

    def to_state(self) -> Arrays:
        return {name: getattr(self, name).copy() for name in _STATE}

    def restore(self, arrays: Arrays) -> None:
        """Raises CorruptSynopsis."""
        restore(self, arrays, {name: name for name in _STATE})


def _weighted(means: FloatArray, variances: FloatArray, weights: FloatArray) -> tuple[FloatArray, FloatArray]:
    share = weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-12)
    return (share * means).sum(axis=1), (share**2 * variances).sum(axis=1)
