import numpy as np
import pytest

from edgewater.synopses import BiasedReservoir, Count, Mean, Since, Sum
from tests.edgewater.synopses.interval_coverage import least_hits

SEED = 31


def test_records_are_sampled_with_the_stated_probability() -> None:
    """400 seeds; a correct sample is beyond 4.5 standard deviations at any of the 30 ages with probability 2e-4."""
    runs, n = 400, 300
    seen = np.zeros(n)
    for seed in range(runs):
        sample = BiasedReservoir(32, seed=seed, p_in=0.3)
        sample.update(np.arange(n), times=np.arange(n))
        seen[np.array(sample.items().to_pylist(), int)] += 1
    later = n - 1 - np.arange(n)
    truth = BiasedReservoir(32, p_in=0.3).inclusion(later).reshape(30, 10).sum(axis=1)
    deviation = np.sqrt(truth / runs)
    assert (np.abs(seen.reshape(30, 10).sum(axis=1) / runs - truth) < 4.5 * deviation).all()


@pytest.mark.slow
def test_intervals_since_a_time_contain_the_true_value() -> None:
    """300 seeds; a false alarm has a probability below 1e-4 for a coverage of exactly 95 % (`least_hits`)."""
    runs, n = 300, 4000
    values = np.random.default_rng(SEED).normal(5, 2, n)
    truth = {Count: 1000.0, Sum: values[-1000:].sum(), Mean: values[-1000:].mean()}
    hits = dict.fromkeys(truth, 0)
    for seed in range(runs):
        sample = BiasedReservoir(512, seed=seed, p_in=0.5)
        sample.update(values, times=np.arange(n))
        for question, value in truth.items():
            answer = sample.query(Since(3000, question(0.95)))
            hits[question] += answer.lower <= value <= answer.upper
    assert min(hits.values()) >= least_hits(runs, 0.95), hits
