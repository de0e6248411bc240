import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.arrivals import BernoulliSampler
from edgewater.base.errors import InvalidInput
from tests.refusals import refused


@given(st.integers(0, 2**62), st.integers(0, 50), st.integers(0, 50))
def test_marks_do_not_depend_on_batch_boundaries(source, a, b):
    sampler = BernoulliSampler(source, seed=3)
    whole = sampler.marks(7, a + b)
    assert np.array_equal(np.concatenate([sampler.marks(7, a), sampler.marks(7 + a, b)]), whole)


def test_marks_are_uniform_and_independent_between_sources():
    # Four standard errors: false alarms below 1e-4.
    one, two = (BernoulliSampler(s).marks(0, 40_000) for s in (1, 2))
    for rate in (0.01, 0.3, 0.9):
        assert (one < rate).mean() == pytest.approx(rate, abs=4 * np.sqrt(rate * (1 - rate) / 40_000))
    assert abs(np.corrcoef(one, two)[0, 1]) < 4 / 200


def test_the_sample_of_a_lower_rate_is_a_subset():
    sampler = BernoulliSampler(5)
    low, high = sampler.keep(0, 1000, 0.1), sampler.keep(0, 1000, 0.3)
    assert set(low) < set(high)
    assert len(sampler.keep(0, 1000, 1.0)) == 1000
    assert len(sampler.keep(0, 1000, 0.0)) == 0


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_rate_outside_0_to_1_is_refused(rate):
    with refused(InvalidInput, "rate"):
        BernoulliSampler(1).keep(0, 10, rate)


def test_marks_continue_across_blocks_of_numbers():
    sampler = BernoulliSampler(9)
    whole = sampler.marks(2**32 - 5, 12)
    assert np.array_equal(whole[:5], sampler.marks(2**32 - 5, 5))
    assert np.array_equal(whole[5:], sampler.marks(2**32, 7))
    assert not np.array_equal(sampler.marks(2**32, 100), sampler.marks(0, 100))


def test_neighbours_and_equal_remainders_are_sampled_independently():
    # Chi-square of 64 cells: above 120 by chance with probability below 2e-5.
    marks = BernoulliSampler(3).marks(0, 1 << 18)
    for step in (1, 2, 7, 64, 1024):
        cells = (marks[:-step] * 8).astype(int) * 8 + (marks[step:] * 8).astype(int)
        counts = np.bincount(cells, minlength=64)
        expected = len(cells) / 64
        assert ((counts - expected) ** 2 / expected).sum() < 120, step


@given(st.integers(0, 10_000), st.floats(0, 1))
def test_the_kept_events_are_those_with_marks_below_the_rate(first, rate):
    sampler = BernoulliSampler(11)
    assert sampler.keep(first, 300, rate).tolist() == np.flatnonzero(sampler.marks(first, 300) < rate).tolist()
