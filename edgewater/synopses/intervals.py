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


def student_t(confidence: float, freedom: FloatArray) -> FloatArray:
    """Returns the two-sided quantile of Student's t; infinite below one degree of freedom.

    Hill, "Student's t-quantiles", CACM 13 (1970), algorithm 396, exact to about six digits. One and two degrees of
    freedom use the closed form.
    """
    tail = 1 - confidence
    normal = normal_quantile(confidence)
    n = np.maximum(np.asarray(freedom, np.float64), 1.0)
    a = 1 / (n - 0.5)
    b = 48 / (a * a)
    c = ((20700 * a / b - 98) * a - 16) * a + 96.36
    d = ((94.5 / (b + c) - 3) / b + 1) * np.sqrt(a * np.pi / 2) * n
    y = (d * tail) ** (2 / n)
    result = np.sqrt(n * np.where(y > 0.05 + a, _near(n, a, b, c, d, normal), _far(n, y, d)))
    result = np.where(n < 1.5, 1 / np.tan(np.pi * tail / 2), result)
    result = np.where((n >= 1.5) & (n < 2.5), np.sqrt(2 / (tail * (2 - tail)) - 2), result)
    return np.where(np.asarray(freedom) < 1, np.inf, result)


def _near(n: FloatArray, a: FloatArray, b: FloatArray, c: FloatArray, d: FloatArray, normal: float) -> FloatArray:
    """Returns t²/n by an expansion around the normal quantile."""
    x = -normal
    square = x * x
    c = np.where(n < 5, c + 0.3 * (n - 4.5) * (x + 0.6), c)
    c = (((0.05 * d * x - 5) * x - 7) * x - 2) * x + b + c
    y = (((((0.4 * square + 6.3) * square + 36) * square + 94.5) / c - square - 3) / b + 1) * x
    return np.asarray(np.expm1(np.minimum(a * y * y, 700.0)))


def _far(n: FloatArray, y: FloatArray, d: FloatArray) -> FloatArray:
    """Returns t²/n by an expansion for the far tail."""
    y = np.maximum(y, 1e-300)
    inner = 1 / (((n + 6) / (n * y) - 0.089 * d - 0.822) * (n + 2) * 3) + 0.5 / (n + 4)
    return np.abs((inner * y - 1) * (n + 1) / (n + 2) + 1 / y)


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
    of one half.
    """
    c = z * z * (1 - rate) / 2
    low, high = np.maximum(hits - 0.5, 0.0), hits + 0.5
    with np.errstate(divide="ignore", invalid="ignore"):
        lower = (low + c - np.sqrt(c * (2 * low + c))) / rate
        upper = (high + c + np.sqrt(c * (2 * high + c))) / rate
    return np.where(rate < 1, np.maximum(lower, hits), hits), np.where(rate < 1, upper, hits)


def poisson_mean(count: FloatArray, confidence: float) -> tuple[FloatArray, FloatArray]:
    """Returns bounds of a Poisson mean of which `count` events were observed (Garwood 1936).

    The quantiles of chi-squared are approximated by Wilson and Hilferty (1931), to within 1 % from one event on; the
    upper bound of no events is exact.
    """
    z, tail = normal_quantile(confidence), (1 - confidence) / 2
    count = np.asarray(count, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        lower = np.where(count > 0, count * (1 - 1 / (9 * count) - z / (3 * np.sqrt(count))) ** 3, 0.0)
        more = count + 1
        upper = more * (1 - 1 / (9 * more) + z / (3 * np.sqrt(more))) ** 3
    return np.maximum(lower, 0.0), np.where(count > 0, upper, -np.log(tail))


def around(value: FloatArray, half: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Returns value ± half: infinite bounds where either is not finite, NaN where the value is NaN."""
    bounded = np.isfinite(value) & np.isfinite(half)
    lower, upper = np.where(bounded, value, -np.inf), np.where(bounded, value, np.inf)
    half = np.where(bounded, half, 0.0)
    none = np.isnan(value)
    return np.where(none, np.nan, lower - half), np.where(none, np.nan, upper + half)
