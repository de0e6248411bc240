"""`create_app` builds the REST API over the center's stores.

Any number of processes may serve it; none has state that another process needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection
from functools import partial
from importlib.metadata import version
from typing import Any

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import FastAPI
from starlette.types import ASGIApp, Scope

from center.api import console, pages, problems
from center.api.access import unguarded
from center.api.answer_cache import AnswerRenderer
from center.api.audit import AuditLog, AuditMiddleware
from center.api.authentication import Authenticator
from center.api.edge_progress import EdgeProgress
from center.api.lanes import Lane
from center.api.limits import PendingResponses, Rates, Slots, Turns
from center.api.live_feed import AnswerPoller, LiveFeed
from center.api.metrics import ApiMetrics, CenterCollector, MetricsMiddleware
from center.api.models import ProblemDetails
from center.api.pages import SecurityHeaders
from center.api.prometheus.series import SamplesCache
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
    quarantine,
    queries,
    rollup,
    sinks,
    sql,
    streams,
)
from center.api.services import Services
from center.api.sql_guard import SqlGuard
from center.catalog import Catalog, ComponentRegistry
from center.config import ApiSection
from center.results import ResultStore
from center.serving.answer_tables import answer_schema
from center.serving.synopsis_cache import SynopsisCache
from center.sinks import SinkStore
from center.storage.wake import Channel
from edgewater.runtime.host_check import LocalHosts
from edgewater.runtime.problems import MEDIA_TYPE
from edgewater.runtime.tasks import Tasks

DESCRIPTION = """
Streaming queries over data from many places. Every answer states its error, its completeness and its age.

1. `POST /v1/queries` registers a query.
2. `GET /v1/queries/{name}/latest`, `…/windows`, `…/at` and `…/live` return answers, as JSON, CSV or Arrow;
   `POST /v1/queries/{name}/evaluate` answers a stream of questions about windows.
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
        load,
        alarms,
        quarantine,
        sinks,
        alerts,
        health,
        pages,
        console,
        prometheus,
    )
)
COSTLY_AT_ONCE = 4
"""The largest number of costly requests in work at the same time. Other requests have other threads."""
REGISTRATIONS_AT_ONCE = 4
"""Registrations have threads of their own, so that no number of reads keeps them waiting."""
REFRESH_S = 1.0
"""Interval at which changed credentials are read."""


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
    services = _services(
        catalog, results, components, config, now_ms, monotonic, draw_seed, frozenset(sink_secrets), wakes
    )
    app = FastAPI(
        title="Edgewater",
        summary="Streaming queries whose answers state their error, completeness and age",
        description=DESCRIPTION,
        version=version("edgewater"),
        lifespan=_lifespan(services),
        docs_url=None,
        redoc_url=None,
    )
    app.state.services = services
    # The middleware that is added last is the outermost.
    problems.install(app)
    app.add_middleware(
        PendingResponses, most_bytes=config.limits.response_bytes, on_refused=services.metrics.on_refused
    )
    if not config.authenticates:
        app.add_middleware(LocalHosts, hosts=config.hosts, key="api.hosts", refuse=_misdirected(services))
    app.add_middleware(SecurityHeaders, over_tls=config.tls is not None)
    app.add_middleware(AuditMiddleware, audit=services.audit)
    app.add_middleware(MetricsMiddleware, metrics=services.metrics)
    for router in ROUTERS:
        assert not list(unguarded(router)), (
            f"{list(unguarded(router))}: each route states what it requires of its caller"
        )
        app.include_router(router)
    _describe_problems(app)
    return app


def _services(
    catalog: Catalog,
    results: ResultStore,
    components: ComponentRegistry,
    config: ApiSection,
    now_ms: Callable[[], int],
    monotonic: Callable[[], float],
    draw_seed: Callable[[], int],
    sink_secrets: frozenset[str],
    wakes: Channel | None,
) -> Services:
    metrics, limits = ApiMetrics(), config.limits
    audit = AuditLog(config.audit, now_ms, metrics.audit_failures.inc, required=config.audit_required)
    renderer = AnswerRenderer(config.cache_bytes, metrics.on_lookup, partial(answer_schema, catalog))
    progress = EdgeProgress(catalog, now_ms)
    metrics.registry.register(CenterCollector(components, results, progress, now_ms))
    tasks = Tasks()
    metrics.registry.register(tasks.failures)
    changes = AnswerPoller(results.newest_answers, tasks, wakes)
    feed = LiveFeed(results, progress, renderer, changes, config.progress_ms / 1000, monotonic)
    return Services(
        catalog,
        results,
        components,
        now_ms,
        renderer,
        progress,
        feed,
        metrics,
        SynopsisCache(config.cache_bytes),
        SamplesCache(),
        CapacityLimiter(1),
        CapacityLimiter(REGISTRATIONS_AT_ONCE),
        Lane(COSTLY_AT_ONCE),
        Authenticator(config, now_ms),
        Rates(limits, metrics.on_refused),
        Slots("live", limits.live, limits.live_per_principal, metrics.on_refused),
        Slots("evaluate", limits.evaluate, limits.evaluate_per_principal, metrics.on_refused),
        Turns(limits.reads_at_once, metrics.on_refused),
        limits,
        audit,
        draw_seed,
        SqlGuard(),
        SinkStore(results.engine),
        tasks,
        sink_secrets,
    )


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
    """Reads changed credentials, until cancelled."""
    while True:
        await asyncio.sleep(REFRESH_S)
        await run_sync(services.authenticator.refresh)
        services.metrics.credentials_stale.set(services.authenticator.problem is not None)


def _describe_problems(app: FastAPI) -> None:
    """Replaces FastAPI's validation error in the OpenAPI document by problem details."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        document = original()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.pop("HTTPValidationError", None)
        schemas.pop("ValidationError", None)
        schemas["ProblemDetails"] = ProblemDetails.model_json_schema()
        problem = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}}
        for path in document["paths"].values():
            for operation in path.values():
                described = operation["responses"]
                if "422" in described:
                    described["422"]["content"] = problem
                described["default"] = {"description": "Any other problem.", "content": problem}
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend it
