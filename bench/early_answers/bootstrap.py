"""The error of a function of a sample for which no formula is known: k-means, a regression, a user-defined function.

Eq. 4 of the Aion paper, for the mean of the values, is no substitute. For k-means it keeps the inertia within 5 % in 98
% of windows, but the centroids in only 88 %. Here the function is evaluated on bootstrap resamples, and its error is
the scatter of their values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from center.early.function_answers import DEFAULT_REPLICATES
from edgewater.arrivals.sample_size import finite_population_size
from edgewater.arrivals.targets import AccuracyTarget, check_confidence
from edgewater.base.errors import InvalidInput
from edgewater.synopses import FloatArray

Statistic = Callable[[Any], Any]
"""Maps rows (NumPy array, axis 0) to a number or an array of numbers of a fixed shape."""

Distance = Callable[[FloatArray, FloatArray], float]
"""Distance of the value of a resample from the value of the sample, relative to the latter."""


def relative_distance(value: FloatArray, reference: FloatArray) -> float:
    """Returns |value - reference| / |reference|, as vectors; infinity if only the reference is 0."""
    norm = float(np.linalg.norm(reference))
    gap = float(np.linalg.norm(value - reference))
    return gap / norm if norm else (0.0 if gap == 0 else math.inf)


@dataclass(frozen=True, slots=True)
class BootstrapError:
    """A function's value on a sample, and its error.

    Attributes:
        error: relative error that holds with the requested confidence.
        size: rows of the sample.
    """

    value: FloatArray
    error: float
    size: int

    def size_for(self, target: float, population: float = math.inf) -> float:
        """Returns the rows for a relative error of `target`: errors decrease by 1/√n and are corrected for N."""
        if not target > 0:
            raise InvalidInput("target", target, "a relative error above 0")
        # The measured error includes the finite population correction.
        uncorrected = self.size / (1 - self.size / population) if self.size < population else math.inf
        if self.error == 0:
            return 1.0
        return float(finite_population_size(uncorrected * (self.error / target) ** 2, population))


def bootstrap_error(
    rows: Any,
    statistic: Statistic,
    rng: np.random.Generator,
    *,
    confidence: float = 0.95,
    population: float = math.inf,
    replicates: int = DEFAULT_REPLICATES,
    distance: Distance = relative_distance,
) -> BootstrapError:
    """Returns the error of `statistic` on a sample of a population of `population` rows.

    Resamples have as many rows as the sample, drawn with replacement; distances are multiplied by √(1 - n/N), the
    finite population correction. Evaluates the statistic `replicates` times.

    Raises:
        InvalidInput: fewer than two rows, or fewer than 20 replicates.
    """
    check_confidence(confidence, "confidence", InvalidInput)
    size = len(rows)
    if size < 2:
        raise InvalidInput("rows", size, "at least 2 rows")
    if replicates < 20:
        raise InvalidInput("replicates", replicates, "at least 20 resamples")
    value = np.asarray(statistic(rows), float)
    gaps = np.array(
        [distance(np.asarray(statistic(rows[rng.integers(0, size, size)]), float), value) for _ in range(replicates)]
    )
    shrink = math.sqrt(max(0.0, 1 - size / population))
    rank = min(replicates, math.ceil((replicates + 1) * confidence))
    return BootstrapError(value, float(np.sort(gaps)[rank - 1]) * shrink, size)


@dataclass(frozen=True, slots=True)
class FunctionSample:
    """The rows of a window that a function needs.

    Attributes:
        size: number of rows: the rows with the lowest marks.
        found: the function's value on these rows and its error.
        met: the error is within the target. False: all rows, or all rounds, were not enough.
    """

    size: int
    found: BootstrapError
    met: bool


def sample_for_function(
    rows: Any,
    statistic: Statistic,
    rng: np.random.Generator,
    target: AccuracyTarget,
    *,
    pilot: int = 400,
    rounds: int = 6,
    **options: Any,
) -> FunctionSample:
    """Returns the fewest rows of a window with which the function's own error is within the target.

    A size extrapolated from a pilot sample is itself uncertain: with heavy tails its intervals cover 85–92 % instead of
    95 %. So the error is measured again on the larger sample, which grows until the error is within the target.

    Args:
        rows: the rows of the window in ascending order of their marks, so that a prefix is a random sample.
        pilot: rows of the first sample.

    Raises:
        InvalidInput: fewer than two rows.
    """
    population = len(rows)
    size = min(population, max(2, pilot))
    for attempt in range(rounds):
        found = bootstrap_error(
            rows[:size], statistic, rng, confidence=target.group_confidence, population=population, **options
        )
        if found.error <= target.error or size >= population:
            return FunctionSample(size, found, found.error <= target.error)
        if attempt == rounds - 1:
            break
        size = min(population, max(math.ceil(found.size_for(target.error, population)), size + size * 2 // 5))
    return FunctionSample(size, found, False)
