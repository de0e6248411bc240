"""The two plots of `docs/explanation/compared.md`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bench.compare.ways import WAYS

NARROWEST_KIB_S = 4
COLOURS = {"script": "tab:grey", "flink": "tab:orange", "spark": "tab:brown", "edgewater": "tab:blue"}


def draw(rows: Sequence[dict[str, Any]], directory: Path) -> Iterator[Path]:
    """Draws latency against bytes on the narrowest link, and latency against the rate of the link.

    Args:
        rows: as `runs.run` returns them; rows without answers are left out.
    """
    answered = [row for row in rows if row["p95_s"] is not None and WAYS[row["way"]].group_by == WAYS["exact"].group_by]
    narrow = [row for row in answered if row["kib_s"] == NARROWEST_KIB_S]
    if narrow:
        yield _save(narrow, directory / "compared-narrow.svg", _latency_by_bytes)
    if len({row["kib_s"] for row in answered}) > 1:
        yield _save(answered, directory / "compared-links.svg", _latency_by_rate)


def _save(rows: Sequence[dict[str, Any]], path: Path, plot: Any) -> Path:
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    plot(axes, rows)
    axes.set_yscale("log")
    axes.set_ylabel("window end → answer at a client, p95, s")
    figure.savefig(path, metadata={"Date": None})
    return path


def _latency_by_bytes(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        way = WAYS[row["way"]]
        axes.scatter(row["bytes"] / 1000, row["p95_s"], color=COLOURS[way.kind])
        error = "exact" if not row["worst_error"] else f"error {100 * row['worst_error']:.2g} %"
        axes.annotate(f"{way.label}\n{error}", (row["bytes"] / 1000, row["p95_s"]), xytext=(4, 4),
                      textcoords="offset points", fontsize=7)  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlabel(f"KB on the wire, all sites and windows, at {NARROWEST_KIB_S} KiB/s a site")


def _latency_by_rate(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    rates = sorted({row["kib_s"] for row in rows}, key=lambda rate: rate or float("inf"))
    for name in dict.fromkeys(row["way"] for row in rows):
        here = {row["kib_s"]: row["p95_s"] for row in rows if row["way"] == name}
        axes.plot([rates.index(rate) for rate in here], list(here.values()), marker=".", label=WAYS[name].label,
                  color=None if WAYS[name].kind == "edgewater" else COLOURS[WAYS[name].kind],
                  linestyle="-" if WAYS[name].kind == "edgewater" else "--")  # fmt: skip
    axes.set_xticks(range(len(rates)), ["no limit" if rate is None else f"{rate:g} KiB/s" for rate in rates])
    axes.set_xlabel("rate of each site's link")
    axes.legend(fontsize=7)
