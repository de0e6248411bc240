import numpy as np
import pytest

from center.early.calibration import ALARM_THRESHOLD, DEFAULT_FACTOR, MIN_RECORD, Calibration
from center.early.trigger import SAMPLE_TOO_SMALL, AnswerNow, EarlyTrigger, TriggerBatch, Wait
from edgewater.arrivals import SlotGrid
from edgewater.arrivals.targets import AccuracyTarget
from edgewater.arrivals.values import LateValues, ValueHistory
from edgewater.arrivals.window_model import WindowModel, WindowSample
from edgewater.base.errors import InvalidInput, InvalidQuery
from tests.center.early.lone_trigger import decide

GRID = SlotGrid(slot_ms=20, substream_slots=10, lags=80)
SLOTS = 30


def sampled(arrived, values=(), groups=24):
    v = np.asarray(values, float)
    one = np.array([[float(len(v))]])
    by_lag = np.zeros((1, int(LateValues(1, GRID.lags).lag_groups[-1]) + 1))
    by_lag[0, 0] = len(v)
    ends = np.array([[v.min(initial=np.inf)]]), np.array([[v.max(initial=-np.inf)]])
    total, squares = np.array([[v.sum()]]), np.array([[(v * v).sum()]])
    return WindowSample(np.array([[float(arrived)]]), one, total, squares, by_lag, *ends)


def steady(trigger, slots, lag=2, per_slot=20.0):
    """A source whose events all arrive `lag` slots late."""
    for _ in range(slots):
        row = np.zeros((1, GRID.lags))
        row[0, lag] = per_slot if trigger.slot >= lag else 0
        trigger.on_slot(row)


def test_a_window_waits_for_its_end():
    trigger = EarlyTrigger(1, GRID, SLOTS, AccuracyTarget(), "count")
    steady(trigger, 10)
    assert decide(trigger, SLOTS, sampled(160))[0] == Wait(SLOTS)


def test_constant_delays_are_corrected_at_the_windows_end():
    trigger = EarlyTrigger(1, GRID, SLOTS, AccuracyTarget(), "count")
    steady(trigger, 20 * SLOTS)
    answer, model = decide(trigger, 20 * SLOTS, sampled((SLOTS - 2) * 20))
    assert isinstance(answer, AnswerNow)
    assert answer.met
    assert model.estimate[0] == pytest.approx(SLOTS * 20, rel=0.01)


def test_the_records_of_a_synopsis_wait_until_the_expected_records_are_within_the_error():
    late = SLOTS // 10 * 20  # of the window's records, which arrive three slots after their event

    def decide_after(measure, offset):
        trigger = EarlyTrigger(1, GRID, SLOTS, AccuracyTarget(error=0.05), measure)
        steady(trigger, 20 * SLOTS + offset, lag=3)
        return decide(trigger, 20 * SLOTS, sampled(SLOTS * 20 - max(late - 20 * offset, 0)))

    assert decide_after("count", 0)[0].met
    assert isinstance(decide_after("records", 0)[0], Wait)
    answer, model = decide_after("records", 2)
    assert answer.met and model.size[0] == pytest.approx(SLOTS * 20, rel=0.01)


def test_a_window_without_arrivals_is_not_answered_with_zero():
    trigger = EarlyTrigger(1, GRID, SLOTS, AccuracyTarget(), "count")
    for _ in range(SLOTS):
        trigger.on_slot(np.zeros((1, GRID.lags)))
    assert decide(trigger, SLOTS, sampled(0))[0] == Wait(SLOTS + 1)


def test_a_source_without_any_events_does_not_block_for_ever():
    trigger = EarlyTrigger(1, GRID, SLOTS, AccuracyTarget(), "count")
    for _ in range(SLOTS + GRID.lags):
        trigger.on_slot(np.zeros((1, GRID.lags)))
    answer, model = decide(trigger, SLOTS, sampled(0))
    assert isinstance(answer, AnswerNow)
    assert model.estimate[0] == 0


def test_the_staleness_budget_ends_the_wait_and_is_the_reason():
    trigger = EarlyTrigger(1, GRID, SLOTS, AccuracyTarget(error=1e-6), "count", max_wait_slots=3)
    rng = np.random.default_rng(1)
    for _ in range(12 * SLOTS + 3):
        row = np.zeros((1, GRID.lags))
        np.add.at(row[0], np.minimum(rng.exponential(5, 30).astype(int), GRID.lags - 1), 1)
        trigger.on_slot(row)
    answer, _ = decide(trigger, 12 * SLOTS, sampled(700))
    assert isinstance(answer, AnswerNow)
    assert not answer.met
    assert "staleness" in answer.reason


