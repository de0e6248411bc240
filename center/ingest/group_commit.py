"""Group commit: all pending frames, of any edges and queries, become durable in one segment and one transaction.

A query lags if the job cannot apply its frames. Frames of lagging queries get a second segment. A segment is removed
with its last frame, so otherwise the frames of one query would keep the frames of all other queries on disk.

While one batch is written, the next batch collects frames, for at least `COMMIT_EVERY_S`. So the batch grows with the
load, and its frames share the cost of a commit. A frame after a pause is written at once. A batch has frames of all
edges in turn, so that no edge waits for the large frames of another. If the disk or the catalog
refuses a batch, the gateway tries it again until it succeeds. Until then no frame is acknowledged, and the gateway
stops reading at its limits of pending bytes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from weakref import WeakSet

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_exponential

from center.catalog import Catalog, IndexOutcome, UnindexedFrame
from center.ingest.assignments import AssignmentPlan, FrameAdmission
from center.ingest.metrics import GatewayMetrics
from center.storage.frame_log import FrameLocation, FrameLog, StoredFrame
from center.storage.wake import Waker
from edgewater.model.errors import StorageError
from edgewater.model.streams import EdgeId
from edgewater.wire import QueryRef

MAX_BATCH_BYTES = 8 << 20
"""The bytes that an edge waits for at most twice: for the running commit, and for its own."""
COMMIT_EVERY_S = 0.025
"""The least time between the starts of two commits (`docs/decisions/0001-frame-log.md`)."""
LAG_MS = 60_000
"""A query lags while the index has a frame of it that arrived longer ago than this."""
LAG_EVERY_MS = 10_000
"""The lagging queries are read again after this time."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReceivedFrame:
    """A frame submitted by a session.

    Attributes:
        stored: the frame's identity, and its partials that were not refused.
        facts, work, through_ms: as in `CheckedFrame`.
        crc32c: checksum of the body as it was delivered.
        size: bytes that the frame counts against the limit of pending frames.
        redelivered: the center has acknowledged this seq before, so the frame need not be written again.
        run: as in `UnindexedFrame`.
        session: the session of the frame. After a frame that is not acknowledged, later frames of the session are not
            acknowledged either.
    """

    stored: StoredFrame
    facts: bytes
    crc32c: int
    wire_bytes: int
    size: int
    received_at_ms: int
    redelivered: bool
    work: int
    through_ms: int
    session: object
    run: int = 0


OnOutcome = Callable[[IndexOutcome | Exception], None]
_Submitted = tuple[ReceivedFrame, OnOutcome]


