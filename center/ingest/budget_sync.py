"""Drives the share books: reports of edges in, words to edges out, by way of the catalog.

A word is written down before it is sent and a confirmation before it is acted upon, so a gateway may die
anywhere, and any number of gateways work on the same books: each change is one transaction that reads the
book, lets the pure machine decide, and writes it back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from center.budgets.allocation import (
    AllocationPolicy,
    BudgetAllocator,
    BudgetReport,
    Grant,
    RebalanceEvent,
    ShareReported,
    ShareViolation,
)
from center.catalog.budget_rows import BudgetUpdate
from center.catalog.store import Catalog
from center.ingest.assignments import AssignmentPlan, BudgetSnapshot, QueryAssignment, limits
from center.ingest.status_writer import StatusWriter
from edgewater.query import ErrorBudget
from edgewater.streams import EdgeId
from edgewater.wire.frames import QueryRef

WRITE_EVERY_MS = 5_000
"""Rates alone are written no more often; until then they are kept here."""
ALARM = "share-not-given"
logger = logging.getLogger(__name__)


class BudgetSync:
    """The budgets as one gateway sees them.

    Args:
        now_ms: wall clock.
    """

    def __init__(
        self, catalog: Catalog, notes: StatusWriter, now_ms: Callable[[], int], policy: AllocationPolicy
    ) -> None:
        self._catalog = catalog
        self._notes = notes
        self._now_ms = now_ms
        self._policy = policy
        self._waiting: dict[QueryRef, dict[EdgeId, BudgetReport]] = {}
        self._seen = -1
        self._planned = -1
        self.budgets = BudgetSnapshot()

    def reported(self, edge: EdgeId, ref: QueryRef, report: BudgetReport) -> None:
        """What an edge says that it applies; the next `turn` takes it in."""
        self._waiting.setdefault(ref, {})[edge] = report

    async def turn(self, plan: AssignmentPlan) -> bool:
        """Takes in what edges and other gateways have said; whether edges are to be told something new.

        Raises:
            StorageError: the catalog refuses; what was reported is kept for the next turn.
        """
        before = self.budgets
        changed_plan = plan.version != self._planned
        for planned in plan.queries:
            ref = planned.query.ref
            if isinstance(planned.query.spec.budget, ErrorBudget) and (changed_plan or ref in self._waiting):
                await self._turn(planned)
        self._planned = plan.version
        live = {p.query.ref for p in plan.queries}
        self._waiting = {r: w for r, w in self._waiting.items() if r in live}
        await self._follow(live)
        return self.budgets is not before

    async def _turn(self, planned: QueryAssignment) -> None:
        ref, reports = planned.query.ref, self._waiting.get(planned.query.ref, {})
        taken = dict(reports)
        change = _Change(planned, taken, self._now_ms(), self._policy)
        flagged, written = await asyncio.to_thread(self._catalog.update_budget, ref, change, self._now_ms())
        for each in flagged:
            self._notes.alarm(ALARM, f"query {ref.name}: {each.message}", each.edge, self._now_ms())
        if written:
            # What came meanwhile stays; so does everything, if only rates have moved.
            for edge, report in taken.items():
                if reports.get(edge) is report:
                    del reports[edge]
            if not reports and self._waiting.get(ref) is reports:
                del self._waiting[ref]

    async def _follow(self, live: set[QueryRef]) -> None:
        """Reads what has changed, by this gateway or another."""
        version = await asyncio.to_thread(self._catalog.budgets_version)
        if version == self._seen:
            return
        books = await asyncio.to_thread(self._catalog.budget_states, self._seen)
        ways = await asyncio.to_thread(self._catalog.processing_delays)
        rates = await asyncio.to_thread(self._catalog.sampling_rates)
        words = {ref: words for ref, words in self.budgets.words.items() if ref in live}
        words.update({ref: words_of(book) for ref, book in books.items()})
        self.budgets, self._seen = BudgetSnapshot(words, ways, rates), version


class _Change:
    """One query's turn, as the catalog's transaction calls it."""

    def __init__(
        self, planned: QueryAssignment, reports: Mapping[EdgeId, BudgetReport], now_ms: int, policy: AllocationPolicy
    ) -> None:
        self._planned, self._reports, self._now_ms, self._policy = planned, reports, now_ms, policy

    def __call__(self, given: Any, written_at_ms: int) -> BudgetUpdate:
        book = BudgetAllocator(*limits(self._planned.query.spec), self._policy)
        if given is not None:
            book.restore(given)
        before = book.obligations()
        flagged: list[ShareViolation] = book.handle(self._planned.members(self._now_ms))
        for edge, report in self._reports.items():
            flagged += book.handle(ShareReported(edge, report, self._now_ms))
        flagged += book.handle(RebalanceEvent(self._now_ms, self._planned.horizon_ms(self._now_ms)))
        changed = book.obligations() != before
        if not changed and self._now_ms - written_at_ms < WRITE_EVERY_MS:
            return BudgetUpdate(None, False, flagged)
        return BudgetUpdate(book.to_json(), changed, flagged)


def words_of(book: Any) -> dict[EdgeId, Grant]:
    """The last word to each edge, of a book as JSON."""
    whole = BudgetAllocator({}, {})
    whole.restore(book)
    return whole.grants()
