"""How far the edges have come for a query, answered or not: what `progress` events and query pages say."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from cachetools import TTLCache

from center.catalog import Catalog, EdgeRecord, RegisteredQuery, expected_edges
from center.serving import rfc3339
from edgewater.errors import NotFound
from edgewater.streams import MAX_TIME_MS, EdgeId

FRESH_S = 0.5
"""How old a view of the catalog may be that many streams share."""


@dataclass(frozen=True, slots=True)
class CatalogView:
    """The live queries and all edges, as read together."""

    queries: tuple[RegisteredQuery, ...]
    edges: tuple[EdgeRecord, ...]


class EdgeProgress:
    """EdgeProgress of queries for any number of streams, at the price of one reader of the catalog."""

    def __init__(self, catalog: Catalog, now_ms: Callable[[], int], fresh_s: float = FRESH_S) -> None:
        self._catalog = catalog
        self._now_ms = now_ms
        self._cache: TTLCache[None, CatalogView] = TTLCache(1, fresh_s)
        self._lock = threading.Lock()

    def view(self, *, refresh: bool = False) -> CatalogView:
        """The catalog of at most `fresh_s` ago, or as it is now."""
        with self._lock:
            view = None if refresh else self._cache.get(None)
            if view is None:
                view = CatalogView(tuple(self._catalog.queries()), tuple(self._catalog.edges()))
                self._cache[None] = view
            return view

    def event_data(self, query: RegisteredQuery | None) -> dict[str, Any]:
        """The data of a `progress` event: of one query, or of all.

        Raises:
            NotFound: the query is not the live one of its name any more.
        """
        view, now_ms = self.view(), self._now_ms()
        queries = view.queries if query is None else (query,)
        if query is not None and query not in view.queries and self._catalog.query(query.ref.name).ref != query.ref:
            raise NotFound(f"query {query.ref.name}: version {query.ref.version} has been replaced")
        return {"time": rfc3339(now_ms), "queries": [query_progress(q, view.edges, now_ms) for q in queries]}


def query_progress(query: RegisteredQuery, edges: tuple[EdgeRecord, ...], now_ms: int) -> dict[str, Any]:
    """A query's expected edges, each with its way through the stream."""
    known = {e.edge: e for e in edges}
    expected = expected_edges(query.spec, edges)
    return {
        "query": query.ref.name,
        "version": query.ref.version,
        "edges": [edge_progress(e, known.get(e), query.spec.stream, now_ms) for e in expected],
    }


EdgeState = Literal["up", "unreachable", "retired"]


def edge_state(record: EdgeRecord, now_ms: int) -> EdgeState:
    """An edge that is up may have no events for long; that shows in its watermarks, not here."""
    if record.retired:
        return "retired"
    return "up" if record.reachable(now_ms) else "unreachable"


def edge_progress(edge: EdgeId, record: EdgeRecord | None, stream: str, now_ms: int) -> dict[str, Any]:
    """One edge's way through a stream."""
    if record is None:
        return {"edge": edge, "state": "never_connected", "watermark": None, "ended": False, "last_seen": None}
    return {
        "edge": edge,
        "state": edge_state(record, now_ms),
        **watermark(record.watermarks.get(stream)),
        "last_seen": rfc3339(record.last_seen_ms),
    }


def watermark(millis: int | None) -> dict[str, Any]:
    """A stream's watermark; null before the first and once the stream has ended."""
    ended = millis is not None and millis >= MAX_TIME_MS
    return {"watermark": None if millis is None or ended else rfc3339(millis), "ended": ended}
