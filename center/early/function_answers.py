"""Estimates a function of all rows of a window from a sample of the rows, and plans the sampling rate for an error.

The error of the function's value follows from the function's own formula or from a bootstrap. A bound for the mean of
the rows would say little about values such as the centroids of k-means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edgewater.arrivals.sample_size import finite_population_size
from edgewater.arrivals.targets import check_confidence
from edgewater.base.errors import InvalidInput
from edgewater.synopses import FloatArray, SampleFunction, normal_quantile

DEFAULT_REPLICATES = 100
MIN_PLANNED_ROWS = 200
"""The fewest rows for which a rate is planned. With fewer rows, the spread of the resamples is too uncertain."""
RATE_INCREASE = 1.25
"""Factor by which a planned rate that was too small is increased."""
MIN_RESAMPLED_ROWS = 30
"""The fewest rows of a sample for an error estimate. For example, resamples of two equal rows have no spread."""
MAX_RESAMPLED_ROWS = 2_000
"""The most rows m of a resample. If the sample has n > m rows, the spread of the resamples is scaled by √(m/n)."""


@dataclass(frozen=True, slots=True)
class FunctionEstimate:
    """The value of a function, estimated from a sample.

    Attributes:
        value, lower, upper: float64, one number per name of the function; NaN if the sample has too few rows.
        error: relative error at the requested confidence; infinite if it is not known.
        size: number of rows of the sample.
        rate: probability with which each row of the window was sampled.
        uncorrected_error: the error without the finite population correction.
        problem: type and message of the function's exception; empty if there was none.
    """

    value: FloatArray
    lower: FloatArray
    upper: FloatArray
    error: float
    size: int
    rate: float
    uncorrected_error: float
    problem: str = ""

    @property
    def population(self) -> float:
        """The estimated number of rows of the window."""
        return self.size / self.rate

    def without_bounds(self) -> FunctionEstimate:
        """Returns the estimate without bounds, for a window that lacks an unknown number of rows."""
        unknown = np.full(len(self.value), math.nan)
        return replace(self, lower=unknown, upper=unknown, error=math.inf)

    def rate_for(self, target: float) -> float:
        """Returns the rate, in (0, 1], at which the relative error of a similar window is `target`."""
        if not target > 0:
            raise InvalidInput("target", target, "a relative error above 0")
        if not math.isfinite(self.uncorrected_error) or self.size == 0:
            return 1.0
        size = float(finite_population_size(self.size * (self.uncorrected_error / target) ** 2, self.population))
        return min(1.0, max(size, MIN_PLANNED_ROWS) / self.population)


def estimate_function(
    function: SampleFunction,
    parameters: Mapping[str, Any],
    rows: FloatArray,
    rate: float,
    rng: np.random.Generator,
    *,
    confidence: float = 0.95,
    replicates: int = DEFAULT_REPLICATES,
    plan: bool = False,
) -> FunctionEstimate:
    """Returns the value of `function` on rows that were sampled with probability `rate`, and the value's interval.

    The function is third-party code. If it raises an exception, the estimate has a `problem`. So the other measures of
    the answer are not affected.

    Args:
        rows: float64 (n, columns). The function gets a copy, which it may modify.
        plan: whether to compute `uncorrected_error` even if `rows` contains all rows of the window.
    """
    check_confidence(confidence, "confidence", InvalidInput)
    run = _Evaluation(function, parameters, len(function.names(parameters, rows.shape[1])), rate, confidence)
    try:
        return run.estimate(rows.copy(), rng, replicates, plan)
    except Exception as exc:  # third-party code may raise anything
        return run.unknown(len(rows), f"{type(exc).__name__}: {exc}")


def plan_rate(
    function: SampleFunction,
    parameters: Mapping[str, Any],
    rows: FloatArray,
    rate: float,
    target: float,
    rng: np.random.Generator,
    *,
    confidence: float = 0.95,
) -> float:
    """Returns the rate, in (0, 1], at which the relative error of a similar window is at most `target`.

    Errors are not exactly proportional to 1/√n, because ranks are whole numbers and small clusters disappear. So the
    error is measured again on a sample of the planned size. The size is increased until the error is within the target.

    Args:
        rows: float64 (n, columns) in random order, so that a prefix is a random sample.
        rate: probability with which the rows were sampled.
    """
    population = len(rows) / rate
    if population <= MIN_PLANNED_ROWS:
        return 1.0
    estimate = estimate_function(function, parameters, rows, rate, rng, confidence=confidence, plan=True)
    planned = estimate.rate_for(target)
    while planned < rate:
        taken = rows[: math.ceil(planned * population)]
        estimate = estimate_function(function, parameters, taken, planned, rng, confidence=confidence)
        if estimate.error <= target:
            break
        planned = min(1.0, planned * RATE_INCREASE)
    return planned


def _known(error: float) -> float:
    """Returns the error, or infinity if the error is NaN. Infinity means that the error is not known."""
    return math.inf if math.isnan(error) else float(error)


@dataclass(frozen=True, slots=True)
class _Evaluation:
    function: SampleFunction
    parameters: Mapping[str, Any]
    width: int
    rate: float
    confidence: float

    def unknown(self, size: int, problem: str = "") -> FunctionEstimate:
        unknown = np.full(self.width, math.nan)
        error = 0.0 if self.rate >= 1 and not problem else math.inf
        return FunctionEstimate(unknown, unknown, unknown, error, size, self.rate, math.inf, problem)

    def fit(self, rows: FloatArray, start: FloatArray | None) -> FloatArray:
        value = np.asarray(self.function.fit(rows, self.parameters, start), float)
        if value.shape != (self.width,):
            raise ValueError(f"the function names {self.width} values and returned an array of shape {value.shape}")
        return value

    def estimate(self, rows: FloatArray, rng: np.random.Generator, replicates: int, plan: bool) -> FunctionEstimate:
        size, rate = len(rows), self.rate
        least = self.function.min_rows(self.parameters)
        if size < max(least, 1):
            return self.unknown(size)
        by_formula = self.function.interval(rows, self.parameters, self.confidence, rate)
        if by_formula is not None:
            uncorrected = self.function.interval(rows, self.parameters, self.confidence, 0.0)
            value, lower, upper, error = by_formula
            uncorrected_error = _known(uncorrected[3]) if uncorrected is not None else math.inf
            return FunctionEstimate(value, lower, upper, _known(error), size, rate, uncorrected_error)
        value = self.fit(rows, None)
        if rate >= 1 and not plan:
            return FunctionEstimate(value, value, value, 0.0, size, rate, math.inf)
        taken = max(min(size, MAX_RESAMPLED_ROWS), least)
        values = np.array([self.fit(rows[rng.integers(0, size, taken)], value) for _ in range(replicates)])
        gaps = np.array([self.function.distance(v, value, self.parameters) for v in values])
        rank = min(replicates, math.ceil((replicates + 1) * self.confidence)) - 1
        # A quantile above the quantile of the largest resample is extrapolated by a normal distribution.
        resolved = replicates / (replicates + 1)
        beyond = max(normal_quantile(self.confidence) / normal_quantile(resolved), 1.0)
        scale = math.sqrt(taken / size) * beyond
        uncorrected_error = _known(float(np.sort(gaps)[rank])) * scale
        if size < MIN_RESAMPLED_ROWS:
            uncorrected_error = math.inf
        shrink = math.sqrt(max(0.0, 1 - rate))
        off = np.sort(np.abs(values - value), axis=0)[rank] * scale * shrink
        error = uncorrected_error * shrink if rate < 1 else 0.0
        estimate = FunctionEstimate(value, value - off, value + off, error, size, rate, uncorrected_error)
        return estimate if rate >= 1 or size >= MIN_RESAMPLED_ROWS else estimate.without_bounds()
