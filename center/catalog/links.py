"""What edges state about their links, and which edges share a link."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import Row, select

from center.catalog import schema as t
from center.catalog.transactions import Transactions
from center.storage.database import upsert
from edgewater.base.streams import EdgeId
from edgewater.model.link_forecast import LinkRecord
from edgewater.wire import QueryRef

_COLUMNS = [column.name for column in t.links.columns]


class Links:
    """The links in the catalog, one row per edge that has stated something about its link."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    def record(self, records: Sequence[LinkRecord], now_ms: int) -> list[LinkRecord]:
        """Stores records. Returns the records of all edges that now share a link that one of them names."""
        names = {record.link for record in records if record.link}
        with self._transactions.write() as connection:
            rows = [
                {name: getattr(r, name) for name in _COLUMNS}
                | {"loads": [[ref.name, ref.version, *taken] for ref, taken in r.loads.items()]}
                for r in records
            ]
            upsert(connection, t.links, rows)
        return self.sharing(names, now_ms)

    def sharing(self, names: Collection[str], now_ms: int) -> list[LinkRecord]:
        """Returns the records of all edges that now share one of these links."""
        if not names:
            return []
        with self._transactions.read() as connection:
            sharing = select(t.links).where(t.links.c.link.in_(names), t.links.c.until_ms > now_ms)
            return [_from_row(row) for row in connection.execute(sharing)]

    def of(self, edges: Collection[EdgeId]) -> dict[EdgeId, LinkRecord]:
        """Returns the records of these edges."""
        with self._transactions.read() as connection:
            rows = connection.execute(select(t.links).where(t.links.c.edge.in_(edges)))
            return {record.edge: record for record in map(_from_row, rows)}


def _from_row(row: Row[tuple[object, ...]]) -> LinkRecord:
    values = dict(row._mapping)
    loads = {QueryRef(name, version): (sent, omitted) for name, version, sent, omitted in values.pop("loads")}
    return LinkRecord(**values, loads=loads)
