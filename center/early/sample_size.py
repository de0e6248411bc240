"""Sample sizes by kind of measure (Aion, Sec. 3.2). All functions work elementwise on arrays.

Eq. 3 of the paper has a misprint: σ/√n belongs outside the root, r = z·√(1 - n/N)·(σ/√n)/μ. Eq. 4 is the solution of
the correct form. Confidence is 1 - δ. If the population N is infinite, there is no finite population correction.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edgewater.model.accuracy import check_confidence, check_error
from edgewater.model.errors import InvalidQuery
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


def count_size(population: Any, error: float, confidence: float) -> FloatArray:
    """Returns the number of events to sample for a count that is estimated as (sampled)/θ, from the sample alone.

    The relative variance of this estimate is (1 - θ)/(θN). Edges count every event, so they need no sample for a count.
    """
    return mean_size(1.0, population, error, confidence)


def proportion_size(proportion: Any, population: Any, error: float, confidence: float) -> FloatArray:
    """Returns the number of values to sample for a proportion with an *absolute* error. The worst case is 1/2."""
    p = np.asarray(proportion, float)
    if ((p < 0) | (p > 1)).any():
        raise InvalidQuery("proportion", proportion, "numbers from 0 to 1; 0.5 if nothing is known")
    return mean_size(np.sqrt(p * (1 - p)), population, error, confidence)


def variance_size(kurtosis: Any, population: Any, error: float, confidence: float) -> FloatArray:
    """Returns the number of values to sample for a variance with a relative error.

    The formula is Var(s²)/σ⁴ ≈ (κ - 1)/n, with κ = 3 for normal values.
    """
    excess = np.asarray(kurtosis, float) - 1
    if (excess < 0).any():
        raise InvalidQuery("kurtosis", kurtosis, "fourth central moment / variance², at least 1")
    return mean_size(np.sqrt(excess), population, error, confidence)


def quantile_size(q: Any, population: Any, error: float, confidence: float) -> FloatArray:
    """Returns the number of values to sample for a quantile whose *rank* is within `error`, for any distribution.

    The number is the number for a proportion of q.
    """
    return proportion_size(q, population, error, confidence)


def all_quantiles_size(population: Any, error: float, confidence: float) -> FloatArray:
    """Returns the number of values to sample for all quantiles simultaneously, with all ranks within `error`.

    The bound is the DKW inequality (Massart 1990).
    """
    check_confidence(confidence, "confidence")
    return finite_population_size(np.log(2 / (1 - confidence)) / (2 * check_error(error, "error") ** 2), population)


def extreme_size(population: Any, error: float, confidence: float) -> FloatArray:
    """Returns the number of values to sample so that the sample's maximum is in the top share `error` of all values.

    The same number is valid for the minimum and the bottom share: 1 - (1 - ε)ⁿ ≥ confidence. Without assumptions about
    the tail, a sample does not bound the *value* of the maximum.
    """
    check_confidence(confidence, "confidence")
    size = np.ceil(np.log1p(-confidence) / np.log1p(-check_error(error, "error")))
    return np.asarray(np.minimum(size, np.asarray(population, float)))


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
