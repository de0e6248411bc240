"""Means and variations of past windows' samples: what the next window's rates are planned on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from center.early_trigger.estimate import Sampled
from edgewater.synopses import FloatArray, IntArray
from edgewater.synopses.encoding.named_arrays import Arrays, restore

MEMORY_WINDOWS = 20.0
_STATE = ("mean", "variation", "noise", "pooled_noise", "share", "weight")
UPWARD, DOWNWARD = 10.0, 40.0
FEW = 5.0
"""Windows that an average with a pace of 0.3 is worth, (2 - 0.3)/0.3."""
STANDS_OUT = 25.0
"""Squared standard errors at which half is believed that a source's mean has moved away from the others'."""
HEAVY = 0.2
"""Relative variance of σ² between windows from which tails are heavy: then single samples show too little of them."""
CAUTION, CAUTION_TAKEN = 0.2, 0.4
"""How much larger σ² is taken for where windows differ wildly: for a small sample, and in addition if all is sampled.
Sized by the average σ² most windows have more than they need, so that a small sample keeps its promise by that alone.
Where most is sampled the rest is few values, and their sum as skewed as they are; but a larger σ² costs little then."""


class ValueHistory:
    """Forgetting averages by (source, group) of mean and squared coefficient of variation.

    The *average* of σ²/μ² over windows, because a single sample of a heavy tail mostly shows too little of it
    (corrections.md, Aion 8): sizes planned on the last sample alone are too small.
    """

    def __init__(self, sources: int, groups: int) -> None:
        self.mean: FloatArray = np.zeros((sources, groups))
        self.variation: FloatArray = np.zeros((sources, groups))
        self.share: FloatArray = np.zeros((sources, groups))
        """Of a source's events, those of each group."""
        self.weight: FloatArray = np.zeros((sources, groups))
        self.noise: FloatArray = np.ones((sources, groups))
        """Mean squared relative distance of a window's σ² from the past's."""
        self.pooled_noise: FloatArray = np.ones(groups)
        """The same of all sources' together: what one window's sample can be trusted with."""
        self.windows: int | IntArray = 0
        self._is_joint = False

    @classmethod
    def over(cls, parts: Sequence[ValueHistory]) -> ValueHistory:
        """A copy of what all have learnt, each without groups of its own: each is a group of it."""
        result = cls.__new__(cls)
        for name in _STATE:
            setattr(result, name, np.concatenate([getattr(p, name) for p in parts], axis=-1))
        result.windows = np.array([p.windows for p in parts])
        result._is_joint = True
        return result

    def hand_back(self, parts: Sequence[ValueHistory]) -> None:
        """They have learnt what this one has, which is `over` them."""
        for i, part in enumerate(parts):
            for name in _STATE:
                setattr(part, name, getattr(self, name)[..., i : i + 1].copy())
            part.windows = int(np.asarray(self.windows)[i])

    def learn(self, sampled: Sampled) -> None:
        """A window's sample, when it has been answered."""
        means = sampled.means(self.mean)
        variances = sampled.variances(means)
        windows = np.asarray(self.windows)
        if windows.any():
            ratio = self._pooled_ratio(sampled, variances, self.variation * self._expected_means(sampled, means) ** 2)
            surprise = np.minimum((np.nan_to_num(ratio, nan=1.0, posinf=6.0) - 1) ** 2, 25.0)
            change = (surprise - self.pooled_noise) / np.clip(windows, 1, MEMORY_WINDOWS)
            self.pooled_noise += np.where(windows > 0, change, 0.0)
        sound = (sampled.count > 1) & (means != 0)
        squared = np.where(sound, variances / np.where(means != 0, means, 1.0) ** 2, 0.0)
        self.weight = np.where(sound, self.weight + 1, self.weight)
        pace = np.where(sound, 1 / np.minimum(np.maximum(self.weight, 1), MEMORY_WINDOWS), 0.0)
        # Means follow faster: only the ratio of variation needs a long memory.
        self.mean = np.where(sound, self.mean + np.maximum(pace, 0.3) * (means - self.mean), self.mean)
        surprise = np.where(self.variation > 0, (squared / np.maximum(self.variation, 1e-12) - 1) ** 2, 1.0)
        self.noise = self.noise + np.where(self.weight > 1, pace, 0.0) * (np.minimum(surprise, 25.0) - self.noise)
        self.variation = self.variation + pace * (squared - self.variation)
        total = sampled.arrived if self._is_joint else sampled.arrived.sum(axis=1, keepdims=True)
        now = np.where(total > 0, sampled.arrived / np.maximum(total, 1.0), self.share)
        self.share = np.where(windows > 0, self.share + 0.2 * (now - self.share), now)
        self.windows = self.windows + 1

    @property
    def backing(self) -> FloatArray:
        """Windows that `mean` is worth: it follows the last few."""
        return np.asarray(np.minimum(self.weight, FEW))

    def cautious_variation(self, taken: FloatArray | float = 0.0) -> FloatArray:
        """σ²/μ², larger where windows differ wildly: the average itself has not seen the worst.

        Args:
            taken: part of the events that is sampled, per group.
        """
        caution = CAUTION + CAUTION_TAKEN * taken
        return np.asarray(self.variation * (1 + caution * np.clip(self.noise - HEAVY, 0.0, 1.0)))

    def spread(self, sampled: Sampled, means: FloatArray) -> FloatArray:
        """σ to reckon with now: the past's, times how much more this sample varies as far as that stands out.

        A sample whose size depends on its own values is biased: it stops early where it looks narrow, which for
        skewed values is where its mean is low. So sizes follow the past; what the sample itself says of means and
        variances counts for all sources together, and beyond what it usually differs by, upwards sooner than downwards.
        """
        own = sampled.variances(means)
        taken = sampled.count.sum(axis=0) / np.maximum(sampled.arrived.sum(axis=0), 1.0)
        past = self.cautious_variation(taken) * self._expected_means(sampled, means) ** 2
        ratio = self._pooled_ratio(sampled, own, past)
        gap = (ratio - 1) ** 2
        reluctance = np.where(ratio > 1, UPWARD, DOWNWARD) * np.maximum(self.pooled_noise, 1e-4)
        with np.errstate(invalid="ignore"):
            change = 1 + gap / (gap + reluctance) * (ratio - 1)
        believed = np.where(np.isfinite(change) & (past > 0), past * change, own)
        return np.asarray(np.sqrt(np.where(sampled.count > 1, believed, past)))

    def _expected_means(self, sampled: Sampled, means: FloatArray) -> FloatArray:
        """The past's means, moved together to where this sample is; those that stand out from that are its own."""
        before = np.where(self.weight > 0, self.mean, means)
        total = (before * sampled.arrived).sum(axis=0)
        steady = np.abs(total) > 0.1 * (np.abs(before) * sampled.arrived).sum(axis=0)
        move = (means * sampled.arrived).sum(axis=0) / np.where(steady, total, 1.0)
        expected = np.where(steady & (move > 0), before * move, means)
        error = sampled.variances(means) / np.maximum(sampled.count, 1.0)
        gap = (means - expected) ** 2
        own = gap / np.maximum(gap + STANDS_OUT * error, 1e-300)
        return np.asarray(expected + own * (means - expected))

    def _pooled_ratio(self, sampled: Sampled, own: FloatArray, past: FloatArray) -> FloatArray:
        """Variance of the sample over that of the past, per group, sources by their events; 1 without a sample."""
        weight = np.where((sampled.count > 1) & (past > 0), sampled.arrived, 0.0)
        before = (weight * past).sum(axis=0)
        return np.asarray(np.where(before > 0, (weight * own).sum(axis=0) / np.where(before > 0, before, 1.0), 1.0))

    def to_state(self) -> Arrays:
        return {name: np.copy(getattr(self, name)) for name in _STATE} | {"windows": np.int64(self.windows)}

    def restore(self, arrays: Arrays) -> None:
        """Raises CorruptSynopsis."""
        restore(self, arrays, {name: name for name in _STATE})
        self.windows = int(arrays["windows"])
