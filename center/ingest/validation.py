"""Validation of edges' messages. It enforces limits before a message reaches the catalog."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pyarrow as pa

from center.budgets import BudgetReport
from center.edge_access import EdgeAccess
from edgewater.base.errors import ProtocolError
from edgewater.base.streams import (
    COLUMN_TYPES,
    LIVE,
    MAX_CONSTANT,
    MAX_TIME_MS,
    MIN_TIME_MS,
    Constant,
    Delivery,
    EdgeId,
    StreamClock,
    is_constant,
    type_name,
    weaker_than_exactly_once,
)
from edgewater.model.edge_records import HeartbeatRecord, InputRecord, StateDigest, StreamRecord
from edgewater.model.link_forecast import LINK_NAME, LINK_NAME_ACCEPTED
from edgewater.model.lookups import MAX_KNOWN_TABLES
from edgewater.model.measure import NAME
from edgewater.model.query import MAX_MEASURES
from edgewater.wire import MIN_PROTOCOL, PROTOCOL, QueryRef
from edgewater.wire import uplink_pb2 as pb

MAX_SEQ = 1 << 62  # format: of int64
MIN_SPEED, MAX_SPEED = 1e-3, 1e9  # limit: input of a Hello
MAX_ORIGIN_MS = 1 << 53
"""The limit of the origins of a replay's clock. Within it, deadlines and staleness fit into 64 bits."""

MAX_LABELS = 64  # limit: rows of an edge
MAX_STREAMS = 256  # limit: rows of an edge
MAX_COLUMNS = 1_024  # limit: rows of a stream
MAX_ALL_COLUMNS = 8_192
"""Maximum number of columns of all streams of an edge. Each read of the edges from the catalog reads the columns, which
takes 10 µs per column."""
MAX_STATEMENTS = 128
"""Maximum number of statements of a stream about rejected records, and about columns without values."""
MAX_RUNS = 64  # limit: input of a Hello
MAX_DIGESTS = 64  # limit: input of a Hello
MAX_TEXT = 256  # limit: length of a text of an edge
MAX_SOURCE = 255  # limit: length of a source's name
MAX_FINGERPRINTS = 64
"""Maximum number of fingerprints of files that the catalog stores for an edge."""
MAX_FINGERPRINT = 1 << 62  # format: of int64
MAX_CONSTANT_JSON = 12 * MAX_CONSTANT + 2
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}")
_ID_ACCEPTED = "letters, digits, '.', '_' and '-', at most 127, the first a letter or a digit"


@dataclass(frozen=True, slots=True)
class Hello:
    """A validated Hello. Its attributes have the meaning of the fields of the message `pb.Hello`.

    Attributes:
        protocol: the version of the protocol of the session.
        state: the state that the edge runs on.
        release: release of its software; empty if it does not state it.
        link: the name of the link that it shares with other edges; empty if it shares none.
        tables: the digests of the tables that its queries have.
    """

    edge: EdgeId
    incarnation: str
    labels: dict[str, str]
    streams: tuple[StreamRecord, ...]
    oldest_seq: int
    next_seq: int
    sent_at_ms: int
    protocol: int
    state: StateDigest = field(default_factory=StateDigest)
    release: str = ""
    link: str = ""
    tables: frozenset[int] = frozenset()


def read_hello(message: pb.Hello) -> Hello:
    """Validates a Hello. Raises ProtocolError, naming the field, its value and what is accepted."""
    if message.protocol_min > PROTOCOL or message.protocol_max < max(message.protocol_min, MIN_PROTOCOL):
        raise ProtocolError(
            f"Hello: the edge speaks protocol {message.protocol_min} to {message.protocol_max}, this center"
            f" {MIN_PROTOCOL} to {PROTOCOL}"
        )
    for name in ("edge", "incarnation"):
        if not _ID.fullmatch(getattr(message, name)):
            raise ProtocolError(f"Hello: {name} {getattr(message, name)!r:.200}; expected {_ID_ACCEPTED}")
    if message.link and not LINK_NAME.fullmatch(message.link):
        raise ProtocolError(f"Hello: link {message.link!r:.200}; expected {LINK_NAME_ACCEPTED}")
    if not message.oldest_seq <= message.next_seq <= MAX_SEQ:
        raise ProtocolError(f"Hello: frames {message.oldest_seq} … {message.next_seq} - 1 are not a range of frames")
    if any(not 0 < run < MAX_SEQ for run in message.runs):
        raise ProtocolError(f"Hello: runs {list(message.runs)!r:.200}; expected numbers from 1 to {MAX_SEQ - 1}")
    _limit("runs", len(message.runs), MAX_RUNS)
    _limit("durable_records", len(message.durable_records), MAX_STREAMS)
    _limit("frames", len(message.frames), MAX_DIGESTS)
    _limit("labels", len(message.labels), MAX_LABELS)
    _limit("streams", len(message.streams), MAX_STREAMS)
    _limit("tables", len(message.tables), MAX_KNOWN_TABLES)
    _limit("columns", sum(len(s.columns) for s in message.streams), MAX_ALL_COLUMNS)
    streams = tuple(_stream(s) for s in message.streams)
    if len({s.name for s in streams}) != len(streams):
        raise ProtocolError("Hello: two streams have the same name")
    return Hello(
        EdgeId(message.edge),
        message.incarnation,
        {bounded_text(k): bounded_text(v) for k, v in message.labels.items()},
        streams,
        message.oldest_seq,
        message.next_seq,
        message.sent_at_ms,
        min(message.protocol_max, PROTOCOL),
        StateDigest(
            tuple(message.runs),
            {stream: min(count, MAX_SEQ) for stream, count in message.durable_records.items()},
            {f.seq: f.crc32c for f in message.frames if f.seq < MAX_SEQ},
        ),
        bounded_text(message.release),
        message.link,
        frozenset(message.tables),
    )


