"""How many of n intervals have to hold the truth.

The tests draw with fixed seeds, so they pass or fail for good. The bound says what failing would mean: if
intervals covered exactly as often as they claim, one in `ALARM` of all seeds would fail.
"""

from __future__ import annotations

import math

import numpy as np

ALARM = 100_000


def least_hits(trials: int, confidence: float) -> int:
    """The greatest h with P(Binomial(trials, confidence) < h) < 1/ALARM."""
    below = 0.0
    for hits in range(trials + 1):
        below += math.exp(
            math.lgamma(trials + 1)
            - math.lgamma(hits + 1)
            - math.lgamma(trials - hits + 1)
            + hits * math.log(confidence)
            + (trials - hits) * math.log1p(-confidence)
        )
        if below >= 1 / ALARM:
            return hits
    return trials


def zoo(rng: np.random.Generator, n: int) -> dict[str, np.ndarray]:
    """Data sets of n values whose means and ranks samples estimate."""
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
