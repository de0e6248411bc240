"""Coverage over 40 windows: at a true 95 %, fewer than 33 are covered with probability below 1e-3 per row."""

import gzip
import json

import numpy as np
import pytest
from click.testing import CliRunner

from bench.early_answers.recorded import RecordedDownloads
from edgewater.__main__ import main
from edgewater.arrivals.targets import AccuracyTarget
from edgewater.base.errors import InvalidConfig
from sim.early_answers import cli
from sim.early_answers.engine import EarlyAnswerSimulation, queue_end_ms, true_values
from sim.early_answers.study import Study, run_study
from sim.early_answers.values import ValueSource
from sim.early_answers.workload import DELAYS, SCENARIOS, SyntheticWorkload, WorkloadSpec
from tests.refusals import refused

pytestmark = pytest.mark.slow

WINDOWS, COLD_WINDOWS = 30, 10
LEAST = 33 / 40


def run(**asked):
    return run_study(Study(**{"windows": WINDOWS, **asked}))[0]


def rate_of(outcomes):
    return sum(o.processed for o in outcomes) / sum(o.events for o in outcomes)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "scenario", [s if s == "cold-start" else pytest.param(s, marks=pytest.mark.full) for s in SCENARIOS]
)
def test_coverage_is_reached_in_every_scenario(scenario):
    row = run(scenario=scenario, measure="sum", windows=COLD_WINDOWS if scenario == "cold-start" else WINDOWS)
    assert row["coverage"] >= LEAST
    assert row["interval_coverage"] is None or row["interval_coverage"] >= LEAST


@pytest.mark.nightly
def test_an_answer_needs_a_fraction_of_the_latency_and_of_the_events():
    (ours, outcomes), slack = run_study(Study(windows=14)), run(windows=14, algorithm="k-slack")
    late = [o.latency_ms for o in outcomes[4:]]
    assert np.mean(late) < 0.02 * slack["latency_ms_mean"], "the first windows wait until delays are known"
    assert rate_of(outcomes[:1]) == 1, "there is no history yet"
    assert rate_of(outcomes[6:]) < 1.85 * ours["oracle_rate"] < 0.25
    assert slack["sampling_rate"] > 0.999, "it misses only events with a longer delay than any before"


@pytest.mark.nightly
def test_late_events_with_other_values_are_compensated():
    naive, ours = (
        run(scenario="correlated-value", measure="sum", algorithm="aion", windows=12),
        run(scenario="correlated-value", measure="sum", windows=12),
    )
    assert naive["coverage"] == pytest.approx(1 / 12), "its first window waits, and no other is right"
    assert ours["coverage"] >= 0.8


@pytest.mark.full
def test_without_sampling_all_events_are_processed_and_errors_are_smaller():
    every, sampled = run(windows=25, measure="sum", sampling=False), run(windows=25, measure="sum")
    assert every["sampling_rate"] == 1
    assert every["error_p95"] < 0.5 * sampled["error_p95"]
    assert every["contract_met"] == 1


@pytest.mark.nightly
def test_a_staleness_budget_is_met_and_a_missed_accuracy_is_stated():
    row = run(measure="count", error=0.001, latest_ms=100, windows=12)
    assert row["latency_ms_p99"] <= 100 + 1e-6
    assert row["contract_met"] < 1


@pytest.mark.nightly
def test_the_same_seed_gives_the_same_result():
    first = run(windows=2)
    assert run(windows=2) == first
    assert run(windows=2, seed=2)["bias"] != first["bias"]


@pytest.mark.parametrize("delays", DELAYS)
def test_delays_and_gaps_have_the_published_distributions(delays):
    workload = SyntheticWorkload(WorkloadSpec(delays=delays, windows=4), ValueSource.named("constant"))
    events = [workload.window(i) for i in range(4)]
    delay = np.concatenate([e.delay_ms for e in events])
    assert delay.mean() == pytest.approx({"C": 150, "G": 240, "E": 240}[delays[0]], rel=0.02)
    born = np.concatenate([np.sort(e.event_ms[e.source == 2]) for e in events])
    gaps = np.diff(born)
    assert gaps.mean() == pytest.approx(1.0, rel=0.03)
    assert gaps.std() == pytest.approx({"C": 0.0, "G": np.sqrt(0.5)}[delays[1]], abs=0.03)


def test_a_queue_is_processed_in_order():
    assert queue_end_ms(np.array([0.0, 0.0, 10.0]), 3.0, 20.0) == 13.0
    assert queue_end_ms(np.array([0.0, 0.0, 1.0, 99.0]), 3.0, 5.0) == 9.0
    assert queue_end_ms(np.array([]), 3.0, 5.0) == 5.0


def test_recorded_downloads_arrive_in_the_order_of_the_file(tmp_path):
    rows = "".join(f'"2015-01-01","00:{m:02}:00",{m},"DE",{m}\n' for m in (30, 10, 50, 20))
    with gzip.open(tmp_path / "a.csv.gz", "wt") as f:
        f.write('"date","time","size","country","ip_id"\n' + rows)
    events = RecordedDownloads(tmp_path, windows=1).window(0)
    assert events.value.tolist() == [30, 10, 50, 20]
    assert (np.diff(events.arrival_ms) > 0).all()
    assert (events.arrival_ms >= 3000).all()
    assert (events.event_ms < 3000).all()


