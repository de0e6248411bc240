"""A short soak at a fixed seed, and what its plan promises. `make soak` runs as long as wanted."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.demo.run import Demo
from tests.e2e.soak.plan import FAULTS, PROFILES, draw_episode
from tests.e2e.soak.run import Soak

KINDS = ("rename", "kill-edge", "duplicate", "late", "ahead")
SEED = 278


def test_equal_seeds_draw_equal_episodes_and_every_kind_of_fault_comes_in_turn() -> None:
    episodes = [draw_episode(7, number) for number in range(len(FAULTS))]
    assert episodes == [draw_episode(7, number) for number in range(len(FAULTS))]
    assert episodes != [draw_episode(8, number) for number in range(len(FAULTS))]
    assert {kind for episode in episodes for kind in episode.kinds} == set(FAULTS)
    for episode in episodes:
        happening = {fault.kind for fault in episode.faults} | (set(PROFILES) & set(episode.kinds))
        assert happening | {"join", "bad"} >= set(episode.kinds)


@pytest.mark.e2e
@pytest.mark.full  # `make soak` is the longer one
def test_a_short_soak_finds_no_false_statement(system: Demo, tmp_path: Path) -> None:
    said: list[str] = []
    report = Soak(tmp_path, SEED, KINDS, at_once=len(KINDS), say=said.append, demo=system).run(seconds=1, most=1)
    assert report.exit_status == 0, "\n".join([*said, *report.failed])
    (result,) = report.results
    assert set(result.episode.kinds) >= {"rename", "kill-edge", "duplicate"}
    assert result.findings.answers > 20
    assert result.findings.cells > 1000
