"""Batches that queries have not processed yet: no crash, no order of the queries and no pull changes an answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.core import Configured
from edge.durability import journal
from edge.durability.durable_core import PAYLOAD, RANGE
from edge.records import InputGone, Position
from tests.edge.recovery_world import BOTH, BUDGETED, EXACT, QUERIES, SHARE, Center, World, flights, truth
from tests.examples import examples

DATA = flights(160, seed=1, disorder_ms=2000)  # the watermark is 2 s behind: no record is late
Step = tuple[str, int, int]


def act(world: World, step: Step) -> None:
    kind, number, rows = step
    match kind:
        case "queue":
            world.ingest(rows, queued=True)
        case "ingest":
            world.ingest(rows)
        case "run":
            world.run(number, rows)
        case "pull":
            world.pull()
        case "ship":
            world.ship()
        case "checkpoint":
            world.edge.checkpoint()


def check(center: Center) -> None:
    answers = center.answers()
    assert {k: v for k, v in answers.items() if k[0] == "exact"} == truth(DATA, EXACT)
    for key, groups in truth(DATA, BUDGETED).items():
        for group, values in groups.items():
            sent = answers.get(key, {}).get(group, {"miles": 0.0})["miles"]
            assert 0 <= values["miles"] - sent <= SHARE
    # A slice is closed once the query has processed all of its records.
    for ref, spec in QUERIES:
        counts = {s: sum(1 for r in DATA.to_pylist() if spec.window.slice_start(r["event_time_ms"]) == s
                         and (spec is EXACT or r["distance"] > 100))
                  for s in range(0, 70_000, 10_000)}  # fmt: skip
        closed = [c for f in center.frames.values() if f.query == ref for c in f.unpack().closes]
        assert all(c.observed == counts[c.slice_start_ms] for c in closed)


SCRIPT: list[Step] = [
    ("queue", 0, 25), ("pull", 0, 0), ("run", 0, 10), ("ship", 0, 0), ("queue", 0, 17), ("checkpoint", 0, 0),
    ("run", 1, 30), ("ingest", 0, 31), ("pull", 0, 0), ("run", 0, 60), ("ship", 0, 0), ("ingest", 0, 9),
    ("run", BOTH, 40), ("pull", 0, 0), ("run", BOTH, 1000), ("pull", 0, 0), ("ship", 0, 0),
]  # fmt: skip


@pytest.mark.parametrize(
    "steps", [n if n % 2 else pytest.param(n, marks=pytest.mark.full) for n in range(1, len(SCRIPT) + 1)]
)
def test_a_crash_after_any_step_changes_no_answer(tmp_path: Path, steps: int) -> None:
    center = Center()
    world = World(tmp_path, DATA, center)
    world.configure()
    for step in SCRIPT[:steps]:
        act(world, step)
    World(tmp_path, DATA, center).finish()
    check(center)


steps = st.one_of(
    st.tuples(st.sampled_from(["queue", "queue", "ingest"]), st.just(0), st.integers(1, 40)),
    st.tuples(st.just("run"), st.integers(0, BOTH), st.integers(1, 80)),
    st.tuples(st.sampled_from(["pull", "pull", "ship", "checkpoint", "crash"]), st.just(0), st.just(0)),
)


@examples(6)
@given(script=st.lists(steps, max_size=30))
@pytest.mark.slow
def test_no_order_of_the_queries_overtakes_what_one_has_not_processed(
    tmp_path_factory: pytest.TempPathFactory, script: list[Step]
) -> None:
    directory, center = tmp_path_factory.mktemp("edge"), Center()
    world = World(directory, DATA, center)
    world.configure()
    for step in script:
        if step[0] == "crash":
            world = World(directory, DATA, center)
            world.configure()
        else:
            act(world, step)
    world.finish()
    check(center)


def test_a_slice_is_closed_only_behind_the_records_in_the_queue(tmp_path: Path) -> None:
    """The stream's watermark passes all slices; the query that has run has closed them, the other one none."""
    center = Center()
    world = World(tmp_path, DATA, center)
    world.configure()
    while world.row < DATA.num_rows:
        world.ingest(40, queued=True)
    world.run(0, DATA.num_rows)
    for _ in range(100):
        world.pull(100_000)
    world.ship()
    through = {f.query.name: f.unpack().through_ms for f in center.frames.values()}
    assert through["exact"] >= 50_000
    assert "budgeted" not in through
    assert world.edge.core.watermark_ms("flights") < 0
    world.finish()
    check(center)
    assert world.edge.core.queued_bytes == 0


