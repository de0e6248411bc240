"""Edges with their real journals, and a center with its real stores and API: what one says, the other answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa

from center.api import create_app
from center.catalog import Catalog, ComponentRegistry, StreamRecord
from center.config import ApiSection
from center.job.ledger_writer import CatalogEvents, LedgerWriter
from center.job.metrics import JobMetrics
from center.ledger import FrameSummary, Ledger
from center.results import MergedDelta, ResultStore
from edge.core import Acked, Configured, EdgeCore, FrameBuilt, Ingested, PullEvent, SourcesOpened, StreamSpec
from edge.durability import DurableCore
from edgewater.query import QuerySpec
from edgewater.streams import LIVE, EdgeId
from edgewater.synopses import GroupedAggregate
from edgewater.wire import QueryRef

MINUTE = 60_000
T0 = 1_356_998_400_000  # 2013-01-01T00:00:00Z
COLUMNS = {"x": pa.int64()}
STREAM = "events"
SOURCE = "http"


class Border:
    """One center and its edges. `now_ms` is the wall clock of all of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now_ms = T0
        url = f"sqlite:///{path}/center.db"
        self.catalog = Catalog(url)
        self.components = ComponentRegistry(url)
        self.results = ResultStore(url)
        self.open_job()
        self.edges: dict[str, Site] = {}

    def open_job(self) -> None:
        """Starts the job, or starts it again: nothing is kept but the stores."""
        self.ledger, self.metrics = Ledger(), JobMetrics()
        self.results.load_ledger(self.ledger)
        self.writer = LedgerWriter(
            self.ledger, self.results, CatalogEvents(self.catalog), self.metrics, now_ms=lambda: self.now_ms
        )
        self.writer.advance()

    def register(self, **parts: object) -> QueryRef:
        given = {"name": "q", "from": STREAM, "measures": {"n": "count()"}, "window": {"tumbling": "1m"}, **parts}
        query = self.catalog.register(QuerySpec.from_mapping(given), self.now_ms)
        self.writer.advance()
        for site in self.edges.values():
            site.configure()
        return query.ref

    def edge(self, name: str, incarnation: str = "i1") -> Site:
        """Starts an edge's agent, or starts it again on the directory of that incarnation."""
        self.edges[name] = Site(self, name, incarnation)
        return self.edges[name]

    def get(self, path: str) -> Any:
        """The JSON of a GET of the API."""
        response = self.fetch(path)
        assert response.status_code == 200, response.text
        return response.json()

    def fetch(self, path: str) -> httpx.Response:
        app = create_app(self.catalog, self.results, self.components, ApiSection(), now_ms=lambda: self.now_ms)

        async def once() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://center") as client:
                return await client.get(path)

        return asyncio.run(once())

    def answer(self, start_ms: int = T0) -> Any:
        return self.get(f"/v1/queries/q/windows/{start_ms}")


class Site:
    """One edge: its durable core, and its session with the center."""

    def __init__(self, center: Border, name: str, incarnation: str) -> None:
        self.center, self.name = center, name

        def make_core() -> EdgeCore:
            return EdgeCore({STREAM: StreamSpec(COLUMNS, LIVE)})

        def reread(source: str, start: object, end: object) -> pa.RecordBatch:
            raise AssertionError("pushed records are in the journal")

        self.durable = DurableCore(center.path / name / incarnation, make_core, reread, incarnation)
        self.durable.handle(SourcesOpened(((STREAM, SOURCE),)))
        core = self.durable.core
        center.catalog.begin_session(
            EdgeId(name), self.durable.incarnation, labels={}, streams=[StreamRecord(STREAM, COLUMNS, LIVE)],
            oldest_seq=core.unacked[0].seq if core.unacked else core.next_seq, next_seq=core.next_seq,
            now_ms=center.now_ms,
        )  # fmt: skip
        center.writer.advance()
        self.configure()

    def configure(self) -> None:
        queries = tuple((q.ref, q.spec) for q in self.center.catalog.queries())
        if {ref for ref, _ in queries} != set(self.durable.core.queries) or not self.durable.core.configured:
            self.durable.handle(Configured(queries))

    def accept(self, *times_ms: int) -> None:
        """A push that is acknowledged: one record at each event time."""
        times = pa.array(times_ms, pa.int64())
        batch = pa.RecordBatch.from_arrays([times, times], names=["x", "event_time_ms"])
        self.durable.ingest_payload(Ingested(STREAM, SOURCE, batch, self.center.now_ms))
        self.durable.sync()

    def ship(self) -> int:
        """Sends all that is due, in one micro-batch; returns the number of frames."""
        frames, core = [], self.durable.core
        while (due := core.next_pull_ms(1e6, self.center.now_ms)) is not None and due <= self.center.now_ms:
            pull = PullEvent(1 << 20, core.drain_windows(1e6, self.center.now_ms))
            built = [e.frame for e in self.durable.handle(pull) if isinstance(e, FrameBuilt)]
            if not built:
                break
            frames += built
        self.durable.sync()
        self._apply(frames)
        if frames:
            self.durable.handle(Acked(frames[-1].seq))
        return len(frames)

    def _apply(self, frames: Sequence[Any]) -> None:
        consumed = self.center.writer.consumed()
        summaries, parts, through = [], dict[tuple[QueryRef, int], list[bytes]](), dict[str, int]()
        for frame in frames:
            key, body = f"{frame.query.name}@{frame.query.version}", frame.unpack()
            through[key] = through.get(key, consumed.get(key, 0)) + 1
            touched = tuple(sorted({p.slice_start_ms for p in body.partials}))
            summaries.append(
                FrameSummary(
                    query=frame.query,
                    position=through[key],
                    edge=EdgeId(self.name),
                    through_ms=body.through_ms,
                    closes=body.closes,
                    touched=touched,
                    wire_bytes=frame.wire_bytes,
                    received_at_ms=self.center.now_ms,
                    incarnation=self.durable.incarnation,
                    since_ms=body.since_ms,
                    arrivals=body.arrivals,
                    losses=body.losses,
                    dropped=body.dropped,
                )
            )
            for partial in body.partials:
                parts.setdefault((frame.query, partial.slice_start_ms), []).append(partial.synopsis)
        deltas = [MergedDelta(ref, s, 0, GroupedAggregate.merge_bytes(p)) for (ref, s), p in parts.items()]
        if through:
            self.center.writer.apply(deltas, summaries, through)
