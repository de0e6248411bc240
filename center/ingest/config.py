"""What a gateway is told when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from center.budgets import AllocationPolicy
from center.config import TlsFiles


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Limits and credentials of a gateway.

    Attributes:
        tokens: bearer token by edge id. Without tokens and without client certificates any edge may
            connect, which is allowed on loopback only.
        max_frame_bytes: the largest frame that is taken, as its message's size.
        credit_bytes: bytes of frames that an edge may have in flight.
        max_waiting_bytes: bytes of frames that wait for their commit, over all sessions.
        max_sessions: edges that are connected at once; as many calls may be waiting for their Hello.
        poll_ms: how often the catalog is asked for changes; a query reaches its edges within that.
        heartbeat_ms: how often an edge's heartbeats are noted in the catalog, at most.
        retry_ms, retry_max_ms: wait before a commit that failed is tried again: first, and at most.
        hello_timeout_ms: a session that has not said Hello by then is ended.
        shares: when error budgets are divided anew.
    """

    tokens: Mapping[str, str] = field(default_factory=dict, repr=False)
    tls: TlsFiles | None = None
    max_frame_bytes: int = 4 << 20
    credit_bytes: int = 4 << 20
    max_waiting_bytes: int = 256 << 20
    max_sessions: int = 20_000
    poll_ms: int = 200
    heartbeat_ms: int = 1_000
    retry_ms: int = 100
    retry_max_ms: int = 5_000
    hello_timeout_ms: int = 10_000
    allocation: AllocationPolicy = field(default_factory=AllocationPolicy)
