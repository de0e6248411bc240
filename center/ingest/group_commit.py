"""Group commit: whatever frames wait, of whatever edges, become durable by one fsync and one transaction.

While one batch is written, the next one gathers, so the batch grows with the load and the cost of an
fsync is shared by all who wait for it. What the disk or the catalog refuses is tried again until it is
taken; until then nobody's frame is acknowledged, and the gateway stops reading at its bounds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakSet

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_exponential

from center.catalog import Catalog, IndexOutcome, SegmentDropped, UnindexedFrame
from center.ingest.metrics import GatewayMetrics
from center.storage.frame_log import FrameLocation, FrameLog, StoredFrame
from edgewater.errors import StorageError
from edgewater.wire.frames import QueryRef

MAX_BATCH_BYTES = 32 << 20
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReceivedFrame:
    """A frame as a session hands it over.

    Attributes:
        redelivered: the center has acknowledged this seq before, so it need not be written again.
        session: whose it is. Once a frame of a session is not taken, none behind it is.
    """

    stored: StoredFrame
    received_at_ms: int
    redelivered: bool
    session: object

    @property
    def wire_bytes(self) -> int:
        return self.stored.frame.wire_bytes


class GroupCommit:
    """Makes frames durable, in the order in which they were submitted.

    Args:
        max_waiting_bytes: bound of what waits here, over all sessions; `submit` waits beyond it.
        on_stall: called at each failed attempt, and when it is over; `stalled` says which.
        retry_ms, retry_max_ms: wait after the first failure, and the longest.
    """

    def __init__(
        self,
        catalog: Catalog,
        log: FrameLog,
        metrics: GatewayMetrics,
        *,
        max_waiting_bytes: int,
        on_stall: Callable[[], None],
        retry_ms: int,
        retry_max_ms: int,
    ) -> None:
        self._catalog = catalog
        self._log = log
        self._metrics = metrics
        self._max_waiting_bytes = max_waiting_bytes
        self._on_stall = on_stall
        self._wait = wait_exponential(multiplier=retry_ms / 1000, max=retry_max_ms / 1000)
        self._waiting: deque[tuple[ReceivedFrame, asyncio.Future[IndexOutcome]]] = deque()
        self._waiting_bytes = 0
        self._stopped: WeakSet[object] = WeakSet()
        self._changed = asyncio.Condition()
        self._closing = False
        self.live: frozenset[QueryRef] = frozenset()
        """The queries of which frames are written; whoever sees the catalog change sets it anew."""
        self.stalled: str | None = None
        """Why nothing can be made durable at present; None: all is well."""

    async def submit(self, arrival: ReceivedFrame) -> asyncio.Future[IndexOutcome]:
        """Queues a frame, waiting for room if need be. The future says what became of it."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._waiting_bytes < self._max_waiting_bytes)
            outcome: asyncio.Future[IndexOutcome] = asyncio.get_running_loop().create_future()
            self._waiting.append((arrival, outcome))
            self._count(arrival.wire_bytes)
            self._changed.notify_all()
        return outcome

    async def run(self) -> None:
        """Commits until `close` was called and nothing waits."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                batch = self._take()
            if not batch:
                continue
            outcomes: Sequence[IndexOutcome] | Exception
            try:
                outcomes = await self._commit([arrival for arrival, _ in batch])
            except Exception as exc:  # A bug must end these sessions, not the acknowledgements of all others.
                logger.exception("a group commit of %d frames failed", len(batch))
                outcomes = exc
            self._answer(batch, outcomes)
            async with self._changed:
                self._count(-sum(arrival.wire_bytes for arrival, _ in batch))
                self._changed.notify_all()

    def _answer(
        self,
        batch: Sequence[tuple[ReceivedFrame, asyncio.Future[IndexOutcome]]],
        outcomes: Sequence[IndexOutcome] | Exception,
    ) -> None:
        for i, (arrival, waiting) in enumerate(batch):
            if isinstance(outcomes, Exception) or not outcomes[i].acknowledged:
                self._stopped.add(arrival.session)
            if waiting.done():
                continue
            if isinstance(outcomes, Exception):
                waiting.set_exception(outcomes)
            else:
                waiting.set_result(outcomes[i])

    async def close(self) -> None:
        """Lets `run` return once all that waits is committed."""
        async with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _count(self, size: int) -> None:
        self._waiting_bytes += size
        self._metrics.waiting.set(self._waiting_bytes)

    def _take(self) -> list[tuple[ReceivedFrame, asyncio.Future[IndexOutcome]]]:
        """The next batch; frames of sessions that were stopped are answered at once."""
        batch, size = [], 0
        while self._waiting and size < MAX_BATCH_BYTES:
            arrival, waiting = self._waiting.popleft()
            if arrival.session in self._stopped:
                self._count(-arrival.wire_bytes)
                if not waiting.done():
                    waiting.set_result(IndexOutcome.REFUSED)
                continue
            batch.append((arrival, waiting))
            size += arrival.wire_bytes
        self._changed.notify_all()
        return batch

    async def _commit(self, batch: Sequence[ReceivedFrame]) -> list[IndexOutcome]:
        began = time.perf_counter()
        located: list[FrameLocation | None] | None = None
        outcomes: list[IndexOutcome] = []
        refusals = retry_if_exception_type((OSError, StorageError))
        async for attempt in AsyncRetrying(wait=self._wait, retry=refusals, before_sleep=self._stall):
            with attempt:
                while not outcomes:
                    # Kept over attempts: a database that refuses must not fill the disk with copies.
                    if located is None:
                        located = await asyncio.to_thread(self._write, batch)
                    try:
                        outcomes = await asyncio.to_thread(self._index, batch, located)
                    except SegmentDropped:
                        self._log.roll()
                        located = None
        if self.stalled is not None:
            self.stalled = None
            self._metrics.stalled.set(0)
            self._on_stall()
        self._metrics.commits.inc()
        self._metrics.commit_seconds.observe(time.perf_counter() - began)
        for outcome in outcomes:
            self._metrics.frames.labels(outcome.value).inc()
        return outcomes

    def _write(self, batch: Sequence[ReceivedFrame]) -> list[FrameLocation | None]:
        """Writes what must be kept, durably; where each frame lies, or None."""
        fresh = [i for i, arrival in enumerate(batch) if not arrival.redelivered]
        live = self.live  # Of one look, whatever the event loop sets meanwhile.
        if any(batch[i].stored.frame.query not in live for i in fresh):
            # Whoever made a frame has heard of its query, so a look taken now shows every query that lives.
            live = self.live = frozenset(q.ref for q in self._catalog.queries())
        kept = [i for i in fresh if batch[i].stored.frame.query in live]
        located: list[FrameLocation | None] = [None] * len(batch)
        if kept:
            locations = self._log.append([batch[i].stored for i in kept])
            self._log.sync()
            for i, location in zip(kept, locations, strict=True):
                located[i] = location
        return located

    def _index(self, batch: Sequence[ReceivedFrame], located: Sequence[FrameLocation | None]) -> list[IndexOutcome]:
        return self._catalog.index(
            [
                UnindexedFrame(
                    query=a.stored.frame.query,
                    edge=a.stored.edge,
                    incarnation=a.stored.incarnation,
                    seq=a.stored.frame.seq,
                    crc32c=a.stored.frame.crc32c,
                    wire_bytes=a.wire_bytes,
                    received_at_ms=a.received_at_ms,
                    location=location,
                )
                for a, location in zip(batch, located, strict=True)
            ]
        )

    def _stall(self, state: RetryCallState) -> None:
        exc = state.outcome.exception() if state.outcome else None
        self._metrics.commit_failures.inc()
        self._metrics.stalled.set(1)
        if self.stalled is None:
            logger.error("frames cannot be made durable, and are not acknowledged until they are: %s", exc)
        self.stalled = str(exc)
        self._on_stall()
