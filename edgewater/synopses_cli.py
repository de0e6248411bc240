"""`edgewater synopses`: the functions that queries may name here, and where they come from."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from edgewater.synopses import plugins
from edgewater.synopses.base import Stack
from edgewater.synopses.registry import REQUIRED, Function, function_named, function_names


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def synopses(as_json: bool) -> None:
    """List the functions that queries may name, with parameters, algebra and origin.

    Exit status 1 if a package that brings synopses could not be used; it is named.
    """
    functions = [_described(function) for name in function_names() if (function := function_named(name)) is not None]
    problems = [str(problem) for problem in plugins.INSTALLED.problems]
    if as_json:
        click.echo(json.dumps({"functions": functions, "problems": problems}, indent=2))
    else:
        for f in functions:
            click.echo(f"{f['function']}")
            answers = f"answers {', '.join(f['questions'])}; {', '.join(f['properties'])}; " if f["questions"] else ""
            click.echo(f"    {answers}from {f['origin']}")
    for problem in problems:
        click.echo(f"edgewater: {problem}", err=True)
    raise SystemExit(1 if problems else 0)


def _described(function: Function) -> dict[str, Any]:
    parameters = [f"{name}={p.default!r}" for name, p in function.parameters.items()]
    argument = [] if function.argument == "none" else [" or ".join(function.types)]
    if function.sample is not None:
        least, most = function.sample.columns
        argument = [f"{least} to {most} columns of numbers" if least < most else f"{least} column of numbers"]
    result: dict[str, Any] = {
        "name": function.name,
        "function": f"{function.name}({', '.join([*argument, *parameters])})",
        "parameters": {
            name: {"default": repr(p.default), "accepted": p.accepted} for name, p in function.parameters.items()
        },
        "questions": None,  # of a function that needs parameters they are not known
        "properties": None,
        "origin": str(plugins.INSTALLED.origins.get(function.name, "edgewater")),
    }
    stack = _example(function)
    if function.sample is not None:
        result["questions"] = ["by itself, at the center, of the rows that came"]
    elif stack is not None:
        result["questions"] = [q.__name__ for q in stack.questions]
    if stack is not None:
        result["properties"] = [name for name, holds in asdict(stack.properties).items() if holds]
    return result


def _example(function: Function) -> Stack | None:
    """An empty stack with the default parameters; None if there are some that must be given."""
    if any(p.default is REQUIRED for p in function.parameters.values()):
        return None
    return function.make(function.read_parameters([], {}, function.name), None)
