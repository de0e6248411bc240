"""Sampled windows under outages and retired edges: a sample is never taken for all records."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from center.ledger import EdgesChanged, Emission
from edge.arrivals import SubstreamMonitor
from edge.core.events import SamplingSet, SourceEnded
from edgewater.answers import Phase
from edgewater.wire import SamplingReason
from tests.center.accuracy_world import BEGIN_MS, REF, STEP_MS, Site, World, exponential, record_of, spec
from tests.center.statement_world import quality_of

pytestmark = pytest.mark.slow

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


def finals(world: World, from_ms: int, to_ms: int) -> list[Emission]:
    starts = range(BEGIN_MS + from_ms, BEGIN_MS + to_ms)
    return [e for e in world.answers if e.phase is Phase.FINAL and e.window_start_ms in starts]


def are_scaled_up(world: World, answers: list[Emission]) -> None:
    """A third of the records were processed; four standard errors of the sum of 60 values are 60 %."""
    for answer in answers:
        prediction = answer.prediction
        assert prediction is not None and prediction.sampled < 0.5 * prediction.arrived, (
            "the answer states that it is from a sample"
        )
        if prediction.groups is None:
            truth = world.truth(answer.window_start_ms)
            assert abs(prediction.estimate - truth) < 0.6 * truth


@pytest.mark.nightly
def test_with_an_edge_that_falls_silent_with_unread_input_no_answer_meets_the_accuracy() -> None:
    sites = [Site.make(f"e{i}", i, 14, exponential(60.0)) for i in range(3)]
    world = World(spec(lateness="8s"), sites, step_ms=40)
    first = world.sites[0]
    first.slow, first.reads = (BEGIN_MS + 5_000, BEGIN_MS + 9_000), 4
    first.cut = (BEGIN_MS + 7_000, BEGIN_MS + 20_000)
    world.run(12)
    late = [e for e in world.answers if BEGIN_MS + 5_000 <= e.window_start_ms <= BEGIN_MS + 9_000]
    assert {e.window_start_ms for e in late} == {BEGIN_MS + s * 1_000 for s in range(5, 10)}, "all are answered"
    assert not [e for e in late if not e.codes()]


def test_a_window_in_which_sources_end_is_scaled_up() -> None:
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


@pytest.mark.nightly
def test_windows_sampled_during_a_long_outage_are_scaled_up() -> None:
    """An outage of one edge of 50 s, after which the estimator starts anew."""
    world = world_of(1, 62, rate=200)
    world.run(4)
    sample(world, "e0")
    world.sites[0].cut = (BEGIN_MS + 6_000, BEGIN_MS + 56_000)
    world.run(56)
    estimator = world.estimator()
    assert estimator.observed.known_from * estimator.schedule.grid.slot_ms > BEGIN_MS + 50_000, (
        "the estimator started anew"
    )
    answers = finals(world, SAMPLED_FROM_MS + 500, 55_000)
    assert len(answers) == 50
    are_scaled_up(world, answers)


def test_the_sample_of_a_retired_edge_is_not_taken_for_all_of_its_records() -> None:
    world = world_of(2, 14, lateness="3s")
    world.run(4)
    sample(world, "e0")
    world.run(5)
    retire(world, "e0")
    before = len(world.answers)
    world.run(5)
    later = world.answers[before:]
    touched = [e for e in later if BEGIN_MS + SAMPLED_FROM_MS <= e.window_start_ms < BEGIN_MS + 9_000]
    assert {e.phase for e in touched} >= {Phase.COMPLETE, Phase.FINAL}
    assert not [e for e in touched if not e.codes()]
    for answer in touched:
        (interval,) = quality_of(answer)["prediction"].values()
        assert interval["lower"] is interval["upper"] is interval["confidence"] is None
    assert [e for e in later if e.window_start_ms >= BEGIN_MS + 9_500 and not e.codes()], (
        "later windows meet the accuracy"
    )


@pytest.mark.nightly
def test_nor_is_it_when_all_edges_are_retired_and_another_joins() -> None:
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
    assert answers and not [e for e in answers if not e.codes()]


def retire(world: World, *names: str) -> None:
    """Retires edges; none of their later records arrive."""
    records = tuple(replace(record_of(s.name), retired=s.name in names) for s in world.sites)
    world.ledger.handle(EdgesChanged(records))
    for site in world.sites:
        if site.name in names and not site.cut[1]:
            site.cut = (world.now_ms + STEP_MS, world.now_ms + 1_000_000)


def test_a_new_group_that_is_only_in_unapplied_reports_is_scaled_up() -> None:
    world = world_of(2, 9, grouped=True)
    world.run(8.1)
    estimator = world.estimator()
    start_ms = BEGIN_MS + 7_000
    grid, origin_ms = estimator.schedule.grid, estimator.schedule.origin_ms
    monitor = SubstreamMonitor(grid, [pa.string()], 8)
    born = np.arange(start_ms, start_ms + 500, 5, dtype=np.int64) - origin_ms
    kept = np.arange(0, len(born), 4)
    monitor.observe(born, start_ms + 1_600 - origin_ms, [pa.array(["new"] * len(born))], np.ones(len(kept)), kept)
    substreams = [s.to_state() for s in monitor.take()]
    estimator.add_report(
        "e0", estimator.schedule.starts_at(estimator.observed.slot + 500), substreams, SamplingReason.LINK
    )
    before = estimator.to_text()
    prediction, reasons = estimator.predict_complete(start_ms)
    assert prediction is not None and list(reasons) == ["e0"]
    (new,) = [g for g in prediction.groups or () if g.key == '["new"]']
    assert (new.arrived, new.sampled) == (100, 25) and new.estimate == pytest.approx(100)
    assert estimator.to_text() == before, "the evaluation changes no state"


@pytest.mark.nightly
def test_answers_with_unread_input_do_not_widen_later_intervals() -> None:
    world = World(spec(budget={"staleness": "1s"}), [Site.make(f"e{i}", i, 16, exponential(60.0)) for i in range(3)])
    world.sites[0].slow, world.sites[0].reads = (BEGIN_MS + 8_000, BEGIN_MS + 12_000), 3
    world.run(16)
    off = []
    for answer in (e for e in world.answers if e.revision == 1 and e.phase is Phase.EARLY):
        if (prediction := answer.prediction) is not None and not prediction.bounded:
            assert answer.codes()
            assert not math.isfinite(prediction.lower) and not math.isfinite(prediction.upper)
            truth = world.truth(answer.window_start_ms)
            if answer.window_start_ms >= BEGIN_MS + 4_000:
                off.append(abs(prediction.estimate - truth) / truth)
    assert max(off) > 0.2, "such answers have large errors"
    ratios = [r for _, *each in world.estimator().answers.to_state()["intervals"]["windows"] for r in each]
    assert len(ratios) >= 4 and max(ratios) < 5


def test_errors_are_learnt_when_windows_are_complete_and_not_only_when_they_are_final() -> None:
    world = World(spec(lateness="3s"), [Site.make(f"e{i}", i, 8, exponential(60.0)) for i in range(2)])
    world.run(6.4)
    early = {e.window_start_ms for e in world.answers if e.phase is Phase.EARLY}
    assert early and not early & {e.window_start_ms for e in world.answers if e.phase is Phase.FINAL}
    complete = {e.window_start_ms for e in world.answers if e.phase is Phase.COMPLETE}
    recorded = {int(start) for start, *_ in world.estimator().answers.to_state()["intervals"]["windows"]}
    assert recorded == early & complete != set()
