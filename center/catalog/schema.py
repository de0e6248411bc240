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

from center.storage.database import FreeText, Identifier, key, required
from edgewater.base.streams import MAX_TIME_MS, MIN_TIME_MS
from edgewater.wire import QueryRef

metadata = MetaData()


def is_of(table: Table, query: QueryRef) -> ColumnElement[bool]:
    """Returns the condition that a row is of a query; the table has the columns `name` and `version`."""
    return (table.c.name == query.name) & (table.c.version == query.version)


def _of_query() -> list[Column[Any]]:
    return [*key(Identifier(63), "name"), *key(BigInteger, "version")]


counters = Table(
    "counters", metadata, Column("name", Identifier(64), primary_key=True), Column("value", BigInteger, nullable=False)
)
"""``catalog``, ``budgets``: incremented by every change that assignments depend
on; the row ``catalog`` is also the lock under which queries and edges change."""

queries = Table(
    "queries",
    metadata,
    *_of_query(),
    Column("spec", JSON, nullable=False),
    Column("registered_at_ms", BigInteger, nullable=False),
    Column("deleted_at_ms", BigInteger),
    Column("last_position", BigInteger, nullable=False),
    Column("from_ms", BigInteger, nullable=False, server_default=str(MIN_TIME_MS)),
    Column("until_ms", BigInteger, nullable=False, server_default=str(MAX_TIME_MS)),
    Column("ended_at_ms", BigInteger, nullable=False, server_default="0"),
)
"""A row per version of a query. The version has the windows that start in [``from_ms``, ``until_ms``). ``ended_at_ms``
is 0 while edges answer it."""
_is_open = queries.c.deleted_at_ms.is_(None) & (queries.c.until_ms == MAX_TIME_MS)
one_open_query_per_name = Index(
    "one_open_query_per_name", queries.c.name, unique=True, sqlite_where=_is_open, postgresql_where=_is_open
)

edges = Table(
    "edges",
    metadata,
    Column("edge", Identifier(128), primary_key=True),
    Column("incarnation", Identifier(128), nullable=False),
    *required(JSON, "labels", "streams"),
    *required(BigInteger, "first_seen_ms", "last_seen_ms"),
    Column("connected", Boolean, nullable=False),
    Column("session", Identifier(64), nullable=False),
    Column("progress", JSON, nullable=False),
    Column("backlog_bytes", BigInteger, nullable=False),
    *required(Float, "bandwidth_bytes_s", "rtt_ms", "clock_offset_ms"),
    Column("retired", Boolean, nullable=False),
    Column("forgotten", BigInteger, nullable=False, default=0),
    Column("gateway", Identifier(64), nullable=False),
)
"""One row per edge that ever sent a Hello. ``progress``: watermarks, records and drops; ``durable``: its durable
records, with their incarnation. ``forgotten``: number of its incarnations that have sent frames and were deleted.
``gateway``: the gateway that receives its messages; empty: no gateway does."""

gateways = Table(
    "gateways",
    metadata,
    Column("gateway", Identifier(64), primary_key=True),
    *required(BigInteger, "beat_at_ms", "silence_ms"),
)
"""A row per gateway process that has had sessions. At ``beat_at_ms``, each edge whose row names the gateway had sent it
a message within the last ``silence_ms``."""

stream_columns = Table(
    "stream_columns",
    metadata,
    Column("stream", Identifier(63), primary_key=True),
    Column("columns", JSON, nullable=False),
)
"""Columns of streams that an admin has set, as lists of name, type and description."""

lookup_tables = Table(
    "lookup_tables",
    metadata,
    *_of_query(),
    Column("key", Identifier(255), nullable=False),
    Column("columns", JSON, nullable=False),
    *required(BigInteger, "row_count", "updated_at_ms"),
    Column("rows", FreeText, nullable=False),
)
"""Tables that queries look up columns in. ``rows``: as `edgewater.model.lookups.encode_rows` returns them."""

links = Table(
    "links",
    metadata,
    Column("edge", Identifier(128), primary_key=True),
    Column("link", Identifier(63), nullable=False),
    Column("until_ms", BigInteger, nullable=False),
    *required(Float, "low_bytes_s", "high_bytes_s", "best_bytes_s"),
    Column("loads", JSON, nullable=False),
    Column("stated_at_ms", BigInteger, nullable=False),
)
"""The fields of `LinkRecord`. ``loads``: lists of a query's name and version, and its bytes."""

