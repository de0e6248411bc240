"""One edge's session at the gateway: frames in, acknowledgements and orders out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from center.catalog.store import IndexOutcome, QueryStatusRecord
from center.ingest.assignments import EdgeAssignment
from center.ingest.budget_sync import BudgetSync
from center.ingest.group_commit import GroupCommit, ReceivedFrame
from center.ingest.status_writer import StatusWriter
from center.ingest.validation import MAX_SEQ, Hello, plain_text, read_budget_report, read_busy_share, read_heartbeat
from center.sampling.policy import EdgeSamplingController
from center.storage.frame_log import StoredFrame
from edgewater.errors import Conflict, EdgewaterError, ProtocolError
from edgewater.measure import NAME
from edgewater.wire import uplink_pb2 as pb
from edgewater.wire.frames import Frame, QueryRef


class ConflatingQueue:
    """What is to be written next. A newer message of a kind replaces one that still waits, so a slow edge
    gets the newest acknowledgement and the newest orders, and never a queue."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, ...], pb.ToEdge] = {}
        self._changed = asyncio.Event()
        self._closed = False

    def put(self, message: pb.ToEdge, *which: str) -> None:
        kind = (message.WhichOneof("message") or "", *which)
        self._waiting.pop(kind, None)
        self._waiting[kind] = message
        self._changed.set()

    def close(self) -> None:
        """Ends the iteration once all that waits has been taken."""
        self._closed = True
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[pb.ToEdge]:
        while True:
            while self._waiting:
                yield self._waiting.pop(next(iter(self._waiting)))
            if self._closed:
                return
            self._changed.clear()
            await self._changed.wait()


