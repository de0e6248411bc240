"""A query with `since` has the totals of a query that was registered before all records, whatever happens meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from edge.core.backfill import Backfill, TimeCounts
from edge.core.core import EdgeCore
from edge.core.events import (
    Acked,
    BackfillEnded,
    BackfillIngested,
    Configured,
    Ingested,
    PullEvent,
    SourceEnded,
    SourcesOpened,
)
from edge.core.streams import StreamSpec
from edge.durability import DurableCore
from edge.records import Position
from edgewater.base.streams import TIME_COLUMN
from edgewater.model.query import QuerySpec
from edgewater.wire import Frame, InputLoss, QueryRef
from tests.edge.recovery_world import COLUMNS, EXACT, Center, eager, flights, truth

EARLY = QueryRef("exact", 1)
SESSIONS = QuerySpec.from_mapping({**EXACT.to_mapping(), "name": "sessions", "window": {"session": "700ms"}})
EARLY_SESSIONS = QueryRef("sessions", 1)
SINCE_MS = 10_000
ROWS = 200


def since_query(since: str, name: str = "since", **changes: object) -> tuple[QueryRef, QuerySpec]:
    spec = QuerySpec.from_mapping({**EXACT.to_mapping(), "name": name, "since": since, **changes})
    return QueryRef(name, 1), spec


class World:
    """An edge with two replayable sources, which can be read again from their row `first_row` on."""

    def __init__(
        self, directory: Path, seed: int, queries: list[tuple[QueryRef, QuerySpec]], first_row: int = 0
    ) -> None:
        self.directory, self.center, self.first_row = directory, Center(), first_row
        self.data = {name: flights(ROWS, 2 * seed + n, disorder_ms=1) for n, name in enumerate(("a", "b"))}
        self.queries = ((EARLY, eager(EXACT)), (EARLY_SESSIONS, eager(SESSIONS)), *queries)
        self.open()
        self.edge.handle(SourcesOpened((("flights", "a"), ("flights", "b")), ("a", "b")))
        self.edge.handle(Configured(self.queries[:2]))
        self.edge.sync()

    def open(self) -> None:
        """Recovers from what is on disk."""
        self.edge = DurableCore(
            self.directory, lambda: EdgeCore({"flights": StreamSpec(COLUMNS)}), self._reread, "first"
        )

    def _reread(self, source: str, start: Position | None, end: Position) -> pa.RecordBatch:
        at = start["row"] if start else 0
        return self.data[source].slice(at, end["row"] - at)

    def row(self, source: str) -> int:
        return int(self.edge.state.positions.get(source, {"row": 0})["row"])

    def ingest(self, source: str, rows: int) -> None:
        at = self.row(source)
        end = min(at + rows, ROWS)
        if end > at:
            event = Ingested("flights", source, self.data[source].slice(at, end - at), (1 << 40) + end)
            self.edge.ingest_range(event, {"row": at}, {"row": end})

    def configure(self) -> None:
        if len(self.edge.core.queries) < len(self.queries):
            self.edge.handle(Configured(self.queries))

    def backfill(self, query: QueryRef, source: str, rows: int) -> None:
        """Reads some rows of a backfill, or ends it."""
        limits = self.edge.state.backfills.get(query, {}).get(source)
        if limits is None:
            return
        assert limits.until is not None
        at = max(limits.position["row"] if limits.position else 0, self.first_row)
        end = min(at + rows, limits.until["row"])
        if end <= at:
            self.edge.handle(BackfillEnded(query, source))
            return
        event = BackfillIngested(query, source, self.data[source].slice(at, end - at), 1 << 40)
        self.edge.ingest_backfill(event, {"row": at}, {"row": end})

    def pull(self) -> None:
        self.edge.handle(PullEvent(400, {"flights": self.edge.core.streams["flights"].newest_ms}))

    def ship(self) -> None:
        self.edge.sync()
        for frame in list(self.edge.core.unacked):
            self.center.receive(frame)
        if self.center.frames:
            self.edge.handle(Acked(max(self.center.frames)))

    def crash(self) -> None:
        self.edge.close()
        self.open()

    def step(self, rng: np.random.Generator) -> None:
        source, rows = str(rng.choice(["a", "b"])), int(rng.integers(1, 60))
        query = self.queries[rng.integers(len(self.queries))][0]
        actions: list[Callable[[], None]] = [
            lambda: self.ingest(source, rows),
            lambda: self.backfill(query, source, rows),
            self.pull,
            self.ship,
            self.edge.sync,
            self.edge.checkpoint,
            self.crash,
        ]
        actions[rng.choice(len(actions), p=np.array([4, 6, 3, 2, 1, 1, 1]) / 18)]()

    def finish(self) -> None:
        self.configure()
        for query, _ in self.queries:
            for source in "ab":
                while source in self.edge.state.backfills.get(query, {}):
                    self.backfill(query, source, 50)
                    self.pull()
                    self.ship()
        for source in "ab":
            self.ingest(source, ROWS)
            self.edge.handle(SourceEnded("flights", source))
        while True:
            sent = len(self.center.frames)
            for _ in range(20):
                self.pull()
            self.ship()
            if len(self.center.frames) == sent:
                return

    def frames(self, query: QueryRef) -> list[Frame]:
        return [frame for _, frame in sorted(self.center.frames.items()) if frame.query == query]

    def losses(self, query: QueryRef) -> list[InputLoss]:
        return [loss for frame in self.frames(query) for loss in frame.unpack().losses]

    def answers(self, query: QueryRef) -> dict[int, object]:
        return {start: groups for (_, start), groups in self.center.answers(query.name).items()}

    def truth(self, since_ms: int = 0) -> dict[int, object]:
        records = pa.Table.from_batches(self.data.values()).combine_chunks().to_batches()[0]
        return {start: groups for (_, start), groups in truth(records, EXACT).items() if start >= since_ms}


def run(directory: Path, seed: int, queries: list[tuple[QueryRef, QuerySpec]], first_row: int = 0) -> World:
    rng = np.random.default_rng(seed)
    world = World(directory, seed, queries, first_row)
    for _ in range(rng.integers(20)):
        world.step(rng)
    world.configure()
    for _ in range(rng.integers(40)):
        world.step(rng)
        world.configure()  # the center sends its queries again if a crash has lost them
    world.finish()
    return world


def seeds(quick: int, usual: int, full: int) -> list[Any]:
    """Seeds of which `make quick` runs the first `quick`, `make test` the first `usual`, and `make test-all` all."""
    marks = [pytest.mark.slow] * (usual - quick) + [pytest.mark.full] * (full - usual)
    return [*range(quick), *(pytest.param(s, marks=mark) for s, mark in enumerate(marks, quick))]


@pytest.mark.nightly
@pytest.mark.parametrize("seed", seeds(3, 3, 120))
def test_any_interleaving_with_crashes_gives_the_totals_of_a_query_that_was_there_before(
    tmp_path: Path, seed: int
) -> None:
    everything, later = since_query("beginning"), since_query("1970-01-01T00:00:10Z", "later")
    sessions = since_query("beginning", "later_sessions", window={"session": "700ms"})
    world = run(tmp_path, seed, [everything, later, sessions])
    assert world.answers(sessions[0]) == world.answers(EARLY_SESSIONS) != {}
    assert world.answers(EARLY) == world.truth()
    assert world.answers(everything[0]) == world.truth()
    assert world.answers(later[0]) == world.truth(SINCE_MS)
    for query, since_ms in ((everything[0], None), (later[0], SINCE_MS)):
        assert not world.losses(query)
        through = -(1 << 62)
        for frame in world.frames(query):
            body = frame.unpack()
            assert body.since_ms == since_ms
            # The records are in order, so no record may come for a slice that was stated to be closed.
            assert all(p.slice_start_ms + 10_000 > through for p in body.partials)
            assert body.through_ms >= through
            through = body.through_ms


@pytest.mark.nightly
@pytest.mark.parametrize("seed", seeds(3, 3, 40))
def test_what_can_no_longer_be_read_is_stated_and_nothing_else_is_doubted(tmp_path: Path, seed: int) -> None:
    query = since_query("beginning")
    world = run(tmp_path, seed, [query], first_row=90)
    answers, expected, losses = world.answers(query[0]), world.truth(), world.losses(query[0])
    lacking = {start for start in expected if answers.get(start) != expected[start]}
    stated = {start for start in expected if any(loss.overlaps(start, start + 10_000) for loss in losses)}
    assert lacking <= stated
    for loss in losses:
        assert loss.reason == "before-query"
        assert loss.from_ms is not None and loss.to_ms is not None
        gone = world.data[loss.source].column(TIME_COLUMN).to_numpy()[: world.first_row]
        assert loss.to_ms - 1_000 <= gone.max(), "a loss reaches at most to the second of the last lost record"


def test_a_backfill_goes_on_at_its_position_after_a_crash_and_after_a_checkpoint(tmp_path: Path) -> None:
    world = World(tmp_path, 1, [query := since_query("beginning")])
    world.ingest("a", 120)
    world.configure()
    for durable in ("sync", "checkpoint"):
        world.backfill(query[0], "a", 20)
        getattr(world.edge, durable)()
        world.crash()
    world.finish()
    assert world.answers(query[0]) == world.answers(EARLY) == world.truth()
    assert not world.losses(query[0])


def test_a_backfill_from_a_time_within_a_bucket_of_counts_has_no_records_left_at_its_end() -> None:
    counts, times_ms = TimeCounts(), np.array([1_200, 1_700, 2_500])
    counts.add(times_ms)
    backfill = Backfill(1_500, {"a": counts.since(1_500)})
    backfill.read("a", times_ms)
    assert backfill.unread_records == 0 and backfill.end("a") == []


@pytest.mark.slow
def test_records_of_a_source_that_cannot_be_read_again_are_stated(tmp_path: Path) -> None:
    world = World(tmp_path, 1, [query := since_query("beginning")])
    world.edge.handle(SourcesOpened((("flights", "a"), ("flights", "b")), ("a",)))
    world.ingest("a", 50)
    world.ingest("b", 50)
    world.configure()
    assert set(world.edge.state.backfills[query[0]]) == {"a"}
    world.finish()
    losses = world.losses(query[0])
    assert {loss.source for loss in losses} == {"b"}
    assert sum(loss.records or 0 for loss in losses) == 50


def test_a_backfill_ends_with_a_source_that_is_no_longer_configured(tmp_path: Path) -> None:
    world = World(tmp_path, 1, [query := since_query("beginning")])
    world.ingest("a", 50)
    world.ingest("b", 50)
    world.configure()
    world.backfill(query[0], "a", 20)
    world.edge.handle(SourcesOpened((("flights", "b"),), ("b",)))
    assert set(world.edge.state.backfills[query[0]]) == {"b"}
    world.backfill(query[0], "b", 50)
    world.backfill(query[0], "b", 50)
    assert not world.edge.state.backfills
    pipeline = world.edge.core.queries[query[0]]
    assert sum(loss.records or 0 for loss in pipeline.store.losses.unsent if loss.source == "a") == 30
