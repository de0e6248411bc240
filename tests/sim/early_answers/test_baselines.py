import numpy as np
import pytest

from edgewater.arrivals.targets import AccuracyTarget
from sim.early_answers.baselines import AionAsPublished, AqKSlack, KSlack, WaitForAll, WindowArrivals


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
