"""The catalog's records of edges: identity, streams, progress, query statuses, alarms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import pyarrow as pa
from sqlalchemy import Row

from edgewater.model.errors import ProtocolError
from edgewater.model.query import QuerySpec
from edgewater.model.streams import COLUMN_TYPES, Constant, Delivery, EdgeId, StreamClock, type_name
from edgewater.wire import QueryRef

UNREACHABLE_AFTER_MS = 5_000
"""A gateway without a sign of life for this long has no sessions any more; nor has, by default, a silent edge."""
NO_PROGRESS: dict[str, Any] = {"watermarks": {}, "records": {}, "drops": {}, "rejected": {}, "null_columns": {}}
"""Progress of an incarnation that has not sent a heartbeat yet."""


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """A stream as one edge serves it.

    Attributes:
        deliveries: each delivery of its sources but exactly-once, sorted.
        queries: patterns of the names of the queries that the edge may answer (`fnmatch`); None: all.
        constants: columns that have one value in all records of the stream at this edge.
    """

    name: str
    columns: dict[str, pa.DataType]
    clock: StreamClock
    deliveries: tuple[Delivery, ...] = ()
    queries: tuple[str, ...] | None = None
    constants: Mapping[str, Constant] = field(default_factory=dict)

    def answers(self, spec: QuerySpec) -> bool:
        """Whether the query reads this stream, and the edge may answer it."""
        allowed = self.queries is None or any(fnmatchcase(spec.name, pattern) for pattern in self.queries)
        return self.name == spec.stream and allowed


@dataclass(frozen=True, slots=True)
class EdgeRecord:
    """An edge, as its last Hello and heartbeat described it.

    Attributes:
        connected: a gateway holds a session with it. It stays set when that gateway dies: use `reachable`.
        watermarks: event time per stream before which the edge expects no more records; `MAX_TIME_MS` for
            a stream that has ended.
        records: records accepted per stream since the incarnation began.
        drops: records not counted, by reason, since the incarnation began.
        rejected: per stream (source, reason, records): records that sources rejected, since the incarnation began.
        null_columns: per stream (source, column): columns that had values, and are null in most of the newest records.
        clock_offset_ms: the edge's wall clock less the center's.
        retired: declared gone for good; answers no longer wait for it.
        incarnations: number of incarnations seen.
        state_lost_at_ms: wall time at which the center last noticed that the edge's state was lost: a new incarnation
            took the place of another one, or frames were lost on both sides. What the edge had accepted by then and
            not shipped is unknown. None: never.
        former_streams: streams that it served before: frames of them may still come from its journal.
        last_seen_ms: wall time at which it was heard from, or later: a gateway of many sessions writes some of the
            heartbeats of each second, and at once only that an edge has fallen silent or has come back.
        heard_by_ms: wall time of the last sign of the gateway that hears from it; None: none does.
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

    @property
    def seen_before_ms(self) -> int:
        """Wall time until which the edge may have been heard from."""
        return self.last_seen_ms if self.heard_by_ms is None else max(self.last_seen_ms, self.heard_by_ms)

    def reachable(self, now_ms: int, within_ms: int = UNREACHABLE_AFTER_MS) -> bool:
        """Whether its session was alive within `within_ms`."""
        return self.connected and now_ms - self.seen_before_ms <= within_ms

    def stream(self, name: str) -> StreamRecord | None:
        return next((s for s in self.streams if s.name == name), None)


@dataclass(frozen=True, slots=True)
class StateDigest:
    """The state of an edge as its Hello states it, for a comparison with what the center has stored.

    Attributes:
        runs: numbers of the processes that have run on the state, the oldest first; empty: the edge does not say.
        records: durable records by stream; without the streams whose records cannot be compared.
        checksums: CRC32C of frames that are not acknowledged, by seq.
    """

    runs: tuple[int, ...] = ()
    records: Mapping[str, int] = field(default_factory=dict)
    checksums: Mapping[int, int] = field(default_factory=dict)

    @property
    def run(self) -> int:
        """The number of the process that sends the Hello; 0: the edge does not say."""
        return self.runs[-1] if self.runs else 0


