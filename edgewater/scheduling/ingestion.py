"""When the next sweeping watermark of an input will be ingested, learnt from past epochs. Pure.

A *sweeping watermark* is the first watermark at or after a window's end: it lets the window fire and ends the epoch.
Its *delay* is its ingestion time minus the window's end. The Klink thesis (Eq. 3.2 to 3.10) assumes a normal
distribution. Its Eq. 3.6 is the variance of a mean of past means. It shrinks with their number, so that a "95 %"
interval has 5 to 15 % of the delays.

So `IngestionHistory` uses the shortest interval that contained the required share of recent delays, whatever their
distribution. It corrects this share by its past hits (adaptive conformal inference, Gibbs and Candès 2021), which also
works under drift.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgewater.base.errors import InvalidConfig

FloatArray = NDArray[np.float64]

MAX_DELAY_MS = 86_400_000.0
"""Longer delays count as a day: a clock that jumped must not change a mean by years."""
MIN_EPOCHS = 2
"""With fewer delays there is no interval."""
DEFAULT_EPOCHS = 400
STEP = 0.01
"""How much a miss raises the working share. A hit lowers it so that hits and misses balance at the confidence."""
HALF_LIVES = 4
"""How often the weight of a delay halves over the length of the history."""
MAX_SHARE = 2.0  # limit: width of the interval
REACH = 5.0  # limit: width of the interval
"""By how many ranges of the delays the interval grows per unit of the working share above 1."""
_REFRESHES = 50  # limit: time of sorting
"""The interval is computed anew after a fiftieth of the history has been replaced, because sorting takes most of the
time."""


@dataclass(frozen=True, slots=True)
class DelayInterval:
    """Closed interval of delays, ms after a window's end."""

    earliest_ms: float
    latest_ms: float

    def contains(self, delay_ms: float) -> bool:
        return self.earliest_ms <= delay_ms <= self.latest_ms


class IngestionHistory:
    """Delays of the sweeping watermarks of one input over the last epochs.

    Args:
        confidence: share f of ingestions that `interval` should contain, between 0 and 1.
        epochs: number m of epochs that are remembered.

    Attributes:
        predicted: number of ingestions for which there was an interval.
        hits: how many of these were in their interval.
    """

    __slots__ = (
        "_ascending",
        "_confidence",
        "_fresh",
        "_interval",
        "_mean",
        "_recent",
        "_share",
        "_tail_sums",
        "_tail_weights",
        "_weights",
        "hits",
        "predicted",
    )

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

    def observe(self, delay_ms: float) -> bool | None:
        """Adds the delay of an ingestion. Returns whether the interval contained it; None: there was no interval.

        NaN is ignored; a delay beyond a day counts as a day.
        """
        if math.isnan(delay_ms):
            return None
        delay_ms = min(max(delay_ms, -MAX_DELAY_MS), MAX_DELAY_MS)
        hit = None if self._interval is None else self._interval.contains(delay_ms)
        if hit is not None:
            self.predicted += 1
            self.hits += hit
            # Bounded, so that it recovers within a few hundred epochs after equal delays, or after a faulty clock.
            self._share = min(max(self._share + STEP * (self._confidence - hit), 0.0), MAX_SHARE)
        self._recent.append(delay_ms)
        self._fresh += 1
        if self._fresh * _REFRESHES >= len(self._recent) and len(self._recent) >= MIN_EPOCHS:
            self._refresh()
        return hit

    @property
    def interval(self) -> DelayInterval | None:
        """The interval of the next delay at the configured confidence; None before `MIN_EPOCHS` epochs."""
        return self._interval

    @property
    def mean_delay_ms(self) -> float:
        """The mean of the remembered delays. Recent delays have more weight; 0 without a history."""
        return self._mean

    def expected_delay_ms(self, elapsed_ms: float) -> float:
        """Returns the expected delay if nothing has been ingested until `elapsed_ms` after the window's end.

        Eq. 3.8 with the corrected condition of Eq. 3.9: ranges that are already past have probability zero. It is never
        below `elapsed_ms`. If the whole interval is past, it is `elapsed_ms`: the watermark is expected at any moment.
        Without a history, it is 0.
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
        # A share above 1 needs more than all past delays: under drift the next delay is beyond them.
        reach = max(0.0, self._share - 1.0) * REACH * (ascending[-1] - ascending[0])
        self._interval = DelayInterval(float(ascending[first] - reach), float(ascending[last] + reach))
        inside, weight = ascending[first : last + 1], weights[first : last + 1]
        self._ascending = inside.tolist()
        self._tail_sums = [*np.cumsum((inside * weight)[::-1])[::-1].tolist(), 0.0]
        self._tail_weights = [*np.cumsum(weight[::-1])[::-1].tolist(), 0.0]
        self._mean = self._tail_sums[0] / self._tail_weights[0]


def _shortest(ascending: FloatArray, weights: FloatArray, share: float) -> tuple[int, int]:
    """Returns first and last index of the shortest run of values with at least `share` of the weight."""
    before = np.concatenate(([0.0], np.cumsum(weights)))
    # The next delay may be between any two of n delays, so n + 1 places share the weight.
    need = share * (before[-1] + weights.mean())
    if need >= before[-1]:
        return 0, len(ascending) - 1
    starts = np.arange(min(int(np.searchsorted(before, before[-1] - need, side="right")), len(ascending)))
    ends = np.minimum(np.searchsorted(before, before[starts] + need, side="left") - 1, len(ascending) - 1)
    ends = np.maximum(ends, starts)
    best = int(np.argmin(ascending[ends] - ascending[starts]))
    return int(starts[best]), int(ends[best])
