"""The verdicts of `bench.scheduling` can be negative."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bench.scheduling.goals import verdicts
from bench.scheduling.normal_interval import normal_interval


def row(part: str, policy: str, mean: float, p99: float, **more: Any) -> dict[str, Any]:
    cell = {"benchmark": "ysb", "delays": "zipf", "costs": "equal", "queries": 60, "nodes": 1, "cap_bytes": None}
    figures = {"latency_ms_mean": mean, "latency_ms_p99": p99, "load": 0.94}
    return {"part": part, "policy": policy, **figures, **cell, **more}


@pytest.mark.parametrize(
    ("rows", "kept"),
    [
        ([row("load", "klink", 1, 25), row("load", "fair", 1, 100)], True),
        ([row("load", "klink", 1, 26), row("load", "fair", 1, 100)], False),
        ([row("load", "klink", 104, 200, load=1.1), row("load", "edf", 100, 100, load=1.1)], True),
        ([row("load", "klink", 106, 106, load=1.1), row("load", "edf", 100, 100, load=1.1)], False),
        ([row("memory", "edf", 1, 1, cap_bytes=10, memory_peak=10)], True),
        ([row("memory", "edf", 1, 1, cap_bytes=10, memory_peak=11)], False),
        ([{"part": "accuracy", "confidence": 0.95, "empirical": 0.955}], True),
        ([{"part": "accuracy", "confidence": 0.95, "empirical": 0.93}], False),
        ([{"part": "overhead", "policy": "klink", "overhead": 0.004}], True),
        ([{"part": "overhead", "policy": "klink", "overhead": 0.006}], False),
    ],
)
def test_each_goal_is_judged(rows: list[dict[str, Any]], kept: bool) -> None:
    (line,) = verdicts(rows)
    assert line.startswith("kept: " if kept else "MISSED: ")


def test_the_printed_variance_misses_what_the_predictive_one_has() -> None:
    rng = np.random.default_rng(3)
    epochs = rng.uniform(0, 1000, (100, 50))
    means, squares = epochs.mean(axis=1).tolist(), (epochs**2).mean(axis=1).tolist()
    printed = normal_interval(means, squares, 0.95, "printed")
    predictive = normal_interval(means, squares, 0.95)
    drawn = rng.uniform(0, 1000, 4_000)

    assert np.mean([printed.contains(d) for d in drawn]) < 0.2
    assert np.mean([predictive.contains(d) for d in drawn]) >= 0.95
