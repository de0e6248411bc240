"""`python -m bench.scale`: all measurements of this package, as JSON and in bench/out/scale.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from bench.scale import commits, crowd, ledger, rates, sessions, takeover

OUT = Path("bench/out")
PARTS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "sessions": sessions.measure,
    "crowd": crowd.measure,
    "ledger": ledger.measure,
    "rates": rates.measure,
    "takeover": takeover.measure,
    "commits": commits.measure,
}


@click.command()
@click.option("--only", type=click.Choice(list(PARTS)), multiple=True, help="Parts to run.  [default: all]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, and nothing else.")
@click.option("--smoke", is_flag=True, help="Check that the bench runs: a few frames each.")
def main(only: tuple[str, ...], as_json: bool, smoke: bool) -> None:
    """Measure what one center takes. CPU seconds are by kind of process, the load generator's apart."""
    result: dict[str, Any] = {}
    for part in only or PARTS:
        result[part] = PARTS[part](smoke)
        click.echo(f"{part}: {json.dumps(result[part])}", err=as_json)
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "scale.json").write_text(json.dumps(result, indent=2) + "\n")
    if as_json:
        click.echo(json.dumps(result))


if __name__ == "__main__":
    main()
