"""`python -m bench.scheduling [--smoke] [--only PART]`: policies on too little CPU, in bench/out/scheduling.json.

Parts: latency, throughput and slowdown by load; nodes; caps of memory; how often the ingestion interval is right; the
scheduler's own CPU; admission in a real center. Arrivals and the worker are simulated (`engine`). From the file,
`make results` makes a page's tables, and `make goals` judges the goals.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

import click

from bench.outcome import OUT, store_result
from bench.scheduling.cells import EPOCHS, PARTS, Cell, Row, Size, accuracy, cells, measure
from bench.scheduling.center import center_rows
from bench.scheduling.workload import BENCHMARKS

SMOKE = Size(3.0, 1, (60, 70), ("ysb",), (1, 2), ("klink", "fair"), (16,))

SMOKE_PARTS = ("load", "memory", "accuracy", "overhead", "center")


@click.command()
@click.option("--only", type=click.Choice(PARTS), multiple=True, help="Parts to run.  [default: all]")
@click.option("--smoke", is_flag=True, help="Check that the bench runs: seconds, few rows.")
@click.option("--seeds", type=click.IntRange(1), default=2, show_default=True, help="Runs per row.")
@click.option("--seconds", type=click.IntRange(1), default=120, show_default=True, help="Simulated time per run.")
@click.option("--benchmark", type=click.Choice(BENCHMARKS), multiple=True, help="Workloads to run.  [default: all]")
@click.option("--processes", type=click.IntRange(1), default=2, show_default=True)
def main(
    only: tuple[str, ...], smoke: bool, seeds: int, seconds: int, benchmark: tuple[str, ...], processes: int
) -> None:
    """Compare scheduling policies; print a row of JSON per run."""
    parts = only or (SMOKE_PARTS if smoke else PARTS)
    size = SMOKE if smoke else Size(seconds=float(seconds), seeds=seeds, benchmarks=benchmark or BENCHMARKS)
    wanted = cells(parts, size)
    rows: list[Row] = []
    with click.progressbar(length=len(wanted), file=sys.stderr, hidden=not sys.stderr.isatty()) as bar:
        for row in _measured(wanted, 1 if smoke else processes):
            rows.append(row)
            bar.update(1)
    if "accuracy" in parts:
        rows += accuracy(size.seeds, 60 if smoke else EPOCHS)
    if "center" in parts:
        rows += center_rows(2, 1, (1.2,)) if smoke else center_rows()
    store_result(OUT / "scheduling.json", rows)
    for row in rows:
        click.echo(json.dumps(row))


def _measured(wanted: Sequence[Cell], processes: int) -> Iterator[Row]:
    """Measures overhead cells alone, because they measure the CPU of this process."""
    if processes == 1:
        yield from map(measure, wanted)
        return
    with ProcessPoolExecutor(processes) as pool:
        yield from pool.map(measure, [cell for cell in wanted if cell.part != "overhead"], chunksize=4)
    yield from map(measure, [cell for cell in wanted if cell.part == "overhead"])


if __name__ == "__main__":
    main()
