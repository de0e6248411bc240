"""What the catalog says of queries and edges, as events for the ledger."""

from __future__ import annotations

from center.catalog import Catalog
from center.ledger import EdgesChanged, LedgerEvent, QueryDeleted, QueryRegistered


class CatalogEvents:
    """Notices registrations, deletions and changes among edges by the catalog's version."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._told: int | None = None

    def news(self) -> tuple[int, list[LedgerEvent]]:
        """The catalog's version, and the events that bring the ledger to it; the same again until `told`.

        Raises StorageError.
        """
        # Read first: what changes while the rest is read makes another version, and is told again.
        version = self._catalog.version()
        if version == self._told:
            return version, []
        queries = self._catalog.queries(deleted=True)
        # A deletion ends all versions up to its own, so it goes before a later one's registration.
        events: list[LedgerEvent] = [EdgesChanged(tuple(self._catalog.edges()))]
        events += [QueryDeleted(query.ref) for query in queries if query.deleted_at_ms is not None]
        events += [QueryRegistered(query) for query in queries if query.deleted_at_ms is None]
        return version, events

    def told(self, version: int) -> None:
        """The ledger has taken the events of this version in."""
        self._told = version
