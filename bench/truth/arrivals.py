"""Workloads of late records: delays, values, rates and outages that differ from the assumptions of early answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from edgewater.synopses import FloatArray, IntArray
from sim.early_answers.workload import Events

WINDOW_MS = 1_000
SOURCES, RATE = 3, 600.0
"""Number of edges, and records per second of each edge."""
CELLS, OUTAGE_MS, OUT = 20, 1_500, 0.1
"""Cells of a mobile network; the length of an outage, and the part of the time that a cell is out."""
POLL_MS = {"batches": 500, "polls of 100 ms": 100, "polls of 50 ms": 50}
"""By event, the interval at which a reader polls."""
FLIP_WINDOWS, SHIFT_WINDOWS, DAY_WINDOWS = 10, 10, 100

Draw = Callable[[np.random.Generator, int], FloatArray]


def _gamma_and_lognormal(rng: np.random.Generator, count: int) -> FloatArray:
    slow = rng.lognormal(np.log(2_500.0), 0.5, count)
    return np.asarray(np.where(rng.random(count) < 0.15, slow, rng.gamma(2.0, 60.0, count)))


def _one_outlier(rng: np.random.Generator, count: int) -> FloatArray:
    values = rng.uniform(0.0, 1.0, count)
    values[rng.integers(0, count, min(count, 1))] = 10_000.0
    return values


DELAYS: Mapping[str, Draw] = {
    "exponential": lambda rng, n: rng.exponential(150.0, n),
    "at most 900 ms": lambda rng, n: np.minimum(rng.exponential(150.0, n), 900.0),
    "gamma and lognormal": _gamma_and_lognormal,
    "Weibull": lambda rng, n: 80.0 * rng.weibull(0.6, n),
}
VALUES: Mapping[str, Draw] = {
    "gamma": lambda rng, n: rng.gamma(2.0, 5.0, n),
    "Pareto": lambda rng, n: rng.pareto(2.1, n) + 1,
    "normal": lambda rng, n: rng.normal(10.0, 3.0, n),
    "lognormal": lambda rng, n: rng.lognormal(0.0, 2.0, n),
    "zeros": lambda rng, n: np.where(rng.random(n) < 0.95, 0.0, rng.gamma(2.0, 5.0, n)),
    "99.5 % zeros": lambda rng, n: np.where(rng.random(n) < 0.995, 0.0, rng.gamma(2.0, 5.0, n)),
    "one outlier": _one_outlier,
}


@dataclass(frozen=True, slots=True)
class LateRecords:
    """A workload of `EarlyAnswerSimulation`. Windows can be generated in any order.

    Attributes:
        event: an additional event. "diurnal": rates ×50 within a day of 100 windows. "outages": of cells, whose records
            are released together. Keys of `POLL_MS`: a reader that polls. "flips": delays grow with the rank of the
            value, and in every second stretch of windows with the rank of its negative. "shifts": delays ×3 in every
            second stretch.
    """

    delays: str
    values: str = "gamma"
    event: str = ""
    windows: int = 300
    seed: int = 1
    rate: float = RATE
    sources: int = SOURCES
    groups: int = 1
    window_ms: int = WINDOW_MS
    step_ms: int = WINDOW_MS

    def restarts_before(self, index: int) -> bool:
        return False

    def step(self, index: int) -> Events:
        return self.window(index)

    def window(self, index: int) -> Events:
        rng = np.random.default_rng([self.seed, 1, index])
        rate = self.rate * self.window_ms / 1_000
        if self.event == "diurnal":
            rate *= 2 * 50 ** (-(0.5 + 0.5 * np.cos(2 * np.pi * index / DAY_WINDOWS)))
        source = np.repeat(np.arange(self.sources), rng.poisson(rate, self.sources))
        count = len(source)
        born = np.sort(rng.uniform(0, self.window_ms, count)) + index * self.window_ms
        source = rng.permutation(source)
        value, delay = VALUES[self.values](rng, count), DELAYS[self.delays](rng, count)
        delay = self._changed(rng, index, born, value, delay)
        zeros: IntArray = np.zeros(count, np.int64)
        order = np.lexsort((born, source))
        return Events(source[order], born[order], delay[order], value[order], zeros, rng.random(count))

    def _changed(
        self, rng: np.random.Generator, index: int, born: FloatArray, value: FloatArray, delay: FloatArray
    ) -> FloatArray:
        match self.event:
            case "flips":
                rank = (np.argsort(np.argsort(value)) + 0.5) / max(len(value), 1)
                delay = delay * 3 * (rank if (index // FLIP_WINDOWS) % 2 == 0 else 1 - rank) ** 2
            case "shifts":
                delay = delay * (3 if (index // SHIFT_WINDOWS) % 2 else 1)
            case event if event in POLL_MS:
                delay = np.ceil((born + delay) / POLL_MS[event]) * POLL_MS[event] - born
            case "outages":
                cell, period = rng.integers(0, CELLS, len(born)), np.floor(born / OUTAGE_MS).astype(np.int64)
                first = int(period.min(initial=0))
                number = int(period.max(initial=first)) - first + 1
                out = np.stack(
                    [np.random.default_rng([self.seed, 2, first + n]).random(CELLS) < OUT for n in range(number)]
                )
                released = (period + 1) * OUTAGE_MS - born
                delay = np.where(out[period - first, cell], np.maximum(delay, released), delay)
        return np.asarray(delay, np.float64)
