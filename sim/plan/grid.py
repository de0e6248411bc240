"""Runs all combinations of a plan in parallel processes and returns one row for each."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import pyarrow as pa

from edgewater.model.caching import CacheSpec
from edgewater.model.errors import InvalidConfig
from edgewater.model.query import QuerySpec
from sim.budgets.experiment import PolicyName, SimulatedPolicy, run
from sim.budgets.link import LinkModel
from sim.budgets.optimal import ROUNDING
from sim.budgets.outcome import PolicyOutcome
from sim.plan.budgets import Kind, PlannedBudget
from sim.plan.trace import PlacedTrace
from sim.wire import experiment as wire

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """The inputs that all combinations share.

    Attributes:
        update_bytes: size of an update on the wire by bandwidth, the same for all policies.
        wire_delay_ms: the policy `caching` runs over modelled connections with this delay in each direction; None: over
            links that carry updates.
    """

    trace: PlacedTrace
    query: QuerySpec
    edges: int
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


def chosen_names(texts: Iterable[str], flag: str, known: Sequence[str], default: Sequence[str]) -> tuple[str, ...]:
    """Returns the names that a repeatable flag selects; also accepts `all` and lists with commas.

    Raises:
        InvalidConfig: an unknown name.
    """
    chosen: list[str] = []
    for name in [part.strip() for text in texts for part in text.split(",")]:
        if name != "all" and name not in known:
            raise InvalidConfig(flag, name, f"one of {', '.join(known)}, or all")
        chosen += known if name == "all" else [name]
    return tuple(dict.fromkeys(chosen or default))


def cache_specs(
    evictions: Sequence[str], estimates: Sequence[str], sizings: Sequence[str], kind: str, eager: float
) -> list[CacheSpec]:
    """Returns the distinct cache policies for a kind of budget.

    Sizing and estimate apply to staleness budgets only, and the sizing `target` does not depend on the estimate.
    """
    if kind != "staleness":
        return [CacheSpec(eviction, eager=eager) for eviction in evictions]
    specs = [
        CacheSpec(eviction, sizing, "acc" if sizing == "target" else estimate, eager)
        for eviction in evictions
        for sizing in sizings
        for estimate in estimates
    ]
    return list(dict.fromkeys(specs))


def combinations(
    policies: Sequence[str],
    evictions: Sequence[str],
    estimates: Sequence[str],
    sizings: Sequence[str],
    eager: float,
    bandwidths: Sequence[int],
    budgets: Sequence[PlannedBudget],
) -> list[Combination]:
    """Returns all combinations in the order in which they are printed."""
    result = []
    for width in bandwidths:
        for kind in get_args(Kind):
            for name in [p for p in POLICIES if p in policies]:
                specs = cache_specs(evictions, estimates, sizings, kind, eager) if name == "caching" else [CacheSpec()]
                result += [Combination(name, spec, width, b) for spec in specs for b in budgets if b.kind == kind]
    return result


def measure(inputs: PlanInputs, combination: Combination) -> Row:
    """Runs one combination and returns its row."""
    measure = inputs.query.measures[0]
    query = replace(inputs.query, budget=combination.budget.for_query(measure.name))
    cost, caching = inputs.update_bytes[combination.bandwidth_bytes_s], combination.policy == "caching"
    on_wire = caching and inputs.wire_delay_ms is not None
    # A combined budget limits bytes too, so the real frames of edges are measured.
    measured = on_wire or (caching and combination.budget.kind == "combined")
    link = LinkModel(float(combination.bandwidth_bytes_s), bytes_per_update=None if measured else cost)
    if on_wire:
        link = replace(link, latency_ms=float(inputs.wire_delay_ms or 0))
        done = wire.run(inputs.trace, inputs.trace.split(inputs.edges), replace(query, cache=combination.cache), link)
    else:
        policy = SimulatedPolicy(combination.policy, combination.cache)
        done = run(inputs.trace, query, link, policy, inputs.edges, seed=inputs.seed)
    bound = combination.budget.kind == "staleness"
    return {
        "policy": combination.policy,
        "eviction": combination.cache.eviction if caching else None,
        "estimate": combination.cache.estimate if caching and bound else None,
        "sizing": combination.cache.sizing if caching and bound else None,
        "aggregate": measure.function.name,
        "edges": inputs.edges,
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


def _initialise(trace: PlacedTrace, query: object, *rest: Any) -> None:
    global _inputs
    # A query contains functions, which cannot be pickled; its mapping can.
    _inputs = PlanInputs(trace, QuerySpec.from_mapping(query), *rest)
    pa.set_cpu_count(1)  # every core has a process already


def _measure_in_worker(combination: Combination) -> Row:
    assert _inputs is not None
    return measure(_inputs, combination)


def measure_all(inputs: PlanInputs, todo: Sequence[Combination], jobs: int, done: Callable[[], None]) -> list[Row]:
    """Returns one row per combination, in order, for any number of processes.

    Args:
        done: called after each combination.
    """
    if jobs == 1 or len(todo) == 1:
        rows = []
        for combination in todo:
            rows.append(measure(inputs, combination))
            done()
        return rows
    # Spawned: a fork would copy Arrow's thread pools in an undefined state.
    context = multiprocessing.get_context("spawn")
    rest = inputs.edges, inputs.seed, inputs.update_bytes, inputs.wire_delay_ms
    arguments = (inputs.trace, inputs.query.to_mapping(), *rest)
    with ProcessPoolExecutor(min(jobs, len(todo)), context, _initialise, arguments) as pool:
        futures = {pool.submit(_measure_in_worker, todo[at]): at for at in _longest_first(todo)}
        try:
            for _ in _raising(futures):
                done()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
        return [future.result() for future, _ in sorted(futures.items(), key=lambda item: item[1])]


def _longest_first(todo: Sequence[Combination]) -> list[int]:
    """Returns the indices with `caching` and `random` first, which take longest."""
    weight = {"caching": 0, "random": 1}
    return sorted(range(len(todo)), key=lambda at: (weight.get(todo[at].policy, 2), at))


def _raising(futures: Iterable[Future[Row]]) -> Iterator[Row]:
    for future in as_completed(futures):
        yield future.result()
