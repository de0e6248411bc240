"""`CpuShortage`: for how much of the time the edge is short of CPU."""

from __future__ import annotations


class CpuShortage:
    """Counts the time in which the edge is short of CPU.

    Args:
        now_ms: wall time.
    """

    def __init__(self, now_ms: int) -> None:
        self._watched_ms = self._asked_ms = now_ms
        self._short_ms, self._is_short = 0.0, False

    def watch(self, now_ms: int, *, is_short: bool) -> None:
        """Counts the time since the last call if the edge was short of CPU then.

        Args:
            is_short: whether it is now.
        """
        self._short_ms += max(now_ms - self._watched_ms, 0) if self._is_short else 0
        self._watched_ms, self._is_short = now_ms, is_short

    def take_share(self) -> float:
        """Returns the part of the time between the last two calls, 0 to 1. Call `watch` before."""
        now_ms = self._watched_ms
        share = self._short_ms / (now_ms - self._asked_ms) if now_ms > self._asked_ms else float(self._is_short)
        self._asked_ms, self._short_ms = now_ms, 0.0
        return min(share, 1.0)
