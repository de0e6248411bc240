"""Figures 6 to 14 of the Aion paper, from the rows of `rows.baseline_rows` and `kmeans.kmeans_rows`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from sim.early_answers.workload import DELAYS

_SHOWN = ("edgewater", "aion", "aion-minus", "aq-k-slack", "k-slack")


def draw_figures(result: dict[str, Any], folder: Path) -> None:
    rows = result["baselines"]
    for values, mean_number in (("ysb", 6), ("nyt", 9)):
        mine = [r for r in rows if r["values"] == values]
        _latency_by_delays(
            mine, f"Figure {mean_number}: mean latency, {values}", folder / f"early-answers-figure{mean_number:02}.png"
        )
        _latency_distribution(
            mine,
            f"Figure {mean_number + 1}: latency, {values}, EG",
            folder / f"early-answers-figure{mean_number + 1:02}.png",
        )
        _errors(
            mine,
            f"Figure {mean_number + 2}: relative error, {values}, EG",
            folder / f"early-answers-figure{mean_number + 2:02}.png",
        )
    if result.get("kmeans"):
        _kmeans(result["kmeans"], folder / "early-answers-figure12-14.png")


def _is(row: dict[str, Any], algorithm: str, delays: str, rate: float) -> bool:
    return (row["algorithm"], row["delays"], row["rate"]) == (algorithm, delays, rate)


def _latency_by_delays(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for place, algorithm in enumerate(_SHOWN):
        heights = [
            next((r["latency_ms_mean"] for r in rows if _is(r, algorithm, d, 5000.0)), np.nan) for d in DELAYS
        ]  # fmt: skip
        axes.bar(np.arange(len(DELAYS)) + (place - 2) * 0.16, np.maximum(heights, 0.5), 0.16, label=algorithm)
    axes.set(
        xticks=range(len(DELAYS)), xticklabels=DELAYS, yscale="log", ylabel="ms after the window's end", title=title
    )
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def _latency_distribution(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, rate in zip(figure.subplots(1, 2), (5000.0, 25_000.0), strict=True):
        for algorithm in _SHOWN:
            row = next((r for r in rows if (r["algorithm"], r["delays"], r["rate"]) == (algorithm, "EG", rate)), None)
            if row:
                latency = np.sort(row["latencies_ms"])
                axes.plot(np.maximum(latency, 0.5), (np.arange(len(latency)) + 1) / len(latency), label=algorithm)
        axes.set(xscale="log", xlabel="ms after the window's end", ylabel="windows", title=f"{title}, {rate:.0f}/s")
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def _errors(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    chosen = [
        r
        for r in rows
        if r["delays"] == "EG" and r["rate"] == max(x["rate"] for x in rows) and r["algorithm"] in _SHOWN
    ]
    axes.boxplot([r["errors"] for r in chosen], tick_labels=[r["algorithm"] for r in chosen])
    axes.axhline(0.05, color="grey", ls=":")
    axes.set(ylabel="relative error", title=title)
    figure.savefig(path, dpi=120)


def _kmeans(rows: list[dict[str, Any]], path: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    labels = [f"{r['size']}\nrate {r['sampling_rate']:.3f}, within 5 %: {r['centroid_coverage']:.0%}" for r in rows]
    axes.boxplot([r["centroid_errors"] for r in rows], tick_labels=labels)
    axes.axhline(0.05, color="grey", ls=":")
    axes.set(ylabel="worst centroid's relative error", title="Figures 12-14: k-means, sample size by its own error")
    figure.savefig(path, dpi=120)
