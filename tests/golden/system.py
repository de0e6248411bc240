"""One edge and one center of the golden set: an edge reads, a session carries its frames, a job answers from them.

`Edge`, `Stores` and `answers` use the product as it is. `tests.golden.write` writes what they leave on disk, and the
tests go on from it. The records follow from arithmetic, as the stream of a random generator may change with a release.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa

from center.api import create_app
from center.catalog import Catalog, ComponentRegistry, SessionStart, UnindexedFrame
from center.config import ApiSection
from center.ingest.frame_check import FrameCheck
from center.job.batch_applier import to_batch
from center.job.merge import merge_partials, read_frames
from center.ledger import EdgesChanged, Ledger, QueryRegistered
from center.results import ResultStore
from center.storage.frame_log import FrameLog, StoredFrame
from edge.core.core import EdgeCore
from edge.core.events import (
    Acked,
    BudgetSet,
    Configured,
    Ingested,
    PullEvent,
    SamplingSet,
    SourceEnded,
    SourcesOpened,
    TickEvent,
)
from edge.core.streams import StreamSpec
from edge.durability import DurableCore
from edge.records import Position, PushId
from edgewater.base.streams import LIVE, TIME_COLUMN, EdgeId
from edgewater.model.edge_records import StreamRecord
from edgewater.model.query import QuerySpec
from edgewater.wire import Frame, QueryRef, SamplingReason
from tests.center.catalog_world import begin_session
from tests.cores import drained

T0 = 1_356_998_400_000  # 2013-01-01T00:00:00Z
NOW_MS = T0 + 3_600_000
ROWS, STEP = 600, 50
COLUMNS = {"carrier": pa.string(), "distance": pa.int64(), "delay": pa.float64()}
JFK, INCARNATION, LABELS = EdgeId("jfk"), "golden-1", {"city": "New York"}
WHOLE = {"from": "flights", "seed": 7, "lateness": "30s"}
SPECS = [
    QuerySpec.from_mapping({"name": name, **WHOLE, **parts})
    for name, parts in {
        "exact": {
            "group_by": ["carrier"], "window": {"sliding": "20s", "every": "10s"},
            "measures": {"n": "count()", "miles": "sum(distance)", "longest": "max(distance)", "delay": "mean(delay)"},
        },
        "sketches": {
            "window": {"tumbling": "20s"},
            "measures": {
                "carriers": "distinct(carrier)", "delays": "quantiles(delay)", "top": "top_k(carrier)",
                "sample": "reservoir(distance, size=20)", "frequent": "count_min(carrier)",
            },
        },
        "budgeted": {
            "group_by": ["carrier"], "where": "distance > 100", "window": {"tumbling": "10s"},
            "measures": {"miles": "sum(distance)"}, "budget": {"error": {"miles": 2000}},
        },
        "sessions": {"group_by": ["carrier"], "window": {"session": "2s"}, "measures": {"n": "count()"}},
        "early": {
            "window": {"tumbling": "10s"}, "measures": {"total": "sum(distance)"},
            "accuracy": {"error": "20%", "confidence": "95%", "measure": "total", "substream": "1s"},
        },
    }.items()
]  # fmt: skip
QUERIES = tuple((QueryRef(spec.name, 1), spec) for spec in SPECS)
PATHS = tuple(
    path
    for spec in SPECS
    for path in (f"/v1/queries/{spec.name}", f"/v1/queries/{spec.name}/windows", f"/v1/queries/{spec.name}/latest")
)


def records() -> pa.RecordBatch:
    """A minute of records, some out of order, with pauses of more than two seconds."""
    n = np.arange(ROWS)
    times = T0 + n * 100 + n * 7919 % 1_500 + (n // 150) * 3_000
    return pa.record_batch(
        {
            "carrier": pa.array([("UA", "DL", "AA", None)[i * 7 % 11 % 4] for i in range(ROWS)], pa.string()),
            "distance": pa.array(n * 7919 % 1_483 + 20),
            "delay": pa.array((n * 31 % 257 - 60) / 4),
            TIME_COLUMN: pa.array(times),
        }
    )


class Edge:
    """An edge over `records`, whose state is in a directory."""

    def __init__(self, directory: Path) -> None:
        self._records = records()
        spec = StreamSpec(COLUMNS, disorder_ms=2_000)
        self.core = DurableCore(
            directory, lambda: EdgeCore({"flights": spec}, source=7), self._reread, INCARNATION, now_ms=NOW_MS
        )

    def _reread(self, source: str, start: Position | None, end: Position) -> pa.RecordBatch:
        at = start["row"] if start else 0
        return self._records.slice(at, end["row"] - at)

    @property
    def row(self) -> int:
        """The records that the edge has accepted: pushes are at every third place."""
        return max(int(self.core.state.positions.get(name, {"row": 0})["row"]) for name in ("file", "push"))

    def begin(self) -> None:
        self.core.begin_run(11)
        self.core.handle(SourcesOpened((("flights", "file"), ("flights", "push")), ("file",), 1 << 20))
        self.core.handle(Configured(QUERIES))
        self.core.handle(BudgetSet(QueryRef("budgeted", 1), {"miles": 2000.0}, 1, T0))
        self.core.handle(SamplingSet(QueryRef("early", 1), 0.5, 0.0, SamplingReason.MEASURE))

    def read_on(self, rows: int) -> None:
        """Reads further records, ends slices, and builds frames."""
        for start in range(self.row, min(self.row + rows, ROWS), STEP):
            batch, arrival_ms = self._records.slice(start, STEP), T0 + start * 100 + 5_000
            if start // STEP % 3 == 2:
                push = PushId(start.to_bytes(16, "little"), bytes(16))
                self.core.ingest_payload(Ingested("flights", "push", batch, arrival_ms), push, {"row": start + STEP})
            else:
                event = Ingested("flights", "file", batch, arrival_ms)
                self.core.ingest_range(event, {"row": start}, {"row": start + STEP})
            self.core.handle(TickEvent(arrival_ms, ()))
            self.core.handle(PullEvent(2_000, {"flights": arrival_ms}, max_frames=8))
        self.core.sync()

    def acknowledge(self, frames: int) -> None:
        self.core.handle(Acked(self.frames()[frames - 1].seq))

    def end(self) -> None:
        for name in ("file", "push"):
            self.core.handle(SourceEnded("flights", name))
        drained(self.core, PullEvent(1 << 20, max_frames=64))
        self.core.sync()

    def frames(self) -> list[Frame]:
        return list(self.core.core.unacked)


class Stores:
    """The catalog, the frame log and the results of a center, in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.now_ms = directory, NOW_MS
        url = f"sqlite:///{directory}/catalog.db"
        self.catalog, self.components = Catalog(url), ComponentRegistry(url)
        self.log = FrameLog(directory / "log")
        self.results = ResultStore(f"sqlite:///{directory}/results.db")
        self.ledger = Ledger()
        assert self.results.take_lease("golden", self.results.lease(), 60_000, NOW_MS)
        self.results.load_ledger(self.ledger)

    def register(self) -> None:
        registered = [self.catalog.queries.register(spec, NOW_MS)[0] for spec in SPECS]
        begin_session(self.catalog, SessionStart(
            JFK, INCARNATION, labels=LABELS, streams=(StreamRecord("flights", COLUMNS, LIVE),), oldest_seq=1,
            next_seq=1, now_ms=NOW_MS, session="golden",
        ))  # fmt: skip
        events = [EdgesChanged(tuple(self.catalog.edges.all())), *map(QueryRegistered, registered)]
        self.results.tick(self.ledger, events, NOW_MS)

    def receive(self, frames: Sequence[Frame]) -> None:
        """Checks frames, appends their partials to the log, and indexes them with their facts, as the gateway does."""
        specs = dict(QUERIES)
        checked = [FrameCheck(specs[frame.query], COLUMNS).check(frame, NOW_MS) for frame in frames]
        assert not any(each.reason for each in checked)
        located = self.log.append(
            [StoredFrame(f.query, JFK, INCARNATION, f.seq, c.partials) for f, c in zip(frames, checked, strict=True)]
        )
        rows = [
            UnindexedFrame(
                f.query, JFK, INCARNATION, f.seq, f.crc32c, f.wire_bytes, NOW_MS, at, f.raw_bytes, c.work,
                c.through_ms, facts=c.facts,
            )
            for f, c, at in zip(frames, checked, located, strict=True)
        ]  # fmt: skip
        assert all(outcome.acknowledged for outcome in self.catalog.frames.index(rows))

    def merge(self) -> None:
        """Applies the frames that are in the log and not in the results, as a plan does."""
        applied = self.results.consumed()
        entries = [
            (key, entry)
            for query in self.catalog.queries.all()
            for key in (query.key,)
            for entry in self.catalog.frames.entries(key, applied.get(key, 0), 1 << 40)
        ]
        facts = self.catalog.frames.facts({query.key: [(0, 1 << 40)] for query in self.catalog.queries.all()})
        partials, damaged = read_frames(self.log, self.directory / "log", entries)
        merged, refused = merge_partials(partials)
        assert not damaged and not refused
        batch = to_batch(entries, merged, [], facts)
        self.results.apply(self.ledger, batch.deltas, batch.summaries, batch.through, self.now_ms)

    def finish(self) -> None:
        """Lets the lateness of all windows pass."""
        while (due := self.ledger.next_deadline()) is not None:
            self.now_ms = max(self.now_ms + 1, due)
            self.results.tick(self.ledger, [], self.now_ms)

    def answers(self, paths: Iterable[str] = PATHS) -> dict[str, Any]:
        """Status and body of what the API replies, by path."""
        app = create_app(self.catalog, self.results, self.components, ApiSection(), now_ms=lambda: NOW_MS)

        async def get() -> dict[str, Any]:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                replies = {path: await client.get(path) for path in paths}
            return {path: [reply.status_code, reply.json()] for path, reply in replies.items()}

        return asyncio.run(get())

    def close(self) -> None:
        self.results.close()
        self.components.close()
        self.catalog.close()
