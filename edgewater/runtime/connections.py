"""Limits of the connections of an HTTP server for which uvicorn has no options.

uvicorn and asyncio have these gaps:

- uvicorn waits without a limit for the first byte of a connection and for the end of a request's headers. Its
  keep-alive time-out begins after a response, and any byte ends it.
- uvicorn waits without a limit for a client that does not read its response.
- Each chunk of a body takes the same time, however small it is.
- asyncio does not count TLS handshakes.

`GuardedProtocol` closes such connections, and `GuardedServer` ends such handshakes. If there are too many connections,
a new connection replaces the connection that has been without a request the longest. So silent connections never block
others.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_HEAD_BYTES = 16 << 10
"""The largest size of a request's line and headers. A larger request gets a 400."""
SMALL_CHUNKS = 1024  # limit: CPU of small chunks
BYTES_PER_CHUNK = 16  # limit: CPU of small chunks
"""A body may have `SMALL_CHUNKS` chunks, and one more for each `BYTES_PER_CHUNK` bytes. A chunk takes about 15 µs, and
the event loop reads 256 KiB at once. So one-byte chunks took 0.6 s, in which no other client was served.
"""
DESCRIPTORS = 256  # limit: descriptors that connections leave
"""The number of file descriptors that a process needs in addition to its connections: databases, files, the log."""

