"""Rows of scheduling runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.scheduling.engine import Experiment, RunOutcome


def summarise(experiment: Experiment, outcome: RunOutcome) -> dict[str, Any]:
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
