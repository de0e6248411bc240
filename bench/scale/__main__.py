"""`python -m bench.scale`: all measurements of this package, as JSON and in bench/out/scale.json.

All of them take about half an hour. With `--only` they can be made in pieces: the file keeps the rows of the other
parts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click

from bench.outcome import OUT, store_result
from bench.scale import catalog, commits, drivers, edge_process, executors, heavy, ledger, rates, sessions, takeover

PARTS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "sessions": sessions.measure,
    "catalog": catalog.measure,
    "ledger": ledger.measure,
    "rates": rates.measure,
    "takeover": takeover.measure,
    "executors": executors.measure,
    "heavy": heavy.measure,
    "drivers": drivers.measure,
    "commits": commits.measure,
    "edge": edge_process.measure,
}


@click.command()
@click.option("--only", type=click.Choice(list(PARTS)), multiple=True, help="Parts to run.  [default: all]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, and nothing else.")
@click.option("--smoke", is_flag=True, help="Check that the bench runs: a few frames each.")
def main(only: tuple[str, ...], as_json: bool, smoke: bool) -> None:
    """Measure the load that one center and one edge can take.

    CPU seconds are by kind of process, without the load generator.
    """
    file = OUT / ("smoke.json" if smoke else "scale.json")
    rows: dict[str, Any] = json.loads(file.read_text())["rows"] if only and file.exists() else {}
    for part in only or PARTS:
        rows[part] = PARTS[part](smoke)
        click.echo(f"{part}: {json.dumps(rows[part])}", err=as_json)
        # Written after each part, because a later part may fail.
        store_result(file, {"rows": rows})
    if as_json:
        click.echo(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
