"""One direction of a narrow link, as arithmetic: a queue of limited size, a rate, and a delay."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Shaper:
    """Decides when a packet arrives at the other end of the link.

    Attributes:
        rate_bytes_s: the rate of the link; None: unlimited.
        delay_s: the time that each packet takes in addition to waiting and sending.
        queue_bytes: bytes that may wait before the link; a packet that does not fit is dropped.
        is_cut: whether the link is interrupted; packets that are offered meanwhile are dropped.
        passed_bytes: bytes that the link carried.
        dropped: packets that were dropped.
    """

    rate_bytes_s: float | None
    delay_s: float
    queue_bytes: int
    is_cut: bool = False
    passed_bytes: int = 0
    dropped: int = 0
    _free_at_s: float = 0.0

    def wait_s(self, now_s: float) -> float:
        """Returns the time until a packet that is offered now would begin to be sent."""
        return max(self._free_at_s - now_s, 0.0)

    def offer(self, size: int, now_s: float) -> float | None:
        """Takes a packet into the queue; returns the time of its arrival, or None if it is dropped."""
        wait_s = self.wait_s(now_s)
        rate = self.rate_bytes_s
        if self.is_cut or (rate is not None and wait_s * rate + size > self.queue_bytes):
            self.dropped += 1
            return None
        self._free_at_s = now_s + wait_s + (size / rate if rate is not None else 0.0)
        self.passed_bytes += size
        return self._free_at_s + self.delay_s
