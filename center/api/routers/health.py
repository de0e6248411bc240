"""Liveness of this process and readiness of the center, for everyone; metrics, for callers that may read everything."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

from center.api.access import OPEN, READS_ALL
from center.api.models import ComponentReadiness, Readiness
from center.api.services import Center, Services
from center.catalog import COMPONENTS, component_status
from center.sinks import SinkStatus
from edgewater.base.errors import EdgewaterError, StorageError
from edgewater.model.registered_query import query_key
from edgewater.runtime.health import metrics_response

router = APIRouter(tags=["health"])


@router.get("/livez", dependencies=[OPEN], summary="Liveness of this process")
async def livez() -> dict[str, bool]:
    return {"live": True}


@router.get(
    "/readyz",
    dependencies=[OPEN],
    summary="Readiness of the center",
    response_model=Readiness,
    responses={503: {"model": Readiness, "description": "Not ready; `missing` says why."}},
)
async def readyz(request: Request, center: Center) -> Response:
    """Returns whether gateway, job and API send heartbeats, and both stores are reachable.

    Answers are served anyway.

    Queries that are set aside (`set_aside`) and failing sinks do not make the center unready, because other queries are
    answered. If credentials are required, reasons and addresses are shown to callers with the role reader on all
    queries.
    """
    readiness = await run_in_threadpool(_readiness, center)
    if not await _may_read_all(request, center):
        readiness = _without_details(readiness)
    return JSONResponse(readiness.model_dump(), 200 if readiness.ready else 503, {"Cache-Control": "no-store"})


async def _may_read_all(request: Request, center: Services) -> bool:
    try:
        principal = await center.authenticator.identify(request.headers.get("authorization"))
    except EdgewaterError:
        return False
    return principal.may("reader", None)


def _without_details(readiness: Readiness) -> Readiness:
    """Returns which components are not ready, without addresses and reasons, which may quote a database's message."""
    hidden = {"reason": None, "address": None, "leader": None}
    components = {name: c.model_copy(update=hidden) for name, c in readiness.components.items()}
    return Readiness(
        ready=readiness.ready, missing=[m.partition(":")[0] for m in readiness.missing], components=components
    )


def missing_components(center: Services) -> list[str]:
    """Returns which components are not ready, and why; blocks."""
    return _readiness(center).missing


def _readiness(center: Services) -> Readiness:
    missing, sinks = center.tasks.missing(), list[SinkStatus]()
    try:
        center.results.last_answer_id()
        sinks = center.sinks.statuses()
    except StorageError as exc:
        missing.append(f"results: {exc.message}")
    try:
        heartbeats = center.components.heartbeats()
    except StorageError as exc:
        return Readiness(ready=False, missing=[*missing, f"catalog: {exc.message}"], components={})
    if center.components.failure:
        missing.append(f"catalog: {center.components.failure}")
    now_ms = center.now_ms()
    components: dict[str, ComponentReadiness] = {}
    for component in COMPONENTS:
        status = component_status(component, heartbeats, now_ms)
        components[component] = ComponentReadiness(
            ready=status.ready,
            reason=status.reason or None,
            address=status.address or None,
            instances=status.instances,
            leader=status.leader or None,
            standbys=status.standbys,
        )
        if not status.ready:
            missing.append(f"{component}: {status.reason}")
    try:
        set_aside = {query_key(ref): q.state for ref, q in center.catalog.quarantine.queries().items()}
    except StorageError as exc:
        missing, set_aside = [*missing, f"catalog: {exc.message}"], {}
    troubles = {sink.name: reason for sink in sinks if (reason := sink.trouble(now_ms))}
    return Readiness(ready=not missing, missing=missing, components=components, set_aside=set_aside, sinks=troubles)


@router.get("/metrics", dependencies=[READS_ALL], summary="Metrics in Prometheus' text format", response_class=Response)
def metrics(center: Center) -> Response:
    return metrics_response(center.metrics.registry)
