"""`create_app` builds the REST API over the center's stores.

Any number of processes may serve it; none keeps state that another one needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import AsyncIterator, Callable
from importlib.metadata import version
from typing import Annotated, Any

from anyio import CapacityLimiter
from fastapi import Depends, FastAPI
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from center.api import problems
from center.api.answer_cache import AnswerRenderer
from center.api.edge_progress import EdgeProgress
from center.api.live_feed import AnswerPoller, LiveFeed
from center.api.metrics import ApiMetrics, CenterCollector, MetricsMiddleware
from center.api.models import ProblemDetails
from center.api.routers import alarms, answers, edges, evaluate, health, live, quarantine, queries
from center.api.services import Services
from center.catalog import Catalog, ComponentRegistry
from center.config import ApiSection
from center.results import ResultStore
from center.serving import SynopsisCache
from edgewater.errors import Unauthenticated

DESCRIPTION = """
Streaming queries over data from many places. Every answer states its error, its completeness and its age.

1. `POST /v1/queries` registers a query.
2. `GET /v1/queries/{name}/latest`, `…/windows`, `…/at` and `…/live` return answers, as JSON, CSV or Arrow;
   `POST /v1/queries/{name}/evaluate` answers a stream of questions about windows.
3. Every answer to a window has a phase (`early`, `complete`, `final`) and a revision; a revision never changes.

Times are accepted as RFC 3339 or unix ms and returned as RFC 3339; ranges include their start and exclude their end.
Errors are `application/problem+json` (RFC 9457) with a stable `type`.
"""

BEARER = HTTPBearer(auto_error=False, description="The token of `api.token` in the center's configuration.")


def create_app(
    catalog: Catalog,
    results: ResultStore,
    components: ComponentRegistry,
    config: ApiSection,
    *,
    now_ms: Callable[[], int],
    monotonic: Callable[[], float] = time.monotonic,
) -> FastAPI:
    """Creates the API as an ASGI application.

    Args:
        now_ms: wall clock.
        monotonic: monotonic clock in seconds, which paces live streams.
    """
    services = _services(catalog, results, components, config, now_ms, monotonic)
    app = FastAPI(
        title="Edgewater",
        summary="Streaming queries whose answers state their error, completeness and age",
        description=DESCRIPTION,
        version=version("edgewater"),
        lifespan=_lifespan(services),
        redoc_url=None,
    )
    app.state.services = services
    app.add_middleware(MetricsMiddleware, metrics=services.metrics)
    problems.install(app)
    guarded = [Depends(_token_guard(config))] if config.token is not None else []
    for router in (
        queries.router,
        answers.router,
        evaluate.router,
        live.router,
        edges.router,
        alarms.router,
        quarantine.router,
    ):
        app.include_router(router, dependencies=guarded)
    app.include_router(health.router)
    _describe_problems(app)
    return app


def _services(
    catalog: Catalog,
    results: ResultStore,
    components: ComponentRegistry,
    config: ApiSection,
    now_ms: Callable[[], int],
    monotonic: Callable[[], float],
) -> Services:
    metrics = ApiMetrics()
    renderer = AnswerRenderer(config.cache, metrics.on_lookup)
    progress = EdgeProgress(catalog, now_ms)
    metrics.registry.register(CenterCollector(components, results, progress, now_ms))
    feed = LiveFeed(
        results, progress, renderer, AnswerPoller(results.last_answer_id), config.progress / 1000, monotonic
    )
    return Services(
        catalog, results, components, now_ms, renderer, progress, feed, metrics, SynopsisCache(config.cache),
        CapacityLimiter(1),
    )  # fmt: skip


def _lifespan(services: Services) -> Callable[[FastAPI], contextlib.AbstractAsyncContextManager[None]]:
    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        polling = asyncio.create_task(services.feed.changes.run())
        try:
            yield
        finally:
            polling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await polling

    return lifespan


def _token_guard(config: ApiSection) -> Callable[..., None]:
    """A dependency that lets requests with the configured bearer token pass."""
    assert config.token is not None
    expected = config.token.get_secret_value().encode()

    def guard(credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(BEARER)]) -> None:
        if credentials is None or not hmac.compare_digest(credentials.credentials.encode(), expected):
            raise Unauthenticated("a bearer token is required: Authorization: Bearer <token>")

    return guard


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
        problem = {problems.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}}
        for path in document["paths"].values():
            for operation in path.values():
                described = operation["responses"]
                if "422" in described:
                    described["422"]["content"] = problem
                described["default"] = {"description": "Any other problem.", "content": problem}
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend it
