"""Queries that lack memory, and a crash at any step: what is not stated as lost is counted exactly once."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge.core.memory import SliceMemoryLimits
from edge.durability import edge_state
from edgewater.wire import InputLoss
from tests.edge.durability.test_recovery import script
from tests.edge.hard_state import hard_state
from tests.edge.recovery_world import BUDGETED, EXACT, QUERIES, SHARE, Center, World, flights, truth

DATA = flights(300, seed=1)
LIMITS = {
    "one-query": SliceMemoryLimits(query_bytes=6_080, all_bytes=100_000),
    "all-queries": SliceMemoryLimits(query_bytes=10_500, all_bytes=10_500),
}


def losses(center: Center, query: str) -> list[InputLoss]:
    frames = [frame for _, frame in sorted(center.frames.items()) if frame.query.name == query]
    return [loss for frame in frames for loss in frame.unpack().losses]


def check(center: Center) -> int:
    """Returns the number of slices that lack records."""
    answers, lacking = center.answers(), 0
    for spec in (EXACT, BUDGETED):
        stated = losses(center, spec.name)
        assert {loss.reason for loss in stated} <= {"query-memory"}
        for (query, start), groups in truth(DATA, spec).items():
            answer = answers.get((query, start), {})
            if any(loss.overlaps(start, start + spec.window.slice_ms) for loss in stated):
                lacking += 1
                for group, values in answer.items():
                    assert values["miles"] <= groups[group]["miles"]
            elif spec is EXACT:
                assert answer == groups
            else:
                for group, values in groups.items():
                    assert 0 <= values["miles"] - answer.get(group, {"miles": 0.0})["miles"] <= SHARE
    return lacking


@pytest.mark.parametrize("steps", [11, *(pytest.param(n, marks=pytest.mark.slow) for n in range(0, 40, 7))])
@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_a_crash_after_any_step_loses_nothing_that_is_not_stated(
    tmp_path: Path, limits: SliceMemoryLimits, steps: int
) -> None:
    center = Center()
    script(World(tmp_path, DATA, center, memory=limits), steps)
    World(tmp_path, DATA, center, memory=limits).finish()
    assert 0 < check(center) < 14


def test_a_recovery_gives_the_identical_state_under_other_limits_too(tmp_path: Path) -> None:
    world = World(tmp_path, DATA, Center(), memory=LIMITS["one-query"])
    script(world, 29)
    world.edge.sync()
    assert world.edge.state.losses == {"flights/query-memory": world.edge.state.losses["flights/query-memory"]}
    assert world.edge.core.queries[QUERIES[0][0]].store.full.floor_ms > 0, "late records of finished slices are refused"
    again = World(tmp_path, DATA, Center())
    assert hard_state(again.edge.core) == hard_state(world.edge.core)
    assert again.edge.state.losses == world.edge.state.losses and again.edge.state.drops == world.edge.state.drops


def test_limits_that_were_lowered_hold_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the memory limit no source is read, so that nothing else would make the decision."""
    world = World(tmp_path, DATA, Center())
    script(world, 5)
    world.edge.sync()
    monkeypatch.setattr(edge_state.log, "error", lambda *_: None)
    again = World(tmp_path, DATA, Center(), memory=SliceMemoryLimits(100, 200))
    assert sum(held.nbytes for held in again.edge.core.held_memory().values()) <= 200
