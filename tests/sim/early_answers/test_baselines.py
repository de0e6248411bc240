import numpy as np
import pytest

from edgewater.arrivals.targets import AccuracyTarget
from edgewater.base.errors import InvalidQuery
from sim.early_answers.baselines import AionAsPublished, AqKSlack, KSlack, WaitForAll, WindowArrivals, mean_size
from tests.refusals import refused


def window(index, rng, count=2000, mean_ms=240.0):
    born = np.sort(rng.random(count)) * 3000 + index * 3000
    zeros = np.zeros(count, np.int64)
    return WindowArrivals(
        index * 3000.0, index * 3000.0 + 3000, born, born + rng.exponential(mean_ms, count), rng.gamma(2, 1, count),
        zeros, 1, rng.random(count),
    )  # fmt: skip


def test_wait_for_all_waits_for_the_last_event_and_is_exact():
    w = window(0, np.random.default_rng(1))
    answer = WaitForAll(AccuracyTarget(), "sum").close(w)
    assert answer.fire_ms == w.arrival_ms.max()
    assert answer.estimate[0] == pytest.approx(w.value.sum())


def test_k_slack_waits_for_the_largest_observed_delay():
    rng, slack = np.random.default_rng(3), KSlack(AccuracyTarget(), "count")
    first = slack.close(window(0, rng))
    w = window(1, rng, mean_ms=50.0)
    assert first.fire_ms - 3000 > 1000
    assert slack.close(w).fire_ms - w.end_ms >= 1000
    assert slack.close(w).arrived.all()


def test_aq_k_slack_drops_at_most_half_of_the_error():
    rng, rule = np.random.default_rng(4), AqKSlack(AccuracyTarget(), "mean")
    answers = [rule.close(window(i, rng)) for i in range(30)]
    late = [c.arrived for c in answers[5:]]
    assert 0 < np.mean([1 - a.mean() for a in late]) < 0.03
    assert answers[-1].fire_ms - 90_000 < 600


def test_aion_as_published_drops_a_third_of_the_events():
    rng, rule = np.random.default_rng(5), AionAsPublished(AccuracyTarget(), "mean", 600.0)
    missed = [1 - rule.close(window(i, rng, count=15_000)).arrived.mean() for i in range(12)]
    assert 0.25 < np.mean(missed[3:]) < 0.45


# Sample sizes. At 95 %, the bounds of the coverage fail by chance with probability under 1e-4.

TRIALS = 2000
LEAST = 0.93


def covered(population, size, statistic, truth, error):
    rng = np.random.default_rng(17)
    hits = 0
    for _ in range(TRIALS):
        found = statistic(population[rng.choice(len(population), int(np.ceil(size)), replace=False)])
        hits += abs(found - truth) <= error * abs(truth)
    return hits / TRIALS


@pytest.fixture(scope="module")
def population():
    return np.random.default_rng(4).gamma(2.0, 3.0, 5000)


def test_the_mean_is_within_its_error_with_the_confidence(population):
    size = float(mean_size(population.std() / population.mean(), 5000, 0.05, 0.95))
    rate = covered(population, size, np.mean, population.mean(), 0.05)
    assert LEAST <= rate <= 0.97


def test_the_delta_of_the_papers_evaluation_would_need_almost_no_sample():
    assert float(mean_size(1.0, 15_000, 0.05, 0.05)) < 3 < float(mean_size(1.0, 15_000, 0.05, 0.95))


def test_a_population_bounds_the_size():
    assert 99 <= float(mean_size(50.0, 100, 0.01, 0.99)) <= 100


def test_values_that_do_not_vary_need_no_sample():
    assert float(mean_size(0.0, 1000, 0.05, 0.95)) == 0


@pytest.mark.parametrize("confidence", [0, 1, 1.5, -0.1, True, "95"])
def test_a_confidence_outside_of_0_and_1_is_refused(confidence):
    with refused(InvalidQuery, "confidence"):
        mean_size(1.0, 100, 0.05, confidence)
