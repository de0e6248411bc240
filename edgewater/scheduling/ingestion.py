"""When the next sweeping watermark of an input will be ingested, learnt from past epochs. Pure.

A *sweeping watermark* is the first watermark at or after a window's end: it lets the window fire and ends the epoch.
Its *delay* is its ingestion time minus the window's end. The Klink thesis (Eq. 3.2 to 3.10) takes it for normally
distributed; `normal_interval` is that form. Its Eq. 3.6 is the variance of a mean of past means, which shrinks with
their number, so that a "95 %" interval has 5 to 15 % of the delays. So `IngestionHistory` takes the shortest interval
that held the wanted share of recent delays, whatever their distribution, and corrects the share by the record of its
own hits (adaptive conformal inference, Gibbs and Candès 2021), which keeps it under drift as well.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgewater.model.errors import InvalidConfig

FloatArray = NDArray[np.float64]
Variance = Literal["predictive", "printed"]

MAX_DELAY_MS = 86_400_000.0
"""Longer delays count as a day: a clock that jumped must not move a mean by years."""
MIN_EPOCHS = 2
"""Without that many delays there is no interval."""
DEFAULT_EPOCHS = 400
STEP = 0.01
"""By how much a miss raises the working share; a hit lowers it so that hits and misses balance at the confidence."""
HALF_LIVES = 4
"""The weight of a delay halves so often over the length of the history."""
MAX_SHARE = 2.0
REACH = 5.0
"""By how many ranges of the delays the interval grows per unit of the working share above 1."""
_REFRESHES = 50
"""The interval is computed anew after a fiftieth of the history has been replaced: sorting is what costs."""


@dataclass(frozen=True, slots=True)
class DelayInterval:
    """Closed interval of delays, ms after a window's end."""

    earliest_ms: float
    latest_ms: float

    def contains(self, delay_ms: float) -> bool:
        return self.earliest_ms <= delay_ms <= self.latest_ms


def normal_interval(
    means_ms: Sequence[float], squares: Sequence[float], confidence: float, variance: Variance = "predictive"
) -> DelayInterval:
    """The thesis' interval of the next delay: normal, from the moments of past epochs.

    Args:
        means_ms: mean delay μ of each epoch (Eq. 3.3).
        squares: mean squared delay χ of each epoch (Eq. 3.4).
        variance: "printed" is Eq. 3.6, the variance of a mean of past means; "predictive" is mean(χ) - mean(μ)², that
            of the next delay.

    Raises:
        InvalidConfig: no epoch, or a confidence outside (0, 1).
    """
    if not 0 < confidence < 1:
        raise InvalidConfig("confidence", confidence, "a share between 0 and 1, both excluded")
    if not means_ms or len(means_ms) != len(squares):
        raise InvalidConfig("means_ms", len(means_ms), f"a mean for each of {len(squares)} epochs, and at least one")
    mean, square, count = math.fsum(means_ms) / len(means_ms), math.fsum(squares) / len(squares), len(means_ms)
    spread = square - mean**2
    if variance == "printed":
        # The products μ_i μ_j of independent epochs cancel against the squared mean.
        spread = max(0.0, square - math.fsum(m * m for m in means_ms) / count) / count
    half_ms = NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt(max(0.0, spread))
    return DelayInterval(mean - half_ms, mean + half_ms)


