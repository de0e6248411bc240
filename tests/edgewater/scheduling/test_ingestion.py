from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.scheduling.workload import DELAYS, draw_delays
from edgewater.base.errors import InvalidConfig
from edgewater.scheduling import IngestionHistory
from tests.refusals import refused


def history_of(delays: list[float], confidence: float = 0.95) -> IngestionHistory:
    history = IngestionHistory(confidence)
    for delay in delays:
        history.observe(delay)
    return history


@pytest.mark.parametrize("confidence", [0.67, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("delays", DELAYS)
def test_the_interval_has_the_next_delay_as_often_as_it_says(delays: str, confidence: float) -> None:
    """Within a point of the confidence over 3,000 epochs; the working share keeps the record within 1/(3000 · 0.01)."""
    history = history_of(draw_delays(delays, 3_000, np.random.default_rng(7)).tolist(), confidence)

    assert history.predicted > 2_900
    assert history.hits / history.predicted == pytest.approx(confidence, abs=0.01)


def test_the_expected_delay_leaves_out_what_has_passed() -> None:
    history = history_of([100.0] * 50 + [300.0] * 50)

    early, between = history.expected_delay_ms(0.0), history.expected_delay_ms(150.0)
    assert 100 < early < 300, "the mean of both"
    assert between == pytest.approx(300), "the first is past"
    assert history.expected_delay_ms(5_000.0) == 5_000, "all are past: any moment now"


def test_without_a_history_the_window_end_is_expected() -> None:
    history = IngestionHistory()
    assert history.interval is None
    assert history.expected_delay_ms(-70.0) == 0.0
    assert history.observe(5.0) is None


def test_a_jump_of_the_clock_counts_as_a_day_and_is_forgotten() -> None:
    history = history_of([100.0] * 20)
    for jump in (1e15, -1e15, math.inf, math.nan):
        history.observe(jump)
    for _ in range(2_000):
        history.observe(100.0)
    assert history.expected_delay_ms(0.0) == pytest.approx(100.0)


@given(st.lists(st.floats(-1e9, 1e9), max_size=40), st.floats(-1e9, 1e9))
def test_any_history_expects_nothing_in_the_past(delays: list[float], elapsed_ms: float) -> None:
    expected = history_of(delays).expected_delay_ms(elapsed_ms)
    assert math.isfinite(expected)
    assert expected >= elapsed_ms - 1e-6 * max(1.0, abs(elapsed_ms))


@pytest.mark.parametrize("confidence", [0.0, 1.0, math.nan, -1.0])
def test_a_confidence_is_a_share(confidence: float) -> None:
    with refused(InvalidConfig, "confidence"):
        IngestionHistory(confidence)