def permitted(hello: Hello, access: EdgeAccess) -> Hello:
    """Returns the Hello with the queries that the edge may answer. Raises ProtocolError if the edge may not serve a
    stream."""
    for stream in hello.streams:
        if not access.may_serve(stream.name):
            raise ProtocolError(
                f"Hello: edge {hello.edge} may not serve stream {stream.name}; expected only"
                f" {', '.join(access.streams or ())}, by its entry among the tokens"
            )
    return replace(hello, streams=tuple(replace(s, queries=access.queries) for s in hello.streams))


def _stream(message: pb.Stream) -> StreamRecord:
    if not NAME.fullmatch(message.name):
        raise ProtocolError(f"Hello: {message.name!r:.200} is not a stream's name")
    _limit(f"columns of {message.name}", len(message.columns), MAX_COLUMNS)
    for column in message.columns:
        if column.type not in COLUMN_TYPES:
            known = ", ".join(COLUMN_TYPES)
            raise ProtocolError(
                f"Hello: column {message.name}.{column.name:.200}: type {column.type!r:.200}; expected one of {known}"
            )
    clock = LIVE
    if message.HasField("clock"):
        clock = StreamClock(message.clock.event_origin_ms, message.clock.wall_origin_ms, message.clock.speed)
        if not MIN_SPEED <= clock.speed <= MAX_SPEED:
            raise ProtocolError(
                f"Hello: stream {message.name} runs at speed {clock.speed}; expected {MIN_SPEED:g} to {MAX_SPEED:g}"
            )
        for field, origin in (("event", clock.event_origin_ms), ("wall", clock.wall_origin_ms)):
            if abs(origin) > MAX_ORIGIN_MS:
                raise ProtocolError(
                    f"Hello: stream {message.name}: {field}_origin_ms {origin}; expected at most {MAX_ORIGIN_MS}"
                )
    columns = {bounded_text(c.name): COLUMN_TYPES[c.type] for c in message.columns}
    return StreamRecord(message.name, columns, clock, _deliveries(message), constants=_constants(message, columns))


def _deliveries(message: pb.Stream) -> tuple[Delivery, ...]:
    """Reads the deliveries of a stream. Raises ProtocolError for an unknown number: answers would promise too much."""
    known = pb.Stream.Delivery.items()
    names = {number: name for name, number in known if number != pb.Stream.DELIVERY_UNSPECIFIED}
    for number in message.deliveries:
        if number not in names:
            accepted = ", ".join(f"{number} ({name})" for number, name in names.items())
            raise ProtocolError(f"Hello: stream {message.name}: delivery {number}; expected one of {accepted}")
    return weaker_than_exactly_once(Delivery[names[number]] for number in message.deliveries)


def _constants(message: pb.Stream, columns: Mapping[str, pa.DataType]) -> dict[str, Constant]:
    """Returns the columns with one value in all records. Raises ProtocolError if a constant has another type than its
    column."""
    result: dict[str, Constant] = {}
    for name, text in sorted(message.constants.items()):
        try:
            value = json.loads(text) if len(text) <= MAX_CONSTANT_JSON else None
        except (ValueError, RecursionError):
            value = None
        if not is_constant(value, type_name(columns[name]) if name in columns else ""):
            raise ProtocolError(
                f"Hello: constant {message.name}.{name:.200}: {text:.200}; expected a string, an int64 or a bool, as"
                " its column is, in JSON"
            )
        result[name] = value
    return result


