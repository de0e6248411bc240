"""`Agent`: serves pushes and the operator's endpoints, and runs the parts that `open_agent` has connected."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import Scope

from edge.agent.source_reading import SourceReading
from edge.backfill_runner import BackfillRunner
from edge.config import EdgeConfig, HttpTlsConfig
from edge.core.events import Ingested
from edge.durability import DurableCore, JournalGroupCommit
from edge.records import Chunk, Source, guesses
from edge.source_status import SourceStates
from edge.sources.factory import package_receivers
from edge.sources.grpc_receiving import GrpcReceivers
from edge.sources.http import StreamReceiver
from edge.sources.lookups import StreamLookups
from edge.sources.receiving import PushEndpoint, Unavailable
from edge.uplink import DailyQuota, Uplink, UplinkOutbox
from edge.utilization import BusyMeter, QueryCosts
from edgewater.base.errors import InvalidConfig, OutdatedState, Retired, StorageError
from edgewater.base.streams import TIME_COLUMN
from edgewater.runtime.allocator import release_free_memory
from edgewater.runtime.connections import ConnectionLimits, guarded
from edgewater.runtime.health import EmbeddedServer
from edgewater.runtime.host_check import LocalHosts
from edgewater.runtime.listeners import Listeners
from edgewater.runtime.problems import problem
from edgewater.runtime.tasks import Tasks
from edgewater.wire import DropReason

log = logging.getLogger(__name__)

GONE_CHECKPOINT_S = 0.1  # limit: number of checkpoints
"""Time between a source's report that its input is gone and the checkpoint, so that one checkpoint covers several
reports."""
CHECKPOINT_PAUSES = 20  # limit: share of the time that checkpoints take
"""The least time between two checkpoints, as a multiple of the time that the last one took. So checkpoints take at most
5 % of the agent's time."""
DRAIN_S = 1.0  # limit: time of a reload
"""How long clients may take to end their connections before a reload."""
STOP_GRACE_S = 2  # limit: time of a stop
"""How long requests in progress may take when the agent is told to stop."""
LIMITS = ConnectionLimits()
RETIRED = "retired: the center has retired this edge; an admin of the center can reinstate it, then restart the agent"


