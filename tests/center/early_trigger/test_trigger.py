import numpy as np
import pytest

from center.early_trigger.calibration import ALARM, LEAST_RECORD, UNTRIED, Calibration
from center.early_trigger.estimate import Sampled, WindowModel
from center.early_trigger.late_values import LateValues
from center.early_trigger.trigger import SAMPLE_TOO_SMALL, Answer, Wait, Watermark
from center.early_trigger.value_history import ValueHistory
from edgewater.accuracy import AccuracyTarget
from edgewater.arrivals import SlotGrid
from edgewater.errors import InvalidInput, InvalidQuery
from sim.early_answers.baselines import (
    AionPrinted,
    AqKSlack,
    Default,
    FixedWatermark,
    KSlack,
    WindowArrivals,
)

GRID = SlotGrid(slot_ms=20, substream_slots=10, lags=80)
SLOTS = 30


def sampled(arrived, values=(), groups=24):
    v = np.asarray(values, float)
    one = np.array([[float(len(v))]])
    by_lag = np.zeros((1, int(LateValues(1, GRID.lags).groups[-1]) + 1))
    by_lag[0, 0] = len(v)
    return Sampled(np.array([[float(arrived)]]), one, np.array([[v.sum()]]), np.array([[(v * v).sum()]]), by_lag)


def steady(mark, slots, lag=2, per_slot=20.0):
    """A source whose events all come `lag` slots late."""
    for _ in range(slots):
        row = np.zeros((1, GRID.lags))
        row[0, lag] = per_slot if mark.slot >= lag else 0
        mark.on_slot(row)


def test_a_window_is_not_judged_before_its_end():
    mark = Watermark(1, GRID, SLOTS, AccuracyTarget(), "count")
    steady(mark, 10)
    assert mark.judge(SLOTS, sampled(160)) == Wait(SLOTS)


def test_constant_delays_are_made_up_for_at_the_windows_end():
    mark = Watermark(1, GRID, SLOTS, AccuracyTarget(), "count")
    steady(mark, 20 * SLOTS)
    answer = mark.judge(20 * SLOTS, sampled((SLOTS - 2) * 20))
    assert isinstance(answer, Answer)
    assert answer.met
    assert answer.estimate[0] == pytest.approx(SLOTS * 20, rel=0.01)


def test_a_window_of_which_nothing_came_is_not_answered_with_nothing():
    mark = Watermark(1, GRID, SLOTS, AccuracyTarget(), "count")
    for _ in range(SLOTS):
        mark.on_slot(np.zeros((1, GRID.lags)))
    assert mark.judge(SLOTS, sampled(0)) == Wait(SLOTS + 1)


def test_a_source_silent_from_birth_does_not_block_for_ever():
    mark = Watermark(1, GRID, SLOTS, AccuracyTarget(), "count")
    for _ in range(SLOTS + GRID.lags):
        mark.on_slot(np.zeros((1, GRID.lags)))
    answer = mark.judge(SLOTS, sampled(0))
    assert isinstance(answer, Answer)
    assert answer.estimate[0] == 0


def test_the_staleness_budget_ends_the_wait_and_says_so():
    mark = Watermark(1, GRID, SLOTS, AccuracyTarget(error=1e-6), "count", latest_slots=3)
    rng = np.random.default_rng(1)
    for _ in range(12 * SLOTS + 3):
        row = np.zeros((1, GRID.lags))
        np.add.at(row[0], np.minimum(rng.exponential(5, 30).astype(int), GRID.lags - 1), 1)
        mark.on_slot(row)
    answer = mark.judge(12 * SLOTS, sampled(700))
    assert isinstance(answer, Answer)
    assert not answer.met
    assert "staleness" in answer.reason


def test_too_small_a_sample_is_answered_at_once_and_says_so():
    mark = Watermark(1, GRID, SLOTS, AccuracyTarget(), "mean")
    steady(mark, 20 * SLOTS)
    values = np.random.default_rng(2).gamma(2, 1, 560)
    answer = mark.judge(20 * SLOTS, sampled(560, values[:100]))
    assert isinstance(answer, Answer)
    assert not answer.met
    assert answer.reason == SAMPLE_TOO_SMALL


