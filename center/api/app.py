"""`create_app` builds the REST API over the center's stores.

Any number of processes may serve it; none has state that another process needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection
from importlib.metadata import version

from anyio.to_thread import run_sync
from fastapi import FastAPI
from starlette.types import ASGIApp, Scope

from center.api import console, pages, problems
from center.api.access import unguarded
from center.api.audit import AuditMiddleware
from center.api.limits import PendingResponses
from center.api.metrics import MetricsMiddleware
from center.api.openapi import describe
from center.api.pages import SecurityHeaders
from center.api.routers import (
    alarms,
    alerts,
    answers,
    edges,
    evaluate,
    explain,
    functions,
    health,
    live,
    load,
    prometheus,
    queries,
    rollup,
    sinks,
    sql,
    streams,
    tables,
)
from center.api.services import Services
from center.catalog import Catalog, ComponentRegistry
from center.config import ApiSection
from center.results import ResultStore
from center.storage.wake import Channel
from edgewater.base.errors import StorageError
from edgewater.runtime.host_check import LocalHosts

DESCRIPTION = """
Streaming queries over data from many places. Every answer states its error, its completeness and its age.

1. `POST /v1/queries` registers a query.
2. `GET /v1/queries/{name}/latest`, `…/windows`, `…/at` and `…/live` return answers, as JSON, CSV or Arrow;
   `POST /v1/queries/{name}/evaluate` answers questions about windows.
3. Every answer to a window has a phase (`early`, `complete`, `final`) and a revision; a revision never changes.

Times are accepted as RFC 3339 or unix ms and returned as RFC 3339; ranges include their start and exclude their end.
Errors are `application/problem+json` (RFC 9457) with a stable `type`.
"""

ROUTERS = tuple(
    m.router
    for m in (
        queries,
        sql,
        functions,
        answers,
        rollup,
        explain,
        evaluate,
        live,
        edges,
        streams,
        tables,
        load,
        alarms,
        sinks,
        alerts,
        health,
        pages,
        console,
        prometheus,
    )
)
REFRESH_S = 1.0  # limit: how long a revoked token counts
"""Interval at which changed credentials are read, and at which the end of an outage is looked for."""


def create_app(
    catalog: Catalog,
    results: ResultStore,
    components: ComponentRegistry,
    config: ApiSection,
    *,
    now_ms: Callable[[], int],
    monotonic: Callable[[], float] = time.monotonic,
    draw_seed: Callable[[], int] = lambda: secrets.randbits(64),
    sink_secrets: Collection[str] = (),
    wakes: Channel | None = None,
) -> FastAPI:
    """Creates the API as an ASGI application.

    Args:
        now_ms: wall clock.
        monotonic: monotonic clock in seconds, which paces live streams.
        draw_seed: draws the seed of a new query's synopses. The seed must not be predictable: with it, anybody could
            choose records that distort the synopses.
        sink_secrets: the setting `sink.secrets`.
        wakes: how drivers wake live streams; None: by polls only.
    """
    services = Services(
        catalog, results, components, config, now_ms, monotonic, draw_seed, frozenset(sink_secrets), wakes
    )
    metrics, limits = services.metrics, config.limits
    app = FastAPI(
        title="Edgewater",
        summary="Streaming queries whose answers state their error, completeness and age",
        description=DESCRIPTION,
        version=version("edgewater"),
        lifespan=_lifespan(services),
        docs_url=None,
        redoc_url=None,
        # Routes as they are: `include_router` would build each with its models once more, during the first request.
        routes=[route for router in ROUTERS for route in router.routes],
    )
    app.state.services = services
    # The middleware that is added last is the outermost.
    problems.install(app)
    app.add_middleware(PendingResponses, most_bytes=limits.response_bytes, on_refused=metrics.on_refused)
    if not config.authenticates:
        app.add_middleware(LocalHosts, hosts=config.hosts, key="api.hosts", refuse=_misdirected(services))
    app.add_middleware(SecurityHeaders, over_tls=config.tls is not None)
    app.add_middleware(AuditMiddleware, audit=services.audit)
    app.add_middleware(MetricsMiddleware, metrics=metrics)
    for router in ROUTERS:
        assert not list(unguarded(router)), (
            f"{list(unguarded(router))}: each route states what it requires of its caller"
        )
    describe(app)
    return app


def _misdirected(services: Services) -> Callable[[Scope, str], ASGIApp]:
    def refuse(scope: Scope, detail: str) -> ASGIApp:
        services.metrics.on_refused("host")
        return problems.problem_response("misdirected", detail, instance=scope["path"])

    return refuse


def _lifespan(services: Services) -> Callable[[FastAPI], contextlib.AbstractAsyncContextManager[None]]:
    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        services.tasks.start("newest-answers", services.feed.changes.run())
        services.tasks.start("credentials", _refresh(services))
        try:
            yield
        finally:
            await services.tasks.cancel()
            services.sql.close()

    return lifespan


async def _refresh(services: Services) -> None:
    """Reads changed credentials, and looks for the end of an outage, until cancelled."""
    while True:
        await asyncio.sleep(REFRESH_S)
        await run_sync(services.authenticator.refresh)
        services.metrics.credentials_stale.set(services.authenticator.problem is not None)
        if services.outage.count:
            with contextlib.suppress(StorageError):
                await run_sync(_require_stores, services)
                services.outage.end()


def _require_stores(services: Services) -> None:
    """Raises StorageError if a store cannot be used."""
    services.results.last_answer_id()
    services.components.heartbeats()
