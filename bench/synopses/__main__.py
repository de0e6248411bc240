"""`python -m bench.synopses [--smoke]`: tables, bench/out/synopses.json, and the plots of a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from bench.outcome import OUT, store_result
from bench.synopses.characterize import CURVES, characterize
from bench.synopses.speed import SMOKE, SpeedSize, throughput

IMAGES = Path("docs/explanation/images")
PARTS = ("throughput", "characterize")


@click.command()
@click.option("--only", type=click.Choice(PARTS), help="Part to run.  [default: all]")
@click.option("--json", "path", type=click.Path(path_type=Path), default=OUT / "synopses.json", show_default=True)
@click.option("--trials", default=200, show_default=True, help="Trials per point of a characterisation.")
@click.option("--largest", default=100_000, show_default=True, help="The largest n of a characterisation.")
@click.option("--images", type=click.Path(path_type=Path), default=IMAGES, show_default=True)
@click.option(
    "--smoke", is_flag=True, help="Check that the bench runs: seconds, on few values, plots beside the JSON file."
)
def main(only: str | None, path: Path, trials: int, largest: int, images: Path, smoke: bool) -> None:
    """Compare synopses with Apache DataSketches and ddsketch."""
    size, points = (SMOKE, 2) if smoke else (SpeedSize(), 9)
    if smoke:
        trials, largest, images = 1, 200, path.parent
    result: dict[str, Any] = json.loads(path.read_text()) if only and path.exists() else {}
    if only in (None, "throughput"):
        result["throughput"] = [row for cores in ((1,) if smoke else (1, 2)) for row in throughput(cores, size)]
        click.echo(f"throughput\n{table(result['throughput'])}")
    if only in (None, "characterize"):
        result["characterize"] = characterize(trials, largest, images, points, CURVES[:1] if smoke else CURVES)
        click.echo(f"plots in {images}")
    store_result(path, result)


def table(rows: list[dict[str, Any]]) -> str:
    """Formats rows as text; marks ratios that miss their goal."""
    names = list(rows[0])
    cells = [["" if row[n] is None else str(row[n]) + _mark(row, n) for n in names] for row in rows]
    widths = [max(len(c) for c in column) for column in zip(names, *cells, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in [names, *cells])


def _mark(row: dict[str, Any], name: str) -> str:
    if name == "ratio":
        return " !" if row["ratio"] < row["goal_ratio"] else ""
    goal = row.get("goal_m_per_s") if name == "ours_m_per_s" else None
    return " !" if goal and row[name] < goal else ""


if __name__ == "__main__":
    main()
