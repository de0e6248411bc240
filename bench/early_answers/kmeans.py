"""k-means on a sample whose size comes from Eq. 4 for a mean, and from the bootstrap of its own error."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bench.early_answers.bootstrap import sample_for_function
from edgewater.arrivals.targets import AccuracyTarget
from edgewater.synopses import FloatArray
from sim.early_answers.baselines import mean_size

CLUSTERS = 4
POPULATION = 15_000
CENTRES = np.array([[2.0, 3.0], [8.0, 3.5], [3.5, 9.0], [10.0, 10.0]])
SPREAD = 1.2


def lloyd(rows: FloatArray, start: FloatArray, rounds: int = 12) -> FloatArray:
    """Returns the centroids after some rounds, from a fixed start so that clusters keep their order."""
    centres = start.copy()
    for _ in range(rounds):
        nearest = ((rows[:, None] - centres) ** 2).sum(axis=2).argmin(axis=1)
        count = np.bincount(nearest, minlength=len(centres))[:, None]
        total = np.stack([np.bincount(nearest, weights=rows[:, i], minlength=len(centres)) for i in (0, 1)], axis=1)
        centres = np.where(count > 0, total / np.maximum(count, 1), centres)
    return centres


def inertia(rows: FloatArray, centres: FloatArray) -> float:
    return float(((rows[:, None] - centres) ** 2).sum(axis=2).min(axis=1).mean())


def fitted(rows: FloatArray) -> FloatArray:
    """Returns the centroids and, in the last row, the inertia."""
    centres = lloyd(rows, CENTRES)
    return np.vstack([centres, [inertia(rows, centres), 0.0]])


def worst_part(value: FloatArray, reference: FloatArray) -> float:
    """Returns the larger of the largest relative displacement of a centroid and the relative error of the inertia."""
    norm = np.linalg.norm(reference, axis=1)
    return float((np.linalg.norm(value - reference, axis=1) / norm).max())


def kmeans_rows(windows: int) -> list[dict[str, Any]]:
    target = AccuracyTarget(0.05, 0.95)
    rows: dict[str, list[tuple[float, float, float]]] = {"Eq. 4 on the mean": [], "bootstrap": []}
    for index in range(windows):
        rng = np.random.default_rng([11, index])
        events = CENTRES[rng.integers(0, CLUSTERS, POPULATION)] + rng.normal(0, SPREAD, (POPULATION, 2))
        truth = fitted(events)
        variation = events[:, 0].std() / events[:, 0].mean()
        by_mean = math.ceil(float(mean_size(variation, POPULATION, target.error, target.confidence)))
        chosen = sample_for_function(events, fitted, rng, target, distance=worst_part)
        for name, size in (("Eq. 4 on the mean", by_mean), ("bootstrap", chosen.size)):
            value = fitted(events[:size])
            rows[name].append((
                size / POPULATION, worst_part(value[:-1], truth[:-1]), worst_part(value[-1:], truth[-1:])
            ))  # fmt: skip
    return [
        {"size": name, "windows": windows, "sampling_rate": float(np.mean([r[0] for r in found])),
         "centroid_coverage": float(np.mean([r[1] <= target.error for r in found])),
         "inertia_coverage": float(np.mean([r[2] <= target.error for r in found])),
         "both_coverage": float(np.mean([max(r[1:]) <= target.error for r in found]))}
        for name, found in rows.items()
    ]  # fmt: skip
