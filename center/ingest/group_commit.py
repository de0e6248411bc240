"""Group commit: all pending frames, of any edges and queries, become durable in one segment and one transaction.

A query lags if the job cannot apply its frames. Frames of lagging queries get a second segment. A segment is removed
with its last frame, so otherwise the frames of one query would keep the frames of all other queries on disk.

While one batch is written, the next batch collects frames, for at least `COMMIT_EVERY_S`. So the batch grows with the
load, and its frames share the cost of a commit. A frame after a pause is written at once. Large frames have commits of
their own, so that no small frame waits until they are on disk, and the last part of the pending bytes is for small
frames. Within a lane, pending edges share the commits by bytes (self-clocked fair queueing: Golestani, INFOCOM 1994).
If the disk or the catalog refuses a batch, the gateway tries it again until it succeeds. Until then no frame of the
lane is acknowledged, and the gateway stops reading at its limits of pending bytes.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush
from weakref import WeakSet

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_exponential

from center.catalog import Catalog, IndexOutcome, UnindexedFrame
from center.ingest.assignments import AssignmentPlan, FrameAdmission
from center.ingest.metrics import GatewayMetrics
from center.storage.frame_log import FrameLocation, FrameLog, StoredFrame
from center.storage.wake import Waker
from edgewater.base.errors import StorageError
from edgewater.base.streams import EdgeId
from edgewater.wire import QueryRef

MAX_BATCH_BYTES = 8 << 20
LARGE_BYTES = 256 << 10  # limit: hundreds of such frames make a commit of small frames a large one.
"""A larger frame is committed apart from small ones."""
SMALL_SHARE = 8  # limit: 32 MiB are thousands of small frames.
"""Large frames wait when all but one of so many parts of the pending bytes are used."""
COMMIT_EVERY_S = 0.025  # limit: commits per second
"""The least time between the starts of two commits (`docs/decisions/0001-frame-log.md`)."""
LAG_MS = 60_000  # limit: how late a lag is stated
"""A query lags while the index has a frame of it that arrived longer ago than this."""
LAG_EVERY_MS = 10_000  # limit: reads of the index
"""The lagging queries are read again after this time."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReceivedFrame:
    """A frame submitted by a session.

    Attributes:
        stored: the frame's identity, and its partials that were not refused.
        arrived: the frame for the index, without a location. Its `plain_bytes` count against the limit of pending
            frames.
        redelivered: the center has acknowledged this seq before, so the frame need not be written again.
        session: the session of the frame. After a frame that is not acknowledged, later frames of the session are not
            acknowledged either.
    """

    stored: StoredFrame
    arrived: UnindexedFrame
    redelivered: bool
    session: object

    @property
    def size(self) -> int:
        return self.arrived.plain_bytes


OnOutcome = Callable[[IndexOutcome | Exception], None]
_Submitted = tuple[ReceivedFrame, OnOutcome]


