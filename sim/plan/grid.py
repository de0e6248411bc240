"""Runs all combinations of a plan in parallel processes and returns one row for each."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import pyarrow as pa

from edgewater.model.caching import CacheSpec
from edgewater.model.query import QuerySpec
from sim.budgets.experiment import PolicyName, SimulatedPolicy, run
from sim.budgets.link import SimulatedLink
from sim.budgets.optimal import ROUNDING
from sim.budgets.outcome import PolicyOutcome
from sim.budgets.trace import Trace
from sim.plan.budgets import Kind, PlannedBudget
from sim.wire import experiment as wire

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """The inputs that all combinations share.

    Attributes:
        parts: the records of each edge.
        update_bytes: size of an update on the wire by bandwidth, the same for all policies.
        wire_delay_ms: the policy `caching` runs over modelled connections with this delay in each direction; None: over
            links that carry updates.
    """

    trace: Trace
    parts: list[Trace]
    query: QuerySpec
    seed: int
    update_bytes: dict[int, float]
    wire_delay_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Combination:
    """One run. `cache` applies to the policy `caching` only."""

    policy: PolicyName
    cache: CacheSpec
    bandwidth_bytes_s: int
    budget: PlannedBudget


def combinations(
    policies: Sequence[str], cache: CacheSpec, bandwidths: Sequence[int], budgets: Sequence[PlannedBudget]
) -> list[Combination]:
    """Returns all combinations in the order in which they are printed."""
    return [
        Combination(name, cache if name == "caching" else CacheSpec(), width, budget)
        for width in bandwidths
        for kind in get_args(Kind)
        for name in POLICIES
        if name in policies
        for budget in budgets
        if budget.kind == kind
    ]


def measure(inputs: PlanInputs, combination: Combination) -> Row:
    """Runs one combination and returns its row."""
    measure = inputs.query.measures[0]
    query = replace(inputs.query, budget=combination.budget.for_query(measure.name))
    cost, caching = inputs.update_bytes[combination.bandwidth_bytes_s], combination.policy == "caching"
    on_wire = caching and inputs.wire_delay_ms is not None
    # A combined budget limits bytes too, so the real frames of edges are measured.
    measured = on_wire or (caching and combination.budget.kind == "combined")
    link = SimulatedLink(float(combination.bandwidth_bytes_s), bytes_per_update=None if measured else cost)
    if on_wire:
        link = replace(link, latency_ms=float(inputs.wire_delay_ms or 0))
        done = wire.run(inputs.trace, inputs.parts, replace(query, cache=combination.cache), link)
    else:
        policy = SimulatedPolicy(combination.policy, combination.cache)
        done = run(inputs.trace, inputs.parts, query, link, policy, seed=inputs.seed)
    bound = combination.budget.kind == "staleness"
    return {
        "policy": combination.policy,
        "eviction": combination.cache.eviction if caching else None,
        "estimate": combination.cache.estimate if caching and bound else None,
        "sizing": combination.cache.sizing if caching and bound else None,
        "aggregate": measure.function.name,
        "edges": len(inputs.parts),
        "bandwidth_bytes_s": combination.bandwidth_bytes_s,
        "budget_kind": combination.budget.kind,
        "budget": combination.budget.size,
        "windows": len(done.staleness),
        "staleness_p95": done.staleness_p95(),
        "error_p95": done.error_p95(),
        "bytes": round(done.bytes),
        "budget_amount": combination.budget.amount,
        "staleness_budget_ms": combination.budget.staleness_ms,
        "late_windows": _late_windows(query, done),
        "budget_of_query": combination.budget.of_query,
        "window_ms": query.window.longest_ms,
        "largest_error": float(done.largest.max(initial=0.0)),
        "updates": done.updates,
        "update_bytes": round(done.bytes / max(done.updates, 1), 1) if measured else cost,
        "seed": inputs.seed,
        "wire": on_wire,
    }


def _late_windows(query: QuerySpec, done: PolicyOutcome) -> int | None:
    """Returns how many windows missed the staleness budget; None without a staleness budget."""
    budget = query.staleness_budget
    if budget is None:
        return None
    return int(np.count_nonzero(done.staleness > budget.staleness_ms / query.window.longest_ms * (1 + ROUNDING)))


_inputs: PlanInputs | None = None
"""The inputs in a worker process."""


def _initialise(inputs: PlanInputs) -> None:
    global _inputs
    _inputs = inputs
    pa.set_cpu_count(1)  # every core has a process already


def _measure_in_worker(combination: Combination) -> Row:
    assert _inputs is not None
    return measure(_inputs, combination)


def measure_all(inputs: PlanInputs, todo: Sequence[Combination], jobs: int) -> Iterator[tuple[Combination, Row]]:
    """Yields each combination with its row as soon as it is measured, in an order that depends on `jobs`."""
    if jobs == 1 or len(todo) == 1:
        yield from ((combination, measure(inputs, combination)) for combination in todo)
        return
    # Spawned: a fork would copy Arrow's thread pools in an undefined state.
    context = multiprocessing.get_context("spawn")
    longest_first = sorted(todo, key=lambda each: _LONGEST.get(each.policy, len(_LONGEST)))
    with ProcessPoolExecutor(min(jobs, len(todo)), context, _initialise, (inputs,)) as pool:
        futures = {pool.submit(_measure_in_worker, combination): combination for combination in longest_first}
        try:
            yield from ((futures[future], future.result()) for future in as_completed(futures))
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


_LONGEST = {"caching": 0, "random": 1}
"""The policies that take longest, which begin first."""
