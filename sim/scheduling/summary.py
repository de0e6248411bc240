"""Rows and tables of scheduling runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sim.scheduling.engine import Experiment, Outcome

_COLUMNS = (
    ("policy", "policy", "{}"),
    ("latency_ms_mean", "ms mean", "{:.1f}"),
    ("latency_ms_p90", "ms p90", "{:.1f}"),
    ("latency_ms_p99", "ms p99", "{:.1f}"),
    ("window_ms_mean", "window mean", "{:.1f}"),
    ("window_ms_p99", "window p99", "{:.1f}"),
    ("throughput", "records/s", "{:.0f}"),
    ("slowdown", "slowdown", "{:.1f}"),
    ("memory_peak", "bytes peak", "{:.0f}"),
    ("windows", "windows", "{}"),
)


def summarise(experiment: Experiment, outcome: Outcome) -> dict[str, Any]:
    """Returns one row; latencies are None if no window was emitted."""
    return {
        "policy": experiment.policy,
        **_distribution("latency_ms", outcome.latency_ms),
        **_distribution("window_ms", outcome.window_latency_ms),
        "throughput": outcome.records / outcome.seconds,
        "slowdown": float(np.mean(outcome.slowdown)) if outcome.slowdown else None,
        "memory_peak": int(outcome.memory_peak),
        "windows": len(outcome.latency_ms),
    }


def _distribution(name: str, values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {f"{name}_{figure}": None for figure in ("mean", "p90", "p99")}
    p90, p99 = np.quantile(values, [0.9, 0.99])
    return {f"{name}_mean": float(np.mean(values)), f"{name}_p90": float(p90), f"{name}_p99": float(p99)}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Formats rows as a table for the terminal."""
    lines = [[title for _, title, _ in _COLUMNS]]
    lines += [["-" if row[key] is None else form.format(row[key]) for key, _, form in _COLUMNS] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_COLUMNS))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines)
