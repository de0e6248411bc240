"""Ertl's improved estimator of HyperLogLog, from register histograms.

"New cardinality estimation algorithms for HyperLogLog sketches" (2017), section 2.3: one formula over the whole range.
"""

from __future__ import annotations

import math

import numpy as np

from edgewater.synopses.base import FloatArray, IntArray


def ertl_estimate(histograms: IntArray, registers: int) -> FloatArray:
    """Ertl 2017, algorithm 6, for many register histograms at once."""
    m = float(registers)
    z = m * _tau(1 - histograms[:, -1] / m)
    for held in range(histograms.shape[1] - 2, 0, -1):
        z = 0.5 * (z + histograms[:, held])
    z = z + m * _sigma(histograms[:, 0] / m)
    with np.errstate(divide="ignore"):
        result: FloatArray = m * m / (2 * math.log(2)) / z
    return result


def _sigma(x: FloatArray) -> FloatArray:
    """x + Σ x^(2^k) 2^(k-1), k ≥ 1; infinite at 1, where no register is in use."""
    power, factor, total = x, 1.0, x
    full = x == 1
    while True:
        power = np.where(full, 0, power * power)
        following = total + power * factor
        factor *= 2
        if (following == total).all():
            return np.where(full, np.inf, total)
        total = following


def _tau(x: FloatArray) -> FloatArray:
    """(1 - x - Σ (1 - x^(2^-k))² 2^-k) / 3, k ≥ 1; zero at 0 and 1."""
    inside = (x > 0) & (x < 1)
    root, factor = np.where(inside, x, 1.0), 1.0
    total = 1 - root
    while True:
        root = np.sqrt(root)
        factor *= 0.5
        following = total - (1 - root) ** 2 * factor
        if (following == total).all():
            return np.where(inside, total / 3, 0.0)
        total = following
