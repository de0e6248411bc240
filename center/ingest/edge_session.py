"""One edge's session at the gateway: receives frames, and sends acknowledgements and control messages."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

from center.budgets import LinkDivision
from center.catalog import IndexOutcome, UnindexedFrame
from center.config import GatewaySection
from center.early import EdgeSamplingController
from center.edge_access import EdgeAccess
from center.ingest import limits
from center.ingest.assignments import EdgeAssignment
from center.ingest.authentication import Presented
from center.ingest.budget_sync import BudgetSync
from center.ingest.frame_check import CheckedFrame
from center.ingest.frame_validator import FrameValidator, SessionFrames
from center.ingest.group_commit import GroupCommit, ReceivedFrame
from center.ingest.metrics import GatewayMetrics
from center.ingest.status_writer import StatusWriter
from center.ingest.stream_rules import StreamRules
from center.ingest.validation import (
    MAX_SEQ,
    Hello,
    bounded_text,
    read_budget_report,
    read_heartbeat,
    read_inputs,
    read_likely_bandwidth,
    read_link_report,
    read_utilization,
)
from center.storage.frame_log import StoredFrame
from edgewater.base.errors import CorruptFrame, EdgewaterError, OutdatedState, ProtocolError
from edgewater.base.streams import MAX_TIME_MS, EdgeId
from edgewater.model.edge_records import HeartbeatRecord, QueryStatusRecord
from edgewater.model.measure import NAME
from edgewater.model.registered_query import query_key
from edgewater.runtime.token_bucket import TokenBucket
from edgewater.wire import MAX_BODY_BYTES, MAX_FRAMES, Frame, QueryRef
from edgewater.wire import uplink_pb2 as pb
from edgewater.wire.session_stream import SessionUnpacker, field_bytes

PLAIN_CREDITS = 8  # limit: memory of a session
"""The limit of uncompressed bytes of bodies in flight, as a multiple of the credit. Compression usually gives a
third."""
THREAD_BYTES = 64 << 10  # limit: time of a turn of the event loop
"""A larger message is decompressed in a thread. To decompress and parse a message of this size takes about 1 ms."""
MAX_NAMED = 5
"""Maximum number of sources or columns that an alarm names."""
NOT_EXPECTED = "not-expected"
"""The reason of a refusal: the edge does not contribute to the frame's query."""
log = logging.getLogger(__name__)


CLOCK_DIFFERS = "clock-differs"
"""The alarm about an edge's clock."""


def clock_differs(edge: EdgeId, most_ms: int) -> str:
    return (
        f"edge {edge}: its clock differs by more than {most_ms} ms from the center's clock; set the clock that is"
        " wrong: while the edge's clock is ahead, its frames wait in its journal"
    )


_UNKNOWN_KEY = "; unknown key; expected one of the keys "
"""A part of the message with which release 0.3.0 refuses a key of a query."""
_ACK = ("ack",)


class ConflatingQueue:
    """The pending messages to an edge. A newer message replaces a pending message of the same kind.

    So a slow edge receives the newest acknowledgement and the newest assignment, and the queue is bounded.
    """

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._pending: dict[tuple[str, ...], pb.ToEdge | tuple[int, int]] = {}
        self._changed = asyncio.Event()
        self._closed = False

    def put(self, message: pb.ToEdge, *subject: str) -> None:
        """Adds a message. It replaces the pending message of the same kind and `subject`, such as a query."""
        kind = (message.WhichOneof("message") or "", *subject)
        self._pending.pop(kind, None)
        self._pending[kind] = message
        self._changed.set()

    def put_ack(self, through: int, received_at_ms: int) -> None:
        """Adds an acknowledgement, after the pending messages; the message is made when it is sent.

        Args:
            received_at_ms: when frame `through` arrived.
        """
        self._pending.pop(_ACK, None)
        self._pending[_ACK] = through, received_at_ms
        self._changed.set()

    def close(self) -> None:
        """Ends the iteration after all pending messages have been taken."""
        self._closed = True
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[pb.ToEdge]:
        while True:
            while self._pending:
                message = self._pending.pop(next(iter(self._pending)))
                yield self._ack(*message) if isinstance(message, tuple) else message
            if self._closed:
                return
            self._changed.clear()
            await self._changed.wait()

    def _ack(self, through: int, received_at_ms: int) -> pb.ToEdge:
        held_ms = max(self._now_ms() - received_at_ms, 0)
        return pb.ToEdge(ack=pb.Ack(through=through, held_ms=held_ms, received_at_ms=received_at_ms))