class _Lane:
    """The commits of small frames, or of large ones.

    Attributes:
        stalled: why its frames cannot be made durable now; None: they can.
    """

    def __init__(self, name: str) -> None:
        # Of each edge whose next frame is of this lane, the virtual time in bytes at which the frame ends: its size
        # after the edge's last frame, or after now. The earliest is next; the number decides between equal ones.
        self._turns: list[tuple[int, int, EdgeId]] = []
        self._now_bytes, self._number = 0, itertools.count()
        # Not a thread of the loop's own: others may use all of them.
        self.thread = ThreadPoolExecutor(1, f"group-commit-{name}")
        self.arrived = asyncio.Event()
        self.stalled: str | None = None

    def __bool__(self) -> bool:
        return bool(self._turns)

    def queue(self, edge: EdgeId, size: int) -> None:
        """Queues an edge, whose next frame has this size."""
        heappush(self._turns, (self._now_bytes + size, next(self._number), edge))
        self.arrived.set()

    def next_edge(self) -> EdgeId:
        """Takes the edge whose turn it is."""
        self._now_bytes, _, edge = heappop(self._turns)
        return edge


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
        self._small, self._large = _Lane("small"), _Lane("large")
        self._pending: dict[EdgeId, deque[_Submitted]] = {}
        self._committing: dict[EdgeId, _Lane] = {}
        self._pending_bytes = 0
        self._stopped: WeakSet[object] = WeakSet()
        self._room = asyncio.Event()
        self._closing = False
        self._lagging: frozenset[QueryRef] = frozenset()
        self._lag_read_at_ms: int | None = None
        self.plan = AssignmentPlan(-1, ())

    @property
    def stalled(self) -> str | None:
        """Why frames cannot be made durable now; None: they can."""
        return self._small.stalled or self._large.stalled

    async def reserve(self, size: int) -> None:
        """Counts a frame as pending before it is decompressed. Blocks while too many frames are pending. Call `submit`
        or `release` then."""
        limit_bytes = self._max_pending_bytes
        if size > LARGE_BYTES:
            limit_bytes -= limit_bytes // SMALL_SHARE
        while self._pending_bytes >= limit_bytes:
            self._room.clear()
            await self._room.wait()
        self._count(size)

    def release(self, size: int) -> None:
        """Cancels the `reserve` of a frame that is not submitted."""
        self._count(-size)

    def submit(self, received: ReceivedFrame, on_outcome: OnOutcome) -> None:
        """Queues a frame for which `reserve` was called. `on_outcome` is called once, in the order of the
        edge's frames."""
        edge = received.stored.edge
        self._metrics.bytes.inc(received.arrived.wire_bytes)
        if edge in self._pending:
            self._pending[edge].append((received, on_outcome))
            return
        self._pending[edge] = deque([(received, on_outcome)])
        self._queue(edge)

    def _queue(self, edge: EdgeId) -> None:
        """Queues an edge for its next frame, unless a commit of the other lane has frames of it: then after that."""
        lane = self._lane_of(edge)
        if self._committing.get(edge, lane) is lane:
            lane.queue(edge, self._pending[edge][0][0].size)

    def _lane_of(self, edge: EdgeId) -> _Lane:
        return self._large if self._pending[edge][0][0].size > LARGE_BYTES else self._small

    async def run(self) -> None:
        """Commits until `close` was called and all frames are committed."""
        await asyncio.gather(self._run(self._small), self._run(self._large))

    async def _run(self, lane: _Lane) -> None:
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            while not lane:
                if self._closing and not self._pending:
                    lane.thread.shutdown(wait=False)
                    self._wake()  # the other lane may wait for the last frame
                    return
                lane.arrived.clear()
                await lane.arrived.wait()
            if (wait_s := next_s - loop.time()) > 0 and not self._closing:
                await asyncio.sleep(wait_s)
            began_s = loop.time()
            next_s = began_s + COMMIT_EVERY_S
            batch = self._take(lane)
            if not batch:
                continue
            outcomes: Sequence[IndexOutcome] | Exception
            try:
                outcomes = await self._commit(lane, [received for received, _ in batch])
            except Exception as exc:  # A bug must end these sessions, not stop the acknowledgements of all others.
                log.exception("a group commit of %d frames failed", len(batch))
                outcomes = exc
            if lane is self._large:  # meanwhile, the disk is free for small frames
                next_s = max(next_s, loop.time() + loop.time() - began_s)
            self._resolve(batch, outcomes)
            self._count(-sum(received.size for received, _ in batch))

    def _resolve(self, batch: Sequence[_Submitted], outcomes: Sequence[IndexOutcome] | Exception) -> None:
        for i, (received, on_outcome) in enumerate(batch):
            outcome = outcomes if isinstance(outcomes, Exception) else outcomes[i]
            if isinstance(outcome, Exception) or not outcome.acknowledged:
                self._stopped.add(received.session)
            _call(on_outcome, outcome)
        for edge in {received.stored.edge for received, _ in batch}:
            lane = self._committing.pop(edge)
            if edge in self._pending and self._lane_of(edge) is not lane:
                self._queue(edge)

    def close(self) -> None:
        """Makes `run` return once all pending frames are committed."""
        self._closing = True
        self._wake()

    def _wake(self) -> None:
        for lane in (self._small, self._large):
            lane.arrived.set()

    def _count(self, size: int) -> None:
        self._pending_bytes += size
        if size < 0:
            self._room.set()
        self._metrics.pending.set(self._pending_bytes)

    def _take(self, lane: _Lane) -> list[_Submitted]:
        """Returns the next batch of a lane. Frames of stopped sessions are not acknowledged."""
        batch: list[_Submitted] = []
        size = 0
        while lane and size < MAX_BATCH_BYTES:
            edge = lane.next_edge()
            waiting = self._pending[edge]
            received, on_outcome = waiting.popleft()
            if received.session in self._stopped:
                self._count(-received.size)
                _call(on_outcome, IndexOutcome.OUT_OF_SEQUENCE)
            else:
                self._committing[edge] = lane
                batch.append((received, on_outcome))
                size += received.size
            if waiting:
                self._queue(edge)
            else:
                del self._pending[edge]
        return batch

    async def _commit(self, lane: _Lane, batch: Sequence[ReceivedFrame]) -> list[IndexOutcome]:
        began = time.perf_counter()
        written: tuple[list[FrameLocation | None], list[bool]] | None = None
        outcomes: list[IndexOutcome] = []
        retryable = retry_if_exception_type((OSError, StorageError))
        stall = partial(self._stall, lane)
        async for attempt in AsyncRetrying(wait=self._wait, retry=retryable, before_sleep=stall):
            with attempt:
                # The locations are kept over attempts: while the database refuses, the disk must not fill with copies.
                loop = asyncio.get_running_loop()
                if written is None:
                    written = await loop.run_in_executor(lane.thread, self._write, batch)
                outcomes = await loop.run_in_executor(lane.thread, self._index, batch, *written)
        if lane.stalled is not None:
            lane.stalled = None
            self._metrics.stalled.set(self.stalled is not None)
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
        now_ms = batch[-1].arrived.received_at_ms
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
        frames = zip(batch, located, refused, strict=True)
        outcomes = self._catalog.frames.index([replace(a.arrived, location=at, refused=no) for a, at, no in frames])
        self._waker.wake()
        return outcomes

    def _stall(self, lane: _Lane, state: RetryCallState) -> None:
        exc = state.outcome.exception() if state.outcome else None
        self._metrics.commit_failures.inc()
        self._metrics.stalled.set(1)
        if self.stalled is None:
            log.error("frames cannot be made durable and are not acknowledged until they can: %s", exc)
        lane.stalled = str(exc)
        self._on_stall()


def _call(on_outcome: OnOutcome, outcome: IndexOutcome | Exception) -> None:
    try:
        on_outcome(outcome)
    except Exception:  # a bug of one session must not stop the acknowledgements of all others
        log.exception("a session failed at the outcome of a frame")
