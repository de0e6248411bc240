"""The distribution of delays, from events of which only the punctual ones have been seen.

An event of age τ is known only if its delay is at most τ: delays are *right-truncated*. The plain
histogram is biased towards short ones, and most at the moment that matters, just after the delays have
grown. The product-limit estimator for truncated data (Lynden-Bell 1971; Woodroofe 1985) is not: it
estimates, for each delay d, the chance that an event with a delay of at most d has one of exactly d,

    r(d) = #{delay = d} / #{delay ≤ d ≤ age},      F(d) = Π_{s > d} (1 - r(s)).

It takes the place of the mean in Eq. 7 (corrections.md, Aion 4). In slots of time it is the chain
ladder of actuaries, whose development factors are 1/(1 - r).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgewater.errors import InvalidInput
from edgewater.synopses import FloatArray


@dataclass(frozen=True, slots=True)
class DelayDistribution:
    """A step function F with jumps at `delays` (ascending).

    Attributes:
        cumulative: F at each delay; the last is 1. What is longer than the longest one seen is not known.
    """

    delays: FloatArray
    cumulative: FloatArray

    def at(self, delay: FloatArray) -> FloatArray:
        """F(delay), elementwise. 0 below the shortest delay seen."""
        steps = np.searchsorted(self.delays, np.asarray(delay, float), side="right")
        return np.asarray(np.concatenate([[0.0], self.cumulative])[steps])

    def arrived_share(self, residual_from: float, residual_to: float, points: int = 64) -> float:
        """The mean of F over residual times: the share of a sub-stream that has arrived by its deadline."""
        width = (residual_to - residual_from) / points
        middle = np.asarray(residual_from + width * (np.arange(points) + 0.5), np.float64)
        return float(self.at(middle).mean())


def lynden_bell(delays: FloatArray, ages: FloatArray, weights: FloatArray | None = None) -> DelayDistribution:
    """The product-limit estimate of F from arrived events.

    Args:
        delays: of the events seen, ≥ 0.
        ages: how old each event is now, same shape; delay ≤ age.
        weights: for instance 2^(-age/half-life), to forget; default 1.

    Raises:
        InvalidInput: no events, or one that came before its own age allows.
    """
    delays, ages = np.asarray(delays, float), np.asarray(ages, float)
    if delays.ndim != 1 or delays.shape != ages.shape or not len(delays):
        raise InvalidInput("delays", delays.shape, "as many delays as ages, at least one")
    if not ((delays >= 0) & (delays <= ages)).all():
        raise InvalidInput("delays", float(delays[(delays < 0) | (delays > ages)][0]), "0 ≤ delay ≤ age")
    weights = np.ones(len(delays)) if weights is None else np.asarray(weights, float)
    values, inverse = np.unique(delays, return_inverse=True)
    jumps = np.bincount(inverse, weights=weights)
    # At risk at d: delay ≤ d, without those too young to have shown it, age < d (they have delay ≤ age < d).
    by_age = np.argsort(ages)
    younger = np.concatenate([[0.0], np.cumsum(weights[by_age])])
    at_risk = np.cumsum(jumps) - younger[np.searchsorted(ages[by_age], values, side="left")]
    with np.errstate(divide="ignore", invalid="ignore"):
        hazard = np.where(at_risk > 0, jumps / at_risk, 0.0)
    return DelayDistribution(values, distribution(hazard))


def distribution(hazard: FloatArray) -> FloatArray:
    """F at each step from reverse hazards along the last axis: F_l = Π_{s > l} (1 - r_s). The last is 1."""
    keep = np.ones_like(hazard)
    keep[..., :-1] = 1 - np.minimum(hazard[..., 1:], 1.0)
    return np.asarray(np.cumprod(keep[..., ::-1], axis=-1)[..., ::-1])
