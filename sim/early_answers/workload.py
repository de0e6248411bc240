"""Workloads: synthetic events with the delay models of the papers, and scenarios that violate their assumptions.

Scenarios can be combined with `+`, such as `correlated-value+delay-shift`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from edgewater.base.errors import InvalidConfig
from edgewater.synopses import FloatArray, IntArray
from sim.early_answers.values import ValueSource

DELAYS = ("CC", "GG", "EC", "EG")
SCENARIOS = (
    "stationary",
    "correlated-source",
    "correlated-value",
    "ramp",
    "step",
    "burst",
    "delay-shift",
    "cold-start",
)

RAMP_WINDOWS, RAMP_LOW, RAMP_HIGH = 20, 0.5, 1.5
STEP_WINDOWS, STEP_FACTOR = 10, 3.0
BURST_CHANCE, BURST_MS, BURST_FACTOR = 0.3, 300.0, 5.0
SHIFT_WINDOWS, SHIFT_FACTOR = 20, 2.0
_FINE_MS = 10.0


@dataclass(frozen=True, slots=True)
class Events:
    """The events of one window, in order of event time per source. Times in ms, float64.

    Attributes:
        group: int64 in [0, groups).
        mark: uniform in [0, 1), by which baselines sample.
    """

    source: IntArray
    event_ms: FloatArray
    delay_ms: FloatArray
    value: FloatArray
    group: IntArray
    mark: FloatArray

    @property
    def arrival_ms(self) -> FloatArray:
        return self.event_ms + self.delay_ms

    def __len__(self) -> int:
        return len(self.event_ms)

    def after(self, ms: float) -> Events:
        """Returns the events with times relative to `ms`."""
        return Events(self.source, self.event_ms - ms, self.delay_ms, self.value, self.group, self.mark)


class Workload(Protocol):
    """Windows of `window_ms`, one starting every `step_ms`; tumbling windows if both are equal.

    Events are generated step by step, in order. `step(i)` returns the events of step i. `window(i)` returns the events
    of the window that starts with step i.
    """

    sources: int
    groups: int
    window_ms: int
    step_ms: int
    windows: int

    def step(self, index: int) -> Events: ...

    def window(self, index: int) -> Events: ...

    def restarts_before(self, index: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """The parameters of a synthetic workload. `rate`: events per second over all sources."""

    delays: str = "EG"
    scenario: str = "stationary"
    rate: float = 5000.0
    sources: int = 5
    groups: int = 1
    window_ms: int = 3000
    windows: int = 400
    seed: int = 1

    def __post_init__(self) -> None:
        if self.delays not in DELAYS:
            raise InvalidConfig("--delays", self.delays, f"one of {', '.join(DELAYS)}")
        for part in self.parts:
            if part not in SCENARIOS:
                raise InvalidConfig("--scenario", part, f"one of {', '.join(SCENARIOS)}, or several joined with +")
        for field, value, least in (
            ("--windows", self.windows, 1),
            ("--edges", self.sources, 1),
            ("--groups", self.groups, 1),
            ("--rate", self.rate, 1),
            ("--window", self.window_ms, 1),
        ):
            if not value >= least:
                raise InvalidConfig(field, value, f"at least {least}")

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.scenario.split("+"))


class SyntheticWorkload:
    """Generates the windows of a `WorkloadSpec` in order; deterministic for a seed."""

    def __init__(self, shape: WorkloadSpec, values: ValueSource) -> None:
        self.shape, self.values = shape, values
        self.sources, self.groups = shape.sources, shape.groups
        self.window_ms = self.step_ms = shape.window_ms
        self.windows = shape.windows
        self._clock = np.random.default_rng([shape.seed, 0]).random(shape.sources)  # phase of each source's gaps
        self._phase = np.random.default_rng([shape.seed, 1]).random(4)
        scale = np.linspace(0.5, 2.0, shape.sources) if shape.sources > 1 else np.ones(1)
        correlated = "correlated-source" in shape.parts
        self._source_scale = scale / scale.mean() if correlated else np.ones(shape.sources)

    def restarts_before(self, index: int) -> bool:
        """Returns whether the center restarts without history before a window.

        In the scenario cold-start it does for each window.
        """
        return "cold-start" in self.shape.parts

    def step(self, index: int) -> Events:
        return self.window(index)

    def window(self, index: int) -> Events:
        rng = np.random.default_rng([self.shape.seed, 2, index])
        born = [self._event_times(rng, index, s) for s in range(self.sources)]
        source = np.repeat(np.arange(self.sources), [len(b) for b in born])
        at = np.concatenate(born) + index * self.window_ms
        value = self.values.draw(rng, len(at)) * self._source_scale[source]
        delay = self._delays(rng, at, source, value)
        group = rng.integers(0, self.groups, len(at))
        return Events(source, at, delay, value, group, rng.random(len(at)))

    def _event_times(self, rng: np.random.Generator, index: int, source: int) -> FloatArray:
        """Returns event times of a renewal process whose time axis is warped by the integral of the rate."""
        edges = np.arange(0, self.window_ms + _FINE_MS / 2, _FINE_MS)
        middle = (edges[:-1] + edges[1:]) / 2 + index * self.window_ms
        intensity = self._intensity(middle, index) * self.shape.rate / self.sources / 1000.0
        integral = np.concatenate([[0.0], np.cumsum(intensity * np.diff(edges))])
        if self.shape.delays[1] == "C":
            marks = np.arange(self._clock[source], integral[-1])
            self._clock[source] = (marks[-1] + 1 if len(marks) else self._clock[source]) - integral[-1]
        else:
            gaps = rng.gamma(2.0, 0.5, int(integral[-1] * 1.2) + 60)
            marks = self._clock[source] + np.cumsum(gaps) - gaps[0]
            after = int(np.searchsorted(marks, integral[-1]))
            self._clock[source], marks = marks[after] - integral[-1], marks[:after]
        return np.asarray(np.interp(marks, integral, edges), np.float64)

    def _intensity(self, at_ms: FloatArray, index: int) -> FloatArray:
        """Returns the event rate relative to the nominal rate."""
        result = np.ones(len(at_ms))
        position = at_ms / self.window_ms
        if "ramp" in self.shape.parts:
            wave = np.abs((position / RAMP_WINDOWS + self._phase[0]) % 1 * 2 - 1)
            result *= RAMP_LOW + (RAMP_HIGH - RAMP_LOW) * wave
        if "step" in self.shape.parts:
            high = _alternating(position, STEP_WINDOWS, self.shape.seed)
            result *= np.where(high, STEP_FACTOR, 1.0) / ((1 + STEP_FACTOR) / 2)
        if "burst" in self.shape.parts:
            rng = np.random.default_rng([self.shape.seed, 3, index])
            if rng.random() < BURST_CHANCE:
                start = index * self.window_ms + rng.random() * (self.window_ms - BURST_MS)
                result = np.where((at_ms >= start) & (at_ms < start + BURST_MS), result * BURST_FACTOR, result)
        return result

    def _delays(self, rng: np.random.Generator, at: FloatArray, source: IntArray, value: FloatArray) -> FloatArray:
        match self.shape.delays[0]:
            case "C":
                delay = np.full(len(at), 150.0)
            case "G":
                delay = rng.gamma(60.0, 4.0, len(at))
            case _:
                delay = rng.exponential(240.0, len(at))
        delay *= self._source_scale[source]
        if "correlated-value" in self.shape.parts:
            # Three times the squared rank has mean 1, so the mean delay does not change.
            order = np.argsort(np.argsort(value + 1e-9 * rng.random(len(value)), kind="stable"), kind="stable")
            delay *= 3 * ((order + 0.5) / max(len(at), 1)) ** 2
        if "delay-shift" in self.shape.parts:
            high = _alternating(at / self.window_ms, SHIFT_WINDOWS, self.shape.seed + 1)
            delay = np.where(high, delay * SHIFT_FACTOR, delay)
        return delay


def _alternating(position: FloatArray, period: int, seed: int) -> FloatArray:
    """Returns True in every second interval of about `period` windows; intervals start at random times in a window."""
    stretch = np.floor(position / period).astype(np.int64)
    jitter = np.random.default_rng([seed, 4]).random(int(stretch.max(initial=0)) + 3)
    return np.asarray((stretch + ((position / period - stretch) * period > jitter[stretch])) % 2 == 1)


class SlidingWorkload:
    """Sliding windows over another workload, whose tumbling windows are the steps.

    Args:
        steps: the workload of the steps. A window starts with each of them, except the last few.
        window_ms: a multiple of the length of a step.
    """

    def __init__(self, steps: Workload, window_ms: int) -> None:
        if steps.step_ms != steps.window_ms or window_ms % steps.window_ms:
            raise InvalidConfig("--every", steps.window_ms, f"a divisor of the window, {window_ms} ms")
        self._steps, self._per_window = steps, window_ms // steps.window_ms
        self.sources, self.groups = steps.sources, steps.groups
        self.window_ms, self.step_ms = window_ms, steps.window_ms
        self.windows = steps.windows - self._per_window + 1
        if self.windows < 1 or steps.restarts_before(1):
            raise InvalidConfig("--every", steps.window_ms, "at least one window, and no cold starts")
        self._recent: deque[Events] = deque(maxlen=self._per_window)
        self._next = 0

    def step(self, index: int) -> Events:
        """Generates each step once, in order; stores the steps of one window."""
        while self._next <= index:
            self._recent.append(self._steps.window(self._next))
            self._next += 1
        return self._recent[index - self._next]

    def window(self, index: int) -> Events:
        last = self.step(index + self._per_window - 1)
        each = [*(self.step(i) for i in range(index, index + self._per_window - 1)), last]
        columns = zip(*((e.source, e.event_ms, e.delay_ms, e.value, e.group, e.mark) for e in each), strict=True)
        return Events(*(np.concatenate(column) for column in columns))

    def restarts_before(self, index: int) -> bool:
        return False
