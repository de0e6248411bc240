"""Detects whether catalog and result store belong to the same moment: see `center.storage.lineage`."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import select, update

from center.catalog import schema as t
from center.catalog.alarms import add_alarm
from center.catalog.edge_rows import record_lost_state
from center.catalog.query_rows import OLDER, note_older, remember_versions
from center.catalog.transactions import Transactions, read_counter
from center.storage.lineage import Lineage, raise_mark, read_lineage, write_lineage
from edgewater.base.streams import EdgeId
from edgewater.model.registered_query import query_from_key


class Backups:
    """The lineage of the catalog."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    def lineage(self) -> Lineage:
        """Returns the number of the center and the mark in the catalog."""
        with self._transactions.read() as connection:
            return read_lineage(connection, t.counters)

    def raise_mark(self, mark: int) -> None:
        """Sets the mark, unless another process has set a higher one."""
        with self._transactions.write() as connection:
            raise_mark(connection, t.counters, mark)

    def set_lineage(self, lineage: Lineage) -> None:
        with self._transactions.write() as connection:
            write_lineage(connection, t.counters, lineage)

    def begin_after_restore(self, now_ms: int) -> None:
        """Continues with a catalog that may be older than queries that edges have: see `note_older`."""
        with self._transactions.locked() as connection:
            note_older(connection, now_ms)

    def older_since_ms(self) -> int:
        """Returns the wall time at which the catalog was last known to be older than what an edge has; 0: never."""
        with self._transactions.read() as connection:
            return read_counter(connection, OLDER)

    def reconcile(self, lineage: Lineage, consumed: Mapping[str, int], now_ms: int) -> None:
        """Records that catalog and result store are of different moments: records of every edge may be missing.

        Args:
            consumed: by query key, the position of the last frame that the result store has applied. No later frame
                gets that position.
        """
        refs = {query_from_key(key): position for key, position in consumed.items()}
        with self._transactions.locked() as connection:
            write_lineage(connection, t.counters, lineage)
            c = t.queries.c
            for ref, position in refs.items():
                behind = (c.name == ref.name) & (c.version == ref.version) & (c.last_position < position)
                connection.execute(update(t.queries).where(behind).values(last_position=position))
            remember_versions(connection, (ref.version for ref in refs))
            note_older(connection, now_ms)
            for edge in connection.execute(select(t.edges.c.edge)).scalars().all():
                record_lost_state(connection, EdgeId(edge), now_ms)
            message = (
                "the catalog and the results were of different moments, and an operator has let the center go on with"
                " them: windows that had begun and were not final may lack records of any edge, or count some twice"
            )
            add_alarm(connection, "stores-differ", message, EdgeId(""), now_ms)
