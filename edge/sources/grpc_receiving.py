"""Serves the gRPC methods of receivers (`Receiver.grpc_method`) at the address ``http.grpc``.

The tokens and the TLS files of ``http`` apply here, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import grpc

from edge.config import HttpTlsConfig
from edge.receivers import Receiver, Refused, Request
from edge.sources.push_shares import PushMemory, TooManyBytes
from edge.sources.receiving import RETRY_AFTER_S, PushEndpoint
from edgewater.base.errors import InvalidConfig

MEDIA = "application/grpc"
"""The media type of requests over gRPC."""
MAX_MESSAGES_ARRIVING = 16  # limit: memory of messages that arrive
STREAMS_PER_CONNECTION = 128  # limit: memory of one client
CONNECTIONS = 1024  # limit: memory of connections
HANDSHAKE_MS = 10_000  # limit: connections that never finish their handshake
DETAILS = "grpc-status-details-bin"
"""The metadata key of the whole reply to a refused request: a serialized `google.rpc.Status`."""
STATUS: Mapping[int, grpc.StatusCode] = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.UNIMPLEMENTED,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    410: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.INVALID_ARGUMENT,  # not RESOURCE_EXHAUSTED, because clients would retry
    415: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.UNAVAILABLE,
    503: grpc.StatusCode.UNAVAILABLE,
}
"""The gRPC status for each HTTP status of a refusal."""


class GrpcReceivers:
    """A gRPC server for the receivers of an endpoint that have a gRPC method. Build, start and stop it on one event
    loop.

    A message is read only after the client is authorized and memory for the largest message is reserved.
    """

    def __init__(self, endpoint: PushEndpoint, address: str, tls: HttpTlsConfig | None) -> None:
        self._endpoint = endpoint
        # Twice the limit, so that the endpoint itself refuses most messages that are too large.
        self._most_bytes = 2 * endpoint.limits.size_bytes
        self._memory = PushMemory(MAX_MESSAGES_ARRIVING * self._most_bytes)
        self._server = grpc.aio.server(options=self._options())
        for receiver in endpoint.receivers:
            if receiver.grpc_method is not None:
                self._server.add_generic_rpc_handlers([self._handler(receiver, receiver.grpc_method)])
        self.port = self._listen(address, tls)

    def _options(self) -> list[tuple[str, int]]:
        return [
            ("grpc.max_receive_message_length", self._most_bytes),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
            ("grpc.max_allowed_incoming_connections", CONNECTIONS),
            ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION),
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_time_ms", 60_000),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        ]

    def _listen(self, address: str, tls: HttpTlsConfig | None) -> int:
        accepted = "a free address of this machine"
        try:
            if tls is None:
                return int(self._server.add_insecure_port(address))
            accepted = "PEM files of a certificate and its key in http.tls"
            return int(self._server.add_secure_port(address, _credentials(tls)))
        except (RuntimeError, OSError) as exc:
            raise InvalidConfig("http.grpc", address, accepted, str(exc)) from exc

    def _handler(self, receiver: Receiver, method: str) -> Any:
        async def serve(messages: AsyncIterator[bytes], context: Any) -> bytes:
            return await self._serve(receiver, messages, context)

        service, _, name = method.strip("/").partition("/")
        # For the client, the method takes one message. The server handles it as a stream, so that it decides when to
        # read.
        return grpc.method_handlers_generic_handler(service, {name: grpc.stream_unary_rpc_method_handler(serve)})

    async def _serve(self, receiver: Receiver, messages: AsyncIterator[bytes], context: Any) -> bytes:
        metadata = {key.lower(): value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        request = Request(MEDIA, {"authorization": metadata.get("authorization", "")})
        host = context.peer().rpartition(":")[0]
        handled = asyncio.ensure_future(
            self._endpoint.handle(receiver, request, host, lambda principal: self._message(messages, principal))
        )
        # A client that disconnects cancels this coroutine. The shield lets the request end, so all its records count or
        # none.
        response, refused = await asyncio.shield(handled)
        if refused is not None:
            details = ((DETAILS, bytes(response.body)),)
            await context.abort(STATUS.get(refused.status, grpc.StatusCode.INTERNAL), refused.detail, details)
        return bytes(response.body)

    async def _message(self, messages: AsyncIterator[bytes], principal: bytes | str) -> AsyncIterator[bytes]:
        """Yields the only message. Raises TimeoutError or Refused."""
        detail = f"{MAX_MESSAGES_ARRIVING} messages arrive already; nothing was accepted"
        refused = Refused(429, "too-many-requests", detail, retry_after_s=RETRY_AFTER_S)
        with self._memory.reservation(principal) as reserved:
            try:
                async with asyncio.timeout(self._endpoint.timeout_s) as reserved.deadline:
                    self._memory.add(reserved, self._most_bytes)
                    message = await anext(messages)
            except TooManyBytes:
                raise refused from None
            except TimeoutError:
                if reserved.is_refused:
                    raise refused from None
                raise
            except StopAsyncIteration:
                raise Refused(400, "incomplete-body", "the call has no message; nothing was accepted") from None
            finally:
                reserved.deadline = None
        yield message

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, and lets running calls end within the time, in seconds."""
        await self._server.stop(grace_s)


def _credentials(tls: HttpTlsConfig) -> Any:
    cert, key = Path(tls.cert).read_bytes(), Path(tls.key).read_bytes()
    authorities = Path(tls.client_ca).read_bytes() if tls.client_ca is not None else None
    return grpc.ssl_server_credentials([(key, cert)], authorities, authorities is not None)
