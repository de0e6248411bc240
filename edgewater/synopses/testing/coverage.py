"""How many of n intervals have to hold the truth.

Tests draw with fixed seeds, so they pass or fail for good. The bound says what failing would mean: if
intervals covered exactly as often as they claim, one in `ALARM` of all seeds would fail.
"""

from __future__ import annotations

import math

ALARM = 100_000


def least_hits(trials: int, confidence: float) -> int:
    """The greatest h with P(Binomial(trials, confidence) < h) < 1/ALARM."""
    if confidence >= 1:
        return trials
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
