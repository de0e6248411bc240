"""Which of several drivers lead: one per partition of the queries has a lease and renews it.

The others are standbys, which wait for the end of any lease.

Safety does not depend on this module: the store checks the lease in the transaction of every step
(`center.results.lease`). So a driver that has lost its lease without notice commits nothing.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from center.job.job_parts import JobParts
from center.results import Lease, LeaseLost
from center.storage.query_partition import QueryPartition
from edgewater.base.errors import StorageError
from edgewater.runtime.tasks import Tasks

log = logging.getLogger(__name__)

SILENT_LEASES = 5  # limit: how late a database that hangs is stated
"""A lease that is not renewed for this many times its length is a problem: the database hangs. Renewals also wait for a
long step, which is no problem."""
POLL_S = 0.1  # limit: time of a takeover
"""Interval at which a standby reads the lease."""


def machine() -> str:
    """Returns an identifier of the process numbers of this machine: its boot, and the PID namespace of a container.

    Empty if the system does not state it.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}.{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def _state_and_start(pid: int) -> tuple[str, str]:
    """Returns a process' state, and its start in clock ticks since boot. Raises OSError if there is no such process."""
    # The name before these fields, in parentheses, may contain any character.
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return fields[0], fields[19]


def new_owner() -> str:
    """Returns a name for a lease's owner: ``host:pid``, the process' start, its machine, and a random part."""
    pid, where = os.getpid(), machine()
    start = _state_and_start(pid)[1] if where else ""
    return "|".join([f"{socket.gethostname()[:64]}:{pid}", start, where, uuid.uuid4().hex])


def display_name(owner: str) -> str:
    """Returns ``host:pid`` of an owner."""
    return owner.partition("|")[0]


def is_gone(owner: str) -> bool:
    """Returns whether the owner was a process of this machine and has ended. False if that cannot be known."""
    fields = owner.split("|")
    if len(fields) != 4 or not fields[2] or fields[2] != machine():
        return False
    try:
        state, start = _state_and_start(int(fields[0].rpartition(":")[2]))
    except (FileNotFoundError, ProcessLookupError):
        return True
    except (OSError, ValueError):
        return False
    return start != fields[1] or state in "ZX"


class LeaseWatch:
    """Decides when the lease of another process has ended. Pure.

    It uses this process' clock alone, because the clocks of two machines may differ by more than a lease. Time counts
    only while this process reads the lease. After a pause of this process or of the database, the whole duration begins
    again: the owner may have been paused too.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._seen: Lease | None = None
        self._since_s = self._last_s = 0.0
        self.renewed = False
        """Whether a renewal has been seen: the owner is alive."""

    def has_ended(self, lease: Lease, at_s: float) -> bool:
        """Returns whether the lease may be taken. Called after each reading of the lease.

        Args:
            at_s: monotonic time of the reading.
        """
        paused = at_s - self._last_s > self._lease_s / 2
        self._last_s = at_s
        if lease != self._seen:
            self.renewed = self._seen is not None
            self._seen, self._since_s = lease, at_s
        elif paused:
            self._since_s = at_s
        return not lease.owner or at_s - self._since_s >= self._lease_s


class Leadership:
    """Takes a lease when it is free or has ended, and renews it while this process leads.

    If the store's queries are divided among another number of drivers, they are divided again when none of these
    drivers leads.

    Args:
        began: called before `leads` is set.
        lease_ms: how long a driver may be silent before a standby takes over. It renews three times as often, and with
            every step.
        drivers: how many lead at the same time, each the queries of one partition.

    Attributes:
        owner: this process.
        leads: set from taking a lease until this process notices its loss.
        leader: ``host:pid`` of this process while it leads, otherwise of the leading drivers; empty: none, or unknown.
    """

    def __init__(
        self,
        shared: JobParts,
        *,
        monotonic: Callable[[], float],
        lease_ms: int,
        began: Callable[[], None] = lambda: None,
        drivers: int = 1,
        owner: str | None = None,
    ) -> None:
        self._drivers = drivers
        self._thread: threading.Thread | None = None
        self.owner = owner or new_owner()
        self.leads = threading.Event()
        self.leader = self._failure = ""
        self._renewed_s = 0.0
        self._store, self._metrics, self._now_ms = shared.store, shared.metrics, shared.now_ms
        self._stopping = threading.Event()
        self._monotonic, self._began, self._lease_ms = monotonic, began, lease_ms
        self._watches: dict[QueryPartition, LeaseWatch] = {}

    @property
    def sees_leader(self) -> bool:
        """Whether another process leads and is known to be alive."""
        return not self.leads.is_set() and any(watch.renewed for watch in list(self._watches.values()))

    @property
    def problem(self) -> str:
        """Why the lease cannot be read or renewed; empty: it can."""
        silent_s = self._monotonic() - self._renewed_s
        if not self._failure and self.leads.is_set() and silent_s * 1000 > SILENT_LEASES * self._lease_ms:
            return f"the driver's lease was renewed last {silent_s:.0f} s ago"
        return self._failure

    def start(self, tasks: Tasks) -> None:
        """Starts the thread."""
        self._thread = tasks.thread("leadership", self._run)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.step()
            self._stopping.wait(self._lease_ms / 3000 if self.leads.is_set() else POLL_S)

    def close(self) -> None:
        """Ends the thread. If this process leads, releases the lease, so that no standby has to wait for its end."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        if self.leads.is_set():
            self.leads.clear()
            try:
                self._store.release_lease()
            except StorageError as exc:
                log.warning("the driver's lease is not released, a standby waits for its end: %s", exc)

    def step(self) -> None:
        """Reads the lease once, and takes or renews it. Never raises."""
        try:
            if self.leads.is_set():
                self._store.renew_lease(self._now_ms())
                self._renewed_s = self._monotonic()
            else:
                self._wait_for_turn()
            self._failure = ""
        except LeaseLost as exc:
            self._lose(exc)
        # a failure of the database or of a disk: without this thread the driver would never lead
        except Exception as exc:
            if not self._failure:
                log.warning(
                    "the driver's lease cannot be kept; trying again: %s",
                    exc,
                    exc_info=not isinstance(exc, StorageError),
                )
            self._failure = f"the driver's lease: {exc}"

    def _wait_for_turn(self) -> None:
        leases, at_s = self._store.leases(), self._monotonic()
        ended = {partition for partition, lease in leases.items() if self._has_ended(partition, lease, at_s)}
        if len(leases) != self._drivers:
            self._divide(leases, ended)
            # Takes a lease at once: processes that disagree about the number would otherwise divide the queries in turn
            # forever.
            leases = self._store.leases()
            ended = {partition for partition, lease in leases.items() if not lease.owner}
        for partition in leases:
            if len(leases) == self._drivers and partition in ended and self._take(partition, leases[partition]):
                return
        leaders = [display_name(lease.owner) for partition, lease in leases.items() if partition not in ended]
        if leaders and self.leader != (leader := ", ".join(leaders)):
            self.leader = leader
            log.info("this driver is a standby: %s", f"{leader} leads" if len(leaders) == 1 else f"{leader} lead")

    def _has_ended(self, partition: QueryPartition, lease: Lease, at_s: float) -> bool:
        watch = self._watches.setdefault(partition, LeaseWatch(self._lease_ms / 1000))
        return watch.has_ended(lease, at_s) or is_gone(lease.owner)

    def _divide(self, leases: Mapping[QueryPartition, Lease], ended: Collection[QueryPartition]) -> None:
        if leading := [display_name(leases[partition].owner) for partition in leases if partition not in ended]:
            raise StorageError(
                f"spark.drivers is {self._drivers} here; expected {len(leases)}, as for the drivers that lead"
                f" ({', '.join(leading)}): stop them before you change it"
            )
        if self._store.divide(self._drivers, leases):
            log.info("the queries are divided among %d drivers, before among %d", self._drivers, len(leases))
        self._watches.clear()

    def _take(self, partition: QueryPartition, lease: Lease) -> bool:
        if not self._store.take_lease(self.owner, lease, self._lease_ms, self._now_ms(), partition):
            return False
        self.leader, self._renewed_s = display_name(self.owner), self._monotonic()
        self._metrics.lease_epoch.set(lease.epoch + 1)
        self._metrics.leads.set(1)
        of = "" if partition.of == 1 else f" partition {partition} of the queries"
        after = f", after {display_name(lease.owner)}" if lease.owner else ""
        log.info("this driver leads%s, epoch %d%s", of, lease.epoch + 1, after)
        self._began()
        self.leads.set()
        return True

    def _lose(self, exc: LeaseLost) -> None:
        self.leads.clear()
        self.leader = ""
        self._watches.clear()
        self._metrics.leads.set(0)
        self._metrics.failures.labels("lease").inc()
        log.error("this driver does not lead any more, and is a standby from now on: %s", exc)
