"""False alarm rates: bounds are at four standard errors, so below 1e-4 per seed; seeds are fixed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from center.early_trigger.delays import lynden_bell
from center.early_trigger.triangle import LONG, SHORT, ArrivalTriangle
from edgewater.arrivals import SlotGrid
from edgewater.errors import InvalidInput


def truncated(rng, mean_ms, span_ms, count):
    age = rng.random(count) * span_ms
    delay = rng.exponential(mean_ms, count)
    seen = delay <= age
    return delay[seen], age[seen]


def test_truncated_delays_are_estimated_without_the_bias_of_the_histogram():
    rng = np.random.default_rng(3)
    delay, age = truncated(rng, 240.0, 1000.0, 20_000)
    found = lynden_bell(delay, age)
    truth = (1 - np.exp(-300 / 240)) / (1 - np.exp(-1000 / 240))  # delays above the oldest age cannot be seen
    assert found.at(np.array([300.0]))[0] == pytest.approx(truth, abs=0.02)
    assert (delay <= 300).mean() - truth > 0.08


def test_without_truncation_it_is_the_empirical_distribution():
    delay = np.array([1.0, 2.0, 2.0, 5.0])
    found = lynden_bell(delay, np.full(4, 100.0))
    assert found.at(np.array([0.5, 1.0, 2.0, 4.0, 5.0])).tolist() == pytest.approx([0, 0.25, 0.75, 0.75, 1])


def test_a_delay_beyond_its_age_is_refused():
    with pytest.raises(InvalidInput, match="delays"):
        lynden_bell(np.array([2.0]), np.array([1.0]))


def test_the_share_that_has_arrived_averages_over_a_substream():
    found = lynden_bell(np.array([100.0] * 10), np.full(10, 500.0))
    assert found.arrived_share(0.0, 400.0) == pytest.approx(0.75, abs=0.02)


def feed(triangle, rng, slots, mean_slots, per_slot=40, start=0):
    """Exponential delays in slots; arrivals by [slot, source, lag] for `slots` slots."""
    ring = np.zeros((slots + triangle.grid.lags, 1, triangle.grid.lags))
    for slot in range(slots):
        lag = np.minimum(rng.exponential(mean_slots, per_slot).astype(int), triangle.grid.lags - 1)
        np.add.at(ring, (slot + lag, 0, lag), 1)
    for slot in range(slots):
        triangle.advance(ring[slot])


def test_the_triangle_finds_the_distribution_while_events_are_still_out():
    rng = np.random.default_rng(5)
    triangle = ArrivalTriangle(1, SlotGrid(lags=200))
    feed(triangle, rng, 400, 12.0)
    truth = 1 - np.exp(-(np.arange(200) + 1) / 12.0)
    found = triangle.distributions()
    assert np.abs(found[LONG, 0] - truth).max() < 0.02
    assert np.abs(found[SHORT, 0] - truth).max() < 0.06


def test_the_short_memory_follows_a_shift_first():
    rng = np.random.default_rng(6)
    triangle = ArrivalTriangle(1, SlotGrid(lags=300))
    feed(triangle, rng, 600, 12.0)
    feed(triangle, rng, 150, 30.0)
    truth = 1 - np.exp(-21 / 30.0)
    long, short = triangle.distributions()[:, 0, 20]
    assert abs(short - truth) < abs(long - truth) / 2


@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_a_source_that_catches_up_is_as_if_it_had_never_been_silent(seed, silent):
    rng = np.random.default_rng(seed)
    grid = SlotGrid(slot_ms=10, substream_slots=5, lags=12)
    rows = rng.integers(0, 5, (10, 2, 12)).astype(float)
    heard, gap = ArrivalTriangle(2, grid), ArrivalTriangle(2, grid)
    for row in rows:
        heard.advance(row)
    for row in rows[: 10 - silent]:
        gap.advance(row)
    for row in rows[10 - silent :]:
        gap.advance(row, np.array([True, False]))
    assert gap.behind.tolist() == [0, silent]
    gap.catch_up(1, rows[10 - silent :, 1])
    for name, value in heard.to_state().items():
        assert np.array_equal(np.asarray(gap.to_state()[name]), np.asarray(value)), name


def test_catching_up_with_too_few_slots_is_refused():
    triangle = ArrivalTriangle(2, SlotGrid(lags=4))
    triangle.advance(np.zeros((2, 4)), np.array([True, False]))
    with pytest.raises(InvalidInput, match="1 slots"):
        triangle.catch_up(1, np.zeros((2, 4)))


def test_a_triangle_comes_back_from_its_state():
    rng = np.random.default_rng(8)
    triangle = ArrivalTriangle(1, SlotGrid(lags=50))
    feed(triangle, rng, 80, 6.0)
    again = ArrivalTriangle.from_state(triangle.to_state(), triangle.grid)
    for t in (triangle, again):
        t.advance(np.ones((1, 50)))
    assert np.array_equal(again.distributions(), triangle.distributions())
