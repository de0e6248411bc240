from __future__ import annotations

import numpy as np
import pytest

from bench.truth.arrivals import LateRecords
from edgewater.arrivals.targets import AccuracyTarget, MeasureKind
from edgewater.base.errors import InvalidInput
from sim.early_answers.engine import EarlyAnswerSimulation, WindowOutcome
from tests.refusals import refused


def outcomes(
    delays: str, windows: int, measure: MeasureKind = "count", event: str = "", watched: int = 0
) -> list[WindowOutcome]:
    return EarlyAnswerSimulation(
        LateRecords(delays, "gamma", event, watched + windows, rate=200.0), AccuracyTarget(), measure, 0.0,
        substream_ms=500, disorder_ms=2_500, sampling=False, watched=watched,
    ).run()  # fmt: skip


def test_nothing_is_claimed_of_the_first_windows_while_longer_delays_cannot_have_been_seen() -> None:
    for outcome in outcomes("gamma and lognormal", 3):
        assert not (outcome.early and outcome.met)
        assert not outcome.early or np.isnan(outcome.half_width).all()


def test_windows_are_answered_early_when_the_delays_are_known() -> None:
    *_, last = outcomes("exponential", 5)
    assert last.early and last.met and last.latency_ms < 1_000


def test_a_query_whose_records_another_one_has_watched_knows_their_delays() -> None:
    """The windows before the registration have no outcome; a query that watches nothing states nothing of window 0."""
    (first,) = outcomes("exponential", 1, watched=4)
    assert first.early and first.met and first.latency_ms <= 200
    assert abs(first.estimate - first.truth) <= first.half_width


@pytest.mark.nightly
def test_nothing_is_claimed_of_values_before_a_window_has_shown_those_of_late_records() -> None:
    """Delays that another query has learnt say nothing of how they hang together with values."""
    (first,) = outcomes("exponential", 1, "sum", "flips", watched=4)
    assert not (first.early and first.met)


@pytest.mark.nightly
def test_queries_over_the_same_edges_have_the_answers_that_each_has_alone() -> None:
    queries: list[tuple[AccuracyTarget, MeasureKind]] = [
        (AccuracyTarget(confidence=0.68), "sum"), (AccuracyTarget(), "mean"),
    ]  # fmt: skip

    def simulation(*asked: tuple[AccuracyTarget, MeasureKind]) -> EarlyAnswerSimulation:
        records = LateRecords("at most 900 ms", windows=3, rate=200.0)
        return EarlyAnswerSimulation(
            records, *asked[0], 0.0, substream_ms=500, disorder_ms=2_500, delays_ms=900, sampling=False,
            others=asked[1:],
        )  # fmt: skip

    for together, query in zip(simulation(*queries).run_each(), queries, strict=True):
        alone = simulation(query).run()
        assert all(o.early and np.isfinite(o.half_width).all() for o in alone)
        assert repr(together) == repr(alone)
    with refused(InvalidInput, "others"):
        simulation((AccuracyTarget(), "sum"), (AccuracyTarget(), "count"))
