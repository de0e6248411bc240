"""Populations of values: well-behaved, skewed and sparse populations."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edgewater.synopses import FloatArray

Maker = Callable[[np.random.Generator, tuple[int, ...]], FloatArray]


def _mostly_zero(share: float) -> Maker:
    return lambda rng, shape: np.where(rng.random(shape) < share, 0.0, rng.exponential(1.0, shape))


def _one_outlier(rng: np.random.Generator, shape: tuple[int, ...]) -> FloatArray:
    """Returns rows of values. The first value of each row is 10,000, and the others are uniform between 0 and 1."""
    values = rng.uniform(0, 1, shape)
    values[..., 0] = 10_000.0
    return values


NUMBERS: dict[str, Maker] = {
    "normal": lambda rng, shape: rng.normal(0, 1, shape),
    "uniform": lambda rng, shape: rng.uniform(0, 1, shape),
    "exponential": lambda rng, shape: rng.exponential(1, shape),
    "lognormal σ=1": lambda rng, shape: rng.lognormal(0, 1, shape),
    "lognormal σ=2": lambda rng, shape: rng.lognormal(0, 2, shape),
    "Pareto 2.1": lambda rng, shape: rng.pareto(2.1, shape) + 1,
    "95 % zeros": _mostly_zero(0.95),
    "99.5 % zeros": _mostly_zero(0.995),
    "one outlier": _one_outlier,
    "all equal": lambda rng, shape: np.full(shape, 7.1),
}

EDGES = "three edges"


def three_edges(rng: np.random.Generator, shape: tuple[int, ...]) -> list[FloatArray]:
    """Returns the values of three edges with as many records each, but different data: positive, skewed, and mostly
    0.
    """
    rows, n = shape
    parts = (rows, n // 3)
    return [
        NUMBERS["normal"](rng, parts) + 10,
        NUMBERS["lognormal σ=2"](rng, parts),
        -3 * NUMBERS["99.5 % zeros"](rng, parts),
    ]


def zipf(rng: np.random.Generator, shape: tuple[int, ...], items: int = 2000) -> np.ndarray:
    """Returns items, int64, of Zipf's distribution with exponent 1.1."""
    ranks = np.arange(1, items + 1)
    return rng.choice(ranks, shape, p=ranks**-1.1 / (ranks**-1.1).sum())
