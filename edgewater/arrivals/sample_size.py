"""Sample sizes of means and totals. `finite_population_size` works elementwise on arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgewater.synopses import FloatArray


def finite_population_size(size: Any, population: Any) -> FloatArray:
    """Returns the size of a sample without replacement that is as precise as `size` draws with replacement.

    The size is n₀/(1 + n₀/N), at most N.
    """
    size, population = np.asarray(size, float), np.asarray(population, float)
    with np.errstate(divide="ignore", invalid="ignore"):
        corrected = np.where(population > 0, 1.0 / (1.0 / size + 1.0 / population), 0.0)
    return np.asarray(np.where(size > 0, np.minimum(corrected, population), 0.0))


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