class GatewaySession:
    """A session after its Hello.

    Args:
        acked_through: the highest seq that is durable, as the catalog said at Hello.
        credit_bytes: bytes that may be in flight; at twice that the session stops reading.
    """

    def __init__(
        self,
        name: str,
        hello: Hello,
        acked_through: int | None,
        *,
        committer: GroupCommit,
        notes: StatusWriter,
        keeper: BudgetSync,
        now_ms: Callable[[], int],
        max_frame_bytes: int,
        credit_bytes: int,
    ) -> None:
        self.name = name
        self.hello = hello
        self.edge = hello.edge
        self.outgoing = ConflatingQueue()
        self._committer = committer
        self._notes = notes
        self._keeper = keeper
        self._now_ms = now_ms
        self._max_frame_bytes = max_frame_bytes
        self._credit_bytes = credit_bytes
        self._acked = acked_through
        self._durable = -1 if acked_through is None else acked_through
        self._expected = hello.oldest_seq if acked_through is None else acked_through + 1
        self._in_flight_bytes = 0
        self._in_flight = 0
        self._indexed = asyncio.Event()
        self._finishing = asyncio.Event()
        self._drain = asyncio.Event()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._told: EdgeAssignment | None = None
        self._asked: frozenset[QueryRef] = frozenset()
        self._sampling = EdgeSamplingController()

    @property
    def acked_through(self) -> int | None:
        """The highest seq that is durable at the center, as far as this session knows."""
        return self._acked

    def tell(self, orders: EdgeAssignment) -> None:
        """Sends what of the orders is not what the edge was told last."""
        told, self._told = self._told, orders
        self._asked = frozenset(QueryRef(q.name, q.version) for q in orders.queries.queries)
        if told is None or list(told.queries.queries) != list(orders.queries.queries):
            self.outgoing.put(pb.ToEdge(queries=orders.queries))
        for budget in orders.budgets:
            if told is None or budget not in told.budgets:
                self.outgoing.put(pb.ToEdge(budget=budget), budget.query, str(budget.query_version))

    def fail(self, exc: Exception) -> None:
        """Ends the session with an error; the first one counts."""
        if not self._failed.done():
            self._failed.set_exception(exc)

    def finish(self) -> None:
        """Stops reading and ends the session once all that was read is acknowledged."""
        self._finishing.set()

    async def run(self, requests: AsyncIterator[pb.FromEdge], write: Callable[[pb.ToEdge], Awaitable[None]]) -> None:
        """Reads until the edge ends or `finish`; then all that was read is acknowledged.

        Raises:
            EdgewaterError: the edge breaks the protocol, or whatever `fail` was given.
        """
        reader = asyncio.ensure_future(self._read(requests))
        writer = asyncio.ensure_future(self._write(write))
        finishing = asyncio.ensure_future(self._finishing.wait())
        settled = asyncio.ensure_future(self._settled())
        tasks: tuple[asyncio.Future[Any], ...] = (reader, writer, finishing, settled)
        try:
            await self._first(reader, writer, finishing)
            self._drain.set()
            await self._first(settled)
            self.outgoing.close()
            await self._first(writer)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if not self._failed.cancel():
                self._failed.exception()

    async def _first(self, *tasks: asyncio.Future[Any]) -> None:
        """Waits for the first of the tasks or for failure, and raises what it raised."""
        done, _ = await asyncio.wait((self._failed, *tasks), return_when=asyncio.FIRST_COMPLETED)
        for task in (self._failed, *tasks):
            if task in done:
                task.result()

    async def _settled(self) -> None:
        """Waits until, after the last frame was read, nothing is in flight any more."""
        await self._drain.wait()
        while self._in_flight:
            self._indexed.clear()
            await self._indexed.wait()

    async def _write(self, write: Callable[[pb.ToEdge], Awaitable[None]]) -> None:
        async for message in self.outgoing:
            if message.HasField("time_echo"):
                message.time_echo.center_replied_at_ms = self._now_ms()
            await write(message)

    async def _read(self, requests: AsyncIterator[pb.FromEdge]) -> None:
        async for message in requests:
            kind = message.WhichOneof("message")
            if kind == "frame":
                await self._on_frame(message.frame)
            elif kind == "heartbeat":
                self._on_heartbeat(message.heartbeat)
            elif kind == "query_status":
                self._on_status(message.query_status)
            elif kind == "budget_report":
                self._on_budget_report(message.budget_report)
            elif kind == "goodbye":
                return
            elif kind == "hello":
                raise ProtocolError(f"edge {self.edge}: a second Hello in one session")
            # Anything else is a message of a newer protocol, which by its range speaks ours too.

    async def _on_frame(self, message: pb.Frame) -> None:
        who = f"edge {self.edge}, incarnation {self.hello.incarnation}"
        if message.ByteSize() > self._max_frame_bytes:
            raise ProtocolError(
                f"{who}: frame {message.seq} has {message.ByteSize()} bytes, at most {self._max_frame_bytes}"
            )
        if message.seq > self._expected or message.seq >= MAX_SEQ:
            raise ProtocolError(f"{who}: frame {message.seq} came where {self._expected} is expected")
        if not NAME.fullmatch(message.query) or message.query_version >= MAX_SEQ:
            raise ProtocolError(f"{who}: frame {message.seq} is of {message.query!r:.100}, which is no query's name")
        frame = Frame.from_wire(message)
        try:
            frame.plain_body()  # what is acknowledged can be read
        except EdgewaterError as exc:
            raise type(exc)(f"{who}: {exc}") from exc
        self._expected = max(self._expected, frame.seq + 1)
        while self._in_flight_bytes >= 2 * self._credit_bytes:
            self._indexed.clear()
            await self._indexed.wait()
        stored = StoredFrame(self.edge, self.hello.incarnation, frame)
        self._in_flight += 1
        self._in_flight_bytes += frame.wire_bytes
        arrival = ReceivedFrame(stored, self._now_ms(), frame.seq <= self._durable, self)
        outcome = await self._committer.submit(arrival)
        outcome.add_done_callback(lambda done: self._on_indexed(frame, done))

    def _on_indexed(self, frame: Frame, done: asyncio.Future[IndexOutcome]) -> None:
        self._in_flight -= 1
        self._in_flight_bytes -= frame.wire_bytes
        self._indexed.set()
        if done.cancelled():
            return
        error = done.exception()
        if error is not None:
            self.fail(error if isinstance(error, Exception) else RuntimeError(str(error)))
            return
        outcome = done.result()
        who = f"edge {self.edge}, incarnation {self.hello.incarnation}, frame {frame.seq}"
        if outcome is IndexOutcome.CONFLICT:
            message = f"{who}: stands in the log with another checksum than {frame.crc32c:#010x}"
            self._notes.alarm("frame-conflict", message, self.edge, self._now_ms())
            self.fail(Conflict(message))
        elif outcome is IndexOutcome.REFUSED:
            self.fail(ProtocolError(f"{who}: does not follow what the center has; say Hello again"))
        else:
            self._acked = frame.seq if self._acked is None else max(self._acked, frame.seq)
            self.outgoing.put(pb.ToEdge(ack=pb.Ack(through=self._acked)))

    def _on_heartbeat(self, message: pb.Heartbeat) -> None:
        now_ms = self._now_ms()
        beat = read_heartbeat(self.edge, message, now_ms)
        self._notes.heartbeat(beat)
        orders = self._told.sampling if self._told is not None else ()
        for word in self._sampling.on_heartbeat(
            beat.backlog_bytes, beat.bandwidth_bytes_s, beat.clock_offset_ms, orders, read_busy_share(message)
        ):
            self.outgoing.put(pb.ToEdge(sampling=word), word.query, str(word.query_version))
        echo = pb.TimeEcho(edge_sent_at_ms=message.sent_at_ms, center_received_at_ms=now_ms)
        self.outgoing.put(pb.ToEdge(time_echo=echo))

    def _on_budget_report(self, message: pb.BudgetReport) -> None:
        ref, report = read_budget_report(self.edge, message)
        self._keeper.reported(self.edge, ref, report)
        for budget in self._told.budgets if self._told is not None else ():
            if (budget.query, budget.query_version) == (ref.name, ref.version) and budget.version > report.version:
                # It was told before it knew of the query.
                self.outgoing.put(pb.ToEdge(budget=budget), budget.query, str(budget.query_version))

    def _on_status(self, message: pb.QueryStatus) -> None:
        if not NAME.fullmatch(message.query) or message.query_version >= MAX_SEQ:
            raise ProtocolError(f"edge {self.edge}: a status of {message.query!r:.100}, which is no query's name")
        ref = QueryRef(message.query, message.query_version)
        if ref not in self._asked:
            return  # Deleted meanwhile, or never asked for: there would be no end of those.
        self._notes.status(
            QueryStatusRecord(
                ref, self.edge, message.accepted, plain_text(message.code), plain_text(message.message, 4_000)
            )
        )
