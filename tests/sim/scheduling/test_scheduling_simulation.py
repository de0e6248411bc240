from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from edgewater.__main__ import main
from sim.scheduling.engine import Experiment, Outcome, run
from sim.scheduling.policies import POLICIES
from sim.scheduling.workload import BENCHMARKS, Load, profiles


def outcome_of(policy: str = "klink", **asked: Any) -> Outcome:
    keys = ("nodes", "memory_bytes", "manage_memory", "reduction_first")
    options = {name: asked.pop(name) for name in keys if name in asked}
    return run(Experiment(Load(**{"seconds": 20.0, "queries": 30, **asked}), policy, **options))


def p99(outcome: Outcome) -> float:
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
    load = Load(benchmark, 12, 1.3, "zipf", "mixed", seconds=8.0)
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


def command(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["simulate", "scheduling", "--duration", "12s", "--queries", "10", *arguments])


def test_the_command_prints_a_row_per_policy_and_is_deterministic() -> None:
    result = command(
        "--policy", "all", "--json", "--load", "105%", "--costs", "mixed", "--memory", "8MiB", "--seed", "3"
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [row["policy"] for row in rows] == list(POLICIES)
    names = {"policy", "latency_ms_mean", "latency_ms_p90", "latency_ms_p99", "throughput", "slowdown", "memory_peak"}
    assert all(names <= row.keys() and row["memory_peak"] <= 8 << 20 for row in rows)
    again = command(
        "--policy", "klink", "--json", "--load", "1.05", "--costs", "mixed", "--memory", "8MiB", "--seed", "3"
    )
    assert json.loads(again.stdout) == rows[:1]


@pytest.mark.slow
def test_the_command_prints_a_table_and_plots(tmp_path: Path) -> None:
    plot = tmp_path / "p.png"
    result = command("--nodes", "2", "--plot", str(plot))
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["policy", "klink", "fair"]
    assert result.stderr == "" and plot.read_bytes()[:4] == b"\x89PNG"


def test_a_run_without_a_window_has_no_latency() -> None:
    rows = json.loads(command("--queries", "1", "--duration", "1s", "--json", "--seed", "2").stdout)
    assert all(row["latency_ms_p99"] is None and row["windows"] == 0 for row in rows)
    assert "-" in command("--queries", "1", "--duration", "1s", "--seed", "2").stdout


def test_help_explains_policies_and_columns() -> None:
    text = command("--help").output
    for word in (*POLICIES, "memory_peak", "Examples"):
        assert word in text


@pytest.mark.parametrize(
    ("option", "value"),
    [("--policy", "best"), ("--load", "0"), ("--load", "nan"), ("--load", "2000%"), ("--memory", "1KiB"),
     ("--memory", "much"), ("--nodes", "11"), ("--rate", "0"), ("--rate", "nan"), ("--duration", "0s"),
     ("--duration", "10000h"), ("--duration", "5"), ("--cycle", "0s"), ("--plot", "x.doc")],
)  # fmt: skip
def test_invalid_options_are_refused_by_name(option: str, value: str) -> None:
    result = command(option, value)
    assert result.exit_code == 2, result.output
    assert re.search(rf"{option}: .* is not accepted; .*expected ", result.output.replace("\n", " "))