def test_a_sample_that_is_too_small_with_the_stragglers_but_not_without_waits_for_them():
    mark = Watermark(1, GRID, SLOTS, AccuracyTarget(), "sum")
    rng = np.random.default_rng(1)
    for _ in range(20 * SLOTS):
        row = np.zeros((1, GRID.lags))
        np.add.at(row[0], np.minimum(rng.exponential(5, 30).astype(int), GRID.lags - 1), 1)
        mark.on_slot(row)
    arrived = int(mark.triangle.seen[0, :SLOTS].sum())
    values = rng.gamma(2, 1, arrived)
    verdicts = [mark.judge(20 * SLOTS, sampled(arrived, values[:n])) for n in range(50, arrived + 1, 10)]
    kinds = [v.reason if isinstance(v, Answer) else "wait" for v in verdicts]
    first = [kinds.index(kind) for kind in (SAMPLE_TOO_SMALL, "wait", "")]
    assert first == sorted(first)
    assert kinds == sorted(kinds, key=[SAMPLE_TOO_SMALL, "wait", ""].index)


def test_counts_are_not_sampled_and_without_history_all_is_needed():
    assert Watermark(1, GRID, SLOTS, AccuracyTarget(), "count").rates()[0, 0] == 0
    assert Watermark(1, GRID, SLOTS, AccuracyTarget(), "mean").rates()[0, 0] == 1


def test_a_measure_without_a_bound_on_stragglers_is_refused_and_says_what_there_is():
    with pytest.raises(InvalidQuery, match="mean of an expression that is 0 or 1"):
        Watermark(1, GRID, SLOTS, AccuracyTarget(), "quantiles")


def test_sizes_follow_the_past_and_not_the_sample_that_they_are_for():
    """Samples that look narrow or wide by chance get the same size; one that varies four times as much does not."""
    rng = np.random.default_rng(8)
    history = ValueHistory(1, 1)
    for _ in range(30):
        history.learn(sampled(3000, rng.gamma(2, 1, 300)))
    relative = []
    for _ in range(50):
        one = sampled(3000, rng.gamma(2, 1, 300))
        means = one.means(history.mean)
        relative.append(float((history.spread(one, means) / means)[0, 0]))
    own = [float(np.std(v) / np.mean(v)) for v in rng.gamma(2, 1, (50, 300))]
    assert np.std(relative) < 0.4 * np.std(own)
    assert np.mean(relative) == pytest.approx(np.sqrt(0.5), rel=0.05)
    wide = sampled(3000, rng.gamma(0.125, 1, 300))
    means = wide.means(history.mean)
    assert (history.spread(wide, means) / means)[0, 0] > 2 * np.mean(relative)


def test_with_heavy_tails_a_large_sample_is_sized_with_more_caution_than_a_small_one():
    rng = np.random.default_rng(9)
    light, heavy = ValueHistory(1, 1), ValueHistory(1, 1)
    for _ in range(60):
        light.learn(sampled(3000, rng.gamma(2, 1, 2000)))
        heavy.learn(sampled(3000, rng.pareto(2.2, 2000) + 1))
    small, large = (float((heavy.cautious_variation(taken) / heavy.variation)[0, 0]) for taken in (0.1, 0.8))
    assert 1.1 < small < 1.3 < large < 1.6
    assert np.array_equal(light.cautious_variation(0.8), light.variation)


def test_of_the_last_few_missing_values_a_large_one_is_reckoned_with():
    def quantile_used(missing, quantile):
        arrived, all_of_it = np.array([[150.0 - missing]]), np.array([[150.0]])
        one = np.ones((1, 1))
        model = WindowModel("sum", arrived, one, one, all_of_it, all_of_it, np.zeros(1))
        return model.sampling_width(arrived, quantile)[0] / np.sqrt(missing * 150 / (150 - missing))

    of_all_100_groups = 3.48
    assert quantile_used(75.0, of_all_100_groups) == pytest.approx(of_all_100_groups, rel=0.02)
    assert quantile_used(2.0, of_all_100_groups) > 2 * of_all_100_groups
    assert quantile_used(2.0, 1.96) == pytest.approx(1.96, rel=0.15)


def test_a_window_needs_a_slot_and_a_watermark_is_of_one_group():
    with pytest.raises(InvalidInput, match="window"):
        Watermark(1, GRID, 0, AccuracyTarget(), "count")
    with pytest.raises(InvalidInput, match="watermark of its own"):
        Watermark(1, GRID, SLOTS, AccuracyTarget(groups=2), "count")


