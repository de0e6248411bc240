"""A center and edges that share a budget over a network that delays, reorders, doubles and loses, where
either side may crash at any moment. Both sides are the production state machines."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from center.budgets import AllocationPolicy, BudgetAllocator, BudgetReport, Grant, ShareViolation
from edge.core.budget_schedule import ShareSchedule
from edgewater.base.streams import MIN_TIME_MS, EdgeId

SLICE_MS = 1_000
EAGER = AllocationPolicy(min_gain=1.02, min_interval_ms=0)


@dataclass(slots=True)
class EdgeModel:
    """What an edge keeps of its shares. `closed`: per slice, the share under which it was closed."""

    name: EdgeId
    update_bytes: float = 100.0
    drift: float = 1.0
    schedule: ShareSchedule = field(default_factory=ShareSchedule)
    through: int = MIN_TIME_MS
    closed: dict[int, float] = field(default_factory=dict)
    durable: tuple[ShareSchedule, int, dict[int, float]] = (ShareSchedule(), MIN_TIME_MS, {})

    def hear(self, grant: Grant) -> None:
        open_from = MIN_TIME_MS if self.through == MIN_TIME_MS else self.through
        self.schedule = self.schedule.updated(grant.version, grant.shares, grant.from_ms, open_from)

    def close(self, slices: int) -> None:
        """Closes the next slices under the share that each has."""
        start = 0 if self.through == MIN_TIME_MS else self.through
        for _ in range(slices):
            self.closed[start] = self.schedule.at(start).get("bytes", 0.0)
            start += SLICE_MS
        self.through = start

    def lose_state(self) -> None:
        """Begins anew, from the first slice."""
        self.schedule, self.through, self.closed = ShareSchedule(), MIN_TIME_MS, {}
        self.sync()

    def sync(self) -> None:
        self.durable = (self.schedule, self.through, dict(self.closed))

    def crash(self) -> None:
        self.schedule, self.through, self.closed = self.durable[0], self.durable[1], dict(self.durable[2])

    def report(self) -> BudgetReport:
        """Said only of what is durable."""
        self.sync()
        last = self.schedule.last
        return BudgetReport(self.schedule.version, last.shares, last.from_ms, self.update_bytes, {"bytes": self.drift})

    def holds_back(self, start: int) -> float:
        return self.closed.get(start, self.schedule.at(start).get("bytes", 0.0))


class ShareWorld:
    """Args: limits: E of ``bytes``."""

    def __init__(self, limit: float, edges: Mapping[str, float], policy: AllocationPolicy = EAGER) -> None:
        self.limit, self.policy = limit, policy
        self.edges = {EdgeId(e): EdgeModel(EdgeId(e), drift=drift) for e, drift in edges.items()}
        self.expected = set(self.edges)
        self.retired: dict[EdgeId, int] = {}
        self.now_ms = 1
        self.up: list[tuple[EdgeId, BudgetReport]] = []
        self.down: list[tuple[EdgeId, Grant]] = []
        self.flagged: list[ShareViolation] = []
        self.allocator = self._allocator()
        self.durable = json.dumps(self.allocator.to_state())

    def _allocator(self) -> BudgetAllocator:
        return BudgetAllocator({"bytes": self.limit}, {"top": 7.0}, self.policy)

    def turn(self, *, crash_before_commit: bool = False, crash_before_send: bool = False) -> None:
        """One transaction of the gateway; a crash loses what is not committed, or not sent."""
        self.now_ms += 1_000
        self.allocator.set_members(frozenset(self.expected), self.retired)
        self.allocator.rebalance(self.now_ms, 1 << 50)
        if crash_before_commit:
            self.crash_center()
            return
        self.durable = json.dumps(self.allocator.to_state())
        if crash_before_send:
            self.crash_center()
            return
        self.down += self.allocator.grants().items()

    def crash_center(self) -> None:
        self.allocator = self._allocator()
        self.allocator.restore(json.loads(self.durable))
        self.allocator.set_members(frozenset(self.expected), self.retired)

    def join(self, name: str, drift: float = 1.0) -> EdgeModel:
        """Adds an edge that has closed nothing."""
        edge = self.edges[EdgeId(name)] = EdgeModel(EdgeId(name), drift=drift)
        self.expected.add(edge.name)
        return edge

    def receive(self, index: int) -> None:
        edge, report = self.up[index]
        self.flagged += self.allocator.report(edge, report, self.now_ms)

    def check(self) -> None:
        """The promise, for every slice, by what edges really hold back."""
        starts = {s for e in self.edges.values() for s in e.closed} | {
            step.from_ms for e in self.edges.values() for step in e.schedule.steps
        }
        for start in starts | {MIN_TIME_MS, 1 << 49}:
            total = math.fsum(e.holds_back(start) for e in self.edges.values())
            assert total <= self.limit, f"slice {start}: {total} of {self.limit}"
        for grant in self.allocator.grants().values():
            assert all(np.isfinite(s) and s >= 0 for s in grant.shares.values())

    def check_permitted(self) -> None:
        """The promise, for every slice, by what the center knows. Only for edges that apply what they were granted."""
        for holding in self.allocator.holdings.values():
            for start in (MIN_TIME_MS, holding.grant.from_ms, *(step.from_ms for step in holding.steps)):
                may = self.allocator.in_force(start)["bytes"]
                assert may <= self.limit * (1 + 1e-9), f"slice {start}: {may} of {self.limit} is permitted"

    def calm(self, rounds: int = 12, gone: frozenset[str] = frozenset()) -> None:
        """The network delivers everything, in order, for a while; edges in `gone` stay away."""
        self.up, self.down = [], []
        for _ in range(rounds):
            for name, edge in self.edges.items():
                if name in self.expected and name not in gone:
                    self.flagged += self.allocator.report(name, edge.report(), self.now_ms)
            self.turn()
            for name, grant in self.down:
                if name not in gone:
                    self.edges[name].hear(grant)
            self.down = []
            for name, edge in self.edges.items():
                if name not in gone:
                    edge.close(1)
            self.check()

    def shares(self) -> dict[str, float]:
        return {name: edge.schedule.last.shares.get("bytes", 0.0) for name, edge in self.edges.items()}
