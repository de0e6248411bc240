"""The uplink: a session with the center whenever one can be had.

It keeps no state that matters: what is to be sent, and what has been acknowledged, the agent's journal
knows. So a session may end anywhere, and the next one goes on behind the last frame the center has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from edge.uplink.flow_control import DailyCap, LinkLimits
from edge.uplink.ports import Listener, Outbox, QueryStatusReport
from edge.uplink.session import LinkDown, Pacing, Takes, UplinkSession
from edgewater.errors import InvalidConfig
from edgewater.wire import uplink_pb2_grpc

__all__ = ["LinkLimits", "Listener", "Outbox", "QueryStatusReport", "TlsFiles", "Uplink"]

MAX_SILENCE_S = 60.0
RECONNECT_FIRST_S = 0.25
_MAX_MESSAGE_BYTES = 16 << 20
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    # Pings keep middle boxes from forgetting the connection. That a link is dead the session notices
    # itself, sooner: a ping's answer may rightly wait behind a frame on a slow link.
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),
    # Each session connects anew, so channels must not share a connection that may be half dead.
    ("grpc.use_local_subchannel_pool", 1),
)
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: the CA that the center's certificate comes from (None: the system's), and, for mutual
    TLS, this edge's certificate and key."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


class Uplink:
    """Keeps a session with the center at `address` (``host:port``) for as long as `run` runs.

    Args:
        token: bearer token of this edge, if the center asks for one.
        tls: files for TLS; None: plain text, for loopback and trusted networks.
        now_ms: wall clock; `monotonic`: seconds that never go back.
        daily: the cap of wire bytes per day, if there is one.

    Raises:
        InvalidConfig: TLS files that cannot be read.
    """

    def __init__(
        self,
        address: str,
        outbox: Outbox,
        listener: Listener,
        *,
        token: str | None,
        tls: TlsFiles | None,
        limits: LinkLimits,
        now_ms: Callable[[], int],
        monotonic: Callable[[], float],
        daily: DailyCap | None = None,
    ) -> None:
        self._address = address
        self._outbox = outbox
        self._listener = listener
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._credentials = _credentials(tls) if tls is not None else None
        self._limits = limits
        self._monotonic = monotonic
        self._pacing = Pacing(limits, now_ms, monotonic, daily)
        self._takes = Takes(outbox)
        self._silence_s = limits.silence_s
        self.connected = False
        """Whether a session stands: Hello has been answered by Welcome."""

    async def run(self) -> None:
        """Connects, and connects again with full jitter, until cancelled; then says Goodbye.

        Whatever is the link's or the center's fault is tried again. What the outbox or the listener
        raise ends it.
        """
        retrying = AsyncRetrying(
            wait=wait_random_exponential(multiplier=RECONNECT_FIRST_S, max=self._limits.reconnect_max_s),
            retry=retry_if_exception_type((LinkDown, grpc.aio.AioRpcError, OSError)),
            before_sleep=self._log,
        )
        try:
            async for attempt in retrying:
                with attempt:
                    await self._session(attempt.retry_state)
        finally:
            await self._takes.cancel()

    async def _session(self, state: RetryCallState) -> None:
        async with self._channel() as channel:
            stub: Any = uplink_pb2_grpc.UplinkStub  # generated, untyped
            call = stub(channel).Session(metadata=self._metadata)
            session = UplinkSession(
                call,
                self._outbox,
                self._listener,
                self._takes,
                self._pacing,
                limits=self._limits,
                silence_s=self._silence_s,
                monotonic=self._monotonic,
            )
            try:
                await session.open()
                self.connected = True
                logger.info("connected to the center at %s", self._address)
                await session.run()
            finally:
                self.connected = False
                call.cancel()
                if session.acknowledged:
                    # It worked: the next failure is a new one, and waits as the first one does.
                    state.attempt_number = 1
                    self._silence_s = self._limits.silence_s
                elif session.silent:
                    self._silence_s = min(2 * self._silence_s, MAX_SILENCE_S)

    def _channel(self) -> Any:
        if self._credentials is None:
            return grpc.aio.insecure_channel(self._address, _CHANNEL_OPTIONS)
        return grpc.aio.secure_channel(self._address, self._credentials, _CHANNEL_OPTIONS)

    def _log(self, state: RetryCallState) -> None:
        exc = state.outcome.exception() if state.outcome else None
        reason = f"{exc.code().name} {exc.details()}" if isinstance(exc, grpc.aio.AioRpcError) else str(exc)
        wait_s = state.next_action.sleep if state.next_action else 0.0
        logger.warning("no session with the center at %s: %s; again in %.1f s", self._address, reason, wait_s)


def _credentials(tls: TlsFiles) -> Any:
    read = {}
    for field in ("ca", "cert", "key"):
        path: Path | None = getattr(tls, field)
        try:
            read[field] = path.read_bytes() if path is not None else None
        except OSError as exc:
            raise InvalidConfig(f"center.tls.{field}", str(path), "a readable PEM file", exc.strerror or "") from exc
    return grpc.ssl_channel_credentials(read["ca"], read["key"], read["cert"])
