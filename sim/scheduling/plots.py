"""Plots of the latency of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np


def plot_latency(latency_ms: Mapping[str, Sequence[float]], path: Path) -> None:
    """Plots the distribution of latency (log scale), one line per policy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for policy, values in latency_ms.items():
        ascending = np.sort(values)
        axes.plot(np.maximum(ascending, 0.1), (np.arange(len(ascending)) + 1) / max(len(ascending), 1), label=policy)
    axes.set(xscale="log", xlabel="ms from the watermark's arrival", ylabel="windows", title="latency")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130)
