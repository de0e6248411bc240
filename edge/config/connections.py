"""The sections `center`, `http` and `limits`: the connections of an edge, and its limits of memory, time and CPU."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from edge.config.section import HttpTlsConfig, Model, TlsConfig
from edgewater.base.errors import InvalidConfig
from edgewater.model.link_forecast import LINK_NAME
from edgewater.runtime.configuration import Address, Duration, ProxyUrl, RemoteAddress, Secret, Size, refusal

MIN_BANDWIDTH = 1 << 10
"""The smallest accepted `bandwidth`, in bytes per second. Heartbeats alone take up to 150 bytes per second while an
edge has something to report.
"""
MAX_PUSH_BYTES = 12 << 20
"""The largest accepted `max_push_bytes`. An Arrow body may grow 16-fold, and a record of the journal has at most 256
MiB.
"""


class UplinkConfig(Model):
    """The connection to the center."""

    address: RemoteAddress = "127.0.0.1:7400"
    """Address of the center's gateway."""
    token: Secret | None = None
    """The token of this edge at the center."""
    tls: TlsConfig | None = None
    """TLS of the connection. None: no TLS."""
    proxy: ProxyUrl | None = None
    """An HTTP proxy that the connection goes through, such as ``http://proxy.example.com:3128``. None: no proxy.
    Variables such as ``https_proxy`` are not used."""
    bandwidth: Size | None = Field(default=None, ge=MIN_BANDWIDTH)
    """The largest number of bytes per second that this edge sends. None: unlimited."""
    link: str | None = Field(default=None, pattern=f"^{LINK_NAME.pattern}$")
    """The name of the link to the center, if other edges use it, too. Edges that name the same link divide what it
    carries. None: no other edge uses it."""
    daily: Size | None = Field(default=None, gt=0)
    """The largest number of bytes per UTC day that this edge sends. Frames above it wait for the next day, but
    heartbeats do not. None: unlimited.
    """


class HttpConfig(Model):
    """The server for pushed records and for the operator's endpoints."""

    listen: Address = "127.0.0.1:7410"
    """Address of the server. If a stream has pushed records, an address other than loopback needs `tokens` or
    `tls.client_ca`."""
    hosts: list[str] = []
    """Additional host names that requests without credentials may use, such as the name of a proxy. Names of loopback
    are always accepted.
    """
    tokens: list[Secret] = []
    """Bearer tokens of the clients that push. Several are valid at once, so that one can replace another."""
    origins: list[Annotated[str, Field(pattern=r"^(\*|https?://[^/?#\s]+)$")]] = []
    """Origins of web pages whose scripts may push with a token (CORS), such as ``https://shop.example``; ``*``: all."""
    tls: HttpTlsConfig | None = None
    """TLS of the server. None: no TLS."""
    metrics: Address | None = None
    """Address of /livez, /readyz and /metrics, without TLS and tokens. None: they are at `listen`."""
    grpc: Address | None = None
    """Address of the gRPC services of sources such as otlp, with the same tokens and TLS. None: they are not served."""

    @model_validator(mode="after")
    def _pages_have_tokens(self) -> Self:
        if self.origins and not self.tokens:
            raise refusal("`tokens` beside `origins`", "a web page needs a token to push")
        return self

    @property
    def authenticates(self) -> bool:
        return bool(self.tokens) or (self.tls is not None and self.tls.client_ca is not None)


class LimitsConfig(Model):
    """Limits of memory, time and CPU."""

    max_pending_bytes: Size = Field(default=64 << 20, ge=1 << 20)
    """The largest memory of groups and unacknowledged frames. Above it, the edge reads no more records until frames
    have left.
    """
    max_query_bytes: Size | None = Field(default=None, ge=1 << 10)
    """The largest memory of one query's open windows, and of its closed windows that accept late records. Above it,
    these windows take no more records. At most three quarters of `max_pending_bytes`. None: half of
    `max_pending_bytes`.
    """
    max_push_bytes: Size = Field(default=8 << 20, ge=1, le=MAX_PUSH_BYTES)
    """The largest size of one pushed body, both as sent and decompressed."""
    push_timeout_ms: Duration = Field(default=60_000, ge=100)
    """Time in which a pushed body must arrive."""
    push_cpu_ms: Duration = Field(default=5_000, ge=10)
    """The CPU time that decoding one pushed body may take."""
    checkpoint_ms: Duration = Field(default=5000, ge=100)
    """Interval between checkpoints. It is longer if a checkpoint takes more than 5 % of it."""

    @model_validator(mode="after")
    def _leaves_room(self) -> LimitsConfig:
        most = self.max_pending_bytes - self.max_pending_bytes // 4
        if self.max_query_bytes is not None and self.max_query_bytes > most:
            accepted = f"at most three quarters of limits.max_pending_bytes, {most}"
            reason = "it would leave no room for frames"
            raise InvalidConfig("limits.max_query_bytes", self.max_query_bytes, accepted, reason)
        return self