lost_states = Table(
    "lost_states",
    metadata,
    Column("edge", Identifier(128), primary_key=True),
    Column("lost_at_ms", BigInteger, nullable=False),
)
"""Edges whose state was lost, with the wall time at which the center noticed the last loss."""

incarnations = Table(
    "incarnations",
    metadata,
    *key(Identifier(128), "edge", "incarnation"),
    *required(BigInteger, "first_seq", "awaited_seq", "hello_at_ms"),
    Column("run", BigInteger, nullable=False, default=0),
)
"""``first_seq … awaited_seq - 1`` are durable. ``hello_at_ms``: its last Hello. ``run``: the process that sent this
Hello; only frames of this process are indexed; 0: the edge does not state it. The row is the lock under which its
frames are indexed."""

statuses = Table(
    "query_statuses",
    metadata,
    *_of_query(),
    Column("edge", Identifier(128), primary_key=True),
    Column("accepted", Boolean, nullable=False),
    Column("code", Identifier(64), nullable=False),
    Column("message", FreeText, nullable=False),
)

frames = Table(
    "frames",
    metadata,
    *_of_query(),
    *key(BigInteger, "position"),
    *required(Identifier(128), "edge", "incarnation"),
    *required(BigInteger, "seq", "crc32c"),
    Column("segment", Identifier(255), nullable=False),
    *required(BigInteger, "offset", "length", "wire_bytes", "received_at_ms", "plain_bytes", "work", "through_ms"),
    Column("facts", LargeBinary, nullable=False),
    UniqueConstraint("edge", "incarnation", "seq", name="frame_identity"),
)
"""``facts``: what a frame states beside its partials (`center.storage.frame_facts`). It is the last column, so SQLite
reads the other columns without it."""
Index("frames_by_segment", frames.c.segment)

quarantine = Table(
    "quarantine",
    metadata,
    *(Column(c.name, c.type, primary_key=c.primary_key, nullable=False) for c in frames.columns),
    Column("reason", FreeText, nullable=False),
    Column("quarantined_at_ms", BigInteger, nullable=False),
)
"""Frames that the job could not apply: rows of the index that retention does not drop, with the reason."""
Index("quarantine_by_segment", quarantine.c.segment)

set_aside_queries = Table(
    "set_aside_queries",
    metadata,
    *_of_query(),
    Column("deaths", BigInteger, nullable=False, default=0),
    Column("died_at_ms", BigInteger, nullable=False, default=0),
    Column("state", Identifier(16), nullable=False, default=""),
    Column("reason", FreeText, nullable=False, default=""),
    Column("since_ms", BigInteger, nullable=False, default=0),
)
"""Queries that the job has set aside, and queries on which it worked when it died. ``state``: a `SetAside`; empty: the
query is not set aside."""

dropped_segments = Table("dropped_segments", metadata, Column("segment", Identifier(255), primary_key=True))
"""Segments that retention removes from the log. They are listed until they are removed, so a crash leaves no segment
behind."""

budget_states = Table(
    "budget_states",
    metadata,
    *_of_query(),
    Column("state", JSON, nullable=False),
    *required(BigInteger, "grants_version", "written_at_ms"),
)
"""One row per query with an error budget: the state of its `BudgetAllocator`. ``grants_version``: the counter
``budgets`` when its grants changed last."""

processing_delays = Table(
    "processing_delays", metadata, *_of_query(), *required(BigInteger, "delay_ms", "measured_at_ms")
)
"""Per query, the processing delay at the center."""

sampling_rates = Table("sampling_rates", metadata, *_of_query(), Column("rates", JSON, nullable=False))
"""``rates``: by edge, the fraction of records that the query's accuracy needs processed. The gateway decides whether an
edge samples at all."""

inputs = Table(
    "inputs",
    metadata,
    Column("stream", Identifier(63), primary_key=True),
    Column("fingerprint", BigInteger, primary_key=True),
    Column("edge", Identifier(128), primary_key=True),
    Column("source", Identifier(255), primary_key=True),
)
"""Fingerprints of the files that edges read, by source, from the edge's last report."""
Index("inputs_by_edge", inputs.c.edge)

alarms = Table(
    "alarms",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("kind", Identifier(64), nullable=False),
    Column("edge", Identifier(128), nullable=False),
    Column("message", FreeText, nullable=False),
    *required(BigInteger, "first_at_ms", "last_at_ms", "times"),
    Column("query", Identifier(96), nullable=False),
)
"""``query``: the key of the query that an alarm is about; empty: it is about no query."""
