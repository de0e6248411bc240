from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from center.budgets import BudgetReport
from center.catalog import BudgetStateChange, Catalog
from center.ingest.assignments import AssignmentPlan
from center.ingest.budget_sync import BudgetSync
from center.ingest.metrics import GatewayMetrics
from center.ingest.status_writer import StatusWriter
from edgewater.base.errors import StorageError
from edgewater.base.streams import MIN_TIME_MS, EdgeId
from edgewater.wire import QueryRef
from tests.center.catalog_world import JFK, LGA, hello, spec


class Watched(Catalog):
    """A real catalog; something else may happen while a budget's state is updated."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.meanwhile: Callable[[QueryRef], None] = lambda _ref: None
        self.changed: list[QueryRef] = []
        self._update, self.budgets.update = self.budgets.update, self._watched_update  # type: ignore[method-assign]

    def _watched_update(self, ref: QueryRef, *args: Any) -> tuple[Any, bool]:
        self.meanwhile(ref)
        self.changed.append(ref)
        return self._update(ref, *args)


class World:
    """A budget_sync over two queries with error budgets, and two edges."""

    def __init__(self, path: Path) -> None:
        self.catalog = Watched(f"sqlite:///{path}/catalog.db")
        self.now_ms = 1_000_000
        metrics = GatewayMetrics()
        self.budget_sync = BudgetSync(
            self.catalog, StatusWriter(self.catalog, metrics, 1.0, lambda: self.now_ms), lambda: self.now_ms
        )
        for edge in (JFK, LGA):
            hello(self.catalog, edge)
        budget = {"error": {"miles": 1000, "flights": 10}}
        self.refs = [self.catalog.queries.register(spec(name, budget=budget), 1)[0].ref for name in ("a", "b")]

    def plan(self) -> AssignmentPlan:
        return AssignmentPlan.of(self.catalog.version(), self.catalog.queries.all(), self.catalog.edges.all())

    def report(self, edge: EdgeId) -> None:
        self.budget_sync.on_report(edge, self.refs[0], BudgetReport(0, {}, MIN_TIME_MS, 100.0, {}))

    def granted(self) -> set[EdgeId]:
        return set(self.budget_sync.snapshot.grants.get(self.refs[0], {}))


async def test_a_report_that_comes_during_a_sync_is_not_lost(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.catalog.meanwhile = lambda _ref: world.report(JFK) if not world.catalog.changed else None
    await world.budget_sync.sync(world.plan())
    assert world.granted() == set()
    await world.budget_sync.sync(world.plan())
    assert world.granted() == {JFK}
    world.catalog.close()


@pytest.mark.parametrize("how", [StorageError("database is locked"), asyncio.CancelledError()])
async def test_a_sync_that_is_interrupted_is_completed_by_the_next(tmp_path: Path, how: BaseException) -> None:
    world = World(tmp_path)

    def fail(ref: QueryRef) -> None:
        if ref == world.refs[1]:
            raise how

    world.catalog.meanwhile = fail
    with pytest.raises(type(how)):
        await world.budget_sync.sync(world.plan())
    world.catalog.meanwhile = lambda _ref: None
    world.catalog.changed.clear()
    await world.budget_sync.sync(world.plan())
    assert world.catalog.changed == world.refs
    world.catalog.close()


async def test_a_combined_budget_sends_the_share_and_the_processing_delay(tmp_path: Path) -> None:
    world = World(tmp_path)
    budget = {"error": {"miles": 1000, "flights": 10}, "staleness": "2s"}
    ref = world.catalog.queries.register(spec("both", budget=budget), 1)[0].ref
    world.catalog.budgets.record_processing_delays({ref: 340}, 1)
    world.budget_sync.on_report(JFK, ref, BudgetReport(0, {}, MIN_TIME_MS, 100.0, {}))
    await world.budget_sync.sync(world.plan())
    (query,) = [q for q in world.catalog.queries.all() if q.ref == ref]
    message = world.budget_sync.snapshot.message(query, JFK)
    assert message is not None
    assert (dict(message.shares), message.version) == ({"flights": 10.0, "miles": 1000.0}, 1)
    assert message.center_ms == 340
    assert world.budget_sync.snapshot.message(query, LGA) is None, "without a grant there is no share to apply"
    world.catalog.close()


async def test_a_budget_that_cannot_be_divided_begins_anew_with_an_alarm_and_the_others_go_on(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.budget_sync.sync(world.plan())
    broken = BudgetStateChange({"holdings": {"jfk": {"version": "?"}}, "targets": {}, "decided_at_ms": 0}, True, [])
    world.catalog.budgets.update(world.refs[0], lambda _state, _at_ms: broken, world.now_ms)
    for ref in world.refs:
        for edge in (JFK, LGA):
            world.budget_sync.on_report(edge, ref, BudgetReport(0, {}, MIN_TIME_MS, 100.0, {}))
    await world.budget_sync.sync(world.plan())
    assert set(world.budget_sync.snapshot.grants[world.refs[1]]) == {JFK, LGA}
    assert world.granted() == {JFK, LGA}, "of nothing, until both have confirmed it"
    await world.budget_sync._status.flush()
    (alarm,) = world.catalog.alarms.latest()
    assert (alarm.kind, alarm.query) == ("budget-reset", "a@1")
    world.catalog.close()
