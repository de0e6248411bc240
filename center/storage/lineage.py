"""Checks whether a catalog and a result store belong to the same center and the same moment.

Both stores have the same random number of their center, and a mark. Before the job drops frames that it has applied,
it increments the mark in the catalog, and then in the result store. If one of the two stores is replaced by an older
copy, the marks differ.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, Table, select, update

from center.storage.database import upsert

PAIR, MARK = "pair", "mark"


@dataclass(frozen=True, slots=True)
class Lineage:
    """The lineage that one store has.

    Attributes:
        pair: the random number of the center; 0 if the store is new.
        mark: the number of times that the job has marked the stores.
    """

    pair: int = 0
    mark: int = 0


def read_lineage(connection: Connection, counters: Table) -> Lineage:
    """Reads the lineage from a table of counters."""
    c = counters.c
    rows: dict[str, int] = dict(connection.execute(select(c.name, c.value).where(c.name.in_([PAIR, MARK]))).all())
    return Lineage(rows.get(PAIR, 0), rows.get(MARK, 0))


def raise_mark(connection: Connection, counters: Table, mark: int) -> None:
    """Sets the mark of a lineage, unless another process has set a higher one."""
    lower = (counters.c.name == MARK) & (counters.c.value < mark)
    connection.execute(update(counters).where(lower).values(value=mark))


def write_lineage(connection: Connection, counters: Table, lineage: Lineage) -> None:
    """Replaces the lineage in a table of counters."""
    rows = [{"name": PAIR, "value": lineage.pair}, {"name": MARK, "value": lineage.mark}]
    upsert(connection, counters, rows)
