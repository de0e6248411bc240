"""What sessions have to tell the catalog and nobody waits for: heartbeats, statuses, ends, alarms.

Gathered and written at most once per interval, all heartbeats in one transaction, so that ten thousand
edges cost what one does. Only the newest of each kind per edge is held, which bounds it; what the catalog refuses
is kept and tried again.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from center.catalog.store import Catalog, HeartbeatRecord, QueryStatusRecord
from center.ingest.metrics import GatewayMetrics
from edgewater.errors import StorageError
from edgewater.streams import EdgeId
from edgewater.wire.frames import QueryRef

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Waiting:
    heartbeats: dict[EdgeId, HeartbeatRecord] = field(default_factory=dict)
    statuses: dict[tuple[EdgeId, QueryRef], QueryStatusRecord] = field(default_factory=dict)
    ends: dict[EdgeId, tuple[str, int]] = field(default_factory=dict)
    alarms: dict[tuple[EdgeId, str], tuple[str, int]] = field(default_factory=dict)


class StatusWriter:
    """Args: interval_s: the least time between two writings."""

    def __init__(self, catalog: Catalog, metrics: GatewayMetrics, interval_s: float) -> None:
        self._catalog = catalog
        self._metrics = metrics
        self._interval_s = interval_s
        self._waiting = _Waiting()
        self._some = asyncio.Event()

    def heartbeat(self, record: HeartbeatRecord) -> None:
        self._waiting.heartbeats[record.edge] = record
        self._some.set()

    def status(self, record: QueryStatusRecord) -> None:
        self._waiting.statuses[record.edge, record.query] = record
        self._some.set()

    def ended(self, edge: EdgeId, session: str, now_ms: int) -> None:
        self._waiting.ends[edge] = (session, now_ms)
        self._some.set()

    def alarm(self, kind: str, message: str, edge: EdgeId, now_ms: int) -> None:
        logger.error("%s: %s", kind, message)
        self._metrics.alarms.labels(kind).inc()
        self._waiting.alarms[edge, kind] = (message, now_ms)
        self._some.set()

    async def run(self) -> None:
        """Writes for ever."""
        while True:
            await self._some.wait()
            await self.flush()
            await asyncio.sleep(self._interval_s)

    async def flush(self) -> None:
        """Writes what there is. What the catalog refuses stays for the next time."""
        self._some.clear()
        taken, self._waiting = self._waiting, _Waiting()
        try:
            await asyncio.to_thread(self._write, taken)
        except StorageError as exc:
            logger.warning("the catalog takes no notes of edges: %s", exc)
            newer = self._waiting
            self._waiting = _Waiting(
                taken.heartbeats | newer.heartbeats,
                taken.statuses | newer.statuses,
                taken.ends | newer.ends,
                taken.alarms | newer.alarms,
            )
            self._some.set()

    def _write(self, taken: _Waiting) -> None:
        for (edge, kind), (message, now_ms) in taken.alarms.items():
            self._catalog.add_alarm(kind, message, edge, now_ms)
        if taken.heartbeats:
            self._catalog.heartbeats(taken.heartbeats.values())
        for status in taken.statuses.values():
            self._catalog.query_status(status.edge, status.query, status.accepted, status.code, status.message)
        for edge, (session, now_ms) in taken.ends.items():
            self._catalog.disconnected(edge, now_ms, session)
