"""The catalog's tables, and how a database is opened: SQLite by default, PostgreSQL by its URL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Engine,
    Float,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    create_engine,
    event,
)
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.types import JSON
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random

from edgewater.errors import StorageError

BUSY_TIMEOUT_MS = 30_000

metadata = MetaData()

counters = Table(
    "counters",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("value", BigInteger, nullable=False),
)
"""``schema``: version of these tables. ``catalog``: raised with every change an edge must hear of; its
row is also the lock under which queries and edges change."""

queries = Table(
    "queries",
    metadata,
    Column("name", String(63), primary_key=True),
    Column("version", BigInteger, primary_key=True),
    Column("spec", JSON, nullable=False),
    Column("registered_at_ms", BigInteger, nullable=False),
    Column("deleted_at_ms", BigInteger),
    Column("last_position", BigInteger, nullable=False),
)
Index(
    "one_live_query_per_name",
    queries.c.name,
    unique=True,
    sqlite_where=queries.c.deleted_at_ms.is_(None),
    postgresql_where=queries.c.deleted_at_ms.is_(None),
)

edges = Table(
    "edges",
    metadata,
    Column("edge", String(128), primary_key=True),
    Column("incarnation", String(128), nullable=False),
    Column("labels", JSON, nullable=False),
    Column("streams", JSON, nullable=False),
    Column("first_seen_ms", BigInteger, nullable=False),
    Column("last_seen_ms", BigInteger, nullable=False),
    Column("connected", Boolean, nullable=False),
    Column("session", String(64), nullable=False),
    Column("progress", JSON, nullable=False),
    Column("backlog_bytes", BigInteger, nullable=False),
    Column("bandwidth_bytes_s", Float, nullable=False),
    Column("rtt_ms", Float, nullable=False),
    Column("clock_offset_ms", Float, nullable=False),
    Column("retired", Boolean, nullable=False),
)
"""One row per edge that ever said Hello. ``progress``: watermarks, records and drops."""

incarnations = Table(
    "incarnations",
    metadata,
    Column("edge", String(128), primary_key=True),
    Column("incarnation", String(128), primary_key=True),
    Column("first_seq", BigInteger, nullable=False),
    Column("awaited_seq", BigInteger, nullable=False),
)
"""``first_seq … awaited_seq - 1`` are durable. The row is the lock under which its frames are indexed."""

statuses = Table(
    "query_statuses",
    metadata,
    Column("name", String(63), primary_key=True),
    Column("version", BigInteger, primary_key=True),
    Column("edge", String(128), primary_key=True),
    Column("accepted", Boolean, nullable=False),
    Column("code", String(64), nullable=False),
    Column("message", Text, nullable=False),
)

frames = Table(
    "frames",
    metadata,
    Column("name", String(63), primary_key=True),
    Column("version", BigInteger, primary_key=True),
    Column("position", BigInteger, primary_key=True),
    Column("edge", String(128), nullable=False),
    Column("incarnation", String(128), nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("crc32c", BigInteger, nullable=False),
    Column("segment", String(255), nullable=False),
    Column("offset", BigInteger, nullable=False),
    Column("length", BigInteger, nullable=False),
    Column("wire_bytes", BigInteger, nullable=False),
    Column("received_at_ms", BigInteger, nullable=False),
    UniqueConstraint("edge", "incarnation", "seq", name="frame_identity"),
)
Index("frames_by_segment", frames.c.segment)

forgotten_segments = Table("forgotten_segments", metadata, Column("segment", String(255), primary_key=True))
"""Segments given up for removal. A frame is never indexed in one, whoever still has it open."""

alarms = Table(
    "alarms",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("kind", String(64), nullable=False),
    Column("edge", String(128), nullable=False),
    Column("message", Text, nullable=False),
    Column("first_at_ms", BigInteger, nullable=False),
    Column("last_at_ms", BigInteger, nullable=False),
    Column("times", BigInteger, nullable=False),
)


def connect(url: str) -> Engine:
    """An engine whose transactions are serialised against writers of other processes, and durable.

    On SQLite: WAL, so that readers never wait; ``synchronous=FULL``, because an acknowledgement rests
    on the commit and NORMAL may lose the last ones with the power; and BEGIN IMMEDIATE for every
    transaction that may write (`writing`), because one that begins as a reader and then writes fails
    at once if somebody else has written in between, whatever the busy timeout.
    """
    engine = create_engine(url)
    if engine.dialect.name != "sqlite":
        return engine
    if engine.url.database:
        Path(engine.url.database).parent.mkdir(parents=True, exist_ok=True)

    @event.listens_for(engine, "connect")
    def on_connect(connection: Any, _record: object) -> None:
        connection.isolation_level = None  # SQLAlchemy's own BEGIN below, not the driver's.
        connection.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
        # Turning WAL on does not honour the timeout when several processes open a new file at once.
        locked = retry_if_exception_type(connection.OperationalError)
        for attempt in Retrying(retry=locked, wait=wait_random(0, 0.05), stop=stop_after_delay(10), reraise=True):
            with attempt:
                connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")

    @event.listens_for(engine, "begin")
    def on_begin(connection: Connection) -> None:
        reads = connection.get_execution_options().get("reads", False)
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

    return engine


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """A transaction that may write. Raises StorageError for whatever the database refuses."""
    try:
        with engine.begin() as connection:
            yield connection
    except SQLAlchemyError as exc:
        raise StorageError(f"database {engine.url.render_as_string()}: {exc}") from exc


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """A transaction that only reads, from one state of the database. Raises StorageError."""
    try:
        with engine.connect().execution_options(reads=True) as connection, connection.begin():
            yield connection
    except SQLAlchemyError as exc:
        raise StorageError(f"database {engine.url.render_as_string()}: {exc}") from exc
