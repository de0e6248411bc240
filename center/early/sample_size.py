"""Sample sizes by kind of measure (Aion, Sec. 3.2). All functions are elementwise on arrays.

Eq. 3 of the paper is misprinted: σ/√n belongs outside the root, r = z·√(1 - n/N)·(σ/√n)/μ, and Eq. 4 is the solution of
that form. Confidence is 1 - δ. An infinite population N omits the finite population correction.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edgewater.model.accuracy import check_confidence, check_error
from edgewater.model.errors import InvalidQuery
from edgewater.synopses import FloatArray, normal_quantile


def finite_population_size(size: Any, population: Any) -> FloatArray:
    """Returns the size of a sample without replacement as precise as `size` draws with it: n₀/(1 + n₀/N), at most N."""
    size, population = np.asarray(size, float), np.asarray(population, float)
    with np.errstate(divide="ignore", invalid="ignore"):
        corrected = np.where(population > 0, 1.0 / (1.0 / size + 1.0 / population), 0.0)
    return np.asarray(np.where(size > 0, np.minimum(corrected, population), 0.0))


def mean_size(variation: Any, population: Any, error: float, confidence: float) -> FloatArray:
    """Returns the values for a mean, or for a sum over a known number of events (Eq. 4, 5).

    Args:
        variation: σ/|μ| of the values. Infinite where the mean is zero: then the result is N.
        population: N, events of the window.
    """
    z = normal_quantile(check_confidence(confidence, "confidence"))
    return finite_population_size((z * np.asarray(variation, float) / check_error(error, "error")) ** 2, population)


def count_size(population: Any, error: float, confidence: float) -> FloatArray:
    """Returns the events for a count that is estimated from the sample alone, as (sampled)/θ.

    Its relative variance is (1 - θ)/(θN). Edges count every event, so they need no sample for a count.
    """
    return mean_size(1.0, population, error, confidence)


def proportion_size(proportion: Any, population: Any, error: float, confidence: float) -> FloatArray:
    """Returns the values for a proportion to an *absolute* error; the worst case is 1/2."""
    p = np.asarray(proportion, float)
    if ((p < 0) | (p > 1)).any():
        raise InvalidQuery("proportion", proportion, "numbers from 0 to 1; 0.5 if nothing is known")
    return mean_size(np.sqrt(p * (1 - p)), population, error, confidence)


def variance_size(kurtosis: Any, population: Any, error: float, confidence: float) -> FloatArray:
    """Returns the values for a variance to a relative error: Var(s²)/σ⁴ ≈ (κ - 1)/n; κ = 3 for normal values."""
    excess = np.asarray(kurtosis, float) - 1
    if (excess < 0).any():
        raise InvalidQuery("kurtosis", kurtosis, "fourth central moment / variance², at least 1")
    return mean_size(np.sqrt(excess), population, error, confidence)


def quantile_size(q: Any, population: Any, error: float, confidence: float) -> FloatArray:
    """Returns the values for a quantile whose *rank* is within `error`: a proportion at q, for any distribution."""
    return proportion_size(q, population, error, confidence)


def all_quantiles_size(population: Any, error: float, confidence: float) -> FloatArray:
    """Returns the values for all quantiles simultaneously, ranks within `error` (DKW inequality, Massart 1990)."""
    check_confidence(confidence, "confidence")
    return finite_population_size(np.log(2 / (1 - confidence)) / (2 * check_error(error, "error") ** 2), population)


def extreme_size(population: Any, error: float, confidence: float) -> FloatArray:
    """Returns the values such that the sample's maximum (minimum) is in the top (bottom) share `error` of all values.

    1 - (1 - ε)ⁿ ≥ confidence. Without assumptions about the tail, a sample does not bound the *value* of the maximum.
    """
    check_confidence(confidence, "confidence")
    size = np.ceil(np.log1p(-confidence) / np.log1p(-check_error(error, "error")))
    return np.asarray(np.minimum(size, np.asarray(population, float)))


def neyman_sizes(
    populations: FloatArray, deviations: FloatArray, half_width: float, quantile: float, available: FloatArray
) -> FloatArray:
    """Returns the fewest values per stratum such that quantile·sd(Σ N_h·mean_h) ≤ half_width.

    n_h ∝ N_h σ_h (Neyman 1934). Strata that would need more values than are available are taken completely and the rest
    is allocated again, so the result holds with the finite population corrections.

    Args:
        populations: N_h; may exceed the number of arrived events.
        deviations: σ_h of the values, float64 per stratum.
        half_width: of the total, in the unit of the values; if it is not above 0, all available values are returned.
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
