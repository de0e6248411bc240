"""A center with something to look at in the console: three edges, some of them behind, and queries of each kind."""

from __future__ import annotations

from typing import Any

import numpy as np

from center.budgets import AllocationPolicy, BudgetAllocator, BudgetReport
from center.catalog import BudgetStateChange, ComponentHeartbeat
from edgewater.base.streams import EdgeId
from edgewater.model.registered_query import RegisteredQuery
from edgewater.wire import Rest, Withheld

HOUR = 3_600_000
T0 = 1_356_998_400_000
EDGES = ("ewr", "jfk", "lga")
CARRIERS = ("UA", "B6", "EV", "DL", "AA", "MQ", "US", "9E")


def fill(desk: Any, windows: int = 30, seed: int = 5) -> None:
    """Registers three queries and reports `windows` hours of each; lga is behind by two at the end."""
    rng = np.random.default_rng(seed)
    desk.now = T0 + windows * HOUR + 1500
    busy = desk.register_over(*EDGES,
        name="miles_by_carrier", measures={"miles": "sum(distance)", "flights": "count()"},
        budget={"error": {"miles": 1500}},
    )  # fmt: skip
    delays = desk.register(
        name="delay_quantiles", measures={"delay": "quantiles(dep_delay)"}, budget={"staleness": "2s"}
    )
    desk.register(name="needs_teterboro", group_by=[], measures={"n": "count()"}, edges=["ewr", "teb"])
    share_out(desk, busy)
    for part in ("gateway", "job", "api"):
        desk.components.record(ComponentHeartbeat(part, f"center:{part}", "", desk.now, desk.now + windows * HOUR))
    for hour in range(windows):
        desk.now = T0 + (hour + 1) * HOUR + int(rng.integers(300, 1900))
        behind = hour >= windows - 2
        for edge in EDGES:
            if edge == "lga" and behind:
                continue
            rush = 1 + np.sin((hour % 24) / 24 * 2 * np.pi - 1.8) * 0.75
            flights = {c: int(rng.poisson(9 * rush / (i + 1) + 0.3)) for i, c in enumerate(CARRIERS)}
            held = float(rng.integers(0, 5) * 100)
            withheld = (Withheld("miles", held, 0.0, 2, rest=Rest(2, (held,))),) if held else ()
            desk.report(busy, edge, T0 + hour * HOUR, flights, withheld=withheld)
            desk.report(delays, edge, T0 + hour * HOUR, flights)
        desk.results.tick(desk.ledger, [], desk.now)
    for edge in EDGES:
        desk.beat(
            edge, T0 + (windows - (2 if edge == "lga" else 0)) * HOUR, **({"bad_time": 12} if edge == "lga" else {})
        )
    desk.catalog.alarms.add("input-lost", "edge lga: 12 records have no time", EdgeId("lga"), desk.now)


def share_out(desk: Any, query: RegisteredQuery) -> None:
    """Divides the query's error budget among the edges, as the gateway does."""
    allocator = BudgetAllocator({"miles": 1500.0}, {}, AllocationPolicy())
    edges = [EdgeId(e) for e in EDGES]
    allocator.set_members(frozenset(edges), {})
    for edge in edges:
        allocator.report(edge, BudgetReport(0, {}, T0), desk.now)
    allocator.rebalance(desk.now, T0)
    for edge in edges[:2]:
        grant = allocator.grants()[edge]
        allocator.report(edge, BudgetReport(grant.version, grant.shares, T0, 300.0, {"miles": 20.0}), desk.now)
    desk.catalog.budgets.update(query.ref, lambda *_: BudgetStateChange(allocator.to_state(), True, None), desk.now)
