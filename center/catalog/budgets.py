"""Budgets, processing delays at the center and sampling rates. Gateways send them to edges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from center.catalog import schema as t
from center.catalog.transactions import Transactions, increment_version, read_counter
from center.early import SamplingPlan
from center.storage.database import upsert
from edgewater.base.streams import EdgeId
from edgewater.wire import QueryRef


@dataclass(frozen=True, slots=True)
class BudgetStateChange:
    """The outcome of a change of a budget's state.

    Attributes:
        state: the new state as JSON; None: nothing is written.
        grants_changed: whether edges must receive new grants.
        result: the value that `Budgets.update` returns to its caller.
    """

    state: Any
    grants_changed: bool
    result: Any


ComputeBudgetUpdate = Callable[[Any, int], BudgetStateChange]
"""(state as JSON or None, wall time of its last write) -> the change."""


class Budgets:
    """The budgets, processing delays and sampling rates in the catalog."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    def version(self) -> int:
        """A number that increases with every change of grants, processing delays or sampling rates. Cheap to poll."""
        with self._transactions.read() as connection:
            return read_counter(connection, "budgets")

    def update(self, ref: QueryRef, compute: ComputeBudgetUpdate, now_ms: int) -> tuple[Any, bool]:
        """Updates a budget's state by `compute` in one transaction; returns its result, and whether it was written."""
        # Under the lock, nobody deletes the query, and no other gateway changes the state.
        with self._transactions.locked() as connection:
            this = t.is_of(t.budget_states, ref)
            row = connection.execute(select(t.budget_states).where(this)).first()
            updated = compute(None if row is None else row.state, 0 if row is None else row.written_at_ms)
            if updated.state is None:
                return updated.result, False
            values = {"state": updated.state, "written_at_ms": now_ms}
            if updated.grants_changed or row is None:
                increment_version(connection, "budgets")
                values["grants_version"] = read_counter(connection, "budgets")
            if row is None:
                _delete_ended(connection)
                connection.execute(insert(t.budget_states).values(name=ref.name, version=ref.version, **values))
            else:
                connection.execute(update(t.budget_states).where(this).values(**values))
        return updated.result, True

    def state(self, ref: QueryRef) -> Any:
        """The state of a query's budget as JSON; None: there is no state yet."""
        state = select(t.budget_states.c.state).where(t.is_of(t.budget_states, ref))
        with self._transactions.read() as connection:
            return connection.execute(state).scalar()

    def states(self, after: int) -> dict[QueryRef, Any]:
        """The states whose grants have changed since `version` was `after`."""
        rows = select(t.budget_states).where(t.budget_states.c.grants_version > after)
        with self._transactions.read() as connection:
            return {QueryRef(r.name, r.version): r.state for r in connection.execute(rows)}

    def record_processing_delays(self, delays_ms: Mapping[QueryRef, int], now_ms: int) -> None:
        """Stores the processing delays of queries at the center: from a frame's arrival to answers with its values."""
        rows = [
            {"name": ref.name, "version": ref.version, "delay_ms": delay_ms, "measured_at_ms": now_ms}
            for ref, delay_ms in delays_ms.items()
        ]
        with self._transactions.locked() as connection:
            upsert(connection, t.processing_delays, rows)
            increment_version(connection, "budgets")

    def processing_delays(self) -> dict[QueryRef, int]:
        """The stored processing delays, ms."""
        with self._transactions.read() as connection:
            rows = connection.execute(select(t.processing_delays))
            return {QueryRef(r.name, r.version): r.delay_ms for r in rows}

    def record_sampling(self, ref: QueryRef, plans: Mapping[EdgeId, SamplingPlan]) -> None:
        """Stores the sample that the query's accuracy needs of each edge."""
        row = {"name": ref.name, "version": ref.version, "rates": {edge: plan.rate for edge, plan in plans.items()}}
        row["records"] = {edge: plan.records for edge, plan in plans.items()}
        with self._transactions.locked() as connection:
            upsert(connection, t.sampling_rates, [row])
            increment_version(connection, "budgets")

    def sampling(self) -> dict[QueryRef, dict[EdgeId, SamplingPlan]]:
        """The stored samples that accuracies need."""
        with self._transactions.read() as connection:
            return {
                QueryRef(r.name, r.version): {
                    e: SamplingPlan(rate, r.records.get(e, 0.0)) for e, rate in r.rates.items()
                }
                for r in connection.execute(select(t.sampling_rates))
            }


def _delete_ended(connection: Connection) -> None:
    """Deletes the rows of deleted queries. New queries are rare, so each registration may do it."""
    ended = select(t.queries.c.name, t.queries.c.version).where(t.queries.c.deleted_at_ms.is_not(None))
    for name, version in connection.execute(ended).all():
        for table in (t.budget_states, t.processing_delays, t.sampling_rates):
            connection.execute(delete(table).where(t.is_of(table, QueryRef(name, version))))
