"""`python -m bench.synopses [--smoke]`: tables, bench/out/synopses.json and plots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from bench.synopses.characterize import CURVES, characterize
from bench.synopses.errors import TRIALS, errors
from bench.synopses.speed import SMOKE, SpeedSize, merging, throughput

OUT = Path("bench/out")
IMAGES = Path("docs/explanation/images")
PARTS = ("throughput", "merge", "error", "characterize")


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
    if only in (None, "merge"):
        result["merge"] = merging(size)
    if only in (None, "error"):
        result["error"] = errors(1 if smoke else TRIALS)
    for name in ("throughput", "merge", "error"):
        if name in result and only in (None, name):
            click.echo(f"\n{name}\n{table(result[name])}")
    if only in (None, "characterize"):
        result["characterize"] = characterize(trials, largest, images, points, CURVES[:1] if smoke else CURVES)
        click.echo(f"plots in {images}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    if {"throughput", "merge"} & result.keys():
        plot(result, path.with_suffix(".svg"))


def table(rows: list[dict[str, Any]]) -> str:
    """Formats rows as text; marks ratios that miss their goal."""
    names = list(rows[0])
    cells = [["" if row[n] is None else str(row[n]) + _mark(row, n) for n in names] for row in rows]
    widths = [max(len(c) for c in column) for column in zip(names, *cells, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in [names, *cells])


def _mark(row: dict[str, Any], name: str) -> str:
    if name == "ratio":
        # Higher is better for speeds, lower for errors.
        missed = row["ratio"] > row["goal_ratio"] if "error" in row else row["ratio"] < row["goal_ratio"]
        return " !" if missed else ""
    goal = row.get("goal_m_per_s") if name == "ours_m_per_s" else None
    return " !" if goal and row[name] < goal else ""


def plot(result: dict[str, Any], path: Path) -> None:
    """Returns ratios to the peer, with their goals."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = [(f"update {r['synopsis']}, {r['cores']} core(s)", r) for r in result.get("throughput", [])]
    rows += [(f"merge 1,000: {r['synopsis']}", r) for r in result.get("merge", [])]
    rows = [(label, r) for label, r in rows if r["ratio"] is not None][::-1]
    figure, axis = plt.subplots(figsize=(9, 0.32 * len(rows) + 1.2), layout="constrained")
    colors = ["C0" if r["ratio"] >= r["goal_ratio"] else "C3" for _, r in rows]
    axis.barh([label for label, _ in rows], [r["ratio"] for _, r in rows], color=colors)
    axis.plot([r["goal_ratio"] for _, r in rows], range(len(rows)), "k|", ms=12, label="goal")
    axis.set_xscale("log")
    axis.set_xlabel("times as fast as the peer")
    axis.legend()
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    main()
