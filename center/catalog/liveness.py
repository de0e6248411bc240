"""Which parts of a center live: one row per process, beaten by it, read by `/readyz` and the supervisor.

The parts may run in one process tree or on several machines, so liveness goes through the one thing that
all of them reach: the catalog's database.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Self

from sqlalchemy import BigInteger, Column, MetaData, Table, delete, event, insert, select, update

from center.storage.database import Name, Prose, connect, opening, reading, writing
from edgewater.errors import EdgewaterError

Part = Literal["gateway", "job", "api"]
PARTS: tuple[Part, ...] = ("gateway", "job", "api")

BEAT_INTERVAL_S = 1.0
FRESH_MS = 5_000
"""A part is missing when it has not beaten for this long."""
FORGET_MS = 3_600_000
"""Rows of processes that died without a word are dropped after this long."""

log = logging.getLogger(__name__)

_metadata = MetaData()
_heartbeats = Table(
    "heartbeats",
    _metadata,
    Column("part", Name(16), primary_key=True),
    Column("instance", Name(255), primary_key=True),
    Column("address", Name(255), nullable=False),
    Column("started_at_ms", BigInteger, nullable=False),
    Column("beat_at_ms", BigInteger, nullable=False),
    Column("problem", Prose, nullable=False),
)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a process last said of itself.

    Attributes:
        instance: ``host:pid``.
        address: where it listens; empty if nowhere.
        problem: why it cannot do its work although it lives, such as a full disk; empty: nothing.
    """

    part: Part
    instance: str
    address: str
    started_at_ms: int
    beat_at_ms: int
    problem: str = ""


class PartRegistry:
    """The heartbeats of all parts.

    Args:
        url: the catalog's.

    Raises:
        StorageError: the database cannot be used. So does every method.
    """

    def __init__(self, url: str) -> None:
        self._engine = connect(url)
        if self._engine.dialect.name == "sqlite":

            @event.listens_for(self._engine, "connect")
            def on_connect(connection: Any, _record: object) -> None:
                # A heartbeat that a power cut takes is no loss, and an fsync a second per part is a cost.
                connection.execute("PRAGMA synchronous=NORMAL")

        with opening(self._engine, _metadata):
            pass  # the table is all there is

    def close(self) -> None:
        self._engine.dispose()

    def beat(self, heartbeat: Heartbeat) -> None:
        """Notes that a process lives; its first beat also drops rows that are long dead."""
        c = _heartbeats.c
        row = (c.part == heartbeat.part) & (c.instance == heartbeat.instance)
        values = {
            "address": heartbeat.address,
            "started_at_ms": heartbeat.started_at_ms,
            "beat_at_ms": heartbeat.beat_at_ms,
            "problem": heartbeat.problem[:2_000],
        }
        with writing(self._engine) as connection:
            if connection.execute(update(_heartbeats).where(row).values(**values)).rowcount == 0:
                connection.execute(delete(_heartbeats).where(c.beat_at_ms < heartbeat.beat_at_ms - FORGET_MS))
                identity = {"part": heartbeat.part, "instance": heartbeat.instance}
                connection.execute(insert(_heartbeats).values(**identity, **values))

    def leave(self, part: Part, instance: str) -> None:
        """Notes that a process ended on purpose."""
        c = _heartbeats.c
        with writing(self._engine) as connection:
            connection.execute(delete(_heartbeats).where(c.part == part, c.instance == instance))

    def parts(self) -> list[Heartbeat]:
        """All that is known, the latest beat first."""
        rows = select(_heartbeats).order_by(_heartbeats.c.beat_at_ms.desc())
        with reading(self._engine) as connection:
            return [Heartbeat(**row._mapping) for row in connection.execute(rows)]


@dataclass(frozen=True, slots=True)
class PartStatus:
    """Whether one part does its work, and if not, why: a phrase for a person."""

    part: Part
    ready: bool
    reason: str
    address: str
    instances: int


def part_status(part: Part, heartbeats: Iterable[Heartbeat], now_ms: int) -> PartStatus:
    """A part is ready if any of its processes beats and has no problem."""
    mine = sorted((h for h in heartbeats if h.part == part), key=lambda h: h.beat_at_ms, reverse=True)
    fresh = [h for h in mine if now_ms - h.beat_at_ms <= FRESH_MS]
    well = [h for h in fresh if not h.problem]
    if well:
        return PartStatus(part, True, "", well[0].address, len(fresh))
    if fresh:
        return PartStatus(part, False, fresh[0].problem, fresh[0].address, len(fresh))
    if mine:
        silence_s = (now_ms - mine[0].beat_at_ms) / 1000
        return PartStatus(part, False, f"no heartbeat for {silence_s:.0f} s", mine[0].address, 0)
    return PartStatus(part, False, "has not started", "", 0)


class Beating:
    """A thread that beats for this process while it is entered; `leave`s at the end.

    Args:
        problem: asked before every beat; what keeps the part from its work, or "".
    """

    def __init__(
        self,
        registry: PartRegistry,
        part: Part,
        instance: str,
        *,
        now_ms: Callable[[], int],
        address: str = "",
        problem: Callable[[], str] = lambda: "",
        interval_s: float = BEAT_INTERVAL_S,
    ) -> None:
        self._registry = registry
        self._part: Part = part
        self._instance = instance
        self._address = address
        self._problem = problem
        self._now_ms = now_ms
        self._interval_s = interval_s
        self._started_at_ms = now_ms()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"beat-{part}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10)
        try:
            self._registry.leave(self._part, self._instance)
        except EdgewaterError as exc:
            log.warning("%s: could not sign off: %s", self._part, exc)

    def _run(self) -> None:
        while True:
            try:
                now = self._now_ms()
                self._registry.beat(
                    Heartbeat(self._part, self._instance, self._address, self._started_at_ms, now, self._problem())
                )
            except EdgewaterError as exc:
                # The silence itself tells the others; the process goes on and tries again.
                log.warning("%s: no heartbeat: %s", self._part, exc)
            if self._stop.wait(self._interval_s):
                return
