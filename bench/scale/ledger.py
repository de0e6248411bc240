"""The cost of a batch for the ledger and its store when a query has many edges: CPU, and bytes of written rows."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from center.ledger import EdgesChanged, FramesMerged, FrameSummary, Ledger, QueryRegistered
from edgewater.base.streams import LIVE, EdgeId
from edgewater.model.edge_records import EdgeRecord, StreamRecord
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import RegisteredQuery
from edgewater.wire import QueryRef, SliceClose
from tests.center.snapshots import snapshot

REF = QueryRef("q", 1)
SPEC = {"name": "q", "from": "load", "measures": {"n": "count()"}, "window": {"tumbling": "1s"}, "lateness": "10s"}


class Edges:
    """A ledger with one query. Each edge has closed a window of it."""

    def __init__(self, count: int) -> None:
        self.ledger, self.count, self._position = Ledger(), count, 0
        query = RegisteredQuery(REF, QuerySpec.from_mapping(SPEC), 0, None)
        with self.ledger.transaction():
            self.ledger.handle(EdgesChanged(tuple(_record(number) for number in range(count))))
            self.ledger.handle(QueryRegistered(query))
        self.batch(range(count), 0)

    def batch(self, edges: Iterable[int], window: int) -> int:
        """Applies a frame of each edge, which closes a window. Returns the bytes of the changed rows."""
        frames = []
        for number in edges:
            self._position += 1
            start, edge = window * 1000, EdgeId(_name(number % self.count))
            close = SliceClose(start, 1, 0)
            frames.append(FrameSummary(REF, self._position, edge, start + 1000, (close,), (start,), 100, 0, "i"))
        with self.ledger.transaction() as transaction:
            self.ledger.handle(FramesMerged(tuple(frames), 10**9))
            changes = transaction.changes()
        return sum(len(c.state or "") + sum(len(text or "") for *_, text in c.entries) for c in changes)


def measure(smoke: bool) -> dict[str, Any]:
    """Returns, by number of edges, batches of frames of 1, 32 and all edges, and the load of a takeover."""
    return {"by_edges": {str(count): _measure(count) for count in ((100,) if smoke else (100, 1_000, 5_000))}}


def _measure(count: int) -> dict[str, Any]:
    edges, row = Edges(count), dict[str, Any]()
    for window, (size, batches) in enumerate(((1, 40), (32, 20), (count, 2)), 1):
        began_s, written = time.process_time(), 0
        for number in range(batches):
            first = number * size
            written += edges.batch(range(first, first + size), window + (number if size == count else 0))
        ms = (time.process_time() - began_s) / batches * 1000
        row[f"batch_of_{'all' if size == count else size}"] = {"ms": round(ms, 2), "bytes": written // batches}
    state, began_s = snapshot(edges.ledger, REF), time.process_time()
    Ledger().restore(REF, state)
    return row | {"load_ms": round((time.process_time() - began_s) * 1000, 1), "snapshot_bytes": len(state)}


def _name(number: int) -> str:
    return f"edge-{number:05d}"


def _record(number: int) -> EdgeRecord:
    streams = (StreamRecord("load", {}, LIVE),)
    return EdgeRecord(
        EdgeId(_name(number)), "i", {}, streams, 0, 0, True, {}, {}, {}, 0, 0.0, 0.0, 0.0, retired=False, incarnations=1
    )
