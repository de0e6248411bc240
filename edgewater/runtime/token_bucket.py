"""A limit of an amount per second. The code is pure: times are arguments, in seconds of a monotonic clock."""

from __future__ import annotations


class TokenBucket:
    """A limit of an amount per second. In any time t, it lets at most ``burst + rate × t`` and one message pass.

    A message of any size may pass once the tokens of earlier messages have been refilled.

    Args:
        rate: tokens per second.
        burst: the largest number of unused tokens that accumulate.
    """

    def __init__(self, rate: float, now_s: float, burst: float = 0.0) -> None:
        self._rate = rate
        self._spare_s = burst / rate
        self._paid_at_s = now_s - self._spare_s

    def delay_s(self, now_s: float) -> float:
        """Returns the wait before the next message may pass, in seconds."""
        return max(0.0, self._paid_at_s - now_s)

    def consume(self, size: float, now_s: float) -> None:
        """Counts a message that passes.

        Args:
            size: tokens of the message.
        """
        self._paid_at_s = max(self._paid_at_s, now_s - self._spare_s) + size / self._rate
