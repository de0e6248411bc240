"""Summary statistics of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edgewater.arrivals.targets import COUNTS, AccuracyTarget, MeasureKind
from edgewater.synopses import FloatArray
from sim.early_answers.baselines import mean_size
from sim.early_answers.engine import WindowOutcome
from sim.early_answers.workload import Workload


def summarise(outcomes: list[WindowOutcome], target: AccuracyTarget) -> dict[str, Any]:
    """Returns statistics over all windows.

    `coverage`: fraction of windows (with several groups and scope "each": of window-group pairs) whose relative error
    is at most the target's. `interval_coverage`: fraction whose stated interval contains the truth; None if no interval
    is stated. `missed`: fraction of events that arrived too late. `contract_met`: fraction of answers that state that
    the contract is met. `promised`: fraction of groups with events for which the answer has an interval. All other
    statistics exclude the other groups, which are answered when the window is complete, and groups without events.
    """
    truth, estimate = _stack(outcomes, "truth"), _stack(outcomes, "estimate")
    error = relative_errors(truth, estimate)
    good = np.where(np.isnan(error), True, error <= target.error)
    half = _stack(outcomes, "half_width")
    latency = np.array([o.latency_ms for o in outcomes])
    events = sum(o.events for o in outcomes)
    with np.errstate(invalid="ignore", divide="ignore"):
        bias = np.where(truth != 0, (estimate - truth) / truth, np.nan)
    return {
        "coverage": float(good.all(axis=1).mean() if target.scope == "all" else good[~np.isnan(error)].mean()),
        "interval_coverage": _interval_coverage(truth, estimate, half, target),
        "bias": _finite(float(np.nanmean(bias))),
        "error_mean": _finite(float(np.nanmean(error))),
        "error_p95": _finite(float(np.nanquantile(error, 0.95, method="higher"))),
        "error_max": _finite(float(np.nanmax(error))),
        "latency_ms_mean": float(latency.mean()),
        "latency_ms_p95": float(np.quantile(latency, 0.95)),
        "latency_ms_p99": float(np.quantile(latency, 0.99)),
        "sampling_rate": sum(o.processed for o in outcomes) / max(events, 1),
        "missed": sum(o.missed for o in outcomes) / max(events, 1),
        "contract_met": float(np.mean([o.met for o in outcomes])),
        "promised": float(np.mean([o.promised for o in outcomes])),
    }


def relative_errors(truth: FloatArray, estimate: FloatArray) -> FloatArray:
    """Returns |estimate - truth| / |truth|, (windows, groups).

    Infinite for a missing answer, and for a wrong answer if the truth is 0; NaN if the truth is NaN.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.abs(estimate - truth) / np.abs(truth)
    error = np.where(truth == 0, np.where(estimate == 0, 0.0, np.inf), error)
    error = np.where(np.isnan(estimate), np.inf, error)
    return np.asarray(np.where(np.isnan(truth), np.nan, error))


def oracle_rate(workload: Workload, measure: MeasureKind, target: AccuracyTarget, windows: int = 100) -> float:
    """Returns the mean sampling rate of Eq. 4 with the true N, σ and μ of each of the first `windows` windows.

    0 for a count and for an extreme, which no sample estimates.
    """
    if measure in COUNTS:
        return 0.0
    needed = events = 0.0
    for index in range(min(windows, workload.windows)):
        window = workload.window(index)
        for group in range(workload.groups):
            values = window.value[window.group == group] if workload.groups > 1 else window.value
            if len(values) > 1 and values.mean():
                variation = values.std() / abs(values.mean())
                needed += float(mean_size(variation, len(values), target.error, target.group_confidence))
        events += len(window)
    return needed / max(events, 1.0)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Formats rows as a table for the terminal."""
    columns = (
        ("algorithm", "algorithm", "{}"),
        ("delays", "delays", "{}"),
        ("scenario", "scenario", "{}"),
        ("measure", "measure", "{}"),
        ("coverage", "coverage", "{:.3f}"),
        ("interval_coverage", "interval", "{:.3f}"),
        ("bias", "bias", "{:+.4f}"),
        ("error_p95", "err p95", "{:.4f}"),
        ("latency_ms_mean", "ms mean", "{:.1f}"),
        ("latency_ms_p95", "ms p95", "{:.1f}"),
        ("latency_ms_p99", "ms p99", "{:.1f}"),
        ("sampling_rate", "rate", "{:.4f}"),
        ("oracle_rate", "oracle", "{:.4f}"),
        ("missed", "missed", "{:.4f}"),
        ("contract_met", "met", "{:.3f}"),
    )
    lines = [[title for _, title, _ in columns]]
    lines += [["-" if row.get(key) is None else form.format(row[key]) for key, _, form in columns] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines)


def _stack(outcomes: list[WindowOutcome], name: str) -> FloatArray:
    return np.array([getattr(o, name) for o in outcomes], float)


def _interval_coverage(
    truth: FloatArray, estimate: FloatArray, half: FloatArray, target: AccuracyTarget
) -> float | None:
    stated = ~np.isnan(half) & ~np.isnan(truth)
    if not stated.any():
        return None
    holds = np.abs(estimate - truth) <= half * (1 + 1e-9) + 1e-9 * np.abs(truth)
    if target.scope == "all":
        return float((holds | ~stated).all(axis=1).mean())
    return float(holds[stated].mean())


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
