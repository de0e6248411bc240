"""The cells of the benchmark: a policy under a budget, on a trace and a link."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.budgets.workload import BudgetsSize, work
from edgewater.model.caching import CacheSpec
from sim.budgets.experiment import SimulatedPolicy, run
from sim.budgets.link import SimulatedLink
from sim.budgets.outcome import truth_per_window

BANDWIDTHS = {"low": 1.0, "medium": 3.0, "high": 10.0}
"""Bandwidths as multiples of a base. The base is half of the updates that exact results need at the optimum, which is
one per group and window."""
BUDGETS = {"error": (0.0, 1e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3), "staleness": (0.003, 0.01, 0.03, 0.1, 0.3)}
SMOKE = {"error": (3e-5,), "staleness": (0.03,)}
WARM_UP = 2
"""Windows at the start that are excluded, because edges have no history yet."""
UPDATE_BYTES = 32.0
DEFAULT = SimulatedPolicy("caching")
OPTIMAL = SimulatedPolicy("optimal")
BASELINES = (SimulatedPolicy("streaming"), SimulatedPolicy("batching"), SimulatedPolicy("random"))
EVICTIONS = tuple(SimulatedPolicy("caching", CacheSpec(e)) for e in ("lru", "spe", "mae", "rate"))
SIZINGS = tuple(
    SimulatedPolicy("caching", CacheSpec("lru", s, e))
    for s in ("prev_window", "linear", "pure_pess")
    for e in ("acc", "explicit")
)
PAPER = {"error": EVICTIONS[0], "staleness": SIZINGS[0]}
"""The policies that TR 16-003 recommends: LRU; LRU, PrevWindow and Acc."""
PARTS = ("policies", "comparison", "frontier")


@dataclass(frozen=True, slots=True)
class Setting:
    """The setting in which policies are compared."""

    trace: str
    aggregate: str
    bandwidth: str
    kind: str


@dataclass(frozen=True, slots=True)
class Cell:
    """One run, with everything that a worker process needs."""

    setting: Setting
    budget: float
    policy: SimulatedPolicy
    size: BudgetsSize

    @property
    def label(self) -> str:
        cache = self.policy.cache
        if self.policy.name != "caching":
            return self.policy.name
        if self.setting.kind == "error":
            return cache.eviction
        return f"{cache.eviction}/{cache.sizing}/{cache.estimate}" if cache.sizing != "target" else cache.eviction


def measure(cell: Cell) -> dict[str, Any]:
    """Runs a cell; returns its row, with staleness in windows and error relative to the largest value of a group."""
    setting, began = cell.setting, time.process_time()
    workload = work(setting.trace, cell.size)
    truth = truth_per_window(workload.trace, workload.query(setting.aggregate))
    groups = float(np.mean([np.isfinite(w).sum() for w in truth.values()]))
    largest = max(float(np.nanmax(np.abs(w), initial=0.0)) for w in truth.values())
    slots = BANDWIDTHS[setting.bandwidth] * groups / 2.0
    link = SimulatedLink(slots * UPDATE_BYTES / (workload.window_ms / 1000.0), bytes_per_update=UPDATE_BYTES)
    amount = cell.budget * largest if setting.kind == "error" else cell.budget
    query = workload.query(setting.aggregate, setting.kind, amount)
    out = run(workload.trace, [workload.trace], query, link, cell.policy)
    return {
        "trace": setting.trace, "aggregate": setting.aggregate, "bandwidth": setting.bandwidth, "kind": setting.kind,
        "budget": cell.budget, "label": cell.label, "windows": cell.size.windows,
        "seed": cell.size.seed,
        "staleness_p95": out.staleness_p95(WARM_UP), "error_p95": out.error_p95(WARM_UP),
        "staleness": out.staleness.tolist(), "error": out.relative_error.tolist(),
        "updates_per_window": out.updates / len(truth), "groups_per_window": groups, "slot": 1.0 / slots,
        "cpu_s_per_window": (time.process_time() - began) / len(truth),
    }  # fmt: skip


def policies_of(part: str, setting: Setting) -> Sequence[SimulatedPolicy]:
    """Returns the policies of a figure."""
    match part:
        case "frontier":
            return OPTIMAL, DEFAULT
        case "policies":
            return OPTIMAL, DEFAULT, *(EVICTIONS if setting.kind == "error" else SIZINGS)
        case _:
            return OPTIMAL, *BASELINES, PAPER[setting.kind], DEFAULT


def settings_of(part: str, trace: str) -> Iterator[Setting]:
    """Yields the settings of a figure.

    Figures 8 to 10 have sums at low bandwidth, 11 and 13 all aggregates at low bandwidth, 12 and 14 sums at other
    bandwidths.
    """
    for kind in ("error", "staleness"):
        for bandwidth in ("low",) if part == "policies" else BANDWIDTHS:
            aggregates = ("sum", "max", "count") if part == "comparison" and bandwidth == "low" else ("sum",)
            for aggregate in aggregates:
                yield Setting(trace, aggregate, bandwidth, kind)


def cells(
    parts: Sequence[str], traces: Sequence[str], size: BudgetsSize, budgets: Mapping[str, Sequence[float]]
) -> list[Cell]:
    """Returns the runs of all figures, each once; `budgets`: kind -> values."""
    runs: dict[Cell, None] = {}
    for part in parts:
        for trace in traces:
            for setting in settings_of(part, trace):
                for budget in budgets[setting.kind]:
                    for policy in policies_of(part, setting):
                        runs[Cell(setting, budget, policy, size)] = None
    return list(runs)
