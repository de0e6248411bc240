"""Data sets for tests of intervals; `least_hits` is the number of intervals that must contain the true value."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from edgewater.synopses.testing import least_hits

__all__ = ["LEFT_OUT", "each_of", "least_hits", "zoo"]

LEFT_OUT = {"uniform", "normal", "reversed", "constant"}
"""Data sets of the zoo that are left to `make test-all`, since the others are harder."""


def each_of(names: Iterable[str]) -> list[Any]:
    """Returns the parameters of a test of coverage over data sets."""
    return [pytest.param(name, marks=pytest.mark.full if name in LEFT_OUT else ()) for name in names]


def zoo(rng: np.random.Generator, n: int) -> dict[str, np.ndarray]:
    """Returns data sets of n values by name."""
    ranks = np.arange(1, 2000)
    zipf = ranks**-1.1 / (ranks**-1.1).sum()
    return {
        "uniform": rng.uniform(0, 1, n),
        "normal": rng.normal(-3, 2, n),
        "zipf": rng.choice(ranks, n, p=zipf).astype(float),
        "sorted": np.sort(rng.normal(0, 1, n)),
        "reversed": np.sort(rng.normal(0, 1, n))[::-1].copy(),
        "constant": np.full(n, 7.5),
        "duplicates": np.where(rng.random(n) < 0.9, 1.0, rng.normal(0, 1, n)),
    }
