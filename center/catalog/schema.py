"""The catalog's tables."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    UniqueConstraint,
)
from sqlalchemy.types import JSON

from center.storage.database import FreeText, Identifier, key, required, table_in
from edgewater.base.streams import MAX_TIME_MS, MIN_TIME_MS
from edgewater.wire import QueryRef

metadata = MetaData()
table = table_in(metadata)
_Edge = Identifier(128)
"""The id of an edge, or of an incarnation."""


def is_of(table: Table, query: QueryRef) -> ColumnElement[bool]:
    """Returns the condition that a row is of a query; the table has the columns `name` and `version`."""
    return (table.c.name == query.name) & (table.c.version == query.version)


def _of_query() -> list[Column[Any]]:
    return [*key(Identifier(63), "name"), *key(BigInteger, "version")]


counters = table("counters", *key(Identifier(64), "name"), *required(BigInteger, "value"))
"""``catalog``, ``budgets``: incremented by every change that assignments depend
on; the row ``catalog`` is also the lock under which queries and edges change."""

queries = table(
    "queries",
    *_of_query(),
    *required(JSON, "spec"),
    *required(BigInteger, "registered_at_ms", "last_position"),
    Column("deleted_at_ms", BigInteger),
    *required(BigInteger, "from_ms", server_default=str(MIN_TIME_MS)),
    *required(BigInteger, "until_ms", server_default=str(MAX_TIME_MS)),
    *required(BigInteger, "ended_at_ms", server_default="0"),
)
"""A row per version of a query. The version has the windows that start in [``from_ms``, ``until_ms``). ``ended_at_ms``
is 0 while edges answer it."""
_is_open = queries.c.deleted_at_ms.is_(None) & (queries.c.until_ms == MAX_TIME_MS)
one_open_query_per_name = Index(
    "one_open_query_per_name", queries.c.name, unique=True, sqlite_where=_is_open, postgresql_where=_is_open
)

edges = table(
    "edges",
    *key(_Edge, "edge"),
    *required(_Edge, "incarnation"),
    *required(Identifier(64), "session", "gateway"),
    *required(JSON, "labels", "streams", "progress"),
    *required(BigInteger, "first_seen_ms", "last_seen_ms", "backlog_bytes"),
    *required(BigInteger, "forgotten", default=0),
    *required(Float, "bandwidth_bytes_s", "rtt_ms", "clock_offset_ms"),
    *required(Boolean, "connected", "retired"),
)
"""One row per edge that ever sent a Hello. ``progress``: watermarks, records and drops; ``durable``: its durable
records, with their incarnation. ``forgotten``: number of its incarnations that have sent frames and were deleted.
``gateway``: the gateway that receives its messages; empty: no gateway does."""

gateways = table("gateways", *key(Identifier(64), "gateway"), *required(BigInteger, "beat_at_ms", "silence_ms"))
"""A row per gateway process that has had sessions. At ``beat_at_ms``, each edge whose row names the gateway had sent it
a message within the last ``silence_ms``."""

stream_columns = table("stream_columns", *key(Identifier(63), "stream"), *required(JSON, "columns"))
"""Columns of streams that an admin has set, as lists of name, type and description."""

lookup_tables = table(
    "lookup_tables",
    *_of_query(),
    *required(Identifier(255), "key"),
    *required(JSON, "columns"),
    *required(BigInteger, "row_count", "updated_at_ms"),
    *required(FreeText, "rows"),
)
"""Tables that queries look up columns in. ``rows``: as `edgewater.model.lookups.encode_rows` returns them."""

links = table(
    "links",
    *key(_Edge, "edge"),
    *required(Identifier(63), "link"),
    *required(BigInteger, "until_ms", "stated_at_ms"),
    *required(Float, "low_bytes_s", "high_bytes_s", "best_bytes_s"),
    *required(JSON, "loads"),
)
"""The fields of `LinkRecord`. ``loads``: lists of a query's name and version, and its bytes."""

