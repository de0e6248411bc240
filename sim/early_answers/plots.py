"""Plots of runs: how late the answers are and how wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sim.early_answers.engine import WindowOutcome
from sim.early_answers.summary import relative_errors


def plot_runs(runs: Sequence[tuple[dict[str, Any], list[WindowOutcome]]], path: Path) -> None:
    """Distributions of latency (log scale) and of relative error, one line per run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    late, wrong = figure.subplots(1, 2)
    for row, outcomes in runs:
        label = " ".join(str(row[k]) for k in ("algorithm", "delays", "scenario", "measure"))
        latency = np.sort([o.latency_ms for o in outcomes])
        share = (np.arange(len(latency)) + 1) / len(latency)
        late.plot(np.maximum(latency, 0.1), share, label=label)
        error = relative_errors(
            np.array([o.truth for o in outcomes]), np.array([o.estimate for o in outcomes], float)
        ).ravel()
        error = np.sort(error[np.isfinite(error)])
        wrong.plot(error, (np.arange(len(error)) + 1) / max(len(error), 1), label=label)
        wrong.axvline(row["error"], color="grey", lw=0.8, ls=":")
    late.set(xscale="log", xlabel="ms past the window's end", ylabel="windows", title="latency")
    wrong.set(xlabel="relative error", ylabel="windows", title="error")
    wrong.axhline(runs[0][0]["confidence"], color="grey", lw=0.8, ls=":")
    late.legend(fontsize=7)
    figure.savefig(path, dpi=130)
