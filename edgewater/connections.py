"""Limits of the connections of an HTTP server, which uvicorn has no options for.

uvicorn waits for ever for the first byte of a connection and for the end of a request's headers (its keep-alive
time-out begins after a response, and any byte ends it), and for a client that takes nothing of its response.
`GuardedProtocol` closes such connections. When there are too many, the one that has been without a request the longest
is closed for the new one, so that silent connections never keep others out.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_HEAD_BYTES = 16 << 10
"""Size of a request's line and headers; a longer one is answered with 400."""
DESCRIPTORS = 256
"""File descriptors of a process besides its connections: databases, files, the log."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of a server.

    Attributes:
        connections: how many may be open.
        headers_s: time in which a request's headers must arrive.
        stall_s: time in which a client must take a part of its response.
    """

    connections: int = 1024
    headers_s: float = 10.0
    stall_s: float = 30.0


@dataclass(slots=True)
class Connections:
    """The connections of a process, and those of them that are without a request, in the order in which they became so.

    Attributes:
        on_closed: called with the reason for which a connection was closed.
    """

    limits: ConnectionLimits
    on_closed: Callable[[str], None]
    waiting: dict[GuardedProtocol, None] = field(default_factory=dict)


class GuardedProtocol(H11Protocol):
    """uvicorn's protocol with a deadline for headers and for each part of a response that a client has to take."""

    def __init__(self, connections_: Connections, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._guard = connections_
        self._deadline: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._received = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        guard = self._guard
        # Headers and body are two writes: without it the second waits 40 ms for the client's delayed acknowledgement.
        # asyncio sets it only on sockets whose protocol number is given.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self.connections) > guard.limits.connections:
            oldest = next(iter(guard.waiting), None)
            guard.on_closed("connections")
            if oldest is None:
                self._reply(503)
                return
            oldest._abort()
        self._update()

    def data_received(self, data: bytes) -> None:
        self._received = True
        super().data_received(data)
        self._update()

    def on_response_complete(self) -> None:
        self._received = False
        super().on_response_complete()
        self._update()

    def connection_lost(self, exc: Exception | None) -> None:
        self._guard.waiting.pop(self, None)
        for timer in (self._deadline, self._stalled):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self._guard.limits.stall_s, self._close, "slow-reader")

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def send_400_response(self, msg: str) -> None:
        self._guard.on_closed("malformed")
        super().send_400_response(msg)

    def _update(self) -> None:
        """Starts the deadline when the connection is without a request, and ends it with a request's headers."""
        has_request = self.cycle is not None and not self.cycle.response_complete
        if has_request:
            self._guard.waiting.pop(self, None)
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None
        elif self._deadline is None:
            self._guard.waiting[self] = None
            self._deadline = self.loop.call_later(self._guard.limits.headers_s, self._no_request)

    def _no_request(self) -> None:
        if self.transport.get_write_buffer_size():  # the last part of a response
            self._deadline = self.loop.call_later(self._guard.limits.stall_s, self._close, "slow-reader")
        elif not self._received or self.transport.is_closing():
            self._close("silent")
        else:
            self._guard.on_closed("slow-headers")
            self._reply(408)

    def _close(self, reason: str) -> None:
        self._guard.on_closed(reason)
        self._abort()

    def _abort(self) -> None:
        """Closes without waiting for the client to take what is in the buffer."""
        self._guard.waiting.pop(self, None)
        self.transport.abort()

    def _reply(self, status: int) -> None:
        phrase = {408: "Request Timeout", 503: "Service Unavailable\r\nRetry-After: 5"}[status]
        self.transport.write(f"HTTP/1.1 {status} {phrase}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".encode())
        self._guard.waiting.pop(self, None)
        self.transport.close()


def guarded(limits: ConnectionLimits, on_closed: Callable[[str], None]) -> dict[str, Any]:
    """Returns options of `uvicorn.Config` that hold the limits.

    Args:
        on_closed: called with the reason for which a connection was closed: silent, slow-headers, slow-reader,
            connections (there were too many), malformed.
    """
    _allow_descriptors(limits.connections + DESCRIPTORS)
    return {
        "http": partial(GuardedProtocol, Connections(limits, on_closed)),  # called like the class
        "ws": "none",
        "log_config": None,
        "log_level": "error",  # a warning per malformed request is a client's way to fill the disk; they are counted
        "access_log": False,
        "server_header": False,
        "h11_max_incomplete_event_size": MAX_HEAD_BYTES,
    }


def _allow_descriptors(count: int) -> None:
    """Raises the soft limit of file descriptors, as far as the hard one allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < count:
        log.warning("the limit of %d file descriptors is below the %d that all connections need", hard, count)
