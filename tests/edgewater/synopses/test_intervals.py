import math

import numpy as np
import pytest

from edgewater.base.errors import InvalidRequest
from edgewater.synopses.intervals import dominated_quantile, normal_quantile, thinned_count, wilson
from tests.refusals import refused


def test_wilsons_interval_is_exact_for_a_whole_population_and_0_to_1_for_none() -> None:
    hits, drawn, share = np.array([3.0, 0.0, 0.0]), np.array([10.0, 0.0, 10.0]), np.array([1.0, 0.5, 1.0])
    lower, upper = wilson(hits, drawn, share, 1.96)
    assert lower.tolist() == [0.3, 0, 0] and upper.tolist() == [0.3, 1, 0]


def exact_coverage(draws: int, p: float, z: float) -> float:
    hits = np.arange(draws + 1.0)
    lower, upper = wilson(hits, np.full(draws + 1, float(draws)), np.zeros(draws + 1), z)
    steps = np.concatenate([[0.0], np.log(np.arange(draws, 0, -1)) - np.log(np.arange(1, draws + 1))])
    weights = np.exp(np.cumsum(steps) + hits * np.log(p) + (draws - hits) * np.log1p(-p))
    return float(weights[(lower <= p) & (p <= upper)].sum())


@pytest.mark.parametrize("draws", [5, 40, 1000])
@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_wilsons_interval_covers_every_proportion_also_rare_ones(draws: int, confidence: float) -> None:
    """The coverage is computed, not sampled. Without continuity correction, 0.95 falls to 0.84 here."""
    z = normal_quantile(confidence)
    worst = min(exact_coverage(draws, p, z) for p in (1e-4, 1e-3, 0.01, 0.05, 0.13, 0.2, 0.37, 0.5, 0.9, 0.999))
    assert worst >= confidence - 0.01


def test_a_thinned_count_is_at_least_the_sampled_count() -> None:
    hits, share = np.array([0.0, 1.0, 50.0, 7.0]), np.array([0.5, 0.01, 0.999, 1.0])
    lower, upper = thinned_count(hits, share, 2.0)
    assert (lower >= hits).all() and (upper >= hits / share).all()
    assert (lower[3], upper[3]) == (7, 7)


@pytest.mark.parametrize("confidence", [0.1, 0.5, 0.68, 0.9, 0.95, 0.99, 0.9999, 1 - 1e-9])
def test_the_dominated_quantile_is_between_the_normal_one_and_hoeffdings(confidence: float) -> None:
    t = dominated_quantile(confidence)
    assert normal_quantile(confidence) < t < math.sqrt(2 * math.log(2 / (1 - confidence)))


@pytest.mark.parametrize("confidence", [0.5, 0.68, 0.9, 0.95, 0.99, 0.999])
@pytest.mark.parametrize("tosses", [1, 2, 3, 7, 20, 101])
@pytest.mark.parametrize("p", [0.5, 0.1, 0.02])
def test_the_dominated_quantile_holds_for_sums_of_two_valued_terms(tosses: int, p: float, confidence: float) -> None:
    """The probability is computed, not sampled, for sums of terms of two values at a distance of 1."""
    hits = np.arange(tosses + 1)
    chance = np.array([math.comb(tosses, int(h)) * p**h * (1 - p) ** (tosses - h) for h in hits])
    off = np.abs(hits - tosses * p) > dominated_quantile(confidence) * math.sqrt(tosses / 4)
    assert chance[off].sum() <= 1 - confidence


def test_the_dominated_quantile_holds_for_terms_that_occur_only_below_a_threshold() -> None:
    """A sum of tosses that stops when it reaches the bound reaches it about twice as often as one that goes on."""
    for confidence in (0.5, 0.68, 0.95, 0.99):
        for tosses in (4, 25, 100):
            bound = dominated_quantile(confidence) * math.sqrt(tosses)
            chance, reached = {0: 1.0}, 0.0
            for _ in range(tosses):
                moved: dict[int, float] = {}
                for place, mass in chance.items():
                    for step in (-1, 1):
                        moved[place + step] = moved.get(place + step, 0.0) + mass / 2
                reached += sum(mass for place, mass in moved.items() if abs(place) > bound)
                chance = {place: mass for place, mass in moved.items() if abs(place) <= bound}
            assert reached <= 1 - confidence


@pytest.mark.parametrize("confidence", [0, 1, -0.5, float("nan"), True, "95"])
def test_a_confidence_is_a_number_between_0_and_1(confidence: object) -> None:
    with refused(InvalidRequest, "confidence"):
        normal_quantile(confidence)  # type: ignore[arg-type]
