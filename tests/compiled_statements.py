"""Engines of one dialect share compiled statements, as the stores of one process do that live long.

Most tests open stores of their own. To compile the same statements in each of them took half of their CPU time, and to
wait for the disk half of the time. No test cuts the power, so SQLite waits for no disk in this process.
"""

from __future__ import annotations

import sqlite3
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.engine import Engine
from sqlalchemy.pool import Pool
from sqlalchemy.schema import CreateIndex, CreateTable
from sqlalchemy.util import LRUCache

STATEMENTS = 2_000


@pytest.fixture(scope="session", autouse=True)
def compiled_once() -> None:
    caches = {dialect: LRUCache(STATEMENTS) for dialect in (PGDialect_psycopg, SQLiteDialect_pysqlite)}
    for dialect in caches:  # a part of the cache's keys
        dialect.__eq__ = lambda self, other: type(self) is type(other)
        dialect.__hash__ = lambda self: hash(type(self))
    begin = Engine.__init__

    # `create_engine` takes the names of its options from the code of this function.
    def __init__(  # noqa: N807
        self: Engine, pool: Any, dialect: Any, url: Any, logging_name: Any = None, echo: Any = None,
        query_cache_size: int = 500, execution_options: Any = None, hide_parameters: bool = False,
    ) -> None:  # fmt: skip
        begin(self, pool, dialect, url, logging_name, echo, query_cache_size, execution_options, hide_parameters)
        self._compiled_cache = caches.get(type(dialect), self._compiled_cache)

    Engine.__init__ = __init__
    event.listen(Pool, "checkout", _wait_for_no_disk)
    for kind in (CreateIndex, CreateTable):
        _compile_once(kind)


def _wait_for_no_disk(connection: Any, record: Any, _proxy: object) -> None:
    if isinstance(connection, sqlite3.Connection) and not record.info:
        record.info["waits"] = False
        connection.execute("PRAGMA synchronous=OFF")


def _compile_once(kind: Any) -> None:
    compiler, compiled = kind._compiler, {}

    def _compiler(self: Any, dialect: Any, **options: Any) -> Any:
        key = self.element, dialect, *options
        if key not in compiled:
            compiled[key] = compiler(self, dialect, **options)
        return compiled[key]

    kind._compiler = _compiler
