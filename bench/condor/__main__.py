"""`python -m bench.condor`: Condor's evaluation, as tables and bench/out/condor.json.

Every cell runs in a separate process that is pinned to its cores before the JVM starts, so "one core" is one core for
the JVM and its Python workers together.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bench.condor.cells import PARTS, SMOKE, CondorSize
from bench.data import TAXI, existing
from bench.outcome import OUT, store_result

_CHILD = (
    "import os, sys; cores = int(sys.argv[1]); os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:cores]));"
    "import json; from bench.condor.cells import CondorSize, child; size = CondorSize(**json.loads(sys.argv[4]));"
    "child(sys.argv[2].split(), cores, sys.argv[3], size, sys.argv[5])"
)


@click.command()
@click.option("--only", type=click.Choice(list(PARTS)), multiple=True, help="Parts to run.  [default: all]")
@click.option("--rows", default=10_000_000, show_default=True, help="Records per data set.")
@click.option(
    "--smoke",
    is_flag=True,
    help="Check that the bench runs: one case of each list, few generated records, one process.",
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), default=OUT / "condor.json", show_default=True)
def main(only: tuple[str, ...], rows: int, smoke: bool, json_path: Path) -> None:
    """Measure synopses on Spark DataFrames."""
    parts, size = only or tuple(PARTS), SMOKE if smoke else CondorSize(rows)
    if {"accuracy", "skew"} & set(parts) and not smoke:
        existing(TAXI, "name other parts with --only, or run --smoke on generated rides")
    console = Console()
    result: dict[str, Any] = {"rows": size.rows, "cores": os.cpu_count()}
    if only and json_path.exists():  # other parts of the same size stay
        earlier = json.loads(json_path.read_text())
        result = earlier if all(earlier[name] == value for name, value in result.items()) else result
    with tempfile.TemporaryDirectory() as directory:
        together = _cells(parts, 1, directory, size) if smoke else {}
        for part in parts:
            if smoke:
                result[part] = {"1": together[part]}
            else:
                result[part] = {str(n): _cells([part], n, directory, size)[part] for n in PARTS[part][1]}
            _print(console, part, result[part])
    store_result(json_path, result)
    console.print(f"wrote {json_path}")


def _cells(parts: Sequence[str], cores: int, directory: str, size: CondorSize) -> Any:
    """Returns the results of parts that run one after the other in one process."""
    answer = Path(directory) / "answer.json"
    command = [sys.executable, "-c", _CHILD, str(cores), " ".join(parts), directory, json.dumps(asdict(size))]
    done = subprocess.run([*command, str(answer)], capture_output=True, text=True)
    if done.returncode:
        raise click.ClickException(f"{', '.join(parts)} on {cores} cores failed:\n{done.stderr[-4000:]}")
    return json.loads(answer.read_text())


def _print(console: Console, part: str, by_cores: dict[str, Any]) -> None:
    flat = {cores: _flat(cells) for cores, cells in by_cores.items()}
    table = Table(title=part)
    table.add_column("")
    for cores in flat:
        table.add_column(f"{cores} core{'s' if cores != '1' else ''}", justify="right")
    if len(flat) == 2:
        table.add_column("ratio", justify="right")
    for name in next(iter(flat.values())):
        values = [cells[name] for cells in flat.values()]
        ratio = [f"{values[1] / values[0]:.2f}"] if len(values) == 2 and values[0] else []
        table.add_row(name, *(_shown(v) for v in values), *ratio)
    console.print(table)


def _flat(cells: Any, prefix: str = "") -> dict[str, float]:
    if not isinstance(cells, dict):
        return {prefix: cells}
    return {
        k: v for name, held in cells.items() for k, v in _flat(held, f"{prefix}, {name}" if prefix else name).items()
    }


def _shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


if __name__ == "__main__":
    main()
