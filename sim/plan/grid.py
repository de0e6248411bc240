"""Every combination of a plan, run in processes; one row each."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any, get_args

import pyarrow as pa

from edgewater.caching import CacheSpec
from edgewater.errors import InvalidConfig
from edgewater.query import QuerySpec
from sim.budgets.experiment import Policy, PolicyName, run
from sim.budgets.link import LinkModel
from sim.plan.budgets import Budget
from sim.plan.trace import PlacedTrace

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Scene:
    """What is the same for all combinations.

    Attributes:
        update_bytes: by bandwidth, what an update costs on the wire, the same for all policies.
    """

    trace: PlacedTrace
    query: QuerySpec
    edges: int
    seed: int
    update_bytes: dict[int, float]


@dataclass(frozen=True, slots=True)
class Combination:
    """One run. `cache` matters to `caching` only."""

    policy: PolicyName
    cache: CacheSpec
    bandwidth_bytes_s: int
    budget: Budget


def named(given: Iterable[str], flag: str, known: Sequence[str], default: Sequence[str]) -> tuple[str, ...]:
    """What a repeatable flag chooses; `all`, and several joined by commas, are understood. Raises InvalidConfig."""
    chosen: list[str] = []
    for name in [part.strip() for text in given for part in text.split(",")]:
        if name != "all" and name not in known:
            raise InvalidConfig(flag, name, f"one of {', '.join(known)}, or all")
        chosen += known if name == "all" else [name]
    return tuple(dict.fromkeys(chosen or default))


def cache_specs(
    evictions: Sequence[str], estimates: Sequence[str], sizings: Sequence[str], kind: str, eager: float
) -> list[CacheSpec]:
    """The choices that differ: sizing and estimate are for staleness budgets, and the sizing `target` compares
    accumulated errors whatever the estimate."""
    if kind == "error":
        return [CacheSpec(eviction, eager=eager) for eviction in evictions]
    specs = [
        CacheSpec(eviction, sizing, "acc" if sizing == "target" else estimate, eager)
        for eviction in evictions
        for sizing in sizings
        for estimate in estimates
    ]
    return list(dict.fromkeys(specs))


def combinations(
    policies: Sequence[str], evictions: Sequence[str], estimates: Sequence[str], sizings: Sequence[str],
    eager: float, bandwidths: Sequence[int], budgets: Sequence[Budget],
) -> list[Combination]:  # fmt: skip
    """In the order in which they are printed."""
    result = []
    for width in bandwidths:
        for kind in ("error", "staleness"):
            for name in [p for p in POLICIES if p in policies]:
                specs = cache_specs(evictions, estimates, sizings, kind, eager) if name == "caching" else [CacheSpec()]
                result += [Combination(name, spec, width, b) for spec in specs for b in budgets if b.kind == kind]
    return result


def measure(scene: Scene, what: Combination) -> Row:
    """Runs one combination."""
    measure = scene.query.measures[0]
    query = replace(scene.query, budget=what.budget.of(measure.name))
    cost = scene.update_bytes[what.bandwidth_bytes_s]
    link = LinkModel(float(what.bandwidth_bytes_s), bytes_per_update=cost)
    done = run(scene.trace, query, link, Policy(what.policy, what.cache), scene.edges, seed=scene.seed)
    caching, bound = what.policy == "caching", what.budget.kind == "staleness"
    return {
        "policy": what.policy,
        "eviction": what.cache.eviction if caching else None,
        "estimate": what.cache.estimate if caching and bound else None,
        "sizing": what.cache.sizing if caching and bound else None,
        "aggregate": measure.function.name,
        "edges": scene.edges,
        "bandwidth_bytes_s": what.bandwidth_bytes_s,
        "budget_kind": what.budget.kind,
        "budget": what.budget.size,
        "windows": len(done.staleness),
        "staleness_p95": done.staleness_p95(),
        "error_p95": done.error_p95(),
        "bytes": round(done.bytes),
        "budget_amount": what.budget.amount,
        "budget_of_query": what.budget.own,
        "window_ms": query.window.longest_ms,
        "largest_error": float(done.largest.max(initial=0.0)),
        "updates": done.updates,
        "update_bytes": cost,
        "seed": scene.seed,
    }


_scene: Scene | None = None
"""Of a worker process."""


def _enter(trace: PlacedTrace, query: object, edges: int, seed: int, update_bytes: dict[int, float]) -> None:
    global _scene
    # A query's functions are code: what travels is the mapping that it is read from.
    _scene = Scene(trace, QuerySpec.from_mapping(query), edges, seed, update_bytes)
    pa.set_cpu_count(1)  # the cores have a process each already


def _measure_here(what: Combination) -> Row:
    assert _scene is not None
    return measure(_scene, what)


def measure_all(scene: Scene, todo: Sequence[Combination], jobs: int, done: Callable[[], None]) -> list[Row]:
    """A row per combination, in their order, whatever the number of processes.

    Args:
        done: called after each.
    """
    if jobs == 1 or len(todo) == 1:
        rows = []
        for what in todo:
            rows.append(measure(scene, what))
            done()
        return rows
    # Spawned: a fork would copy Arrow's threads in whatever state they are.
    context = multiprocessing.get_context("spawn")
    given = (scene.trace, scene.query.to_mapping(), scene.edges, scene.seed, scene.update_bytes)
    with ProcessPoolExecutor(min(jobs, len(todo)), context, _enter, given) as pool:
        futures = {pool.submit(_measure_here, todo[at]): at for at in _longest_first(todo)}
        try:
            for _ in _raising(futures):
                done()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
        return [future.result() for future, _ in sorted(futures.items(), key=lambda item: item[1])]


def _longest_first(todo: Sequence[Combination]) -> list[int]:
    """`caching` and `random` take longest; begun last they would be waited for."""
    weight = {"caching": 0, "random": 1}
    return sorted(range(len(todo)), key=lambda at: (weight.get(todo[at].policy, 2), at))


def _raising(futures: Iterable[Future[Row]]) -> Iterator[Row]:
    for future in as_completed(futures):
        yield future.result()


__all__ = [
    "POLICIES", "Combination", "Row", "Scene", "combinations", "measure", "measure_all", "named",
]  # fmt: skip
