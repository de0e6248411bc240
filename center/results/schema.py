"""The result store's tables. They may share the catalog's database."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Index, Integer, LargeBinary, MetaData, Table, UniqueConstraint

from center.storage.database import FreeText, Identifier, key, required
from edgewater.base.streams import MIN_TIME_MS

metadata = MetaData()

# SQLite assigns ids only to columns of type INTEGER.
_Id = BigInteger().with_variant(Integer, "sqlite")
_Query = Identifier(96)
"""A query key, ``name@version``."""

counters = Table(
    "result_counters",
    metadata,
    Column("name", Identifier(64), primary_key=True),
    Column("value", BigInteger, nullable=False),
)
"""``answer``: last answer id, incremented in the order in which answers become visible. ``drivers``: partitions of the
queries. Per partition (`QueryPartition.name`): ``step``, incremented by each transaction of its driver, which the row's
lock serializes; ``starts``, the number of starts of drivers since frames were last applied."""

leases = Table(
    "leases",
    metadata,
    Column("name", Identifier(32), primary_key=True),
    Column("owner", Identifier(255), nullable=False),
    *required(BigInteger, "epoch", "until_ms"),
)
"""`center.results.lease`. A row per partition (`QueryPartition.name`), also of earlier divisions."""

consumed = Table(
    "consumed", metadata, Column("query", _Query, primary_key=True), Column("position", BigInteger, nullable=False)
)

ledger_queries = Table(
    "ledger_queries",
    metadata,
    Column("query", _Query, primary_key=True),
    Column("state", FreeText),
    Column("empty_from_ms", BigInteger, nullable=False, server_default=str(MIN_TIME_MS)),
    Column("empty_through_ms", BigInteger, nullable=False, server_default=str(MIN_TIME_MS)),
)
"""`QueryState` as JSON; null: the query is deleted, and its remaining frames are ignored. The other columns are also in
the state."""

ledger_entries = Table(
    "ledger_entries",
    metadata,
    Column("query", _Query, primary_key=True),
    Column("kind", Identifier(16), primary_key=True),
    Column("start_ms", BigInteger, primary_key=True),
    Column("state", FreeText, nullable=False),
)

deltas = Table(
    "deltas",
    metadata,
    Column("id", _Id, primary_key=True, autoincrement=True),
    Column("query", _Query, nullable=False),
    Column("slice_start_ms", BigInteger, nullable=False),
    Column("synopsis", LargeBinary, nullable=False),
    Column("segment", Identifier(128), nullable=False, server_default=""),
    Column("segment_offset", BigInteger, nullable=False, server_default="0"),
    Column("segment_bytes", BigInteger, nullable=False, server_default="0"),
    Column("segment_crc32c", BigInteger, nullable=False, server_default="0"),
)
"""Merged partials per batch: the data of a slice are the merge of its rows. Data above `INLINE_BYTES` are in a segment
(`SegmentRange`); then ``synopsis`` is empty. Releases up to 0.3 have stored all data in ``synopsis``."""
Index("deltas_by_slice", deltas.c.query, deltas.c.slice_start_ms)
_in_segment = deltas.c.segment != ""
Index("deltas_by_segment", deltas.c.segment, sqlite_where=_in_segment, postgresql_where=_in_segment)

shapes = Table("shapes", metadata, Column("query", _Query, primary_key=True), Column("shape", FreeText, nullable=False))
"""Shape (kind, parameters and seeds) of the query's first delta: deltas of another shape do not merge with it."""

answers = Table(
    "answers",
    metadata,
    Column("answer_id", _Id, primary_key=True, autoincrement=False),
    Column("query", _Query, nullable=False),
    *required(BigInteger, "window_start_ms", "window_end_ms", "revision"),
    Column("phase", Identifier(16), nullable=False),
    *required(BigInteger, "answered_at_ms", "staleness_ms"),
    Column("quality", FreeText, nullable=False),
    Column("synopsis", LargeBinary),
    Column("late", FreeText, nullable=False, server_default=""),
    Column("data_of", BigInteger, nullable=False, server_default="0"),
    UniqueConstraint("query", "window_start_ms", "revision", name="answer_identity"),
)
"""Rows are written once; the constraint guarantees that (query, window, revision) never changes. ``late``: JSON with
the late records by reason, which `with_late` adds to the facts; empty: none. A row with ``data_of``, an
answer id, is a *correction*: it has the facts and the data of that answer, and other late records."""
Index("answers_of_query", answers.c.query, answers.c.answer_id)
Index("answers_by_phase", answers.c.phase, answers.c.answered_at_ms)
"""For trimming."""

late_slices = Table(
    "late_slices",
    metadata,
    Column("query", _Query, primary_key=True),
    *key(BigInteger, "slice_start_ms", "slice_end_ms", "through_ms"),
    Column("reason", Identifier(32), primary_key=True),
    Column("records", BigInteger, nullable=False),
    Column("amounts", FreeText, nullable=False, server_default=""),
    Column("only", FreeText, nullable=False, server_default=""),
)
"""Records that came after their windows were final, or that sources rejected. A window over the slice, or over the
range of slices, lacks the records if it ends by ``through_ms``. ``amounts``: JSON with by how much the records move the
values of measures; empty: unknown. ``only``: as in `DroppedRecords`; rows with it have a number after their reason and
a brace, so that the texts of ``only`` are in no key."""

corrections = Table(
    "corrections",
    metadata,
    Column("query", _Query, primary_key=True),
    *key(BigInteger, "from_ms", "to_ms"),
    Column("due_ms", BigInteger, nullable=False),
)
"""Windows that start in [from, to). The newest answer of a final window may not state all late records. From the
wall time ``due_ms`` on, the job examines them."""

late_records = Table(
    "late_records",
    metadata,
    Column("query", _Query, primary_key=True),
    Column("edge", Identifier(128), primary_key=True),
    Column("reason", Identifier(32), primary_key=True),
    Column("records", BigInteger, nullable=False),
)
"""The same numbers per edge, also for windows that the store no longer has, or never had."""

shipped = Table(
    "shipped",
    metadata,
    Column("query", _Query, primary_key=True),
    Column("edge", Identifier(128), primary_key=True),
    *required(BigInteger, "frames", "wire_bytes"),
)
