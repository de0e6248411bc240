"""Confidence intervals from samples, for many groups at once. Pure functions of arrays.

All intervals are two-sided; `z` is the normal quantile of the confidence (`normal_quantile`).
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from edgewater.synopses.base import FloatArray
from edgewater.synopses.checks import check_confidence


def normal_quantile(confidence: float) -> float:
    """Returns the two-sided normal quantile of a confidence, in standard deviations. Raises InvalidRequest."""
    return NormalDist().inv_cdf((1 + check_confidence(confidence)) / 2)


def wilson(hits: FloatArray, sampled: FloatArray, rate: FloatArray, z: float) -> tuple[FloatArray, FloatArray]:
    """Returns bounds of a proportion from `hits` among `sampled` values (Wilson 1927), with continuity correction.

    Without the correction, coverage falls to 0.84 where few hits are expected (Brown, Cai and DasGupta 2001).

    Args:
        rate: the fraction of the population that was sampled, without replacement: widths shrink by √(1 - rate), and
            the proportion is exact at 1. The bounds of 0/0 are 0 and 1.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        proportion = np.where(sampled > 0, hits / sampled, 0.0)
        effective = sampled / (1 - rate)
        half = np.where(rate < 1, 0.5 / np.maximum(sampled, 1), 0.0)
        lower = _wilson_end(np.maximum(proportion - half, 0.0), effective, z, -1)
        upper = _wilson_end(np.minimum(proportion + half, 1.0), effective, z, +1)
    exact = (rate >= 1) & (sampled > 0)
    lower = np.where(exact, proportion, np.where(sampled > 0, np.minimum(lower, proportion), 0.0))
    upper = np.where(exact, proportion, np.where(sampled > 0, np.maximum(upper, proportion), 1.0))
    return lower, upper


def _wilson_end(p: FloatArray, n: FloatArray, z: float, sign: int) -> FloatArray:
    square = z * z / n
    spread = z * np.sqrt((p * (1 - p) + square / 4) / n)
    return np.asarray(np.clip((p + square / 2 + sign * spread) / (1 + square), 0.0, 1.0))


def thinned_count(hits: FloatArray, rate: FloatArray, z: float) -> tuple[FloatArray, FloatArray]:
    """Returns bounds of a count of items, each sampled with probability `rate`, of which `hits` were sampled.

    The score interval: all N with (hits - N·rate)² ≤ z²·N·rate·(1 - rate), solved for N, with a continuity correction
    of one half, and rounded outwards to whole numbers.
    """
    c = z * z * (1 - rate) / 2
    low, high = np.maximum(hits - 0.5, 0.0), hits + 0.5
    with np.errstate(divide="ignore", invalid="ignore"):
        lower = (low + c - np.sqrt(c * (2 * low + c))) / rate
        upper = (high + c + np.sqrt(c * (2 * high + c))) / rate
    return np.where(rate < 1, np.maximum(np.floor(lower), hits), hits), np.where(rate < 1, np.ceil(upper), hits)
