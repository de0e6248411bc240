"""The figures: 3 (optimal trade-off), 4 and 5 (window by window), 8 to 14 (comparison of policies)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt

from bench.budgets.tables import Row, by_setting, figure_of


def draw(part: str, rows: Sequence[Row], directory: Path) -> Iterator[Path]:
    """Writes one file per trace (figure 3) or per setting."""
    if part == "fig3":
        for trace in dict.fromkeys(r["trace"] for r in rows):
            yield _save(directory / f"budgets-fig3-{trace}.png", _trade_off, [r for r in rows if r["trace"] == trace])
        return
    figure = _windows if part in ("fig4", "fig5") else _curves
    for key, here in by_setting(rows).items():
        yield _save(directory / f"budgets-{part}-{'-'.join(key)}.png", figure, here)


def _save(path: Path, figure: Any, rows: Sequence[Row]) -> Path:
    fig, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    figure(axes, rows)
    axes.set_title(path.stem)
    fig.savefig(path, dpi=110)
    plt.close(fig)
    return path


def _trade_off(axes: Any, rows: Sequence[Row]) -> None:
    for bandwidth in dict.fromkeys(r["bandwidth"] for r in rows):
        here = [r for r in rows if r["bandwidth"] == bandwidth]
        axes.plot([r["error_p95"] for r in here], [r["staleness_p95"] for r in here], marker="o", label=bandwidth)
    axes.set_xscale("symlog", linthresh=1e-6)
    axes.set_yscale("symlog", linthresh=1e-4)
    axes.set_xlabel("error, share of the largest value")
    axes.set_ylabel("staleness, windows")
    axes.legend()


def _windows(axes: Any, rows: Sequence[Row]) -> None:
    shown = figure_of(rows[0]["kind"]).removesuffix("_p95")
    for row in rows:
        axes.plot(row[shown], marker=".", label=f"{row['budget']:g}")
    axes.set_yscale("symlog", linthresh=1e-4 if shown == "staleness" else 1e-7)
    axes.set_xlabel("window")
    axes.set_ylabel(shown)
    axes.legend(title=f"{rows[0]['kind']} budget")


def _curves(axes: Any, rows: Sequence[Row]) -> None:
    kind = rows[0]["kind"]
    for label in dict.fromkeys(r["label"] for r in rows):
        here = [r for r in rows if r["label"] == label]
        axes.plot([r["budget"] for r in here], [r[figure_of(kind)] for r in here], marker="o", label=label)
    axes.set_xscale("symlog", linthresh=1e-6 if kind == "error" else 1e-3)
    axes.set_yscale("symlog", linthresh=1e-5 if kind == "error" else 1e-7)
    axes.set_xlabel(f"{kind} budget")
    axes.set_ylabel(figure_of(kind))
    axes.legend()
