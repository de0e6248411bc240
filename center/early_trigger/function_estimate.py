"""What a sample of rows says of a function of all rows, and how many rows that takes (corrections.md, Aion 13)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from center.early_trigger.bootstrap import DEFAULT_REPLICATES
from center.early_trigger.sample_size import finite
from edgewater.accuracy import check_confidence
from edgewater.errors import InvalidInput
from edgewater.synopses import FloatArray, SampleFunction, normal_quantile

LEAST_PLANNED = 200
"""Rows that a plan asks for at least: of fewer, what resamples scatter by says little."""
TOP_UP = 1.25
"""By what a planned rate is raised that turned out too small."""
LEAST_RESAMPLED = 30
"""Rows of a sample below which nothing is said of how far off it is: two rows that are alike scatter by nothing."""
MOST_RESAMPLED = 2_000
"""Rows of a resample. Of a larger sample they are fewer than it has, and what they scatter by is scaled by √(m/n)."""


@dataclass(frozen=True, slots=True)
class FunctionEstimate:
    """The value of a function, from a sample.

    Attributes:
        value, lower, upper: float64, one per name. NaN: too few rows.
        error: the relative error that holds with the confidence; inf: nothing is known.
        size: rows that the function was given.
        rate: the probability with which each row of the window was drawn.
        endless_error: the error of as many rows if there were no end of them.
        problem: what the function raised, in place of a value.
    """

    value: FloatArray
    lower: FloatArray
    upper: FloatArray
    error: float
    size: int
    rate: float
    endless_error: float
    problem: str = ""

    @property
    def population(self) -> float:
        """Rows of the window, about."""
        return self.size / self.rate

    def without_bounds(self) -> FunctionEstimate:
        """The same, where rows are missing of which nothing is known."""
        unknown = np.full(len(self.value), math.nan)
        return replace(self, lower=unknown, upper=unknown, error=math.inf)

    def rate_for(self, target: float) -> float:
        """The rate with which a window like this one has a relative error of `target`, in (0, 1]."""
        if not target > 0:
            raise InvalidInput("target", target, "a relative error above 0")
        if not math.isfinite(self.endless_error) or self.size == 0:
            return 1.0
        size = float(finite(self.size * (self.endless_error / target) ** 2, self.population))
        return min(1.0, max(size, LEAST_PLANNED) / self.population)


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
    """The value of `function` on rows that were drawn with probability `rate`, and its interval.

    What the function raises becomes an estimate without a value that says so: it is a user's code, and other measures
    of the same answer are not its.

    Args:
        rows: float64 (n, columns). The function gets a copy, and may do with it what it likes.
        plan: whether `endless_error` is wanted where all rows are here, which then costs as much as the error does.
    """
    check_confidence(confidence, "confidence", InvalidInput)
    run = _Run(function, parameters, len(function.names(parameters, rows.shape[1])), rate, confidence)
    try:
        return run.estimate(rows.copy(), rng, replicates, plan)
    except Exception as exc:  # whatever a stranger's code raises
        return run.nothing(len(rows), f"{type(exc).__name__}: {exc}")


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
    """The rate, in (0, 1], with which a window like this one has a relative error of `target`.

    Errors go with 1/√n, which is not all: ranks are whole, and small clusters are lost. So the error is measured again
    on a sample of the size that this says, and the size raised until it is within the target (corrections.md, Aion 8).

    Args:
        rows: float64 (n, columns), in an order that is random: a prefix is a sample.
        rate: with which they were drawn.
    """
    population = len(rows) / rate
    if population <= LEAST_PLANNED:
        return 1.0  # whatever the function says
    found = estimate_function(function, parameters, rows, rate, rng, confidence=confidence, plan=True)
    planned = found.rate_for(target)
    while planned < rate:
        taken = rows[: math.ceil(planned * population)]
        found = estimate_function(function, parameters, taken, planned, rng, confidence=confidence)
        if found.error <= target:
            break
        planned = min(1.0, planned * TOP_UP)
    return planned


def _known(error: float) -> float:
    """An error that is no number says nothing."""
    return math.inf if math.isnan(error) else float(error)


@dataclass(frozen=True, slots=True)
class _Run:
    function: SampleFunction
    parameters: Mapping[str, Any]
    numbers: int
    rate: float
    confidence: float

    def nothing(self, size: int, problem: str = "") -> FunctionEstimate:
        unknown = np.full(self.numbers, math.nan)
        error = 0.0 if self.rate >= 1 and not problem else math.inf
        return FunctionEstimate(unknown, unknown, unknown, error, size, self.rate, math.inf, problem)

    def fit(self, rows: FloatArray, start: FloatArray | None) -> FloatArray:
        value = np.asarray(self.function.fit(rows, self.parameters, start), float)
        if value.shape != (self.numbers,):
            raise ValueError(f"{self.numbers} numbers are named, and it gave an array of shape {value.shape}")
        return value

    def estimate(self, rows: FloatArray, rng: np.random.Generator, replicates: int, plan: bool) -> FunctionEstimate:
        size, rate = len(rows), self.rate
        least = self.function.min_rows(self.parameters)
        if size < max(least, 1):
            return self.nothing(size)
        by_formula = self.function.interval(rows, self.parameters, self.confidence, rate)
        if by_formula is not None:
            endless = self.function.interval(rows, self.parameters, self.confidence, 0.0)
            value, lower, upper, error = by_formula
            unending = _known(endless[3]) if endless is not None else math.inf
            return FunctionEstimate(value, lower, upper, _known(error), size, rate, unending)
        value = self.fit(rows, None)
        if rate >= 1 and not plan:
            return FunctionEstimate(value, value, value, 0.0, size, rate, math.inf)
        taken = max(min(size, MOST_RESAMPLED), least)
        values = np.array([self.fit(rows[rng.integers(0, size, taken)], value) for _ in range(replicates)])
        gaps = np.array([self.function.distance(v, value, self.parameters) for v in values])
        rank = min(replicates, math.ceil((replicates + 1) * self.confidence)) - 1
        # So few resamples have no quantile near 1: beyond their largest it is a normal distribution's.
        resolved = replicates / (replicates + 1)
        beyond = max(normal_quantile(self.confidence) / normal_quantile(resolved), 1.0)
        scale = math.sqrt(taken / size) * beyond
        endless_error = _known(float(np.sort(gaps)[rank])) * scale
        if size < LEAST_RESAMPLED:
            endless_error = math.inf
        shrink = math.sqrt(max(0.0, 1 - rate))
        off = np.sort(np.abs(values - value), axis=0)[rank] * scale * shrink
        error = endless_error * shrink if rate < 1 else 0.0
        found = FunctionEstimate(value, value - off, value + off, error, size, rate, endless_error)
        return found if rate >= 1 or size >= LEAST_RESAMPLED else found.without_bounds()
