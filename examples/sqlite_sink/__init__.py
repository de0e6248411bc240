"""Answers in an SQLite file: an example of a sink that a package provides.

The table `answers` has a row per window and group of each query, with the measures as JSON.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence

from pydantic import Field

from center.sinks import SinkAnswer, SinkContext, SinkQuery
from edgewater.base.errors import StorageError
from edgewater.runtime.configuration import Section
from edgewater.wire import QueryRef

TABLES = """
CREATE TABLE IF NOT EXISTS marks (
    query TEXT, version INTEGER, answer_id INTEGER, center INTEGER, sink TEXT, epoch INTEGER,
    PRIMARY KEY (query, version)
);
CREATE TABLE IF NOT EXISTS answers (query TEXT, version INTEGER, start_ms INTEGER, revision INTEGER, row TEXT);
CREATE INDEX IF NOT EXISTS answers_of_a_window ON answers (query, version, start_ms);
"""


class SqliteConfig(Section):
    """The keys of a sink of the kind `sqlite`."""

    path: str = Field(min_length=1)
    """The file. It is created if it is missing."""


class SqliteSink:
    """Writes answers to one file."""

    def __init__(self, options: SqliteConfig, context: SinkContext) -> None:
        self._path, self._context = options.path, context
        self._database: sqlite3.Connection | None = None

    def open(self, queries: Sequence[SinkQuery]) -> Mapping[QueryRef, int]:
        """See `center.sinks.base.Sink`."""
        if self._database is None:
            self._database = sqlite3.connect(self._path, timeout=10)
            self._database.executescript(TABLES)
        found = {}
        with self._database as transaction:
            for query in queries:
                row = transaction.execute(
                    "SELECT answer_id, center, sink FROM marks WHERE query = ? AND version = ?",
                    [query.ref.name, query.ref.version],
                ).fetchone()
                if row is not None:
                    found[query.ref], center, sink = row
                    self._context.require_own(self._path, query.ref, center, sink)
                    if sink != self._context.name:  # the sink has another name since
                        change = "UPDATE marks SET sink = ?, epoch = 0 WHERE query = ? AND version = ?"
                        transaction.execute(change, [self._context.name, query.ref.name, query.ref.version])
        return found

    def write(self, answers: Sequence[SinkAnswer], positions: Mapping[QueryRef, int]) -> None:
        """See `center.sinks.base.Sink`."""
        assert self._database is not None, "open comes first"
        writer = [self._context.center, self._context.name, self._context.epoch]
        with self._database as transaction:  # commits at the end; undoes all of it if an exception is raised
            for ref, answer_id in positions.items():
                changed = transaction.execute(
                    "INSERT INTO marks VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET"
                    " answer_id = excluded.answer_id, epoch = excluded.epoch"
                    " WHERE (center, sink) = (excluded.center, excluded.sink) AND marks.epoch <= excluded.epoch",
                    [ref.name, ref.version, answer_id, *writer],
                )
                if changed.rowcount == 0:
                    raise StorageError(f"another process writes the answers to {ref.name} to {self._path}")
            for answer in answers:
                self._replace(transaction, answer)

    def close(self) -> None:
        """See `center.sinks.base.Sink`."""
        database, self._database = self._database, None
        if database is not None:
            database.close()

    def _replace(self, transaction: sqlite3.Connection, answer: SinkAnswer) -> None:
        window = [answer.query.name, answer.query.version, answer.window_start_ms]
        of_window = "query = ? AND version = ? AND start_ms = ?"
        newer = transaction.execute(
            f"SELECT 1 FROM answers WHERE {of_window} AND revision > ?", [*window, answer.revision]
        )
        if newer.fetchone() is None:
            transaction.execute(f"DELETE FROM answers WHERE {of_window}", window)
            rows = [[*window, answer.revision, json.dumps(row, default=str)] for row in answer.rows.to_pylist()]
            transaction.executemany("INSERT INTO answers VALUES (?, ?, ?, ?, ?)", rows)


class Sqlite:
    """The kind `sqlite`."""

    name = "sqlite"
    config = SqliteConfig

    def sink(self, options: SqliteConfig, context: SinkContext) -> SqliteSink:
        """See `center.sinks.base.SinkKind`."""
        return SqliteSink(options, context)


KIND = Sqlite()
