"""Transactions of the catalog, and the lock under which queries, edges and streams change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from sqlalchemy import Connection, Engine, Table, func, select, update

from center.catalog import schema as t
from center.storage.database import read_transaction, write_transaction

_CHANGED = "version-incremented"


class Transactions:
    """Opens transactions. Each method of a repository is one transaction, and blocks: do not call it on the event loop.

    Entering a transaction raises StorageError if the database cannot be used. An exception rolls the transaction back.

    Args:
        changed: called after a commit of `increment_version`.
    """

    def __init__(self, engine: Engine, changed: Callable[[], object]) -> None:
        self._engine, self._changed = engine, changed

    def read(self) -> AbstractContextManager[Connection]:
        """A transaction that sees one state of the database and writes nothing."""
        return read_transaction(self._engine)

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that may write."""
        with write_transaction(self._engine) as connection:
            connection.info.pop(_CHANGED, None)
            yield connection
            changed = connection.info.pop(_CHANGED, False)
        if changed:
            self._changed()

    @contextmanager
    def locked(self) -> Iterator[Connection]:
        """A transaction that may write, under the catalog's lock (`lock_catalog`)."""
        with self.write() as connection:
            lock_catalog(connection)
            yield connection


def lock_catalog(connection: Connection) -> None:
    """Serialises changes of queries and edges: locks the counter's row on PostgreSQL, the transaction on SQLite."""
    connection.execute(select(t.counters.c.value).where(t.counters.c.name == "catalog").with_for_update()).all()


def increment_version(connection: Connection, counter: str = "catalog") -> None:
    """Increments a counter that other processes poll: ``catalog`` or ``budgets``."""
    connection.execute(update(t.counters).where(t.counters.c.name == counter).values(value=t.counters.c.value + 1))
    connection.info[_CHANGED] = True


def read_counter(connection: Connection, name: str) -> int:
    """Returns a counter; 0: it does not exist."""
    value = select(t.counters.c.value).where(t.counters.c.name == name)
    return int(connection.execute(value).scalar_one_or_none() or 0)


def count_rows(connection: Connection, table: Table) -> int:
    return int(connection.execute(select(func.count()).select_from(table)).scalar_one())
