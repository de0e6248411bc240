"""One session with the center: a call of the `Session` RPC, from Hello to its end."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count, islice
from typing import Any

import grpc

from edge.uplink.flow_control import DailyQuota, LinkFlow, LinkForecast, LinkLimits, PackingEstimator
from edge.uplink.ports import UplinkEndpoint, refused
from edgewater.base.errors import InvalidQuery, ProtocolError, StorageError
from edgewater.base.streams import MAX_TIME_MS, MIN_TIME_MS
from edgewater.model.lookups import MAX_KNOWN_TABLES, digest_of, pack_rows, unpack_rows
from edgewater.model.query import QuerySpec
from edgewater.model.window_range import WindowRange
from edgewater.runtime.token_bucket import TokenBucket
from edgewater.wire import MAX_FRAMES, Frame, QueryRef, link_bytes
from edgewater.wire import uplink_pb2 as pb
from edgewater.wire.session_stream import MOST_WINDOW_LOG, SessionPacker

MESSAGE_OVERHEAD_BYTES = 32
"""Wire bytes of a message in addition to its body: the headers of gRPC, and of its first HTTP/2 frame and TLS
record.
"""
HTTP2_FRAME_BYTES, HTTP2_HEADER_BYTES = 16 << 10, 9  # format: of HTTP/2
LONGEST_HEARTBEAT_S = 20.0  # format: of sessions
"""The longest interval of heartbeats that a center can request."""
SPARE_HEARTBEAT_S = 5.0
"""A center that requests longer intervals has so many edges that no heartbeat may come earlier."""
MOST_INTERVALS = 2  # limit: how late a center of 0.3.0 hears of an edge
"""Frames are a sign of life, too. After frames, the next heartbeat comes so many intervals after the last one. On a
narrow link, a heartbeat with its echo and their acknowledgements takes 300 bytes, a tenth of what a window needs."""
FIRST_HEARTBEATS = 5
"""The first heartbeats of a session, which follow each other quickly. The center computes the clock's offset from this
many."""
WIDE_LEVEL, NARROW_LEVEL, NARROW_BYTES_S = 3, 19, 32 << 10
"""Levels of zstd: 3 takes 0.02 ms for a KB of plain bytes. 19 takes 0.2 ms, at most 2 % of a core on a link of
`NARROW_BYTES_S`, and gives 4 to 11 % fewer bytes."""
THREAD_BYTES = 64 << 10  # limit: time of a turn of the event loop
"""A larger message is compressed in a thread: it takes more than two milliseconds."""

_AIO: Any = grpc.aio  # the type stubs of grpc.aio lack EOF
log = logging.getLogger(__name__)


class LinkDown(ProtocolError):
    """The session has ended; a new one may succeed."""


class Pacing:
    """The link estimates and rate limits over all sessions: they decide when the next message may be sent."""

    def __init__(
        self,
        limits: LinkLimits,
        now_ms: Callable[[], int],
        monotonic: Callable[[], float],
        daily_quota: DailyQuota | None = None,
    ) -> None:
        self.link = LinkFlow(now_ms, limits.bandwidth_bytes_s or math.inf)
        self.packing = PackingEstimator()
        self._now_ms = now_ms
        self._monotonic = monotonic
        self._limit_bytes_s = limits.bandwidth_bytes_s
        self._bucket = TokenBucket(limits.bandwidth_bytes_s, monotonic()) if limits.bandwidth_bytes_s else None
        self._daily_quota = daily_quota
        self._throttled_until_s = 0.0

    @property
    def packing_level(self) -> int:
        """The level at which a session compresses.

        On a link that is narrow with 90 %, compression may take more time.
        """
        rate = min(self.link.most_bytes_s, self._limit_bytes_s or math.inf)
        return NARROW_LEVEL if rate <= NARROW_BYTES_S else WIDE_LEVEL

    def forecast(self) -> LinkForecast:
        """Forecasts the link and the compression for frames that are sent from now on."""
        return replace(self.link.forecast(self._monotonic()), packed_fraction=self.packing.fraction)

    def throttle(self, seconds: float) -> None:
        self._throttled_until_s = self._monotonic() + seconds

    def consume(self, size: int) -> None:
        """Counts a message of `size` bytes and its overhead against the limits, before it is sent.

        Raises:
            LinkDown: the daily count cannot be written, so the message must not be sent.
        """
        wire_bytes = size + MESSAGE_OVERHEAD_BYTES + size // HTTP2_FRAME_BYTES * HTTP2_HEADER_BYTES
        if self._bucket is not None:
            self._bucket.consume(wire_bytes, self._monotonic())
        if self._daily_quota is not None:
            try:
                self._daily_quota.consume(wire_bytes, self._now_ms())
            except StorageError as exc:
                raise LinkDown(f"cannot record the bytes sent today: {exc}") from exc

    def delay_s(self) -> float:
        """Returns how long to wait before sending, because of a throttle or a rate limit."""
        now_s = self._monotonic()
        delays = [self._throttled_until_s - now_s]
        if self._bucket is not None:
            delays.append(self._bucket.delay_s(now_s))
        if self._daily_quota is not None:
            delays.append(self._daily_quota.delay_s(self._now_ms()))
        return max(0.0, *delays)


class PendingTake:
    """The current call of `UplinkEndpoint.take`.

    It outlives a session: frames that it has pulled from the core must be sent next, whatever happens to the link
    meanwhile.
    """

    def __init__(self, endpoint: UplinkEndpoint) -> None:
        self._endpoint = endpoint
        self._task: asyncio.Task[Sequence[Frame]] | None = None

    async def frames(self, capacity_bytes: int) -> Sequence[Frame]:
        """Returns the next frames; joins the call in progress, if there is one."""
        if self._task is None:
            self._task = asyncio.create_task(self._endpoint.take(capacity_bytes))
        frames = await asyncio.shield(self._task)
        self._task = None
        return frames

    async def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


class UplinkSession:
    """Runs one call of the `Session` RPC.

    Args:
        call: the gRPC call, not yet used.
        silence_s: the session ends if nothing arrives from the center for this long.

    Attributes:
        silent: whether the session ended because nothing arrived.
        acknowledged: whether a frame was acknowledged in this session.
    """

    def __init__(
        self,
        call: Any,
        endpoint: UplinkEndpoint,
        pending_take: PendingTake,
        pacing: Pacing,
        *,
        limits: LinkLimits,
        silence_s: float,
        monotonic: Callable[[], float],
    ) -> None:
        self._call = call
        self._endpoint = endpoint
        self._pending_take = pending_take
        self._pacing = pacing
        self._limits = limits
        self._silence_s = silence_s
        self._monotonic = monotonic
        self._write_lock = asyncio.Lock()
        self._closing = False
        self._received = asyncio.Event()
        self._budgets_changed = asyncio.Event()
        self._echoes: dict[int, float] = {}  # by sending time of a heartbeat
        self._refused: dict[tuple[QueryRef, str], int] = {}
        self._tables: dict[int, str] = {}  # the rows of tables, by digest
        self._last_sent = -1
        self._max_frame_bytes = 0
        self._window_log = 0
        self._packer: SessionPacker | None = None
        self._heartbeat_s = limits.heartbeat_s
        self.silent = False
        self.acknowledged = False

    async def open(self) -> None:
        """Sends Hello and receives Welcome. Raises LinkDown or AioRpcError."""
        hello = self._endpoint.hello()
        hello.link = self._limits.link
        self._tables = {digest_of(pack_rows(rows)): rows for rows in self._endpoint.table_rows()}
        hello.tables.extend(islice(self._tables, MAX_KNOWN_TABLES))
        await self._write(pb.FromEdge(hello=hello))
        first = await self._read()
        if first.WhichOneof("message") != "welcome":
            raise LinkDown(f"the center's first message is {first.WhichOneof('message')}, expected welcome")
        welcome = first.welcome
        acked = welcome.acked_through if welcome.any_acked else None
        if acked is not None and acked >= hello.next_seq:
            raise LinkDown(f"the center has frame {acked}, but the next frame of this edge is {hello.next_seq}")
        self._last_sent = hello.oldest_seq - 1 if acked is None else max(acked, hello.oldest_seq - 1)
        self._max_frame_bytes = welcome.max_frame_bytes
        self._window_log = min(welcome.window_log, MOST_WINDOW_LOG)
        self._pacing.link.begin_session(welcome.credit_bytes)
        self._endpoint.on_link(self._pacing.forecast)
        self._endpoint.on_welcome(acked)

    async def run(self) -> None:
        """Runs until the session ends, which raises. When cancelled, sends Goodbye and receives the last messages.

        Raises:
            LinkDown, AioRpcError: the session has ended.
        """
        receiving = asyncio.create_task(self._receive())
        loops = (self._send_frames(), self._send_heartbeats(), self._report_budgets())
        tasks = (receiving, *(asyncio.create_task(loop) for loop in loops))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except asyncio.CancelledError:
            with suppress(TimeoutError, LinkDown, grpc.aio.AioRpcError):
                async with asyncio.timeout(self._limits.goodbye_s):
                    await self._goodbye(receiving)
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _goodbye(self, receiving: asyncio.Task[None]) -> None:
        # Under the lock, because cancelling a write midway cancels the call.
        async with self._write_lock:
            self._closing = True
            await self._call.write(pb.FromEdge(goodbye=pb.Goodbye(reason="the agent stops")))
        await self._call.done_writing()
        await receiving

    async def _write(self, message: pb.FromEdge, frames: Sequence[Frame] = ()) -> None:
        """Sends a message.

        Args:
            frames: the frames that it contains.
        """
        async with self._write_lock:
            if self._closing:
                raise LinkDown("the session is closing")
            message, size = await self._packed(message)
            self._pacing.consume(size)
            if frames:
                self._pacing.packing.add(sum(frame.plain_wire_bytes for frame in frames), link_bytes(size))
            self._pacing.link.on_sent(frames[-1].seq if frames else None, size, self._monotonic())
            try:
                await self._call.write(message)
            except asyncio.InvalidStateError as exc:
                raise LinkDown("the call has ended") from exc

    async def _packed(self, message: pb.FromEdge) -> tuple[pb.FromEdge, int]:
        """Returns a message as the next part of the session's stream, and its bytes; unchanged, if the center does not
        permit a stream.
        """
        plain = message.SerializeToString()
        if not self._window_log or len(plain) > self._max_frame_bytes:
            return message, len(plain)
        if self._packer is None:
            self._packer = SessionPacker(self._window_log, self._pacing.packing_level)
        elif self._pacing.packing_level == NARROW_LEVEL:
            self._packer.set_level(NARROW_LEVEL)
        if len(plain) <= THREAD_BYTES:
            return self._packer.pack(plain)
        return await asyncio.to_thread(self._packer.pack, plain)

    async def _read(self) -> pb.ToEdge:
        try:
            silence_s = MOST_INTERVALS * self._heartbeat_s + max(self._silence_s, 4 * self._pacing.link.slowest_ack_s)
            async with asyncio.timeout(silence_s):
                message = await self._call.read()
        except TimeoutError as exc:
            self.silent = True
            raise LinkDown(f"nothing received from the center for {silence_s:g} s") from exc
        if message is _AIO.EOF:
            # An error status is raised as AioRpcError; here the center ended the call regularly.
            code, details = await self._call.code(), await self._call.details()
            raise LinkDown(f"the center ended the session: {code.name} {details or ''}".rstrip())
        return message  # type: ignore[no-any-return]

    async def _send_frames(self) -> None:
        frames = deque(self._endpoint.unacknowledged(self._last_sent if self._last_sent >= 0 else None))
        while frames:
            await self._send(self._next_message(frames, await self._capacity_bytes()))
        while True:
            frames += await self._pending_take.frames(await self._capacity_bytes())
            while frames:
                await self._send(self._next_message(frames, self._max_frame_bytes))

    def _next_message(self, frames: deque[Frame], capacity_bytes: int) -> list[Frame]:
        """Removes the frames of the next message: the frames that fit together, at least one."""
        message = [frames.popleft()]
        size, most = message[0].plain_wire_bytes, min(capacity_bytes, self._max_frame_bytes)
        while frames and len(message) < MAX_FRAMES and size + frames[0].plain_wire_bytes <= most:
            message.append(frames.popleft())
            size += message[-1].plain_wire_bytes
        return message

    async def _send(self, message: Sequence[Frame]) -> None:
        # Frames of a take may have been sent with the unacknowledged frames, if the link was down meanwhile.
        frames = [frame for frame in message if frame.seq > self._last_sent]
        for frame in frames:
            if frame.seq != self._last_sent + 1:
                raise RuntimeError(f"frame {frame.seq} follows {self._last_sent}: frames must be contiguous")
            self._last_sent = frame.seq
        if not frames:
            return
        # If they were compressed twice, frames would be larger. Frames of large bodies are sent as they are.
        fits = sum(frame.plain_wire_bytes for frame in frames) <= self._max_frame_bytes
        wire = [(frame.plain() if self._window_log and fits else frame).to_wire() for frame in frames]
        packed = pb.FromEdge(frame=wire[0]) if len(wire) == 1 else pb.FromEdge(frames=pb.Frames(frames=wire))
        await self._write(packed, frames)

    async def _capacity_bytes(self) -> int:
        """Waits until a frame may be sent; returns its maximum size in bytes before compression."""
        while True:
            self._received.clear()
            wait_s: float | None = self._pacing.delay_s()
            if not wait_s:
                now_s, link = self._monotonic(), self._pacing.link
                room = link.room_bytes(self._max_frame_bytes, now_s)
                if room > 0:
                    return min(int(room / self._pacing.packing.fraction), self._max_frame_bytes)
                wait_s = link.retry_s(now_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._received.wait()

    async def _send_heartbeats(self) -> None:
        """Sends heartbeats at the interval that the center requests.

        The first ones, and those with news, are sent earlier.
        """
        for number in count(1):
            heartbeat = self._endpoint.heartbeat()
            self._echoes[heartbeat.sent_at_ms] = self._monotonic()
            while len(self._echoes) > 100:
                del self._echoes[next(iter(self._echoes))]
            await self._write(pb.FromEdge(heartbeat=heartbeat))
            report = self._endpoint.link_report(*self._pacing.link.bounds_bytes_s, all_queries=number == 1)
            if report is not None:
                await self._write(pb.FromEdge(link_report=report))
            await self._until_heartbeat(number)

    async def _until_heartbeat(self, sent: int) -> None:
        """Waits for the time of the next heartbeat.

        Args:
            sent: the number of heartbeats of this session.
        """
        waited_s, shortest_s, last_sent = 0.0, self._limits.heartbeat_s, self._last_sent
        while True:
            # If a center with very many edges requests long intervals, they hold for all heartbeats.
            step_s = self._heartbeat_s if self._heartbeat_s > SPARE_HEARTBEAT_S else shortest_s
            await asyncio.sleep(step_s)
            waited_s += step_s
            # Each one counts where edges divide a link, or values are omitted at a deadline: it measures the link.
            is_rare = not (self._last_sent == last_sent or self._limits.link or self._endpoint.may_omit())
            due_s = self._heartbeat_s * (MOST_INTERVALS if is_rare else 1)
            if waited_s >= due_s or sent < FIRST_HEARTBEATS or self._endpoint.has_news():
                return

    async def _report_budgets(self) -> None:
        """Sends budget reports.

        They are not part of heartbeats: a report waits for the disk, but a heartbeat must not.
        """
        all_queries = True
        while True:
            self._budgets_changed.clear()
            for report in await self._endpoint.budget_reports(all_queries=all_queries):
                await self._write(pb.FromEdge(budget_report=report))
            all_queries = False
            with suppress(TimeoutError):
                async with asyncio.timeout(self._limits.heartbeat_s):
                    await self._budgets_changed.wait()

    async def _receive(self) -> None:
        while True:
            message = await self._read()
            self._pacing.link.on_received(self._monotonic())
            kind = message.WhichOneof("message")
            if kind == "ack":
                self._on_ack(message.ack)
            elif kind == "table":
                self._tables[digest_of(message.table.rows)] = unpack_rows(message.table.rows)
            elif kind == "queries":
                await self._on_queries(message.queries)
            elif kind == "budget":
                self._endpoint.on_budget(message.budget)
                self._budgets_changed.set()
            elif kind == "sampling":
                self._endpoint.on_sampling(message.sampling)
            elif kind == "refused":
                self._on_refused(message.refused)
            elif kind == "link_share":
                self._pacing.link.set_share(message.link_share.bytes_s or math.inf)
            elif kind == "credit":
                self._pacing.link.set_credit(message.credit.bytes)
            elif kind == "throttle":
                self._pacing.throttle(message.throttle.retry_after_ms / 1000)
            elif kind == "time_echo":
                self._on_echo(message.time_echo)
            self._received.set()

    def _on_ack(self, ack: pb.Ack) -> None:
        through = ack.through
        if through > self._last_sent:
            raise LinkDown(f"the center acknowledged frame {through}, but the last frame sent is {self._last_sent}")
        now_s = self._monotonic()
        self._pacing.link.on_acknowledged(through, now_s, ack.held_ms / 1000, ack.received_at_ms / 1000)
        self.acknowledged = True
        self._endpoint.on_ack(through)

    def _on_refused(self, message: pb.Refused) -> None:
        ref = QueryRef(message.query, message.query_version)
        before, self._refused[ref, message.reason] = self._refused.get((ref, message.reason), 0), message.frames
        self._endpoint.on_refused(ref, message.reason, message.message, max(message.frames - before, 0))

    def _on_echo(self, echo: pb.TimeEcho) -> None:
        asked_s = min(echo.heartbeat_ms / 1000, LONGEST_HEARTBEAT_S)
        self._heartbeat_s = max(self._limits.heartbeat_s, asked_s)
        if echo.edge_sent_at_ms not in self._echoes:
            return
        sent_at_s, received_at_s = self._echoes.pop(echo.edge_sent_at_ms), echo.center_received_at_ms / 1000
        held_s = max(0, echo.center_replied_at_ms - echo.center_received_at_ms) / 1000
        self._pacing.link.on_echo(sent_at_s, self._monotonic(), received_at_s, held_s)

    async def _on_queries(self, message: pb.Queries) -> None:
        queries, reports, windows = [], [], dict[QueryRef, WindowRange]()
        for query in message.queries:
            ref = QueryRef(query.name, query.version)
            try:
                queries.append((ref, self._with_rows(QuerySpec.from_mapping(json.loads(query.spec)), query.tables)))
            except (InvalidQuery, ValueError) as exc:
                # A newer center may have functions that this agent lacks; the other queries are not affected.
                code = exc.code if isinstance(exc, InvalidQuery) else InvalidQuery.code
                reports.append(refused(ref, code, str(exc)))
                log.warning("query %s@%d cannot be read: %s", ref.name, ref.version, exc)
                continue
            if query.HasField("from_ms") or query.HasField("until_ms"):
                until_ms = query.until_ms if query.HasField("until_ms") else MAX_TIME_MS
                windows[ref] = WindowRange(query.from_ms if query.HasField("from_ms") else MIN_TIME_MS, until_ms)
        used = {digest for query in message.queries for digest in query.tables.values()}
        self._tables = {digest: rows for digest, rows in self._tables.items() if digest in used}
        reports += self._endpoint.on_queries(queries, windows)
        for report in reports:
            await self._write(pb.FromEdge(query_status=report))
        self._budgets_changed.set()

    def _with_rows(self, spec: QuerySpec, tables: Mapping[str, int]) -> QuerySpec:
        """Returns a query with the rows of its tables. A query without them is refused when it is added."""
        rows = {table: self._tables.get(digest, "") for table, digest in tables.items()}
        return replace(spec, lookups=tuple(replace(each, rows=rows.get(each.table, "")) for each in spec.lookups))
