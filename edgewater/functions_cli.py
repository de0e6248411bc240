"""`edgewater synopses` and `edgewater functions`: the functions that queries may call in this installation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:  # the commands import what they need, so that `--help` is fast
    from edgewater.base.plugins import PluginProblem
    from edgewater.model.record_functions import RecordFunction
    from edgewater.synopses import Function, Stack


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def synopses(as_json: bool) -> None:
    """List the functions that a query's measures may call, such as sum, distinct or quantiles.

    For each function: parameters, questions that its synopsis answers, algebraic properties, and the package that
    provides it. Exit status 1 if a plugin could not be loaded; the output names it.
    """
    from edgewater.synopses import function_named, function_names, plugins

    names = function_names()
    listed = [_synopsis(function) for name in names if (function := function_named(name)) is not None]
    lines = []
    for f in listed:
        answers = f"answers {', '.join(f['questions'])}; {', '.join(f['properties'])}; " if f["questions"] else ""
        lines.append(f"{f['function']}\n    {answers}from {f['origin']}")
    _print(listed, lines, plugins.INSTALLED.problems, as_json)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def functions(as_json: bool) -> None:
    """List the scalar functions that plugins provide for expressions in queries.

    For each function: argument and result types, cost, and the package that provides it. Exit status 1 if a plugin
    could not be loaded; the output names it.
    """
    from edgewater.model import record_functions

    listed = [_record_function(function) for _, function in sorted(record_functions.installed().items())]
    lines = [
        f"{f['function']} -> {f['result']}\n    {'expensive' if f['expensive'] else 'cheap'}; from {f['origin']}"
        for f in listed
    ]
    if not lines:
        lines = ["no installed package provides functions (docs/how-to/your-own-function.md)"]
    _print(listed, lines, record_functions.INSTALLED.problems, as_json)


def _print(
    listed: list[dict[str, Any]], lines: Sequence[str], problems: Sequence[PluginProblem], as_json: bool
) -> None:
    """Prints the functions and the plugins that were not loaded, and exits."""
    texts = [str(problem) for problem in problems]
    if as_json:
        click.echo(json.dumps({"functions": listed, "problems": texts}, indent=2))
    else:
        for line in lines:
            click.echo(line)
    for text in texts:
        click.echo(f"edgewater: {text}", err=True)
    raise SystemExit(1 if texts else 0)


def _record_function(function: RecordFunction) -> dict[str, Any]:
    from edgewater.model import record_functions

    return {
        "name": function.name,
        "function": f"{function.name}({', '.join(function.arguments)})",
        "arguments": list(function.arguments),
        "result": function.result,
        "expensive": function.expensive,
        "origin": str(record_functions.INSTALLED.origins.get(function.name, "edgewater")),
    }


def _synopsis(function: Function) -> dict[str, Any]:
    from edgewater.synopses import plugins

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
        "questions": None,  # unknown for a function with required parameters
        "properties": None,
        "origin": str(plugins.INSTALLED.origins.get(function.name, "edgewater")),
    }
    stack = _empty_stack(function)
    if function.sample is not None:
        result["questions"] = ["its value, which the center computes from the sampled rows"]
    elif stack is not None:
        result["questions"] = [q.__name__ for q in stack.questions]
    if stack is not None:
        result["properties"] = [name for name, holds in asdict(stack.properties).items() if holds]
    return result


def _empty_stack(function: Function) -> Stack | None:
    """Returns an empty stack with default parameters; None if a parameter is required."""
    from edgewater.synopses import REQUIRED

    if any(p.default is REQUIRED for p in function.parameters.values()):
        return None
    return function.make(function.read_parameters([], {}, function.name), None)
