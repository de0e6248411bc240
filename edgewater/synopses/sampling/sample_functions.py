"""Functions of a whole window's rows that no synopsis adds up: k-means, exact quantiles, a user's own.

Edges ship rows (`row_sample`), all or a sample of them, and the center runs the function on what came, when it is
asked. How far a sample's value may be off is found by running it on resamples
(`center.early_trigger.function_estimate`), unless the function knows better. A user's own is a `SampleFunction` and
`sample_function(...)`, brought by a package as other functions are (`plugins`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from edgewater.synopses.base import FloatArray
from edgewater.synopses.intervals import normal_quantile
from edgewater.synopses.registry import MAX_SAMPLE_SIZE, Function, Parameter, Parameters, register_function
from edgewater.synopses.sampling.row_sample import DEFAULT_LIMIT, MAX_COLUMNS, RowSampleStack

Interval = tuple[FloatArray, FloatArray, FloatArray, float]
"""Value, lower and upper bounds (float64, one per name), and the relative error that holds with the confidence."""


class SampleFunction:
    """A function of rows. Subclasses say how it is computed and what its numbers are called.

    It has to be one of the rows as a set: a sample of n of them must give about what all give. What a sum or a count of
    all rows would be is none; `sum` and `count` are.
    """

    columns: tuple[int, int] = (1, MAX_COLUMNS)
    """How many columns a row may have, at least and at most."""

    def names(self, parameters: Mapping[str, Any], columns: int) -> Sequence[str]:
        """What its numbers are called, in order; one without a name: it is a single number."""
        return ("",)

    def fit(self, rows: FloatArray, parameters: Mapping[str, Any], start: FloatArray | None) -> FloatArray:
        """The function.

        Args:
            rows: float64 (n, columns), at least `least_rows` of them.
            start: the value on the rows that these were resampled from, for functions that search from somewhere, so
                that numbers of both mean the same; None: there is none. The same rows give the same value.

        Returns:
            float64, one per name.
        """
        raise NotImplementedError

    def distance(self, value: FloatArray, reference: FloatArray, parameters: Mapping[str, Any]) -> float:
        """How far a value is from another, relative to that: here, of the number that is furthest off."""
        gap, size = np.abs(value - reference), np.abs(reference)
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(np.where(gap == 0, 0.0, gap / size).max(initial=0.0))

    def least_rows(self, parameters: Mapping[str, Any]) -> int:
        """Fewer rows have no value."""
        return 1

    def interval(
        self, rows: FloatArray, parameters: Mapping[str, Any], confidence: float, part: float
    ) -> Interval | None:
        """The value and how far it may be off, where there is a formula. None: by resampling.

        Args:
            part: of all rows, the part that these are.
        """
        return None


class KMeans(SampleFunction):
    """Lloyd's algorithm from seeds that lie apart (k-means++, Arthur and Vassilvitskii 2007), the best of a few runs.

    Its numbers are the centroids, ordered by their columns, and the inertia: the mean squared distance to the nearest.
    """

    RUNS, ROUNDS = 4, 25

    def names(self, parameters: Mapping[str, Any], columns: int) -> Sequence[str]:
        places = [f"centroids[{i}][{j}]" for i in range(parameters["k"]) for j in range(columns)]
        return [*places, "inertia"]

    def least_rows(self, parameters: Mapping[str, Any]) -> int:
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
        """The largest displacement of a centroid, as a part of its distance from the origin; or the inertia's error."""
        k = int(parameters["k"])
        at, held = (x[:-1].reshape(k, -1) for x in (value, reference))
        gaps = np.append(np.linalg.norm(at - held, axis=1), abs(value[-1] - reference[-1]))
        sizes = np.append(np.linalg.norm(held, axis=1), abs(reference[-1]))
        return super().distance(sizes + gaps, sizes, parameters)


def _seeds(rows: FloatArray, k: int, run: int) -> FloatArray:
    """k rows, each drawn with its squared distance to those before as weight."""
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
    # Around their middle: far from the origin, squares have no digits left for what rows differ by.
    middle = rows.mean(axis=0)
    rows, centroids = rows - middle, start - middle
    for _ in range(rounds):
        # |x - c|² less |x|², which is the same for all c.
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
    """The value at rank q: of all rows exactly, of a sample with bounds that hold for any distribution.

    The bounds are values of the sample: how many of n lie below the true one is binomial, so the ranks nq ± z√(nq(1-q))
    hold it (David and Nagaraja, Order Statistics, 7.1), drawn nearer by what the sample holds of the whole.
    """

    columns = (1, 1)

    def least_rows(self, parameters: Mapping[str, Any]) -> int:
        return 1

    def fit(self, rows: FloatArray, parameters: Mapping[str, Any], start: FloatArray | None) -> FloatArray:
        return np.asarray(np.quantile(rows[:, 0], [parameters["q"]], method="inverted_cdf"))

    def interval(
        self, rows: FloatArray, parameters: Mapping[str, Any], confidence: float, part: float
    ) -> Interval | None:
        value, q, n = self.fit(rows, parameters, None), float(parameters["q"]), len(rows)
        if part >= 1:
            return value, value, value, 0.0
        # Half a rank on each side for the continuity that ranks do not have, one for the ranks' own.
        width = normal_quantile(confidence) * math.sqrt(n * q * (1 - q) * (1 - part)) + 1
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
    """What a query may name: `function` of rows of one or several columns.

    Args:
        parameters: its own; besides, each takes `limit`, the most rows of a group that are held.
    """

    def make(given: Parameters, data_type: pa.DataType | None) -> RowSampleStack:
        return RowSampleStack(columns=getattr(data_type, "list_size", 1), limit=dict(given)["limit"])

    own = {**(parameters or {}), "limit": Parameter.whole(limit, 2, MAX_SAMPLE_SIZE)}
    return Function(name, make, argument="rows", parameters=own, sample=function)


register_function(sample_function("kmeans", KMeans(), {"k": Parameter.whole(4, 1, 256)}))
register_function(
    sample_function("exact_quantile", ExactQuantile(), {"q": Parameter.number(0.5, 0, 1, "a rank from 0 to 1")})
)
