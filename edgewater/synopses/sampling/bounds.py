"""Bounds of sums and means from a sample and the greatest value of the population, without a model of its distribution.

Without the greatest value no interval from a sample is right. If all values of a sample are 0, the missed values may
still have any size.

Records are sampled one after the other, the next record with probability p. A sampled record stands for G records:
itself, and the records between it and the previous sampled record. G is geometric with p. The records after the last
sampled record have the greatest value in the worst case. Their number is at most Exp(1)/λ with λ = -log(1 - p). The
upper bound is the quantile of the sum, or of the mean, of the population of these records:

- If all values are equal, it is the bound of Clopper and Pearson (1934) for the number of records. If p falls with the
number of occupied slots, it is the inverse of the occupancy distribution.
- For p → 0 it is the bound of Gaffke (2005) for a mean: the quantile of Σ D_i x_i, where D is uniform on the simplex
and one x is the greatest value (Phan, Thomas and Learned-Miller, "Towards practical mean bounds for small samples",
ICML 2021). No case is known in which it fails; a proof exists for special cases only. If all values of the sample are
equal, the mass at the greatest is -log(tail)/n. For large samples, it tends to the normal interval.
- Σ (1 - p)/p²·x² is the variance of Horvitz and Thompson's estimator, with the finite population correction.

Quantiles are computed by the saddlepoint approximation of Lugannani and Rice (1980) in the form r + log(u/r)/r of
Barndorff-Nielsen (1986), to within a few percent of the tail's probability.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edgewater.synopses.base import FloatArray, IntArray

_SMALL = 1e-6  # smaller intensities are replaced by this; derived: smaller intensities give equal bounds
_LEAST = 1e-300  # format: of float64
_TOLERANCE = 1e-4  # in standard deviations; derived: far below the interval
_INNER_TOLERANCE = 1e-3  # derived: far below the interval
_ROUNDS = 60  # derived: bisection to 2^-60


@dataclass(frozen=True, slots=True)
class UpperBounds:
    """Upper bounds per group. A lower bound is minus the upper bound of the negated values.

    Attributes:
        groups: int64 group per value.
        values: float64, finite. Neither their squares nor their sums overflow.
        intensity: float64 per value, λ = -log(1 - p); infinite for p = 1, 0 for an infinite population.
        unseen: float64 per group, λ of the records after the last sampled record; at most the λ of each value.
        greatest: float64 per group, finite and at least as large as the group's values.
        z: above 0, the quantile of the normal distribution with the same tail probability as the bound.
    """

    groups: IntArray
    values: FloatArray
    intensity: FloatArray
    unseen: FloatArray
    greatest: FloatArray
    z: float

    def of_sum(self) -> FloatArray:
        """Returns the upper bound of the sum of the population, float64 per group; infinite if nothing bounds unseen
        records.
        """
        most = np.maximum(self.greatest, 0.0)
        scale = np.maximum(self.unseen, _SMALL)

        def at(v: FloatArray) -> tuple[FloatArray, FloatArray]:
            """Returns r* and the sum times the scale, where the exponential tilt is scale·v/(1 + v·most)."""
            room = 1 / (1 + v * most)
            tau = v * room
            total, log_moment, square = self._tilted(scale, tau[self.groups] * self.values, self.values)
            total, square = total + most / room, square + (most / room) ** 2
            return _signed_root(tau * total - log_moment + np.log(room), tau * np.sqrt(square)), total

        spread = np.sqrt(self._summed(self.values**2) + most**2)
        bound = np.where(spread > 0, _solved(at, spread, self.z) / scale, 0.0)
        return np.where((self.unseen <= 0) & (most > 0), np.inf, bound)

    def of_mean(self) -> FloatArray:
        """Returns the upper bound of the mean of the population, float64 per group. Every group must have values."""
        below = self.greatest[self.groups] - self.values
        scale = np.maximum(self.unseen, _SMALL)
        beyond = scale[self.groups] - np.maximum(self.intensity, _SMALL)
        equal = self._summed(beyond != 0) == 0
        kappa = np.full(len(self.unseen), 0.5)

        def at(rho: FloatArray) -> tuple[FloatArray, FloatArray]:
            """Returns r* and D, the distance of the mean from the greatest value.

            The tilt is scale·τ. With κ = τD and ρ = κ/(D(1 - κ)), 1 - τ(x - mean) is (1 - κ)(1 + ρ(greatest - x)). For
            equal intensities, D hardly depends on κ, and not at all for an infinite population.
            """
            nonlocal kappa
            stretched = 1 + rho[self.groups] * below
            distance, moving = np.zeros(len(kappa)), np.ones(len(kappa), bool)
            for _ in range(_ROUNDS):
                room = (scale * (1 - kappa))[self.groups]
                weight = room / -np.expm1(beyond - room * stretched)
                distance = np.where(moving, self._summed(weight * below) / (1 + self._summed(weight)), distance)
                found = rho * distance / (1 + rho * distance)
                moved = np.abs(found - kappa) * np.where(equal, scale, 1.0)
                kappa = np.where(moving, np.where(equal, found, (kappa + found) / 2), kappa)
                moving &= moved > _INNER_TOLERANCE
                if not moving.any():
                    break
            tau = np.divide(kappa, distance, out=np.zeros_like(kappa), where=distance > 0)
            y = tau[self.groups] * (distance[self.groups] - below)
            total, log_moment, square = self._tilted(scale, y, distance[self.groups] - below)
            rest = distance / (1 - kappa)
            total, square = total + rest, square + rest**2
            # One step of Newton to the tilt at which the total is 0.
            half_square = np.log1p(-kappa) - log_moment + total * total / (2 * square)
            return _signed_root(half_square, (tau - total / square) * np.sqrt(square)), distance

        spread = np.sqrt(self._summed(below**2))
        return self.greatest - np.where(spread > 0, _solved(at, spread, self.z), 0.0)

    def _tilted(self, scale: FloatArray, y: FloatArray, w: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Returns per group Σ w·φ', Σ φ and Σ w²·φ'' at y, where φ(y) = log E exp(scale·y·G)."""
        of = scale[self.groups]
        own = np.maximum(self.intensity, _SMALL)
        lost = -np.expm1(of * y - own)
        count = of / lost
        weighted = w * count
        moments = of * y - np.log(lost / -np.expm1(-own))
        return self._summed(weighted), self._summed(moments), self._summed(w * weighted * (count - of))

    def _summed(self, weights: FloatArray) -> FloatArray:
        return np.asarray(np.bincount(self.groups, weights, len(self.unseen)), np.float64)


