"""What one query or edge costs does not keep the others' answers waiting. Work is counted, not timed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from center.job.admission import BatchLimits
from center.ledger import answer_work
from edgewater.guard.frame_work import BYTES_PER_UNIT
from edgewater.wire import FrameBody, Partial, SliceClose
from tests.center.job.conftest import WINDOW_MS, World, synopsis
from tests.center.job.plans import Plans

PORTION = 20
SLICES = 5 * PORTION // 2


@pytest.fixture
def job(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plans]:
    monkeypatch.setattr(answer_work, "MAX_WORK", PORTION)
    job = Plans(world)
    yield job
    job.close()


@pytest.mark.slow
def test_a_frame_that_closes_very_many_windows_delays_no_other_query(world: World, job: Plans) -> None:
    greedy, honest = world.register("a", "b")
    for edge in world.edges:
        closes = tuple(SliceClose(n * WINDOW_MS, 1, 0) for n in range(SLICES))
        partials = tuple(Partial(n * WINDOW_MS, synopsis(["/a"], [1])) for n in range(SLICES))
        world.ship(edge, greedy, FrameBody(SLICES * WINDOW_MS, partials, closes))
    world.ship_window(honest, 0)
    job.run_one()
    assert world.store.latest(honest) is not None, "in the first transaction"
    assert len(answered(world, greedy)) == PORTION
    world.ship_window(honest, 1)
    job.writer.advance()
    job.run_one()
    assert len(answered(world, honest)) == 2, "between two portions"
    assert len(answered(world, greedy)) < SLICES
    job.run()
    assert answered(world, greedy) == [n * WINDOW_MS for n in range(SLICES)]
    assert all(size == 3 for (ref, _, url), size in world.answers().items() if (ref, url) == (greedy, "/a"))


@pytest.mark.slow
def test_several_queries_that_close_very_many_windows_share_what_others_wait_for(world: World, job: Plans) -> None:
    """One edge may serve many queries."""
    *greedy, honest = world.register("a", "b", "c", "d", "e", "f")
    for ref in greedy:
        for edge in world.edges:
            closes = tuple(SliceClose(n * WINDOW_MS, 1, 0) for n in range(PORTION))
            world.ship(edge, ref, FrameBody(PORTION * WINDOW_MS, (), closes))
    world.ship_window(honest, 0)
    job.run_one()
    assert len(answered(world, honest)) == 1
    assert sum(len(answered(world, ref)) for ref in greedy) == 2 * PORTION + 3
    job.run()
    assert all(len(answered(world, ref)) == PORTION for ref in greedy)


@pytest.mark.slow
def test_a_backlog_of_frames_of_many_slices_is_read_in_portions(world: World) -> None:
    greedy, honest = world.register("a", "b")
    evil, *_ = world.edges
    for frame in range(6):
        slices = range(frame * 10, frame * 10 + 10)
        partials = tuple(Partial(n * WINDOW_MS, synopsis(["/a"], [1])) for n in slices)
        world.ship(evil, greedy, FrameBody(0, partials))
    world.ship_windows([honest], 3)
    job = Plans(world, limits=BatchLimits(bytes_per_query=25 * 8 * BYTES_PER_UNIT))
    job.run_one()
    consumed = world.store.consumed()
    assert consumed["a@1"] == 2, "a batch reads at most 25 slices of a query, and not less than a frame"
    assert consumed["b@1"] == world.positions_of(honest)
    job.run()
    assert world.all_consumed()
    job.close()


def answered(world: World, ref: object) -> list[int]:
    return [r.window_start_ms for r in world.store.windows(ref, None, None, 10_000)[0]]  # type: ignore[arg-type]
