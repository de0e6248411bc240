"""Limits of the cost of one connection or edge at the gateway. Credits limit the cost of frames."""

from __future__ import annotations

from collections.abc import Callable

from center.ingest.metrics import GatewayMetrics
from edgewater.base.errors import LimitExceeded
from edgewater.wire.session_stream import LEAST_WINDOW_LOG, MOST_WINDOW_LOG, unpacker_bytes

HELLO_BYTES = 1 << 20  # limit: memory of a session that begins
CONTROL_BYTES = 128 << 10  # limit: memory of a message
"""Maximum size of a message that is neither a Hello nor a frame."""
WINDOW_MS = 10_000  # limit: bursts of messages
MESSAGES = 1_000  # limit: work that one edge can cause
"""Maximum number of messages of a session without frames, per `WINDOW_MS`. An edge sends about one heartbeat a
second.
"""
MESSAGES_PER_QUERY = 20  # limit: work that one edge can cause
"""Further messages that are allowed for each assigned query, for statuses and budget reports."""
LOGGED_REFUSALS = 200  # limit: size of the log
"""Maximum number of lines of the log about refused and ended sessions, per `WINDOW_MS`. Metrics count all of them."""
HELLOS = 400  # limit: work that one edge can cause
"""Maximum number of sessions of one edge that begin per `WINDOW_MS`. Each is a transaction of the catalog."""
CALLS_AWAITING_HELLO = 8  # limit: memory of calls without a Hello
"""Maximum number of calls of one identity that have not sent a Hello."""
SPARE_CONNECTIONS = 16  # limit: open connections
"""Connections in addition to twice the number of sessions. An edge may connect again before its old connection is
closed."""
STREAMS_PER_CONNECTION = 16  # limit: calls of one connection
"""Maximum number of calls on one connection. An edge makes one call."""


SESSIONS_SHARE = 64  # limit: memory of one session
"""A new session gets at most 1/64 of the memory that is left for decompression, because later sessions need memory,
too."""


class DecompressionMemory:
    """Divides the memory for decompression among sessions. The first sessions get large windows, later ones smaller.

    Args:
        most_bytes: memory of all sessions together.
    """

    def __init__(self, most_bytes: int, metrics: GatewayMetrics) -> None:
        self._left_bytes = most_bytes
        self._metrics = metrics

    def take(self) -> int:
        """Reserves memory for a session; returns the log of its window, or 0 if too little is left."""
        for window_log in range(MOST_WINDOW_LOG, LEAST_WINDOW_LOG - 1, -1):
            if unpacker_bytes(window_log) <= self._left_bytes // SESSIONS_SHARE:
                self._count(unpacker_bytes(window_log))
                return window_log
        return 0

    def release(self, window_log: int) -> None:
        """Frees the memory of a session that has ended."""
        self._count(-unpacker_bytes(window_log))

    def _count(self, size: int) -> None:
        self._left_bytes -= size
        self._metrics.decompression.inc(size)


class FixedWindow:
    """Counts events per window of `WINDOW_MS`, by the given clock."""

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
    """Counts that a limit was exceeded, and returns the error."""
    metrics.limited.labels(limit).inc()
    return LimitExceeded(message, limit)


class TryLater(LimitExceeded):
    """A session is refused for now.

    Attributes:
        retry_after_ms: when the edge may connect again.
    """

    def __init__(self, message: str, retry_after_ms: int) -> None:
        super().__init__(message, "hellos-waiting")
        self.retry_after_ms = retry_after_ms