_STARTING: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of a server.

    Attributes:
        connections: the largest number of open connections.
        headers_s: time in which a TLS handshake must end, and in which a request's headers must arrive.
        stall_s: time in which a client must read a part of its response.
    """

    connections: int = 1024
    headers_s: float = 10.0
    stall_s: float = 30.0


@dataclass(slots=True)
class Connections:
    """The connections of a process.

    Attributes:
        on_closed: called with the reason when a connection is closed.
        waiting: the connections without a request, ordered by the time since which they have none.
        handshakes: number of connections whose TLS handshake has not ended.
    """

    limits: ConnectionLimits
    on_closed: Callable[[str], None]
    waiting: dict[GuardedProtocol | Handshake, None] = field(default_factory=dict)
    handshakes: int = 0

    def admit(self, count: int) -> bool:
        """Makes room for the newest connection, if necessary by closing another one. Returns whether there is room.

        Args:
            count: number of connections with a complete handshake.
        """
        if count + self.handshakes <= self.limits.connections:
            return True
        self.on_closed("connections")
        oldest = next(iter(self.waiting), None)
        if oldest is not None:
            oldest.abort()
        return oldest is not None


class _BoundedRequests(h11.Connection):
    """The state of an HTTP connection. It refuses bodies with too many chunks and requests with two lengths.

    If a request has Content-Length and Transfer-Encoding, a proxy may use one of them and the server the other one.
    They would see different ends of the request, and the following bytes could become another client's request. A 401
    closes the connection, so that the body is not read.

    Attributes:
        refusal: why the request is refused; "" if it is not refused, or if it cannot be parsed.
    """

    refusal = ""
    _chunks = _bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
                self._refuse("Content-Length and Transfer-Encoding exclude each other")
        elif isinstance(event, h11.Data) and event.chunk_start:
            self._chunks += 1
            self._bytes += len(event.data)
            if self._chunks > SMALL_CHUNKS + self._bytes // BYTES_PER_CHUNK:
                self._refuse(f"{self._chunks} chunks of {self._bytes} bytes; expected {BYTES_PER_CHUNK} bytes or more")
        return event

    def send(self, event: Any) -> Any:
        if isinstance(event, h11.Response) and event.status_code == 401 and self.their_state is h11.SEND_BODY:
            headers = [*event.headers, (b"connection", b"close")]
            event = h11.Response(status_code=401, headers=headers, reason=event.reason)
        return super().send(event)

    def _refuse(self, why: str) -> NoReturn:
        self.refusal = why
        raise h11.RemoteProtocolError(why)


class GuardedProtocol(H11Protocol):
    """uvicorn's protocol with a deadline for headers and for each part of a response.

    It uses `_BoundedRequests`.
    """

    def __init__(self, connections_: Connections, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.conn: _BoundedRequests = _BoundedRequests(h11.SERVER, MAX_HEAD_BYTES)
        self._guard = connections_
        self._deadline: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._received = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        guard = self._guard
        # Headers and body are two writes. Without TCP_NODELAY, the second one waits 40 ms for the client's delayed
        # acknowledgement. asyncio sets the option only on sockets with a protocol number.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not guard.admit(len(self.connections)):
            self._reply(503)
            return
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
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(self.conn.refusal or msg)
        else:  # the response has begun
            self.abort()

    def _update(self) -> None:
        """Starts the deadline when the connection is without a request. Ends it when a request's headers have
        arrived.
        """
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
        self.abort()

    def abort(self) -> None:
        """Closes the connection without waiting for the client to read the buffer."""
        self._guard.waiting.pop(self, None)
        self.transport.abort()

    def _reply(self, status: int) -> None:
        phrase = {408: "Request Timeout", 503: "Service Unavailable\r\nRetry-After: 5"}[status]
        self.transport.write(f"HTTP/1.1 {status} {phrase}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".encode())
        self._guard.waiting.pop(self, None)
        self.transport.close()


class Handshake(asyncio.Protocol):
    """A connection before its TLS handshake has ended. An HTTP protocol takes it over afterwards.

    Args:
        make_protocol: makes the HTTP protocol.
    """

    def __init__(
        self, guard: Connections, make_protocol: Callable[[], GuardedProtocol], context: ssl.SSLContext
    ) -> None:
        self._guard = guard
        self._make_protocol = make_protocol
        self._context = context
        self._transport: asyncio.Transport
        self._task: asyncio.Task[None]
        self._received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.pause_reading()  # the handshake itself reads
        self._task = asyncio.ensure_future(self._run())

    def data_received(self, data: bytes) -> None:
        """Stores data that arrives directly after the handshake."""
        self._received += data

    def abort(self) -> None:
        self._guard.waiting.pop(self, None)
        self._transport.abort()

    async def _run(self) -> None:
        guard, protocol = self._guard, self._make_protocol()
        guard.waiting[self] = None
        guard.handshakes += 1
        guard.admit(len(protocol.connections))
        try:
            encrypted = await asyncio.get_running_loop().start_tls(
                self._transport, self, self._context, server_side=True, ssl_handshake_timeout=guard.limits.headers_s
            )
        except OSError:  # also ssl.SSLError
            guard.on_closed("handshake")
            return
        finally:
            guard.waiting.pop(self, None)
            guard.handshakes -= 1
        if encrypted is None or encrypted.is_closing():
            return
        encrypted.set_protocol(protocol)
        protocol.connection_made(encrypted)
        if self._received:
            protocol.data_received(bytes(self._received))


ABORT_SHARE = 0.8  # limit: descriptors of connections
"""When this fraction of the time for open requests at shutdown has passed, the connections that are still open are
closed.
"""


DRAIN_CHECK_S = 0.02  # limit: CPU while writing
TICK_S = 0.5  # limit: how late a slow connection is closed
"""Interval at which a server checks whether it has to stop, and sets the date of responses."""


class GuardedServer(uvicorn.Server):
    """uvicorn that counts TLS handshakes as connections, and ends handshakes that take too long.

    `guarded` returns the options of its configuration.

    Args:
        on_stop: called once when the server begins to stop. It ends responses that have no end.
        drain_s: the time in which clients may close their connections before the server does. Each response asks for
            it.
        hands_over: whether another program continues with the listening socket. That program gets new connections.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        on_stop: Callable[[], None] = lambda: None,
        drain_s: float = 0.0,
        *,
        hands_over: bool = False,
    ) -> None:
        super().__init__(config)
        self._on_stop = on_stop
        self._drain_s = drain_s
        self._hands_over = hands_over

    async def main_loop(self) -> None:
        """As uvicorn's, which wakes the process ten times a second."""
        while not await self.on_tick(0):
            await asyncio.sleep(TICK_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_stop()
        await self._drain()
        grace_s = self.config.timeout_graceful_shutdown or 0
        aborting = asyncio.get_running_loop().call_later(ABORT_SHARE * grace_s, self._abort)
        try:
            await super().shutdown(sockets)
        finally:
            aborting.cancel()

    async def _drain(self) -> None:
        """Continues to serve, and lets clients close their connections.

        If the server closed an idle connection, a request could be on its way. The client would get no response, and
        could not tell whether the request was served. After a response with ``Connection: close``, the client sends no
        request.
        """
        self.server_state.default_headers.append((b"connection", b"close"))
        for server in self.servers if self._hands_over else ():
            server.close()
        ends = asyncio.get_running_loop().time() + self._drain_s
        while self.server_state.connections and not self.force_exit and asyncio.get_running_loop().time() < ends:
            await asyncio.sleep(DRAIN_CHECK_S)

    def _abort(self) -> None:
        """Closes connections whose clients do not read, because uvicorn would cancel their requests and log an
        error.
        """
        for connection in list(self.server_state.connections):
            assert isinstance(connection, GuardedProtocol)
            connection.abort()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop: Any = asyncio.get_running_loop()
        async with _STARTING.setdefault(loop, asyncio.Lock()):  # two servers may start at the same time
            loop.create_server = partial(self._create_server, loop.create_server)
            try:
                await super().startup(sockets)
            finally:
                del loop.create_server  # restores the method of the class

    async def _create_server(
        self,
        create_server: Callable[..., Awaitable[asyncio.Server]],
        make_protocol: Callable[[], GuardedProtocol],
        *,
        ssl: ssl.SSLContext | None,
        **options: Any,
    ) -> asyncio.Server:
        if ssl is None:
            return await create_server(make_protocol, **options)
        (guard,) = self.config.http.args  # type: ignore[union-attr]  # see `guarded`
        return await create_server(partial(Handshake, guard, make_protocol, ssl), **options)


def guarded(limits: ConnectionLimits, on_closed: Callable[[str], None]) -> dict[str, Any]:
    """Returns the options of `uvicorn.Config` that apply the limits.

    Args:
        on_closed: called with the reason when a connection is closed: silent, slow-headers, slow-reader, handshake (TLS
            failed or was too slow), connections (there were too many), malformed.
    """
    _allow_descriptors(limits.connections + DESCRIPTORS)
    return {
        "http": partial(GuardedProtocol, Connections(limits, on_closed)),  # uvicorn calls it like the class
        "ws": "none",
        "log_config": None,
        "log_level": "error",  # malformed requests are counted, because a warning for each could fill the disk
        "access_log": False,
        "server_header": False,
    }


def _allow_descriptors(count: int) -> None:
    """Raises the soft limit of file descriptors, as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < count:
        log.warning("the limit of %d file descriptors is below the %d that all connections need", hard, count)
