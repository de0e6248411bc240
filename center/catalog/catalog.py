"""The catalog: the common state of gateways, job and API, in one database.

Any number of processes and threads use it concurrently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sqlalchemy import insert, select, text

from center.catalog import schema as t
from center.catalog.alarms import Alarms
from center.catalog.backups import Backups
from center.catalog.budgets import Budgets
from center.catalog.edges import Edges
from center.catalog.frame_index import FrameIndex
from center.catalog.links import Links
from center.catalog.quarantine import Quarantine
from center.catalog.queries import Queries
from center.catalog.streams import Streams
from center.catalog.tables import Tables
from center.catalog.transactions import Transactions, read_counter
from center.config import ColumnEntry
from center.storage.database import open_engine, require_store_format, schema_transaction

FORMAT = 1  # format: of the tables and of the frame log
"""The format of the tables and of the frame log. Increment it with each change after which an older release cannot read
new data, or this release cannot read old data."""


class Catalog:
    """Opens the catalog and creates missing tables.

    Args:
        url: SQLAlchemy URL, ``sqlite:////path/to/catalog.db`` or ``postgresql+psycopg://…``.
        columns: the declared columns by name, of each stream that the configuration declares.
        changed: called after a change for which `version` or `Budgets.version` increases.

    Raises:
        InvalidConfig: not a URL of SQLite or PostgreSQL.
        StorageError: the database cannot be used. Every method of a repository raises it too.
        IncompatibleState: another release wrote the catalog in another format.
    """

    def __init__(
        self,
        url: str,
        columns: Mapping[str, Mapping[str, ColumnEntry]] | None = None,
        changed: Callable[[], object] = lambda: None,
    ) -> None:
        self._engine = open_engine(url)
        with schema_transaction(self._engine, t.metadata) as connection:
            rows = select(t.counters.c.name, t.counters.c.value)
            counters: dict[str, int] = dict(connection.execute(rows).all())
            require_store_format(connection, "catalog", FORMAT, is_new=not counters)
            # The index of 0.3.0 allows no second version of a query.
            connection.execute(text("DROP INDEX IF EXISTS one_live_query_per_name"))
            t.one_open_query_per_name.create(connection, checkfirst=True)
            for name in ("catalog", "budgets"):
                if name not in counters:
                    connection.execute(insert(t.counters).values(name=name, value=0))
        self._transactions = Transactions(self._engine, changed)
        self.streams = Streams(self._transactions, columns or {})
        self.queries = Queries(self._transactions, self.streams)
        self.tables = Tables(self._transactions, self.queries)
        self.edges = Edges(self._transactions, self.streams)
        self.links = Links(self._transactions)
        self.frames = FrameIndex(self._transactions)
        self.quarantine = Quarantine(self._transactions)
        self.budgets = Budgets(self._transactions)
        self.alarms = Alarms(self._transactions)
        self.backups = Backups(self._transactions)

    def close(self) -> None:
        self._engine.dispose()

    def version(self) -> int:
        """A number that increases with every change of queries and edges that assignments depend on. Cheap to poll.

        Such changes are: a query is registered or deleted; an edge is new, retired, or serves other streams; a stream
        has other columns.
        """
        with self._transactions.read() as connection:
            return read_counter(connection, "catalog")
