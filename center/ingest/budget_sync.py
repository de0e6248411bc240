"""Runs the budget allocators over the catalog: applies the reports of edges, and returns grants.

A grant is stored before it is sent. A confirmation is stored before it takes effect. So a gateway may be killed at any
moment. Any number of gateways work on the same state: each change is one transaction that reads the allocator's state,
applies the events and writes the state back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from center.budgets import BudgetAllocator, BudgetReport, Grant, ShareViolation, error_limits
from center.catalog import BudgetStateChange, Catalog
from center.ingest.assignments import AssignmentPlan, BudgetSnapshot, QueryAssignment
from center.ingest.status_writer import StatusWriter
from edgewater.base.errors import named
from edgewater.base.streams import EdgeId
from edgewater.model.registered_query import query_key
from edgewater.wire import QueryRef

RATES_WRITE_INTERVAL_MS = 5_000  # limit: writes to the catalog
"""The least time between two writes of a state in which only rates have changed. Reports wait in memory until then."""
ALARM = "share-not-granted"
RESET = "budget-reset"
"""The alarm about a query whose shares could not be divided."""
log = logging.getLogger(__name__)


class BudgetSync:
    """The budgets in one gateway.

    Args:
        now_ms: wall clock.
        reported: called when a report waits for `sync`.

    Attributes:
        snapshot: the catalog's budgets at the last `sync`.
    """

    def __init__(
        self,
        catalog: Catalog,
        status: StatusWriter,
        now_ms: Callable[[], int],
        reported: Callable[[], object] = lambda: None,
    ) -> None:
        self._catalog = catalog
        self._status = status
        self._now_ms = now_ms
        self._reported = reported
        self._reports: dict[QueryRef, dict[EdgeId, BudgetReport]] = {}
        self._budgets_version = -1
        self._plan_version = -1
        self.snapshot = BudgetSnapshot()

    def on_report(self, edge: EdgeId, ref: QueryRef, report: BudgetReport) -> None:
        """Buffers the shares that an edge applies for the next `sync`."""
        self._reports.setdefault(ref, {})[edge] = report
        self._reported()

    async def sync(self, plan: AssignmentPlan) -> bool:
        """Applies the reports and reads what other gateways have stored; returns whether `snapshot` has changed.

        Raises:
            StorageError: the catalog cannot be used. The reports stay buffered for the next call.
        """
        before = self.snapshot
        plan_changed = plan.version != self._plan_version
        for assigned in plan.queries:
            ref = assigned.query.ref
            if assigned.query.spec.error_budget is not None and (plan_changed or ref in self._reports):
                await self._sync_query(assigned)
        self._plan_version = plan.version
        live = {q.query.ref for q in plan.queries}
        self._reports = {ref: reports for ref, reports in self._reports.items() if ref in live}
        await self._read(live)
        return self.snapshot is not before

    async def _sync_query(self, assigned: QueryAssignment) -> None:
        ref, reports = assigned.query.ref, self._reports.get(assigned.query.ref, {})
        applied = dict(reports)
        compute = partial(_update, assigned, applied, self._now_ms())
        violations, written = await asyncio.to_thread(self._catalog.budgets.update, ref, compute, self._now_ms())
        for violation in violations:
            kind, message = ALARM if violation.edge else RESET, f"query {ref.name}: {violation.message}"
            self._status.alarm(kind, message, violation.edge, self._now_ms(), query_key(ref))
        if written:
            # Reports that came meanwhile stay. If nothing was written, because only rates have changed, all reports
            # stay.
            for edge, report in applied.items():
                if reports.get(edge) is report:
                    del reports[edge]
            if not reports and self._reports.get(ref) is reports:
                del self._reports[ref]

    async def _read(self, live: set[QueryRef]) -> None:
        """Reads the budgets that this gateway or another one has stored."""
        version = await asyncio.to_thread(self._catalog.budgets.version)
        if version == self._budgets_version:
            return
        states = await asyncio.to_thread(self._catalog.budgets.states, self._budgets_version)
        delays = await asyncio.to_thread(self._catalog.budgets.processing_delays)
        sampling = await asyncio.to_thread(self._catalog.budgets.sampling)
        grants = {ref: grants for ref, grants in self.snapshot.grants.items() if ref in live}
        grants.update({ref: grants_of(state) for ref, state in states.items() if ref in live})
        self.snapshot, self._budgets_version = BudgetSnapshot(grants, delays, sampling), version


def _update(
    assigned: QueryAssignment, reports: Mapping[EdgeId, BudgetReport], now_ms: int, state: Any, written_at_ms: int
) -> BudgetStateChange:
    """Applies reports and the current members to one query's stored state, inside the catalog's transaction."""
    allocator = BudgetAllocator(*error_limits(assigned.query.spec))
    try:
        if state is not None:
            allocator.restore(state)
        before = allocator.durable_state()
        violations: list[ShareViolation] = []
        allocator.set_members(assigned.expected, assigned.closed_by_retired(now_ms))
        for edge, report in reports.items():
            violations += allocator.report(edge, report, now_ms)
        allocator.rebalance(now_ms, assigned.horizon_ms(now_ms))
    except Exception as exc:  # the state or a report cannot be used: this budget begins anew
        log.exception("the budget of query %s is divided anew", query_key(assigned.query.ref))
        known = assigned.expected | {edge.edge for edge in assigned.retired}
        allocator.reset(known)
        message = f"its error budget cannot be divided ({named(exc)}); it is divided anew"
        return BudgetStateChange(allocator.to_state(), True, [ShareViolation(EdgeId(""), message)])
    changed = allocator.durable_state() != before
    if not changed and now_ms - written_at_ms < RATES_WRITE_INTERVAL_MS:
        return BudgetStateChange(None, False, violations)
    return BudgetStateChange(allocator.to_state(), changed, violations)


def grants_of(state: Any) -> dict[EdgeId, Grant]:
    """The last grant to each edge, from an allocator's state as JSON."""
    allocator = BudgetAllocator({}, {})
    allocator.restore(state)
    return allocator.grants()
