"""The way from an edge into an answer: what a staleness budget loses before the edge can use it. Pure.

A window's answer is to stand at the center S after the window's end. What the edge can use of S is S less
the way: half a round trip, the time that what is queued before it needs on the link, and what the center
says it takes from a frame's arrival to an answer.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Way:
    """The way from here into an answer, as measured.

    Attributes:
        rtt_ms: round trip of the link alone, without the center's disk.
        queued_bytes: in flight, and so before whatever leaves now.
        bandwidth_bytes_s: what the link carries; 0: not known.
        center_ms: from a frame's arrival until it is answered with; 0: not known.
    """

    rtt_ms: float = 0.0
    queued_bytes: int = 0
    bandwidth_bytes_s: float = 0.0
    center_ms: int = 0

    @property
    def ms(self) -> int:
        """The whole way, rounded up."""
        queue_ms = 1000.0 * self.queued_bytes / self.bandwidth_bytes_s if self.bandwidth_bytes_s > 0 else 0.0
        return int(-(-(self.rtt_ms / 2 + queue_ms) // 1)) + self.center_ms
