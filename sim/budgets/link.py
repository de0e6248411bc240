"""A simulated uplink with variable bandwidth, latency, jitter and outages; frames arrive in order."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class SimulatedLink:
    """Parameters of a link. Each edge has its own link with these parameters.

    Attributes:
        bandwidth_bytes_s: bytes per second; with a `trace`, multiplied by its factors.
        latency_ms: from the transmission of the last byte to its arrival.
        jitter_ms: mean of an exponential delay added to the latency. Frames do not overtake each other.
        trace: (from ms, factor of the bandwidth), ascending. 0: nothing passes, and a frame in transmission continues
            afterwards.
        bytes_per_update: size of an entry, as in TR 16-003, where only entries take bytes; None: a frame has its real
            size on the wire.
        seed: seed of the jitter.
        bucket_bytes: depth of a token bucket, which is full at first: so many bytes pass at once before the bandwidth
            limits. 0: the link has no bucket.
        queue_bytes: bytes that may wait before the link; None: unlimited. With 0 the bucket is a policer: it drops what
            cannot pass at once.
    """

    bandwidth_bytes_s: float
    latency_ms: float = 0.0
    jitter_ms: float = 0.0
    trace: tuple[tuple[float, float], ...] = ()
    bytes_per_update: float | None = None
    seed: int = 0
    bucket_bytes: float = 0.0
    queue_bytes: float | None = None

    def steps(self) -> list[tuple[float, float]]:
        """Returns (from ms, bytes per ms), ascending."""
        factors = {0.0: 1.0, **dict(self.trace)}
        return [(from_ms, self.bandwidth_bytes_s * factor / 1000.0) for from_ms, factor in factors.items()]


class LinkSimulation:
    """The state of one edge's link."""

    def __init__(self, model: SimulatedLink, edge: int) -> None:
        self._model = model
        self._steps = model.steps()
        self._rng = np.random.default_rng((model.seed, edge))
        self._last_arrival_ms = 0.0
        self._tokens, self._tokens_at_ms = model.bucket_bytes, 0.0
        self.free_ms = 0.0
        self.sent_bytes = 0.0
        self.delivered_bytes_s = model.bandwidth_bytes_s

    def transmit(self, size: float, now_ms: float) -> float:
        """Sends a frame and returns its arrival time. `now_ms` is not before `free_ms`."""
        start = max(now_ms, self.free_ms)
        tokens = self._tokens_at(start)
        self.free_ms = self._done(max(size - tokens, 0.0), start)
        self._tokens, self._tokens_at_ms = max(tokens - size, 0.0), self.free_ms
        if self.free_ms > start:
            self.delivered_bytes_s = size / (self.free_ms - start) * 1000.0
        self.sent_bytes += size
        delay = self._model.latency_ms
        if self._model.jitter_ms:
            delay += float(self._rng.exponential(self._model.jitter_ms))
        self._last_arrival_ms = max(self._last_arrival_ms, self.free_ms + delay)
        return self._last_arrival_ms

    def drops(self, size: float, now_ms: float) -> bool:
        """Returns whether a packet that is offered now finds no room in the queue."""
        if self._model.queue_bytes is None:
            return False
        start = max(now_ms, self.free_ms)
        return self._carried(now_ms, start) + size > self._model.queue_bytes + self._tokens_at(start)

    def _tokens_at(self, at_ms: float) -> float:
        """Returns the tokens at a time that is not before the last departure."""
        depth = self._model.bucket_bytes
        return min(self._tokens + self._carried(self._tokens_at_ms, at_ms), depth) if depth else 0.0

    def _carried(self, from_ms: float, to_ms: float) -> float:
        """Returns the bytes that the bandwidth allows in an interval."""
        ends = [t for t, _ in self._steps[1:]] + [math.inf]
        steps = zip(self._steps, ends, strict=True)
        return sum(rate * max(min(end, to_ms) - max(begin, from_ms), 0.0) for (begin, rate), end in steps)

    def _done(self, size: float, start_ms: float) -> float:
        """Returns when the bandwidth has carried so many bytes: 0 bytes pass at once, or after an outage."""
        at, left = start_ms, size
        for (begin, rate), (end, _) in zip(self._steps, [*self._steps[1:], (math.inf, 0.0)], strict=True):
            if end <= at:
                continue
            at = max(at, begin)
            if rate > 0 and left / rate <= end - at:
                return at + left / rate
            left -= rate * (end - at) if rate > 0 else 0.0
            at = end
        return at
