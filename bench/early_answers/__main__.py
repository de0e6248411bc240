"""Measures early answers in simulation: `python -m bench.early_answers [--smoke] [--seed 3]`.

Rows are written to bench/out/early_answers.json as they are measured. An interrupted run with the same seed and number
of windows continues with the missing rows; use `--fresh` after a change of the code. The rows of recorded arrivals need
the day files of package downloads in `--downloads`.
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
from bench.early_answers.kmeans import kmeans_rows
from bench.early_answers.recorded import RecordedDownloads
from bench.early_answers.results import Results, Row
from bench.early_answers.rows import baseline_rows, goal_rows, recorded_rows
from bench.early_answers.sent_bytes import sent_bytes
from bench.outcome import OUT
from sim.early_answers.study import Study, run_study, run_workload
from sim.early_answers.summary import oracle_rate, summarise, table

PARTS = ("goals", "recorded", "baselines")


def measure(part: str, study: Study, downloads: Path) -> Row:
    """Runs a study; returns its row with its CPU time, and for baselines the latencies."""
    started = time.process_time()
    if part == "recorded":
        row = _recorded(study, downloads)
    else:
        row, outcomes = run_study(study)
        if part == "baselines":
            row["latencies_ms"] = [round(o.latency_ms, 2) for o in outcomes]
    return row | {"cpu_s": round(time.process_time() - started, 2)}


def _recorded(study: Study, downloads: Path) -> Row:
    workload = RecordedDownloads(downloads, edges=study.edges, seed=study.seed, windows=study.windows)
    row = asdict(study) | summarise(run_workload(study, workload), study.target) | {"windows_had": workload.windows}
    return row | {"oracle_rate": oracle_rate(workload, study.measure, study.target, workload.windows)}


def _studies(windows: int, seed: int, smoke: bool) -> dict[str, list[Study]]:
    parts = {"goals": goal_rows(), "recorded": recorded_rows(), "baselines": baseline_rows()}
    if smoke:  # one row of each part, and the rows of the figures
        parts = {name: studies[:1] for name, studies in parts.items() if name != "baselines"} | {
            "baselines": [s for s in parts["baselines"] if s.delays == "EG" and s.algorithm in ("edgewater", "k-slack")]
        }
    return {name: [replace(s, windows=windows * s.overlap, seed=seed) for s in parts[name]] for name in PARTS}


def _measure_missing(
    results: Results, part: str, studies: Sequence[Study], pool: ProcessPoolExecutor, downloads: Path
) -> None:
    missing = results.missing(part, studies)
    with click.progressbar(length=len(missing), label=f"{part}, {len(studies) - len(missing)} known") as bar:
        for done in as_completed([pool.submit(measure, part, study, downloads) for study in missing]):
            results.add(part, done.result())
            bar.update(1)


@click.command()
@click.option(
    "--smoke",
    is_flag=True,
    help="Check that the bench runs, in half a minute: few rows and windows, generated downloads.",
)
@click.option(
    "--windows", default=400, show_default=True, help="Windows per row; recorded downloads have one per hour."
)
@click.option("--seed", default=1, show_default=True, type=click.IntRange(0), help="Seed of the events.")
@click.option("--workers", default=2, show_default=True, type=click.IntRange(1), help="Number of processes.")
@click.option("--part", type=click.Choice(["all", *PARTS, "other"]), default="all", show_default=True)
@click.option("--fresh", is_flag=True, help="Discard earlier results.")
@click.option(
    "--downloads",
    default=DOWNLOADS_DEV,
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory of .csv.gz files with the columns date, time, size, ip_id.",
)
@click.option(
    "--json", "path", type=click.Path(dir_okay=False, path_type=Path), default=OUT / "early_answers.json",
    show_default=True, help="File of the results.",
)  # fmt: skip
def main(
    smoke: bool, windows: int, seed: int, workers: int, part: str, fresh: bool, downloads: Path, path: Path
) -> None:
    """Measure coverage, latency and sampling rate of all studies."""
    windows = 3 if smoke else windows
    results = Results(path, fresh=fresh or smoke)
    selected = {n: s for n, s in _studies(windows, seed, smoke).items() if part in ("all", n)}
    with tempfile.TemporaryDirectory() as scratch, ProcessPoolExecutor(workers) as pool:
        downloads = made_downloads(Path(scratch), 20_000, days=1) if smoke else downloads
        if selected.get("recorded") and not downloads.is_dir():
            click.echo(f"{downloads}: no such directory; the part `recorded` is omitted", err=True)
            selected["recorded"] = []
        try:
            for name, studies in selected.items():
                _measure_missing(results, name, studies, pool, downloads)
                if studies:
                    click.echo(table(results.of(name, studies)))
        finally:
            pool.shutdown(cancel_futures=True)
    if part in ("all", "other"):
        results.put("kmeans", kmeans_rows(1 if smoke else 100))
        results.put("sent_bytes", sent_bytes(seconds=6 if smoke else 60))
    shown: dict[str, Any] = {name: results.of(name, studies) for name, studies in selected.items()}
    click.echo(f"CPU: {sum(row['cpu_s'] for rows in shown.values() for row in rows) / 60:.1f} min")


if __name__ == "__main__":
    main()
