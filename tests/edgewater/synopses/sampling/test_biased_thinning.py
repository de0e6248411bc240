import numpy as np
import pytest

from edgewater.model.errors import IncompatibleSynopses, InvalidRequest
from edgewater.synopses import BiasedReservoir, from_bytes

SEED = 31


def test_the_merged_sample_of_thinned_partials_equals_that_of_a_single_pass() -> None:
    rng = np.random.default_rng(SEED)
    values, times = rng.normal(0, 1, 20_000), rng.integers(0, 20_000, 20_000)
    single = BiasedReservoir(64, p_in=0.2)
    single.update(values, times=times, ids=np.arange(20_000))
    parts = []
    for at in np.array_split(rng.permutation(20_000), 7):
        parts.append(BiasedReservoir(64, p_in=0.2))
        parts[-1].update(values[at], times=times[at], ids=at)
    merged = parts[0].merge_many([*parts[1:], parts[3]])
    assert merged.items() == single.items()
    assert from_bytes(merged.to_bytes()).items() == single.items()
    with pytest.raises(IncompatibleSynopses, match="p_in"):
        merged.merge_many([BiasedReservoir(64)])
    assert BiasedReservoir(64, p_in=1.0).to_bytes() == BiasedReservoir(64).to_bytes()
    for bad in (0, 1e-320, -0.1, 1.5, float("nan")):
        with pytest.raises(InvalidRequest, match="p_in"):
            BiasedReservoir(64, p_in=bad)


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