def _signed_root(half_square: FloatArray, u: FloatArray) -> FloatArray:
    """Returns r* = r + log(u/r)/r for r = √(2·half_square)."""
    r = np.sqrt(2 * np.maximum(half_square, _LEAST))
    return np.asarray(r + np.log(np.maximum(u, _LEAST) / r) / r)


def _solved(at: Callable[[FloatArray], tuple[FloatArray, FloatArray]], spread: FloatArray, z: float) -> FloatArray:
    """Solves `at(argument)[0] = z` per group and returns `at(argument)[1]`.

    The first result rises with the argument.

    It uses secants of the result's logarithm over the argument's logarithm, within a bracket. Groups without a spread
    are skipped.
    """
    done = np.asarray(spread <= 0)
    x = np.log(z / np.where(done, z, spread))
    low, high = np.full(len(x), -np.inf), np.full(len(x), np.inf)
    slope, last, last_log = np.ones(len(x)), x, np.zeros(len(x))
    result = np.zeros(len(x))
    with np.errstate(all="ignore"):
        for turn in range(_ROUNDS):
            root, found = at(np.exp(x))
            # Finished groups do not change: a group's bound does not depend on the other groups in the array.
            result = np.where(done, result, found)
            under = root < z
            low, high = np.where(under, x, low), np.where(under, high, x)
            bounded = np.isfinite(low) & np.isfinite(high)
            done |= (np.abs(root - z) < _TOLERANCE) | (bounded & (high - low < _TOLERANCE))
            if done.all():
                break
            log_root = np.log(np.maximum(root, z / 50))
            if turn:
                steep = (log_root - last_log) / (x - last)
                slope = np.where(np.isfinite(steep), np.clip(steep, 0.05, 3.0), slope)
            last, last_log = x, log_root
            x = x + np.clip((np.log(z) - log_root) / slope, -3.0, 3.0)
            x = np.where(~bounded | ((x > low) & (x < high)), x, (low + high) / 2)
    return result