def read_heartbeat(hello: Hello, message: pb.Heartbeat, now_ms: int) -> HeartbeatRecord:
    """Converts a heartbeat for the catalog. A number that a database cannot store is replaced by a number that it
    can store.

    Args:
        hello: the Hello of the session.
    """
    streams = [s for s in message.streams if NAME.fullmatch(s.stream)][:MAX_STREAMS]
    rtt_ms = _measured(message.rtt_ms)
    return HeartbeatRecord(
        edge=hello.edge,
        watermarks={
            s.stream: MAX_TIME_MS if s.ended else min(s.watermark_ms, MAX_TIME_MS)
            for s in streams
            if s.ended or s.watermark_ms > MIN_TIME_MS
        },
        records={s.stream: min(s.records, MAX_SEQ) for s in streams},
        drops=_drops(message.drops),
        backlog_bytes=min(message.backlog_bytes, MAX_SEQ),
        bandwidth_bytes_s=_measured(message.bandwidth_bytes_s),
        rtt_ms=rtt_ms,
        clock_offset_ms=message.sent_at_ms + rtt_ms / 2 - now_ms,
        seen_at_ms=now_ms,
        rejected={
            s.stream: tuple(
                (bounded_text(r.source), bounded_text(r.reason), min(r.records, MAX_SEQ))
                for r in s.rejected[:MAX_STATEMENTS]
            )
            for s in streams[:MAX_STATEMENTS]
            if s.rejected
        },
        first_rejected={
            (s.stream, bounded_text(r.source), bounded_text(r.reason)): bounded_text(r.first)
            for s in streams[:MAX_STATEMENTS]
            for r in s.rejected[:MAX_STATEMENTS]
            if r.first
        },
        null_columns={
            s.stream: tuple((bounded_text(c.source), bounded_text(c.column)) for c in s.null_columns[:MAX_STATEMENTS])
            for s in streams[:MAX_STATEMENTS]
            if s.null_columns
        },
        incarnation=hello.incarnation,
        release=hello.release,
        durable={
            stream: min(count, MAX_SEQ)
            for stream, count in message.durable_records.items()
            if stream in (s.stream for s in streams)
        },
    )


def read_link_report(message: pb.LinkReport) -> tuple[float, float, dict[QueryRef, tuple[float, float]]]:
    """Returns what a link carries at least and at most, and by query the bytes of a slice that are sent and omitted."""
    loads = {
        QueryRef(q.query, q.query_version): (_measured(q.sent_bytes), _measured(q.omitted_bytes))
        for q in message.queries
    }
    return _measured(message.low_bytes_s), _measured(message.high_bytes_s), loads


def read_inputs(message: pb.Heartbeat) -> tuple[InputRecord, ...]:
    """Returns the files that an edge reads, at most `MAX_FINGERPRINTS`. Invalid reports are omitted."""
    left, found = MAX_FINGERPRINTS, dict[tuple[str, str], InputRecord]()
    for each in message.inputs:
        fingerprints = tuple(sorted({f for f in each.fingerprints[:left] if f < MAX_FINGERPRINT}))
        source = bounded_text(each.source, MAX_SOURCE)
        if NAME.fullmatch(each.stream) and fingerprints:
            found[each.stream, source] = InputRecord(each.stream, source, fingerprints)
            left -= len(fingerprints)
    return tuple(found.values())


def read_likely_bandwidth(message: pb.Heartbeat) -> float:
    """The bandwidth of an edge's link, or the likely one while it is unknown, in bytes per second."""
    return _measured(message.bandwidth_bytes_s) or _measured(message.likely_bytes_s)


def read_utilization(message: pb.Heartbeat) -> float:
    """The edge's utilization, 0 to 1; 0 if the edge does not measure it."""
    return min(_measured(message.busy_share), 1.0)


def read_budget_report(edge: EdgeId, message: pb.BudgetReport) -> tuple[QueryRef, BudgetReport]:
    """Validates a budget report. Raises ProtocolError. The allocator detects a share that was not granted."""
    who = f"edge {edge}: a budget report"
    if not NAME.fullmatch(message.query) or message.query_version >= MAX_SEQ:
        raise ProtocolError(f"{who} of {message.query!r:.100}, which is not a query's name")
    if message.version >= MAX_SEQ or abs(message.from_ms) > MAX_TIME_MS:
        raise ProtocolError(f"{who}: version {message.version} from {message.from_ms} on; expected less than {MAX_SEQ}")
    for name in ("shares", "drift_per_s"):
        if len(getattr(message, name)) > MAX_MEASURES:
            raise ProtocolError(f"{who}: {len(getattr(message, name))} {name}, at most {MAX_MEASURES}")
    report = BudgetReport(
        message.version, dict(message.shares), message.from_ms, message.update_bytes, dict(message.drift_per_s)
    )
    return QueryRef(message.query, message.query_version), report


def _drops(counts: Mapping[str, int]) -> dict[str, int]:
    return {bounded_text(reason): min(count, MAX_SEQ) for reason, count in sorted(counts.items())[:MAX_LABELS]}


def _measured(value: float) -> float:
    """Returns a measured amount; 0 (unknown) for a value that no measurement can have."""
    return value if 0 < value < math.inf else 0.0


def _limit(what: str, count: int, most: int) -> None:
    if count > most:
        raise ProtocolError(f"Hello: {count} {what}, at most {most}")


def bounded_text(text: str, limit: int = MAX_TEXT) -> str:
    """Returns a text that every database can store: without NUL, at most `limit` characters."""
    return text.replace("\0", "�")[:limit]