@pytest.mark.nightly
def test_a_skewed_measure_is_not_given_up_on_the_first_few_records(tmp_path):
    """Of a log that arrives in the next hour a few dozen rows are there shortly after the window's end."""
    rng = np.random.default_rng(4)
    hours = [(h, np.maximum(1, rng.lognormal(8, 2, 1500)).astype(int)) for h in range(12)]
    rows = "".join(
        f'"2015-01-01","{h:02}:{m // 60:02}:{m % 60:02}",{size},"DE",1\n'
        for h, sizes in hours
        for m, size in zip(rng.integers(0, 3600, len(sizes)).tolist(), sizes.tolist(), strict=True)
    )
    with gzip.open(tmp_path / "a.csv.gz", "wt") as f:
        f.write('"date","time","size","country","ip_id"\n' + rows)
    engine = EarlyAnswerSimulation(
        RecordedDownloads(tmp_path, windows=12), AccuracyTarget(), "sum", 0.02, substream_ms=600
    )
    outcomes = engine.run()[2:]
    errors = [abs(float(o.estimate[0] / o.truth[0]) - 1) for o in outcomes]
    assert sum(error <= 0.05 for error in errors) >= 8, errors
    assert sum(o.met for o in outcomes) >= 8


def command(*arguments):
    return CliRunner().invoke(main, ["simulate", "early-answers", *arguments])


@pytest.mark.nightly
def test_the_command_prints_all_columns():
    result = command("--windows", "3", "--measure", "count", "--json")
    assert result.exit_code == 0, result.output
    row = json.loads(result.stdout)
    names = {"coverage", "bias", "error_mean", "error_p95", "latency_ms_mean", "latency_ms_p95", "latency_ms_p99",
             "sampling_rate", "missed", "oracle_rate", "interval_coverage", "values_used", "seed"}  # fmt: skip
    assert names <= row.keys()


@pytest.fixture
def measured(monkeypatch):
    """Studies are not run; their rows have their measure."""
    monkeypatch.setattr(cli, "run_study", lambda study, tick: ({"measure": study.measure}, []))
    monkeypatch.setattr(cli, "table", lambda rows: f"{len(rows)} rows")


def test_several_runs_print_a_list_of_json_objects(measured):
    one, rows = (json.loads(command("--measure", names, "--json").stdout) for names in ("count", "count,sum"))
    assert one == {"measure": "count"} and rows == [{"measure": "count"}, {"measure": "sum"}]


@pytest.mark.parametrize("measure", ["min", "max"])
def test_extremes_are_compared_with_the_extremes_of_all_records(measure):
    values, group = np.array([3.0, 5.0, -1.0]), np.array([0, 0, 2])
    assert true_values(group, values, measure, 3)[[0, 2]].tolist() == [{"min": 3.0, "max": 5.0}[measure], -1.0]
    quick = {"windows": 3, "window_ms": 1_000, "substream_ms": 1_000, "edges": 1, "rate": 300.0}
    ours, slack = (run(**quick, measure=measure, algorithm=name) for name in ("edgewater", "k-slack"))
    assert ours["coverage"] == slack["coverage"] == 1.0
    assert ours["interval_coverage"] is None, "no record of past windows has opened the second bound"
    assert ours["oracle_rate"] == 0


def test_help_explains_the_output():
    text = command("--help").output
    for word in ("coverage", "oracle", "Examples", "both excluded"):
        assert word in text


@pytest.mark.nightly
def test_the_command_compares_all_algorithms_and_plots(tmp_path):
    plot = tmp_path / "p.png"
    result = command("--windows", "2", "--algorithm", "all", "--plot", str(plot))
    assert result.exit_code == 0, result.output
    for name in ("edgewater", "default", "k-slack", "aq-k-slack", "aion", "aion-minus"):
        assert name in result.stdout
    assert plot.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("option", "value"),
    [("--delays", "XX"), ("--scenario", "storm"), ("--algorithm", "magic"), ("--measure", "median"),
     ("--confidence", "0"), ("--confidence", "1"), ("--confidence", "120%"), ("--confidence", "nan"),
     ("--error", "0"), ("--error", "150%"), ("--error", "-5%"), ("--values", "no/such/file"), ("--window", "3"),
     ("--substream", "700ms"), ("--plot", "x.doc")],
)  # fmt: skip
def test_invalid_options_are_refused(option, value):
    result = command("--windows", "2", option, value)
    assert result.exit_code == 2
    assert f"{option}: " in result.output
    assert "is not accepted" in result.output


def test_without_a_terminal_there_is_no_progress_bar(measured):
    result = command("--windows", "2", "--measure", "count")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "1 rows\n", "")


def test_values_from_a_file_are_used(tmp_path):
    path = tmp_path / "v.txt"
    path.write_text("1\n2\n3\n")
    values = ValueSource.named(str(path))
    assert set(values.draw(np.random.default_rng(1), 50)) == {1, 2, 3}
    path.write_text("one\n")
    with refused(InvalidConfig, "--values"):
        ValueSource.named(str(path))


def test_taxi_distances_have_the_moments_of_the_trips():
    drawn = ValueSource.named("nyt").draw(np.random.default_rng(1), 400_000)
    # Of the trips: mean 3.066, variance over squared mean 1.042, skewness 3.60.
    assert drawn.mean() == pytest.approx(3.066, rel=0.01)
    assert drawn.var() / drawn.mean() ** 2 == pytest.approx(1.042, rel=0.03)
    assert ((drawn - drawn.mean()) ** 3).mean() / drawn.std() ** 3 == pytest.approx(3.6, rel=0.05)


def test_baselines_answer_sliding_windows():
    row, outcomes = run_study(Study(window_ms=3000, every_ms=600, windows=20, algorithm="k-slack"))
    assert row["coverage"] == 1
    assert len(outcomes) == 20


@pytest.mark.parametrize(
    "given",
    [
        {"every_ms": 700},
        {"every_ms": 600, "silent_edge": True, "edges": 10},
        {"every_ms": 600, "scenario": "cold-start"},
    ],
)
def test_an_invalid_step_is_refused(given):
    with refused(InvalidConfig, "--every"):
        run_study(Study(windows=20, **given))
