"""`python -m bench.constants MODULE:NAME…`: what half and double the value of a constant cost.

For each value, a process of its own runs the scenarios (`bench.constants.scenarios`). A hook replaces the assignment in
the source, so constants that are derived from the constant change, too. The bench prints the cost of each scenario as a
ratio to the cost with the present value: the mean over the seeds, and the spread over the seeds. Beside it is the
spread of the cost with the present value.

`MODULE:NAME=VALUE` tries one value, such as a value that turns a mechanism off. `MODULE:NAME=VALUE;MODULE:NAME=VALUE`
changes two constants together. bench/out/constants.json has all ratios.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Sequence
from fnmatch import fnmatch
from functools import partial
from importlib import import_module
from importlib.machinery import SourceFileLoader
from multiprocessing import get_context
from pathlib import Path
from types import CodeType
from typing import Any

import click
import numpy as np

from bench.outcome import OUT, store_result

PATTERNS = "entries/*", "edges/*", "wire/*", "link/*"
SHOWN = 0.005
"""Smaller changes of a cost are not printed."""


def _change(changes: dict[str, dict[str, str]]) -> None:
    """Loads modules with other values of their constants from now on: by module and name, expressions."""
    usual = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, module: str) -> CodeType | None:
        left = changes.pop(module, {})
        if not left:
            return usual(loader, module)
        tree = ast.parse(Path(loader.path).read_bytes())
        for node in tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)) if name in left:
                    node.value = ast.parse(left.pop(name), mode="eval").body
                case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                    for at, each in enumerate(names):
                        if isinstance(each, ast.Name) and each.id in left:
                            values[at] = ast.parse(left.pop(each.id), mode="eval").body
        assert not left, f"{module} has no constant {', '.join(left)}"
        return compile(ast.fix_missing_locations(tree), loader.path, "exec")

    setattr(SourceFileLoader, "get_code", get_code)  # noqa: B010 - mypy


def _module(name: str, changed: str = "") -> Any:
    """Imports a module of the product or of this bench, with changed constants."""
    changes: dict[str, dict[str, str]] = defaultdict(dict)
    for place, _, value in (each.partition("=") for each in changed.split(";") if each):
        changes[place.partition(":")[0]][place.partition(":")[2]] = value
    _change(changes)
    return import_module(name)


def variants(constant: str) -> list[str]:
    """Returns the values to try, as `MODULE:NAME=VALUE`: the value of the argument, or half and double the constant."""
    if "=" in constant:
        return [constant]
    module, _, name = constant.partition(":")
    value = getattr(_module(module), name)
    return [f"{constant}={type(value)(by * value)}" for by in (0.5, 2)]


def measured(changed: str, patterns: Sequence[str], seeds: int) -> dict[tuple[str, str], list[float]]:
    """Returns the costs by scenario and kind, one per seed."""
    costs: dict[tuple[str, str], list[float]] = defaultdict(list)
    for name, scenario in _module("bench.constants.scenarios", changed).SCENARIOS.items():
        for seed in range(1, 1 + seeds * any(fnmatch(name, pattern) for pattern in patterns)):
            for kind, cost in scenario(seed).items():
                costs[name, kind].append(cost)
    return costs


def compared(usual: list[float], other: list[float], kind: str) -> tuple[float, float, float]:
    """Returns the mean ratio of costs less 1 (of lost budgets: the difference), its spread, and the spread of seeds."""
    before, after = np.array(usual), np.array(other)
    if kind == "lost":
        return float(np.mean(after - before)), float(np.std(after - before)), float(np.std(before))
    ratio = after / np.maximum(before, 1e-9)
    return float(np.mean(ratio)) - 1.0, float(np.std(ratio)), float(np.std(before) / max(np.mean(before), 1e-9))


@click.command()
@click.argument("constants", nargs=-1)
@click.option("--only", multiple=True, default=PATTERNS, show_default=True, help="Scenarios, by pattern.")
@click.option("--seeds", default=2, show_default=True, type=click.IntRange(1))
@click.option("--processes", default=2, show_default=True)
@click.option("--smoke", is_flag=True, help="Check that the bench runs: seconds, one constant and scenario.")
def main(constants: tuple[str, ...], only: tuple[str, ...], seeds: int, processes: int, smoke: bool) -> None:
    """Compare costs of half and double the value of constants, such as edge.cache.policy:NEARLY_SURE."""
    if smoke:
        constants, only, seeds = ("edge.uplink.flow_control:QUEUE_S",), ("link/small",), 1
    rows = []
    # Each task has a process of its own, which imports the product: only there are its constants changed.
    with get_context("fork").Pool(processes, maxtasksperchild=1) as pool:
        changes = [change for constant in constants for change in pool.apply(variants, (constant,))]
        usual, *results = pool.map(partial(measured, patterns=only, seeds=seeds), ["", *changes], 1)
    for change, costs in zip(changes, results, strict=True):
        click.echo(change)
        for (name, kind), other in costs.items():
            ratio, spread, of_seeds = compared(usual[name, kind], other, kind)
            rows.append({"change": change, "scenario": name, "cost": kind, "ratio": ratio, "seeds": of_seeds})
            if abs(ratio) > SHOWN:
                click.echo(f"  {name:26} {kind:10} {ratio:+7.1%} ± {spread:.1%}   seeds ± {of_seeds:.1%}")
    store_result(OUT / "constants.json", rows)


if __name__ == "__main__":
    main()
