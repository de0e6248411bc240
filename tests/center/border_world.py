"""Edges with their real journals, and a center with its real stores and API: what one says, the other answers."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pyarrow as pa

from center.api import create_app
from center.catalog import Catalog, ComponentRegistry, SessionStart
from center.config import ApiSection
from center.ingest.frame_check import FrameCheck
from center.ingest.stream_rules import CLOCK_LEAD_MS
from center.job.batch_applier import to_batch
from center.job.job_parts import JobParts
from center.job.ledger_writer import LedgerWriter
from center.job.merge import SkipKind, Skipped, SlicePartial, merge_partials
from center.job.metrics import JobMetrics
from center.ledger import Ledger
from center.results import ResultStore
from center.storage.frame_log import FrameEntry
from edge.core.core import EdgeCore
from edge.core.events import Acked, Configured, Ingested, PullEvent, SourcesOpened
from edge.core.streams import StreamSpec
from edge.durability import DurableCore
from edge.records import RejectedRecords
from edgewater.base.errors import OutdatedState
from edgewater.base.streams import LIVE, Constant, EdgeId
from edgewater.model.edge_records import StateDigest, StreamRecord
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import query_key
from edgewater.wire import Frame, FrameBody, QueryRef
from tests.center.catalog_world import begin_session
from tests.center.kept_frames import facts_of_frame, kept_body, partials_of_frame
from tests.cores import pulled

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
        self.runs = itertools.count(1)
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
        self.writer = LedgerWriter(self.ledger, JobParts(self.catalog, self.results, self.metrics, lambda: self.now_ms))
        self.writer.advance()

    def register(self, **parts: object) -> QueryRef:
        given = {"name": "q", "from": STREAM, "measures": {"n": "count()"}, "window": {"tumbling": "1m"}, **parts}
        query = self.catalog.queries.register(QuerySpec.from_mapping(given), self.now_ms)[0]
        self.writer.advance()
        for site in self.edges.values():
            site.configure()
        return query.ref

    def edge(
        self, name: str, incarnation: str = "i1", constants: Mapping[str, Constant] = MappingProxyType({})
    ) -> Site:
        """Starts an edge's agent, or starts it again on the directory of that incarnation."""
        self.edges[name] = Site(self, name, incarnation, constants)
        return self.edges[name]

    def edge_with_query(self, name: str, **parts: object) -> Site:
        """Starts an edge, and registers a query over its stream."""
        site = self.edge(name)
        self.register(**parts)
        return site

    def get(self, path: str) -> Any:
        """The JSON of a GET of the API."""
        response = self.fetch(path)
        assert response.status_code == 200, response.text
        return response.json()

    def fetch(self, path: str, accept: str = "application/json") -> httpx.Response:
        app = create_app(self.catalog, self.results, self.components, ApiSection(), now_ms=lambda: self.now_ms)

        async def once() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
                return await client.get(path, headers={"accept": accept})

        return asyncio.run(once())

    def answer(self, start_ms: int = T0) -> Any:
        return self.get(f"/v1/queries/q/windows/{start_ms}")


