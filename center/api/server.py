"""The server of the API: uvicorn, with deadlines and limits that it has no options for.

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
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from center.config import ApiLimitsSection, ApiSection, ApiTlsSection
from edgewater.errors import InvalidConfig

GRACE_S = 5
"""How long open requests may take once the API is told to stop."""
MAX_HEAD_BYTES = 16 << 10
"""Of a request's line and headers: beyond it the answer is 400."""
RELOAD_S = 10.0
DESCRIPTORS = 256
"""File descriptors besides connections: stores, pools, the log."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Connections:
    """The connections of a process, and those of them that are without a request, in the order in which they became so.

    Attributes:
        on_closed: called with the reason for which a connection was closed.
    """

    limits: ApiLimitsSection
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
        self._stalled = self.loop.call_later(self._guard.limits.body / 1000, self._close, "slow-reader")

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
            self._deadline = self.loop.call_later(self._guard.limits.headers / 1000, self._no_request)

    def _no_request(self) -> None:
        if self.transport.get_write_buffer_size():  # the last part of a response
            self._deadline = self.loop.call_later(self._guard.limits.body / 1000, self._close, "slow-reader")
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


def server_config(app: ASGIApp, config: ApiSection, on_closed: Callable[[str], None]) -> uvicorn.Config:
    """The configuration of the API's server. Raises InvalidConfig for a certificate or key that cannot be used."""
    limits, options = config.limits, dict[str, Any]()
    if config.tls is not None:
        context = _context(config.tls)
        options["ssl_context_factory"] = lambda config, default: context
    allow_descriptors(limits.connections + DESCRIPTORS)
    protocol = partial(GuardedProtocol, Connections(limits, on_closed))
    return uvicorn.Config(
        app,
        http=cast(Any, protocol),  # called like the class
        log_config=None,
        log_level="error",  # a warning per malformed request is a client's way to fill the disk; they are counted
        access_log=False,
        server_header=False,
        proxy_headers=False,  # the audit log's remote address is the peer's, never the client's word
        ws="none",
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_graceful_shutdown=GRACE_S,
        **options,
    )


def allow_descriptors(count: int) -> None:
    """Raises the soft limit of file descriptors, as far as the hard one allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < count:
        log.warning("the limit of %d file descriptors is below the %d that api.limits.connections needs", hard, count)


def _context(tls: ApiTlsSection) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load(context, tls)
    return context


def _load(context: ssl.SSLContext, tls: ApiTlsSection) -> None:
    try:
        context.load_cert_chain(tls.cert, tls.key)
    except (OSError, ssl.SSLError) as exc:
        raise InvalidConfig(
            "api.tls.cert", str(tls.cert), f"a certificate with its key in {tls.key}", str(exc)
        ) from exc


class ApiServer(uvicorn.Server):
    """uvicorn with a deadline for TLS handshakes, and with certificates that are read again when they change.

    asyncio's deadline is 60 s, and uvicorn has no option for it.
    """

    def __init__(self, config: uvicorn.Config, api: ApiSection, reload_s: float = RELOAD_S) -> None:
        super().__init__(config)
        self._api = api
        self._reload_s = reload_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop: Any = asyncio.get_running_loop()
        if self._api.tls is None:
            await super().startup(sockets)
            return
        loop.create_server = partial(loop.create_server, ssl_handshake_timeout=self._api.limits.headers / 1000)
        try:
            await super().startup(sockets)
        finally:
            del loop.create_server  # the class' method is back

    async def main_loop(self) -> None:
        if self._api.tls is None:
            await super().main_loop()
            return
        watching = asyncio.create_task(self._watch_certificate(self._api.tls), name="api-certificate")
        try:
            await super().main_loop()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch_certificate(self, tls: ApiTlsSection) -> None:
        """Lets handshakes use a changed certificate, until cancelled."""
        context = self.config.ssl
        assert context is not None
        seen = await asyncio.to_thread(_times, tls)
        while True:
            await asyncio.sleep(self._reload_s)
            if (now := await asyncio.to_thread(_times, tls)) == seen:
                continue
            try:
                await asyncio.to_thread(_context, tls)  # half a renewal must not take the place of a pair that fits
                await asyncio.to_thread(_load, context, tls)
            except InvalidConfig as exc:
                log.error("a changed certificate is not used, the one read before stays: %s", exc.message)
                continue
            seen = now
            log.info("%s has been read again", tls.cert)


def _times(tls: ApiTlsSection) -> list[int]:
    return [path.stat().st_mtime_ns for path in (tls.cert, tls.key) if path.exists()]
