"""Progress of the edges per query, for `progress` events and query pages."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from cachetools import TTLCache

from center.catalog import Catalog
from edgewater.base.errors import NotFound
from edgewater.base.streams import MAX_TIME_MS, EdgeId
from edgewater.base.timestamps import rfc3339
from edgewater.model import replies
from edgewater.model.edge_records import EdgeRecord, expected_edges
from edgewater.model.registered_query import RegisteredQuery

FRESH_S = 0.5  # limit: reads of the catalog
"""Maximum age of the catalog view that all streams share."""


@dataclass(frozen=True, slots=True)
class CatalogView:
    """The live queries and all edges, read at one time."""

    queries: tuple[RegisteredQuery, ...]
    edges: tuple[EdgeRecord, ...]


class SharedProgress:
    """Progress of queries for any number of streams, from one shared view of the catalog."""

    def __init__(self, catalog: Catalog, now_ms: Callable[[], int], fresh_s: float = FRESH_S) -> None:
        self._catalog = catalog
        self._now_ms = now_ms
        self._cache: TTLCache[None, CatalogView] = TTLCache(1, fresh_s)
        self._lock = threading.Lock()

    def view(self, *, refresh: bool = False) -> CatalogView:
        """Returns the shared view, at most `fresh_s` old; with `refresh`, a new view."""
        with self._lock:
            view = None if refresh else self._cache.get(None)
            if view is None:
                view = CatalogView(tuple(self._catalog.queries.all()), tuple(self._catalog.edges.all()))
                self._cache[None] = view
            return view

    def event_data(self, query: RegisteredQuery | None, reads: Callable[[str], bool]) -> replies.ProgressData:
        """Returns the data of a `progress` event of one query; with None, of all queries whose names `reads` accepts.

        Raises:
            NotFound: the query was deleted or replaced.
        """
        view, now_ms = self.view(), self._now_ms()
        if query is None:
            queries = list({q.ref.name: q for q in view.queries if reads(q.ref.name)}.values())
        else:
            known = {q.ref for q in view.queries}
            if query.ref not in known and query not in self._catalog.queries.versions(query.ref.name):
                raise NotFound(f"query {query.ref.name}: version {query.ref.version} is deleted")
            queries = [query]
        first: dict[str, int] = {}
        for each in view.queries:
            first.setdefault(each.ref.name, each.ref.version)
        records = {e.edge: e for e in view.edges}
        progress: list[replies.QueryProgress] = [
            {
                "query": q.ref.name,
                "version": q.ref.version,
                "edges": [
                    edge_progress(edge, records.get(edge), q.spec.stream, now_ms)
                    for edge in expected_edges(q.spec, view.edges)
                ],
                "first_version": min(first.get(q.ref.name, q.ref.version), q.ref.version),
            }
            for q in queries
        ]
        return {"time": rfc3339(now_ms), "queries": progress}

    def newer(self, query: RegisteredQuery) -> RegisteredQuery | None:
        """Returns the newest version of a query if the query given is an older version."""
        newest = [q for q in self.view().queries if q.ref.name == query.ref.name][-1:]
        return newest[0] if newest and newest[0].ref.version > query.ref.version else None


def edge_state(record: EdgeRecord, now_ms: int) -> replies.EdgeState:
    """Returns the connectivity only. An edge without events is up too; its watermarks show that it has none."""
    if record.retired:
        return "retired"
    return "up" if record.reachable(now_ms) else "unreachable"


def edge_progress(edge: EdgeId, record: EdgeRecord | None, stream: str, now_ms: int) -> replies.EdgeProgress:
    """Returns one edge's progress in a stream."""
    if record is None:
        return {"edge": edge, "state": "never_connected", "watermark": None, "ended": False, "last_seen": None}
    state, seen = edge_state(record, now_ms), rfc3339(record.last_seen_ms)
    return {"edge": edge, "state": state, **watermark(record.watermarks.get(stream)), "last_seen": seen}


def watermark(millis: int | None) -> replies.Watermark:
    """Returns a stream's watermark; null before the first watermark and after the stream's end."""
    ended = millis is not None and millis >= MAX_TIME_MS
    return {"watermark": None if millis is None or ended else rfc3339(millis), "ended": ended}