class Site:
    """One edge: its durable core, and its session with the center."""

    def __init__(self, center: Border, name: str, incarnation: str, constants: Mapping[str, Constant]) -> None:
        self.center, self.name, self.constants = center, name, constants

        def make_core() -> EdgeCore:
            return EdgeCore({STREAM: StreamSpec(COLUMNS, LIVE, constants=constants)})

        def reread(source: str, start: object, end: object) -> pa.RecordBatch:
            raise AssertionError("pushed records are in the journal")

        def open_state() -> DurableCore:
            durable = DurableCore(directory, make_core, reread, incarnation)
            durable.begin_run(next(center.runs))
            durable.handle(SourcesOpened(((STREAM, SOURCE),)))
            return durable

        self.directory = directory = center.path / name / incarnation
        self.durable = open_state()
        try:
            self.connect()
        except OutdatedState:
            number = next(center.runs)
            self.durable.begin_anew(f"{incarnation}-{number}", number)
            self.durable = open_state()
            self.connect()
        self.configure()

    def connect(self) -> None:
        """Sends the Hello of a new session."""
        core, durable, center = self.durable.core, self.durable, self.center
        begin_session(center.catalog, SessionStart(
            EdgeId(self.name), durable.incarnation, labels={},
            streams=[StreamRecord(STREAM, COLUMNS, LIVE, constants=self.constants)],
            oldest_seq=core.unacked[0].seq if core.unacked else core.next_seq, next_seq=core.next_seq,
            now_ms=center.now_ms, state=StateDigest(tuple(durable.state.runs), durable.durable_records),
        ))  # fmt: skip
        center.writer.advance()

    def configure(self) -> None:
        queries = tuple((q.ref, q.spec) for q in self.center.catalog.queries.all())
        if {ref for ref, _ in queries} != set(self.durable.core.queries) or not self.durable.core.configured:
            self.durable.handle(Configured(queries))

    def accept(self, *times_ms: int) -> None:
        """A push that is acknowledged: one record at each event time."""
        times = pa.array(times_ms, pa.int64())
        x = pa.repeat(self.constants["x"], len(times)) if "x" in self.constants else times
        batch = pa.RecordBatch.from_arrays([x, times], names=["x", "event_time_ms"])
        self.durable.ingest_payload(Ingested(STREAM, SOURCE, batch, self.center.now_ms))
        self.durable.sync()

    def deliver(self, *times_ms: int) -> None:
        """A push of one record at each event time, and what the edge sends then."""
        self.accept(*times_ms)
        self.ship()

    def reject(self, *parts: RejectedRecords, times_ms: Sequence[int] = ()) -> None:
        """A push of which some records are rejected, or guessed; the others have these event times."""
        times = pa.array(times_ms, pa.int64())
        batch = pa.RecordBatch.from_arrays([times, times], names=["x", "event_time_ms"])
        self.durable.ingest_payload(Ingested(STREAM, SOURCE, batch, self.center.now_ms, rejected=parts))
        self.durable.sync()

    def ship(self, spoil: Callable[[FrameBody], FrameBody | None] = lambda body: body) -> int:
        """Sends all that is due, in one batch; returns the number of frames.

        Args:
            spoil: returns what the center reads of a frame; None: it cannot be read.
        """
        frames, core = [], self.durable.core
        while (due := core.pulls.next_pull_ms(1e6, self.center.now_ms)) is not None and due <= self.center.now_ms:
            pull = PullEvent(1 << 20, core.pulls.event_times(self.center.now_ms))
            built = pulled(self.durable, pull)
            if not built:
                break
            frames += built
        self.durable.sync()
        read: dict[tuple[str, int], tuple[str, FrameEntry]] = {}
        partials: list[SlicePartial] = []
        damaged: list[Skipped] = []
        facts: defaultdict[str, dict[int, bytes]] = defaultdict(dict)
        positions = self.center.writer.consumed()
        for frame in frames:
            key = query_key(frame.query)
            positions[key] = positions.get(key, 0) + 1
            entry = FrameEntry(
                frame.query, positions[key], EdgeId(self.name), self.durable.incarnation, frame.seq, frame.crc32c,
                "segment", 0, 0, frame.wire_bytes, self.center.now_ms,
            )  # fmt: skip
            body = spoil(frame.unpack())
            if body is not None:  # what the gateway keeps of it
                check = FrameCheck(self.center.catalog.queries.get(frame.query.name).spec, COLUMNS)
                latest_ms = self.center.now_ms + CLOCK_LEAD_MS
                body = kept_body(check.check(Frame.pack(frame.seq, frame.query, body), latest_ms))
                partials += partials_of_frame(entry, body)
            else:
                damaged.append(Skipped(key, entry.position, SkipKind.DAMAGED, "torn"))
            read[key, entry.position] = key, entry
            facts[key][entry.position] = facts_of_frame(body or FrameBody(0))
        merged, refused = merge_partials(partials)
        frames_read = [read[at] for at in sorted(read)]
        batch = to_batch(frames_read, merged, [*damaged, *refused], facts)
        if batch.through:
            self.center.writer.apply(batch.deltas, batch.summaries, batch.through)
            self.center.writer.advance()
        if frames:
            self.durable.handle(Acked(frames[-1].seq))
        return len(frames)