def test_a_sample_that_is_too_small_is_answered_at_once_with_the_reason():
    trigger = EarlyTrigger(1, GRID, SLOTS, AccuracyTarget(), "mean")
    steady(trigger, 20 * SLOTS)
    values = np.random.default_rng(2).gamma(2, 1, 560)
    answer, _ = decide(trigger, 20 * SLOTS, sampled(560, values[:100]))
    assert isinstance(answer, AnswerNow)
    assert not answer.met
    assert answer.reason == SAMPLE_TOO_SMALL


def test_a_sample_that_is_too_small_with_the_stragglers_but_not_without_waits_for_them():
    trigger = EarlyTrigger(1, GRID, SLOTS, AccuracyTarget(), "sum")
    rng = np.random.default_rng(1)
    for _ in range(20 * SLOTS):
        row = np.zeros((1, GRID.lags))
        np.add.at(row[0], np.minimum(rng.exponential(5, 30).astype(int), GRID.lags - 1), 1)
        trigger.on_slot(row)
    arrived = int(trigger.triangle.seen[0, :SLOTS].sum())
    values = rng.gamma(2, 1, arrived)
    decisions = [decide(trigger, 20 * SLOTS, sampled(arrived, values[:n]))[0] for n in range(50, arrived + 1, 10)]
    kinds = [v.reason if isinstance(v, AnswerNow) else "wait" for v in decisions]
    first = [kinds.index(kind) for kind in (SAMPLE_TOO_SMALL, "wait", "")]
    assert first == sorted(first)
    assert kinds == sorted(kinds, key=[SAMPLE_TOO_SMALL, "wait", ""].index)


def test_counts_are_not_sampled_and_without_history_all_events_are_needed():
    for measure, rate in (("count", 0), ("mean", 1)):
        assert TriggerBatch([EarlyTrigger(1, GRID, SLOTS, AccuracyTarget(), measure)]).rates().tolist() == [
            [[rate]],
            [[0.0]],
        ]


def test_a_measure_without_a_bound_on_stragglers_is_refused_with_the_alternatives():
    with pytest.raises(InvalidQuery) as refused:
        EarlyTrigger(1, GRID, SLOTS, AccuracyTarget(), "quantiles")
    assert refused.value.value == "quantiles"


def test_sizes_follow_the_past_and_not_the_sample_that_they_are_for():
    """Samples that vary by chance have the same size; one with four times the variation does not."""
    rng = np.random.default_rng(8)
    history = ValueHistory(1)
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


def test_with_heavy_tails_the_variation_is_inflated_more_for_a_large_sample():
    rng = np.random.default_rng(9)
    light, heavy = ValueHistory(1), ValueHistory(1)
    for _ in range(60):
        light.learn(sampled(3000, rng.gamma(2, 1, 2000)))
        heavy.learn(sampled(3000, rng.pareto(2.2, 2000) + 1))
    small, large = (float((heavy.inflated_variation(taken) / heavy.variation)[0, 0]) for taken in (0.1, 0.8))
    assert 1.1 < small < 1.3 < large < 1.6
    assert np.array_equal(light.inflated_variation(0.8), light.variation)


def test_the_quantile_is_larger_where_few_values_are_missing():
    def quantile_used(missing, quantile, greatest):
        arrived, all_of_it = np.array([[150.0 - missing]]), np.array([[150.0]])
        one = np.ones((1, 1))
        reach = np.array([1.0, greatest]).reshape(2, 1, 1, 1).repeat(2, axis=1)
        model = WindowModel("sum", arrived, one, one, all_of_it, all_of_it, np.zeros(1), reach)
        return model.sampling_width(arrived, quantile)[0] / np.sqrt(missing * 150 / (150 - missing))

    simultaneous_100_groups = 3.48
    assert quantile_used(75.0, simultaneous_100_groups, 1) == pytest.approx(simultaneous_100_groups, rel=0.02)
    assert quantile_used(2.0, simultaneous_100_groups, 10) > 2 * simultaneous_100_groups
    assert quantile_used(2.0, 1.96, 10) == pytest.approx(1.96, rel=0.2)


def test_the_range_of_values_that_were_not_sampled_bounds_the_error_and_without_it_nothing_does():
    """A sample that shows zeros only: one value of 10,000 among the others would be the whole sum."""

    def width(greatest):
        arrived, one = np.array([[1_000.0]]), np.ones((1, 1))
        reach = np.array([0.0, greatest]).reshape(2, 1, 1, 1).repeat(2, axis=1)
        model = WindowModel("sum", arrived, one, 0 * one, arrived, arrived, np.zeros(1), reach)
        return float(model.sampling_width(np.array([[100.0]]), 1.96)[0])

    assert width(0.0) == 0
    # The mean of what was not sampled is below -log(0.025)/100 of the greatest value (the rule of three).
    assert 0.8 * 33 < width(1.0) < 1.2 * 33
    assert width(10_000.0) == pytest.approx(10_000 * width(1.0), rel=1e-6)
    assert width(np.inf) == np.inf


