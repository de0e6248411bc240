"""Backups of stores in PostgreSQL. The rows of one moment are written to the same SQLite files as in a backup of
SQLite.

So `edgewater center restore` can restore each backup to SQLite and to PostgreSQL.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from sqlalchemy import Connection, MetaData, column, delete, func, insert, inspect, select, text, union
from sqlalchemy import table as table_named

from center.catalog import schema as catalog_schema
from center.results import schema as results_schema
from center.sinks.store import SinkStore
from center.sinks.store import metadata as sinks_metadata
from center.storage.database import open_engine, read_transaction, shown_url, write_transaction
from edgewater.base.errors import InvalidConfig

ROWS_AT_ONCE = 1000  # limit: memory of a copy
_SEQUENCES = text("""
    SELECT sequence.oid::regclass::text, owner.relname, a.attname
    FROM pg_depend d
    JOIN pg_class sequence ON sequence.oid = d.objid AND sequence.relkind = 'S'
    JOIN pg_class owner ON owner.oid = d.refobjid
    JOIN pg_attribute a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid
    WHERE d.deptype IN ('a', 'i') AND sequence.relnamespace = current_schema()::regnamespace
""")
"""The sequences of PostgreSQL's current schema, each with the table and the column that it numbers."""
CATALOG: tuple[MetaData, ...] = (catalog_schema.metadata,)
RESULTS: tuple[MetaData, ...] = (results_schema.metadata, sinks_metadata)
LOG, DELTAS = "log", "deltas"
"""Directories of a backup."""


@contextlib.contextmanager
def moment(url: str, link: Callable[[list[str]], None]) -> Iterator[Connection]:
    """Yields a connection that sees both stores at one moment.

    Args:
        link: called with the paths in a backup of the segments that rows name at this moment. Until `link` returns, no
            gateway indexes frames, retention removes no frames, and drivers change no deltas.

    Raises:
        StorageError: the database cannot be used, or it is locked for too long.
    """
    engine = open_engine(url)
    frames, quarantine = (catalog_schema.metadata.tables[name] for name in ("frames", "quarantine"))
    deltas = results_schema.deltas
    try:
        with read_transaction(engine) as reader:
            with write_transaction(engine) as lock:
                lock.execute(text(f"LOCK TABLE {frames.name}, {quarantine.name}, {deltas.name} IN SHARE MODE"))
                # The snapshot begins with the first statement that reads.
                segments = union(select(frames.c.segment), select(quarantine.c.segment))
                names = [f"{LOG}/{name}" for name in sorted(reader.execute(segments).scalars())]
                named = select(deltas.c.segment).where(deltas.c.segment != "").distinct()
                link([*names, *(f"{DELTAS}/{name}" for name in sorted(reader.execute(named).scalars()))])
            yield reader
    finally:
        engine.dispose()


def save(reader: Connection, stores: tuple[MetaData, ...], target: Path) -> None:
    """Copies the rows of a store to a SQLite file. The tables must exist in the file."""
    engine = open_engine(f"sqlite:///{target}")
    try:
        if sinks_metadata in stores:
            SinkStore(engine).statuses()  # creates its tables
        with write_transaction(engine) as writer:
            _copy(reader, writer, stores)
    finally:
        engine.dispose()


def load(files: dict[tuple[MetaData, ...], Path], url: str) -> None:
    """Copies the rows of both stores' files to PostgreSQL, in one transaction. The tables must exist and
    must be new.
    """
    engine = open_engine(url)
    try:
        with write_transaction(engine) as writer:
            for stores, file in files.items():
                source = open_engine(f"sqlite:///{file}")
                try:
                    with read_transaction(source) as reader:
                        _copy(reader, writer, stores)
                finally:
                    source.dispose()
            _continue_numbers(writer)
    finally:
        engine.dispose()


def require_new(url: str) -> None:
    """Checks that the database has no tables of a center.

    Raises:
        InvalidConfig: the database has such a table.
    """
    shown, used = _used(url)
    if used:
        raise InvalidConfig("catalog_url", shown, "an empty database", f"it has the table {used[0]}")


def require_used(url: str) -> None:
    """Checks that the database has tables of a center.

    Raises:
        InvalidConfig: the database has no such tables.
    """
    shown, used = _used(url)
    if not used:
        raise InvalidConfig(
            "catalog_url", shown, "the database of a center that has run", "it has no tables of a center"
        )


def _used(url: str) -> tuple[str, list[str]]:
    """Returns the URL without the password, and the tables of a center that the database has."""
    engine = open_engine(url)
    own = {table.name for store in (*CATALOG, *RESULTS) for table in store.sorted_tables}
    try:
        with read_transaction(engine) as connection:
            return shown_url(engine.url), sorted(own & set(inspect(connection).get_table_names()))
    finally:
        engine.dispose()


def _copy(reader: Connection, writer: Connection, stores: tuple[MetaData, ...]) -> None:
    for table in (table for store in stores for table in store.sorted_tables):
        writer.execute(delete(table))  # an opened store has rows
        if not inspect(reader).has_table(table.name):
            continue  # no sink was ever defined
        found = reader.execute(select(table), execution_options={"yield_per": ROWS_AT_ONCE})
        for rows in found.mappings().partitions():
            writer.execute(insert(table), [dict(row) for row in rows])


def _continue_numbers(writer: Connection) -> None:
    """Makes each sequence of the database number new rows after the copied rows."""
    for sequence, owner, name in writer.execute(_SEQUENCES).all():
        last = select(func.coalesce(func.max(column(name)), 0) + 1).select_from(table_named(owner)).scalar_subquery()
        writer.execute(select(func.setval(sequence, last, False)))
