"""Bounds of values if late records are missing whose values are known to some extent.

An edge states by how much its late records, all together, raise and lower a value. Of a mean, this is the sum of the
values above and below 0. Of a variance, it is the sum of the squared values.
"""

from __future__ import annotations

import numpy as np

from edgewater.synopses.base import Count, Estimates, FloatArray, Mean, Stack

LATE_VALUES = ("sum", "max", "min", "mean", "var")
"""The functions whose values keep bounds by the values of late records. A count keeps them by their number."""
_OUTWARDS = 2.0**-48  # derived: it exceeds the rounding of the computation
"""Bounds are moved outwards by this fraction, which exceeds the rounding of their computation."""


def means_with(
    estimates: Estimates, stack: Stack, above: float, below: float, records: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Returns bounds of means m of n values, with at most `records` further values.

    With k further values, 1 ≤ k, and their sum s, the mean is (n·m + s) / (n + k). It is monotonic in s and in k, so it
    is between its values at their least and their largest.

    Args:
        above, below: the sum of the further values above 0, and of those below 0 as a positive number.
        records: float64 per mean.
    """
    n = stack.query(Count()).value
    with np.errstate(invalid="ignore", over="ignore"):
        low, high = n * estimates.lower, n * estimates.upper
        low = low - below - (np.abs(low) + below) * _OUTWARDS
        high = high + above + (np.abs(high) + above) * _OUTWARDS
        counts = n + 1.0, n + np.maximum(records, 1.0)
        lower = np.minimum.reduce([estimates.lower, *(low / count for count in counts)])
        return lower, np.maximum.reduce([estimates.upper, *(high / count for count in counts)])


def variances_with(
    estimates: Estimates, stack: Stack, squares: float, records: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Returns bounds of sample variances of n values, with at most `records` further values.

    Let M be the sum of the squared deviations of the n values from their mean m. With k further values x, 1 ≤ k, the
    sum is at least M and at most M + Σ(x − m)², and √Σ(x − m)² ≤ √Σx² + √k·|m|. It is divided by n + k − 1.

    Args:
        squares: Σx² of the further values.
        records: float64 per variance.
    """
    n, mean = stack.query(Count()).value, stack.query(Mean())
    with np.errstate(invalid="ignore", over="ignore"):
        center = np.maximum(np.abs(mean.lower), np.abs(mean.upper))
        moved = (np.sqrt(squares) + np.sqrt(records) * center) ** 2
        lower = estimates.lower * (n - 1) / (n + np.maximum(records, 1.0) - 1) * (1 - _OUTWARDS)
        upper = (estimates.upper * (n - 1) + moved) / np.maximum(n, 1.0) * (1 + _OUTWARDS)
        return np.minimum(estimates.lower, lower), np.maximum(estimates.upper, upper)
