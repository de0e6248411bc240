"""Leases of drivers: which process may apply the frames of a partition of the queries and give their answers.

The lease is checked in the transaction of every step.

A lease is a row with its owner, an epoch that grows whenever another process takes it, and the time of its end. The
epoch decides what may be committed. If a process was stalled, cut off or declared dead, it can never write after
another process has taken over. The time only decides how soon another process may take the lease.

Changing the number of partitions creates another set of leases and, in the same transaction, increments the epochs of
the old leases. So no two drivers ever write the same query.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, case, insert, select, update

from center.results import schema as t
from center.storage.query_partition import ALL_QUERIES, QueryPartition
from edgewater.base.errors import Conflict

DRIVER = "leading driver"
_OF_FORMAT_1 = "driver"
"""A driver of 0.3 that runs as a standby looks for this name, so it cannot lead."""


class LeaseLost(Conflict):
    """Another process has taken the lease, so this process must not write."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease as stored.

    Attributes:
        owner: the process that has it; empty: it is free.
        epoch: how often it has been taken; 0: never.
        until_ms: wall time on the owner's clock. Each renewal increases it, so that others see the renewal whatever
            their clocks say.
    """

    owner: str
    epoch: int
    until_ms: int


def create(connection: Connection, partition: QueryPartition) -> None:
    """Adds a free lease, unless the partition has one, even of an earlier division."""
    name = partition.name(DRIVER)
    if connection.execute(select(t.leases.c.epoch).where(t.leases.c.name == name)).scalar() is None:
        connection.execute(insert(t.leases).values(name=name, owner="", epoch=0, until_ms=0))


def read(connection: Connection, partition: QueryPartition) -> Lease:
    c = t.leases.c
    row = connection.execute(select(c.owner, c.epoch, c.until_ms).where(c.name == partition.name(DRIVER))).one()
    return Lease(*row)


def take(connection: Connection, partition: QueryPartition, owner: str, seen: Lease, until_ms: int) -> int | None:
    """Takes the lease if it still equals `seen`, and returns its new epoch; None: it has changed meanwhile.

    Waits for the transaction of a running step, which renews the lease.
    """
    c = t.leases.c
    unchanged = (c.epoch == seen.epoch) & (c.until_ms == seen.until_ms) & (c.owner == seen.owner)
    values = {"owner": owner, "epoch": seen.epoch + 1, "until_ms": max(until_ms, seen.until_ms + 1)}
    named = c.name == partition.name(DRIVER)
    taken = connection.execute(update(t.leases).where(named & unchanged).values(**values)).rowcount
    return seen.epoch + 1 if taken else None


def end(connection: Connection, seen: Mapping[QueryPartition, Lease]) -> None:
    """Frees the leases of a division, under new epochs. Raises LeaseLost if one no longer equals `seen`."""
    for partition, lease in seen.items():
        if take(connection, partition, "", lease, lease.until_ms) is None:
            raise LeaseLost(f"the driver's lease of partition {partition} has changed")


def migrate(connection: Connection) -> None:
    """Renames the leases of format 1. Their owners lose them."""
    for (name,) in connection.execute(select(t.leases.c.name)).all():
        # Format 1 names the lease of all queries `driver 1 of 1` while they are divided.
        partition = QueryPartition.parse(name.removeprefix(_OF_FORMAT_1).strip()) or ALL_QUERIES
        renamed = {"name": partition.name(DRIVER), "owner": "", "epoch": t.leases.c.epoch + 1}
        connection.execute(update(t.leases).where(t.leases.c.name == name).values(**renamed))


def hold(connection: Connection, partition: QueryPartition, epoch: int, until_ms: int) -> None:
    """Locks and renews the lease: until the transaction ends, no process takes it. Raises LeaseLost."""
    c = t.leases.c
    later = case((c.until_ms < until_ms, until_ms), else_=c.until_ms + 1)
    mine = (c.name == partition.name(DRIVER)) & (c.epoch == epoch)
    if connection.execute(update(t.leases).where(mine).values(until_ms=later)).rowcount == 0:
        lease = connection.execute(select(c.epoch, c.owner).where(c.name == partition.name(DRIVER))).one()
        if not lease.owner:
            raise LeaseLost("the driver's lease was ended: the queries were divided among another number of drivers")
        raise LeaseLost(f"the driver's lease has epoch {lease.epoch} and is held by {lease.owner}, not by this process")


def release(connection: Connection, partition: QueryPartition, epoch: int) -> None:
    """Frees the lease, if it still has this `epoch`."""
    mine = (t.leases.c.name == partition.name(DRIVER)) & (t.leases.c.epoch == epoch)
    connection.execute(update(t.leases).where(mine).values(owner=""))