class GroupCommit:
    """Makes frames durable. The frames of an edge keep their order.

    Args:
        max_pending_bytes: limit of the total `size` of pending frames over all sessions; `reserve` blocks beyond it.
        read_plan: returns the newest plan, given the one in use; blocks.
        waker: wakes the drivers when frames are indexed.
        on_stall: called after each failed attempt and after recovery. `stalled` distinguishes these.
        retry_ms, retry_max_ms: delay after the first failure, and its maximum.

    Attributes:
        plan: decides which frames are written. The gateway sets it when the catalog changes.
        stalled: why no frame can be made durable now; None: frames can be made durable.
    """

    def __init__(
        self,
        catalog: Catalog,
        log: FrameLog,
        metrics: GatewayMetrics,
        *,
        max_pending_bytes: int,
        read_plan: Callable[[AssignmentPlan], AssignmentPlan],
        waker: Waker,
        on_stall: Callable[[], None],
        retry_ms: int,
        retry_max_ms: int,
    ) -> None:
        self._catalog = catalog
        self._log = log
        self._metrics = metrics
        self._max_pending_bytes = max_pending_bytes
        self._read_plan, self._waker = read_plan, waker
        self._on_stall = on_stall
        self._wait = wait_exponential(multiplier=retry_ms / 1000, max=retry_max_ms / 1000)
        self._pending: dict[EdgeId, deque[_Submitted]] = {}
        self._pending_bytes = 0
        self._stopped: WeakSet[object] = WeakSet()
        # Not a thread of the loop's own: sessions that decompress large frames may use all of them.
        self._thread = ThreadPoolExecutor(1, "group-commit")
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._closing = False
        self._lagging: frozenset[QueryRef] = frozenset()
        self._lag_read_at_ms: int | None = None
        self.plan = AssignmentPlan(-1, ())
        self.stalled: str | None = None

    async def reserve(self, size: int) -> None:
        """Counts a frame as pending before it is decompressed. Blocks while too many frames are pending. Call `submit`
        or `release` then."""
        while self._pending_bytes >= self._max_pending_bytes:
            self._room.clear()
            await self._room.wait()
        self._count(size)

    def release(self, size: int) -> None:
        """Cancels the `reserve` of a frame that is not submitted."""
        self._count(-size)

    def submit(self, received: ReceivedFrame, on_outcome: OnOutcome) -> None:
        """Queues a frame for which `reserve` was called. `on_outcome` is called once, in the order of the
        edge's frames."""
        self._pending.setdefault(received.stored.edge, deque()).append((received, on_outcome))
        self._metrics.bytes.inc(received.wire_bytes)
        self._arrived.set()

    async def run(self) -> None:
        """Commits until `close` was called and the queue is empty."""
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            while not self._pending:
                if self._closing:
                    self._thread.shutdown(wait=False)
                    return
                self._arrived.clear()
                await self._arrived.wait()
            if (wait_s := next_s - loop.time()) > 0 and not self._closing:
                await asyncio.sleep(wait_s)
            next_s = loop.time() + COMMIT_EVERY_S
            batch = self._take()
            if not batch:
                continue
            outcomes: Sequence[IndexOutcome] | Exception
            try:
                outcomes = await self._commit([received for received, _ in batch])
            except Exception as exc:  # A bug must end these sessions, not stop the acknowledgements of all others.
                log.exception("a group commit of %d frames failed", len(batch))
                outcomes = exc
            self._resolve(batch, outcomes)
            self._count(-sum(received.size for received, _ in batch))

    def _resolve(self, batch: Sequence[_Submitted], outcomes: Sequence[IndexOutcome] | Exception) -> None:
        for i, (received, on_outcome) in enumerate(batch):
            outcome = outcomes if isinstance(outcomes, Exception) else outcomes[i]
            if isinstance(outcome, Exception) or not outcome.acknowledged:
                self._stopped.add(received.session)
            _call(on_outcome, outcome)

    def close(self) -> None:
        """Makes `run` return once all pending frames are committed."""
        self._closing = True
        self._arrived.set()

    def _count(self, size: int) -> None:
        self._pending_bytes += size
        if size < 0:
            self._room.set()
        self._metrics.pending.set(self._pending_bytes)

    def _take(self) -> list[_Submitted]:
        """Returns the next batch, a frame of each edge in turn. Frames of stopped sessions are not acknowledged."""
        batch: list[_Submitted] = []
        size = 0
        while self._pending and size < MAX_BATCH_BYTES:
            edge = next(iter(self._pending))
            waiting = self._pending.pop(edge)
            received, on_outcome = waiting.popleft()
            if waiting:
                self._pending[edge] = waiting  # last in turn
            if received.session in self._stopped:
                self._count(-received.size)
                _call(on_outcome, IndexOutcome.OUT_OF_SEQUENCE)
                continue
            batch.append((received, on_outcome))
            size += received.size
        return batch

    async def _commit(self, batch: Sequence[ReceivedFrame]) -> list[IndexOutcome]:
        began = time.perf_counter()
        written: tuple[list[FrameLocation | None], list[bool]] | None = None
        outcomes: list[IndexOutcome] = []
        retryable = retry_if_exception_type((OSError, StorageError))
        async for attempt in AsyncRetrying(wait=self._wait, retry=retryable, before_sleep=self._stall):
            with attempt:
                # The locations are kept over attempts: while the database refuses, the disk must not fill with copies.
                loop = asyncio.get_running_loop()
                if written is None:
                    written = await loop.run_in_executor(self._thread, self._write, batch)
                outcomes = await loop.run_in_executor(self._thread, self._index, batch, *written)
        if self.stalled is not None:
            self.stalled = None
            self._metrics.stalled.set(0)
            self._on_stall()
        self._metrics.commits.inc()
        self._metrics.commit_seconds.observe(time.perf_counter() - began)
        for outcome, count in Counter(outcomes).items():
            self._metrics.frames.labels(outcome.value).inc(count)
        return outcomes

    def _write(self, batch: Sequence[ReceivedFrame]) -> tuple[list[FrameLocation | None], list[bool]]:
        """Writes the frames that must be kept, durably. Returns the location of each frame, or None, and whether each
        frame is refused."""
        fresh = [i for i, received in enumerate(batch) if not received.redelivered]
        plan = self.plan  # one value, because the event loop may set another plan meanwhile
        admitted = {i: plan.admission(batch[i].stored.edge, batch[i].stored.query) for i in fresh}
        if any(a is not FrameAdmission.KEPT for a in admitted.values()):
            # The edge has received the query of the frame, and its Hello is in the catalog. So the plan read now
            # decides.
            plan = self._read_plan(plan)
            admitted = {i: plan.admission(batch[i].stored.edge, batch[i].stored.query) for i in fresh}
        kept = [i for i in fresh if admitted[i] is FrameAdmission.KEPT]
        located: list[FrameLocation | None] = [None] * len(batch)
        if kept:
            for i, location in self._append(batch, kept).items():
                located[i] = location
        return located, [admitted.get(i) is FrameAdmission.NOT_EXPECTED for i in range(len(batch))]

    def _append(self, batch: Sequence[ReceivedFrame], kept: Sequence[int]) -> dict[int, FrameLocation]:
        """Writes the frames with these indices durably. Returns their locations. Raises OSError, StorageError."""
        now_ms = batch[-1].received_at_ms
        if self._lag_read_at_ms is None or abs(now_ms - self._lag_read_at_ms) >= LAG_EVERY_MS:
            self._lagging = self._catalog.frames.lagging_queries(now_ms - LAG_MS)
            self._lag_read_at_ms = now_ms
        located: dict[int, FrameLocation] = {}
        try:
            for lags in (False, True):
                part = [i for i in kept if (batch[i].stored.query in self._lagging) is lags]
                if part:
                    located |= zip(part, self._log.append([batch[i].stored for i in part]), strict=True)
        except OSError:
            for segment in {location.segment for location in located.values()}:  # the next attempt writes it again
                self._log.remove(segment)
            raise
        return located

    def _index(
        self, batch: Sequence[ReceivedFrame], located: Sequence[FrameLocation | None], refused: Sequence[bool]
    ) -> list[IndexOutcome]:
        outcomes = self._catalog.frames.index(
            [
                UnindexedFrame(
                    query=a.stored.query,
                    edge=a.stored.edge,
                    incarnation=a.stored.incarnation,
                    seq=a.stored.seq,
                    crc32c=a.crc32c,
                    wire_bytes=a.wire_bytes,
                    received_at_ms=a.received_at_ms,
                    location=location,
                    plain_bytes=a.size,
                    work=a.work,
                    through_ms=a.through_ms,
                    refused=is_refused,
                    run=a.run,
                    facts=a.facts,
                )
                for a, location, is_refused in zip(batch, located, refused, strict=True)
            ]
        )
        self._waker.wake()
        return outcomes

    def _stall(self, state: RetryCallState) -> None:
        exc = state.outcome.exception() if state.outcome else None
        self._metrics.commit_failures.inc()
        self._metrics.stalled.set(1)
        if self.stalled is None:
            log.error("frames cannot be made durable and are not acknowledged until they can: %s", exc)
        self.stalled = str(exc)
        self._on_stall()


def _call(on_outcome: OnOutcome, outcome: IndexOutcome | Exception) -> None:
    try:
        on_outcome(outcome)
    except Exception:  # a bug of one session must not stop the acknowledgements of all others
        log.exception("a session failed at the outcome of a frame")