def test_calibration_is_wary_first_and_then_follows_the_record():
    calibration = Calibration((0,))
    assert calibration.factor(0, 0.0, 0.95) == UNTRIED
    for i in range(100):
        calibration.predicted(i, 0, expected=100.0, deviation=10.0, alarm=0.0, total=0.0)
        calibration.settle(i, total=100.0 + (i % 10))
    assert calibration.factor(0, 0.0, 0.9) == pytest.approx(0.9, abs=0.1)


def test_predictions_under_alarm_are_judged_by_their_own_kind():
    calibration = Calibration((0,))
    for i in range(10 * LEAST_RECORD):
        wild = i % 10 == 0
        calibration.predicted(i, 0, 100.0, 10.0, 2 * ALARM if wild else 0.0, 0.0)
        calibration.settle(i, 300.0 if wild else 101.0)
    assert calibration.factor(0, 0.0, 0.98) == pytest.approx(0.1)
    assert calibration.factor(0, 2 * ALARM, 0.98) >= 20


def test_late_values_that_do_not_differ_are_not_corrected():
    rng = np.random.default_rng(4)
    late = LateValues(1, 60)
    groups = late.count.shape[1]
    values, group = rng.gamma(2, 1, 4000), rng.integers(0, groups, 4000)
    sums = [np.bincount(group, weights=w, minlength=groups)[None] for w in (np.ones(4000), values, values**2)]
    late.learn(*sums)
    found = late.ratio(np.ones((1, 60)), sums[0])
    assert found.ratio[0] == pytest.approx(1.0, abs=0.03)


def test_late_values_that_grow_with_the_lag_are():
    rng = np.random.default_rng(5)
    late = LateValues(1, 60)
    groups = late.count.shape[1]
    group = rng.integers(0, groups, 4000)
    values = 1.0 + group
    sums = [np.bincount(group, weights=w, minlength=groups)[None] for w in (np.ones(4000), values, values**2)]
    late.learn(*sums)
    stragglers = np.zeros((1, 60))
    stragglers[0, -1] = 50  # all with the longest lag
    found = late.ratio(stragglers, sums[0])
    assert found.ratio[0] == pytest.approx(groups / ((groups + 1) / 2), rel=0.03)


def window(index, rng, count=2000, mean_ms=240.0):
    born = np.sort(rng.random(count)) * 3000 + index * 3000
    zeros = np.zeros(count, np.int64)
    return WindowArrivals(
        index * 3000.0, index * 3000.0 + 3000, born, born + rng.exponential(mean_ms, count), rng.gamma(2, 1, count),
        zeros, 1, rng.random(count),
    )  # fmt: skip


def test_default_waits_for_the_last_event_and_is_exact():
    w = window(0, np.random.default_rng(1))
    closing = Default(AccuracyTarget(), "sum").close(w)
    assert closing.fire_ms == w.arrival_ms.max()
    assert closing.estimate[0] == pytest.approx(w.value.sum())


def test_a_fixed_watermark_drops_what_is_later():
    w = window(0, np.random.default_rng(2))
    closing = FixedWatermark(AccuracyTarget(), "count", 100.0).close(w)
    assert closing.fire_ms == 3100
    assert closing.estimate[0] == (w.arrival_ms <= 3100).sum() < 2000
    with pytest.raises(InvalidInput, match="delay"):
        FixedWatermark(AccuracyTarget(), "count", -1.0)


def test_k_slack_waits_the_largest_delay_seen():
    rng, slack = np.random.default_rng(3), KSlack(AccuracyTarget(), "count")
    first = slack.close(window(0, rng))
    w = window(1, rng, mean_ms=50.0)
    assert first.fire_ms - 3000 > 1000
    assert slack.close(w).fire_ms - w.end_ms >= 1000
    assert slack.close(w).arrived.all()


def test_aq_k_slack_leaves_out_at_most_half_of_the_error():
    rng, rule = np.random.default_rng(4), AqKSlack(AccuracyTarget(), "mean")
    closings = [rule.close(window(i, rng)) for i in range(30)]
    late = [c.arrived for c in closings[5:]]
    assert 0 < np.mean([1 - a.mean() for a in late]) < 0.03
    assert closings[-1].fire_ms - 90_000 < 600


def test_aion_as_printed_throws_away_a_third_of_the_events():
    rng, rule = np.random.default_rng(5), AionPrinted(AccuracyTarget(), "mean", 600.0)
    missed = [1 - rule.close(window(i, rng, count=15_000)).arrived.mean() for i in range(12)]
    assert 0.25 < np.mean(missed[3:]) < 0.45
