"""Write-behind buffer for session metadata in the catalog: heartbeats, query statuses, ends of sessions, alarms.

It writes at most once per interval, all heartbeats in one transaction, so ten thousand edges cost as many transactions
as one. It holds only the newest record of each kind per edge, which bounds it. What the catalog refuses is tried
again.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from itertools import islice

from center.catalog import Catalog, HeartbeatRecord, QueryStatusRecord
from center.ingest.metrics import GatewayMetrics
from edgewater.errors import StorageError
from edgewater.streams import EdgeId
from edgewater.wire import QueryRef

logger = logging.getLogger(__name__)

MAX_STATUSES = 500
"""The most statuses in one write, which takes 0.1 to 0.3 s. The others follow after the heartbeats of all edges."""


@dataclass(slots=True)
class _Pending:
    heartbeats: dict[EdgeId, HeartbeatRecord] = field(default_factory=dict)
    statuses: dict[tuple[EdgeId, QueryRef], QueryStatusRecord] = field(default_factory=dict)
    ends: dict[EdgeId, tuple[str, int]] = field(default_factory=dict)
    alarms: dict[tuple[EdgeId, str, str], tuple[str, int]] = field(default_factory=dict)


class StatusWriter:
    """Buffers status updates until `run` or `flush` writes them.

    Args:
        interval_s: the least time between two writes.
    """

    def __init__(self, catalog: Catalog, metrics: GatewayMetrics, interval_s: float) -> None:
        self._catalog = catalog
        self._metrics = metrics
        self._interval_s = interval_s
        self._pending = _Pending()
        self._changed = asyncio.Event()

    def heartbeat(self, record: HeartbeatRecord) -> None:
        self._pending.heartbeats[record.edge] = record
        self._changed.set()

    def status(self, record: QueryStatusRecord) -> None:
        self._pending.statuses[record.edge, record.query] = record
        self._changed.set()

    def session_ended(self, edge: EdgeId, session: str, now_ms: int) -> None:
        self._pending.ends[edge] = (session, now_ms)
        self._changed.set()

    def alarm(self, kind: str, message: str, edge: EdgeId, now_ms: int, query: str = "") -> None:
        """Adds an alarm. Of those of one kind, edge and query between two writes, the first is logged, the last
        written.

        Args:
            query: key of the query that it is about; empty: of none.
        """
        if (edge, kind, query) not in self._pending.alarms:
            logger.error("%s: %s", kind, message)
        self._metrics.alarms.labels(kind).inc()
        self._pending.alarms[edge, kind, query] = (message, now_ms)
        self._changed.set()

    async def run(self) -> None:
        """Writes until cancelled."""
        while True:
            await self._changed.wait()
            await self.flush()
            await asyncio.sleep(self._interval_s)

    async def flush(self) -> None:
        """Writes the buffered updates. Those that the catalog refuses stay in the buffer."""
        self._changed.clear()
        taken, self._pending = self._pending, _Pending()
        if len(taken.statuses) > MAX_STATUSES:
            statuses = iter(taken.statuses.items())
            taken.statuses = dict(islice(statuses, MAX_STATUSES))
            self._pending.statuses = dict(statuses)
            self._changed.set()
        try:
            await asyncio.to_thread(self._write, taken)
        except StorageError as exc:
            logger.warning("the status of edges cannot be written to the catalog: %s", exc)
            newer = self._pending
            self._pending = _Pending(
                taken.heartbeats | newer.heartbeats,
                taken.statuses | newer.statuses,
                taken.ends | newer.ends,
                taken.alarms | newer.alarms,
            )
            self._changed.set()

    def _write(self, taken: _Pending) -> None:
        for (edge, kind, query), (message, now_ms) in taken.alarms.items():
            self._catalog.add_alarm(kind, message, edge, now_ms, query)
        if taken.heartbeats:
            self._catalog.record_heartbeats(taken.heartbeats.values())
        if taken.statuses:
            self._catalog.record_query_statuses(taken.statuses.values())
        for edge, (session, now_ms) in taken.ends.items():
            self._catalog.end_session(edge, now_ms, session)
