"""Share books and the center's own delays as rows: functions that run inside a transaction of the catalog."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from center.catalog import schema as t
from center.catalog.edge_rows import lock
from edgewater.streams import EdgeId
from edgewater.wire.frames import QueryRef


@dataclass(frozen=True, slots=True)
class BudgetUpdate:
    """What became of a share book.

    Attributes:
        book: as JSON, to be written; None: as it is.
        words_changed: whether edges must be told something new.
        result: for the caller.
    """

    book: Any
    words_changed: bool
    result: Any


ComputeBudgetUpdate = Callable[[Any, int], BudgetUpdate]
"""(the book as JSON or None, wall time of its last writing) -> what becomes of it."""


def version(connection: Connection) -> int:
    rows = select(t.counters.c.value).where(t.counters.c.name == "shares")
    return int(connection.execute(rows).scalar_one())


def change(connection: Connection, ref: QueryRef, step: ComputeBudgetUpdate, now_ms: int) -> tuple[Any, bool]:
    # The lock also keeps a query from being deleted, and two gateways from changing one book, meanwhile.
    lock(connection)
    c = t.shares.c
    this = (c.name == ref.name) & (c.version == ref.version)
    row = connection.execute(select(t.shares).where(this)).first()
    changed = step(None if row is None else row.book, 0 if row is None else row.written_at_ms)
    if changed.book is None:
        return changed.result, False
    values = {"book": changed.book, "written_at_ms": now_ms}
    if changed.words_changed or row is None:
        values["changed"] = _bump(connection)
    if row is None:
        _drop_ended(connection)
        connection.execute(insert(t.shares).values(name=ref.name, version=ref.version, **values))
    else:
        connection.execute(update(t.shares).where(this).values(**values))
    return changed.result, True


def books(connection: Connection, after: int) -> dict[QueryRef, Any]:
    rows = select(t.shares).where(t.shares.c.changed > after)
    return {QueryRef(r.name, r.version): r.book for r in connection.execute(rows)}


def record_processing_delay(connection: Connection, ref: QueryRef, center_ms: int, now_ms: int) -> None:
    c = t.processing_delays.c
    this = (c.name == ref.name) & (c.version == ref.version)
    values = {"center_ms": center_ms, "measured_at_ms": now_ms}
    lock(connection)
    if connection.execute(update(t.processing_delays).where(this).values(**values)).rowcount == 0:
        connection.execute(insert(t.processing_delays).values(name=ref.name, version=ref.version, **values))
    _bump(connection)


def processing_delays(connection: Connection) -> dict[QueryRef, int]:
    return {QueryRef(r.name, r.version): r.center_ms for r in connection.execute(select(t.processing_delays))}


def record_sampling_rates(connection: Connection, ref: QueryRef, rates: Mapping[EdgeId, float]) -> None:
    c = t.sampling_rates.c
    this = (c.name == ref.name) & (c.version == ref.version)
    lock(connection)
    if connection.execute(update(t.sampling_rates).where(this).values(rates=dict(rates))).rowcount == 0:
        connection.execute(insert(t.sampling_rates).values(name=ref.name, version=ref.version, rates=dict(rates)))
    _bump(connection)


def sampling_rates(connection: Connection) -> dict[QueryRef, dict[EdgeId, float]]:
    return {QueryRef(r.name, r.version): r.rates for r in connection.execute(select(t.sampling_rates))}


def _bump(connection: Connection) -> int:
    this = t.counters.c.name == "shares"
    connection.execute(update(t.counters).where(this).values(value=t.counters.c.value + 1))
    return version(connection)


def _drop_ended(connection: Connection) -> None:
    """Rows of queries that are deleted: seldom enough to be done whenever a new one comes."""
    ended = select(t.queries.c.name, t.queries.c.version).where(t.queries.c.deleted_at_ms.is_not(None))
    for name, query_version in connection.execute(ended).all():
        for table in (t.shares, t.processing_delays, t.sampling_rates):
            connection.execute(delete(table).where(table.c.name == name, table.c.version == query_version))
