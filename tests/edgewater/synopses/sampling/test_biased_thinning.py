import numpy as np

from edgewater.synopses import BiasedReservoir

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