def test_recovery_restores_the_identical_queues(tmp_path: Path) -> None:
    world = World(tmp_path, DATA, Center())
    world.configure()
    for step in SCRIPT[:8]:
        act(world, step)
    world.edge.sync()
    again = World(tmp_path, DATA, Center())
    assert again.edge.core.to_state() == world.edge.core.to_state()
    queues = {ref: pipeline.queue for ref, pipeline in world.edge.core.queries.items()}
    assert any(queues.values())
    assert {ref: p.queue for ref, p in again.edge.core.queries.items()} == queues


def test_a_deleted_query_takes_its_queue_with_it(tmp_path: Path) -> None:
    world = World(tmp_path, DATA, Center())
    world.configure()
    world.ingest(100, queued=True)
    world.edge.handle(Configured(QUERIES[:1]))
    world.edge.sync()
    again = World(tmp_path, DATA, Center())
    assert list(again.edge.core.queries) == [QUERIES[0][0]]
    again.run(0, 1000)
    assert again.edge.core.queued_bytes == 0


def test_a_queued_batch_that_cannot_be_read_again_is_stated_as_lost(tmp_path: Path) -> None:
    """The records keep their numbers, so that the queries run as far as they had."""
    world = World(tmp_path, DATA, Center())
    world.configure()
    world.ingest(50, queued=True)
    world.ingest(50, queued=True)
    world.run(0, 70)
    world.edge.sync()

    class Gone(World):
        def _reread(self, source: str, start: Position | None, end: Position) -> object:  # type: ignore[override]
            if start == {"row": 0}:
                raise InputGone("the file is gone")
            return super()._reread(source, start, end)

    again = Gone(tmp_path, DATA, Center())
    queues = [again.edge.core.queries[ref].queue for ref, _ in QUERIES]
    assert [(q.first.first, q.records) for q in queues] == [(50, 30), (50, 50)]
    assert again.edge.losses["flights/file-gone"] == 1


def test_an_edge_that_keeps_up_writes_the_journal_that_it_always_wrote(tmp_path: Path) -> None:
    world = World(tmp_path, DATA, Center())
    world.configure()
    world.ingest(50)
    world.edge.sync()
    (path,) = tmp_path.glob("journal-*.log")
    records = [r for r in journal.scan(path.read_bytes()).records if r.kind in (RANGE, PAYLOAD)]
    assert records
    assert all(b"queued" not in record.payload for record in records)
    assert b"queues" not in world.edge.core.to_state()


@pytest.mark.slow
def test_batches_that_are_processed_as_one_give_what_each_would_have_given(tmp_path: Path) -> None:
    """These data have records that are late and too late; the counts of both must not depend on the queue."""
    late = flights(300, seed=3, disorder_ms=9000)

    def run(name: str, *, queued: bool) -> tuple[dict[tuple[str, int], object], dict[str, int], list[object]]:
        center = Center()
        world = World(tmp_path / name, late, center)
        world.configure()
        while world.row < late.num_rows:
            world.ingest(7, queued=queued)
        world.finish()
        closes = [(f.query, c.slice_start_ms, c.observed, c.late) for f in center.frames.values()
                  for c in f.unpack().closes]  # fmt: skip
        return dict(center.answers("exact")), world.edge.drops, sorted(closes, key=str)

    now, later = run("now", queued=False), run("later", queued=True)
    assert now == later
    assert now[1]["too-late"] > 0
    assert any(late for *_, late in now[2])
