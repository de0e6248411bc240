"""What the uplink needs from the agent: where frames come from, and who hears what the center says.

All methods are called on the event loop and must not block it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from edgewater.query import QuerySpec
from edgewater.wire import uplink_pb2 as pb
from edgewater.wire.frames import Frame, QueryRef, SamplingReason


@dataclass(frozen=True, slots=True)
class QueryStatusReport:
    """Whether this edge runs a query; if not, the error's code and message."""

    ref: QueryRef
    accepted: bool
    code: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class BudgetOrder:
    """This edge's part of a query's budget, as the center says it; fields as in the wire's Budget."""

    query: QueryRef
    shares: Mapping[str, float]
    version: int = 0
    from_ms: int = 0
    center_ms: int = 0


class Outbox(Protocol):
    """Where frames come from. Their seqs are contiguous over both methods."""

    def unacknowledged(self, after: int | None) -> Iterable[Frame]:
        """The frames with seq above `after` (None: all) that are *durable*, ascending.

        Called at each session's beginning. A frame that `take` is still making durable must not be
        among them: it would leave before it is safe, and `take` will give it anyway.
        """

    async def take(self, capacity_bytes: int) -> Frame:
        """Waits for a frame worth sending, of about `capacity_bytes` at most, and until it is durable.

        At most one call at a time. It outlives the session that began it, and is cancelled only when
        the uplink ends.
        """


class Listener(Protocol):
    """Who hears what the center says, and says what the edge has to say."""

    def on_welcome(self, acked_through: int | None) -> None:
        """A session has begun; the center has all frames up to this one."""

    def on_ack(self, through: int) -> None:
        """All frames up to `through` are durable at the center. Never goes back."""

    def on_queries(self, version: int, queries: Sequence[tuple[QueryRef, QuerySpec]]) -> Sequence[QueryStatusReport]:
        """The complete set of queries to answer; what is returned is told to the center."""

    def on_budget(self, order: BudgetOrder) -> None:
        """This edge's shares of a query's error budget, or the center's part of a staleness budget."""

    def on_sampling(self, query: QueryRef, rate: float, clock_offset_ms: float, reason: SamplingReason) -> None:
        """How a query with an accuracy is to be observed, and why so."""

    async def budget_reports(self, *, anew: bool) -> Sequence[pb.BudgetReport]:
        """The shares that are applied, once they are durable: those of which there is news, or all of them
        `anew`, because a session has begun."""

    def on_link(self, bandwidth_bytes_s: float, rtt_ms: float, in_flight_bytes: int) -> None:
        """The link as measured anew; 0 for what is not known yet, as a link's bandwidth before it was full."""

    def hello(self) -> pb.Hello: ...

    def heartbeat(self) -> pb.Heartbeat: ...
