"""The interval of the next delay as the Klink thesis has it, to be compared with `IngestionHistory`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Literal

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
