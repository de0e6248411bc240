"""Every bench runs through with `--smoke`, in a folder that has nothing else, and shows what it measures."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MOST_BYTES_OF_THE_SCRIPT = 5.0
"""Before sessions had one compressed stream it was 7."""
ROOT = Path(__file__).resolve().parents[2]

# Module -> what its smoke run shows. A smoke run takes seconds, and proves nothing of the product: by default, only the
# module and its options are read.
BENCHES: dict[str, tuple[str, ...]] = {
    "attack": ("p99_ratio", '"windows_wrong_or_incomplete": 0', "partial-refused"),
    "budgets": ("## policies", "zipf, sum, low, error budget", "cran, sum, low, staleness budget"),
    "compare": ("| script-1% | 4 | 3 |", "| error-1%-2s | 4 | 3 |"),
    "condor": ("windows", "(v) Haar: sums of 10,000 rides", "condor.json"),
    "constants": ("edge.uplink.flow_control:QUEUE_S=0.8", "link/small"),
    "console": ("gzipped_bytes", "first_paint_ms_p50", "commit_to_drawn_ms_p95", "core_share"),
    "console_demo": ('"problems": []',),
    "workloads": ("ysb: 6,000 records", "taxi: 3,000", "linear-road: 3,000", "0 wrong, 0 outside"),
    "frame_work": ("partials", "closes, sliding", "at most 40960 units"),
    "first_light": ("columnar_records_s", "given_back_mib", "ack_to_answer_ms_p95"),
    "hostile": ("partial/kll", "single/general_manager", "frame", "0 failures"),
    "least_bytes": ("groups a window", "error/E", "5.0%    0.1"),
    "merging": ("measures ddsketch 1 %  groups 10", "stacked_us_per_partial"),
    "scale": ("next_answer_s", '"wrong_or_incomplete": 0', "small_partials_s", "close_cpu_s"),
    "scheduling": ('"part": "memory"', '"policy": "klink"', "least slack"),
    "shares": ("balanced", "1e-02"),
    "sinks": ("rows_per_s", "cpu_us_per_row", "lag_ms_p95"),
    "slicing": ("synopsis ddsketch 1 %  windows 100", "bucketing_m_per_s"),
    "sources": ("lines, combined", "kafka, ndjson"),
    "synopses": ("throughput", "kll k=200", "plots in"),
    "early_answers": ("recorded disorder", "edgewater", "k-slack", "CPU:"),
    "early_answers_e2e": ("aion: window end to first answer in REST", "fixed: window end", "interval_holds"),
    "truth": ("### Estimator, steady", "reservoir mean", "kll quantile 0.5", "top_k frequency, rare"),
}


def smoke(module: str, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"bench.{module}", *arguments],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )


def run(module: str) -> int | str | None:
    """Runs a bench in this process, which has imported the product already. Returns the exit code."""
    name = f"bench.{module}.__main__" if (ROOT / "bench" / module).is_dir() else f"bench.{module}"
    try:
        importlib.import_module(name).main()
    except SystemExit as ended:
        return ended.code
    return 0


def test_every_bench_is_here() -> None:
    packages = {p.parent.name for p in (ROOT / "bench").glob("*/__main__.py")}
    modules = {p.stem for p in (ROOT / "bench").glob("*.py") if "__main__" in p.read_text()}
    modules -= {"goals", "results"}  # they run the others, and put their figures into pages
    assert BENCHES.keys() == packages | modules


@pytest.mark.nightly
@pytest.mark.e2e
@pytest.mark.parametrize("module", BENCHES)
def test_a_smoke_run_shows_its_table(module: str, tmp_path: Path) -> None:
    done = smoke(module, tmp_path, "--smoke")
    assert done.returncode == 0, done.stderr[-4000:]
    printed = done.stdout
    assert all(text in printed for text in BENCHES[module]), printed
    if module == "compare":
        keeps_up_with_a_script(json.loads((tmp_path / "bench/out/compare.json").read_text()))


def keeps_up_with_a_script(rows: list[dict[str, Any]]) -> None:
    """Compares both budgets with a script at 4 KiB/s. Windows are few and small here, so the bytes of
    a session weigh more than in a whole run."""
    script, both = rows
    assert (script["way"], both["way"]) == ("script-1%", "error-1%-2s")
    assert both["windows"] == 3
    assert both["worst_error"] <= 0.01
    assert both["bytes"] <= MOST_BYTES_OF_THE_SCRIPT * script["bytes"]
    assert both["p95_s"] <= 3.0  # a quiet machine keeps the 2 s; this one runs other tests meanwhile


@pytest.mark.parametrize("module", BENCHES)
def test_the_options_of_a_bench_can_be_read(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--help"])
    assert run(module) in (0, None)
    assert "--smoke" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.e2e
def test_a_smoke_run_of_the_sessions_of_a_gateway_needs_no_jvm(tmp_path: Path) -> None:
    parts = ("sessions", "commits", "catalog")
    done = smoke("scale", tmp_path, "--smoke", *(word for part in parts for word in ("--only", part)), "--json")
    assert done.returncode == 0, done.stderr[-4000:]
    row = json.loads(done.stdout)["rows"]["sessions"]
    assert row["sessions"] == 44 and row["ack_ms_p99"] >= row["ack_ms_p50"] > 0 and row["rejoin_after_restart_s"] > 0
    assert row["cores"]["load generator busy"] > 0


@pytest.mark.nightly
@pytest.mark.e2e
def test_a_small_edge_takes_little_memory(tmp_path: Path) -> None:
    done = smoke("scale", tmp_path, "--smoke", "--only", "edge", "--json")
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(done.stdout)["rows"]["edge"]
    assert rows["at rest"]["rss_mib"] <= 100, rows
    assert max(row["rss_mib"] for row in rows.values()) <= 150 and len(rows) == 3, rows
    assert all(0 < row["core_percent"] < 100 for row in rows.values())
    # Other tests run beside it, so that a short run is cut at moments of its own.
    assert all(500 <= row["records_s"] <= 2_000 for name, row in rows.items() if name != "at rest"), rows


@pytest.mark.slow
@pytest.mark.parametrize("module", ["budgets", "condor"])
def test_a_bench_without_its_data_names_the_folder_and_how_to_go_without(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench"])
    assert run(module) == 2
    stated = capsys.readouterr().err
    assert "../shared/data/" in stated
    assert "--smoke" in stated
