"""What one connection or edge can cost the gateway, besides frames, which credits bound."""

from __future__ import annotations

from collections.abc import Callable

from center.ingest.metrics import GatewayMetrics
from edgewater.errors import LimitExceeded

HELLO_BYTES = 1 << 20
CONTROL_BYTES = 128 << 10
"""Size of a message that is neither a Hello nor a frame."""
WINDOW_MS = 10_000
MESSAGES = 1_000
"""Messages of a session that are no frames, per `WINDOW_MS`; its edge sends a heartbeat a second."""
MESSAGES_PER_QUERY = 20
"""Further messages for each assigned query: statuses and budget reports."""
LOGGED_REFUSALS = 200
"""Lines of the log about refused and ended sessions, per `WINDOW_MS`; metrics count all."""
HELLOS = 400
"""Sessions of one edge that begin per `WINDOW_MS`: each is a transaction of the catalog."""
CALLS_AWAITING_HELLO = 8
"""Calls of one identity that have not sent a Hello."""
SPARE_CONNECTIONS = 16
"""Beyond twice the number of sessions: edges that connect again do so before their old connection is closed."""
STREAMS_PER_CONNECTION = 16
"""Calls on one connection; an edge makes one."""


class FixedWindow:
    """Counts events per window of `WINDOW_MS`. By the given clock: tests run in virtual time."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._window = -1
        self._count = 0

    def add(self, most: int) -> bool:
        """Counts an event; returns whether there are at most `most` in this window."""
        window = self._now_ms() // WINDOW_MS
        if window != self._window:
            self._window, self._count = window, 0
        self._count += 1
        return self._count <= most


def exceeded(metrics: GatewayMetrics, limit: str, message: str) -> LimitExceeded:
    """The error, which is counted."""
    metrics.limited.labels(limit).inc()
    return LimitExceeded(message, limit)


class TryLater(LimitExceeded):
    """A session that is refused for the moment.

    Attributes:
        retry_after_ms: when the edge may connect again.
    """

    def __init__(self, message: str, retry_after_ms: int) -> None:
        super().__init__(message, "hellos-waiting")
        self.retry_after_ms = retry_after_ms
