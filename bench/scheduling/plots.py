"""The thesis' figures 3.4 to 3.9, with the numbers of our runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from bench.scheduling.cells import POINTS, Row


def draw(rows: Sequence[Row], directory: Path) -> Iterator[Path]:
    load = [r for r in rows if r["part"] == "load" and r["costs"] == "equal"]
    ysb = [r for r in load if r["benchmark"] == "ysb" and r["delays"] == "uniform"]
    others = [(b, d) for b in ("lrb", "nyt") for d in ("uniform", "zipf")]
    mean = _by("queries", "latency_ms_mean", 1e-3)
    panels = {
        "3.4": [("YSB: mean latency, s", ysb, mean), ("YSB: latency", ysb, _cdf)],
        "3.5": [("YSB: slowdown", ysb, _by("queries", "slowdown")),
                ("YSB: records/s", ysb, _by("queries", "throughput"))],
        "3.6": [(f"{b}, {d}: mean latency, s", _of(load, b, d), mean) for b, d in others],
        "3.7": [(f"{b}: latency", _of(load, b, "uniform"), _cdf) for b in ("lrb", "nyt")],
        "3.8": [("80 queries: mean latency, s", [r for r in rows if r["part"] == "nodes"],
                 _by("nodes", "latency_ms_mean", 1e-3))],
        "3.9": [("inside the interval", [r for r in rows if r["part"] == "accuracy"], _accuracy),
                ("CPU of the scheduler", [r for r in rows if r["part"] == "overhead"], _by("queries", "overhead"))],
    }  # fmt: skip
    for figure, parts in panels.items():
        shown = [part for part in parts if part[1]]
        if shown:
            path = directory / f"scheduling-{figure.replace('.', '-')}.svg"
            fig = Figure(figsize=(5 * len(shown), 4), layout="constrained")
            axes = fig.subplots(1, len(shown), squeeze=False)
            for each, (title, data, plot) in zip(axes[0], shown, strict=True):
                plot(each, data)
                each.set_title(title)
                each.legend(fontsize=7)
            fig.savefig(path)
            yield path


def _of(rows: Sequence[Row], benchmark: str, delays: str) -> list[Row]:
    return [r for r in rows if r["benchmark"] == benchmark and r["delays"] == delays]


def _by(x: str, y: str, scale: float = 1.0) -> Callable[[Any, Sequence[Row]], None]:
    def plot(axes: Any, rows: Sequence[Row]) -> None:
        for policy in dict.fromkeys(r["policy"] for r in rows):
            here = [r for r in rows if r["policy"] == policy and r[y] is not None]
            axes.plot([r[x] for r in here], [r[y] * scale for r in here], marker=".", label=policy)
        axes.set_xlabel(x)
        if y != "throughput":
            axes.set_yscale("log")

    return plot


def _cdf(axes: Any, rows: Sequence[Row]) -> None:
    """At the first load past capacity, or the highest one."""
    past = [r["queries"] for r in rows if r["load"] > 1] or [r["queries"] for r in rows]
    for row in rows:
        if row["queries"] == min(past):
            axes.plot(np.maximum(row["distribution"], 0.1), np.linspace(0, 1, POINTS), label=row["policy"])
    axes.set_xscale("log")
    axes.set_xlabel(f"ms, {min(past)} queries")


def _accuracy(axes: Any, rows: Sequence[Row]) -> None:
    for delays in dict.fromkeys(r["delays"] for r in rows):
        here = [r for r in rows if r["delays"] == delays]
        axes.plot([r["confidence"] for r in here], [r["empirical"] for r in here], marker=".", label=delays)
        axes.plot(
            [r["confidence"] for r in here], [r["normal, as printed"] for r in here], ls=":", label=f"{delays}, printed"
        )
    axes.plot([0.6, 1], [0.6, 1], color="grey", lw=0.6)
    axes.set_xlabel("confidence")
