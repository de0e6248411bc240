"""One session with the center, from Hello to its end."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc

from edge.uplink.flow_control import DailyCap, Link, LinkLimits, TokenBucket
from edge.uplink.ports import BudgetOrder, Listener, Outbox, QueryStatusReport
from edgewater.errors import InvalidQuery, ProtocolError, StorageError
from edgewater.query import QuerySpec
from edgewater.wire import uplink_pb2 as pb
from edgewater.wire.frames import Frame, QueryRef, SamplingReason

MESSAGE_OVERHEAD_BYTES = 32
"""Wire bytes of a message besides itself: gRPC's header, HTTP/2's and TLS's of its first frame."""
HTTP2_FRAME_BYTES, HTTP2_HEADER_BYTES = 16 << 10, 9

_AIO: Any = grpc.aio  # its type stubs lack EOF
logger = logging.getLogger(__name__)


class LinkDown(ProtocolError):
    """The session is over, for a reason that a new one may not meet."""


class Pacing:
    """The link and the caps over all sessions: when a frame may leave, and how large it may be."""

    def __init__(
        self,
        limits: LinkLimits,
        now_ms: Callable[[], int],
        monotonic: Callable[[], float],
        daily: DailyCap | None = None,
    ) -> None:
        self.link = Link()
        self._now_ms = now_ms
        self._monotonic = monotonic
        self._bucket = TokenBucket(limits.bandwidth_bytes_s, monotonic()) if limits.bandwidth_bytes_s else None
        self._daily = daily
        self._throttled_until_s = 0.0

    def throttle(self, seconds: float) -> None:
        self._throttled_until_s = self._monotonic() + seconds

    def spend(self, size: int) -> None:
        """Counts a message of `size` bytes, which is about to leave, against the caps: with its envelope.

        Raises:
            LinkDown: the day's count cannot be written down, so nothing may leave.
        """
        wire_bytes = size + MESSAGE_OVERHEAD_BYTES + size // HTTP2_FRAME_BYTES * HTTP2_HEADER_BYTES
        if self._bucket is not None:
            self._bucket.spend(wire_bytes, self._monotonic())
        if self._daily is not None:
            try:
                self._daily.spend(wire_bytes, self._now_ms())
            except StorageError as exc:
                raise LinkDown(f"what is sent today cannot be counted: {exc}") from exc

    def delay_s(self) -> float:
        """How long nothing may be sent, by the center's word, a cap or the link's pace; 0: something may."""
        now_s = self._monotonic()
        delays = [self._throttled_until_s - now_s, self.link.delay_s(now_s)]
        if self._bucket is not None:
            delays.append(self._bucket.delay_s(now_s))
        if self._daily is not None:
            delays.append(self._daily.delay_s(self._now_ms()))
        return max(0.0, *delays)


