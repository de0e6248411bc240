"""`edgewater functions`: the functions of a record that packages bring here, which expressions of queries may call."""

from __future__ import annotations

import json
from typing import Any

import click

from edgewater import record_functions
from edgewater.record_functions import RecordFunction


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def functions(as_json: bool) -> None:
    """List the functions of a record that installed packages bring, with types, cost and origin.

    Exit status 1 if a package that brings functions could not be used; it is named.
    """
    listed = [_described(function) for _, function in sorted(record_functions.installed().items())]
    problems = [str(problem) for problem in record_functions.INSTALLED.problems]
    if as_json:
        click.echo(json.dumps({"functions": listed, "problems": problems}, indent=2))
    else:
        for f in listed:
            cost = "expensive" if f["expensive"] else "cheap"
            click.echo(f"{f['function']} -> {f['result']}\n    {cost}; from {f['origin']}")
        if not listed:
            click.echo("no package here brings functions of a record (docs/how-to/your-own-function.md)")
    for problem in problems:
        click.echo(f"edgewater: {problem}", err=True)
    raise SystemExit(1 if problems else 0)


def _described(function: RecordFunction) -> dict[str, Any]:
    return {
        "name": function.name,
        "function": f"{function.name}({', '.join(function.arguments)})",
        "arguments": list(function.arguments),
        "result": function.result,
        "expensive": function.expensive,
        "origin": str(record_functions.INSTALLED.origins.get(function.name, "edgewater")),
    }
