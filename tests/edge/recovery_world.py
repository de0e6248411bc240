"""A small world for recovery tests: a replayable source, an edge, and a center that only merges."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from edge.core.core import EdgeCore
from edge.core.events import Acked, BudgetSet, Configured, Ingested, PullEvent, SourceEnded, SourcesOpened
from edge.core.memory import SliceMemoryLimits
from edge.core.streams import StreamSpec
from edge.durability import DurableCore
from edge.records import Position
from edgewater.base.streams import TIME_COLUMN
from edgewater.model.caching import CacheSpec
from edgewater.model.query import QuerySpec
from edgewater.synopses import GroupedAggregate
from edgewater.wire import Frame, QueryRef
from tests.cores import pulled
from tests.query_specs import query_spec

COLUMNS = {"carrier": pa.string(), "distance": pa.int64()}
EXACT = query_spec(
    name="exact",
    stream="flights",
    group_by=["carrier"],
    measures={"flights": "count()", "miles": "sum(distance)", "longest": "max(distance)"},
    window={"sliding": "20s", "every": "10s"},
    lateness="30s",
)
BUDGETED = query_spec(
    name="budgeted",
    stream="flights",
    where="distance > 100",
    group_by=["carrier"],
    measures={"miles": "sum(distance)"},
    window={"tumbling": "10s"},
    budget={"error": {"miles": 2000}},
)
QUERIES = ((QueryRef("exact", 1), EXACT), (QueryRef("budgeted", 1), BUDGETED))
SHARE = 2000.0


def eager(spec: QuerySpec) -> QuerySpec:
    """Returns a query that sends from its open slices at each pull, and drops no late record of this world."""
    return replace(spec, cache=CacheSpec("lru"), lateness_ms=30_000)


def flights(rows: int, seed: int, *, disorder_ms: int = 4000) -> pa.RecordBatch:
    """`rows` records over a minute of event time, some of them out of order."""
    rng = np.random.default_rng(seed)
    times = np.sort(rng.integers(0, 60_000, rows)) + rng.integers(0, disorder_ms, rows)
    return pa.record_batch(
        {
            "carrier": pa.array(rng.choice(["UA", "DL", "AA", None], rows), pa.string()),
            "distance": pa.array(rng.integers(50, 1500, rows)),
            TIME_COLUMN: pa.array(times.astype(np.int64)),
        }
    )


@dataclass
class Center:
    """Takes each frame once by its number and merges; an identity with other bytes fails the test."""

    frames: dict[int, Frame] = field(default_factory=dict)

    def receive(self, frame: Frame) -> int:
        held = self.frames.setdefault(frame.seq, frame)
        assert held.crc32c == frame.crc32c, f"frame {frame.seq} came again with other bytes"
        assert set(self.frames) == set(range(1, len(self.frames) + 1)), "frames must come without gaps"
        return len(self.frames)

    def answers(self, query: str | None = None) -> dict[tuple[str, int], dict[Any, dict[str, float]]]:
        """(query, slice) -> group -> measure -> value, of one query or of all."""
        partials: defaultdict[tuple[str, int], list[bytes]] = defaultdict(list)
        for _, frame in sorted(self.frames.items()):
            if query in (None, frame.query.name):
                for partial in frame.unpack().partials:
                    partials[frame.query.name, partial.slice_start_ms].append(partial.synopsis)
        merged = {key: GroupedAggregate.merge_bytes(parts) for key, parts in partials.items()}
        return {key: values_of(GroupedAggregate.from_bytes(data)) for key, data in merged.items()}


def values_of(aggregate: GroupedAggregate) -> dict[Any, dict[str, float]]:
    groups = aggregate.rows()[0].to_pylist()
    estimates = {name: aggregate.query(name).value for name in aggregate.measures}
    return {g: {name: float(v[i]) for name, v in estimates.items()} for i, g in enumerate(groups)}


def truth(batch: pa.RecordBatch, spec: QuerySpec) -> dict[tuple[str, int], dict[Any, dict[str, float]]]:
    """The exact answers, computed record by record."""
    result: dict[tuple[str, int], dict[Any, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row in batch.to_pylist():
        if spec is EXACT or row["distance"] > 100:
            start = spec.window.slice_start(row[TIME_COLUMN])
            result[(spec.name, start)][row["carrier"]].append(row["distance"])
    fold = {"flights": len, "miles": sum, "longest": max}
    return {
        key: {g: {m.name: float(fold[m.name](v)) for m in spec.measures} for g, v in groups.items()}
        for key, groups in result.items()
    }


class World:
    """One edge over `data`, driven by a fixed script of steps, each of which may be the last."""

    now_ms = 1 << 40
    queries: tuple[tuple[QueryRef, QuerySpec], ...] = tuple((ref, eager(spec)) for ref, spec in QUERIES)

    def __init__(
        self,
        directory: Path,
        data: pa.RecordBatch,
        center: Center,
        *,
        pushed: bool = False,
        memory: SliceMemoryLimits | None = None,
    ) -> None:
        self.data, self.center, self.pushed = data, center, pushed
        spec = StreamSpec(COLUMNS, disorder_ms=2000)
        self.edge = DurableCore(
            directory, lambda: EdgeCore({"flights": spec}), self._reread, "first", now_ms=self.now_ms,
            memory=memory,
        )  # fmt: skip

    def _reread(self, source: str, start: Position | None, end: Position) -> pa.RecordBatch:
        at = start["row"] if start else 0
        return self.data.slice(at, end["row"] - at)

    @property
    def row(self) -> int:
        return int(self.edge.state.positions.get("file", {"row": 0})["row"])

    def configure(self) -> None:
        if not self.edge.core.configured:
            self.edge.handle(SourcesOpened((("flights", "file"),)))
            self.edge.handle(Configured(self.queries))
            self.edge.handle(BudgetSet(QUERIES[1][0], {"miles": SHARE}))

    def ingest(self, rows: int) -> None:
        start, end = self.row, min(self.row + rows, self.data.num_rows)
        if end > start:
            event = Ingested("flights", "file", self.data.slice(start, end - start), (1 << 40) + end)
            self.edge.ingest_range(event, {"row": start}, {"row": end})

    def pull(self, capacity: int = 400, max_frames: int = 64) -> None:
        """Pulls from closed slices, and from open ones."""
        now_ms = self.edge.core.streams["flights"].newest_ms
        self.edge.handle(PullEvent(capacity, {"flights": now_ms}, max_frames=max_frames))

    def end(self) -> None:
        self.edge.handle(SourceEnded("flights", "file"))

    def ship(self) -> None:
        """Sends as the uplink does: only durable frames."""
        self.edge.sync()
        for frame in list(self.edge.core.unacked):
            self.center.receive(frame)
        if self.center.frames:
            self.edge.handle(Acked(max(self.center.frames)))

    def finish(self) -> None:
        """Runs to the end of the data without further trouble."""
        self.configure()
        while self.row < self.data.num_rows:
            self.ingest(40)
            self.pull()
            self.ship()
        self.end()
        while pulled(self.edge, PullEvent(4000, max_frames=64)):
            self.ship()
        self.ship()