class Takes:
    """The one `Outbox.take` under way, which outlives a session: a frame it has pulled out of the core
    must leave next, whatever happens to the link meanwhile."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._task: asyncio.Task[Frame] | None = None

    async def frame(self, capacity_bytes: int) -> Frame:
        if self._task is None:
            self._task = asyncio.create_task(_take(self._outbox, capacity_bytes))
        frame = await asyncio.shield(self._task)
        self._task = None
        return frame

    async def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


async def _take(outbox: Outbox, capacity_bytes: int) -> Frame:
    return await outbox.take(capacity_bytes)


class UplinkSession:
    """Runs one call of the service.

    Args:
        call: the gRPC call, not yet used.
        silence_s: nothing from the center for so long ends the session.
    """

    def __init__(
        self,
        call: Any,
        outbox: Outbox,
        listener: Listener,
        takes: Takes,
        pacing: Pacing,
        *,
        limits: LinkLimits,
        silence_s: float,
        monotonic: Callable[[], float],
    ) -> None:
        self._call = call
        self._outbox = outbox
        self._listener = listener
        self._takes = takes
        self._pacing = pacing
        self._limits = limits
        self._silence_s = silence_s
        self._monotonic = monotonic
        self._writing = asyncio.Lock()
        self._closing = False
        self._moved = asyncio.Event()
        self._budgets_moved = asyncio.Event()
        self._echoes: dict[int, float] = {}
        self._last_sent = -1
        self._max_frame_bytes = 0
        self.silent = False
        """Whether the session ended because nothing came any more."""
        self.acknowledged = False
        """Whether any frame was acknowledged on it."""

    async def open(self) -> None:
        """Says Hello and hears Welcome. Raises LinkDown or AioRpcError."""
        hello = self._listener.hello()
        await self._write(pb.FromEdge(hello=hello))
        first = await self._read()
        if first.WhichOneof("message") != "welcome":
            raise LinkDown(f"the center's first message is {first.WhichOneof('message')}, expected welcome")
        welcome = first.welcome
        acked = welcome.acked_through if welcome.any_acked else None
        if acked is not None and acked >= hello.next_seq:
            raise LinkDown(f"the center has frame {acked}, the next one to be made here is {hello.next_seq}")
        self._last_sent = hello.oldest_seq - 1 if acked is None else max(acked, hello.oldest_seq - 1)
        self._max_frame_bytes = welcome.max_frame_bytes
        self._pacing.link.begin(welcome.credit_bytes)
        self._listener.on_welcome(acked)

    async def run(self) -> None:
        """Works until the session ends, by raising. Cancelled, it says Goodbye and hears the last words.

        Raises:
            LinkDown, AioRpcError: the session is over.
        """
        hear = asyncio.create_task(self._hear())
        loops = (self._send_frames(), self._beat(), self._report_budgets())
        tasks = (hear, *(asyncio.create_task(loop) for loop in loops))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except asyncio.CancelledError:
            with suppress(TimeoutError, LinkDown, grpc.aio.AioRpcError):
                async with asyncio.timeout(self._limits.goodbye_s):
                    await self._goodbye(hear)
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _goodbye(self, hear: asyncio.Task[None]) -> None:
        # Behind the lock, because a write that is cancelled half-way takes the call with it.
        async with self._writing:
            self._closing = True
            await self._call.write(pb.FromEdge(goodbye=pb.Goodbye(reason="the agent stops")))
        await self._call.done_writing()
        await hear

    async def _write(self, message: pb.FromEdge) -> None:
        async with self._writing:
            if self._closing:
                raise LinkDown("the session is closing")
            self._pacing.spend(message.ByteSize())
            try:
                await self._call.write(message)
            except asyncio.InvalidStateError as exc:
                raise LinkDown("the call is over") from exc

    async def _read(self) -> pb.ToEdge:
        try:
            async with asyncio.timeout(max(self._silence_s, 4 * self._pacing.link.slowest_ack_s)):
                message = await self._call.read()
        except TimeoutError as exc:
            self.silent = True
            raise LinkDown(f"nothing has come from the center for {self._silence_s:g} s") from exc
        if message is _AIO.EOF:
            # The status says why: raised as AioRpcError unless the center simply ended.
            code, details = await self._call.code(), await self._call.details()
            raise LinkDown(f"the center has ended the session: {code.name} {details or ''}".rstrip())
        return message  # type: ignore[no-any-return]

    async def _send_frames(self) -> None:
        for frame in self._outbox.unacknowledged(self._last_sent if self._last_sent >= 0 else None):
            await self._room()
            await self._send(frame)
        while True:
            await self._send(await self._takes.frame(await self._room()))

    async def _send(self, frame: Frame) -> None:
        if frame.seq <= self._last_sent:
            return  # Taken while the link was down, and sent among the unacknowledged ones.
        if frame.seq != self._last_sent + 1:
            raise RuntimeError(f"the outbox gave frame {frame.seq} after {self._last_sent}: its frames are contiguous")
        self._last_sent = frame.seq
        link = self._pacing.link
        link.sent(frame.seq, frame.wire_bytes, self._monotonic())
        self._listener.on_link(link.capacity_bytes_s, link.rtt_ms, link.in_flight_bytes)
        await self._write(pb.FromEdge(frame=frame.to_wire()))

    async def _room(self) -> int:
        """Waits until a frame may be sent; how large it may be."""
        while True:
            self._moved.clear()
            delay_s = self._pacing.delay_s()
            room = self._pacing.link.room_bytes(self._max_frame_bytes)
            if delay_s <= 0 and room > 0:
                return room
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s if delay_s > 0 else None):
                    await self._moved.wait()

    async def _beat(self) -> None:
        while True:
            beat = self._listener.heartbeat()
            self._echoes[beat.sent_at_ms] = self._monotonic()
            while len(self._echoes) > 100:
                del self._echoes[next(iter(self._echoes))]
            await self._write(pb.FromEdge(heartbeat=beat))
            await asyncio.sleep(self._limits.heartbeat_s)

    async def _report_budgets(self) -> None:
        """Apart from heartbeats: a report waits for the disk, and a heartbeat must not."""
        anew = True
        while True:
            self._budgets_moved.clear()
            for report in await self._listener.budget_reports(anew=anew):
                await self._write(pb.FromEdge(budget_report=report))
            anew = False
            with suppress(TimeoutError):
                async with asyncio.timeout(self._limits.heartbeat_s):
                    await self._budgets_moved.wait()

    async def _hear(self) -> None:
        while True:
            message = await self._read()
            kind = message.WhichOneof("message")
            if kind == "ack":
                self._on_ack(message.ack.through)
            elif kind == "queries":
                await self._on_queries(message.queries)
            elif kind == "budget":
                self._on_budget(message.budget)
            elif kind == "sampling":
                word = message.sampling
                ref, reason = QueryRef(word.query, word.query_version), SamplingReason.read(word.reason)
                self._listener.on_sampling(ref, word.rate, word.clock_offset_ms, reason)
            elif kind == "credit":
                self._pacing.link.credit(message.credit.bytes)
            elif kind == "throttle":
                self._pacing.throttle(message.throttle.retry_after_ms / 1000)
            elif kind == "time_echo":
                self._on_echo(message.time_echo)
            self._moved.set()

    def _on_ack(self, through: int) -> None:
        if through > self._last_sent:
            raise LinkDown(f"the center acknowledges frame {through}, the last one sent is {self._last_sent}")
        link = self._pacing.link
        link.acknowledged(through, self._monotonic())
        self.acknowledged = True
        self._listener.on_ack(through)
        self._listener.on_link(link.capacity_bytes_s, link.rtt_ms, link.in_flight_bytes)

    def _on_budget(self, given: pb.Budget) -> None:
        ref = QueryRef(given.query, given.query_version)
        self._listener.on_budget(BudgetOrder(ref, dict(given.shares), given.version, given.from_ms, given.center_ms))
        self._budgets_moved.set()

    def _on_echo(self, echo: pb.TimeEcho) -> None:
        sent_at_s = self._echoes.pop(echo.edge_sent_at_ms, None)
        if sent_at_s is None:
            return
        now_s = self._monotonic()
        held_s = max(0, echo.center_replied_at_ms - echo.center_received_at_ms) / 1000
        link = self._pacing.link
        link.echoed(now_s - sent_at_s - held_s, now_s)
        self._listener.on_link(link.capacity_bytes_s, link.rtt_ms, link.in_flight_bytes)

    async def _on_queries(self, message: pb.Queries) -> None:
        queries, reports = [], []
        for query in message.queries:
            ref = QueryRef(query.name, query.version)
            try:
                queries.append((ref, QuerySpec.from_mapping(json.loads(query.spec))))
            except (InvalidQuery, ValueError) as exc:
                # A newer center may know functions that this agent does not: the others go on.
                code = exc.code if isinstance(exc, InvalidQuery) else InvalidQuery.code
                reports.append(QueryStatusReport(ref, False, code, str(exc)))
                logger.warning("query %s@%d cannot be read: %s", ref.name, ref.version, exc)
        reports += self._listener.on_queries(message.version, queries)
        for report in reports:
            status = pb.QueryStatus(
                query=report.ref.name,
                query_version=report.ref.version,
                accepted=report.accepted,
                code=report.code,
                message=report.message,
            )
            await self._write(pb.FromEdge(query_status=status))
        self._budgets_moved.set()
