"""What one connection or edge can cost the gateway, besides frames, which credits bound."""

from __future__ import annotations

from collections.abc import Callable

from center.ingest.metrics import GatewayMetrics
from edgewater.model.errors import LimitExceeded
from edgewater.wire.session_stream import LEAST_WINDOW_LOG, MOST_WINDOW_LOG, unpacker_bytes

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


SESSIONS_SHARE = 64
"""A new session gets at most this part of the memory that is left for decompression: later ones need some, too."""


class DecompressionMemory:
    """Shares out the memory in which sessions decompress: large windows while sessions are few, then smaller ones.

    Args:
        most_bytes: of all sessions together.
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
        """Takes back the memory of a session that has ended."""
        self._count(-unpacker_bytes(window_log))

    def _count(self, size: int) -> None:
        self._left_bytes -= size
        self._metrics.decompression.inc(size)


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
