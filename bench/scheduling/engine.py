"""Runs the scheduler on simulated workers under a virtual clock.

Whole queries are placed on nodes, in turn. Each node has one core and one scheduler, and an equal part of the memory.
True costs are the costs of the profiles; the scheduler has only its measurements.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ParamSpec, TypeVar

from bench.scheduling.costs import CostEstimate
from bench.scheduling.memory import QueueLimits
from bench.scheduling.policies import POLICIES
from bench.scheduling.queries import Item, QueryProfile
from bench.scheduling.scheduler import DEFAULT_CYCLE_MS, Scheduler, WorkerTurn
from bench.scheduling.workload import Arrival, OfferedLoad, arrivals, profiles

P = ParamSpec("P")
R = TypeVar("R")

RECORD_BYTES = 100.0
MEASURED_EVERY = 16
"""One of this many batches is measured by operator."""
FAIR_QUANTUM_MS = 10.0
"""Fair scheduling switches more often than once a cycle, as an operating system does."""
GUESS = 3.0
"""Before the first measurement, the scheduler's costs are wrong by this factor."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """A load, and how it is scheduled.

    Attributes:
        memory_bytes: of all nodes together; None: unbounded.
        manage_memory: False: back-pressure alone ("w/o MM" in the thesis).
        reduction_first: memory is managed as in the thesis.
        measure_overhead: whether `RunOutcome.scheduler_s` is measured, which makes it take longer.
    """

    load: OfferedLoad = field(default_factory=OfferedLoad)
    policy: str = "klink"
    nodes: int = 1
    memory_bytes: float | None = None
    manage_memory: bool = True
    reduction_first: bool = False
    cycle_ms: float = DEFAULT_CYCLE_MS
    measure_overhead: bool = False


@dataclass(slots=True)
class RunOutcome:
    """The measurements of a run.

    Attributes:
        latency_ms: from the ingestion of each sweeping watermark until its window was emitted.
        window_latency_ms: from the window's end until the window was emitted.
        slowdown: latency over the time that the firing takes alone.
        records: records processed while records arrived.
        seconds: simulated time until then.
        memory_peak: maximum bytes queued, per node, summed.
        turns, activations: of the schedulers, and of their memory management.
        scheduler_s, busy_s: CPU of scheduling, if it is measured, and simulated CPU of the queries.
        clock_calls: pairs of readings of the clock in `scheduler_s`.
    """

    latency_ms: list[float] = field(default_factory=list)
    window_latency_ms: list[float] = field(default_factory=list)
    slowdown: list[float] = field(default_factory=list)
    records: float = 0.0
    seconds: float = 0.0
    memory_peak: float = 0.0
    turns: int = 0
    scheduler_s: float = 0.0
    busy_s: float = 0.0
    activations: int = 0
    clock_calls: int = 0


def run(experiment: Experiment) -> RunOutcome:
    """Simulates the arrivals, and the queues at their end, so that no late answer is omitted."""
    queries = profiles(experiment.load)
    outcome = RunOutcome(seconds=experiment.load.seconds)
    by_node: list[list[Arrival]] = [[] for _ in range(experiment.nodes)]
    for arrival in arrivals(experiment.load, queries):
        by_node[arrival.query % experiment.nodes].append(arrival)
    for number, mine in enumerate(by_node):
        placed = range(number, len(queries), experiment.nodes)
        _Node(experiment, {i: queries[i] for i in placed}, outcome).run(mine)
    return outcome


class _Node:
    def __init__(self, experiment: Experiment, queries: dict[int, QueryProfile], outcome: RunOutcome) -> None:
        policy = experiment.policy
        memory = None
        if experiment.memory_bytes is not None:
            cap_bytes = experiment.memory_bytes / experiment.nodes
            memory = QueueLimits(cap_bytes, RECORD_BYTES, reduction_first=experiment.reduction_first)
        self._scheduler = Scheduler(
            POLICIES[policy],
            cycle_ms=min(experiment.cycle_ms, FAIR_QUANTUM_MS) if policy == "fair" else experiment.cycle_ms,
            memory=memory,
            manage_memory=policy == "klink" and experiment.manage_memory,
        )
        self._true = queries
        self._costs = {i: CostEstimate(q.operators, q.firing_ms) for i, q in queries.items()}
        self._states = {i: self._scheduler.add(_guessed(q), 0.0) for i, q in queries.items()}
        self._numbers = {state.index: i for i, state in self._states.items()}
        self._held: dict[int, deque[Arrival]] = {}
        self._arrived: dict[tuple[int, float], float] = {}
        self._outcome = outcome
        self._batches = 0
        self._end_ms = experiment.load.seconds * 1e3
        self._is_timed = experiment.measure_overhead

    def run(self, mine: Sequence[Arrival]) -> None:
        scheduler, outcome = self._scheduler, self._outcome
        now_ms, at, count = 0.0, 0, len(mine)
        ended: WorkerTurn | None = None
        while True:
            while at < count and mine[at].at_ms <= now_ms:
                self._arrive(mine[at])
                at += 1
            if ended is not None:
                # Not before the arrivals during the turn, because the scheduler's clock does not go back.
                self._timed(scheduler.ran, ended, now_ms)
            if self._held:
                self._release(now_ms)
            turn = self._timed(scheduler.next, now_ms)
            ended = None
            if turn is None:
                if at >= count:
                    break
                now_ms = mine[at].at_ms
                continue
            spent_ms = 0.0
            for item in turn.items():
                spent_ms += self._process(turn, item, now_ms + spent_ms)
                if spent_ms >= turn.limit_ms:
                    break
            now_ms += spent_ms
            outcome.busy_s += spent_ms / 1e3
            outcome.turns += 1
            ended = turn
        assert not self._held, "with empty queues everything fits"
        outcome.memory_peak += scheduler.memory.peak * RECORD_BYTES
        outcome.activations += scheduler.memory.activations

    def _arrive(self, arrival: Arrival) -> None:
        if arrival.watermark_ms is not None:
            self._arrived[arrival.query, arrival.watermark_ms] = arrival.at_ms
        if arrival.query in self._held:
            self._held[arrival.query].append(arrival)  # a source delivers in order
        elif not self._offer(arrival, arrival.at_ms):
            self._held[arrival.query] = deque([arrival])

    def _offer(self, arrival: Arrival, now_ms: float) -> bool:
        state = self._states[arrival.query]
        if arrival.watermark_ms is None:
            return self._timed(self._scheduler.offer, state, arrival.records, now_ms)
        self._timed(self._scheduler.watermark, state, arrival.watermark_ms, now_ms, arrival.number, arrival.at_ms)
        return True

    def _release(self, now_ms: float) -> None:
        """Lets waiting sources deliver as far as there is room."""
        since_ms = {self._states[query]: held[0].at_ms for query, held in self._held.items()}
        for state in self._timed(self._scheduler.by_room, since_ms, now_ms):
            query = self._numbers[state.index]
            held = self._held[query]
            while held and self._offer(held[0], now_ms):
                held.popleft()
            if held:
                return
            del self._held[query]

    def _process(self, turn: WorkerTurn, item: Item, now_ms: float) -> float:
        """Processes an item; returns its true cost."""
        state, outcome = turn.query, self._outcome
        query = self._numbers[state.index]
        true = self._costs[query]
        if item.end_ms is not None:
            spent_ms = item.firings * true.firing_ms
            for number in range(item.firings):
                end_ms = item.end_ms - number * state.profile.period_ms
                done_ms = now_ms + spent_ms
                latency_ms = done_ms - self._arrived.pop((query, end_ms))
                outcome.latency_ms.append(latency_ms)
                outcome.window_latency_ms.append(done_ms - end_ms)
                outcome.slowdown.append(latency_ms / (true.firing_ms + true.remaining_ms[0]))
            self._timed(state.costs.observe_firing, spent_ms / item.firings)
            self._timed(self._scheduler.complete, state, item)
            return spent_ms
        operators = self._true[query].operators
        spent_ms, records = 0.0, item.records
        flow = []
        for operator in operators[item.stage : turn.through]:
            flow.append((records, records * operator.selectivity, records * operator.cost_ms))
            spent_ms += records * operator.cost_ms
            records *= operator.selectivity
        if turn.through == len(operators) and now_ms <= self._end_ms:
            outcome.records += item.records / true.kept[item.stage]
        self._batches += 1
        if self._batches % MEASURED_EVERY == 0:
            for stage, measured in enumerate(flow, item.stage):
                self._timed(state.costs.observe, stage, *measured)
        self._timed(self._scheduler.complete, state, item, turn.through)
        return spent_ms

    def _timed(self, call: Callable[P, R], *args: P.args, **names: P.kwargs) -> R:
        """Calls the scheduler, and measures its CPU if the experiment asks for it."""
        if not self._is_timed:
            return call(*args, **names)
        began_s = time.thread_time()
        result = call(*args, **names)
        self._outcome.scheduler_s += time.thread_time() - began_s
        self._outcome.clock_calls += 1
        return result


def _guessed(query: QueryProfile) -> QueryProfile:
    operators = [replace(o, cost_ms=o.cost_ms * GUESS) for o in query.operators]
    return replace(query, operators=operators, firing_ms=query.firing_ms * GUESS)
