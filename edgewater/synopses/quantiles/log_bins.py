"""Logarithmic bins: finds the bin of a float64 without computing a logarithm.

Bin k contains the magnitudes in (γ^(k-1), γ^k], γ = (1 + α)/(1 - α); a boundary belongs to the bin below it. The last
digit of `log` may differ between platforms. Then an edge and the center would assign values on a boundary to different
bins. The boundaries are therefore a table that is computed by IEEE multiplications alone, and bins are found by
comparison:

The first bits of a float64 (exponent and a few bits of the mantissa) number cells so narrow that none contains two
boundaries. A second table has the bin of each cell's lower end. The bin of a value is this bin, or the next bin if the
value is above its boundary: two gathers and a comparison, about 5 ns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from edgewater.synopses.base import FloatArray, IntArray

MIN_ACCURACY, MAX_ACCURACY = 0.001, 0.5  # limit: memory of a sketch

ZERO = 1 << 31  # format: the middle of 32 bits
"""The cell of zero."""

OFFSET = 1 << 19  # derived: more than the bins of all float64
"""The offset that makes the bin numbers of any accuracy positive before the sign is applied."""

_LEAST_NORMAL = 2.0**-1022  # format: of float64
_GREATEST = float(np.finfo(np.float64).max)


class LogBins:
    """The bins of one accuracy α, and of its uniform collapses.

    At level L, 2^L bins become one bin: γ becomes γ^(2^L), and bin k becomes ⌈k / 2^L⌉. Magnitudes below 2^-1022
    (subnormal) belong to the lowest bin, whose lower edge is 0.

    Attributes:
        lowest, highest: the bins, at level 0, of the smallest and the largest magnitude.
    """

    def __init__(self, accuracy: float) -> None:
        self.gamma = (1 + accuracy) / (1 - accuracy)
        powers = _powers(self.gamma)
        falling = 1 / powers[1:]
        falling = falling[falling >= _LEAST_NORMAL]
        rising = powers[: int(np.searchsorted(powers, _GREATEST)) + 1]
        self.edges: FloatArray = np.minimum(np.concatenate([falling[::-1], rising]), _GREATEST)
        self.lowest = -len(falling)
        self.highest = len(rising) - 1
        bits = 0
        while 2.0**-bits > self.gamma * (1 - 1e-9) - 1:
            bits += 1
        self._shift = 52 - bits
        lower_ends = (np.arange(2047 << bits) << self._shift).view(np.float64)
        self._cells: npt.NDArray[np.int32] = np.searchsorted(self.edges, lower_ends).astype(np.int32)

    def find(self, magnitudes: FloatArray) -> npt.NDArray[np.int32]:
        """Returns the bins at level 0 of finite numbers above 0."""
        bins: npt.NDArray[np.int32] = self._cells[magnitudes.view(np.int64) >> self._shift]
        bins += magnitudes > self.edges[bins]
        bins += np.int32(self.lowest)
        return bins

    def upper(self, bins: IntArray, level: IntArray | int) -> FloatArray:
        """Returns the inclusive upper edge of bins at a level; 0 below the lowest bin."""
        at = (bins << level) - self.lowest
        edges = self.edges[np.clip(at, 0, len(self.edges) - 1)]
        return np.where(at < 0, 0.0, edges)

    def lower(self, bins: IntArray, level: IntArray | int) -> FloatArray:
        """Returns the exclusive lower edge of bins at a level."""
        return self.upper(bins - 1, level)

    def center(self, bins: IntArray, level: IntArray | int) -> FloatArray:
        """Returns the value with the smallest relative error in a bin: 2·γ^k/(γ + 1)."""
        low, high = self.lower(bins, level), self.upper(bins, level)
        with np.errstate(over="ignore"):
            # The harmonic mean 2·low·high/(low + high), in a form that cannot overflow.
            return np.where(low > 0, 2 * (high / (1 + high / np.maximum(low, _LEAST_NORMAL))), high)


def coarser(bins: IntArray, levels: IntArray | int) -> IntArray:
    """Returns the bins after `levels` collapses: ⌈k / 2^levels⌉."""
    return -(-bins >> levels)


@dataclass(frozen=True, slots=True)
class SignedBins:
    """Bins of numbers of either sign. As cells in [0, 2^32) they have the order of the values.

    Attributes:
        number: k, the bin of the magnitude; undefined for zero.
        sign: -1, 0 or 1.
    """

    number: IntArray
    sign: IntArray

    @classmethod
    def of(cls, cells: IntArray) -> SignedBins:
        shifted = cells - ZERO
        return cls(np.abs(shifted) - OFFSET, np.sign(shifted))

    def coarsened(self, levels: IntArray | int) -> IntArray:
        """Returns the cells after `levels` collapses; zero stays zero."""
        return ZERO + self.sign * (coarser(self.number, levels) + OFFSET)

    def edges(self, accuracy: float, level: IntArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Returns (lower edge, center, upper edge) as values; all 0 for zero."""
        bins = log_bins(accuracy)
        near, center, far = (f(self.number, level) for f in (bins.lower, bins.center, bins.upper))
        low, high = np.where(self.sign < 0, far, near), np.where(self.sign < 0, near, far)
        return low * self.sign, center * self.sign, high * self.sign


def collapsed_accuracy(accuracy: float, level: int) -> float:
    """Returns α after `level` uniform collapses; each gives 2α/(1 + α²) (Epicoco et al. 2020)."""
    for _ in range(level):
        accuracy = 2 * accuracy / (1 + accuracy * accuracy)
    return accuracy


@lru_cache(maxsize=8)
def log_bins(accuracy: float) -> LogBins:
    """Returns the bins of an accuracy. The tables are cached, about 1 MB at 1 %."""
    return LogBins(accuracy)


def _powers(gamma: float) -> FloatArray:
    """Returns γ^0, γ^1, … up to the first beyond float64, by doubling: equal bits on every platform."""
    powers = np.ones(1)
    with np.errstate(over="ignore"):
        while math.isfinite(powers[-1]):
            powers = np.concatenate([powers, powers * (powers[-1] * gamma)])
    return powers[: int(np.isfinite(powers).sum()) + 1]
