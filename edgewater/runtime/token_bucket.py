"""A limit of an amount per second. Pure: time is an argument, in seconds of a monotonic clock."""

from __future__ import annotations


class TokenBucket:
    """A limit of an amount per second: over any time t at most ``burst + rate × t`` and one message are passed on.

    A message may be passed on once the tokens of earlier messages have been refilled, whatever its own size.

    Args:
        rate: tokens per second.
        burst: unused tokens accumulate up to this number.
    """

    def __init__(self, rate: float, now_s: float, burst: float = 0.0) -> None:
        self._rate = rate
        self._spare_s = burst / rate
        self._paid_at_s = now_s - self._spare_s

    def delay_s(self, now_s: float) -> float:
        """Returns how long to wait before the next message."""
        return max(0.0, self._paid_at_s - now_s)

    def consume(self, size: float, now_s: float) -> None:
        """Counts a message that is passed on."""
        self._paid_at_s = max(self._paid_at_s, now_s - self._spare_s) + size / self._rate
