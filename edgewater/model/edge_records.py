"""Edges as the center records them: identity, streams, progress, and their reports about queries and files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import pyarrow as pa

from edgewater.base.errors import ProtocolError
from edgewater.base.streams import Constant, Delivery, EdgeId, StreamClock, type_name
from edgewater.model.query import QuerySpec
from edgewater.wire import QueryRef

UNREACHABLE_AFTER_MS = 5_000  # limit: how late a lost session is noticed
"""If a gateway has not reported for this time, in ms, it has no sessions any more. By default, an edge that is silent
for this time has no session.
"""


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """A stream as one edge serves it.

    Attributes:
        deliveries: the deliveries of its sources except exactly-once, sorted.
        queries: patterns of the names of the queries that the edge may answer (`fnmatch`); None for all queries.
        constants: columns that have one value in all records of the stream at this edge.
    """

    name: str
    columns: dict[str, pa.DataType]
    clock: StreamClock
    deliveries: tuple[Delivery, ...] = ()
    queries: tuple[str, ...] | None = None
    constants: Mapping[str, Constant] = field(default_factory=dict)

    def answers(self, spec: QuerySpec) -> bool:
        """Returns whether the query reads this stream, and the edge may answer it."""
        allowed = self.queries is None or any(fnmatchcase(spec.name, pattern) for pattern in self.queries)
        return self.name == spec.stream and allowed


@dataclass(frozen=True, slots=True)
class EdgeRecord:
    """An edge, as its last Hello and heartbeat described it.

    Attributes:
        connected: whether a gateway has a session with the edge. It stays set if that gateway dies, so use `reachable`.
        watermarks: by stream, the event time before which the edge expects no more records; `MAX_TIME_MS` for a stream
            that has ended.
        records: by stream, the records accepted since the incarnation began.
        drops: records not counted since the incarnation began, by reason.
        rejected: by stream, (source, reason, records) for records that sources rejected since the incarnation began.
        null_columns: by stream, (source, column) for columns that had values, and are null in most of the newest
            records.
        clock_offset_ms: the edge's wall clock minus the center's wall clock.
        retired: whether an admin has declared that the edge is gone for good. Answers no longer wait for it.
        incarnations: number of incarnations that the center has seen.
        state_lost_at_ms: wall time at which the center last noticed that the edge's state was lost; None if never. A
            new incarnation replaced another one, or frames were lost on both sides. It is unknown which records the
            edge had accepted by then and not shipped.
        former_streams: streams that the edge served before. Frames of these streams may still come from its journal.
        last_seen_ms: wall time of the last message from the edge, or later. A gateway with many sessions does not write
            each heartbeat. If an edge becomes silent or comes back, the gateway writes it at once.
        heard_by_ms: wall time of the last report of the gateway that has the session; None if no gateway has a session.
        release: release of its software; empty if it has stated none.
    """

    edge: EdgeId
    incarnation: str
    labels: dict[str, str]
    streams: tuple[StreamRecord, ...]
    first_seen_ms: int
    last_seen_ms: int
    connected: bool
    watermarks: dict[str, int]
    records: dict[str, int]
    drops: dict[str, int]
    backlog_bytes: int
    bandwidth_bytes_s: float
    rtt_ms: float
    clock_offset_ms: float
    retired: bool
    incarnations: int
    state_lost_at_ms: int | None = None
    former_streams: tuple[StreamRecord, ...] = ()
    heard_by_ms: int | None = None
    rejected: Mapping[str, Sequence[tuple[str, str, int]]] = field(default_factory=dict)
    null_columns: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    release: str = ""

    @property
    def seen_before_ms(self) -> int:
        """The wall time until which the edge may have sent a message."""
        return self.last_seen_ms if self.heard_by_ms is None else max(self.last_seen_ms, self.heard_by_ms)

    def reachable(self, now_ms: int, within_ms: int = UNREACHABLE_AFTER_MS) -> bool:
        """Returns whether the edge's session was alive within the last `within_ms`."""
        return self.connected and now_ms - self.seen_before_ms <= within_ms

    def stream(self, name: str) -> StreamRecord | None:
        return next((s for s in self.streams if s.name == name), None)


