"""The uplink: maintains a gRPC session with the center, and reconnects.

It has no durable state: the agent's journal has the frames to send and the acknowledgements. So a session may end at
any point, and the next one resumes after the last frame that the center has.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from pydantic import SecretStr
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random, wait_random_exponential

from edge.config import TlsConfig
from edge.uplink.flow_control import DailyQuota, LinkLimits
from edge.uplink.ports import UplinkEndpoint
from edge.uplink.uplink_session import LinkDown, Pacing, PendingTake, UplinkSession
from edgewater.base.errors import InvalidConfig, OutdatedState, Retired
from edgewater.wire import CODE_METADATA, RETRY_METADATA, uplink_pb2_grpc

MAX_SILENCE_S = 60.0  # limit: how late a dead session is noticed
RECONNECT_FIRST_S = 0.25  # limit: attempts to connect
MAX_RETRY_AFTER_S = 60.0
"""The longest wait before a reconnect that a center can request."""
_MAX_MESSAGE_BYTES = 16 << 20  # limit: memory of a message
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    # Pings keep middleboxes from dropping the connection. The session itself detects a dead link earlier: on a slow
    # link a ping's answer may queue behind a frame.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Pings that measure the connection's delay would answer nearly each message of the center, on a link that may be
    # narrow. The center's messages need no large window.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.enable_retries", 0),
    # Each session opens a new connection: channels must not share one that may be half-open.
    ("grpc.use_local_subchannel_pool", 1),
)
log = logging.getLogger(__name__)


class Uplink:
    """Maintains a session with the center at `address` (``host:port``) while `run` runs.

    Args:
        endpoint: the agent's end: provides frames and handles control messages.
        token: bearer token of this edge, if the center requires one. It is read at each connection.
        tls: files for TLS; None: plain text, for loopback and trusted networks.
        now_ms: wall clock.
        monotonic: returns the seconds of a monotonic clock.
        daily_quota: the quota of wire bytes per day, if there is one.
        proxy: URL of an HTTP proxy that connects to the center; None: no proxy, also if the environment names one.

    Raises:
        InvalidConfig: TLS files that cannot be read.
    """

    def __init__(
        self,
        address: str,
        endpoint: UplinkEndpoint,
        *,
        token: SecretStr | None,
        tls: TlsConfig | None,
        limits: LinkLimits,
        now_ms: Callable[[], int],
        monotonic: Callable[[], float],
        daily_quota: DailyQuota | None = None,
        proxy: str | None = None,
    ) -> None:
        self._address = address
        # Only the configuration decides where the token goes: gRPC would take a proxy from the environment.
        way = ("grpc.enable_http_proxy", 0) if proxy is None else ("grpc.http_proxy", proxy)
        self._options = (*_CHANNEL_OPTIONS, way)
        self._endpoint = endpoint
        self._token = token
        self._tls = tls
        self._credentials = _credentials(tls) if tls is not None else None
        self._limits = limits
        self._monotonic = monotonic
        self._pacing = Pacing(limits, now_ms, monotonic, daily_quota)
        self._pending_take = PendingTake(endpoint)
        self._silence_s = limits.silence_s
        self._retry_after_s: float | None = None
        self.connected = False
        """Whether a session is open: the center has answered Hello with Welcome."""
        self.retired = asyncio.Event()
        """Set when the center has ended or refused a session because the edge is retired. No session follows: only an
        admin of the center can reinstate the edge."""

    async def run(self) -> None:
        """Connects, and reconnects with full jitter, until cancelled; then sends Goodbye.

        Returns if the edge is retired.

        Failures of the link or the center are retried. An exception from the endpoint is raised.

        Raises:
            OutdatedState: the center has seen a newer version of the edge's state, or another one.
        """
        backoff = wait_random_exponential(multiplier=RECONNECT_FIRST_S, max=self._limits.reconnect_max_s)

        def wait(state: RetryCallState) -> float:
            asked_s, self._retry_after_s = self._retry_after_s, None
            # Not earlier than requested. The jitter is a fraction: the center gives each edge its own time.
            return backoff(state) if asked_s is None else wait_random(asked_s, 1.1 * asked_s)(state)

        retrying = AsyncRetrying(
            wait=wait,
            retry=retry_if_exception_type((LinkDown, grpc.aio.AioRpcError, OSError)),
            before_sleep=self._log_retry,
        )
        try:
            async for attempt in retrying:
                with attempt:
                    await self._session(attempt.retry_state)
        except Retired as exc:
            log.error("%s; no record is accepted any more", exc)
            self.retired.set()
        finally:
            await self._pending_take.cancel()

    async def _session(self, state: RetryCallState) -> None:
        async with self._channel() as channel:
            stub: Any = uplink_pb2_grpc.UplinkStub  # generated, untyped
            token = self._token.get_secret_value() if self._token is not None else None
            metadata = (("authorization", f"Bearer {token}"),) if token else ()
            call = stub(channel).Session(metadata=metadata)
            session = UplinkSession(
                call,
                self._endpoint,
                self._pending_take,
                self._pacing,
                limits=self._limits,
                silence_s=self._silence_s,
                monotonic=self._monotonic,
            )
            try:
                await session.open()
                self.connected = True
                log.info("connected to the center at %s", self._address)
                await session.run()
            except (LinkDown, grpc.aio.AioRpcError):
                trailing = await _trailing(call)
                for ending in (Retired, OutdatedState):
                    if trailing.get(CODE_METADATA) == ending.code:
                        raise ending(await call.details()) from None
                retry_ms = trailing.get(RETRY_METADATA, "")
                if retry_ms.isdecimal():
                    self._retry_after_s = min(int(retry_ms) / 1000, MAX_RETRY_AFTER_S)
                raise
            finally:
                self.connected = False
                call.cancel()
                if session.acknowledged:
                    # The session worked: the backoff restarts.
                    state.attempt_number = 1
                    self._silence_s = self._limits.silence_s
                elif session.silent:
                    self._silence_s = min(2 * self._silence_s, MAX_SILENCE_S)

    def _channel(self) -> Any:
        if self._tls is not None:
            try:
                self._credentials = _credentials(self._tls)  # the files may have been renewed
            except InvalidConfig as exc:
                log.warning("%s; the ones read before are used", exc)
        if self._credentials is None:
            return grpc.aio.insecure_channel(self._address, self._options)
        return grpc.aio.secure_channel(self._address, self._credentials, self._options)

    def _log_retry(self, state: RetryCallState) -> None:
        exc = state.outcome.exception() if state.outcome else None
        reason = f"{exc.code().name} {exc.details()}" if isinstance(exc, grpc.aio.AioRpcError) else str(exc)
        wait_s = state.next_action.sleep if state.next_action else 0.0
        log.warning("no session with the center at %s: %s; retry in %.1f s", self._address, reason, wait_s)


async def _trailing(call: Any) -> dict[str, str]:
    """Returns the metadata with which the center has ended a call; empty: it has not ended the call, or without
    metadata.
    """
    if not call.done() or call.cancelled():
        return {}
    return {str(key): str(value) for key, value in await call.trailing_metadata() or ()}


def _credentials(tls: TlsConfig) -> Any:
    read = {}
    for field in ("ca", "cert", "key"):
        path: str | None = getattr(tls, field)
        try:
            read[field] = Path(path).read_bytes() if path is not None else None
        except OSError as exc:
            raise InvalidConfig(f"center.tls.{field}", path, "a readable PEM file", exc.strerror or "") from exc
    return grpc.ssl_channel_credentials(read["ca"], read["key"], read["cert"])
