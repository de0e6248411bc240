"""The gateway: the gRPC service that edges connect to (`edgewater.v1.Uplink`).

It authenticates edges, validates their frames, and acknowledges a frame once it is durable in the frame log and
indexed in the catalog, never before. Any number of gateways may run over one catalog: the catalog decides whether a
frame is new.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from cachetools import LRUCache

from center.catalog import Catalog, SessionStart, require_declared
from center.config import CenterConfig, GatewaySection
from center.edge_access import EdgeAccess
from center.ingest import limits
from center.ingest.assignments import AssignmentPlan
from center.ingest.authentication import Presented
from center.ingest.budget_sync import BudgetSync
from center.ingest.credential_files import CredentialFiles
from center.ingest.edge_session import CLOCK_DIFFERS, GatewaySession, SharedParts, clock_differs
from center.ingest.frame_validator import FrameValidator
from center.ingest.group_commit import GroupCommit
from center.ingest.hello_queue import HelloQueue
from center.ingest.link_shares import LinkShares
from center.ingest.metrics import GatewayMetrics
from center.ingest.status_writer import StatusWriter
from center.ingest.stream_rules import StreamRules
from center.ingest.validation import Hello, permitted, read_hello
from center.storage.frame_log import FrameLog
from center.storage.wake import POLL_S, Channel, Topic, Waker
from edgewater.base.errors import (
    Conflict,
    EdgewaterError,
    InvalidConfig,
    LimitExceeded,
    ProtocolError,
    Retired,
    StorageError,
    Unauthenticated,
)
from edgewater.base.streams import EdgeId
from edgewater.guard.frame_work import MAX_FRAME_WORK
from edgewater.runtime.configuration import is_loopback
from edgewater.runtime.tasks import Tasks
from edgewater.runtime.token_bucket import TokenBucket
from edgewater.wire import CODE_METADATA, RETRY_METADATA, uplink_pb2_grpc
from edgewater.wire import uplink_pb2 as pb

STATUS_OF_CODE = {
    "unauthenticated": grpc.StatusCode.UNAUTHENTICATED,
    "corrupt-frame": grpc.StatusCode.DATA_LOSS,
    "conflict": grpc.StatusCode.DATA_LOSS,
    "protocol": grpc.StatusCode.FAILED_PRECONDITION,
    "retired": grpc.StatusCode.FAILED_PRECONDITION,
    "outdated-state": grpc.StatusCode.FAILED_PRECONDITION,
    "limit-exceeded": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "storage": grpc.StatusCode.UNAVAILABLE,
}
"""The gRPC status of each error of `edgewater.base.errors`. The code of the error is sent as trailing metadata."""

STOP_GRACE_S = 2.0  # limit: time of a stop
ASSIGNED_AT_ONCE = 200  # limit: time of a turn of the event loop
"""Sessions that get their assignments in one turn of the event loop."""
HEARTBEATS_PER_S = 500  # limit: work of a gateway at rest
"""Heartbeats per second of all sessions. With more sessions, the gateway asks for longer intervals."""
SLOWEST_HEARTBEAT_MS = 20_000  # format: of sessions
"""The longest interval of heartbeats that an edge accepts."""
_ENVELOPE_BYTES = 64 << 10  # limit: size of a message besides its frame
MAX_AHEAD_BYTES = 16 << 20
"""Limit of the bytes of one edge that have arrived and that the gateway has not read. They are in the memory of
gRPC.
"""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GatewayBounds:
    """Limits of a gateway that no configuration sets.

    Attributes:
        max_pending_bytes: bytes of frames not yet committed, over all sessions.
        max_sessions: how many edges may be connected at the same time. As many calls may wait for their Hello.
        poll_ms: least time between two reads of the catalog. It is read when it has changed, and each `POLL_S`.
        reload_ms: interval of checking the files of credentials. A revoked credential ends its session within this
            time.
        write_ms: least time between two writes of `StatusWriter`.
        retry_ms, retry_max_ms: delay before the first new attempt of a failed commit, and the longest delay.
        hello_timeout_ms: a call without a Hello, and a connection without a call, is ended after this time.
    """

    max_pending_bytes: int = 256 << 20
    max_sessions: int = 20_000
    poll_ms: int = 200
    reload_ms: int = 1_000
    write_ms: int = 1_000
    retry_ms: int = 100
    retry_max_ms: int = 2_000
    hello_timeout_ms: int = 10_000


class Gateway:
    """Serves edges from `start` to `stop`.

    Args:
        catalog, log: the destination of frames. Only the gateway appends to this `log` object.
        now_ms: wall clock, ms since the epoch.
        wakes: how the gateway wakes drivers, and is woken when the catalog changes; None: by polls only.

    Attributes:
        tasks: the gateway's tasks. The process sets how it ends if one of them fails.
        sessions: the edges that are connected.
    """

    def __init__(
        self,
        catalog: Catalog,
        log: FrameLog,
        config: CenterConfig,
        now_ms: Callable[[], int],
        wakes: Channel | None = None,
        bounds: GatewayBounds = GatewayBounds(),
    ) -> None:
        self._catalog = catalog
        self._log = log
        self._section, self._bounds, self._wakes = config.gateway, bounds, wakes
        self._now_ms = now_ms
        self._credentials = CredentialFiles(config.tokens, config.tokens_file, config.tls)
        self.sessions: dict[EdgeId, GatewaySession] = {}
        self._server: Any = None
        self._committing: asyncio.Task[None] | None = None
        self._opening: set[EdgeId] = set()
        self._awaiting_hello: Counter[frozenset[EdgeId] | None] = Counter()
        self._refusals = limits.FixedWindow(now_ms)
        self._hellos: LRUCache[EdgeId, limits.FixedWindow] = LRUCache(bounds.max_sessions)
        self._shares: LRUCache[EdgeId, TokenBucket] = LRUCache(bounds.max_sessions)
        self._plan = AssignmentPlan(-1, ())
        self._unsent = False
        self._wanted = asyncio.Event()
        self._refreshing = asyncio.Lock()
        self._catalog_problem: str | None = None
        self.metrics = GatewayMetrics()
        self.tasks = Tasks()
        self.metrics.registry.register(self.tasks.failures)
        self._decompression = limits.DecompressionMemory(config.gateway.compression_bytes, self.metrics)
        # The address does not decide: a gateway on loopback may be behind a proxy that other machines can reach.
        self._stream_rules = StreamRules(config.streams, edges_set_clocks=not self._credentials.authenticates)
        self._validator = FrameValidator(self._stream_rules, self._read_plan, config.gateway.open_windows)
        self._status = StatusWriter(catalog, self.metrics, bounds.write_ms / 1000, now_ms)
        self._hello_queue = HelloQueue(catalog, self._refresh, self.metrics)
        self._budget_sync = BudgetSync(catalog, self._status, now_ms, self._wanted.set)
        self._links = LinkShares(catalog, now_ms, self._share_link)
        self._waker = Waker(wakes, Topic.FRAMES)
        self._group_commit = GroupCommit(
            catalog,
            log,
            self.metrics,
            max_pending_bytes=bounds.max_pending_bytes,
            read_plan=self._read_plan,
            waker=self._waker,
            on_stall=self._on_stall,
            retry_ms=bounds.retry_ms,
            retry_max_ms=bounds.retry_max_ms,
        )
        self._shared = SharedParts(
            validator=self._validator,
            group_commit=self._group_commit,
            status=self._status,
            metrics=self.metrics,
            budget_sync=self._budget_sync,
            stream_rules=self._stream_rules,
            links=self._links.division,
            heartbeat_ms=self._heartbeat_ms,
            now_ms=now_ms,
            section=config.gateway,
        )

    async def start(self, address: str) -> int:
        """Starts to serve at ``host:port``. Returns the port; for port 0 it is a free port.

        Raises:
            InvalidConfig: the address is not available, or other machines could connect without credentials.
            StorageError: the catalog cannot be read.
        """
        if not self._credentials.authenticates and not is_loopback(address):
            accepted = "a loopback address, or tokens or a client CA"
            reason = "other machines could connect without credentials"
            raise InvalidConfig("gateway.listen", address, accepted, reason)
        await self._refresh()
        await asyncio.to_thread(self._sweep)
        await asyncio.to_thread(self._catalog.edges.forget_gateways)
        self._server = grpc.aio.server(options=_server_options(self._section, self._bounds))
        add_servicer: Any = uplink_pb2_grpc.add_UplinkServicer_to_server  # generated, untyped
        add_servicer(_Servicer(self), self._server)
        try:
            port = self._listen(address)
        except RuntimeError as exc:
            raise InvalidConfig("gateway.listen", address, "a host:port that is free", str(exc)) from exc
        self._committing = self.tasks.start("group-commit", self._group_commit.run())
        self.tasks.start("status-writer", self._status.run())
        self.tasks.start("hellos", self._hello_queue.run())
        self.tasks.start("poll", self._poll())
        self.tasks.start("links", self._links.run())
        self.tasks.start("credentials", self._watch_credentials())
        await self._server.start()
        return port

    def _listen(self, address: str) -> int:
        credentials = self._credentials.server_credentials()
        if credentials is None:
            return int(self._server.add_insecure_port(address))
        return int(self._server.add_secure_port(address, credentials))

    async def stop(self) -> None:
        """Ends the sessions, commits the pending frames and acknowledges them.

        If the disk fails, it does not wait for the frames: they were never acknowledged, so edges send them again.
        """
        for session in list(self.sessions.values()):
            session.finish()
        if self._server is not None:
            await self._server.stop(STOP_GRACE_S)
        self._group_commit.close()
        if self._committing is not None and self._group_commit.stalled is None:
            await asyncio.wait([self._committing], timeout=STOP_GRACE_S)
        await self.tasks.cancel()
        self._validator.close()
        await self._status.flush(all_heartbeats=True)

    def readiness(self) -> list[str]:
        """Returns the reasons why frames cannot be acknowledged; empty: they can. May be called from any thread."""
        missing = self.tasks.missing()
        if self._server is None:
            missing.append("the gateway has not started")
        if self._group_commit.stalled is not None:
            missing.append(f"frames cannot be made durable: {self._group_commit.stalled}")
        if self._catalog_problem is not None:
            missing.append(f"the catalog cannot be read: {self._catalog_problem}")
        return missing

    async def serve(self, requests: AsyncIterator[pb.FromEdge], context: Any) -> None:
        """Serves one call, from its first message to its end."""
        code = "done"
        try:
            await self._session(requests, context)
        except EdgewaterError as exc:
            code = exc.code
            if self._refusals.add(limits.LOGGED_REFUSALS):
                log.warning("session refused or ended: %s", exc)
            status = STATUS_OF_CODE.get(exc.code, grpc.StatusCode.INTERNAL)
            trailing = [(CODE_METADATA, exc.code)]
            if isinstance(exc, limits.TryLater):
                trailing.append((RETRY_METADATA, str(exc.retry_after_ms)))
            # `abort` is not used: it raises, and leaves each call in reference cycles until a garbage collection.
            context.set_trailing_metadata(tuple(trailing))
            context.set_code(status)
            context.set_details(exc.message)
        except asyncio.CancelledError:
            code = "cut"
            raise
        except Exception:
            code = "internal"
            raise
        finally:
            self.metrics.ended.labels(code).inc()

    async def _session(self, requests: AsyncIterator[pb.FromEdge], context: Any) -> None:
        presented = Presented.of(context.invocation_metadata() or (), context.auth_context() or {})
        candidates = self._credentials.loaded.edges.candidates(presented, self._now_ms())
        with self._awaiting(candidates):
            hello = await self._receive_hello(requests)
        access = self._credentials.loaded.require(presented, hello.edge, self._now_ms())
        hello = permitted(hello, access)
        now_ms, most_ms = self._now_ms(), self._stream_rules.max_offset_ms(hello.streams)
        if hello.sent_at_ms - now_ms > most_ms:
            self._status.alarm(CLOCK_DIFFERS, clock_differs(hello.edge, most_ms), hello.edge, now_ms)
            raise ProtocolError(clock_differs(hello.edge, most_ms))
        if not self._hellos.setdefault(hello.edge, limits.FixedWindow(self._now_ms)).add(limits.HELLOS):
            seconds = limits.WINDOW_MS // 1000
            message = f"edge {hello.edge}: more than {limits.HELLOS} sessions began in {seconds} s"
            raise limits.exceeded(self.metrics, "hellos", message)
        for stream in hello.streams:
            self._stream_rules.require_clock(stream)
        with self._admitted(hello.edge):
            session = await self._open(hello, presented, access)
            self._replace(session)
        self._status.session_began(session.edge, self._now_ms())
        self._links.division.begin(session.edge, session.hello.link)
        self.metrics.sessions.inc()
        session.window_log = self._decompression.take()
        try:
            await context.write(self._welcome(session))
            session.opened = True  # the gateway has looked at the catalog since its Hello
            self._assign(session)
            if self._group_commit.stalled is not None:
                session.outgoing.put(self._throttle())
            await session.run(requests, context.write)
        finally:
            self.metrics.sessions.dec()
            self._decompression.release(session.window_log)
            if self.sessions.get(session.edge) is session:
                del self.sessions[session.edge]
                self._links.division.end(session.edge)
                self._status.session_ended(session.edge, session.name, self._now_ms())

    @contextlib.contextmanager
    def _awaiting(self, identity: frozenset[EdgeId] | None) -> Iterator[None]:
        """Counts a call until its Hello, over all calls and over the calls of one identity."""
        if self._awaiting_hello.total() >= self._bounds.max_sessions:
            self.metrics.limited.labels("awaiting-hello").inc()
            count = self._awaiting_hello.total()
            raise StorageError(f"{count} calls have not sent a Hello yet, which is this gateway's limit")
        if identity is not None and self._awaiting_hello[identity] >= limits.CALLS_AWAITING_HELLO:
            message = f"{limits.CALLS_AWAITING_HELLO} calls of {', '.join(sorted(identity))} have not sent a Hello yet"
            raise limits.exceeded(self.metrics, "awaiting-hello", message)
        self._awaiting_hello[identity] += 1
        try:
            yield
        finally:
            self._awaiting_hello[identity] -= 1
            if not self._awaiting_hello[identity]:
                del self._awaiting_hello[identity]

    @contextlib.contextmanager
    def _admitted(self, edge: EdgeId) -> Iterator[None]:
        """Reserves a session for an edge while it is being opened. A connected edge replaces its own session."""
        if edge in self.sessions or edge in self._opening:
            yield
            return
        count = len(self.sessions) + len(self._opening)
        if count >= self._bounds.max_sessions:
            self.metrics.limited.labels("sessions").inc()
            raise StorageError(f"{count} edges are connected, which is this gateway's limit")
        self._opening.add(edge)
        try:
            yield
        finally:
            self._opening.discard(edge)

    async def _receive_hello(self, requests: AsyncIterator[pb.FromEdge]) -> Hello:
        try:
            async with asyncio.timeout(self._bounds.hello_timeout_ms / 1000):
                first = await anext(requests, None)
        except TimeoutError as exc:
            self.metrics.limited.labels("hello-timeout").inc()
            raise ProtocolError(f"no Hello within {self._bounds.hello_timeout_ms} ms") from exc
        if first is None or first.WhichOneof("message") != "hello":
            received = first.WhichOneof("message") if first is not None else "the end of the stream"
            raise ProtocolError(f"the first message was {received}, expected hello")
        if first.ByteSize() > limits.HELLO_BYTES:
            message = f"a Hello of {first.ByteSize()} bytes; expected at most {limits.HELLO_BYTES}"
            raise limits.exceeded(self.metrics, "message-size", message)
        return read_hello(first.hello)

    async def _open(self, hello: Hello, presented: Presented, access: EdgeAccess) -> GatewaySession:
        name = uuid.uuid4().hex
        try:
            acked_through = await self._hello_queue.begin(
                SessionStart(
                    hello.edge,
                    hello.incarnation,
                    hello.labels,
                    hello.streams,
                    hello.oldest_seq,
                    hello.next_seq,
                    self._now_ms(),
                    name,
                    access,
                    self._status.gateway,
                    hello.state,
                )
            )
        except limits.TryLater:
            raise
        except LimitExceeded as exc:
            self.metrics.limited.labels(exc.limit).inc()
            raise
        share = self._share(hello.edge)
        return GatewaySession(name, hello, acked_through, presented, access, share, self._shared)

    def _share(self, edge: EdgeId) -> TokenBucket:
        """Returns the edge's share of the center's work. It stays the same over the edge's sessions. At the beginning,
        the work of a second, or of one frame, is free."""
        rate, now_s = self._section.work_per_s, asyncio.get_running_loop().time()
        return self._shares.setdefault(edge, TokenBucket(rate, now_s, max(rate, MAX_FRAME_WORK)))

    def _heartbeat_ms(self) -> int:
        """The interval of heartbeats that this gateway asks its edges for."""
        by_load_ms = len(self.sessions) * 1000 // HEARTBEATS_PER_S
        return min(max(self._section.heartbeat_ms, by_load_ms), SLOWEST_HEARTBEAT_MS)

    def _replace(self, session: GatewaySession) -> None:
        """Replaces an older session of the edge, which a broken link has left behind."""
        older = self.sessions.get(session.edge)
        self.sessions[session.edge] = session
        if older is None:
            return
        reason = "a newer session has replaced this session"
        if older.hello.incarnation != session.hello.incarnation:
            reason = (
                f"another agent, of incarnation {session.hello.incarnation}, has connected under this id; give each"
                " agent its own id, and stop one of the two agents"
            )
        older.fail(Conflict(f"edge {session.edge}: {reason}"))

    def _welcome(self, session: GatewaySession) -> pb.ToEdge:
        acked = session.acked_through
        return pb.ToEdge(
            welcome=pb.Welcome(
                protocol=session.hello.protocol,
                any_acked=acked is not None,
                acked_through=acked or 0,
                max_frame_bytes=self._section.max_frame_bytes,
                credit_bytes=self._section.credit_bytes,
                received_at_ms=self._now_ms(),
                window_log=session.window_log,
            )
        )

    async def _poll(self) -> None:
        """Reads the catalog when it has changed, and each `POLL_S`, until cancelled."""
        loop = asyncio.get_running_loop()

        def woken(_: bool) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._wanted.set)

        wakes, least_s = self._wakes, self._bounds.poll_ms / 1000
        with contextlib.nullcontext() if wakes is None else wakes.listen(Topic.CATALOG, woken, self.tasks):
            while True:
                await asyncio.sleep(least_s)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0 if wakes is None else POLL_S - least_s):
                        await self._wanted.wait()
                self._wanted.clear()
                self._waker.beat()
                try:
                    await self._refresh()
                    self._catalog_problem = None
                except StorageError as exc:
                    if self._catalog_problem is None:
                        log.error("the catalog cannot be read: %s", exc)
                    self._catalog_problem = str(exc)

    async def _watch_credentials(self) -> None:
        """Ends the sessions whose credential is no longer accepted, until cancelled."""
        end_ms, overdue = self._credentials.loaded.edges.next_end_ms(self._now_ms()), False
        if self._credentials.problem is None:
            self._status.end_alarm("credentials-unusable", EdgeId(""))
        while True:
            await asyncio.sleep(self._bounds.reload_ms / 1000)
            authorities = self._credentials.loaded.authorities
            changed = await asyncio.to_thread(self._credentials.refresh)
            problem = self._credentials.problem
            self.metrics.credentials_stale.set(problem is not None)
            if changed and problem is not None:
                message = f"changed credentials are not used, the previous ones stay in use: {problem}"
                self._status.alarm("credentials-unusable", message, EdgeId(""), self._now_ms())
            elif changed:
                self._status.end_alarm("credentials-unusable", EdgeId(""))
                log.info("the credentials have been read again")
                self.metrics.credential_reloads.inc()
            now_ms, loaded = self._now_ms(), self._credentials.loaded
            was_overdue, overdue = overdue, loaded.revocations is not None and loaded.revocations.is_overdue(now_ms)
            if not overdue:
                self._status.end_alarm("revocations-overdue", EdgeId(""))
            if overdue and not was_overdue:
                message = "a revocation list in tls.crl is older than its next update; it stays in use"
                self._status.alarm("revocations-overdue", message, EdgeId(""), now_ms)
            if changed or now_ms >= end_ms or loaded.revocations is not None:
                for session in list(self.sessions.values()):
                    self._require_still_valid(session, now_ms, ca_changed=loaded.authorities != authorities)
                end_ms = loaded.edges.next_end_ms(now_ms)

    def _require_still_valid(self, session: GatewaySession, now_ms: int, *, ca_changed: bool) -> None:
        try:
            access = self._credentials.loaded.require(session.presented, session.edge, now_ms)
        except Unauthenticated as exc:
            session.fail(exc)
            return
        if ca_changed and session.presented.certificate is not None:
            session.fail(Unauthenticated("the client CA has changed: connect again, so that it checks the certificate"))
        elif (access.streams, access.queries) != (session.access.streams, session.access.queries):
            session.fail(ProtocolError(f"the access of edge {session.edge} has changed: connect again"))

    async def _refresh(self) -> None:
        """Reads the catalog if its version has changed, runs the budget allocators, and sends new assignments."""
        async with self._refreshing:
            plan = await asyncio.to_thread(self._read_plan, self._plan)
            if plan.version > self._plan.version:
                # The plan is kept until it is sent: the sync below may fail, and the next poll then sees no newer
                # version.
                self._plan, self._unsent = plan, True
                self._group_commit.plan = self._validator.plan = plan
            if await self._budget_sync.sync(self._plan) or self._unsent:
                for number, session in enumerate(list(self.sessions.values())):
                    # The plan may be older than the Hello of a session that is being opened.
                    if session.opened:
                        self._assign(session)
                    if number % ASSIGNED_AT_ONCE == ASSIGNED_AT_ONCE - 1:
                        await asyncio.sleep(0)  # heartbeats and acknowledgements continue
                self._unsent = False

    def _assign(self, session: GatewaySession) -> None:
        """Sends a session its assignment. It ends the session if the edge was retired after its Hello, or if the edge's
        columns are not the declared columns any more.

        The edge then keeps its queries: an empty assignment would drop the records that it has not shipped.
        """
        try:
            require_declared(self._plan.declared, session.edge, session.hello.streams)
        except ProtocolError as exc:
            session.fail(exc)
            return
        if self._plan.is_retired(session.edge):
            session.fail(Retired(f"edge {session.edge} is retired: an admin of the center can reinstate it"))
        else:
            session.assign(self._plan.assignment(session.edge, self._budget_sync.snapshot))

    def _read_plan(self, current: AssignmentPlan) -> AssignmentPlan:
        # The version first: a change during the following reads increments it again, and is seen by the next poll.
        version = self._catalog.version()
        if version == current.version:
            return current
        catalog = self._catalog
        edges, declared = catalog.edges.all(current.edges), catalog.streams.declared()
        return AssignmentPlan.of(version, catalog.tables.with_rows(catalog.queries.all()), edges, declared, current)

    def _sweep(self) -> None:
        """Removes segments that retention does not know: segments after a crash, and segments of deleted queries that
        were never indexed."""
        try:
            self._log.remove_partial()
            removable = self._catalog.frames.removable_segments(self._log.segments(), self._queries_in)
            for segment in removable:
                self._log.remove(segment)
            self._catalog.frames.forget_segments(removable)
        except StorageError as exc:  # the segments take space until the next start; edges wait for this start
            log.warning("segments without frames are not removed: %s", exc)

    def _queries_in(self, segment: str) -> set[str]:
        """Returns the keys of the queries with frames in a segment. If the segment is unreadable, it returns an unknown
        key, so that the segment stays."""
        try:
            return self._log.queries(segment)
        except StorageError as exc:
            log.warning("a segment without frames is not removed: %s", exc)
            return {""}

    def _share_link(self, edge: EdgeId, bytes_s: float) -> None:
        if (session := self.sessions.get(edge)) is not None:
            session.outgoing.put(pb.ToEdge(link_share=pb.LinkShare(bytes_s=round(bytes_s))))

    def _on_stall(self) -> None:
        for session in self.sessions.values():
            session.outgoing.put(self._throttle())

    def _throttle(self) -> pb.ToEdge:
        """Returns the message that makes edges pause while no frame can be made durable; 0 ms ends the pause."""
        wait_ms = self._bounds.retry_max_ms if self._group_commit.stalled is not None else 0
        return pb.ToEdge(throttle=pb.Throttle(retry_after_ms=wait_ms))


class _Servicer:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def Session(self, request_iterator: AsyncIterator[pb.FromEdge], context: Any) -> None:  # noqa: N802  (gRPC's name)
        await self._gateway.serve(request_iterator, context)


def _server_options(section: GatewaySection, bounds: GatewayBounds) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", section.max_frame_bytes + _ENVELOPE_BYTES),
        # gRPC closes connections without an HTTP/2 preface or without a call, and connections beyond the number.
        ("grpc.server_handshake_timeout_ms", bounds.hello_timeout_ms),
        ("grpc.max_connection_idle_ms", bounds.hello_timeout_ms),
        ("grpc.max_allowed_incoming_connections", 2 * bounds.max_sessions + limits.SPARE_CONNECTIONS),
        ("grpc.max_concurrent_streams", limits.STREAMS_PER_CONNECTION),
        # If more than 1,000 calls wait for this process, gRPC cancels some, and it cancels all beyond 3,000. Their
        # edges would connect again at random. The queue of Hellos gives each edge a time instead. Each edge makes one
        # call.
        ("grpc.server.max_pending_requests", 2 * bounds.max_sessions),
        ("grpc.server.max_pending_requests_hard_limit", 2 * bounds.max_sessions + limits.SPARE_CONNECTIONS),
        # With SO_REUSEPORT, two gateways could share one port, each with some edges, and nobody would notice.
        ("grpc.so_reuseport", 0),
        # This only closes connections of machines that no longer exist; heartbeats detect a silent edge. A gateway or
        # an edge on a machine without free CPU may answer late, and its session should stay.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
        ("grpc.http2.max_ping_strikes", 0),
        # To choose its window, gRPC would measure a connection's delay, with a ping for nearly each message of an edge
        # that sends few messages. An edge has at most its credit in flight, so no measurement is needed.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", min(section.credit_bytes, MAX_AHEAD_BYTES)),
    ]
