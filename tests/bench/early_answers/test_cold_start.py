from __future__ import annotations

import numpy as np

from bench.truth.arrivals import LateRecords
from edgewater.accuracy import AccuracyTarget
from sim.early_answers.engine import EarlyAnswerSimulation, WindowOutcome


def outcomes(delays: str, windows: int) -> list[WindowOutcome]:
    return EarlyAnswerSimulation(
        LateRecords(delays, windows=windows, rate=200.0), AccuracyTarget(), "count", 0.0, substream_ms=500,
        disorder_ms=2_500,
    ).run()  # fmt: skip


def test_nothing_is_claimed_of_the_first_windows_while_longer_delays_cannot_have_been_seen() -> None:
    for outcome in outcomes("gamma and lognormal", 3):
        assert not (outcome.early and outcome.met)
        assert not outcome.early or np.isnan(outcome.half_width).all()


def test_windows_are_answered_early_when_the_delays_are_known() -> None:
    for outcome in outcomes("exponential", 6)[4:]:
        assert outcome.early and outcome.met and outcome.latency_ms < 1_000
