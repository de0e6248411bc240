"""Published algorithms for answering windows, as baselines.

Each uses the events that have arrived before its answer.

`WaitForAll` waits for all events. `KSlack` waits for the slack of Mutschler and Philippsen (2013), the "Default" in
Aion's figures. `AqKSlack` follows Ji et al. (2015) in the form that Aion compares with: slack and sample size from the
error. `AionAsPublished` is Algorithms 1 and 2 with Eq. 4, 7 and 8 as published, δ = 1 - confidence. `AionMinus`
combines its sample with K-Slack's wait.

Eq. 3 of the Aion paper has a misprint: σ/√n belongs outside the root, r = z·√(1 - n/N)·(σ/√n)/μ. Eq. 4 is the solution
of the correct form. Confidence is 1 - δ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from edgewater.arrivals.sample_size import finite_population_size
from edgewater.arrivals.targets import AccuracyTarget, MeasureKind, check_confidence, check_error
from edgewater.synopses import BoolArray, FloatArray, IntArray, normal_quantile
from sim.early_answers.engine import true_values

HISTORY_WINDOWS = 10
"""m of Eq. 1, in windows: the m windows i - m … i - 1."""


def mean_size(variation: Any, population: Any, error: float, confidence: float) -> FloatArray:
    """Returns the number of values to sample for a mean, or for a sum over a known number of events (Eq. 4, 5).

    Args:
        variation: σ/|μ| of the values; infinite if the mean is zero. The result is then N.
        population: N, the number of events of the window.
        error: relative error.
    """
    z = normal_quantile(check_confidence(confidence, "confidence"))
    return finite_population_size((z * np.asarray(variation, float) / check_error(error, "error")) ** 2, population)


@dataclass(frozen=True, slots=True)
class WindowArrivals:
    """All events of a window. Times in ms; arrays have one value per event, in any order."""

    start_ms: float
    end_ms: float
    event_ms: FloatArray
    arrival_ms: FloatArray
    value: FloatArray
    group: IntArray
    groups: int
    mark: FloatArray

    @property
    def delay_ms(self) -> FloatArray:
        return self.arrival_ms - self.event_ms


@dataclass(frozen=True, slots=True)
class BaselineAnswer:
    """A baseline's answer to a window.

    Attributes:
        fire_ms: when the window was answered.
        processed: mask of the events that the operator processed.
        arrived: mask of the events that had arrived.
        estimate: value per group.
    """

    fire_ms: float
    processed: BoolArray
    arrived: BoolArray
    estimate: FloatArray


class Baseline(Protocol):
    def close(self, window: WindowArrivals) -> BaselineAnswer:
        """Answers the next window. Called in order of the windows."""
        ...


def measured(measure: MeasureKind, window: WindowArrivals, used: BoolArray, scale: FloatArray | float) -> FloatArray:
    """Returns the measure over the used events per group; totals are multiplied by `scale`."""
    values = true_values(window.group[used], window.value[used], measure, window.groups)
    return np.asarray(values * scale) if measure in ("count", "sum") else values


class WaitForAll:
    """Waits until all events have arrived, with perfect knowledge."""

    def __init__(self, target: AccuracyTarget, measure: MeasureKind) -> None:
        self.measure = measure

    def close(self, window: WindowArrivals) -> BaselineAnswer:
        every = np.ones(len(window.value), bool)
        fire = float(window.arrival_ms.max(initial=window.end_ms))
        return BaselineAnswer(fire, every, every, measured(self.measure, window, every, 1.0))


class Slack:
    """K-Slack's K: the largest delay observed so far."""

    def __init__(self) -> None:
        self.largest_ms = 0.0

    def fire_ms(self, window: WindowArrivals) -> float:
        order = np.argsort(window.arrival_ms)
        arrival = window.arrival_ms[order]
        largest = np.maximum.accumulate(np.maximum(window.delay_ms[order], self.largest_ms))
        fire = window.end_ms
        while True:  # events that arrive during the wait may extend it
            seen = int(np.searchsorted(arrival, fire, side="right"))
            slack = float(largest[seen - 1]) if seen else self.largest_ms
            if window.end_ms + slack <= fire:
                break
            fire = window.end_ms + slack
        self.largest_ms = max(self.largest_ms, float(window.delay_ms.max(initial=0.0)))
        return fire


class KSlack:
    """Processes all events; answers at the window's end plus the largest delay observed so far."""

    def __init__(self, target: AccuracyTarget, measure: MeasureKind) -> None:
        self.measure, self._slack = measure, Slack()

    def close(self, window: WindowArrivals) -> BaselineAnswer:
        fire = self._slack.fire_ms(window)
        there = window.arrival_ms <= fire
        return BaselineAnswer(fire, there, there, measured(self.measure, window, there, 1.0))


