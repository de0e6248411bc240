from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bench.scheduling.engine import Experiment, RunOutcome, run
from bench.scheduling.policies import POLICIES
from bench.scheduling.summary import summarise
from bench.scheduling.workload import BENCHMARKS, OfferedLoad, profiles


def outcome_of(policy: str = "klink", **asked: Any) -> RunOutcome:
    keys = ("nodes", "memory_bytes", "manage_memory", "reduction_first")
    options = {name: asked.pop(name) for name in keys if name in asked}
    return run(Experiment(OfferedLoad(**{"seconds": 20.0, "queries": 30, **asked}), policy, **options))


def p99(outcome: RunOutcome) -> float:
    return float(np.quantile(outcome.latency_ms, 0.99))


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_the_offered_work_is_the_load(benchmark: str) -> None:
    outcome = outcome_of("fair", benchmark=benchmark, share=0.8, seconds=60.0)
    assert outcome.busy_s / outcome.seconds == pytest.approx(0.8, rel=0.05)


def test_below_capacity_least_slack_has_a_quarter_of_the_tail_of_fair_scheduling() -> None:
    klink, fair = outcome_of(share=0.94, seconds=60.0), outcome_of("fair", share=0.94, seconds=60.0)
    assert p99(klink) <= 0.25 * p99(fair)
    assert np.mean(klink.latency_ms) < np.mean(fair.latency_ms)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_every_window_is_emitted_once_under_a_cap_that_holds(policy: str, benchmark: str) -> None:
    load = OfferedLoad(benchmark, 12, 1.3, "zipf", "mixed", seconds=8.0)
    outcome = run(Experiment(load, policy, memory_bytes=2e6))
    expected = {q.name: len(np.arange(q.next_end_ms(0.0), 8_000, q.period_ms)) for q in profiles(load)}
    assert len(outcome.latency_ms) == sum(expected.values())
    assert min(outcome.latency_ms) >= 0
    assert outcome.memory_peak <= 2e6


def test_under_a_cap_slack_decides_who_queues_and_answers_come_as_without_one() -> None:
    load = {"share": 1.1, "memory_bytes": 5e6}
    ours, alone = outcome_of(**load), outcome_of(manage_memory=False, **load)
    by_reduction, deadlines = outcome_of(reduction_first=True, **load), outcome_of("edf", **load)
    for other in (alone, by_reduction, deadlines):
        assert np.mean(ours.latency_ms) < 0.5 * np.mean(other.latency_ms)
        assert p99(ours) < 0.8 * p99(other)
    assert by_reduction.activations > 0 == ours.activations
    assert max(each.memory_peak for each in (ours, alone, by_reduction, deadlines)) <= 5e6


def test_the_work_is_divided_among_nodes() -> None:
    one, four = outcome_of("fair", share=1.6), outcome_of("fair", share=1.6, nodes=4)
    assert np.mean(four.latency_ms) < 0.2 * np.mean(one.latency_ms)
    assert len(four.latency_ms) == len(one.latency_ms)


def test_equal_runs_have_equal_rows_and_a_run_without_a_window_has_no_latency() -> None:
    load = OfferedLoad(queries=10, share=1.05, costs="mixed", seconds=12, seed=3)
    for policy in POLICIES:
        experiment = Experiment(load, policy, memory_bytes=8 << 20)
        row = summarise(experiment, run(experiment))
        assert row == summarise(experiment, run(experiment)) and row["policy"] == policy
        assert 0 < row["memory_peak"] <= 8 << 20 and row["latency_ms_p99"] > 0
    short = Experiment(OfferedLoad(queries=1, seconds=1, seed=2), "klink")
    assert summarise(short, run(short))["latency_ms_p99"] is None
