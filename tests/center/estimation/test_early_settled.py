"""Sampled windows of which not all went as usual: what is missing is never taken for what there is."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from center.estimation.prediction import Prediction
from center.ledger import EdgesChanged, Emission, Phase
from center.ledger.early_answers import AccuracyLedger
from edge.arrivals.group_monitor import GroupMonitor
from edge.core.events import SamplingSet, SourceEnded
from edgewater.wire.frames import SamplingReason
from tests.center.accuracy_world import BEGIN_MS, REF, STEP_MS, Site, World, exponential, record_of, spec

RATE = 0.3
SAMPLED_FROM_MS = 4_000


def world_of(edges: int, seconds: float, *, rate: float = 300.0, lateness: str = "1s", grouped: bool = False) -> World:
    accuracy = {"error": "20%", "measure": "total", "substream": "500ms"}
    parts = {"group_by": ["k"], "accuracy": {**accuracy, "scope": "each"}} if grouped else {"accuracy": accuracy}
    sites = [Site.make(f"e{i}", i, seconds, exponential(30.0), rate=rate, shares=(2, 1)) for i in range(edges)]
    return World(spec(lateness=lateness, **parts), sites)


def sample(world: World, *names: str) -> None:
    for site in world.sites:
        if site.name in names:
            site.core.handle(SamplingSet(REF, RATE, 0.0, SamplingReason.LINK))


def predicted(answer: Emission) -> Prediction | None:
    assert answer.quality.accuracy is not None
    return answer.quality.accuracy.prediction


def finals(world: World, from_ms: int, to_ms: int) -> list[Emission]:
    starts = range(BEGIN_MS + from_ms, BEGIN_MS + to_ms)
    return [e for e in world.given if e.phase is Phase.FINAL and e.window_start_ms in starts]


def are_scaled_up(world: World, answers: list[Emission]) -> None:
    """What was processed is a third of what there is; four standard errors of the sum of 60 values are 60 %."""
    for answer in answers:
        said = predicted(answer)
        assert said is not None and said.sampled < 0.5 * said.arrived, "it is said that it is a sample's"
        if said.groups is None:
            truth = world.truth(answer.window_start_ms)
            assert abs(said.estimate - truth) < 0.6 * truth


def test_an_edge_that_has_not_read_all_and_then_falls_silent_makes_no_answer_a_promise() -> None:
    world = World(spec(lateness="8s"), [Site.make(f"e{i}", i, 14, exponential(60.0)) for i in range(3)])
    first = world.sites[0]
    first.slow, first.reads = (BEGIN_MS + 5_000, BEGIN_MS + 9_000), 4
    first.cut = (BEGIN_MS + 7_000, BEGIN_MS + 20_000)
    world.run(12)
    late = [e for e in world.given if BEGIN_MS + 5_000 <= e.window_start_ms <= BEGIN_MS + 9_000]
    assert {e.window_start_ms for e in late} == {BEGIN_MS + s * 1_000 for s in range(5, 10)}, "all are answered"
    assert not [e for e in late if not e.quality.violations]


def test_sources_that_end_in_a_windows_midst_leave_its_sample_a_sample() -> None:
    world = world_of(2, 7.3, rate=600)
    world.run(4)
    sample(world, "e0", "e1")
    world.run(3.4)
    for site in world.sites:
        site.core.handle(SourceEnded("s", "f"))
    world.run(2)
    last = finals(world, 7_000, 8_000)
    assert len(last) == 1
    are_scaled_up(world, last)


def after_an_outage(*, grouped: bool, restarts: bool = False) -> World:
    """Of one edge, of 50 s: the center begins anew with arrivals when it is over."""
    world = world_of(1, 62, rate=200, grouped=grouped)
    world.run(4)
    sample(world, "e0")
    world.sites[0].cut = (BEGIN_MS + 6_000, BEGIN_MS + 56_000)
    for _ in range(14):
        world.run(4)
        if restarts:
            world.restart()
    return world


def test_what_was_sampled_during_a_long_outage_is_no_sum_of_all() -> None:
    world = after_an_outage(grouped=False)
    book = world.book()
    assert book._base * book.schedule.grid.slot_ms > BEGIN_MS + 50_000, "arrivals were begun with anew"
    answers = finals(world, SAMPLED_FROM_MS + 500, 55_000)
    assert len(answers) == 50
    are_scaled_up(world, answers)


def test_nor_are_those_of_groups() -> None:
    answers = finals(world := after_an_outage(grouped=True), SAMPLED_FROM_MS + 500, 55_000)
    assert len(answers) == 50
    are_scaled_up(world, answers)


@pytest.mark.slow
def test_a_restart_of_the_job_changes_nothing_of_that() -> None:
    plain, cut = after_an_outage(grouped=False), after_an_outage(grouped=False, restarts=True)
    assert [e.quality for e in cut.given] == [e.quality for e in plain.given]


def test_the_sample_of_an_edge_that_is_retired_is_not_taken_for_all_of_its_records() -> None:
    world = world_of(2, 14, lateness="3s")
    world.run(4)
    sample(world, "e0")
    world.run(5)
    retire(world, "e0")
    before = len(world.given)
    world.run(5)
    later = world.given[before:]
    touched = [e for e in later if BEGIN_MS + SAMPLED_FROM_MS <= e.window_start_ms < BEGIN_MS + 9_000]
    assert {e.phase for e in touched} >= {Phase.COMPLETE, Phase.FINAL}
    assert not [e for e in touched if not e.quality.violations]
    assert [e for e in later if e.window_start_ms >= BEGIN_MS + 9_500 and not e.quality.violations], "and it is over"


def test_nor_is_it_when_all_are_retired_and_another_comes() -> None:
    world = world_of(2, 14, lateness="3s")
    world.sites[1].cut = (BEGIN_MS, BEGIN_MS + 9_200)
    retire(world, "e1")
    world.run(4)
    sample(world, "e0")
    world.run(5)
    retire(world, "e0", "e1")
    world.run(0.1)
    retire(world, "e0")
    world.run(5)
    answers = finals(world, SAMPLED_FROM_MS, 9_000)
    assert answers and not [e for e in answers if not e.quality.violations]


def retire(world: World, *names: str) -> None:
    """And nothing of theirs comes any more."""
    records = tuple(replace(record_of(s.name), retired=s.name in names) for s in world.sites)
    world.ledger.handle(EdgesChanged(records))
    for site in world.sites:
        if site.name in names and not site.cut[1]:
            site.cut = (world.now_ms + STEP_MS, world.now_ms + 1_000_000)


def test_a_snapshot_of_a_release_that_counted_anew_is_read() -> None:
    world = world_of(1, 6)
    world.run(5)
    ledger = world.ledger._queries[REF]
    assert isinstance(ledger, AccuracyLedger)
    state = {name: value for name, value in ledger.book.to_state().items() if name not in ("counted", "lost")}
    older = type(ledger.book)(ledger.book.accuracy, ledger.book.schedule, None)
    older.restore(state)
    assert older.to_state() == {**ledger.book.to_state(), "counted": older._base}


def test_a_new_group_of_which_the_center_has_only_been_told_is_a_sample_too() -> None:
    world = world_of(2, 9, grouped=True)
    world.run(8.1)
    book = world.book()
    start_ms = BEGIN_MS + 7_000
    grid, origin_ms = book.schedule.grid, book.schedule.origin_ms
    monitor = GroupMonitor(grid, [pa.string()], 8)
    born = np.arange(start_ms, start_ms + 500, 5, dtype=np.int64) - origin_ms
    kept = np.arange(0, len(born), 4)
    monitor.observe(born, start_ms + 1_600 - origin_ms, [pa.array(["new"] * len(born))], np.ones(len(kept)), kept)
    ahead = [s.to_state() for s in monitor.take()]
    book.report("e0", book.schedule.starts_at(book.slot + 500), ahead, SamplingReason.LINK)
    before = json.dumps(book.to_state())
    said, because = book.settled(start_ms)
    assert said is not None and list(because) == ["e0"]
    (new,) = [g for g in said.groups or () if g.key == '["new"]']
    assert (new.arrived, new.sampled) == (100, 25) and new.estimate == pytest.approx(100)
    assert json.dumps(book.to_state()) == before, "it was a look"


def test_what_was_unread_at_the_deadline_does_not_make_intervals_wider_for_hours() -> None:
    world = World(spec(budget={"staleness": "1s"}), [Site.make(f"e{i}", i, 14, exponential(60.0)) for i in range(3)])
    world.sites[0].slow, world.sites[0].reads = (BEGIN_MS + 5_000, BEGIN_MS + 9_000), 3
    world.run(14)
    off = []
    for answer in (e for e in world.given if e.revision == 1 and e.phase is Phase.EARLY):
        if (said := predicted(answer)) is not None and not said.bounded:
            assert answer.quality.violations
            off.append(abs(said.estimate - world.truth(answer.window_start_ms)) / said.half_width)
    assert max(off) > 20, "such answers are far off"
    ratios = [ratio for each in world.book().to_state()["intervals"] for ratio in each]
    assert len(ratios) >= 4 and max(ratios) < 5
