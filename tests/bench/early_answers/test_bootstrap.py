import numpy as np
import pytest

from bench.early_answers.bootstrap import bootstrap_error, sample_for_function
from edgewater.arrivals.targets import AccuracyTarget
from edgewater.base.errors import InvalidInput
from sim.early_answers.baselines import mean_size
from tests.refusals import refused


@pytest.fixture(scope="module")
def population():
    return np.random.default_rng(4).gamma(2.0, 3.0, 5000)


def test_the_bootstrap_agrees_with_eq_4_where_that_holds(population):
    rng = np.random.default_rng(9)
    by_formula = float(mean_size(population.std() / population.mean(), 5000, 0.05, 0.95))
    sample = population[rng.choice(5000, 800, replace=False)]
    by_bootstrap = bootstrap_error(sample, np.mean, rng, population=5000, replicates=400).size_for(0.05, 5000)
    assert by_bootstrap == pytest.approx(by_formula, rel=0.25)


def test_a_whole_population_has_no_bootstrap_error(population):
    found = bootstrap_error(population[:200], np.mean, np.random.default_rng(1), population=200)
    assert found.error == 0
    assert found.size_for(0.05) == 1


def test_a_bootstrap_of_one_row_is_refused():
    with refused(InvalidInput, "rows"):
        bootstrap_error(np.zeros(1), np.mean, np.random.default_rng(1))


def test_the_sample_of_a_function_grows_until_its_own_error_is_within_the_target():
    """At a true coverage of 95 %, fewer than 32 of 40 windows are covered with a probability below 1e-3."""
    covered, sizes = 0, []
    for index in range(40):
        rng = np.random.default_rng([3, index])
        rows = rng.gamma(2.0, 3.0, 4000)
        chosen = sample_for_function(rows, np.median, rng, AccuracyTarget(), pilot=100, replicates=60)
        covered += abs(np.median(rows[: chosen.size]) / np.median(rows) - 1) <= 0.05
        sizes.append(chosen.size)
        assert chosen.met
        assert chosen.found.size == chosen.size
    assert covered >= 32
    assert 300 < np.mean(sizes) < 2500


def test_a_function_whose_error_cannot_be_met_is_not_met():
    rng = np.random.default_rng(1)
    chosen = sample_for_function(rng.normal(size=200), np.mean, rng, AccuracyTarget(0.001), pilot=20, rounds=1)
    assert not chosen.met
