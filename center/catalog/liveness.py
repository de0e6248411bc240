"""Liveness of a center's components: a row per process with its last heartbeat, for `/readyz` and the supervisor.

Components may run in one process tree or on several machines. All of them can reach the catalog's database, so it has
the rows.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self

from sqlalchemy import BigInteger, Integer, MetaData, delete, event, insert, select, update

from center.storage.database import (
    FreeText,
    Identifier,
    key,
    open_engine,
    read_transaction,
    required,
    schema_transaction,
    table_in,
    write_transaction,
)
from edgewater.base.errors import EdgewaterError, StorageError
from edgewater.runtime.tasks import Tasks

Component = Literal["gateway", "job", "api"]
Role = Literal["", "leader", "standby"]
"""The role of a job's process. Other components have no roles: all their processes work."""
COMPONENTS: tuple[Component, ...] = ("gateway", "job", "api")

HEARTBEAT_INTERVAL_S = 1.0  # limit: transactions of a component at rest
CHECKS = 4  # limit: how late a problem is stated
"""How often within an interval a component checks whether its problem or its role has changed."""
STALE_AFTER_MS = 5_000  # limit: how late a dead process is noticed
"""A component without a heartbeat for this long is not ready."""
EXPIRE_AFTER_MS = 3_600_000  # limit: rows of dead processes
"""Rows of processes that died without deregistering are deleted after this long."""

log = logging.getLogger(__name__)

_metadata = MetaData()
_heartbeats = table_in(_metadata)(
    "component_heartbeats",
    *key(Identifier(16), "component"),
    *key(Identifier(255), "instance"),
    *required(Identifier(255), "address"),
    *required(BigInteger, "started_at_ms", "beat_at_ms"),
    *required(FreeText, "problem"),
    *required(Identifier(16), "role"),
    *required(Integer, "needed"),
)


@dataclass(frozen=True, slots=True)
class ComponentHeartbeat:
    """The last heartbeat of a process.

    Attributes:
        instance: ``host:pid``.
        address: the address that the process listens on; empty: it listens on no address.
        problem: why it cannot do its work although it runs, such as a full disk; empty: there is no problem.
        role: whether it leads, or waits to take over.
        needed: number of processes, without standbys, that the component needs to be ready.
    """

    component: Component
    instance: str
    address: str
    started_at_ms: int
    beat_at_ms: int
    problem: str = ""
    role: Role = ""
    needed: int = 1


class ComponentRegistry:
    """The heartbeats of all components.

    Args:
        url: the URL of the catalog.

    Attributes:
        failure: why the last heartbeat of this process could not be stored; empty if it was stored. The database then
            stores no heartbeat of the other processes either, for example because the disk is full.

    Raises:
        StorageError: the database cannot be used. Every method raises it, too.
    """

    def __init__(self, url: str) -> None:
        self.failure = ""
        self._engine = open_engine(url)
        if self._engine.dialect.name == "sqlite":

            @event.listens_for(self._engine, "connect")
            def on_connect(connection: Any, _record: object) -> None:
                # A heartbeat that is lost in a power cut does no harm. This saves an fsync per second and component.
                connection.execute("PRAGMA synchronous=NORMAL")

        with schema_transaction(self._engine, _metadata):
            pass  # creates the table

    def close(self) -> None:
        self._engine.dispose()

    def record(self, heartbeat: ComponentHeartbeat) -> None:
        """Stores a heartbeat. The first one of a process also deletes rows that have expired."""
        c = _heartbeats.c
        row = (c.component == heartbeat.component) & (c.instance == heartbeat.instance)
        values = {**asdict(heartbeat), "problem": heartbeat.problem[:2_000]}
        try:
            with write_transaction(self._engine) as connection:
                if connection.execute(update(_heartbeats).where(row).values(**values)).rowcount == 0:
                    connection.execute(delete(_heartbeats).where(c.beat_at_ms < heartbeat.beat_at_ms - EXPIRE_AFTER_MS))
                    connection.execute(insert(_heartbeats).values(**values))
            self.failure = ""
        except StorageError as exc:
            self.failure = exc.message
            raise

    def remove(self, component: Component, instance: str) -> None:
        """Deregisters a process that ends normally."""
        c = _heartbeats.c
        with write_transaction(self._engine) as connection:
            connection.execute(delete(_heartbeats).where(c.component == component, c.instance == instance))

    def heartbeats(self) -> list[ComponentHeartbeat]:
        """All heartbeats, the latest first."""
        rows = select(_heartbeats).order_by(_heartbeats.c.beat_at_ms.desc())
        with read_transaction(self._engine) as connection:
            return [ComponentHeartbeat(**row._mapping) for row in connection.execute(rows)]


