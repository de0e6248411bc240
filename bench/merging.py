"""`python -m bench.merging [--smoke]`: merging the partials of a window, as one stack and one by one.

Per row: CPU time of `GroupedAggregate.merge_bytes` per partial, and bytes of partials per second. The partials are read
as one stack of all their groups, and one after the other. Both ways give equal bytes, which is checked. Times are the
minimum of several alternating runs in one process.

The last row is a roll-up: the windows of a day, one a minute, merged to one interval.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa

from bench.outcome import OUT, store_result
from edgewater.model.measure import Measure
from edgewater.synopses import GroupedAggregate

GROUPS, PARTIALS = (10, 170, 10_000), 32
ROLLUP_WINDOWS, ROLLUP_GROUPS = 1_440, 1_000
MEASURES: dict[str, dict[str, str]] = {
    "count, sum": {"n": "count()", "total": "sum(amount)"},
    "count, sum, min, max, mean": {
        "n": "count()",
        "total": "sum(amount)",
        "least": "min(value)",
        "most": "max(value)",
        "average": "mean(value)",
    },
    "hyperloglog 2^12": {"users": "distinct(amount, precision=12)"},
    "ddsketch 1 %": {"delays": "quantiles(value)"},
}


def partial(measures: dict[str, str], groups: int, seed: int) -> bytes:
    """Returns the partial that an edge ships; for sketches, with ten records per group."""
    parsed = {name: Measure.parse(name, text) for name, text in measures.items()}
    rng = np.random.default_rng(seed)
    rows = groups if "n" in measures else 10 * groups
    columns = {"amount": pa.array(rng.integers(0, 1 << 40, rows)), "value": pa.array(rng.lognormal(3, 1, rows))}
    stacks = {n: m.stack(columns[m.argument].type if m.argument else None) for n, m in parsed.items()}
    aggregate = GroupedAggregate({"key": pa.string()}, stacks)
    keys = pa.array([f"key-{i:05d}" for i in rng.permutation(rows) % groups])
    aggregate.update([keys], {n: columns[m.argument] if m.argument else None for n, m in parsed.items()}, rows)
    return aggregate.take(np.arange(len(aggregate))).to_bytes()


def seconds(merge: Callable[[list[bytes]], bytes], partials: list[bytes]) -> tuple[float, bytes]:
    """Returns the CPU time of a merge, and its bytes."""
    began = time.process_time()
    merged = merge(partials)
    return time.process_time() - began, merged


def cell(name: str, groups: int, count: int, repeats: int) -> dict[str, Any]:
    partials = [partial(MEASURES[name], groups, seed) for seed in range(count)]
    ways: dict[str, Callable[[list[bytes]], bytes]] = {
        "stacked": GroupedAggregate.merge_bytes,
        "one_by_one": GroupedAggregate.merge_one_by_one,
    }
    took, merged = dict.fromkeys(ways, float("inf")), set()
    for _ in range(repeats):  # alternating, so that conditions are equal
        for way, merge in ways.items():
            spent, data = seconds(merge, partials)
            took[way] = min(took[way], spent)
            merged.add(data)
    assert len(merged) == 1, f"{name}, {groups} groups: the merges differ"
    size = sum(map(len, partials))
    return {
        "measures": name,
        "groups": groups,
        "partials": count,
        "partial_bytes": size // count,
        **{f"{way}_us_per_partial": round(s / count * 1e6, 1) for way, s in took.items()},
        **{f"{way}_mb_s": round(size / s / 1e6, 1) for way, s in took.items()},
        "ratio": round(took["one_by_one"] / took["stacked"], 1),
    }


@click.command()
@click.option("--partials", default=PARTIALS, show_default=True, help="Partials of a window.")
@click.option("--repeats", default=9, show_default=True)
@click.option("--smoke", is_flag=True, help="Check that the bench runs: seconds, few groups.")
@click.option("--json", "path", type=click.Path(path_type=Path), default=OUT / "merging.json", show_default=True)
def main(partials: int, repeats: int, smoke: bool, path: Path) -> None:
    """Measure merging partials."""
    sizes = (3, 10) if smoke else GROUPS
    rows = []
    cells = [(name, groups, partials) for name in MEASURES for groups in sizes]
    cells.append(("count, sum", ROLLUP_GROUPS, PARTIALS if smoke else ROLLUP_WINDOWS))
    for name, groups, count in cells:
        row = cell(name, groups, count, 1 if smoke else max(repeats // (1 + groups // 1000), 3))
        rows.append(row)
        click.echo("  ".join(f"{key} {value}" for key, value in row.items()))
    store_result(path, rows)


if __name__ == "__main__":
    main()