@dataclass(frozen=True, slots=True)
class StateDigest:
    """The state of an edge according to its Hello. The center compares it with its own records.

    Attributes:
        runs: numbers of the processes that have run on the state, the oldest first; empty if the edge does not state
            them.
        records: durable records by stream. Streams whose records cannot be compared are left out.
        checksums: CRC32C of each unacknowledged frame, by seq.
    """

    runs: tuple[int, ...] = ()
    records: Mapping[str, int] = field(default_factory=dict)
    checksums: Mapping[int, int] = field(default_factory=dict)

    @property
    def run(self) -> int:
        """The number of the process that sends the Hello; 0 if the edge does not state it."""
        return self.runs[-1] if self.runs else 0


@dataclass(frozen=True, slots=True)
class HeartbeatRecord:
    """The content of one heartbeat. `EdgeRecord` describes the other fields.

    Attributes:
        incarnation: the incarnation that sent the heartbeat.
        durable: number of durable records in the edge's state, by stream.
        first_rejected: by stream, source and reason, what the edge states about the first rejected record.
    """

    edge: EdgeId
    watermarks: Mapping[str, int]
    records: Mapping[str, int]
    drops: Mapping[str, int]
    backlog_bytes: int
    bandwidth_bytes_s: float
    rtt_ms: float
    clock_offset_ms: float
    seen_at_ms: int
    rejected: Mapping[str, Sequence[tuple[str, str, int]]] = field(default_factory=dict)
    null_columns: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    incarnation: str = ""
    durable: Mapping[str, int] = field(default_factory=dict)
    release: str = ""
    first_rejected: Mapping[tuple[str, str, str], str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class QueryStatusRecord:
    """Whether an edge runs a query. If it does not, the code and the message of the error."""

    query: QueryRef
    edge: EdgeId
    accepted: bool
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class InputRecord:
    """The files of one source of an edge.

    Attributes:
        fingerprints: hashes below 2^62 of the beginnings of files, without duplicates.
    """

    stream: str
    source: str
    fingerprints: tuple[int, ...]


def expected_edges(spec: QuerySpec, edges: Iterable[EdgeRecord]) -> list[EdgeId]:
    """Returns the edges that a query waits for, sorted: the edges that it names, or the edges that serve its stream.

    Retired edges are left out, unless the query names them.
    """
    if spec.edges is not None:
        return sorted(EdgeId(e) for e in spec.edges)
    return sorted(e.edge for e in edges if not e.retired and any(s.answers(spec) for s in e.streams))


def contributes(spec: QuerySpec, edge: EdgeRecord) -> bool:
    """Returns whether frames of an edge count in a query: the query waits for the edge, or has waited for it.

    The edge may be retired, or no longer serve the stream, because its earlier frames may still come.
    """
    named = spec.edges is None or edge.edge in spec.edges
    return named and any(s.answers(spec) for s in (*edge.streams, *edge.former_streams))


def require_consistent_schema(
    edge: EdgeId, streams: Iterable[StreamRecord], others: Sequence[tuple[EdgeId, Sequence[StreamRecord]]]
) -> None:
    """Checks that each column of a stream has one type at all edges. Some edges may lack a column.

    It is called for streams without declared columns.

    Args:
        others: other edges that are not retired, each with its streams. If several edges have equal streams, one of
            them is enough.

    Raises:
        ProtocolError: names the column, both types and both edges.
    """
    for stream in streams:
        for other, theirs in others:
            known = next((s for s in theirs if s.name == stream.name), None)
            if known is None:
                continue
            for column, kind in stream.columns.items():
                known_kind = known.columns.get(column, kind)
                if known_kind != kind:
                    raise ProtocolError(
                        f"Hello: column {stream.name}.{column} is {type_name(kind)} at edge {edge} and"
                        f" {type_name(known_kind)} at edge {other}; give it one type everywhere, or declare it at"
                        f" the center (streams.{stream.name}.columns), or retire {other}"
                    )
