"""False alarm rates: bounds are at four standard errors, so below 1e-4 per seed; seeds are fixed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgewater.arrivals import SlotGrid
from edgewater.arrivals.triangle import LONG, SHORT, SHORT_SUBSTREAMS, ArrivalTriangle


def feed(triangle, rng, slots, mean_slots, per_slot=40):
    """Advances by `slots` slots with exponential delays; returns the arrivals by [slot, lag]."""
    ring = np.zeros((slots + triangle.grid.lags, 1, triangle.grid.lags))
    for slot in range(slots):
        lag = np.minimum(rng.exponential(mean_slots, per_slot).astype(int), triangle.grid.lags - 1)
        np.add.at(ring, (slot + lag, 0, lag), 1)
    for slot in range(slots):
        triangle.advance(ring[slot])
    return ring[:slots, 0]


def test_truncated_delays_are_estimated_without_the_bias_of_the_histogram():
    rng, slots = np.random.default_rng(3), 50
    triangle = ArrivalTriangle(1, SlotGrid(lags=200))
    arrivals = feed(triangle, rng, slots, 12.0, per_slot=400)
    truth = (1 - np.exp(-15 / 12)) / (1 - np.exp(-slots / 12))  # delays above the oldest age cannot be seen
    assert triangle.distributions()[LONG, 0, 14] == pytest.approx(truth, abs=0.02)
    by_lag = arrivals.sum(axis=0)
    assert by_lag[:15].sum() / by_lag.sum() - truth > 0.05


def test_what_truncation_hides_beyond_the_longest_lag_is_bounded():
    grid = SlotGrid(substream_slots=10, lags=51)
    rng, late, per_slot = np.random.default_rng(6), 0.1, 1000
    triangle = ArrivalTriangle(1, grid)
    assert np.isinf(triangle.beyond_longest(0.05)[2]).all(), "nothing has been at risk"
    table, longest = np.zeros((1000, grid.lags)), grid.lags - 1
    for born in range(len(table)):
        # P(lag > x) is proportional to 1/x beyond the longest lag: the heaviest tail that is assumed
        lags = np.where(rng.random(per_slot) < late, longest / rng.random(per_slot), rng.integers(0, longest, per_slot))
        lags = lags[born + lags < len(table)].astype(int)
        np.add.at(table, (born + lags, np.minimum(lags, longest)), 1)
    for slot, row in enumerate(table, start=1):
        triangle.advance(row[None])
        if slot in (75, 150, 1000):
            seen, hidden, unseen = triangle.beyond_longest(0.05)[:, 0]
            assert 0.95 * late < seen + hidden < 1.3 * late, slot
            assert hidden < unseen < 1 and (slot > 75) == (hidden < 1.5 * seen)


def test_without_late_events_the_share_that_was_not_seen_follows_the_rule_of_three():
    triangle = ArrivalTriangle(1, SlotGrid(substream_slots=100, lags=51))
    for _ in range(5000):
        triangle.advance(np.eye(1, 51) * 10)
    seen, hidden, unseen = triangle.beyond_longest(0.05)[:, 0]
    assert seen == hidden == 0
    at_risk = 10 * 100 * 50 * (1 - np.exp(-(5000 - 50) / 5000))
    # Half of what the records at risk at half the longest lag do not exclude, with half of the failures.
    assert unseen == pytest.approx(-np.log(0.025) / at_risk / 2, rel=0.1)


def test_after_a_change_few_events_bound_the_share_of_longer_lags():
    triangle = ArrivalTriangle(1, SlotGrid(substream_slots=10, lags=51))
    for _ in range(2_000):
        triangle.advance(np.eye(1, 51) * 10)
    at_once, later, steady = (triangle.unseen_beyond(20, slots, 0.05)[0] for slots in (0, 120, 2_000))
    assert at_once == pytest.approx(3 / (10 * 10 * SHORT_SUBSTREAMS), rel=0.15)
    assert later == pytest.approx(3 / (10 * 10 * 50 * (1 - np.exp(-0.2))), rel=0.1)
    assert steady == pytest.approx(3 / (10 * 10 * 50), rel=0.1)
    assert ArrivalTriangle(1, triangle.grid).unseen_beyond(0, 100, 0.05)[0] == 1.0, "nothing was at risk"


def test_events_that_are_never_as_short_as_the_age_bound_the_share_of_longer_lags():
    triangle = ArrivalTriangle(1, SlotGrid(substream_slots=10, lags=51))
    for _ in range(2_000):
        triangle.advance(np.eye(1, 51, 7) * 10)
    at_the_end = triangle.unseen_beyond(0, 2_000, 0.05)[0]
    assert at_the_end == pytest.approx(3 / (10 * 10 * 50), rel=0.1), "each event arrives 7 slots after its birth"
    after_a_change = [triangle.unseen_beyond(0, slots, 0.05)[0] for slots in (0, 7)]
    assert after_a_change == [1.0, 1.0], "no event since the change has had the time to arrive"


def test_the_triangle_estimates_the_distribution_while_events_are_still_missing():
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
def test_a_source_that_catches_up_has_the_state_of_one_that_was_never_silent(seed, silent):
    rng = np.random.default_rng(seed)
    grid = SlotGrid(slot_ms=10, substream_slots=5, lags=12)
    rows = rng.integers(0, 5, (10, 2, 12)).astype(float)
    steady, gap = ArrivalTriangle(2, grid), ArrivalTriangle(2, grid)
    for row in rows:
        steady.advance(row)
    for row in rows[: 10 - silent]:
        gap.advance(row)
    for row in rows[10 - silent :]:
        gap.advance(row, np.array([True, False]))
    assert gap.silent_slots.tolist() == [0, silent]
    gap.catch_up(np.array([1]), rows[10 - silent :, 1:])
    for name, value in steady.to_state().arrays.items():
        assert np.array_equal(np.asarray(gap.to_state().arrays[name]), np.asarray(value)), name
