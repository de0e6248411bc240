import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.arrivals import BernoulliSampler


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
