"""A simulated uplink with variable bandwidth, latency, jitter and outages; frames arrive in order."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class LinkModel:
    """Parameters of a link. Each edge has its own link with these parameters.

    Attributes:
        bandwidth_bytes_s: bytes per second; with a `trace`, multiplied by its factors.
        latency_ms: from the transmission of the last byte to its arrival.
        jitter_ms: mean of an exponential delay added to the latency. Frames do not overtake each other.
        outages: (from, to) in ms without transmission; a frame in transmission continues afterwards.
        trace: (from ms, factor of the bandwidth), ascending.
        bytes_per_update: size of an entry, as in TR 16-003, where only entries take bytes; None: a frame has its real
            size on the wire.
        seed: seed of the jitter.
    """

    bandwidth_bytes_s: float
    latency_ms: float = 0.0
    jitter_ms: float = 0.0
    outages: tuple[tuple[float, float], ...] = ()
    trace: tuple[tuple[float, float], ...] = ()
    bytes_per_update: float | None = None
    seed: int = 0

    def steps(self) -> list[tuple[float, float]]:
        """Returns (from ms, bytes per ms), ascending; 0 during outages."""
        borders = {0.0, *(t for t, _ in self.trace), *(t for outage in self.outages for t in outage)}
        return [(t, self._rate(t)) for t in sorted(borders)]

    def _rate(self, at_ms: float) -> float:
        if any(start <= at_ms < end for start, end in self.outages):
            return 0.0
        factor = next((f for t, f in reversed(self.trace) if t <= at_ms), 1.0)
        return self.bandwidth_bytes_s * factor / 1000.0


class LinkSimulation:
    """The state of one edge's link."""

    def __init__(self, model: LinkModel, edge: int) -> None:
        self._model = model
        self._steps = model.steps()
        self._rng = np.random.default_rng((model.seed, edge))
        self._last_arrival_ms = 0.0
        self.free_ms = 0.0
        self.sent_bytes = 0.0
        self.delivered_bytes_s = model.bandwidth_bytes_s

    def transmit(self, size: float, now_ms: float) -> float:
        """Sends a frame and returns its arrival time. `now_ms` is not before `free_ms`."""
        start = max(now_ms, self.free_ms)
        self.free_ms = self._done(size, start)
        if self.free_ms > start:
            self.delivered_bytes_s = size / (self.free_ms - start) * 1000.0
        self.sent_bytes += size
        delay = self._model.latency_ms
        if self._model.jitter_ms:
            delay += float(self._rng.exponential(self._model.jitter_ms))
        self._last_arrival_ms = max(self._last_arrival_ms, self.free_ms + delay)
        return self._last_arrival_ms

    def _done(self, size: float, start_ms: float) -> float:
        at, left = start_ms, size
        for (begin, rate), (end, _) in zip(self._steps, [*self._steps[1:], (math.inf, 0.0)], strict=True):
            if end <= at or left <= 0:
                continue
            at = max(at, begin)
            if rate > 0 and left / rate <= end - at:
                return at + left / rate
            left -= rate * (end - at) if rate > 0 else 0.0
            at = end
        return at
