"""Sample sizes of means and totals (Aion, Sec. 3.2). All functions work elementwise on arrays.

Eq. 3 of the paper has a misprint: σ/√n belongs outside the root, r = z·√(1 - n/N)·(σ/√n)/μ. Eq. 4 is the solution of
the correct form. Confidence is 1 - δ. If the population N is infinite, there is no finite population correction.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edgewater.arrivals.targets import check_confidence, check_error
from edgewater.synopses import FloatArray, normal_quantile


def finite_population_size(size: Any, population: Any) -> FloatArray:
    """Returns the size of a sample without replacement that is as precise as `size` draws with replacement.

    The size is n₀/(1 + n₀/N), at most N.
    """
    size, population = np.asarray(size, float), np.asarray(population, float)
    with np.errstate(divide="ignore", invalid="ignore"):
        corrected = np.where(population > 0, 1.0 / (1.0 / size + 1.0 / population), 0.0)
    return np.asarray(np.where(size > 0, np.minimum(corrected, population), 0.0))


def mean_size(variation: Any, population: Any, error: float, confidence: float) -> FloatArray:
    """Returns the number of values to sample for a mean, or for a sum over a known number of events (Eq. 4, 5).

    Args:
        variation: σ/|μ| of the values; infinite if the mean is zero. The result is then N.
        population: N, the number of events of the window.
        error: relative error.
    """
    z = normal_quantile(check_confidence(confidence, "confidence"))
    return finite_population_size((z * np.asarray(variation, float) / check_error(error, "error")) ** 2, population)


def neyman_sizes(
    populations: FloatArray, deviations: FloatArray, half_width: float, quantile: float, available: FloatArray
) -> FloatArray:
    """Returns the fewest values per stratum such that quantile·sd(Σ N_h·mean_h) ≤ half_width.

    n_h ∝ N_h σ_h (Neyman 1934). If a stratum needs more values than are available, all its values are taken and the
    rest is allocated again. So the result is correct with finite population corrections.

    Args:
        populations: N_h; may exceed the number of arrived events.
        deviations: σ_h of the values, float64 per stratum.
        half_width: half-width for the total, in the unit of the values. If it is not above 0, all available values are
            returned.
        quantile: normal quantile of the confidence.
        available: number of available values per stratum.
    """
    if half_width <= 0:
        return available.copy()
    weight = populations * deviations
    sizes = np.where(weight > 0, 0.0, np.minimum(available, 1.0))
    free = weight > 0
    allowed = (half_width / quantile) ** 2
    for _ in range(len(populations) + 1):
        if not free.any():
            break
        spread = weight[free].sum()
        fixed = ~free & (sizes > 0)
        spent = (weight[fixed] ** 2 * (1 / sizes[fixed] - 1 / np.maximum(populations[fixed], sizes[fixed]))).sum()
        finite_part = (weight[free] ** 2 / populations[free]).sum()
        room = allowed - spent + finite_part
        wanted = np.full(len(weight), np.inf)
        if room > 0:
            wanted[free] = spread * weight[free] / room
        over = free & (wanted >= available)
        sizes[free] = np.minimum(wanted, available)[free]
        if not over.any():
            break
        free &= ~over
    return sizes