lost_states = table("lost_states", *key(_Edge, "edge"), *required(BigInteger, "lost_at_ms"))
"""Edges whose state was lost, with the wall time at which the center noticed the last loss."""

incarnations = table(
    "incarnations",
    *key(_Edge, "edge", "incarnation"),
    *required(BigInteger, "first_seq", "awaited_seq", "hello_at_ms"),
    *required(BigInteger, "run", default=0),
)
"""``first_seq … awaited_seq - 1`` are durable. ``hello_at_ms``: its last Hello. ``run``: the process that sent this
Hello; only frames of this process are indexed; 0: the edge does not state it. The row is the lock under which its
frames are indexed."""

statuses = table(
    "query_statuses",
    *_of_query(),
    *key(_Edge, "edge"),
    *required(Boolean, "accepted"),
    *required(Identifier(64), "code"),
    *required(FreeText, "message"),
)

frames = table(
    "frames",
    *_of_query(),
    *key(BigInteger, "position"),
    *required(_Edge, "edge", "incarnation"),
    *required(Identifier(255), "segment"),
    *required(BigInteger, "seq", "crc32c", "offset", "length", "wire_bytes", "received_at_ms", "plain_bytes", "work"),
    *required(BigInteger, "through_ms"),
    *required(LargeBinary, "facts"),
    UniqueConstraint("edge", "incarnation", "seq", name="frame_identity"),
)
"""``facts``: what a frame states beside its partials (`center.storage.frame_facts`). It is the last column, so SQLite
reads the other columns without it."""
Index("frames_by_segment", frames.c.segment)

quarantine = table(
    "quarantine",
    *(Column(c.name, c.type, primary_key=c.primary_key, nullable=False) for c in frames.columns),
    *required(FreeText, "reason"),
    *required(BigInteger, "quarantined_at_ms"),
)
"""Frames that the job could not apply: rows of the index that retention does not drop, with the reason."""
Index("quarantine_by_segment", quarantine.c.segment)

set_aside_queries = table(
    "set_aside_queries",
    *_of_query(),
    *required(BigInteger, "deaths", "died_at_ms", "since_ms", default=0),
    *required(Identifier(16), "state", default=""),
    *required(FreeText, "reason", default=""),
)
"""Queries that the job has set aside, and queries on which it worked when it died. ``state``: a `SetAside`; empty: the
query is not set aside."""

dropped_segments = table("dropped_segments", *key(Identifier(255), "segment"))
"""Segments that retention removes from the log. They are listed until they are removed, so a crash leaves no segment
behind."""

budget_states = table(
    "budget_states", *_of_query(), *required(JSON, "state"), *required(BigInteger, "grants_version", "written_at_ms")
)
"""One row per query with an error budget: the state of its `BudgetAllocator`. ``grants_version``: the counter
``budgets`` when its grants changed last."""

processing_delays = table("processing_delays", *_of_query(), *required(BigInteger, "delay_ms", "measured_at_ms"))
"""Per query, the processing delay at the center."""

sampling_rates = table(
    "sampling_rates", *_of_query(), *required(JSON, "rates"), *required(JSON, "records", server_default="{}")
)
"""``rates``: by edge, the fraction of records that the query's accuracy needs processed; ``records``: the number of
records for which the rate is planned. The gateway decides whether an edge samples at all."""

inputs = table(
    "inputs",
    *key(Identifier(63), "stream"),
    *key(BigInteger, "fingerprint"),
    *key(_Edge, "edge"),
    *key(Identifier(255), "source"),
)
"""Fingerprints of the files that edges read, by source, from the edge's last report."""
Index("inputs_by_edge", inputs.c.edge)

alarms = table(
    "alarms",
    Column("id", Integer, primary_key=True, autoincrement=True),
    *required(Identifier(64), "kind"),
    *required(_Edge, "edge"),
    *required(Identifier(96), "query"),
    *required(FreeText, "message"),
    *required(BigInteger, "first_at_ms", "last_at_ms", "times"),
)
"""``query``: the key of the query that an alarm is about; empty: it is about no query."""
