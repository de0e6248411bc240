"""Write-behind buffer for session metadata in the catalog: heartbeats, query statuses, ends of sessions, alarms.

It writes at most once per interval, so ten thousand edges need as many transactions as one edge. The number of
heartbeats and statuses in one write is limited; the records that have waited longest are written first. An edge that
becomes silent or comes back is written at once. The buffer has only the newest record of each kind per edge, which
limits its size. If the catalog refuses a write, it is tried again.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from center.catalog import Catalog
from center.ingest.metrics import GatewayMetrics
from edgewater.base.errors import StorageError
from edgewater.base.streams import EdgeId
from edgewater.model.edge_records import UNREACHABLE_AFTER_MS, HeartbeatRecord, InputRecord, QueryStatusRecord
from edgewater.wire import QueryRef

SILENT_HEARTBEATS = 2.5
"""An edge is recorded as silent after this many intervals, and not before `UNREACHABLE_AFTER_MS`."""
SIGN_OF_LIFE_MS = 1_000  # limit: writes of a gateway at rest
"""How often a gateway with sessions records in the catalog that it works. `EdgeRecord.reachable` depends on it."""
_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")
log = logging.getLogger(__name__)

MAX_STATUSES = 2_000
"""Maximum number of statuses in one write, which takes 45 ms of CPU."""
MAX_INPUTS = 20
"""Maximum number of reports of files in one write, of 64 rows each."""
MAX_HEARTBEATS = 1_000
"""Maximum number of heartbeats in one write, which takes 15 ms."""


@dataclass(slots=True)
class _Pending:
    heartbeats: dict[EdgeId, HeartbeatRecord] = field(default_factory=dict)
    statuses: dict[tuple[EdgeId, QueryRef], QueryStatusRecord] = field(default_factory=dict)
    inputs: dict[EdgeId, tuple[InputRecord, ...]] = field(default_factory=dict)
    ends: dict[EdgeId, tuple[str, int]] = field(default_factory=dict)
    alarms: dict[tuple[EdgeId, str, str], tuple[str | None, int]] = field(default_factory=dict)


class StatusWriter:
    """Buffers status updates until `run` or `flush` writes them.

    Args:
        interval_s: the least time between two writes.
        now_ms: wall clock.

    Attributes:
        gateway: names this process in the catalog.
    """

    def __init__(self, catalog: Catalog, metrics: GatewayMetrics, interval_s: float, now_ms: Callable[[], int]) -> None:
        self.gateway = uuid.uuid4().hex
        self._catalog = catalog
        self._metrics = metrics
        self._interval_s = interval_s
        self._now_ms = now_ms
        self._pending = _Pending()
        self._lasting = {(alarm.edge, alarm.kind) for alarm in catalog.alarms.latest()}
        self._heard: dict[EdgeId, tuple[int, int]] = {}
        self._silent: frozenset[EdgeId] = frozenset()
        self._sign_at_ms, self._is_failing = 0, False
        self._changed = asyncio.Event()

    def session_began(self, edge: EdgeId, now_ms: int) -> None:
        self._heard[edge] = now_ms, UNREACHABLE_AFTER_MS
        self._changed.set()

    def heartbeat(self, record: HeartbeatRecord, every_ms: int) -> None:
        """Keeps the newest heartbeat of an edge until it is written.

        Args:
            every_ms: the interval at which the edge has to send heartbeats.
        """
        silence_ms = max(UNREACHABLE_AFTER_MS, round(SILENT_HEARTBEATS * every_ms))
        self._heard[record.edge] = record.seen_at_ms, silence_ms
        self._pending.heartbeats[record.edge] = record
        self._changed.set()

    def heard(self, edge: EdgeId, now_ms: int) -> None:
        """Notes a frame: an edge that sends frames sends fewer heartbeats."""
        self._heard[edge] = now_ms, self._heard.get(edge, (0, UNREACHABLE_AFTER_MS))[1]

    def status(self, record: QueryStatusRecord) -> None:
        self._pending.statuses[record.edge, record.query] = record
        self._changed.set()

    def inputs(self, edge: EdgeId, records: tuple[InputRecord, ...]) -> None:
        self._pending.inputs[edge] = records
        self._changed.set()

    def session_ended(self, edge: EdgeId, session: str, now_ms: int) -> None:
        self._heard.pop(edge, None)
        self._pending.ends[edge] = (session, now_ms)
        self._changed.set()

    def alarm(self, kind: str, message: str, edge: EdgeId, now_ms: int, query: str = "") -> None:
        """Adds an alarm. If several alarms of one kind, edge and query come between two writes, the first one is logged
        and the last one is written.

        Args:
            query: key of the query that the alarm is about; empty: it is about no query.
        """
        if (edge, kind, query) not in self._pending.alarms:
            log.error("%s: %s", kind, message)
        self._metrics.alarms.labels(kind).inc()
        self._pending.alarms[edge, kind, query] = (message, now_ms)
        self._lasting.add((edge, kind))
        self._changed.set()

    def end_alarm(self, kind: str, edge: EdgeId) -> None:
        """Removes an alarm about a state that has ended. Without such an alarm, the call costs nothing."""
        if (edge, kind) in self._lasting:
            self._lasting.discard((edge, kind))
            self._pending.alarms[edge, kind, ""] = (None, self._now_ms())
            self._changed.set()

    async def run(self) -> None:
        """Writes until cancelled."""
        while True:
            await self._changed.wait()
            await self.flush()
            await asyncio.sleep(self._interval_s)

    async def flush(self, *, all_heartbeats: bool = False) -> None:
        """Writes the buffered updates: only the oldest statuses and, unless `all_heartbeats`, only the oldest
        heartbeats. Updates that the catalog refuses stay in the buffer."""
        self._changed.clear()
        pending = self._pending
        most = len(pending.heartbeats) if all_heartbeats else MAX_HEARTBEATS
        taken = _Pending(
            _take(pending.heartbeats, most),
            _take(pending.statuses, MAX_STATUSES),
            _take(pending.inputs, MAX_INPUTS),
            pending.ends,
            pending.alarms,
        )
        self._pending = _Pending(pending.heartbeats, pending.statuses, pending.inputs)
        now_ms = self._now_ms()
        silent = frozenset(e for e, (at_ms, silence_ms) in self._heard.items() if now_ms - at_ms > silence_ms)
        changed = {e: (e not in silent, self._heard[e][0]) for e in silent ^ self._silent if e in self._heard}
        longest_ms = max((silence_ms for _, silence_ms in self._heard.values()), default=UNREACHABLE_AFTER_MS)
        if self._heard or pending.heartbeats or pending.statuses or pending.inputs:
            self._changed.set()
        try:
            await asyncio.to_thread(self._write, taken, changed, longest_ms, now_ms)
            self._silent, self._is_failing = silent, False
        except StorageError as exc:
            if not self._is_failing:  # once per outage
                log.warning("the status of edges cannot be written to the catalog: %s", exc)
            self._is_failing = True
            newer = self._pending
            self._pending = _Pending(
                taken.heartbeats | newer.heartbeats,
                taken.statuses | newer.statuses,
                taken.inputs | newer.inputs,
                taken.ends | newer.ends,
                taken.alarms | newer.alarms,
            )
            self._changed.set()

    def _write(self, taken: _Pending, changed: dict[EdgeId, tuple[bool, int]], silence_ms: int, now_ms: int) -> None:
        """Writes one kind after the other, and removes the written updates. After a failure, the rest is tried
        again."""
        while taken.alarms:
            (edge, kind, query), (message, at_ms) = next(iter(taken.alarms.items()))
            if message is None:
                self._catalog.alarms.end(kind, edge, query)
            else:
                self._catalog.alarms.add(kind, message, edge, at_ms, query)
            del taken.alarms[edge, kind, query]
        if taken.heartbeats:
            self._catalog.edges.record_heartbeats(taken.heartbeats.values())
            taken.heartbeats.clear()
        if taken.statuses:
            self._catalog.queries.record_statuses(taken.statuses.values())
            taken.statuses.clear()
        if taken.inputs:
            self._catalog.edges.record_inputs(taken.inputs, now_ms)
            taken.inputs.clear()
        self._catalog.edges.end_sessions(taken.ends)
        taken.ends.clear()
        is_sign_due = not 0 <= now_ms - self._sign_at_ms < SIGN_OF_LIFE_MS  # also if the clock was set back
        if changed or (self._heard and is_sign_due):
            self._catalog.edges.record_silence(self.gateway, changed, silence_ms=silence_ms, now_ms=now_ms)
            self._sign_at_ms = now_ms


def _take(pending: dict[_K, _V], most: int) -> dict[_K, _V]:
    """Removes and returns the first entries, at most `most` entries."""
    taken = dict(islice(pending.items(), most))
    for key in taken:
        del pending[key]
    return taken
