"""How many values a sample needs (Aion, Sec. 3.2), per kind of question. All functions take arrays.

Eq. 3 is misprinted: σ/√n stands outside the root, r = z·√(1 - n/N)·(σ/√n)/μ; Eq. 4 solves that form
(corrections.md, Aion 1). Confidence is 1 - δ (Aion 2). A population N of infinity drops the finite
population correction everywhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edgewater.accuracy import check_confidence, check_error
from edgewater.errors import InvalidQuery
from edgewater.synopses import FloatArray, normal_quantile


def finite(endless: Any, population: Any) -> FloatArray:
    """Of `population` as many as say what `endless` draws with replacement would: n₀/(1 + n₀/N). At most N."""
    endless, population = np.asarray(endless, float), np.asarray(population, float)
    with np.errstate(divide="ignore", invalid="ignore"):
        size = np.where(population > 0, 1.0 / (1.0 / endless + 1.0 / population), 0.0)
    return np.asarray(np.where(endless > 0, np.minimum(size, population), 0.0))


def mean_size(variation: Any, population: Any, error: float, confidence: float) -> FloatArray:
    """Values for a mean, or a sum over a known number of events (Eq. 4, 5).

    Args:
        variation: σ/|μ| of the values. Infinite where the mean is zero: then everything is asked for.
        population: N, events of the window.
    """
    z = normal_quantile(check_confidence(confidence, "confidence"))
    return finite((z * np.asarray(variation, float) / check_error(error, "error")) ** 2, population)


def count_size(population: Any, error: float, confidence: float) -> FloatArray:
    """Events for a count that is estimated from the sample alone, as (kept)/θ.

    Its relative variance is (1 - θ)/(θN). With a monitor that counts every event none is needed.
    """
    return mean_size(1.0, population, error, confidence)


def proportion_size(proportion: Any, population: Any, error: float, confidence: float) -> FloatArray:
    """Values for a proportion to an *absolute* error; 1/2 is the worst and the choice when nothing is known."""
    p = np.asarray(proportion, float)
    if ((p < 0) | (p > 1)).any():
        raise InvalidQuery("proportion", proportion, "numbers from 0 to 1; 0.5 if nothing is known")
    return mean_size(np.sqrt(p * (1 - p)), population, error, confidence)


def variance_size(kurtosis: Any, population: Any, error: float, confidence: float) -> FloatArray:
    """Values for a variance to a relative error: Var(s²)/σ⁴ ≈ (κ - 1)/n; κ = 3 for normal values."""
    excess = np.asarray(kurtosis, float) - 1
    if (excess < 0).any():
        raise InvalidQuery("kurtosis", kurtosis, "fourth central moment / variance², at least 1")
    return mean_size(np.sqrt(excess), population, error, confidence)


def quantile_size(q: Any, population: Any, error: float, confidence: float) -> FloatArray:
    """Values for a quantile whose *rank* is within `error`: a proportion at q, whatever the distribution."""
    return proportion_size(q, population, error, confidence)


def all_quantiles_size(population: Any, error: float, confidence: float) -> FloatArray:
    """Values for all quantiles at once, ranks within `error` (Dvoretzky, Kiefer, Wolfowitz; Massart's constant)."""
    check_confidence(confidence, "confidence")
    return finite(np.log(2 / (1 - confidence)) / (2 * check_error(error, "error") ** 2), population)


def extreme_size(population: Any, error: float, confidence: float) -> FloatArray:
    """Values such that the sample's maximum (minimum) is among the top (bottom) share `error` of the population.

    1 - (1 - ε)ⁿ ≥ confidence. Of the maximum's *value* no sample says anything without assumptions about
    the tail: for that, ask `max` exactly.
    """
    check_confidence(confidence, "confidence")
    size = np.ceil(np.log1p(-confidence) / np.log1p(-check_error(error, "error")))
    return np.asarray(np.minimum(size, np.asarray(population, float)))


def neyman_sizes(
    populations: FloatArray, deviations: FloatArray, half_width: float, quantile: float, available: FloatArray
) -> FloatArray:
    """Values per stratum such that quantile·sd(Σ N_h·mean_h) ≤ half_width, with the fewest values in total.

    n_h ∝ N_h σ_h (Neyman 1934). Strata that would need more than are available are taken whole and the rest
    is allocated anew, so the result holds with the finite population corrections.

    Args:
        populations: N_h, may exceed what has arrived.
        deviations: σ_h of the values, float64 per stratum.
        half_width: of the total, in the values' unit; not above 0 asks for everything.
        available: how many values can be had, per stratum.
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