class WindowHistory:
    """Means over the last windows, from which the sampling baselines compute sample sizes."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, float, float]] = []

    def learn(self, size: float, values: FloatArray) -> None:
        if len(values) > 1:
            self._rows = [*self._rows, (size, float(values.mean()), float(values.var(ddof=1)))][-HISTORY_WINDOWS:]

    @property
    def empty(self) -> bool:
        return not self._rows

    @property
    def size(self) -> float:
        return float(np.mean([r[0] for r in self._rows]))

    @property
    def variation(self) -> float:
        """σ/|μ|; infinite where the mean is zero."""
        mean = float(np.mean([r[1] for r in self._rows]))
        return float(np.sqrt(np.mean([r[2] for r in self._rows])) / abs(mean)) if mean else float("inf")


class AqKSlack:
    """Divides the error equally between late events and sampling, by Chebyshev's inequality.

    The slack is the shortest one with which enough past windows would have missed at most half of the error.
    """

    def __init__(self, target: AccuracyTarget, measure: MeasureKind) -> None:
        self.target, self.measure = target, measure
        self._needed_ms: list[float] = []
        self._past = WindowHistory()

    def close(self, window: WindowArrivals) -> BaselineAnswer:
        half, late = self.target.error / 2, np.maximum(window.arrival_ms - window.end_ms, 0.0)
        if self._needed_ms:
            fire = window.end_ms + float(np.quantile(self._needed_ms, self.target.confidence, method="higher"))
        else:
            fire = float(window.arrival_ms.max(initial=window.end_ms))
        there = window.arrival_ms <= fire
        rate = 1.0
        if not self._past.empty:
            endless = self._past.variation**2 / ((1 - self.target.confidence) * half**2)
            rate = float(finite_population_size(endless, self._past.size)) / self._past.size
        used = there & (window.mark < rate)
        if len(late):
            self._needed_ms = [*self._needed_ms, float(np.quantile(late, 1 - half))][-20 * HISTORY_WINDOWS :]
        self._past.learn(float(there.sum()), window.value[used])
        count = _by_group(window, used)
        scale = _by_group(window, there) / np.maximum(count, 1.0)
        return BaselineAnswer(fire, used, there, measured(self.measure, window, used, scale))


class AionMinus:
    """Aion's sampling rate n/N of Eq. 4 with K-Slack's wait."""

    def __init__(self, target: AccuracyTarget, measure: MeasureKind) -> None:
        self.target, self.measure, self._slack, self._past = target, measure, Slack(), WindowHistory()

    def close(self, window: WindowArrivals) -> BaselineAnswer:
        fire = self._slack.fire_ms(window)
        there = window.arrival_ms <= fire
        rate, size = 1.0, float(len(window.value))
        if not self._past.empty:
            size = self._past.size
            rate = float(mean_size(self._past.variation, size, self.target.error, self.target.confidence)) / size
        used = there & (window.mark < rate)
        self._past.learn(float(there.sum()), window.value[used])
        return BaselineAnswer(fire, used, there, _scaled(self.measure, window, used, size))


class AionAsPublished:
    """Algorithms 1 and 2 of the Aion paper, which close each sub-stream at its own deadline, with Eq. 7 and 8.

    As published: the rate divides the window's n by the N of one sub-stream; the delay is its mean; a closed sub-stream
    drops later events; N is the N of the history. Two changes are necessary to run it: a timer at the deadline, and a
    sub-stream waits for n of its own events.
    """

    def __init__(self, target: AccuracyTarget, measure: MeasureKind, substream_ms: float) -> None:
        self.target, self.measure, self.substream_ms = target, measure, substream_ms
        self._past = WindowHistory()
        self._delay_ms = 0.0

    def close(self, window: WindowArrivals) -> BaselineAnswer:
        part = np.floor((window.event_ms - window.start_ms) / self.substream_ms).astype(np.int64)
        processed = np.zeros(len(window.value), bool)
        arrived = np.zeros(len(window.value), bool)
        fire, size = window.end_ms, float(len(window.value))
        parts = round((window.end_ms - window.start_ms) / self.substream_ms)
        sample_size, rate = np.inf, 1.0
        if not self._past.empty:
            size = self._past.size
            sample_size = float(mean_size(self._past.variation, size, self.target.error, self.target.confidence))
            gap = (window.end_ms - window.start_ms) / max(size, 1.0)
            expected = (self.substream_ms - self._delay_ms) / gap  # Eq. 7; negative if E[D] > f
            rate = min(1.0, sample_size / expected) if expected > 0 else 1.0
        for index in range(parts):
            mine = part == index
            sample = mine & (window.mark < rate)
            closed = self._closed_ms(window, sample, window.start_ms + (index + 1) * self.substream_ms, sample_size)
            fire = max(fire, closed)
            processed |= sample & (window.arrival_ms <= closed)
            arrived |= mine & (window.arrival_ms <= closed)
        self._learn(window, processed)
        return BaselineAnswer(fire, processed, arrived, _scaled(self.measure, window, processed, size))

    def _closed_ms(self, window: WindowArrivals, sample: BoolArray, deadline_ms: float, sample_size: float) -> float:
        """Returns when the sub-stream closes: at the deadline, or when the sample is large enough or complete."""
        at = np.sort(window.arrival_ms[sample])
        enough = int(min(sample_size, len(at)))
        return max(deadline_ms, float(at[enough - 1])) if enough else deadline_ms

    def _learn(self, window: WindowArrivals, processed: BoolArray) -> None:
        # Late events are observed before they are dropped, so the history includes them.
        self._past.learn(float(len(window.value)), window.value[processed])
        if len(window.value):
            self._delay_ms = float(window.delay_ms.mean())


def _by_group(window: WindowArrivals, used: BoolArray) -> FloatArray:
    return np.bincount(window.group[used], minlength=window.groups).astype(float)


def _scaled(measure: MeasureKind, window: WindowArrivals, used: BoolArray, size: float) -> FloatArray:
    """Returns the measure with totals scaled to a window of `size` events (Eq. 5)."""
    return measured(measure, window, used, size / max(float(used.sum()), 1.0))
