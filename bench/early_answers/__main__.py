"""Measures the watermarks in simulation: `python -m bench.early_answers [--quick | --smoke] [--seed 3]`.

Rows are written to bench/out/watermarks.json as they come. A run goes on where one of the same seed and number of
windows was stopped: rows that are there are not measured again, so after a change of the code ask for `--fresh`.
The rows of recorded arrivals read the day files of package downloads in `--downloads`; without them they are left out.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from bench.data import DOWNLOADS_DEV, made_downloads
from bench.early_answers.figures import draw_figures
from bench.early_answers.goals import check_goals
from bench.early_answers.kmeans import kmeans_rows
from bench.early_answers.overhead import overhead
from bench.early_answers.results import Results, Row
from bench.early_answers.rows import (
    baseline_rows,
    goal_rows,
    recorded_rows,
    robustness_rows,
    sliding_rows,
    unsampled_rows,
)
from sim.early_answers.engine import WindowOutcome
from sim.early_answers.recorded import RecordedDownloads
from sim.early_answers.study import Study, run_study, run_workload
from sim.early_answers.summary import oracle_rate, summarise, table

OUT = Path("bench/out")
PARTS = ("goals", "robustness", "unsampled", "recorded", "sliding", "rivals")
MANY_GROUPS = 4
"""By how much fewer windows there are where groups are a hundred: each has a watermark of its own."""


def measure(part: str, study: Study, downloads: Path) -> Row:
    """One row, with the CPU seconds it took; of rivals also the distributions that figures are drawn from."""
    started = time.process_time()
    if part == "recorded":
        row = _recorded(study, downloads)
    else:
        row, outcomes = run_study(study)
        if part == "rivals":
            row |= _distributions(outcomes)
    return row | {"cpu_s": round(time.process_time() - started, 2)}


def _distributions(outcomes: Sequence[WindowOutcome]) -> Row:
    return {
        "latencies_ms": [round(o.latency_ms, 2) for o in outcomes],
        "errors": [
            float(abs(e - t) / abs(t))
            for o in outcomes
            for e, t in zip(o.estimate, o.truth, strict=True)
            if t and e == e
        ],
    }


def _recorded(study: Study, downloads: Path) -> Row:
    workload = RecordedDownloads(downloads, edges=study.edges, seed=study.seed, windows=study.windows)
    row = asdict(study) | summarise(run_workload(study, workload), study.target) | {"windows_had": workload.windows}
    return row | {"oracle_rate": oracle_rate(workload, study.measure, study.target, workload.windows)}


def _studies(windows: int, seed: int, quick: bool, smoke: bool) -> dict[str, list[Study]]:
    parts = {"goals": goal_rows(), "robustness": robustness_rows(), "rivals": baseline_rows()}
    parts |= {"recorded": recorded_rows(), "sliding": sliding_rows(), "unsampled": unsampled_rows()}
    if smoke:  # one row of each part, and what the figures are drawn from
        parts = {name: studies[:1] for name, studies in parts.items() if name != "rivals"} | {
            "rivals": [s for s in parts["rivals"] if s.delays == "EG" and s.algorithm in ("edgewater", "k-slack")]
        }
    return {
        name: [
            replace(s, windows=windows * s.overlap // (MANY_GROUPS if s.groups >= 100 else 1), seed=seed)
            for s in parts[name] if not quick or s.delays in ("EG", "log")
        ]
        for name in PARTS
    }  # fmt: skip


def _measure_missing(
    results: Results, part: str, studies: Sequence[Study], pool: ProcessPoolExecutor, downloads: Path
) -> None:
    missing = results.missing(part, studies)
    with click.progressbar(length=len(missing), label=f"{part}, {len(studies) - len(missing)} known") as bar:
        for done in as_completed([pool.submit(measure, part, study, downloads) for study in missing]):
            results.add(part, done.result())
            bar.update(1)


@click.command()
@click.option("--quick", is_flag=True, help="100 windows a row, and EG only where a row exists for all delays.")
@click.option("--smoke", is_flag=True, help="Half a minute, few rows and windows, generated downloads: does it run?")
@click.option("--windows", default=400, show_default=True, help="Per row; of the recorded ones as many as there are.")
@click.option("--seed", default=1, show_default=True, type=click.IntRange(0), help="Of all rows' events.")
@click.option("--workers", default=2, show_default=True, type=click.IntRange(1), help="Processes.")
@click.option("--part", type=click.Choice(["all", *PARTS, "other"]), default="all", show_default=True)
@click.option("--fresh", is_flag=True, help="Forgets what was measured before.")
@click.option(
    "--downloads",
    default=DOWNLOADS_DEV,
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of .csv.gz files with the columns date, time, size, ip_id.",
)
@click.option(
    "--json", "path", type=click.Path(dir_okay=False, path_type=Path), default=OUT / "watermarks.json",
    show_default=True, help="Where rows are kept.",
)  # fmt: skip
def main(
    quick: bool,
    smoke: bool,
    windows: int,
    seed: int,
    workers: int,
    part: str,
    fresh: bool,
    downloads: Path,
    path: Path,
) -> None:
    """Coverage, waits and rates of every row; the goals that are missed; the papers' figures."""
    windows = 3 if smoke else 100 if quick else windows
    results = Results(path, fresh=fresh or smoke)
    asked = {n: s for n, s in _studies(windows, seed, quick, smoke).items() if part in ("all", n)}
    with tempfile.TemporaryDirectory() as scratch, ProcessPoolExecutor(workers) as pool:
        downloads = made_downloads(Path(scratch), 20_000, days=1) if smoke else downloads
        if asked.get("recorded") and not downloads.is_dir():
            click.echo(f"{downloads}: there is no such folder; the rows `recorded` are left out", err=True)
            asked["recorded"] = []
        try:
            for name, studies in asked.items():
                _measure_missing(results, name, studies, pool, downloads)
                if studies:
                    click.echo(table(results.of(name, studies)))
        finally:
            pool.shutdown(cancel_futures=True)
    if part in ("all", "other"):
        results.put("kmeans", kmeans_rows(1 if smoke else 20 if quick else 100))
        results.put("overhead", overhead(repeats=1 if smoke else 7))
    shown: dict[str, Any] = {name: results.of(name, studies) for name, studies in asked.items()}
    click.echo(f"CPU: {sum(row['cpu_s'] for rows in shown.values() for row in rows) / 60:.1f} min")
    missed = check_goals(shown)
    results.put("goals_missed", {"seed": seed, "missed": missed})
    for line in missed:
        click.echo(f"MISSED {line}")
    if shown.get("rivals"):
        draw_figures(shown | {"kmeans": results.get("kmeans", [])}, path.parent)


if __name__ == "__main__":
    main()
