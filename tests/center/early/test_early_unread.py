"""An edge that cannot keep up with its input: no early answer ignores unread records, and none are lost."""

from __future__ import annotations

import pytest

from center.early import GroupPrediction
from center.early.window_prediction import combine_groups
from center.ledger import Emission
from edgewater.answers import Phase
from tests.center.accuracy_world import BEGIN_MS, STEP_MS, Site, World, exponential, first_answers, spec
from tests.center.statement_world import violations

pytestmark = pytest.mark.slow

SLOW_MS = (5_000, 9_000)
SECONDS = 16
ERROR = 0.05


def world_of(**parts: object) -> World:
    """600 records/s arrive at each of three edges; the first reads 300 for four seconds, and then catches up."""
    slow = (BEGIN_MS + SLOW_MS[0], BEGIN_MS + SLOW_MS[1])
    sites = [Site.make(f"e{i}", i, SECONDS + 4, exponential(60.0)) for i in range(3)]
    sites[0].slow, sites[0].reads = slow, 300 * STEP_MS // 1000
    accuracy = {"error": "5%", "measure": "total", "substream": "500ms"}
    world = World(spec(accuracy=accuracy, lateness="3s", **parts), sites)
    world.run(SECONDS)
    return world


def is_off(world: World, answer: Emission) -> bool:
    assert answer.prediction is not None
    truth = world.truth(answer.window_start_ms)
    return abs(answer.prediction.estimate - truth) > ERROR * truth


def early(world: World) -> list[Emission]:
    return [e for e in first_answers(world.answers, skip=1) if e.phase is Phase.EARLY]


@pytest.fixture(scope="module")
def world() -> World:
    return world_of()


@pytest.mark.nightly
def test_early_answers_that_meet_the_accuracy_have_no_unread_input(world: World) -> None:
    eligible = [e for e in early(world) if not e.codes()]
    assert len(eligible) >= 3
    assert sum(is_off(world, e) for e in eligible) <= 1, "one in twenty may be"


def test_every_window_is_answered_and_none_while_there_is_unread_input(world: World) -> None:
    for second in range(3, 12):
        given = [e for e in world.answers if e.window_start_ms == BEGIN_MS + second * 1_000]
        assert given, second
        assert given[-1].facts.observed > 0
        first_ms = given[0].answered_at_ms - BEGIN_MS
        assert not SLOW_MS[0] + 500 < first_ms < SLOW_MS[1], "it waits until the edge has caught up"


def test_an_answer_has_no_bounds_while_an_edge_has_unread_input() -> None:
    group = GroupPrediction("", True, True, 10.0, 9.0, 11.0, 0.1, 1.0, 0.0, 9.0, 10.0, 9.0, "")
    answers = [combine_groups([group], False, [], (), 0, unread) for unread in ([], ["e0"])]
    assert [(each.bounded, each.met) for each in answers] == [(True, True), (False, False)]


def test_at_the_deadline_the_answer_names_the_edge_with_unread_input() -> None:
    world = world_of(budget={"staleness": "1s"})
    given = [e for e in early(world) if SLOW_MS[0] + 500 < e.answered_at_ms - BEGIN_MS < SLOW_MS[1]]
    assert given
    for answer in given:
        assert answer.answered_at_ms <= answer.window_end_ms + 1_000
        (violation,) = violations(answer)
        assert "e0 cannot keep up and may have unread input" in violation.message
