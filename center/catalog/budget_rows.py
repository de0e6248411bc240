"""Rows of budgets, processing delays and sampling rates; each function runs inside a transaction of the catalog."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Table, delete, insert, select, update

from center.catalog import schema as t
from center.catalog.edge_rows import lock_catalog
from center.storage.database import upsert
from edgewater.model.streams import EdgeId
from edgewater.wire import QueryRef


@dataclass(frozen=True, slots=True)
class BudgetStateChange:
    """The outcome of a change of a budget's state.

    Attributes:
        state: as JSON, to be written; None: nothing is written.
        grants_changed: whether edges must receive new grants.
        result: for the caller.
    """

    state: Any
    grants_changed: bool
    result: Any


ComputeBudgetUpdate = Callable[[Any, int], BudgetStateChange]
"""(state as JSON or None, wall time of its last write) -> the update."""


def read_version(connection: Connection) -> int:
    rows = select(t.counters.c.value).where(t.counters.c.name == "budgets")
    return int(connection.execute(rows).scalar_one())


def update_state(connection: Connection, ref: QueryRef, compute: ComputeBudgetUpdate, now_ms: int) -> tuple[Any, bool]:
    # The lock also keeps a query from being deleted, and another gateway from changing the state, meanwhile.
    lock_catalog(connection)
    this = _is_query(t.budget_states, ref)
    row = connection.execute(select(t.budget_states).where(this)).first()
    updated = compute(None if row is None else row.state, 0 if row is None else row.written_at_ms)
    if updated.state is None:
        return updated.result, False
    values = {"state": updated.state, "written_at_ms": now_ms}
    if updated.grants_changed or row is None:
        values["grants_version"] = _increment_version(connection)
    if row is None:
        _delete_ended(connection)
        connection.execute(insert(t.budget_states).values(name=ref.name, version=ref.version, **values))
    else:
        connection.execute(update(t.budget_states).where(this).values(**values))
    return updated.result, True


def read_state(connection: Connection, ref: QueryRef) -> Any:
    return connection.execute(select(t.budget_states.c.state).where(_is_query(t.budget_states, ref))).scalar()


def read_states(connection: Connection, after: int) -> dict[QueryRef, Any]:
    rows = select(t.budget_states).where(t.budget_states.c.grants_version > after)
    return {QueryRef(r.name, r.version): r.state for r in connection.execute(rows)}


def write_processing_delays(connection: Connection, delays_ms: Mapping[QueryRef, int], now_ms: int) -> None:
    lock_catalog(connection)
    rows = [
        {"name": ref.name, "version": ref.version, "delay_ms": delay_ms, "measured_at_ms": now_ms}
        for ref, delay_ms in delays_ms.items()
    ]
    upsert(connection, t.processing_delays, rows)
    _increment_version(connection)


def read_processing_delays(connection: Connection) -> dict[QueryRef, int]:
    return {QueryRef(r.name, r.version): r.delay_ms for r in connection.execute(select(t.processing_delays))}


def write_sampling_rates(connection: Connection, ref: QueryRef, rates: Mapping[EdgeId, float]) -> None:
    lock_catalog(connection)
    upsert(connection, t.sampling_rates, [{"name": ref.name, "version": ref.version, "rates": dict(rates)}])
    _increment_version(connection)


def read_sampling_rates(connection: Connection) -> dict[QueryRef, dict[EdgeId, float]]:
    return {QueryRef(r.name, r.version): r.rates for r in connection.execute(select(t.sampling_rates))}


def _is_query(table: Table, ref: QueryRef) -> Any:
    return (table.c.name == ref.name) & (table.c.version == ref.version)


def _increment_version(connection: Connection) -> int:
    this = t.counters.c.name == "budgets"
    connection.execute(update(t.counters).where(this).values(value=t.counters.c.value + 1))
    return read_version(connection)


def _delete_ended(connection: Connection) -> None:
    """Deletes the rows of deleted queries. New queries are rare enough to do it whenever one comes."""
    ended = select(t.queries.c.name, t.queries.c.version).where(t.queries.c.deleted_at_ms.is_not(None))
    for name, version in connection.execute(ended).all():
        for table in (t.budget_states, t.processing_delays, t.sampling_rates, t.query_delays):
            connection.execute(delete(table).where(_is_query(table, QueryRef(name, version))))
