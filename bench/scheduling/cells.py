"""The runs of the bench: the experiments of each part, and the figures of each run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bench.scheduling.engine import Experiment, run
from bench.scheduling.normal_interval import normal_interval, regression_interval
from bench.scheduling.policies import POLICIES
from bench.scheduling.summary import summarise
from bench.scheduling.workload import BENCHMARKS, COSTS, DELAYS, OfferedLoad, draw_delays
from edgewater.scheduling import IngestionHistory

Row = dict[str, Any]

PARTS = ("load", "nodes", "memory", "accuracy", "overhead", "center")
PER_QUERY = 0.94 / 60
"""Share of a core that one query needs: 60 queries are 94 %."""
QUERIES = (10, 40, 60, 70, 100)
NODES = (1, 2, 4, 8)
CAPS_MB = (16, 64, 256)
CONFIDENCES = (0.67, 0.9, 0.95, 0.99)
WITHOUT, REDUCTION = "klink w/o MM", "klink, reduction first"
EPOCHS = 3_000
EVENTS_PER_EPOCH = 50


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a run.

    Attributes:
        seconds: simulated time per run.
        seeds: runs per cell; figures are means over them.
    """

    seconds: float = 120.0
    seeds: int = 2
    queries: tuple[int, ...] = QUERIES
    benchmarks: tuple[str, ...] = BENCHMARKS
    nodes: tuple[int, ...] = NODES
    policies: tuple[str, ...] = tuple(POLICIES)
    caps_mb: tuple[int, ...] = CAPS_MB


@dataclass(frozen=True, slots=True)
class Cell:
    """One row: a part of the bench, an experiment, and the number of seeds."""

    part: str
    experiment: Experiment
    seeds: int
    confidence: float = 0.95


def cells(parts: Sequence[str], size: Size) -> list[Cell]:
    base = OfferedLoad(seconds=size.seconds)
    found = []
    for benchmark in size.benchmarks:
        for costs in COSTS:
            load = replace(base, benchmark=benchmark, costs=costs)
            if "load" in parts:
                found += [
                    Cell("load", Experiment(_of(replace(load, delays=d), q), p), size.seeds)
                    for d in ("uniform", "zipf")
                    for q in size.queries
                    for p in size.policies
                ]
            if "memory" in parts:
                found += [
                    Cell("memory", Experiment(_of(load, 70), p, 1, mb * 1e6, manage, reduction), size.seeds)
                    for mb in size.caps_mb
                    for p, manage, reduction in [
                        *((p, True, False) for p in size.policies),
                        ("klink", False, False),
                        ("klink", True, True),
                    ]
                ]
        if "nodes" in parts:
            load = _of(replace(base, benchmark=benchmark, costs="mixed"), 80)
            found += [Cell("nodes", Experiment(load, p, n), size.seeds) for n in size.nodes for p in size.policies]
    if "overhead" in parts:
        measured = [
            Experiment(_of(base, q), p, measure_overhead=True) for q in (40, 60, 100) for p in ("klink", "fair")
        ]
        found += [Cell("overhead", experiment, size.seeds) for experiment in measured]
    return found


def _of(load: OfferedLoad, queries: int) -> OfferedLoad:
    return replace(load, queries=queries, share=queries * PER_QUERY)


def measure(cell: Cell) -> Row:
    """Runs a cell over its seeds; latencies are the means of the seeds' figures."""
    rows = []
    scheduler_s = busy_s = 0.0
    for seed in range(1, cell.seeds + 1):
        experiment = replace(cell.experiment, load=replace(cell.experiment.load, seed=seed))
        outcome = run(experiment)
        rows.append(summarise(experiment, outcome))
        scheduler_s += outcome.scheduler_s - outcome.clock_calls * _CLOCK_S
        busy_s += outcome.busy_s
    load, policy = cell.experiment.load, cell.experiment.policy
    if not cell.experiment.manage_memory:
        policy = WITHOUT
    elif cell.experiment.reduction_first:
        policy = REDUCTION
    means = {key: _mean([row[key] for row in rows]) for key in rows[0] if key != "policy"}
    return {
        "part": cell.part,
        "policy": policy,
        "benchmark": load.benchmark,
        "delays": load.delays,
        "costs": load.costs,
        "queries": load.queries,
        "load": load.share / cell.experiment.nodes,
        "nodes": cell.experiment.nodes,
        "cycle_ms": cell.experiment.cycle_ms,
        "cap_bytes": cell.experiment.memory_bytes,
        **means,
        "memory_peak": max(row["memory_peak"] for row in rows),
        "overhead": scheduler_s / busy_s if cell.experiment.measure_overhead else None,
    }


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return float(np.mean(present)) if present else None


def _clock_cost_s(calls: int = 20_000) -> float:
    began_s = time.thread_time()
    for _ in range(calls):
        time.thread_time()
    return (time.thread_time() - began_s) / calls


_CLOCK_S = _clock_cost_s()


def accuracy(seeds: int, epochs: int = EPOCHS) -> list[Row]:
    """Returns how often the next ingestion was inside the interval: ours, the thesis' normal form in both variances,
    and its baseline.
    """
    rows: list[Row] = []
    for delays in DELAYS:
        for confidence in CONFIDENCES:
            names = ("empirical", "normal, predictive", "normal, as printed", "linear regression")
            inside = {name: [0, 0] for name in names}
            width = 0.0
            for seed in range(seeds):
                rng = np.random.default_rng([seed, 9])
                drawn = draw_delays(delays, epochs, rng)
                history = IngestionHistory(confidence)
                for delay in drawn.tolist():
                    history.observe(delay)
                    if history.interval is not None:
                        width += history.interval.latest_ms - history.interval.earliest_ms
                _add(inside["empirical"], history.hits, history.predicted)
                _normal(inside, delays, confidence, epochs, np.random.default_rng([seed, 10]))
            shares = {name: hits / trials for name, (hits, trials) in inside.items()}
            width_ms = width / (seeds * epochs)
            rows.append(
                {"part": "accuracy", "delays": delays, "confidence": confidence, "width_ms": width_ms, **shares}
            )
    return rows


def _normal(
    inside: dict[str, list[int]], delays: str, confidence: float, epochs: int, rng: np.random.Generator
) -> None:
    """Counts hits of the normal form and of the regression.

    Delays of an epoch's records and of its sweeping watermark have the same distribution.
    """
    count = min(epochs, 600)
    events = np.array([draw_delays(delays, count, rng) for _ in range(EVENTS_PER_EPOCH)]).T
    watermark = draw_delays(delays, count, rng)
    means, squares = events.mean(axis=1), (events**2).mean(axis=1)
    for name, variance in (("normal, predictive", "predictive"), ("normal, as printed", "printed")):
        hits = 0
        for at in range(20, count):
            first = max(0, at - 400)
            past = means[first:at].tolist(), squares[first:at].tolist()
            hits += normal_interval(*past, confidence, variance).contains(watermark[at])  # type: ignore[arg-type]
        _add(inside[name], hits, count - 20)
    intervals = (
        (regression_interval(list(watermark[max(0, at - 400) : at]), confidence), at) for at in range(20, count)
    )
    _add(inside["linear regression"], sum(each.contains(watermark[at]) for each, at in intervals), count - 20)


def _add(tally: list[int], hits: int, trials: int) -> None:
    tally[0] += hits
    tally[1] += trials
