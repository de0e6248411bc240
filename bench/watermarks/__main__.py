"""Measures the watermarks in simulation: `python -m bench.watermarks [--quick]`. Writes bench/out/watermarks*."""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from bench.watermarks.figures import draw_figures
from bench.watermarks.goals import check_goals
from bench.watermarks.kmeans import kmeans_rows
from bench.watermarks.overhead import overhead
from bench.watermarks.rows import goal_rows, rival_rows, robustness_rows
from sim.watermarks.recorded import RecordedDownloads
from sim.watermarks.study import Study, run_study, run_workload
from sim.watermarks.summary import oracle_rate, summarise, table

OUT = Path("bench/out")
DOWNLOADS = Path("../shared/data/cran_downloads_dev")


def measure(study: Study) -> dict[str, Any]:
    row, outcomes = run_study(study)
    row["latencies_ms"] = [round(o.latency_ms, 2) for o in outcomes]
    row["errors"] = [
        float(abs(e - t) / abs(t)) for o in outcomes for e, t in zip(o.estimate, o.truth, strict=True) if t and e == e
    ]
    return row


def recorded(measure_kind: str) -> dict[str, Any]:
    study = Study(measure=measure_kind, edges=1, scenario="recorded disorder", values="downloads")  # type: ignore[arg-type]
    workload = RecordedDownloads(DOWNLOADS)
    row = {"algorithm": "edgewater", "delays": "log", "scenario": study.scenario, "measure": measure_kind,
           "windows": workload.windows, "error": study.error, "values": "downloads"}  # fmt: skip
    row |= summarise(run_workload(study, workload), study.target)
    return row | {"oracle_rate": oracle_rate(workload, study.measure, study.target)}


@click.command()
@click.option("--quick", is_flag=True, help="100 windows a row, and EG only where a row exists for all delays.")
@click.option("--windows", default=400)
@click.option("--workers", default=2)
@click.option("--part", type=click.Choice(["all", "goals", "robustness", "rivals", "other"]), default="all")
def main(quick: bool, windows: int, workers: int, part: str) -> None:
    windows = 100 if quick else windows
    parts: dict[str, list[Study]] = {"goals": goal_rows(), "robustness": robustness_rows(), "rivals": rival_rows()}
    chosen = {name: studies for name, studies in parts.items() if part in ("all", name)}
    result: dict[str, Any] = {"windows": windows}
    OUT.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(workers) as pool:
        for name, studies in chosen.items():
            wanted = [replace(s, windows=windows) for s in studies if not quick or s.delays == "EG"]
            with click.progressbar(pool.map(measure, wanted), length=len(wanted), label=name) as bar:
                result[name] = list(bar)
            print(table(result[name]), flush=True)
    if part in ("all", "other"):
        if DOWNLOADS.is_dir():
            result["recorded"] = [recorded(m) for m in ("mean", "sum", "count")]
            print(table(result["recorded"]))
        result["kmeans"] = kmeans_rows(20 if quick else 100)
        result["overhead"] = overhead()
        print(json.dumps({k: result[k] for k in ("kmeans", "overhead")}, indent=1, default=str))
    result["goals_missed"] = check_goals(result)
    for line in result["goals_missed"]:
        print("MISSED", line)
    name = "watermarks" if part == "all" else f"watermarks-{part}"
    (OUT / f"{name}.json").write_text(json.dumps(result, indent=1))
    if "rivals" in result:
        draw_figures(result, OUT)


if __name__ == "__main__":
    main()
