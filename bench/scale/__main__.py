"""`python -m bench.scale`: all measurements of this package, as JSON and in bench/out/scale.json.

All of them take about half an hour. With `--only` they can be made in pieces: the file keeps the rows of the other
parts, and its headlines use all rows of the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from bench.scale import (
    catalog,
    commits,
    drivers,
    edge_process,
    executors,
    heavy,
    ledger,
    pulls,
    rates,
    sessions,
    takeover,
    windows,
)

OUT = Path("bench/out")
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
    "pulls": pulls.measure,
    "edge": edge_process.measure,
    "closes": rates.measure_closes,
    "windows": windows.measure,
}
HEADLINES = {
    "small_partials_s": ("rates", "small_partials_s"),
    "large_mb_s": ("rates", "large_mb_s"),
    "close_cpu_s": ("rates", "queries", "close_cpu_s"),
    "close_to_answer_s": ("rates", "queries", "close_to_answer_s"),
    "sessions": ("sessions", "sessions"),
    "ack_ms_p99": ("sessions", "ack_ms_p99"),
    "rejoin_s": ("sessions", "rejoin_after_restart_s"),
    "takeover_s": ("takeover", takeover.SMOKE.name, "next_answer_s"),
    "executors_ratio": ("executors", "wall_ratio"),
    "slow_executors_ratio": ("executors", "slow_executors_ratio"),
    "heavy_p95_ratio": ("heavy", "p95_ratio"),
    "edge_core_percent": ("edge", edge_process.HEADLINE, "core_percent"),
    "edge_rss_mib": ("edge", edge_process.HEADLINE, "rss_mib"),
    "drivers_ratio": ("drivers", "ratio"),
}
"""The document's headlines, and the rows that they are taken from. The whole of each part is under ``rows``."""


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
    OUT.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {}
    for part in only or PARTS:
        rows[part] = PARTS[part](smoke)
        click.echo(f"{part}: {json.dumps(rows[part])}", err=as_json)
        document = {name: _at(rows, path) for name, path in HEADLINES.items() if path[0] in rows} | {"rows": rows}
        file.write_text(json.dumps(document, indent=2) + "\n")  # written after each part, because a later part may fail
    if as_json:
        click.echo(json.dumps(document))


def _at(rows: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = rows
    for key in path:
        value = value[key]
    return value


if __name__ == "__main__":
    main()