@dataclass(slots=True)
class Agent:
    """An edge agent. Build it with `open_agent`, then `await run(stop)`.

    Attributes:
        now_ms: the wall clock.
        skipped: numbers of valid values that are not records, by (stream, reason).
        refused: numbers of refused requests and closed connections of clients that push, by reason.
        lookups: the lookups of each stream that has lookups.
        pages: the endpoints for the operator (`AgentHealth`).
        configuration_failure: returns why the newest content of the configuration file is not in use; empty: it is in
            use.
        tasks: the loops of the agent.
    """

    config: EdgeConfig
    durable: DurableCore
    commit: JournalGroupCommit
    outbox: UplinkOutbox
    uplink: Uplink
    meter: BusyMeter
    costs: QueryCosts
    backfills: BackfillRunner
    states: SourceStates
    reading: SourceReading
    now_ms: Callable[[], int]
    daily_quota: DailyQuota | None = None
    lookups: dict[str, StreamLookups] = field(default_factory=dict)
    pages: Sequence[Route] = ()
    configuration_failure: Callable[[], str] = str
    skipped: dict[tuple[str, str], int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    tasks: Tasks = field(default_factory=lambda: Tasks(expected=(OutdatedState, InvalidConfig)))

    @property
    def sources(self) -> list[Source]:
        """All sources, also those that were opened while the agent runs."""
        return self.reading.sources

    async def run(
        self, stop: asyncio.Event, listeners: Listeners | None = None, started: Callable[[], None] = lambda: None
    ) -> None:
        """Runs until `stop` is set or a task fails; then writes a checkpoint.

        Args:
            listeners: keep the listening sockets open for another program; None: they are closed at the end.
            started: called when all sockets are open.

        Raises:
            InvalidConfig: the agent cannot listen on an address of `http`, or `http.tls` cannot be used.
            OutdatedState: the center has seen a newer state of this edge, or another agent with its id: see
                `begin_anew`.
        """
        http = self.config.http
        health, endpoint = self.pages, self.endpoint()
        pages = Middleware(CORSMiddleware, http.origins, ["POST"], ["*"], expose_headers=["Retry-After"])
        pushed = [Mount("", routes=endpoint.routes, middleware=[pages] if http.origins else [])]
        push = [*([] if http.metrics else health), *pushed]
        guard = Middleware(LocalHosts, hosts=http.hosts, key="http.hosts", refuse=self._misdirected)
        apps = [(http.listen, "http.listen", Starlette(False, push, [] if http.authenticates else [guard]), http.tls)]
        if http.metrics is not None:
            apps.append((http.metrics, "http.metrics", Starlette(False, health), None))
        with contextlib.ExitStack() as sockets:
            opened = sockets.enter_context(contextlib.closing(Listeners({}))) if listeners is None else listeners
            addresses = [(address, field) for address, field, _, _ in apps]
            listening = [sockets.enter_context(socket) for socket in opened.listen(addresses)]
            servers = [_server(app, tls, self._count_refused, listeners is not None) for _, _, app, tls in apps]
            rpc = [GrpcReceivers(endpoint, http.grpc, http.tls)] if http.grpc is not None else []
            serving = [
                self.tasks.start("http", server.serve([socket]))
                for server, socket in zip(servers, listening, strict=True)
            ]
            await self._run(servers, serving, rpc, stop, started)

    async def _run(
        self,
        servers: list[EmbeddedServer],
        serving: list[asyncio.Task[None]],
        rpc: list[GrpcReceivers],
        stop: asyncio.Event,
        started: Callable[[], None],
    ) -> None:
        for each in rpc:
            await each.start()
        started()
        tasks = [self.tasks.start(name, loop) for name, loop in self.loops().items()]
        stopping = asyncio.create_task(stop.wait())
        try:
            await self._first_failure([*tasks, *serving], stopping)
        finally:
            # A push whose records have been ingested must be answered, or its client sends them again.
            for server in servers:
                server.should_exit = True
            stopped = [each.stop(STOP_GRACE_S) for each in rpc]
            await asyncio.gather(asyncio.wait(serving, timeout=2 * STOP_GRACE_S), *stopped)
            for server in servers:
                server.force_exit = True
            for task in [*tasks, stopping]:
                task.cancel()
            await asyncio.gather(*tasks, stopping, *serving, return_exceptions=True)
            await self.commit.checkpoint()
            self.durable.close()
            if self.daily_quota is not None:
                with contextlib.suppress(StorageError):  # the file then contains the reserved, larger number
                    self.daily_quota.close()

    def loops(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Returns the loops of the agent by name, without the HTTP server. Each loop runs until it is cancelled."""
        reading = self.reading
        return {
            "group-commit": self.commit.run(),
            "uplink": self._connect(),
            "tick": reading.tick(),
            "sync": reading.sync(),
            "checkpoint": self._checkpoint(),
            "sources": reading.read_all(),
            "backfills": self.backfills.run(),
            "inputs": reading.fingerprint_inputs(),
            **{f"lookups-{stream}": lookups.run() for stream, lookups in self.lookups.items()},
        }

    async def _connect(self) -> None:
        await self.commit.durable()  # the center stores the number of this process, so the state must have it
        await self.uplink.run()

    async def _first_failure(self, tasks: list[asyncio.Task[None]], stopping: asyncio.Task[bool]) -> None:
        waiting: set[asyncio.Task[None] | asyncio.Task[bool]] = {*tasks, stopping}
        while not stopping.done():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    async def _checkpoint(self) -> None:
        interval_s, input_gone = self.config.limits.checkpoint_ms / 1000, self.reading.input_gone
        written, pause_s = -1, 0.0
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(interval_s, pause_s)):
                    await input_gone.wait()
                    await asyncio.sleep(max(GONE_CHECKPOINT_S, pause_s))
            input_gone.clear()
            if self.durable.journal_bytes != written or self.commit.failure is not None:
                began_s = time.monotonic()
                await self.commit.checkpoint()
                pause_s = CHECKPOINT_PAUSES * (time.monotonic() - began_s)
                written = self.durable.journal_bytes
                release_free_memory()

    def endpoint(self) -> PushEndpoint:
        """Returns the endpoint of pushed records."""
        return PushEndpoint(
            [StreamReceiver.of(self.config), *package_receivers(self.config, self.now_ms)],
            self.config,
            self.accept,
            self.unavailable,
            self.now_ms,
            self.meter.busy,
            self.meter.on_refused,
            self._count_refused,
            self.durable.state.series_of,
            self._count_skipped,
        )

    def _misdirected(self, _: Scope, detail: str) -> Response:
        self._count_refused("host")
        return problem(421, "misdirected", detail)

    def _count_refused(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def _count_skipped(self, stream: str, skipped: Mapping[str, int]) -> None:
        for reason, count in skipped.items():
            self.skipped[stream, reason] = self.skipped.get((stream, reason), 0) + count

    def unavailable(self) -> Unavailable | Retired | None:
        """Returns why a pushed request cannot be accepted, or None."""
        if self.uplink.retired.is_set():
            return Retired(RETIRED)
        if reasons := self._own_reasons():
            return Unavailable("; ".join(reasons), retry_after_s=1)
        if self.reading.is_over_memory_limit():
            return Unavailable("the edge has reached limits.max_pending_bytes", retry_after_s=1)
        return None

    async def accept(self, chunk: Chunk, stream: str) -> int | None:
        """Ingests a pushed chunk, unless its batch was already counted. Returns when the batch is durable.

        Returns:
            The number of records, if the batch was already counted; None: it is new.

        Raises:
            Retired: the edge has been retired.
            InvalidRequest: the client has used its idempotency key for another body.
            StorageError: the journal cannot be written, or a lookup of the stream is not loaded yet.
        """
        if self.uplink.retired.is_set():
            raise Retired(RETIRED)
        arrival_ms, pushes = self.now_ms(), self.durable.state.pushes
        counted = None if chunk.push is None else pushes.records_of(chunk.push, arrival_ms)
        if counted is not None:
            pushes.repeated += 1
            if chunk.push is not None and chunk.push.is_guess:
                self._leave_out(stream, chunk, arrival_ms)
            await self.commit.durable()  # the batch's first push may still wait for the journal
            return counted
        if stream in self.lookups:
            chunk = self.lookups[stream].joined(chunk)
        self.states.count(chunk.source, chunk)
        if chunk.batch.num_rows or chunk.rejected_records or chunk.series is not None:
            with self.meter.busy(chunk.source):
                event = Ingested(stream, chunk.source, chunk.batch, arrival_ms, rejected=chunk.rejected_records)
                self.durable.ingest_payload(event, push=chunk.push, series=chunk.series)
            self.outbox.changed.set()
            await self.commit.durable()
        return None

    def _leave_out(self, stream: str, chunk: Chunk, arrival_ms: int) -> None:
        """States the records of a batch that is assumed to repeat an earlier one."""
        times = chunk.batch.column(TIME_COLUMN).to_numpy()
        guessed = guesses(DropReason.ASSUMED_REPETITION, times)
        left_out = replace(chunk, batch=chunk.batch.slice(0, 0), rejected=(), guessed=guessed, push=None, series=None)
        if stream in self.lookups:
            left_out = self.lookups[stream].joined(left_out)
        self.states.count(chunk.source, left_out)
        if guessed:
            rejected = left_out.rejected_records
            self.durable.ingest_payload(Ingested(stream, chunk.source, left_out.batch, arrival_ms, rejected=rejected))
            self.outbox.changed.set()

    def missing(self) -> list[str]:
        """Returns the reasons why this edge is not ready: its own, and the sources that cannot be read."""
        failures = self.reading.failures()
        return self._own_reasons() + [f"source {name}: {message}" for name, message in failures.items()]

    def _own_reasons(self) -> list[str]:
        """Returns the reasons why this edge cannot accept records."""
        reasons = self.tasks.missing()
        if self.uplink.retired.is_set():
            reasons.append(RETIRED)
        if not self.outbox.configured.is_set():
            reasons.append("queries: none received yet; the center has not been reached since this state was created")
        if self.commit.failure is not None:
            reasons.append(f"journal: {self.commit.failure}")
        return reasons


def _server(
    app: Starlette, tls: HttpTlsConfig | None, on_closed: Callable[[str], None], hands_over: bool
) -> EmbeddedServer:
    """Builds the HTTP server. Raises InvalidConfig: a file of `http.tls` cannot be used."""
    options: dict[str, Any] = {}
    if tls is not None:
        options = {"ssl_certfile": tls.cert, "ssl_keyfile": tls.key, "ssl_ca_certs": tls.client_ca}
        options["ssl_cert_reqs"] = ssl.CERT_NONE if tls.client_ca is None else ssl.CERT_REQUIRED
    config = uvicorn.Config(
        app, lifespan="off", timeout_graceful_shutdown=STOP_GRACE_S, **guarded(LIMITS, on_closed), **options
    )
    try:
        config.load()
    except OSError as exc:  # ssl.SSLError is an OSError
        accepted = "PEM files of a certificate and its key"
        raise InvalidConfig("http.tls", config.ssl_certfile, accepted, str(exc)) from exc
    return EmbeddedServer(config, drain_s=DRAIN_S if hands_over else 0.0, hands_over=hands_over)
