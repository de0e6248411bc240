"""The result store's tables. They may share the catalog's database."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Index, Integer, LargeBinary, MetaData, UniqueConstraint

from center.storage.database import FreeText, Identifier, key, required, table_in
from edgewater.base.streams import MIN_TIME_MS

metadata = MetaData()
table = table_in(metadata)

# SQLite assigns ids only to columns of type INTEGER.
_Id = BigInteger().with_variant(Integer, "sqlite")
_Query = Identifier(96)
"""A query key, ``name@version``."""

counters = table("result_counters", *key(Identifier(64), "name"), *required(BigInteger, "value"))
"""``answer``: last answer id, incremented in the order in which answers become visible. ``drivers``: partitions of the
queries. Per partition (`QueryPartition.name`): ``step``, incremented by each transaction of its driver, which the row's
lock serializes; ``starts``, the number of starts of drivers since frames were last applied."""

leases = table(
    "leases",
    *key(Identifier(32), "name"),
    *required(Identifier(255), "owner"),
    *required(BigInteger, "epoch", "until_ms"),
)
"""`center.results.lease`. A row per partition (`QueryPartition.name`), also of earlier divisions."""

consumed = table("consumed", *key(_Query, "query"), *required(BigInteger, "position"))

ledger_queries = table(
    "ledger_queries",
    *key(_Query, "query"),
    Column("state", FreeText),
    *required(BigInteger, "empty_from_ms", "empty_through_ms", server_default=str(MIN_TIME_MS)),
)
"""`QueryState` as JSON; null: the query is deleted, and its remaining frames are ignored. The other columns are also in
the state."""

ledger_entries = table(
    "ledger_entries",
    *key(_Query, "query"),
    *key(Identifier(16), "kind"),
    *key(BigInteger, "start_ms"),
    *required(FreeText, "state"),
)

deltas = table(
    "deltas",
    Column("id", _Id, primary_key=True, autoincrement=True),
    *required(_Query, "query"),
    *required(BigInteger, "slice_start_ms"),
    *required(LargeBinary, "synopsis"),
    *required(Identifier(128), "segment", server_default=""),
    *required(BigInteger, "segment_offset", "segment_bytes", "segment_crc32c", server_default="0"),
)
"""Merged partials per batch: the data of a slice are the merge of its rows. Data above `INLINE_BYTES` are in a segment
(`SegmentRange`); then ``synopsis`` is empty. Releases up to 0.3 have stored all data in ``synopsis``."""
Index("deltas_by_slice", deltas.c.query, deltas.c.slice_start_ms)
_in_segment = deltas.c.segment != ""
Index("deltas_by_segment", deltas.c.segment, sqlite_where=_in_segment, postgresql_where=_in_segment)

shapes = table("shapes", *key(_Query, "query"), *required(FreeText, "shape"))
"""Shape (kind, parameters and seeds) of the query's first delta: deltas of another shape do not merge with it."""

answers = table(
    "answers",
    Column("answer_id", _Id, primary_key=True, autoincrement=False),
    *required(_Query, "query"),
    *required(BigInteger, "window_start_ms", "window_end_ms", "revision"),
    *required(Identifier(16), "phase"),
    *required(BigInteger, "answered_at_ms", "staleness_ms"),
    *required(FreeText, "quality"),
    Column("synopsis", LargeBinary),
    *required(FreeText, "late", server_default=""),
    *required(BigInteger, "data_of", server_default="0"),
    UniqueConstraint("query", "window_start_ms", "revision", name="answer_identity"),
)
"""Rows are written once; the constraint guarantees that (query, window, revision) never changes. ``late``: JSON with
the late records by reason, which `with_late` adds to the facts; empty: none. A row with ``data_of``, an
answer id, is a *correction*: it has the facts and the data of that answer, and other late records."""
Index("answers_of_query", answers.c.query, answers.c.answer_id)
Index("answers_by_phase", answers.c.phase, answers.c.answered_at_ms)
"""For trimming."""

late_slices = table(
    "late_slices",
    *key(_Query, "query"),
    *key(BigInteger, "slice_start_ms", "slice_end_ms", "through_ms"),
    *key(Identifier(32), "reason"),
    *required(BigInteger, "records"),
    *required(FreeText, "amounts", "only", server_default=""),
)
"""Records that came after their windows were final, or that sources rejected. A window over the slice, or over the
range of slices, lacks the records if it ends by ``through_ms``. ``amounts``: JSON with by how much the records move the
values of measures; empty: unknown. ``only``: as in `DroppedRecords`; rows with it have a number after their reason and
a brace, so that the texts of ``only`` are in no key."""

corrections = table(
    "corrections", *key(_Query, "query"), *key(BigInteger, "from_ms", "to_ms"), *required(BigInteger, "due_ms")
)
"""Windows that start in [from, to). The newest answer of a final window may not state all late records. From the
wall time ``due_ms`` on, the job examines them."""

late_records = table(
    "late_records",
    *key(_Query, "query"),
    *key(Identifier(128), "edge"),
    *key(Identifier(32), "reason"),
    *required(BigInteger, "records"),
)
"""The same numbers per edge, also for windows that the store no longer has, or never had."""

shipped = table(
    "shipped", *key(_Query, "query"), *key(Identifier(128), "edge"), *required(BigInteger, "frames", "wire_bytes")
)
