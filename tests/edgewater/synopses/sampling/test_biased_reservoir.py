import numpy as np
import pytest

from edgewater.synopses import BiasedReservoir, Mean, Quantile, Rank
from edgewater.synopses.hashing import DEFAULT_SEED
from edgewater.synopses.sampling.sample_rows import record_tags
from tests.edgewater.synopses.interval_coverage import each_of, least_hits, zoo

pytestmark = pytest.mark.slow

SEED = 13


def test_it_equals_aggarwals_algorithm_record_by_record() -> None:
    """Algorithm 2.1 with p_in = 1: each record replaces the one in a slot chosen at random."""
    values = np.random.default_rng(SEED).normal(0, 1, 2000)
    sample = BiasedReservoir(32)
    sample.update(values)
    tags = record_tags(0, np.arange(2000), DEFAULT_SEED)
    slots: dict[int, float] = {}
    for tag, value in zip(tags.tolist(), values.tolist(), strict=True):
        slots[tag % 32] = value
    assert sorted(slots.values()) == sorted(sample.items().to_pylist()) and len(slots) == 32


def test_the_inclusion_probability_falls_with_each_later_record() -> None:
    size, n, trials = 64, 400, 400
    there = np.zeros(n)
    for seed in range(trials):
        sample = BiasedReservoir(size, seed=seed)
        sample.update(np.arange(n))
        there[sample.items().to_numpy()] += 1
    expected = BiasedReservoir(size).inclusion(np.arange(n)[::-1])
    # 20 averages over 20 records; each deviates by more than 5 standard deviations for one of 10^6 seeds.
    off = (there / trials - expected).reshape(20, 20).mean(axis=1)
    assert np.abs(off).max() < 5 * np.sqrt(0.25 / (trials * 20))


@pytest.mark.parametrize("data", each_of(zoo(np.random.default_rng(SEED), 10)))
def test_intervals_contain_the_true_value_as_often_as_stated(data: str) -> None:
    n, size, trials = 3000, 200, 50
    values = zoo(np.random.default_rng(SEED), n)[data]
    weights = BiasedReservoir(size).inclusion(np.arange(n)[::-1])
    middle = float(np.quantile(values, 0.3))
    order = np.argsort(values, kind="stable")
    mass = np.cumsum(weights[order]) / weights.sum()
    for confidence in (0.9, 0.99):
        truths = {
            Mean(confidence): np.average(values, weights=weights),
            Rank(middle, confidence): np.average(values <= middle, weights=weights),
            Quantile(0.5, confidence): values[order][np.searchsorted(mass, 0.5)],
        }
        hits = dict.fromkeys(truths, 0)
        for seed in range(trials):
            parts = [BiasedReservoir(size, seed=seed, source=k) for k in range(4)]
            for k, part in enumerate(parts):
                part.update(values[k::4], times=np.arange(n)[k::4])
            sample = parts[0].merge_many(parts[1:])
            for question, truth in truths.items():
                answer = sample.query(question)
                slack = 1e-9 * abs(truth)
                hits[question] += answer.lower - slack <= truth <= answer.upper + slack
        for question, held in hits.items():
            assert held >= least_hits(trials, confidence), question
