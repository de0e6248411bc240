"""Plots of the latency and the error of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sim.early_answers.engine import WindowOutcome
from sim.early_answers.summary import relative_errors


def plot_runs(runs: Sequence[tuple[dict[str, Any], list[WindowOutcome]]], path: Path) -> None:
    """Plots the distributions of latency (log scale) and relative error, one line per run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    latency_axes, error_axes = figure.subplots(1, 2)
    for row, outcomes in runs:
        label = " ".join(str(row[k]) for k in ("algorithm", "delays", "scenario", "measure"))
        latency = np.sort([o.latency_ms for o in outcomes])
        share = (np.arange(len(latency)) + 1) / len(latency)
        latency_axes.plot(np.maximum(latency, 0.1), share, label=label)
        error = relative_errors(
            np.array([o.truth for o in outcomes]), np.array([o.estimate for o in outcomes], float)
        ).ravel()
        error = np.sort(error[np.isfinite(error)])
        error_axes.plot(error, (np.arange(len(error)) + 1) / max(len(error), 1), label=label)
        error_axes.axvline(row["error"], color="grey", lw=0.8, ls=":")
    latency_axes.set(xscale="log", xlabel="ms after the window's end", ylabel="windows", title="latency")
    error_axes.set(xlabel="relative error", ylabel="windows", title="error")
    error_axes.axhline(runs[0][0]["confidence"], color="grey", lw=0.8, ls=":")
    latency_axes.legend(fontsize=7)
    figure.savefig(path, dpi=130)