@dataclass(frozen=True, slots=True)
class ComponentStatus:
    """Whether a component is ready, and if not, why.

    Attributes:
        leader: the instances that lead; empty: no instance leads, or the component has no roles.
        standbys: number of instances that are ready to take over.
    """

    component: Component
    ready: bool
    reason: str
    address: str
    instances: int
    leader: str = ""
    standbys: int = 0


def component_status(component: Component, heartbeats: Iterable[ComponentHeartbeat], now_ms: int) -> ComponentStatus:
    """Returns the status of a component. It is ready if the number of its processes with a recent heartbeat and without
    a problem, not counting standbys, is at least the number that it needs."""
    own = sorted((h for h in heartbeats if h.component == component), key=lambda h: h.beat_at_ms, reverse=True)
    fresh = [h for h in own if now_ms - h.beat_at_ms <= STALE_AFTER_MS]
    working = [h for h in fresh if h.role != "standby"]
    healthy = [h for h in working if not h.problem]
    standbys = sum(1 for h in fresh if h.role == "standby" and not h.problem)
    needed = max((h.needed for h in fresh), default=1)
    # The newest heartbeats: a process that has died a moment ago has one, too.
    leader = ", ".join(sorted([h.instance for h in working if h.role == "leader"][:needed]))
    is_ready = len(healthy) >= needed
    if is_ready:
        reason = ""
    elif working:
        reason = next((h.problem for h in working if h.problem), f"{len(healthy)} of {needed} drivers lead")
    elif fresh:
        reason = fresh[0].problem or "no driver leads; a standby is taking over"
    elif own:
        reason = f"no heartbeat for {(now_ms - own[0].beat_at_ms) / 1000:.0f} s"
    else:
        reason = "has not started"
    address = next((h.address for h in (healthy if is_ready else working or own)), "")
    return ComponentStatus(component, is_ready, reason, address, len(fresh), leader, standbys)


class HeartbeatThread:
    """Sends heartbeats of this process in a thread while the context is entered; deregisters the process at the end.

    A change of the problem or the role is sent within `interval_s` / `CHECKS`.

    Args:
        problem: returns why the component cannot do its work; empty: there is no problem.
        tasks: the tasks of the process.
    """

    def __init__(
        self,
        registry: ComponentRegistry,
        component: Component,
        instance: str,
        *,
        now_ms: Callable[[], int],
        address: str = "",
        problem: Callable[[], str] = lambda: "",
        role: Callable[[], Role] = lambda: "",
        needed: int = 1,
        interval_s: float = HEARTBEAT_INTERVAL_S,
        tasks: Tasks | None = None,
    ) -> None:
        self._registry = registry
        self._beat = ComponentHeartbeat(component, instance, address, now_ms(), now_ms(), needed=needed)
        self._problem, self._role = problem, role
        self._now_ms, self._interval_s = now_ms, interval_s
        self._stop = threading.Event()
        self._tasks = tasks or Tasks()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._thread = self._tasks.thread("heartbeat", self._run)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=10)
        try:
            self._registry.remove(self._beat.component, self._beat.instance)
        except EdgewaterError as exc:
            log.warning("%s: could not deregister: %s", self._beat.component, exc)

    def _run(self) -> None:
        while True:
            (problem, role), failed_before = self._states(), self._registry.failure
            try:
                self._registry.record(replace(self._beat, beat_at_ms=self._now_ms(), problem=problem, role=role))
            except EdgewaterError as exc:
                # The other components notice the missing heartbeat; this process tries again.
                if not failed_before:  # once per outage
                    log.warning("%s: no heartbeat: %s", self._beat.component, exc)
            for _ in range(CHECKS):
                if self._stop.wait(self._interval_s / CHECKS):
                    return
                if self._states() != (problem, role):
                    break

    def _states(self) -> tuple[str, Role]:
        return self._problem(), self._role()