@dataclass(frozen=True, slots=True)
class HeartbeatRecord:
    """The contents of one heartbeat; fields as in `EdgeRecord`.

    Attributes:
        incarnation: the incarnation that sent it.
        durable: records by stream that are durable in the edge's state.
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

    def to_row(self) -> dict[str, Any]:
        progress: dict[str, Any] = {name: dict(getattr(self, name)) for name in NO_PROGRESS}
        progress["durable"] = {"incarnation": self.incarnation, "records": dict(self.durable)}
        return {
            "progress": progress,
            "backlog_bytes": self.backlog_bytes,
            "bandwidth_bytes_s": self.bandwidth_bytes_s,
            "rtt_ms": self.rtt_ms,
            "clock_offset_ms": self.clock_offset_ms,
            "last_seen_ms": self.seen_at_ms,
        }


@dataclass(frozen=True, slots=True)
class QueryStatusRecord:
    """Whether an edge runs a query, and if not, the error's code and message."""

    query: QueryRef
    edge: EdgeId
    accepted: bool
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class AlarmRecord:
    """An event that must not happen. A repetition raises `times`, not the number of alarms.

    `times` may include older messages of the same kind, edge and query: see `center.catalog.alarm_rows`.

    Attributes:
        query: key of the query that it is about; empty: of none.
    """

    kind: str
    edge: EdgeId
    message: str
    first_at_ms: int
    last_at_ms: int
    times: int
    query: str = ""


def expected_edges(spec: QuerySpec, edges: Iterable[EdgeRecord]) -> list[EdgeId]:
    """The edges that a query waits for, sorted: those that it names, or all that serve its stream and are not retired.

    A query that names an edge waits for it even if it is retired.
    """
    if spec.edges is not None:
        return sorted(EdgeId(e) for e in spec.edges)
    return sorted(e.edge for e in edges if not e.retired and any(s.answers(spec) for s in e.streams))


def contributes(spec: QuerySpec, edge: EdgeRecord) -> bool:
    """Whether frames of an edge count in a query: of every edge that the query waits for, or has waited for.

    So an edge may be retired, or have ceased to serve the stream: what it built before still comes.
    """
    named = spec.edges is None or edge.edge in spec.edges
    return named and any(s.answers(spec) for s in (*edge.streams, *edge.former_streams))


def streams_to_json(streams: Iterable[StreamRecord]) -> list[dict[str, Any]]:
    return [
        {
            "name": s.name,
            "columns": [[n, type_name(t)] for n, t in s.columns.items()],
            "clock": asdict(s.clock),
            **({"deliveries": list(s.deliveries)} if s.deliveries else {}),
            **({} if s.queries is None else {"queries": list(s.queries)}),
            **({"constants": dict(s.constants)} if s.constants else {}),
        }
        for s in streams
    ]


def streams_from_json(streams: Iterable[Mapping[str, Any]]) -> tuple[StreamRecord, ...]:
    return tuple(
        StreamRecord(
            s["name"],
            {n: COLUMN_TYPES[t] for n, t in s["columns"]},
            StreamClock(**s["clock"]),
            tuple(map(Delivery, s.get("deliveries", ()))),
            tuple(s["queries"]) if "queries" in s else None,
            s.get("constants", {}),
        )
        for s in streams
    )


def edge_from_row(
    row: Row[Any],
    streams: tuple[tuple[StreamRecord, ...], tuple[StreamRecord, ...]],
    incarnations: int,
    state_lost_at_ms: int | None,
    gateways: Mapping[str, tuple[int, int]],
) -> EdgeRecord:
    """An `edges` row as a record.

    Args:
        streams: those that it serves, and those that it has served.
        gateways: by gateway, its last sign of life, and the silence of an edge that it would have recorded by then.
    """
    heard_by_ms, silence_ms = gateways.get(row.gateway, (None, 0)) if row.connected else (None, 0)
    heard_from_ms = row.last_seen_ms if heard_by_ms is None else heard_by_ms - silence_ms
    return EdgeRecord(
        edge=EdgeId(row.edge),
        incarnation=row.incarnation,
        labels=row.labels,
        streams=streams[0],
        former_streams=streams[1],
        first_seen_ms=row.first_seen_ms,
        last_seen_ms=max(row.last_seen_ms, heard_from_ms),
        heard_by_ms=heard_by_ms,
        connected=row.connected,
        watermarks=row.progress["watermarks"],
        records=row.progress["records"],
        drops=row.progress["drops"],
        backlog_bytes=row.backlog_bytes,
        bandwidth_bytes_s=row.bandwidth_bytes_s,
        rtt_ms=row.rtt_ms,
        clock_offset_ms=row.clock_offset_ms,
        retired=row.retired,
        incarnations=incarnations,
        state_lost_at_ms=state_lost_at_ms,
        rejected=row.progress["rejected"],
        null_columns=row.progress["null_columns"],
    )


def require_consistent_schema(
    edge: EdgeId, streams: Iterable[StreamRecord], others: Sequence[tuple[EdgeId, Sequence[StreamRecord]]]
) -> None:
    """Checks that columns of streams without declared ones have one type at all edges. Some edges may lack a column.

    Args:
        others: other edges that are not retired, each with its streams; one of those with equal streams suffices.

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
