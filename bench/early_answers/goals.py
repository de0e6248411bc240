"""Goals for coverage, sampling rate and latency, and their check."""

from __future__ import annotations

import math
from typing import Any

from center.early import RATE_MARGIN

MOST_RATE = 1.1 * RATE_MARGIN
"""Largest sampling rate relative to the oracle's. Edges sample with a margin, because they do not store the other
records."""


def least_coverage(confidence: float, trials: int) -> float:
    """Returns the lower end of the binomial 99 % band around `confidence`."""
    return confidence - 2.576 * math.sqrt(confidence * (1 - confidence) / trials)


def check_goals(result: dict[str, Any]) -> list[str]:
    """Returns a sentence for each missed goal and row."""
    missed = []
    for name in ("goals", "robustness", "unsampled", "recorded", "sliding"):
        for row in (r for r in result.get(name, []) if r["algorithm"] == "edgewater"):
            case = " ".join(str(row.get(k)) for k in ("scenario", "delays", "measure", "values", "groups", "scope"))
            overlap = row["window_ms"] // (row.get("every_ms") or row["window_ms"])
            windows = row.get("windows_had", row["windows"]) // overlap
            if row["coverage"] < least_coverage(row["confidence"], windows):
                missed.append(f"coverage {row['coverage']:.3f}: {case}")
            if row["sampling"] and row["oracle_rate"] and row["sampling_rate"] > MOST_RATE * row["oracle_rate"]:
                missed.append(f"rate {row['sampling_rate'] / row['oracle_rate']:.2f} of the oracle's: {case}")
    return missed + _against_baselines(result.get("baselines", []))


def _against_baselines(rows: list[dict[str, Any]]) -> list[str]:
    missed = []
    latency = {(r["algorithm"], r["values"], r["delays"], r["rate"]): r["latency_ms_mean"] for r in rows}
    for (algorithm, *key), ours in latency.items():
        if algorithm != "edgewater" or key[1] not in ("EC", "EG"):
            continue
        for baseline, share in (("k-slack", 0.02), ("aq-k-slack", 0.1)):
            theirs = latency.get((baseline, *key))
            if theirs and ours > share * theirs:
                missed.append(f"latency {ours:.1f} ms is {ours / theirs:.1%} of {baseline}'s: {key}")
    return missed
