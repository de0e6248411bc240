"""The intervals of the next delay that the Klink thesis has, to be compared with `IngestionHistory`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Literal

import numpy as np

from edgewater.scheduling import DelayInterval

Variance = Literal["predictive", "printed"]


def normal_interval(
    means_ms: Sequence[float], squares: Sequence[float], confidence: float, variance: Variance = "predictive"
) -> DelayInterval:
    """Returns the thesis' interval of the next delay: normal, from the moments of past epochs.

    Args:
        means_ms: mean delay μ of each epoch (Eq. 3.3).
        squares: mean squared delay χ of each epoch (Eq. 3.4).
        variance: "printed" is Eq. 3.6, the variance of a mean of past means. "predictive" is mean(χ) - mean(μ)², the
            variance of the next delay.
    """
    mean, square, count = math.fsum(means_ms) / len(means_ms), math.fsum(squares) / len(squares), len(means_ms)
    spread = square - mean**2
    if variance == "printed":
        # The products μ_i μ_j of independent epochs cancel against the squared mean.
        spread = max(0.0, square - math.fsum(m * m for m in means_ms) / count) / count
    half_ms = NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt(max(0.0, spread))
    return DelayInterval(mean - half_ms, mean + half_ms)


def regression_interval(delays_ms: Sequence[float], confidence: float) -> DelayInterval:
    """Returns the interval of a linear regression of past delays on the number of the epoch, with normal residuals.

    The thesis names its baseline "a simple linear regression", and does not say what it regresses on.
    """
    x, y = np.arange(len(delays_ms)), np.asarray(delays_ms)
    slope, start = np.polyfit(x, y, 1)
    spread = float(np.sqrt(((y - start - slope * x) ** 2).sum() / (len(y) - 2)))
    half_ms = NormalDist().inv_cdf((1 + confidence) / 2) * spread
    return DelayInterval(start + slope * len(y) - half_ms, start + slope * len(y) + half_ms)
