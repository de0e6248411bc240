"""The interface between the uplink and the agent: frames to send, and handlers of control messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from edge.uplink.flow_control import LinkForecast
from edgewater.model.query import QuerySpec
from edgewater.model.window_range import NO_BORDERS, WindowRange
from edgewater.wire import Frame, QueryRef
from edgewater.wire import uplink_pb2 as pb


@dataclass(frozen=True, slots=True)
class Workload:
    """How busy the edge is.

    Attributes:
        busy_share: returns the busy share since the last call (`BusyMeter.take_busy_share`).
        unread: returns the streams that may have unread input.
    """

    busy_share: Callable[[], float] = lambda: 0.0
    unread: Callable[[], tuple[str, ...]] = tuple


@dataclass(frozen=True, slots=True)
class Input:
    """The files of a source.

    Attributes:
        fingerprints: `Source.fingerprints` of `edge.records`.
    """

    stream: str
    source: str
    fingerprints: tuple[int, ...]


def accepted(query: QueryRef) -> pb.QueryStatus:
    """Returns the report that this edge runs the query."""
    return pb.QueryStatus(query=query.name, query_version=query.version, accepted=True)


def refused(query: QueryRef, code: str, message: str) -> pb.QueryStatus:
    """Returns the report that this edge cannot run the query."""
    return pb.QueryStatus(query=query.name, query_version=query.version, code=code, message=message)


class UplinkEndpoint(Protocol):
    """The agent's end of the uplink.

    All methods are called on the event loop and must not block it. The sequence numbers of frames are
    contiguous over `unacknowledged` and `take`.
    """

    def hello(self) -> pb.Hello:
        """Returns the first message of a session."""

    def table_rows(self) -> Iterable[str]:
        """Returns the rows of the tables of all queries, as `TableLookup.rows`."""

    def unacknowledged(self, after: int | None) -> Iterable[Frame]:
        """Returns the *durable* frames with seq above `after` (None: all), ascending.

        Called at the beginning of each session. A frame that `take` is still making durable must not be
        included: it would be sent before it is durable, and `take` returns it anyway.
        """

    async def take(self, capacity_bytes: int) -> Sequence[Frame]:
        """Waits for the next frames to send, and until they are durable.

        Before compression, they have together at most about `capacity_bytes`.

        At most one call at a time. A call may outlive its session; it is cancelled only when the uplink ends.
        """

    def heartbeat(self) -> pb.Heartbeat:
        """Returns the heartbeat to send now."""

    def link_report(self, low_bytes_s: float, high_bytes_s: float, *, all_queries: bool) -> pb.LinkReport | None:
        """Returns the report about the link to send now; None: none is due.

        Args:
            low_bytes_s, high_bytes_s: as in the report.
            all_queries: at the beginning of a session.
        """

    def has_news(self) -> bool:
        """Returns whether the center should have a heartbeat now, although the interval has not passed."""

    def may_omit(self) -> bool:
        """Returns whether a query may omit values that the link cannot carry in time."""

    async def budget_reports(self, *, all_queries: bool) -> Sequence[pb.BudgetReport]:
        """Returns reports of the applied shares, when these are durable.

        Args:
            all_queries: report all queries (at the beginning of a session), not only queries whose report is due.
        """

    def on_welcome(self, acked_through: int | None) -> None:
        """Called when a session has been accepted; the center has all frames up to `acked_through`."""

    def on_ack(self, through: int) -> None:
        """Called when all frames up to `through` are durable at the center. `through` never decreases."""

    def on_queries(
        self, queries: Sequence[tuple[QueryRef, QuerySpec]], windows: Mapping[QueryRef, WindowRange] = NO_BORDERS
    ) -> Sequence[pb.QueryStatus]:
        """Applies the complete set of queries; the returned reports are sent to the center."""

    def on_budget(self, budget: pb.Budget) -> None:
        """Applies this edge's shares of a query's error budget, and the query's processing delay."""

    def on_sampling(self, sampling: pb.Sampling) -> None:
        """Applies the sampling rate of a query with an accuracy."""

    def on_refused(self, query: QueryRef, reason: str, message: str, frames: int) -> None:
        """Called when the center has refused `frames` more frames of a query, in whole or in part."""

    def on_link(self, forecast: Callable[[], LinkForecast]) -> None:
        """Called at the beginning of each session.

        Args:
            forecast: forecasts the link for frames that are sent from the time of its call on.
        """
