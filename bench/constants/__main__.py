"""`python -m bench.constants MODULE:NAME…`: what half and double the value of a constant cost.

Each value runs the scenarios (`bench.constants.scenarios`) in a process of its own. A hook replaces the assignment in
the source, so that what is derived from the constant follows. Costs are ratios to the value as it is: their mean over
seeds, their spread, and the spread of the cost as it is over the seeds. `MODULE:NAME=VALUE` gives a value, such as the
one that turns a mechanism off. Several with semicolons are changed together. All is in bench/out/constants.json.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Sequence
from fnmatch import fnmatch
from functools import partial
from importlib import abc, import_module, machinery, util
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


class _Changed(machinery.SourceFileLoader):
    """Loads a module with other values of its constants."""

    values: dict[str, str]

    def get_code(self, fullname: str) -> CodeType:
        tree = ast.parse(Path(self.path).read_bytes())
        found = set()
        for node in tree.body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            for at, name in enumerate(n.id for n in names if isinstance(n, ast.Name)):
                if name in self.values and isinstance(node, ast.Assign | ast.AnnAssign):
                    value = ast.parse(self.values[name], mode="eval").body
                    if len(names) > 1 and isinstance(node.value, ast.Tuple):
                        node.value.elts[at] = value
                    else:
                        node.value = value
                    found.add(name)
        assert found == self.values.keys(), f"{fullname}: {self.values.keys() - found} is no constant"
        return compile(ast.fix_missing_locations(tree), self.path, "exec")


class _Finder(abc.MetaPathFinder):
    def __init__(self, changes: dict[str, dict[str, str]]) -> None:
        self._changes = changes

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> machinery.ModuleSpec | None:
        if fullname not in self._changes or path is None:
            return None
        file = Path(path[0]) / f"{fullname.rpartition('.')[2]}.py"
        loader = _Changed(fullname, str(file))
        loader.values = self._changes[fullname]
        return util.spec_from_file_location(fullname, file, loader=loader)


def _module(name: str, changed: str = "") -> Any:
    """Imports a module of the product or of this bench, with changed constants."""
    changes: dict[str, dict[str, str]] = defaultdict(dict)
    for each in filter(None, changed.split(";")):
        place, _, value = each.partition("=")
        changes[place.partition(":")[0]][place.partition(":")[2]] = value
    sys.meta_path.insert(0, _Finder(changes))
    return import_module(name)


def names(patterns: Sequence[str]) -> list[str]:
    """Returns the scenarios with these patterns."""
    found = _module("bench.constants.scenarios").SCENARIOS
    return [name for name in found if any(fnmatch(name, pattern) for pattern in patterns)]


def variants(constant: str) -> list[str]:
    """Returns the changes of an argument: the one that it names, or half and double."""
    if "=" in constant:
        return [constant]
    module, _, name = constant.partition(":")
    value = getattr(_module(module), name)
    scaled = [[type(v)(v * by) for v in (value if isinstance(value, tuple) else (value,))] for by in (0.5, 2)]
    return [f"{constant}={tuple(v) if isinstance(value, tuple) else v[0]}" for v in scaled]


def measured(changed: str, names: Sequence[str], seeds: int) -> dict[tuple[str, str], list[float]]:
    """Returns the costs by scenario and kind, one per seed."""
    scenarios = _module("bench.constants.scenarios", changed).SCENARIOS
    costs: dict[tuple[str, str], list[float]] = defaultdict(list)
    for name in names:
        for seed in range(1, seeds + 1):
            for kind, cost in scenarios[name](seed).items():
                costs[name, kind].append(cost)
    return costs


def compared(usual: list[float], other: list[float], kind: str) -> tuple[float, float, float]:
    """Returns the mean ratio of costs less 1 (of lost budgets: the difference), its spread, and the spread of seeds."""
    before, after = np.array(usual), np.array(other)
    if kind == "lost":
        return float(np.mean(after - before)), float(np.std(after - before)), float(np.std(before))
    ratio, scale = after / np.maximum(before, 1e-9), float(np.mean(before))
    return float(np.mean(ratio)) - 1.0, float(np.std(ratio)), float(np.std(before)) / max(scale, 1e-9)


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
        scenarios = pool.apply(names, (only,))
        changes = ["", *(change for constant in constants for change in pool.apply(variants, (constant,)))]
        results = pool.imap(partial(measured, names=scenarios, seeds=seeds), changes)
        usual = next(results)
        for change, costs in zip(changes[1:], results, strict=False):
            click.echo(change)
            for (name, kind), other in costs.items():
                ratio, spread, seeds_spread = compared(usual[name, kind], other, kind)
                rows.append({"change": change, "scenario": name, "cost": kind, "ratio": ratio, "spread": spread,
                             "spread_of_seeds": seeds_spread})  # fmt: skip
                if abs(ratio) > SHOWN:
                    click.echo(f"  {name:26} {kind:10} {ratio:+7.1%} ± {spread:.1%}   seeds ± {seeds_spread:.1%}")
    store_result(OUT / "constants.json", rows)


if __name__ == "__main__":
    main()