def test_a_window_needs_a_slot_and_a_trigger_has_one_group():
    with pytest.raises(InvalidInput) as window:
        EarlyTrigger(1, GRID, 0, AccuracyTarget(), "count")
    with pytest.raises(InvalidInput) as groups:
        EarlyTrigger(1, GRID, SLOTS, AccuracyTarget(groups=2), "count")
    assert [(e.value.field, e.value.value) for e in (window, groups)] == [("window", 0), ("groups", 2)]


def test_calibration_starts_wide_and_then_follows_the_record():
    calibration = Calibration((0,))
    assert calibration.factor(0, 0.0, 0.95) == DEFAULT_FACTOR
    for i in range(100):
        calibration.add_prediction(i, 0, expected=100.0, deviation=10.0, alarm=0.0, total=0.0)
        calibration.resolve(i, total=100.0 + (i % 10))
    assert calibration.factor(0, 0.0, 0.9) == pytest.approx(0.9, abs=0.1)


def test_predictions_under_alarm_have_a_record_of_their_own():
    calibration = Calibration((0,))
    for i in range(10 * MIN_RECORD):
        wild = i % 10 == 0
        calibration.add_prediction(i, 0, 100.0, 10.0, 2 * ALARM_THRESHOLD if wild else 0.0, 0.0)
        calibration.resolve(i, 300.0 if wild else 101.0)
    assert calibration.factor(0, 0.0, 0.98) == pytest.approx(0.1)
    assert calibration.factor(0, 2 * ALARM_THRESHOLD, 0.98) >= 20


def test_an_alarm_above_all_whose_predictions_were_compared_is_unprecedented():
    calibration = Calibration((0, 10))
    for i in range(MIN_RECORD):
        assert calibration.is_unprecedented(0, 1.1 * ALARM_THRESHOLD), "no error is known"
        assert not calibration.is_unprecedented(0, ALARM_THRESHOLD)
        calibration.add_prediction(i, 0, 100.0, 10.0, 2 * ALARM_THRESHOLD, 0.0)
        calibration.resolve(i, 300.0)
    assert not calibration.is_unprecedented(9, 2 * ALARM_THRESHOLD)
    assert calibration.is_unprecedented(9, 2.1 * ALARM_THRESHOLD)
    assert calibration.is_unprecedented(10, 2 * ALARM_THRESHOLD), "predictions at other offsets do not count"
    calibration.add_prediction(MIN_RECORD, 0, 100.0, 10.0, 5 * ALARM_THRESHOLD, 0.0)
    assert calibration.is_unprecedented(0, 5 * ALARM_THRESHOLD), "the error of the last prediction is not known yet"
    again = Calibration.from_state(calibration.to_state())
    for each in (calibration, again):
        each.resolve(MIN_RECORD, 300.0)
        assert not each.is_unprecedented(0, 5 * ALARM_THRESHOLD)


def test_late_values_that_do_not_differ_are_not_corrected():
    rng = np.random.default_rng(4)
    late = LateValues(1, 60)
    groups = late.count.shape[1]
    values, group = rng.gamma(2, 1, 4000), rng.integers(0, groups, 4000)
    sums = [np.bincount(group, weights=w, minlength=groups)[None] for w in (np.ones(4000), values, values**2)]
    late.learn(*sums)
    found = late.ratio(np.ones((1, 60)), sums[0])
    assert found.ratio[0] == pytest.approx(1.0, abs=0.03)


def test_late_values_that_grow_with_the_lag_are_corrected():
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


@pytest.mark.parametrize("flips", [False, True])
def test_late_values_that_change_between_windows_are_uncertain(flips):
    rng = np.random.default_rng(6)
    late = LateValues(1, 60)
    groups = late.count.shape[1]
    stragglers = np.zeros((1, 60))
    stragglers[0, -1] = 50
    ratios, deviations = [], []
    for window in range(80):
        group = rng.integers(0, groups, 2000)
        turned = groups - 1 - group if flips and window // 10 % 2 else group
        values = 10.0 + turned + rng.normal(0, 1, 2000)
        sums = [np.bincount(group, weights=w, minlength=groups)[None] for w in (np.ones(2000), values, values**2)]
        if window >= 20:
            found = late.ratio(stragglers, sums[0])
            truth = sums[1][0, -1] / sums[0][0, -1] / values.mean()
            ratios.append(abs(found.ratio[0] - truth))
            deviations.append(found.deviation[0])
        late.learn(*sums, substreams=5.0)
    held = np.mean(np.array(ratios) <= 2 * np.array(deviations) + 0.02)
    assert held >= 0.9
    assert (max(deviations) < 0.05) != flips
