"""Functions of a window's rows that have no mergeable state: k-means, exact quantiles, third-party functions.

Edges ship rows (`row_sample`), all or a sample of them, and the center evaluates the function on the rows of a query's
window on demand. The error of a sample's value is estimated by resampling (`center.early.function_answers`),
unless the function has a formula (`SampleFunction.interval`). A third-party function is a `SampleFunction` subclass and
`sample_function(...)`, which a plugin provides (`plugins`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from edgewater.synopses.base import FloatArray, Interval, SampleFunction
from edgewater.synopses.hashing import DEFAULT_SEED
from edgewater.synopses.intervals import normal_quantile
from edgewater.synopses.registry import MAX_SAMPLE_SIZE, Function, Parameter, Parameters, register_function
from edgewater.synopses.sampling.row_sample import DEFAULT_LIMIT, RowSampleStack


class KMeans(SampleFunction):
    """Lloyd's algorithm with k-means++ seeds (Arthur and Vassilvitskii 2007); the best of a few runs.

    Its numbers are the centroids, ordered by their columns, and the inertia: the mean squared distance of a row to the
    nearest centroid.
    """

    RUNS, ROUNDS = 4, 25

    def names(self, parameters: Mapping[str, Any], columns: int) -> Sequence[str]:
        places = [f"centroids[{i}][{j}]" for i in range(parameters["k"]) for j in range(columns)]
        return [*places, "inertia"]

    def min_rows(self, parameters: Mapping[str, Any]) -> int:
        return int(parameters["k"])

    def fit(self, rows: FloatArray, parameters: Mapping[str, Any], start: FloatArray | None) -> FloatArray:
        k = int(parameters["k"])
        if start is not None:
            centroids, inertia = _lloyd(rows, start[:-1].reshape(k, -1), self.ROUNDS)
        else:
            runs = [_lloyd(rows, _seeds(rows, k, run), self.ROUNDS) for run in range(self.RUNS)]
            centroids, inertia = min(runs, key=lambda run: run[1])
            centroids = centroids[np.lexsort(centroids.T[::-1])]
        return np.append(centroids.reshape(-1), inertia)

    def distance(self, value: FloatArray, reference: FloatArray, parameters: Mapping[str, Any]) -> float:
        """Returns the largest displacement of a centroid relative to its distance from the origin, or the inertia's
        error."""
        k = int(parameters["k"])
        at, held = (x[:-1].reshape(k, -1) for x in (value, reference))
        gaps = np.append(np.linalg.norm(at - held, axis=1), abs(value[-1] - reference[-1]))
        sizes = np.append(np.linalg.norm(held, axis=1), abs(reference[-1]))
        return super().distance(sizes + gaps, sizes, parameters)


def _seeds(rows: FloatArray, k: int, run: int) -> FloatArray:
    """Returns k rows. Each is chosen with its squared distance to the chosen rows as weight."""
    rng = np.random.default_rng(run)
    seeds = rows[rng.integers(0, len(rows), 1)]
    nearest = ((rows - seeds[0]) ** 2).sum(axis=1)
    for _ in range(1, k):
        total = np.cumsum(nearest)
        at = min(int(np.searchsorted(total, rng.random() * total[-1], side="right")), len(rows) - 1)
        seeds = np.vstack([seeds, rows[at]])
        nearest = np.minimum(nearest, ((rows - rows[at]) ** 2).sum(axis=1))
    return np.asarray(seeds)


def _lloyd(rows: FloatArray, start: FloatArray, rounds: int) -> tuple[FloatArray, float]:
    # Centered: far from the origin, the squares would lose the digits in which rows differ.
    middle = rows.mean(axis=0)
    rows, centroids = rows - middle, start - middle
    for _ in range(rounds):
        # |x - c|² without |x|², which is equal for all c.
        nearest = ((centroids**2).sum(axis=1) - 2 * rows @ centroids.T).argmin(axis=1)
        count = np.bincount(nearest, minlength=len(centroids))[:, None]
        total = np.stack([np.bincount(nearest, column, len(centroids)) for column in rows.T], axis=1)
        moved = np.where(count > 0, total / np.maximum(count, 1), centroids)
        if np.array_equal(moved, centroids):
            break
        centroids = moved
    squares = np.stack([((rows - c) ** 2).sum(axis=1) for c in centroids], axis=1)
    return centroids + middle, float(squares.min(axis=1).mean())


class ExactQuantile(SampleFunction):
    """The value at rank q: exact for all rows, with distribution-free bounds for a sample.

    The bounds are values of the sample. The number of the n values below the true quantile is binomial, so the values
    at the ranks nq ± z√(nq(1-q)) bound it (David and Nagaraja, Order Statistics, 7.1). A finite population correction
    narrows the bounds.
    """

    columns = (1, 1)

    def fit(self, rows: FloatArray, parameters: Mapping[str, Any], start: FloatArray | None) -> FloatArray:
        return np.asarray(np.quantile(rows[:, 0], [parameters["q"]], method="inverted_cdf"))

    def interval(
        self, rows: FloatArray, parameters: Mapping[str, Any], confidence: float, fraction: float
    ) -> Interval | None:
        value, q, n = self.fit(rows, parameters, None), float(parameters["q"]), len(rows)
        if fraction >= 1:
            return value, value, value, 0.0
        # + 1 rank: half a rank per side as continuity correction, and rounding.
        width = normal_quantile(confidence) * math.sqrt(n * q * (1 - q) * (1 - fraction)) + 1
        low, high = math.floor(n * q - width), math.ceil(n * q + width)
        ordered = np.sort(rows[:, 0])
        lower = ordered[low : low + 1] if low >= 0 else np.array([-math.inf])
        upper = ordered[high : high + 1] if high < n else np.array([math.inf])
        with np.errstate(divide="ignore", invalid="ignore"):
            error = float(np.fmax(value - lower, upper - value)[0] / abs(value[0])) if lower < upper else 0.0
        return value, lower, upper, error


def sample_function(
    name: str, function: SampleFunction, parameters: Mapping[str, Parameter] | None = None, limit: int = DEFAULT_LIMIT
) -> Function:
    """Returns the query function that evaluates `function` on rows of one or several columns.

    Args:
        parameters: the function's own parameters; `limit`, the maximum number of rows of a group, is added.
        limit: the default of `limit`.
    """

    def make(values: Parameters, data_type: pa.DataType | None, seed: int = DEFAULT_SEED) -> RowSampleStack:
        return RowSampleStack(columns=getattr(data_type, "list_size", 1), limit=dict(values)["limit"], seed=seed)

    own = {**(parameters or {}), "limit": Parameter.whole(limit, 2, MAX_SAMPLE_SIZE)}
    return Function(name, make, argument="rows", parameters=own, sample=function, seeded=True)


register_function(sample_function("kmeans", KMeans(), {"k": Parameter.whole(4, 1, 256)}))
register_function(
    sample_function("exact_quantile", ExactQuantile(), {"q": Parameter.number(0.5, 0, 1, "a rank from 0 to 1")})
)
