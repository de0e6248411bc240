"""Experiments: the staleness, error and bytes per window of a policy, for a trace, a query and a link.

The policy `caching` runs the production `EdgeCore` of every edge under a virtual clock and merges the frames that they
build. The other policies are computed (`sim.budgets.optimal`, `sim.budgets.baselines`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, get_args

import numpy as np

from edgewater.base.errors import InvalidRequest
from edgewater.model.caching import CacheSpec
from edgewater.model.query import QuerySpec
from sim.budgets.baselines import batching, random_early, streaming
from sim.budgets.edges import simulate
from sim.budgets.link import SimulatedLink
from sim.budgets.optimal import Aggregate, WindowSchedule, WindowTrace, epe, least_error
from sim.budgets.outcome import PolicyOutcome, measured_values, truth_per_window
from sim.budgets.trace import Trace

PolicyName = Literal["caching", "streaming", "batching", "random", "optimal"]


@dataclass(frozen=True, slots=True)
class SimulatedPolicy:
    """The policy by which edges select updates to send. `cache` applies to `caching` only."""

    name: PolicyName = "caching"
    cache: CacheSpec = field(default_factory=CacheSpec)

    def __post_init__(self) -> None:
        if self.name not in get_args(PolicyName):
            raise InvalidRequest("policy", self.name, f"one of {', '.join(get_args(PolicyName))}")


def run(
    trace: Trace,
    parts: list[Trace],
    query: QuerySpec,
    link: SimulatedLink,
    policy: SimulatedPolicy | None = None,
    *,
    seed: int = 0,
) -> PolicyOutcome:
    """Runs one policy over a trace.

    Args:
        trace: the records of all edges.
        parts: one per edge. Each edge has its own link. The error budget is divided equally; for extrema each edge has
            all of it.
        query: groups by the trace's key columns, in tumbling windows, without a condition. Its first measure is
            evaluated.
        seed: seed of the policy `random`.

    Raises:
        InvalidRequest: a measure that the policy does not support.
    """
    policy = policy or SimulatedPolicy()
    if policy.name == "caching":
        return simulate(trace, parts, replace(query, cache=policy.cache), link)
    return _computed(trace, parts, query, link, policy, seed)


def _computed(
    trace: Trace, parts: list[Trace], query: QuerySpec, link: SimulatedLink, policy: SimulatedPolicy, seed: int
) -> PolicyOutcome:
    measure = query.measures[0]
    if measure.function.name not in get_args(Aggregate):
        raise InvalidRequest("measure", measure.to_text(), "sum, count, min or max")
    aggregate: Aggregate = measure.function.name  # type: ignore[assignment]
    if query.error_budget is not None and query.error_budget.relative:
        raise InvalidRequest("budget", query.to_mapping()["budget"], "an absolute error for this policy")
    update_bytes = link.bytes_per_update or UPDATE_BYTES
    service_ms = update_bytes / link.bandwidth_bytes_s * 1000.0
    extremum = measure.function.error == "extremum"
    truth = truth_per_window(trace, query)
    results = [
        _one_edge(part, query, policy, aggregate, service_ms, 1 if extremum else len(parts), seed + i, list(truth))
        for i, part in enumerate(parts)
    ]
    join = np.max if extremum else np.sum
    errors = join(np.array([[s.error for s in r] for r in results]), axis=0)
    updates = sum(s.updates for r in results for s in r)
    staleness = np.array([[s.staleness_ms for s in r] for r in results]).max(axis=0) / query.window.slice_ms
    largest = np.array([np.nanmax(np.abs(w), initial=0.0) for w in truth.values()])
    return PolicyOutcome(staleness, errors, largest, np.zeros(len(largest)), updates, updates * update_bytes)


UPDATE_BYTES = 32.0  # derived: an entry of one key and one sum
"""Bytes per update of computed policies if the link counts real bytes: about an entry of one key and one sum."""


def _one_edge(
    part: Trace,
    query: QuerySpec,
    policy: SimulatedPolicy,
    aggregate: Aggregate,
    service_ms: float,
    shares: int,
    seed: int,
    starts: list[int],
) -> list[WindowSchedule]:
    values = measured_values(part, query)
    # Under both budgets the error budget holds, with the least staleness. The optimum then sends the fewest updates
    # too.
    error, staleness = query.error_budget, query.staleness_budget
    budget = dict(error.limits)[query.measures[0].name] / shares if error is not None else None
    stale = float(staleness.staleness_ms) if staleness is not None and budget is None else None
    if budget is None and stale is None:
        budget = 0.0
    size = query.window.slice_ms
    times = part.times_ms
    result, free = [], 0.0
    for start in starts:
        at, until = np.searchsorted(times, (start, start + size))
        groups = np.unique(part.codes[at:until], return_inverse=True)[1].astype(np.int64)
        window = WindowTrace(
            start, start + size, times[at:until].astype(np.float64), groups, values[at:until], aggregate
        )
        schedule = partial(random_early, seed=seed + start) if policy.name == "random" else _SCHEDULES[policy.name]
        done = schedule(window, service_ms, free, budget, stale)
        free = done.free_ms
        result.append(done)
    return result


def _optimal(
    window: WindowTrace, service_ms: float, free_ms: float, budget: float | None, staleness_ms: float | None
) -> WindowSchedule:
    if budget is not None:
        return epe(window, budget, service_ms, free_ms)
    assert staleness_ms is not None
    return least_error(window, staleness_ms, service_ms, free_ms)


_SCHEDULES = {"optimal": _optimal, "streaming": streaming, "batching": batching}