class IngestionHistory:
    """Delays of the sweeping watermarks of one input over the last epochs.

    Args:
        confidence: share f of ingestions that `interval` should contain, between 0 and 1.
        epochs: number m of epochs that are remembered.

    Attributes:
        hits, predicted: how many of the ingestions for which there was an interval fell into it.
    """

    __slots__ = (
        "_ascending", "_confidence", "_fresh", "_interval", "_mean", "_recent", "_share", "_tail_sums",
        "_tail_weights", "_weights", "hits", "predicted",
    )  # fmt: skip

    def __init__(self, confidence: float = 0.95, epochs: int = DEFAULT_EPOCHS) -> None:
        if not 0 < confidence < 1:
            raise InvalidConfig("confidence", confidence, "a share between 0 and 1, both excluded")
        if epochs < MIN_EPOCHS:
            raise InvalidConfig("epochs", epochs, f"at least {MIN_EPOCHS}")
        self._confidence = confidence
        self._share = confidence
        self._recent: deque[float] = deque(maxlen=epochs)
        self._weights: FloatArray = np.exp2(np.arange(1 - epochs, 1, dtype=np.float64) * (HALF_LIVES / epochs))
        self._fresh = 0
        self._interval: DelayInterval | None = None
        self._mean = 0.0
        self._ascending: list[float] = []
        self._tail_sums: list[float] = [0.0]
        self._tail_weights: list[float] = [0.0]
        self.hits = self.predicted = 0

    def __len__(self) -> int:
        return len(self._recent)

    @property
    def delays_ms(self) -> Sequence[float]:
        """The remembered delays, oldest first."""
        return tuple(self._recent)

    def observe(self, delay_ms: float) -> bool | None:
        """Adds the delay of an ingestion; whether the interval had it, None if there was none.

        NaN is ignored; a delay beyond a day counts as a day.
        """
        if math.isnan(delay_ms):
            return None
        delay_ms = min(max(delay_ms, -MAX_DELAY_MS), MAX_DELAY_MS)
        hit = None if self._interval is None else self._interval.contains(delay_ms)
        if hit is not None:
            self.predicted += 1
            self.hits += hit
            # Bounded, so that after delays that are all alike, or a clock gone mad, it is back in a few hundred epochs.
            self._share = min(max(self._share + STEP * (self._confidence - hit), 0.0), MAX_SHARE)
        self._recent.append(delay_ms)
        self._fresh += 1
        if self._fresh * _REFRESHES >= len(self._recent) and len(self._recent) >= MIN_EPOCHS:
            self._refresh()
        return hit

    @property
    def interval(self) -> DelayInterval | None:
        """Where the next delay is with the configured confidence; None before `MIN_EPOCHS` epochs."""
        return self._interval

    @property
    def mean_delay_ms(self) -> float:
        """The mean of the remembered delays, recent ones weighted more; 0 without a history."""
        return self._mean

    def expected_delay_ms(self, elapsed_ms: float) -> float:
        """The expected delay if nothing has been ingested until `elapsed_ms` after the window's end.

        Eq. 3.8 with the condition of Eq. 3.9 the right way round: ranges that are already past have probability zero.
        Never below `elapsed_ms`, and exactly that if all of the interval is past: any moment now. Without a history, 0.
        """
        if not self._ascending or elapsed_ms <= self._ascending[0]:
            return max(self._mean, elapsed_ms)
        at = bisect_right(self._ascending, elapsed_ms)
        weight = self._tail_weights[at]
        return self._tail_sums[at] / weight if weight > 0.0 else elapsed_ms

    def _refresh(self) -> None:
        self._fresh = 0
        delays = np.array(self._recent)
        order = np.argsort(delays, kind="stable")
        ascending = delays[order]
        weights = self._weights[-len(delays) :][order]
        first, last = _shortest(ascending, weights, self._share)
        # A share above 1 asks for more than all delays so far: under drift the next one lies beyond them.
        reach = max(0.0, self._share - 1.0) * REACH * (ascending[-1] - ascending[0])
        self._interval = DelayInterval(float(ascending[first] - reach), float(ascending[last] + reach))
        inside, weight = ascending[first : last + 1], weights[first : last + 1]
        self._ascending = inside.tolist()
        self._tail_sums = [*np.cumsum((inside * weight)[::-1])[::-1].tolist(), 0.0]
        self._tail_weights = [*np.cumsum(weight[::-1])[::-1].tolist(), 0.0]
        self._mean = self._tail_sums[0] / self._tail_weights[0]


def _shortest(ascending: FloatArray, weights: FloatArray, share: float) -> tuple[int, int]:
    """First and last index of the shortest run of values with at least `share` of the weight."""
    before = np.concatenate(([0.0], np.cumsum(weights)))
    # The next delay may lie between any two of n, so n + 1 places share the weight.
    need = share * (before[-1] + weights.mean())
    if need >= before[-1]:
        return 0, len(ascending) - 1
    starts = np.arange(min(int(np.searchsorted(before, before[-1] - need, side="right")), len(ascending)))
    ends = np.minimum(np.searchsorted(before, before[starts] + need, side="left") - 1, len(ascending) - 1)
    ends = np.maximum(ends, starts)
    best = int(np.argmin(ascending[ends] - ascending[starts]))
    return int(starts[best]), int(ends[best])
