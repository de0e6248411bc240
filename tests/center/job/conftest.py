"""A center's disk with edges that ship random records, and the truth to compare its answers with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from center.catalog import Catalog, SessionStart, UnindexedFrame
from center.config import CenterConfig
from center.job.job_parts import JobParts
from center.job.ledger_writer import LedgerWriter
from center.job.merge import MergeTask
from center.job.metrics import JobMetrics
from center.ledger import Ledger
from center.results import ResultStore
from center.storage.delta_segments import DeltaSegments
from center.storage.frame_facts import split_body
from center.storage.frame_log import FrameLog, StoredFrame
from edgewater.answers import Cause, Phase
from edgewater.base.streams import LIVE, MAX_TIME_MS, EdgeId
from edgewater.guard.frame_work import PER_CLOSE, PER_MEASURE, PER_PARTIAL
from edgewater.model.edge_records import StreamRecord
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import query_key
from edgewater.synopses import GroupedAggregate
from edgewater.wire import Frame, FrameBody, Partial, QueryRef, SliceClose
from tests.center.catalog_world import begin_session
from tests.query_specs import query_spec

COLUMNS = {"url": pa.string(), "bytes": pa.int64()}
WINDOW_MS = 1000
URLS = [f"/{i}" for i in range(20)]
Truth = Counter[tuple[QueryRef, int, str]]


def spec(name: str) -> QuerySpec:
    return query_spec(name=name, stream="downloads", group_by=["url"], measures={"bytes": "sum(bytes)"})


def synopsis(urls: list[str], sizes: list[int], measure: str = "bytes") -> bytes:
    bound = spec("any").bind(COLUMNS)
    (only,) = bound.measures
    stack = only.measure.stack(pa.int64())
    grouped = GroupedAggregate({"url": pa.string()}, {measure: stack})
    grouped.update([pa.array(urls)], {measure: pa.array(sizes, pa.int64())}, len(urls))
    return grouped.to_bytes()


@dataclass
class World:
    """Catalog, frame log and result store, and what has been shipped into them."""

    path: Path
    edges: tuple[EdgeId, ...] = (EdgeId("jfk"), EdgeId("lga"), EdgeId("ewr"))
    now: int = 1_000_000
    truth: Truth = field(default_factory=Counter)
    records: int = 0
    database: str | None = None
    """URL of the one that both stores share; None: SQLite, a file each."""

    def __post_init__(self) -> None:
        self.catalog_url = self.database or f"sqlite:///{self.path}/catalog.db"
        self.results_url = self.database or f"sqlite:///{self.path}/results.db"
        self.log_dir = self.path / "log"
        self.segments = DeltaSegments(self.log_dir / "deltas")
        self.task = MergeTask(self.log_dir, self.segments)
        urls = {"catalog_url": self.catalog_url, "results_url": self.results_url}
        self.config = CenterConfig.from_mapping({"data_dir": str(self.path), **urls})
        self.catalog = Catalog(self.catalog_url)
        self.store = ResultStore(self.results_url)
        self.log = FrameLog(self.log_dir)
        self._rng = np.random.default_rng(20_160_003)
        self.next_seq = dict.fromkeys(self.edges, 0)
        for edge in self.edges:
            streams = (StreamRecord("downloads", COLUMNS, LIVE),)
            begin_session(
                self.catalog, SessionStart(edge, "i1", {}, streams, 0, next_seq=1 << 32, now_ms=self.now, session="s")
            )

    def clock(self) -> int:
        return self.now

    def shared(self, store: ResultStore | None = None) -> JobParts:
        """Returns what the parts of a job share."""
        return JobParts(self.catalog, store or self.store, JobMetrics(), self.clock)

    def close(self) -> None:
        self.catalog.close()
        self.store.close()

    def register(self, *names: str) -> list[QueryRef]:
        return [self.catalog.queries.register(spec(name), self.now)[0].ref for name in names]

    def ship(self, edge: EdgeId, ref: QueryRef, body: FrameBody) -> None:
        """A frame as the gateway stores and indexes it."""
        seq = self.next_seq[edge]
        self.next_seq[edge] += 1
        frame = Frame.pack(seq, ref, body)
        partials, facts = split_body(body)
        (location,) = self.log.append([StoredFrame(ref, edge, "i1", seq, partials)])
        work = len(body.partials) * (PER_PARTIAL + PER_MEASURE) + len(body.closes) * PER_CLOSE
        row = UnindexedFrame(
            ref,
            edge,
            "i1",
            seq,
            frame.crc32c,
            frame.wire_bytes,
            self.now,
            location,
            frame.raw_bytes,
            work,
            body.through_ms,
            facts=facts,
        )
        (outcome,) = self.catalog.frames.index([row])
        assert outcome.acknowledged

    def ship_window(self, ref: QueryRef, window: int, *, frames: int = 2) -> None:
        """Each edge ships a window of random records in some frames, and closes it with the last."""
        start_ms = window * WINDOW_MS
        for edge in self.edges:
            observed = 0
            for number in range(frames):
                urls = [str(u) for u in self._rng.choice(URLS, 8)]
                sizes = [int(s) for s in self._rng.integers(1, 10_000, 8)]
                for url, size in zip(urls, sizes, strict=True):
                    self.truth[ref, start_ms, url] += size
                observed += len(urls)
                self.records += len(urls)
                last = number == frames - 1
                closes = (SliceClose(start_ms, observed, 0),) if last else ()
                through_ms = start_ms + WINDOW_MS if last else start_ms
                body = FrameBody(through_ms, (Partial(start_ms, synopsis(urls, sizes)),), closes)
                self.ship(edge, ref, body)

    def ship_windows(self, refs: list[QueryRef], windows: int = 1) -> None:
        """Each edge ships and closes the first windows of these queries."""
        for window in range(windows):
            for ref in refs:
                self.ship_window(ref, window)

    def ship_records(self, edge: EdgeId, ref: QueryRef, window: int, urls: list[str]) -> None:
        """One record of one byte per URL."""
        start_ms = window * WINDOW_MS
        for url in urls:
            self.truth[ref, start_ms, url] += 1
        self.records += len(urls)
        close = SliceClose(start_ms, len(urls), 0)
        self.ship(edge, ref, FrameBody(start_ms, (Partial(start_ms, synopsis(urls, [1] * len(urls))),), (close,)))

    def ship_foreign(self, edge: EdgeId, ref: QueryRef) -> None:
        """A partial that can be read, but is another query's."""
        self.ship(edge, ref, FrameBody(0, (Partial(0, synopsis(["/a"], [1], measure="other")),)))

    def end(self, *refs: QueryRef) -> None:
        """Every edge says that nothing more will come."""
        for ref in refs:
            for edge in self.edges:
                self.ship(edge, ref, FrameBody(MAX_TIME_MS))

    def answers(self) -> Truth:
        """What the final answers of all queries say."""
        given: Truth = Counter()
        for query in self.catalog.queries.all():
            for record in self.store.windows(query.ref, None, None, 10_000)[0]:
                assert record.phase is Phase.FINAL
                if record.synopsis is None:
                    assert record.facts.by_cause(Cause.INPUT_LOST), "an empty window has an answer for a reason"
                    continue
                grouped = GroupedAggregate.from_bytes(record.synopsis)
                urls = grouped.rows()[0].to_pylist()
                for url, size in zip(urls, grouped.query("bytes").value, strict=True):
                    given[query.ref, record.window_start_ms, url] += int(size)
        return given

    def observed(self) -> int:
        """Records that the final answers say they have seen."""
        return sum(
            record.facts.observed
            for query in self.catalog.queries.all()
            for record in self.store.windows(query.ref, None, None, 10_000)[0]
        )

    def lose_results(self) -> None:
        """The result store is as it was before anything came."""
        self.store.close()
        for path in self.path.glob("results.db*"):
            path.unlink()
        self.store = ResultStore(self.results_url)

    def all_consumed(self) -> bool:
        consumed = self.store.consumed()
        return all(consumed.get(key, 0) >= last for key, last in self.catalog.frames.last_positions().items())

    def positions_of(self, ref: QueryRef) -> int:
        return self.catalog.frames.last_positions()[query_key(ref)]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


@pytest.fixture
def shared_world(tmp_path: Path, url: str) -> Iterator[World]:
    """Catalog and results in one database, of either kind."""
    world = World(tmp_path, database=url)
    yield world
    world.close()


@pytest.fixture
def ref(world: World) -> QueryRef:
    """A registered query."""
    return world.register("a")[0]


@pytest.fixture
def metrics() -> JobMetrics:
    return JobMetrics()


@pytest.fixture
def writer(world: World, metrics: JobMetrics) -> Iterator[LedgerWriter]:
    writer = LedgerWriter(Ledger(), JobParts(world.catalog, world.store, metrics, world.clock))
    yield writer
    writer.close()