@dataclass(frozen=True, slots=True)
class SharedParts:
    """What all sessions of a gateway share.

    Attributes:
        heartbeat_ms: returns the interval at which edges have to send heartbeats.
        section: the limits of a session. A session stops reading at twice `credit_bytes` in flight, or at
            `PLAIN_CREDITS` times this number before compression. While its frames wait for the edge's share of the
            center's work, it stops reading at this number before compression.
    """

    validator: FrameValidator
    group_commit: GroupCommit
    status: StatusWriter
    metrics: GatewayMetrics
    budget_sync: BudgetSync
    stream_rules: StreamRules
    links: LinkDivision
    heartbeat_ms: Callable[[], int]
    now_ms: Callable[[], int]
    section: GatewaySection


class GatewaySession:
    """A session after its Hello.

    Args:
        acked_through: the highest durable seq, from the catalog at Hello; None: no frame is durable.
        share: the edge's share of the center's work.
        shared: what all sessions of the gateway share.

    Attributes:
        acked_through: the highest seq that is durable at the center, as far as this session knows.
        presented: the credential of the call.
        access: the access that the edge had at its Hello.
        opened: the gateway's plan is not older than the session's Hello.
        window_log: window size of the edge's compressed stream, as a logarithm; 0: the edge must not send such a
            stream. Set before Welcome.
    """

    def __init__(
        self,
        name: str,
        hello: Hello,
        acked_through: int | None,
        presented: Presented,
        access: EdgeAccess,
        share: TokenBucket,
        shared: SharedParts,
    ) -> None:
        self.name, self.hello, self.edge = name, hello, hello.edge
        self.presented, self.access, self._shared = presented, access, shared
        self.outgoing = ConflatingQueue(shared.now_ms)
        self.opened = False
        self.window_log = 0
        self._unpacker: SessionUnpacker | None = None
        self._frames = SessionFrames(shared.validator, hello, share, self._on_checked, self._on_delayed)
        self._loads: dict[QueryRef, tuple[float, float]] = {}
        self.acked_through = acked_through
        self._durable = -1 if acked_through is None else acked_through
        self._expected = hello.oldest_seq if acked_through is None else acked_through + 1
        self._in_flight_bytes = self._in_flight_plain_bytes = 0
        self._in_flight = 0
        self._broken = self._was_delayed = False
        self._indexed = asyncio.Event()
        self._finishing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._assignment: EdgeAssignment | None = None
        self._queries: frozenset[QueryRef] = frozenset()
        self._tables: Set[int] = hello.tables  # which the edge has when it gets the next queries
        self._sampling = EdgeSamplingController()
        self._refused: dict[tuple[QueryRef, str], int] = {}
        self._messages = limits.FixedWindow(shared.now_ms)
        self._rejected: dict[tuple[str, str, str], int] = {}
        self._null_columns: set[tuple[str, str, str]] = set()

    def assign(self, assignment: EdgeAssignment) -> None:
        """Sends the messages of an assignment that differ from the last messages sent."""
        sent, self._assignment = self._assignment, assignment
        self._queries = assignment.queries.refs
        if sent is None or sent.queries.refs != assignment.queries.refs:
            tables, known = assignment.queries.tables, self._tables
            for digest in tables.keys() - known:
                self.outgoing.put(tables[digest], str(digest))
            self._tables = tables.keys()
            self.outgoing.put(assignment.queries.message)
        for budget in assignment.budgets:
            if sent is None or budget not in sent.budgets:
                self.outgoing.put(pb.ToEdge(budget=budget), budget.query, str(budget.query_version))

    def fail(self, exc: Exception) -> None:
        """Ends the session with an error; further errors are ignored."""
        if not self._failed.done():
            self._failed.set_exception(exc)

    def finish(self) -> None:
        """Stops reading, and ends the session when all frames that were read are acknowledged."""
        if not self._finishing.done():
            self._finishing.set_result(None)

    async def run(self, requests: AsyncIterator[pb.FromEdge], write: Callable[[pb.ToEdge], Awaitable[None]]) -> None:
        """Reads until the edge ends the session or `finish` is called, then acknowledges all frames that were read.

        Raises:
            EdgewaterError: the edge breaks the protocol, or `fail` was called.
        """
        reader = asyncio.ensure_future(self._read(requests))
        writer = asyncio.ensure_future(self._write(write))
        tasks = [reader, writer]
        try:
            await self._first(reader, writer, self._finishing)
            tasks.append(asyncio.ensure_future(self._settled()))
            await self._first(tasks[-1])
            self.outgoing.close()
            await self._first(writer)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if not self._failed.cancel():
                self._failed.exception()
            self._frames.close()

    async def _first(self, *tasks: asyncio.Future[Any]) -> None:
        """Waits until one of the tasks ends or `fail` is called, and raises its error."""
        done, _ = await asyncio.wait((self._failed, *tasks), return_when=asyncio.FIRST_COMPLETED)
        for task in (self._failed, *tasks):
            if task in done:
                task.result()

    async def _settled(self) -> None:
        """Waits until no frame is in flight."""
        while self._in_flight:
            self._indexed.clear()
            await self._indexed.wait()

    async def _write(self, write: Callable[[pb.ToEdge], Awaitable[None]]) -> None:
        async for message in self.outgoing:
            if message.HasField("time_echo"):
                message.time_echo.center_replied_at_ms = self._shared.now_ms()
            await write(message)

    async def _read(self, requests: AsyncIterator[pb.FromEdge]) -> None:
        async for message in requests:
            shipped_share = 0.0
            if message.WhichOneof("message") == "packed":
                message, shipped_share = await self._unpacked(message.packed)
            kind = message.WhichOneof("message")
            if kind == "frame":
                await self._on_frame(message.frame, shipped_share)
                continue
            if kind == "frames":
                await self._on_frames(message.frames, shipped_share)
                continue
            self._require_modest(kind or "message", message)
            if kind == "heartbeat":
                self._on_heartbeat(message.heartbeat)
            elif kind == "query_status":
                self._on_status(message.query_status)
            elif kind == "budget_report":
                self._on_budget_report(message.budget_report)
            elif kind == "link_report":
                self._on_link_report(message.link_report)
            elif kind == "goodbye":
                return
            elif kind == "hello":
                raise ProtocolError(f"edge {self.edge}: a second Hello in one session")
            # Any other kind belongs to a newer protocol. The edge also speaks this protocol, so the message may be
            # ignored.

    async def _unpacked(self, packed: pb.Packed) -> tuple[pb.FromEdge, float]:
        """Decompresses a message of the edge's stream. Returns as `SessionUnpacker.unpack`."""
        who = f"edge {self.edge}, incarnation {self.hello.incarnation}"
        if not self.window_log:
            raise ProtocolError(f"{who}: a packed message, which Welcome did not permit")
        if self._unpacker is None:
            self._unpacker = SessionUnpacker(self.window_log, self._shared.section.max_frame_bytes)
        try:
            if packed.plain_bytes <= THREAD_BYTES:
                return self._unpacker.unpack(packed)
            threads = self._shared.validator.threads(packed.plain_bytes)
            return await asyncio.get_running_loop().run_in_executor(threads, self._unpacker.unpack, packed)
        except CorruptFrame as exc:
            raise CorruptFrame(f"{who}: {exc}") from exc

    def _require_modest(self, kind: str, message: pb.FromEdge) -> None:
        """Raises LimitExceeded if a message is larger, or messages are more frequent, than an edge of ours sends."""
        size, most = message.ByteSize(), limits.MESSAGES + limits.MESSAGES_PER_QUERY * len(self._queries)
        who = f"edge {self.edge}: a {kind}"
        if size > limits.CONTROL_BYTES:
            raise limits.exceeded(
                self._shared.metrics, "message-size", f"{who} of {size} bytes; expected at most {limits.CONTROL_BYTES}"
            )
        if not self._messages.add(most):
            raise limits.exceeded(
                self._shared.metrics, "messages", f"{who}: more than {most} messages in {limits.WINDOW_MS // 1000} s"
            )

    async def _on_frames(self, message: pb.Frames, shipped_share: float) -> None:
        who = f"edge {self.edge}, incarnation {self.hello.incarnation}"
        if len(message.frames) > MAX_FRAMES:
            raise ProtocolError(f"{who}: {len(message.frames)} frames in a message; expected at most {MAX_FRAMES}")
        for frame in message.frames:
            await self._on_frame(frame, shipped_share)

    async def _on_frame(self, message: pb.Frame, shipped_share: float) -> None:
        """Checks and queues a frame that has arrived.

        Args:
            shipped_share: compressed bytes of the edge's stream per byte of the frame; 0: the frame was not in the
                stream.
        """
        who = f"edge {self.edge}, incarnation {self.hello.incarnation}"
        if message.seq > self._expected or message.seq >= MAX_SEQ:
            raise ProtocolError(f"{who}: frame {message.seq} came, but frame {self._expected} is expected")
        if not NAME.fullmatch(message.query) or message.query_version >= MAX_SEQ:
            raise ProtocolError(f"{who}: frame {message.seq} is of {message.query!r:.100}, which is not a query's name")
        if message.raw_bytes > MAX_BODY_BYTES:
            raise CorruptFrame(
                f"{who}: frame {message.seq}: a body of {message.raw_bytes}, at most {MAX_BODY_BYTES} bytes"
            )
        frame = Frame.from_wire(message)
        message.ClearField("body")
        plain_bytes = message.ByteSize() + field_bytes(len(frame.body))
        if plain_bytes > (most := self._shared.section.max_frame_bytes):
            raise ProtocolError(f"{who}: frame {frame.seq} has {plain_bytes} bytes, at most {most}")
        frame = replace(frame, shipped_bytes=math.ceil(shipped_share * plain_bytes))
        self._expected = max(self._expected, frame.seq + 1)
        size, credit = max(frame.raw_bytes, frame.wire_bytes), self._shared.section.credit_bytes
        while (
            self._in_flight_bytes >= 2 * credit
            or self._in_flight_plain_bytes >= (1 if self._frames.is_delayed else PLAIN_CREDITS) * credit
        ):
            self._indexed.clear()
            await self._indexed.wait()
        received_at_ms = self._shared.now_ms()
        self._shared.status.heard(self.edge, received_at_ms)
        await self._shared.group_commit.reserve(size)
        self._count_in_flight(frame, 1)
        self._frames.put(frame, received_at_ms)

    def _on_delayed(self, delay_s: float) -> None:
        self._shared.metrics.delayed_seconds.inc(delay_s)
        if not self._was_delayed:
            self._was_delayed = True
            log.warning("edge %s makes more work than gateway.work_per_s allows: its frames are delayed", self.edge)

    def _on_checked(self, frame: Frame, received_at_ms: int, checked: CheckedFrame | Exception) -> None:
        size = max(frame.raw_bytes, frame.wire_bytes)
        if isinstance(checked, EdgewaterError):
            self.fail(type(checked)(f"edge {self.edge}, incarnation {self.hello.incarnation}: {checked}"))
        elif isinstance(checked, Exception):
            self.fail(checked)
        self._broken |= isinstance(checked, Exception)
        if isinstance(checked, Exception) or self._broken:
            # Later frames are not committed: they would not follow.
            self._count_in_flight(frame, -1)
            self._shared.group_commit.release(size)
            return
        stored = StoredFrame(frame.query, self.edge, self.hello.incarnation, frame.seq, checked.partials)
        arrived = UnindexedFrame(
            frame.query,
            self.edge,
            self.hello.incarnation,
            frame.seq,
            frame.crc32c,
            frame.wire_bytes,
            received_at_ms,
            None,
            size,
            checked.work,
            checked.through_ms,
            run=self.hello.state.run,
            facts=checked.facts,
        )
        received = ReceivedFrame(stored, arrived, frame.seq <= self._durable, self)
        # The partials are copies, so the body need not stay in memory until they are durable.
        sent = replace(frame, body=b"", shipped_bytes=frame.wire_bytes)
        indexed = partial(self._on_indexed, sent, received_at_ms, checked.reason, checked.message)
        self._shared.group_commit.submit(received, indexed)

    def _count_in_flight(self, frame: Frame, sign: int) -> None:
        self._in_flight += sign
        self._in_flight_bytes += sign * frame.wire_bytes
        self._in_flight_plain_bytes += sign * max(frame.raw_bytes, frame.wire_bytes)
        if sign < 0:
            self._indexed.set()

    def _on_indexed(
        self, frame: Frame, received_at_ms: int, refused: str | None, why: str, outcome: IndexOutcome | Exception
    ) -> None:
        self._count_in_flight(frame, -1)
        who = f"edge {self.edge}, incarnation {self.hello.incarnation}, frame {frame.seq}"
        if isinstance(outcome, Exception):
            self.fail(outcome)
        elif outcome is IndexOutcome.CONFLICT:
            message = f"{who}: the log has this frame with another checksum than {frame.crc32c:#010x}"
            self._shared.status.alarm("frame-conflict", message, self.edge, self._shared.now_ms())
            self.fail(OutdatedState(message))
        elif outcome is IndexOutcome.OUT_OF_SEQUENCE:
            self.fail(ProtocolError(f"{who}: does not follow the last durable frame; send a Hello again"))
        else:
            if outcome is IndexOutcome.REFUSED:
                self._refuse(frame, NOT_EXPECTED, _not_expected(self.edge, frame.query))
            elif outcome is IndexOutcome.NEW and refused is not None:
                query = f"query {frame.query.name}@{frame.query.version}"
                self._refuse(frame, refused, f"edge {self.edge}: {query}: {why}")
            self.acked_through = frame.seq if self.acked_through is None else max(self.acked_through, frame.seq)
            self.outgoing.put_ack(self.acked_through, received_at_ms)

    def _refuse(self, frame: Frame, reason: str, message: str) -> None:
        """Tells the edge that a frame is refused, and raises an alarm. The acknowledgement follows after this
        message."""
        self._shared.metrics.refused.labels(reason).inc()
        known = query_key(frame.query) if reason != NOT_EXPECTED else ""  # an edge may name any query
        self._shared.status.alarm("frame-refused", message, self.edge, self._shared.now_ms(), known)
        frames = self._refused[frame.query, reason] = self._refused.get((frame.query, reason), 0) + 1
        name, version = frame.query.name, frame.query.version
        refused = pb.Refused(
            query=name, query_version=version, reason=reason, seq=frame.seq, message=message, frames=frames
        )
        self.outgoing.put(pb.ToEdge(refused=refused), name, str(version), reason)

    def _on_heartbeat(self, message: pb.Heartbeat) -> None:
        now_ms = self._shared.now_ms()
        beat = read_heartbeat(self.hello, message, now_ms)
        every_ms = self._shared.heartbeat_ms()
        self._alarm_rejected(beat)
        self._shared.status.heartbeat(self._bounded(beat), every_ms)
        self._shared.links.heard(self.edge, every_ms)
        requirements = self._assignment.sampling if self._assignment is not None else ()
        for sampling in self._sampling.on_heartbeat(
            beat.backlog_bytes,
            read_likely_bandwidth(message),
            beat.clock_offset_ms,
            requirements,
            read_utilization(message),
        ):
            self.outgoing.put(pb.ToEdge(sampling=sampling), sampling.query, str(sampling.query_version))
        if message.inputs:
            self._shared.status.inputs(self.edge, read_inputs(message))
        echo = pb.TimeEcho(edge_sent_at_ms=message.sent_at_ms, center_received_at_ms=now_ms, heartbeat_ms=every_ms)
        self.outgoing.put(pb.ToEdge(time_echo=echo))

    def _alarm_rejected(self, beat: HeartbeatRecord) -> None:
        """Raises alarms about records that were rejected since the session's last heartbeat, and about columns that
        have lost their values since then."""
        rejected = {(s, source, reason): n for s, each in beat.rejected.items() for source, reason, n in each}
        gone = {(s, source, column) for s, each in beat.null_columns.items() for source, column in each}
        if any(n > self._rejected.get(place, 0) for place, n in rejected.items()):
            firsts = {place: f", first {text}" for place, text in beat.first_rejected.items()}
            places = _named(f"{p[1]} ({p[0]}): {p[2]}{firsts.get(p, '')}" for p in sorted(rejected))
            message = f"edge {self.edge}: sources reject records, which are in no answer: {places}"
            self._shared.status.alarm("records-rejected", message, self.edge, beat.seen_at_ms)
        if gone - self._null_columns:
            places = _named(f"{column} of {source} ({stream})" for stream, source, column in sorted(gone))
            message = f"edge {self.edge}: columns that had values are null in most records; renamed? {places}"
            self._shared.status.alarm("column-null", message, self.edge, beat.seen_at_ms)
        self._rejected, self._null_columns = rejected, gone

    def _bounded(self, beat: HeartbeatRecord) -> HeartbeatRecord:
        """Returns the heartbeat with limited times. A time that an edge with a right clock cannot state raises an
        alarm."""
        latest_ms = {s.name: self._shared.stream_rules.latest_ms(s, beat.seen_at_ms) for s in self.hello.streams}
        ahead = {s: w for s, w in beat.watermarks.items() if latest_ms.get(s, MAX_TIME_MS) < w < MAX_TIME_MS}
        for stream in ahead:
            message = (
                f"edge {self.edge}: the watermark of {stream} is later than any"
                f" record can be; set the edge's clock, or raise streams.{stream}.ahead at the center"
            )
            self._shared.status.alarm("watermark-ahead", message, self.edge, beat.seen_at_ms)
        most_ms = self._shared.stream_rules.max_offset_ms(self.hello.streams)
        if abs(beat.clock_offset_ms) > most_ms:
            self._shared.status.alarm(CLOCK_DIFFERS, clock_differs(self.edge, most_ms), self.edge, beat.seen_at_ms)
            if beat.clock_offset_ms > 0:
                self.fail(ProtocolError(clock_differs(self.edge, most_ms)))
        else:
            self._shared.status.end_alarm(CLOCK_DIFFERS, self.edge)
        if beat.watermarks and not ahead:
            self._shared.status.end_alarm("watermark-ahead", self.edge)
        return replace(
            beat,
            watermarks={s: latest_ms[s] if s in ahead else w for s, w in beat.watermarks.items()},
            clock_offset_ms=min(max(beat.clock_offset_ms, -most_ms), most_ms),
        )

    def _on_budget_report(self, message: pb.BudgetReport) -> None:
        ref, report = read_budget_report(self.edge, message)
        if ref not in self._queries:
            return  # ignored, as a status of this query would be
        self._shared.budget_sync.on_report(self.edge, ref, report)
        for budget in self._assignment.budgets if self._assignment is not None else ():
            if (budget.query, budget.query_version) == (ref.name, ref.version) and budget.version > report.version:
                # The budget was sent before the edge knew the query: send it again.
                self.outgoing.put(pb.ToEdge(budget=budget), budget.query, str(budget.query_version))

    def _on_link_report(self, message: pb.LinkReport) -> None:
        low_bytes_s, high_bytes_s, loads = read_link_report(message)
        self._loads = {ref: taken for ref, taken in (self._loads | loads).items() if ref in self._queries}
        self._shared.links.stated(self.edge, low_bytes_s, high_bytes_s, self._loads)

    def _on_status(self, message: pb.QueryStatus) -> None:
        if not NAME.fullmatch(message.query) or message.query_version >= MAX_SEQ:
            raise ProtocolError(f"edge {self.edge}: a status of {message.query!r:.100}, which is not a query's name")
        ref = QueryRef(message.query, message.query_version)
        if ref not in self._queries:
            return  # The query was deleted, or never assigned. To store such statuses would have no limit.
        text = message.message
        if not self.hello.release and _UNKNOWN_KEY in text:  # 0.3.0 shows the whole value, with the rows of a table
            text = f"the edge runs release 0.3.0, which has no `{text.partition(':')[0]}`; upgrade the edge"
        self._shared.status.status(
            QueryStatusRecord(ref, self.edge, message.accepted, bounded_text(message.code), bounded_text(text, 4_000))
        )


def _named(places: Iterable[str]) -> str:
    named = list(islice(places, MAX_NAMED + 1))
    return "; ".join(named[:MAX_NAMED]) + ("; …" if len(named) > MAX_NAMED else "")


def _not_expected(edge: EdgeId, query: QueryRef) -> str:
    return (
        f"edge {edge}: query {query.name}@{query.version} does not expect this edge; expected an edge that the query"
        " names, or that serves its stream, and whose entry among the tokens allows the query"
    )
