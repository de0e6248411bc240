"""`python -m bench.truth [--seed N] [--json] [--smoke] [--write]`: how often stated intervals contain the truth.

Rows are stored in bench/out/truth.json, so that parts can be run one by one. `--write` renders all of them as the table
of docs/coverage.md. The exit status is 1 if a coverage is below its band and no page lists it.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import click

from bench.truth.cases import Case, is_fault, key, rows
from bench.truth.page import PAGE, render, written

OUT = Path("bench/out/truth.json")
PARTS = {
    "samples": "bench.truth.samples",
    "sketches": "bench.truth.sketches",
    "early answers": "bench.truth.early_answers",
    "processes": "bench.truth.processes",
}
"""Part -> module with `cases()`."""


@click.command()
@click.option("--seed", default=1, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the rows of this run as JSON, and nothing else.")
@click.option("--only", "only", multiple=True, help="Run only cases whose part/name contains this text.")
@click.option("--trials", type=int, help="Trials of every case.  [default: each case's own]")
@click.option("--write", is_flag=True, help="Write the tables of docs/coverage.md from all rows so far.")
@click.option("--table", is_flag=True, help="Run nothing; show the rows so far.")
@click.option("--smoke", is_flag=True, help="Check that the bench runs: seconds, few trials; keeps nothing.")
def main(
    seed: int, as_json: bool, only: tuple[str, ...], trials: int | None, write: bool, table: bool, smoke: bool
) -> None:
    """Measure the coverage of every interval that an answer states."""
    found: list[dict[str, Any]] = []
    for name, case in [] if table else _cases(only):
        number = case.smoke if smoke else trials or case.trials
        if not number:
            continue
        began = time.process_time()
        new = rows(case, case.run(seed, number))
        found += new
        if not smoke:
            _keep(new)
        if not as_json:
            click.echo(f"{name}: {time.process_time() - began:.1f} s", err=True)
    kept = _kept() if write or table else found
    if write:
        PAGE.write_text(written(PAGE.read_text(), kept))
    faults = [row for row in kept if is_fault(row)]
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        click.echo(f"{render(kept)}\n\n{len(kept)} cells, {len(faults)} below the band and not listed")
    # A few trials hold no band that means anything.
    sys.exit(bool(faults) and not smoke)


def _cases(only: tuple[str, ...]) -> list[tuple[str, Case]]:
    modules = {part: importlib.import_module(module) for part, module in PARTS.items()}
    every = [(f"{part}/{case.name}", case) for part, module in modules.items() for case in module.cases()]
    return [(name, case) for name, case in every if not only or any(text in name for text in only)]


def _kept() -> list[dict[str, Any]]:
    return list(json.loads(OUT.read_text())) if OUT.exists() else []


def _keep(new: list[dict[str, Any]]) -> None:
    """Adds rows to the file. They replace rows of the same cells."""
    kept = {key(row): row for row in [*_kept(), *new]}
    OUT.parent.mkdir(parents=True, exist_ok=True)
    unfinished = OUT.with_suffix(".part")
    unfinished.write_text(json.dumps(list(kept.values()), indent=1) + "\n")
    unfinished.replace(OUT)


if __name__ == "__main__":
    main()
