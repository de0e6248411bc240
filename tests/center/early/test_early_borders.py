"""Early answers where little is known: no interval that was not earned, and no accuracy met by it. Seeds are fixed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from center.early import Prediction
from center.early.estimator import MORE_HAVE_COME
from center.early.evaluation import BEYOND_LAGS, TOO_FEW, UNKNOWN_CHANGE, UNKNOWN_SILENCE, ZERO_ESTIMATE
from center.ledger import Emission
from edge.arrivals import SubstreamMonitor
from edge.core.streams import StreamSpec
from edgewater.answers import Phase
from edgewater.base.streams import StreamClock
from tests.center.accuracy_world import BEGIN_MS, COLUMNS, Site, World, exponential, first_answers, spec
from tests.center.statement_world import quality_of, violations
from tests.cores import open_core

HOUR_MS = 3_600_000
SPEED = 5_760.0
RELEASE_MS = 20


def prediction(answer: Emission) -> Prediction:
    assert answer.prediction is not None
    return answer.prediction


def early(world: World) -> list[Emission]:
    return [a for a in first_answers(world.answers) if a.phase is Phase.EARLY]


def states_nothing(answer: Emission) -> bool:
    """Whether the answer states neither an interval nor that the accuracy is met, as its JSON does."""
    stated = quality_of(answer)
    (interval,) = stated["prediction"].values()
    return (
        interval["lower"] is interval["upper"] is interval["confidence"] is stated["records"]["expected"] is None
        and stated["accuracy"]["straggler_share"] is None
        and not stated["contract"]["met"]
    )


# Replays at 5,760 times the speed of the records: an hour in 625 ms


def replay(hours: int, shuffled_ms: int = 0, seed: int = 1, *, edges: int = 2, rest_s: float = 4) -> World:
    """Records of logs with a daily course, read in order, or in random order within a time.

    A replay releases records every 20 ms of wall time, each when all records before it are due.
    """
    rng = np.random.default_rng(seed)
    clock = StreamClock(HOUR_MS * 400_000, BEGIN_MS, SPEED)
    sites = []
    for number in range(edges):
        hour = np.sort(rng.uniform(0, hours, 3_000 * hours))
        hour = hour[rng.random(len(hour)) < 0.6 - 0.4 * np.cos(hour / 12 * math.pi)]
        born = (hour * HOUR_MS).astype(np.int64)
        if shuffled_ms:
            born = born[np.lexsort((rng.random(len(born)), born // shuffled_ms))]
        due = np.maximum.accumulate(born) / SPEED
        core = open_core(StreamSpec(COLUMNS, clock, 2 * HOUR_MS, 3_000), source="f", number=number + 1)
        sites.append(
            Site(
                f"e{number}",
                core,
                clock.event_origin_ms + born,
                (BEGIN_MS + np.ceil(due / RELEASE_MS) * RELEASE_MS).astype(np.int64),
                rng.lognormal(12, 1.0, len(born)),
                group=np.zeros(len(born), np.int64),
            )
        )
    query = spec(
        window={"tumbling": "1h"}, accuracy={"error": "5%", "confidence": "95%", "measure": "total"}, lateness="2h"
    )
    world = World(query, sites, clock=clock)
    world.run(hours * HOUR_MS / SPEED / 1000 + rest_s)
    return world


def assert_earned(worlds: Sequence[World]) -> int:
    """Asserts that at least 93 % of the stated intervals hold; returns their number."""
    held = []
    for world in worlds:
        for answer in early(world):
            p, truth = prediction(answer), world.truth(answer.window_start_ms, window_ms=HOUR_MS)
            if not p.bounded:
                assert states_nothing(answer), p
                continue
            assert p.upper > 0 and p.estimate > 0
            held.append(p.lower <= truth * (1 + 1e-9) and truth * (1 - 1e-9) <= p.upper)
            if p.met:
                assert abs(p.estimate - truth) <= 0.1 * truth
    assert sum(held) >= 0.93 * len(held), f"{sum(held)} of {len(held)}"
    return len(held)


REPLAYS = pytest.mark.parametrize("replays", [1, pytest.param(3, marks=pytest.mark.full)])
"""The number of days that are replayed."""


@pytest.mark.nightly
@REPLAYS
def test_intervals_of_a_fast_replay_in_order_hold(replays: int) -> None:
    worlds = [replay(16, seed=seed) for seed in range(replays)]
    assert assert_earned(worlds) >= 13 * replays
    met = sum(not a.codes() for world in worlds for a in early(world))
    assert met >= 13 * replays, "they meet the accuracy"


@pytest.mark.nightly
@REPLAYS
def test_a_fast_replay_of_shuffled_records_states_no_interval_that_was_not_earned(replays: int) -> None:
    worlds = [replay(24, 2 * HOUR_MS, seed) for seed in range(replays)]
    assert_earned(worlds)
    unstated = [prediction(a) for world in worlds for a in early(world) if not prediction(a).bounded]
    assert len(unstated) >= 3 * replays and {p.reason for p in unstated} <= {
        TOO_FEW,
        BEYOND_LAGS,
        ZERO_ESTIMATE,
        UNKNOWN_CHANGE,
    }


@pytest.mark.slow
def test_an_edge_is_silent_by_the_streams_clock_before_a_restart_as_after_it() -> None:
    world = replay(1, rest_s=1)
    timeout_ms = world.estimator().observed.silence_timeout_ms
    assert timeout_ms > 1_000 * SPEED
    world.restart()
    assert world.estimator().observed.silence_timeout_ms == timeout_ms


# Silence


def sites(count: int = 2, seconds: float = 14, **more: object) -> list[Site]:
    return [Site.make(f"e{i}", i, seconds, exponential(80.0), rate=300.0, **more) for i in range(count)]


def cut_world(from_ms: int, *cut: int, **parts: object) -> World:
    """Two edges, some of which are cut off for the rest of the time."""
    world = World(spec(**parts), sites())
    for number in cut:
        world.sites[number].cut = (BEGIN_MS + from_ms, BEGIN_MS + 100_000)
    world.run(12)
    return world


STALENESS = {"budget": {"staleness": "1s"}}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("cut", "parts"),
    [((1,), {}), ((1,), STALENESS), ((0, 1), STALENESS)],
    ids=["one", "one, at the deadline", "all, at the deadline"],
)
def test_edges_that_were_heard_for_a_moment_and_are_silent_bound_nothing(
    cut: tuple[int, ...], parts: dict[str, object]
) -> None:
    world = cut_world(1_200, *cut, **parts)
    answers = [a for a in early(world) if a.window_start_ms >= BEGIN_MS + 2_000]
    assert len(answers) >= 5
    predicted = [a for a in answers if a.prediction is not None]
    assert predicted and all(map(states_nothing, predicted)) and all(violations(a) for a in answers)
    assert UNKNOWN_SILENCE in {prediction(a).reason for a in predicted}


@pytest.mark.slow
def test_with_all_edges_silent_no_answer_meets_what_is_not_known() -> None:
    world = cut_world(7_500, 0, 1, **STALENESS)
    late = [a for a in early(world) if a.window_end_ms > BEGIN_MS + 8_500]
    predicted = [a for a in late if a.prediction is not None]
    assert predicted and all(violations(a) for a in late if a not in predicted)
    for answer in predicted:
        truth = world.truth(answer.window_start_ms)
        p = prediction(answer)
        assert p.silent == ("e0", "e1")
        if p.bounded:
            assert p.lower < truth < p.upper and p.missing > 0
        else:
            assert states_nothing(answer)


@pytest.mark.slow
def test_an_answer_before_any_report_of_an_edge_states_no_interval() -> None:
    world = World(spec(**STALENESS), sites())
    world.sites[1].cut = (BEGIN_MS, BEGIN_MS + 100_000)
    world.run(8)
    answers = [a for a in early(world) if a.window_start_ms >= BEGIN_MS + 2_000]
    assert len(answers) >= 3
    for answer in answers:
        assert states_nothing(answer)
        assert "no report has arrived from e1" in prediction(answer).reason


# Estimates that cannot be relative to anything, or that are refuted


@pytest.mark.slow
def test_a_zero_estimate_meets_no_relative_error() -> None:
    world = World(spec(**STALENESS), sites(scale=0.0))
    world.run(7)
    answers = [a for a in early(world) if a.window_start_ms >= BEGIN_MS + 4_000]
    assert answers
    for answer in answers:
        assert prediction(answer).arrived > 100
        assert states_nothing(answer) and prediction(answer).reason == ZERO_ESTIMATE


@pytest.mark.slow
def test_an_idle_edge_that_reports_does_not_hinder_the_others() -> None:
    idle = Site.make("e9", 9, 0.0, exponential(80.0))
    world = World(spec(), [*sites(), idle])
    world.run(9)
    answers = [a for a in early(world) if a.window_start_ms >= BEGIN_MS + 5_000]
    assert len(answers) >= 2 and not any(violations(a) for a in answers)


@pytest.mark.slow
def test_a_prediction_is_refuted_by_more_records_than_it_expects() -> None:
    world = World(spec(), sites())
    world.run(8.1)
    estimator, start_ms = world.estimator(), BEGIN_MS + 7_000
    expected = estimator.predict(start_ms)
    assert expected.bounded
    grid, origin_ms = estimator.schedule.grid, estimator.schedule.origin_ms
    monitor = SubstreamMonitor(grid)
    born = np.repeat(np.arange(start_ms, start_ms + 500, 5, dtype=np.int64) - origin_ms, 10)
    monitor.observe(born, start_ms + 1_600 - origin_ms, (), np.ones(len(born)))
    substreams = [s.to_state() for s in monitor.take()]
    estimator.add_report("e0", estimator.schedule.starts_at(estimator.observed.slot + 500), substreams)
    refuted = estimator.predict(start_ms)
    assert (refuted.bounded, refuted.met, refuted.reason) == (False, False, MORE_HAVE_COME)
    assert not math.isfinite(refuted.lower) and not math.isfinite(refuted.upper)


@pytest.mark.slow
def test_fewer_expected_than_observed_records_are_never_stated() -> None:
    world = cut_world(7_000, 1)
    for answer in world.answers:
        records = quality_of(answer)["records"]
        assert records["expected"] is None or records["expected"] >= records["observed"]
